"""How loaded rows come into the engine's pages: by the mover that its configuration names (kvstore/client/movers), source by source.

Loads go into memory that the mover was given at the start; where that is full, into other memory, from which a plain copy brings them. A
mover that fails costs its time: the rows are still in host RAM, and are copied.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.client.agent.arena import Arena
from kvstore.client.movers.choose import AUTO, make_mover, pick
from kvstore.client.movers.interface import MoveOutcome, Mover
from kvstore.engine_integration.model.pages import Pages
from kvstore.engine_integration.model.state import Bytes, RequestState
from kvstore.errors import KvstoreError, Unreachable
from kvstore.layout import Layout, Section

MOVE_SECONDS: Final = 1.0  # of one source's rows: far more than the slowest mover needs
log = logging.getLogger(__name__)


class Landing:
    """Of one engine. Safe to share between its threads."""

    def __init__(self, pages: Pages, mover: str, stage_bytes: int) -> None:
        """`mover`: a name of kvstore/client/movers/choose.py. Raises ConfigError E156, E157, Unreachable where the mover cannot be had."""
        if mover == AUTO:
            picked = pick(AUTO, layout=Layout((Section("block", pages.codes.shape[1]),)))
            log.info("mover %s: %s", picked.name, picked.why)
            mover = picked.name
        self.mover: Mover = make_mover(mover, pages.codes)
        self.faults = 0
        self._lock = threading.Lock()
        self._memory: Bytes | None = None
        self._arena = Arena(0)
        self._taken: dict[int, int] = {}  # address of rows -> their place in the arena
        if self.mover.name != "cpu":
            row_bytes = pages.codes.shape[1]
            self._memory = self.mover.host_rows(max(1, stage_bytes // row_bytes)).reshape(-1)
            self._arena = Arena(self._memory.nbytes)

    def rows(self, blocks: int, row_bytes: int) -> Bytes:
        """Memory for a load: (blocks, row bytes)."""
        size = blocks * row_bytes
        if self._memory is not None and size and (place := self._arena.take(size)) is not None:
            taken = self._memory[place : place + size].reshape(blocks, row_bytes)
            with self._lock:
                self._taken[taken.ctypes.data] = place
            return taken
        return np.empty((blocks, row_bytes), np.uint8)

    def give(self, rows: Bytes) -> Bytes:
        """The load is over: these rows, or a copy of them where their memory serves another load from now on."""
        with self._lock:
            place = self._taken.pop(rows.ctypes.data, None)
        if place is None:
            return rows
        kept = rows.copy()
        self._arena.give(place)
        return kept

    def land(self, state: RequestState, source: int, rows: Bytes) -> None:
        """Brings one source's rows to their pages, decoded. Raises Unreachable E221 where a device holds on to the pages."""
        staged = self._memory is not None and self._is_staged(rows)
        state.import_source(source, rows, (lambda *place: self._move(state, *place)) if staged else None)

    def _is_staged(self, rows: Bytes) -> bool:
        with self._lock:
            return rows.ctypes.data in self._taken

    def _move(self, state: RequestState, rows: Bytes, table: npt.NDArray[np.int64], columns: slice) -> bool:
        """Whether they are there. False: they can be copied."""
        fault = "took too long"
        try:
            with self.mover.move(rows, table, [columns], deadline_seconds=MOVE_SECONDS) as move:
                for _ in move:
                    pass
        except KvstoreError as error:
            fault = error.cause
        else:
            if move.outcome is MoveOutcome.COMPLETE:
                return True
        if move.lost:
            state.abandon()
            raise Unreachable("E221", f"mover {self.mover.name}", "does not let go of pages", "restart the engine; look at dmesg")
        self.faults += 1
        if self.faults == 1:
            log.warning("mover %s: %s; rows are copied instead", self.mover.name, fault)
        return False

    def close(self) -> None:
        """After the last load."""
        self.mover.close()
