"""Builds C++ of tests/native: programs beside the parts of the native core that they use, plain or under a sanitizer, and libraries that
stand for those of drivers that are not here."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

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


def build_stub(name: str, into: Path, library: str) -> Path:
    """tests/native/NAME.cpp as the shared library `library`. NVIDIA's header comes with triton, which is not imported for it."""
    triton = find_spec("triton")
    header = Path(str(triton.origin)).parent / "backends/nvidia/include" if triton is not None else Path()
    if "cuda" in name and not (header / "cuda.h").exists():
        pytest.skip("triton, which has NVIDIA's header, is not installed")
    flags = ["-std=gnu++20", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{header}", f"-Wl,-soname,{library}"]
    source = ROOT / "tests" / "native" / f"{name}.cpp"
    subprocess.run(["g++", *flags, str(source), "-o", str(into / library)], check=True, timeout=600)
    return into / library
