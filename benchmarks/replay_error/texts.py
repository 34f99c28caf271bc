"""Texts the model was not trained on, of two kinds: code and prose, as tokens.

Code is train/heldout.txt. Prose is the licence texts that every Debian has, in full sentences: nothing to install, and none of them is in
the corpus. It is prose of one sort, and the model has seen English only in comments: read it as text far from the training.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.engine_integration.train.corpus import HELDOUT

LICENCES: Final = Path("/usr/share/common-licenses")
PROSE_FILES: Final = ("GPL-3", "MPL-2.0", "LGPL-2.1", "GFDL-1.3", "Apache-2.0", "Artistic", "GPL-2", "CC0-1.0")


@dataclass(frozen=True)
class Text:
    kind: str
    raw: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()[:16]

    def passage(self, number: int, tokens: int) -> list[int]:
        """Passages 0, 1, ... do not overlap until the text is used up; then they begin elsewhere."""
        places = max(1, (len(self.raw) - tokens) // tokens)
        order = np.random.default_rng(len(self.raw)).permutation(places)
        start = (int(order[number % places]) * tokens + number // places * (tokens // 3 + 17)) % max(1, len(self.raw) - tokens)
        found = self.raw[start : start + tokens]
        if len(found) < tokens:
            raise ValueError(f"{self.kind}: {len(self.raw)} bytes are too few for a passage of {tokens}")
        return list(found)


def texts(prose: Path | None = None) -> dict[str, Text]:
    """By kind. `prose`: a file of it instead of the licences; where there is neither, code alone."""
    found = {"code": Text("code", HELDOUT.read_bytes())}
    paths = [prose] if prose else [path for name in PROSE_FILES if (path := LICENCES / name).is_file()]
    if paths:
        found["prose"] = Text("prose", b"\n".join(path.read_bytes() for path in paths))
    return found
