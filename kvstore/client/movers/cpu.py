"""Pages in host RAM: a plain copy, by the thread that asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.client.movers.interface import DoneEvent, Event, Mover, runs_of
from kvstore.client.native import U8
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class CpuMover(Mover):
    name = "cpu"

    def __init__(self, pages: Tensor | U8) -> None:
        super().__init__(pages)
        if self.device != "cpu":
            raise ConfigError("E156", "mover cpu", f"pages are on {self.device}", "use mover cuda")
        self._pages: U8 = pages if isinstance(pages, np.ndarray) else pages.numpy()

    def _way(self, rows: U8, places: np.ndarray[Any, np.dtype[np.int64]], to_device: bool) -> _Copy:
        return _Copy(self._pages, rows, places, to_device)


class _Copy:
    def __init__(self, pages: U8, rows: U8, places: np.ndarray[Any, np.dtype[np.int64]], to_device: bool) -> None:
        self._pages, self._rows, self._places, self._to_device = pages, rows, places, to_device
        self._runs = runs_of(places)
        self._long = len(places) >= 4 * len(self._runs)

    def start(self, columns: slice, end: float) -> Event:
        if not self._long:
            if self._to_device:
                self._pages[self._places, columns] = self._rows[:, columns]
            else:
                self._rows[:, columns] = self._pages[self._places, columns]
            return DoneEvent()
        for row, page, count in self._runs:
            mine, theirs = self._rows[row : row + count, columns], self._pages[page : page + count, columns]
            if self._to_device:
                theirs[:] = mine
            else:
                mine[:] = theirs
        return DoneEvent()

    def settle(self, seconds: float) -> bool:
        return True
