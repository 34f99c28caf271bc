"""Runs of short extents that loads came upon are stored again as one, where `compact_bytes_per_second` allows it.

    look      after each whole load, never waits: finds the runs of its ticket
    one thread   reads a run into memory of its own, by the same ticket, and stores it; runs past QUEUE_MAX or the budget are left

An agent's turns leave extents of a few blocks each; a prompt of them costs a message and a read for each one, until it ages out. The longer
writing starts at the run's first block, where the walk takes it, and the short ones, touched no more, are evicted in their turn. What is
stored was checked as any load is; the caller's memory is not looked at, for by now it may hold something else.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.client.load import Load
from kvstore.client.ticket import Ticket
from kvstore.client.values import Fidelity, FidelityKind, StoreOutcome
from kvstore.errors import KvstoreError

if TYPE_CHECKING:
    from kvstore.client.client import Client

log = logging.getLogger(__name__)

RUN_EXTENTS_MIN: Final = 8
QUEUE_MAX: Final = 16  # runs that wait
SEEN_MAX: Final = 4096  # runs that are not stored again
BURST_SECONDS: Final = 10.0


def short_runs(ticket: Ticket, blocks_per_extent_max: int) -> Iterator[range]:
    """Block ranges of at least RUN_EXTENTS_MIN neighbouring extents of one fidelity that fit into one, each an eighth of it at most."""
    limit = max(1, blocks_per_extent_max // RUN_EXTENTS_MIN)
    begin = end = count = 0
    kind: tuple[int, int] | None = None
    for blocks, fidelity, depth in zip(*(ticket.extents[name].tolist() for name in ("count", "fidelity", "depth")), strict=True):
        joins = blocks <= limit and kind == (fidelity, depth) and end + blocks - begin <= blocks_per_extent_max
        if not joins:
            if count >= RUN_EXTENTS_MIN:
                yield range(begin, end)
            begin, count, kind = end, 0, (fidelity, depth) if blocks <= limit else None
        end += blocks
        count += blocks <= limit
    if count >= RUN_EXTENTS_MIN:
        yield range(begin, end)


class Compaction:
    """Of one client; `clock` is monotonic. `end()` before the core is closed."""

    def __init__(self, client: Client, bytes_per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = weakref.ref(client)
        self._rate = bytes_per_second
        self._extent_blocks = client.layout.blocks_per_extent_max
        self._block_bytes = client.layout.block_bytes
        self._clock = clock
        self._burst = max(BURST_SECONDS * bytes_per_second, float(self._extent_blocks * self._block_bytes))
        self._budget, self._at = self._burst, clock()
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # key of a run's first block
        self._lock = threading.Lock()
        self._waiting = 0
        self._load: Load | None = None
        self._ended = False
        self._thread = ThreadPoolExecutor(1, "kvstore-compaction")  # begins with the first run

    def look(self, ticket: Ticket) -> None:
        if len(ticket.extents) < RUN_EXTENTS_MIN:
            return
        for run in short_runs(ticket, self._extent_blocks):
            if self._take(ticket.keys[run.start].tobytes(), len(run) * self._block_bytes):
                self._thread.submit(self._compact, ticket, run)

    def end(self) -> None:
        """What waits is left, a read under way ends short; a store under way goes on. Safe to call twice."""
        with self._lock:
            self._ended = True
            if self._load is not None:
                self._load.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _take(self, name: bytes, size: int) -> bool:
        with self._lock:
            now = self._clock()
            self._budget, self._at = min(self._burst, self._budget + (now - self._at) * self._rate), now
            if self._ended or name in self._seen or self._budget < size or self._waiting >= QUEUE_MAX:
                return False
            self._budget -= size
            self._waiting += 1
            self._seen[name] = None
            if len(self._seen) > SEEN_MAX:
                self._seen.popitem(last=False)
            return True

    def _compact(self, ticket: Ticket, run: range) -> None:
        try:
            if client := self._client():
                self._read_and_store(client, ticket, run)
        except KvstoreError:  # closed, or a map without this class
            log.debug("a run of short extents was not stored again", exc_info=True)
        finally:
            with self._lock:
                self._waiting -= 1

    def _read_and_store(self, client: Client, ticket: Ticket, run: range) -> None:
        if ticket.expired(client.clock.wall_time()):
            return
        rows = np.empty((len(run), self._block_bytes), np.uint8)
        load = client.uncounted_load(ticket, rows, run)
        with self._lock:
            self._load = load
            if self._ended:
                load.cancel()
        try:
            whole = load.finish().blocks == len(run)
        finally:
            with self._lock:
                self._load = None
        if not whole or self._ended:
            return
        first = int(np.searchsorted(ticket.extents["count"].cumsum(), run.start, side="right"))
        last = int(np.searchsorted(ticket.extents["count"].cumsum(), run.stop))
        extent = ticket.extents[first]
        fidelity = Fidelity(FidelityKind(int(extent["fidelity"])), int(extent["depth"]))
        keys = ticket.keys[: run.stop]
        stored = client.store(keys, rows, first_block=run.start, retention_class=ticket.retention_class, fidelity=fidelity)
        outcome = stored.result(client.config.store_deadline_seconds).outcome
        if outcome in (StoreOutcome.STORED, StoreOutcome.DEGRADED):
            client.counters.compacted(last + 1 - first, rows.nbytes)
