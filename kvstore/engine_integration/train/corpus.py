"""What is trained on: the standard library's sources, pinned file by file, and a held-out slice that is never seen.

corpus.txt     "SHA-256  path", sorted by path; training refuses a library that differs in a single file
heldout.txt    the files of the library whose sum begins with HELDOUT_PREFIXES, up to 200 kB, back to back; not in corpus.txt
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.engine_integration.model.tokenizer import SPECIAL_IDS
from kvstore.errors import InputError

MANIFEST: Final = Path(__file__).with_name("corpus.txt")
HELDOUT: Final = Path(__file__).with_name("heldout.txt")
HELDOUT_BYTES_MAX: Final = 200_000
HELDOUT_PREFIXES: Final = ("0", "7")  # an eighth of the files, until the slice is full
DEBIAN: Final = Path("/usr/lib/python3.11")  # Debian 12's own interpreter: the library that is pinned
LEFT_OUT: Final = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "encodings"}  # encodings: one table a hundred times


def library() -> Path:
    return DEBIAN if DEBIAN.is_dir() else Path(sysconfig.get_paths()["stdlib"])


def files_of(root: Path) -> dict[str, str]:
    """Path below `root` -> SHA-256, of all sources but tests and what is made for one machine."""
    paths = [p for p in root.rglob("*.py") if not LEFT_OUT & set(p.relative_to(root).parts) and not p.name.startswith("_sysconfigdata")]
    return {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(paths) if not p.is_symlink()}


def split(root: Path, files: dict[str, str]) -> tuple[dict[str, str], bytes]:
    """Files to train on, and the held-out text: in order of their sums, so that the choice follows from the contents alone."""
    kept, text = dict(files), b""
    for path, digest in sorted(files.items(), key=lambda item: item[1]):
        raw = (root / path).read_bytes()
        if digest.startswith(HELDOUT_PREFIXES) and len(raw) >= 2_000 and len(text) + len(raw) <= HELDOUT_BYTES_MAX:
            text += raw
            del kept[path]
    return kept, text


def pin(root: Path) -> tuple[str, bytes]:
    """Contents of corpus.txt and heldout.txt for the library at `root`."""
    kept, text = split(root, files_of(root))
    return "".join(f"{digest}  {path}\n" for path, digest in sorted(kept.items())), text


def tokens(root: Path | None = None, manifest: Path = MANIFEST) -> npt.NDArray[np.uint16]:
    """The whole training text, each file between the specials begin and end. InputError where the library is not the pinned one."""
    root = root or library()
    parts: list[npt.NDArray[np.uint16]] = []
    wrong = []
    for line in manifest.read_text().splitlines():
        digest, path = line.split("  ", 1)
        raw = (root / path).read_bytes() if (root / path).is_file() else b""
        if hashlib.sha256(raw).hexdigest() != digest:
            wrong.append(path)
        parts += [np.array([SPECIAL_IDS["begin"]], np.uint16), np.frombuffer(raw, np.uint8).astype(np.uint16)]
        parts += [np.array([SPECIAL_IDS["end"]], np.uint16)]
    if wrong:
        what, cause = f"corpus {root}", f"{len(wrong)} files are not those of {manifest.name}, the first {wrong[0]}"
        raise InputError("E172", what, cause, "name the pinned library with --corpus, or pin this one with `pin`")
    return np.concatenate(parts)
