"""Builds C++ programs of tests/native beside the parts of the native core that they use, plain or under a sanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build_native(name: str, parts: tuple[str, ...], into: Path, sanitizer: str = "") -> Path:
    """tests/native/NAME.cpp with kernels/PART.cpp each; `sanitizer` as -fsanitize takes it."""
    program = into / name
    flags = ["-std=gnu++20", "-O1", "-g", "-march=x86-64-v3", "-pthread", f"-I{ROOT / 'kernels'}"]
    if sanitizer:
        flags.append(f"-fsanitize={sanitizer}")
    compiler = ["ccache", "g++"] if shutil.which("ccache") else ["g++"]
    objects = []
    for source in (ROOT / "tests" / "native" / f"{name}.cpp", *(ROOT / "kernels" / f"{part}.cpp" for part in parts)):
        objects.append(into / f"{name}-{source.stem}.o")
        subprocess.run([*compiler, *flags, "-c", str(source), "-o", str(objects[-1])], check=True, timeout=600)
    subprocess.run(["g++", *flags, *map(str, objects), "-o", str(program)], check=True, timeout=600)
    return program
