"""What a node remembers over a restart about what it no longer has: DIR/dropped, text, a line each.

    born 1764460800            since when this directory holds data; 0: since before that was written down
    chat 1764461880            by class: something last used as late as this was dropped for room

From it follows what is promised of the rest: every use later than a class's time is still here. Unlike the age of the oldest survivor that
holds under any replacement policy, whatever owners are assured of, and after a restart. Times are of the clock that buckets are of.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

FILE: Final = "dropped"
BORN: Final = "born"


class Dropped:
    """`note` on one thread at a time; it writes when what it remembers changes: about once a bucket, so a kill costs one batch at most."""

    def __init__(self, directory: Path, born: float) -> None:
        """`born` counts where nothing is written down yet. A file that is damaged or cannot be written costs the memory alone."""
        self._path = directory / FILE
        self.until: dict[str, float] = {}
        self.born = born
        try:
            lines = [line.split() for line in self._path.read_text().splitlines()]
            until = {name: float(seconds) for name, seconds in lines}
            self.born = until.pop(BORN)
            self.until = until
        except FileNotFoundError:
            self._save()
        except (OSError, ValueError, KeyError):
            self.born = 0.0
            self._save()

    def note(self, retention_class: str, used_until: float) -> None:
        if used_until > self.until.get(retention_class, 0.0):
            self.until[retention_class] = used_until
            self._save()

    def _save(self) -> None:
        fresh = self._path.with_name(f"{FILE}.new")
        with contextlib.suppress(OSError):
            fresh.write_text("".join(f"{name} {seconds:.0f}\n" for name, seconds in ((BORN, self.born), *self.until.items())))
            fresh.replace(self._path)
