"""Generates the Python files of every .proto under kvstore/, beside it; --check only compares.

Generated files are committed so that installing needs no protoc; this keeps them equal to their source.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(proto: Path, into: Path) -> list[Path]:
    """Runs protoc on one file with the repository as its root, so that imports inside generated code are absolute."""
    outs = [f"--{kind}={into}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *outs, str(proto)], check=True)
    stem = proto.relative_to(ROOT).with_suffix("")
    return [into / f"{stem}{suffix}" for suffix in SUFFIXES]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if a committed file differs from what its .proto gives")
    check = parser.parse_args().check
    stale = []
    for proto in sorted((ROOT / "kvstore").rglob("*.proto")):
        with tempfile.TemporaryDirectory() as scratch:
            for made in generate(proto, Path(scratch)):
                kept = ROOT / made.relative_to(scratch)
                if kept.exists() and kept.read_bytes() == made.read_bytes():
                    continue
                stale.append(kept.relative_to(ROOT))
                if not check:
                    kept.write_bytes(made.read_bytes())
    for name in stale:
        print(f"{'differs from its .proto' if check else 'written'}: {name}", file=sys.stderr)
    if check and stale:
        print("Fix: .venv/bin/python scripts/protobuf.py", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
