"""The window directory under the sanitizers (tests/native/directory_stress.cpp): right and wrong bodies; counts that agree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = "60000"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_no_sanitizer_has_anything_to_report(tmp_path: Path, sanitizer: str) -> None:
    sources = [str(ROOT / "kernels" / f"directory{part}.cpp") for part in ("", "_agents", "_table")]
    program = tmp_path / "stress"
    flags = ["-std=gnu++20", "-O1", "-g", f"-fsanitize={sanitizer}", "-march=x86-64-v3", "-pthread", f"-I{ROOT / 'kernels'}"]
    stress = str(ROOT / "tests" / "native" / "directory_stress.cpp")
    subprocess.run(["g++", *flags, stress, *sources, "-lsodium", "-o", str(program)], check=True, timeout=600)
    for seed in ("1", "2"):
        ran = subprocess.run([str(program), ROUNDS, seed], capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0 and ran.stderr == "", ran.stderr[-4000:]
