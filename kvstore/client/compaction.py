"""Runs of short extents that loads came upon are stored again as one, where `compact_bytes_per_second` allows it.

    look      after each load that came whole, never waits: finds the runs of its ticket
    one thread   reads a run into memory of its own, by the same ticket, and stores it; runs past QUEUE_MAX or the budget are left, and so
                 is all while the stores of others fill half of their queue

An agent's turns leave extents of a few blocks each; a prompt of them costs a message and a read for each one, until it ages out. The longer
writing starts at the run's first block, where the walk takes it, and the short ones, touched no more, are evicted in their turn. What is
stored was checked as any load is; the caller's memory is not looked at, for by now it may hold something else. Tickets of another owner,
and those that came as bytes and name no class, are left alone: what is written is this client's.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.client.load import Load
from kvstore.client.ticket import Ticket
from kvstore.client.values import Fidelity, FidelityKind

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
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # keys of a run's first and last block: under way, or stored
        self._queue: deque[tuple[Ticket, range]] = deque()
        self._changed = threading.Condition()
        self._load: Load | None = None
        self._busy = self._ended = False
        self._thread: threading.Thread | None = None

    def look(self, ticket: Ticket) -> None:
        client = self._client()
        if client is None or len(ticket.extents) < RUN_EXTENTS_MIN or ticket.owner != client.owner or ticket.retention_class == "other":
            return
        for run in short_runs(ticket, self._extent_blocks):
            self._take(ticket, run)

    def end(self) -> None:
        """What waits is left, a read under way ends short; a store under way goes on. Safe to call twice."""
        with self._changed:
            self._ended = True
            self._queue.clear()
            if self._load is not None:
                self._load.cancel()
            self._changed.notify_all()

    def settle(self, seconds: float) -> bool:
        """Waits until nothing is queued or under way. False when the time passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._busy), seconds)

    def _take(self, ticket: Ticket, run: range) -> bool:
        name, size = _name(ticket, run), len(run) * self._block_bytes
        with self._changed:
            now = self._clock()
            self._budget, self._at = min(self._burst, self._budget + (now - self._at) * self._rate), now
            if self._ended or name in self._seen or self._budget < size or len(self._queue) >= QUEUE_MAX:
                return False
            self._budget -= size
            self._seen[name] = None
            if len(self._seen) > SEEN_MAX:
                self._seen.popitem(last=False)
            self._queue.append((ticket, run))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kvstore-compaction", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._queue) or self._ended)
                if self._ended:
                    return
                ticket, run = self._queue.popleft()
                self._busy = True
            stored = False
            try:
                client = self._client()
                stored = client is not None and self._read_and_store(client, ticket, run)
            except Exception:  # a client that is being closed; a map without this class
                log.debug("a run of short extents was not stored again", exc_info=True)
            del client
            if not stored:
                with self._changed:
                    self._seen.pop(_name(ticket, run), None)

    def _read_and_store(self, client: Client, ticket: Ticket, run: range) -> bool:
        if ticket.expired(client.clock.wall_time()) or client.stats()["queued_bytes"] > client.config.queue_bytes_max / 2:
            return False
        rows = np.empty((len(run), self._block_bytes), np.uint8)
        load = client.uncounted_load(ticket, rows, run)
        with self._changed:
            self._load = load
            if self._ended:
                load.cancel()
        try:
            whole = load.finish().blocks == len(run)
        finally:
            with self._changed:
                self._load = None
        if not whole or self._ended:
            return False
        ends = ticket.extents["count"].cumsum()
        starts = ends - ticket.extents["count"]
        inside = (starts >= run.start) & (ends <= run.stop)
        extent = ticket.extents[int(inside.argmax())]
        before = sorted({int(start) for start in (starts - ticket.extents["first_block"])[starts < run.start]})
        stored = client.store_again(
            ticket.keys[: run.stop], rows, first_block=run.start, earlier=tuple(before),
            retention_class=ticket.retention_class, fidelity=Fidelity(FidelityKind(int(extent["fidelity"])), int(extent["depth"])),
        )  # fmt: skip
        if not stored.result(client.config.store_deadline_seconds).outcome.readable:
            return False
        client.counters.compacted(int(inside.sum()), rows.nbytes)
        return True


def _name(ticket: Ticket, run: range) -> bytes:
    return bytes(ticket.keys[run.start]) + bytes(ticket.keys[run.stop - 1])
