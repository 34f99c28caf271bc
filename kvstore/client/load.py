"""Loads: what a ticket promises, into the caller's memory. The work is native (kernels/client_load.hpp); here are limits and answers."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Generator
from typing import Any, Literal

import numpy as np

from kvstore.client.native import I32, U8, U32, names_of
from kvstore.client.reach import Reaches
from kvstore.client.ticket import Ticket
from kvstore.client.tracing import I64s
from kvstore.client.values import LoadOutcome, LoadResult, PlaneReady
from kvstore.errors import MisuseError
from kvstore.placement import nodes_of_writings

Hedge = Literal["lazy", "eager"]


class Load:
    """One load under way. `finish` (or `planes` to its end) gives the memory back; until then nothing else may use it.

    `planes` (n, 3): of each, offset in the block, bytes, bytes of a shard.
    """

    def __init__(
        self,
        reaches: Reaches,
        planes: U32,
        ticket: Ticket,
        blocks: range,
        rows: U8,
        hedge: Hedge,
        by_plane: bool,
        deadline_seconds: float,
    ) -> None:
        reach = reaches.hold()
        self._let_go = weakref.finalize(self, reaches.let_go, reach)  # called by _end; else when nobody has it any more
        self._let_go.atexit = False
        self.span: Any = None  # of a trace (kvstore/client/tracing.py); whoever began this ends it
        self._pid = os.getpid()
        self._started = time.monotonic()
        self._deadline = self._started + deadline_seconds
        self._rows = rows
        self._wanted = len(blocks)
        self._planes = len(planes)
        self._block_bytes = rows.shape[1]
        self._result: LoadResult | None = None
        self._cancelled = False
        spans, which = spans_of(ticket, blocks)
        extents = ticket.extents[which]
        self.counts: list[int] = spans[:, 1].tolist()  # blocks of each extent
        extent_keys = np.ascontiguousarray(extents["extent_key"])
        self._native = reach.core.load(
            ticket.owner,
            ticket.epoch,
            names_of(extent_keys, extents["write_id"]),
            spans,
            nodes_of_writings(reach.placements, extent_keys, extents["write_epoch"]),
            np.ascontiguousarray(extents["absent"]),
            planes,
            np.ascontiguousarray(ticket.keys[blocks.start : blocks.stop]),
            rows,
            hedge == "eager",
            by_plane,
        )

    def finish(self) -> LoadResult:
        """Waits for the rest, or the deadline, and ends the load. The same answer each time."""
        if self._result is None:
            self._check_process()
            done = self._native.wait_all(self._deadline - time.monotonic())
            self._end(done)
        assert self._result is not None
        return self._result

    def planes(self) -> Generator[PlaneReady, None, None]:
        """Planes in order, each when it is whole. Ends the load, also when the iterator is closed early."""
        try:
            done = True
            for plane in range(self._planes):
                self._check_process()
                done = self._native.wait_plane(plane, self._deadline - time.monotonic()) and not self._cancelled
                blocks = self._native.rows_of_plane(plane)
                if not done or blocks == 0:
                    break
                yield PlaneReady(plane, blocks)
            if self._result is None:
                self._check_process()
                self._end(done)
        finally:
            if self._result is None and os.getpid() == self._pid:
                self.cancel()
                self._end(False)

    def times(self) -> I64s:
        """(extents, planes, 4): first bytes, all checked, decoding from, to; nanoseconds of CLOCK_MONOTONIC, 0: it did not happen."""
        found: I64s = self._native.times().reshape(len(self.counts), self._planes, 4)
        return found

    def cancel(self) -> None:
        """Any thread: the waiter returns with what is there."""
        self._check_process()
        self._cancelled = True
        self._native.cancel()

    def _check_process(self) -> None:
        """A forked child has none of the threads: whatever it waited for would never come."""
        if os.getpid() != self._pid:
            raise MisuseError("E561", "load", "used in a forked process", "end it in the process that began it")

    def _end(self, done: bool) -> None:
        self._native.end()
        self._let_go()
        rows = self._native.rows()
        stats = self._native.stats()
        self._result = LoadResult(
            outcome=self._outcome(rows, done, stats),
            blocks=rows,
            bytes=rows * self._block_bytes,
            seconds=time.monotonic() - self._started,
            decoded=stats["decodes"],
            late12=stats["late_asked"],
            bad_shards=stats["bad_shards"],
            missing_shards=stats["missing_shards"],
            lagging_shards=stats["lagging_shards"],
            shards_asked=stats["shards_asked"],
        )

    def _outcome(self, rows: int, done: bool, stats: dict[str, int]) -> LoadOutcome:
        if rows == self._wanted:
            return LoadOutcome.COMPLETE
        if self._cancelled:
            return LoadOutcome.CANCELLED
        if not done:
            return LoadOutcome.TIMEOUT
        if stats["bad_shards"] or stats["digest_mismatches"]:
            return LoadOutcome.CORRUPT
        return LoadOutcome.UNREACHABLE if stats["failed_shards"] else LoadOutcome.MISSING


class BegunLoads:
    """The loads of one call, which another thread begins: told to end, also when they begin only afterwards."""

    def __init__(self) -> None:
        self.loads: list[Load] = []
        self._gave_up = threading.Event()

    def began(self, load: Load) -> None:
        self.loads.append(load)
        if self._gave_up.is_set():
            load.cancel()

    def cancel(self) -> None:
        self._gave_up.set()
        for load in self.loads:
            load.cancel()


def checked_blocks(ticket: Ticket, blocks: range | None) -> range:
    """The range to load, inside the ticket's hit."""
    if blocks is None:
        return range(ticket.hit_blocks)
    if blocks.step != 1 or blocks.start < 0 or (len(blocks) and blocks.stop > ticket.hit_blocks):
        raise MisuseError("E564", f"blocks {blocks}", f"the ticket has {ticket.hit_blocks} blocks", "pass a range with step 1 inside them")
    return blocks


def spans_of(ticket: Ticket, blocks: range) -> tuple[U32, I32]:
    """(first block in the extent, blocks, row of the destination) of each extent that the range touches, and which extents they are."""
    spans: list[tuple[int, int, int]] = []
    which: list[int] = []
    begin = 0
    for number, (first, count) in enumerate(zip(ticket.extents["first_block"].tolist(), ticket.extents["count"].tolist(), strict=True)):
        low, high = max(begin, blocks.start), min(begin + count, blocks.stop)
        if low < high:
            spans.append((first + low - begin, high - low, low - blocks.start))
            which.append(number)
        begin += count
    return np.array(spans, np.uint32).reshape(-1, 3), np.array(which, np.int32)
