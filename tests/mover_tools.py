"""A mover of host RAM that is as strict as those of devices."""

from __future__ import annotations

from typing import Any

from kvstore.client.movers.cpu import CpuMover
from kvstore.client.movers.interface import Event, held_in
from kvstore.errors import Unreachable


class Given(CpuMover):
    """As one that moves from memory it was given alone; tells what it begins."""

    def __init__(self, pages: Any) -> None:
        super().__init__(pages)
        self.memories: list[Any] = []
        self.fails = False
        self.begun: list[tuple[int, slice]] = []

    def adopt(self, memory: Any) -> None:
        self.memories.append(memory)

    def _way(self, rows, places, to_device):  # type: ignore[no-untyped-def]  # as the one it stands for
        held_in(self.memories, rows, self.row_bytes)
        way = super()._way(rows, places, to_device)
        start = way.start

        def told(columns: slice, end: float) -> Event:
            if self.fails:
                raise Unreachable("E221", "gpu", "fell off the bus")
            self.begun.append((len(rows), columns))
            return start(columns, end)

        way.start = told
        return way
