"""The store under the sanitizers, every verb at once (tests/native/store_stress.cpp): no report, and sound at the end."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("record", "index", "segments", "ghosts", "dirstate", "filter", "store")
SECONDS = "5"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_no_sanitizer_has_anything_to_report(tmp_path: Path, sanitizer: str) -> None:
    sources = [str(p) for part in PARTS for p in sorted((ROOT / "kernels").glob(f"{part}*.cpp")) if p.stem != "store_bind"]
    program = tmp_path / "stress"
    flags = ["-std=gnu++20", "-O1", "-g", f"-fsanitize={sanitizer}", "-march=x86-64-v3", "-pthread", f"-I{ROOT / 'kernels'}"]
    stress = str(ROOT / "tests" / "native" / "store_stress.cpp")
    subprocess.run(["g++", *flags, stress, *sorted(set(sources)), "-llmdb", "-o", str(program)], check=True, timeout=600)
    ran = subprocess.run([str(program), str(tmp_path / "data"), SECONDS, "1"], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr[-4000:]
