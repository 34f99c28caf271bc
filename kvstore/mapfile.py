"""The cluster map's file of a process that goes on when a new epoch is written there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

from kvstore.clustermap import ClusterMap

LOOK_SECONDS: Final = 1.0  # between two looks whether the file is another


class MapFile:
    """`request` from a signal handler; the others on one thread."""

    def __init__(self, path: Path, *, seen: bool = True) -> None:
        """`seen`: the file as it is now is known. Else the first `changed` says yes."""
        self.path = path
        self._mark = self._look() if seen else ()
        self._asked = threading.Event()

    def request(self) -> None:
        """The next `changed` says yes."""
        self._asked.set()

    def changed(self) -> bool:
        """Is the file another than when it was last looked at?"""
        mark, asked = self._look(), self._asked.is_set()
        self._asked.clear()
        other = mark != self._mark and bool(mark)
        self._mark = mark or self._mark
        return other or asked

    def newer(self, current: ClusterMap) -> ClusterMap | None:
        """The file's map where it has a newer epoch, or says other addresses. Raises ConfigError: it is none, or no successor."""
        found = ClusterMap.load(self.path)
        if found.epoch < current.epoch or found == current:
            return None
        current.check_successor(found)
        return found

    def _look(self) -> tuple[int, ...]:
        try:
            stat = self.path.stat()
        except OSError:
            return ()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
