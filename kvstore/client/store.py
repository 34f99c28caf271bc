"""Stores: coded and sent in the background. Nothing is copied: the caller's memory is held until the future is done.

What nodes refuse because their cluster map is newer is placed anew, once, by the map that is had then (kvstore/client/reach.py).
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvstore.client.native import DEGRADED, DROPPED, FAILED, STORED, U8, U32
from kvstore.client.reach import Reach, Reaches
from kvstore.client.values import StoreOutcome, StoreResult
from kvstore.errors import DeadlineExceeded, KvstoreError
from kvstore.extents import ExtentSpan

log = logging.getLogger(__name__)

_OUTCOMES: Final = (
    (FAILED, StoreOutcome.FAILED),
    (DROPPED, StoreOutcome.DROPPED),
    (DEGRADED, StoreOutcome.DEGRADED),
)


class StoreFuture(Future[StoreResult]):
    """A store under way. The caller's memory is held until it is done. It cannot be cancelled: what is sent is sent."""

    def result(self, timeout: float | None = None) -> StoreResult:
        """Raises DeadlineExceeded E210 when it is not done in `timeout` seconds; the store goes on."""
        try:
            return super().result(timeout)
        except FutureTimeout:
            raise DeadlineExceeded("E210", "store", f"not done after {timeout} s", "wait longer: it goes on") from None

    def cancel(self) -> bool:
        return False


@dataclass(eq=False)
class Order:
    """One store, by whatever map its extents are placed. `keys` (n, 32) and `rows` (n, block_bytes) are those of its blocks."""

    owner: bytes
    keys: U8
    rows: U8
    spans: Sequence[ExtentSpan]
    planes: U32
    earlier: tuple[int, ...]  # starts of extents of this chain known before
    fields: dict[str, int]
    buffer: Any  # keeps the caller's memory alive
    future: StoreFuture
    declined: int = 0
    outcomes: bytearray = field(default_factory=bytearray)  # by extent that is sent
    acks: bytearray = field(default_factory=bytearray)
    runs: int = 0  # of extents, on their way
    epoch: int = 0  # it was placed by
    newer_epoch: int = 0  # that nodes named when they refused some of it
    anew: bool = False

    @property
    def block_bytes(self) -> int:
        return int(self.rows.shape[1])

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks of each extent."""
        return tuple(span.count for span in self.spans)

    def submit(self, reach: Reach, first: int, end: int) -> int:
        """Hands extents [first, end) to the native side; its number for them."""
        spans = self.spans[first:end]
        rows = slice(spans[0].start - self.spans[0].start, spans[-1].stop - self.spans[0].start)
        keys = np.ascontiguousarray(self.keys[rows])
        groups = reach.newest.pg_of(keys[[span.start - spans[0].start for span in spans]])
        earlier = np.array([*self.earlier, *(span.start for span in self.spans[:first])], np.uint32)
        return reach.core.store(
            self.owner, reach.map.epoch, write_ids(len(spans)), _spans_of(spans, groups),
            np.ascontiguousarray(reach.newest.table()[groups], np.int32), self.planes, keys, self.rows[rows], earlier, self.fields,
        )  # fmt: skip

    def result(self) -> StoreResult:
        counts = Counter(self.outcomes)
        worst = next((outcome for code, outcome in _OUTCOMES if counts[code]), StoreOutcome.STORED)
        blocks = sum(n for n, code in zip(self.counts, self.outcomes, strict=False) if code in (STORED, DEGRADED))
        stale = worst is StoreOutcome.FAILED and self.newer_epoch > self.epoch
        return StoreResult(
            outcome=StoreOutcome.STALE_MAP if stale else worst,
            blocks=blocks,
            bytes=blocks * self.block_bytes,
            extents_stored=counts[STORED] + counts[DEGRADED],
            extents_degraded=counts[DEGRADED],
            extents_failed=counts[FAILED],
            extents_dropped=counts[DROPPED],
            acks=tuple(self.acks),
            extents_declined=self.declined,
            map_epoch=self.epoch,
            node_epoch=self.newer_epoch if stale else 0,
        )


class Stores:
    """The stores of one client, and the threads that tell their futures: one for the connections by each map."""

    def __init__(self, reaches: Reaches) -> None:
        self._reaches = reaches
        self._changed = threading.Condition()
        self._sent: dict[tuple[Reach, int], tuple[Order, int, int]] = {}  # and which of its extents
        self._open = 0  # orders that are not done
        self._tellers: dict[Reach, threading.Thread] = {}

    def expect(self, change: int) -> None:
        """So many more stores, or fewer, are on their way to add(): flush() waits for them, too."""
        with self._changed:
            self._open += change
            self._changed.notify_all()

    def add(self, order: Order, extents: int) -> StoreFuture:
        """Sends the first `extents` of an order. Raises Closed, MisuseError."""
        order.outcomes, order.acks = bytearray([FAILED] * extents), bytearray(extents)
        self.expect(1)
        try:
            self._send(order, [(0, extents)])
        except BaseException:
            self.expect(-1)
            raise
        return order.future

    def flush(self, deadline_seconds: float) -> bool:
        """Waits until no store is open. False when the time passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, deadline_seconds)

    def open_count(self) -> int:
        with self._changed:
            return self._open

    def end(self) -> None:
        """After the reaches have closed: all futures are done when this returns."""
        with self._changed:
            tellers = list(self._tellers.values())
        for thread in tellers:
            if thread is not threading.current_thread():
                thread.join()

    def _send(self, order: Order, runs: Sequence[tuple[int, int]]) -> None:
        """Each run holds its reach until it is told."""
        with self._changed:  # so that the teller finds it, however fast it is done
            for first, end in runs:
                reach = self._reaches.hold()
                try:
                    number = order.submit(reach, first, end)
                except BaseException:
                    self._reaches.let_go(reach)
                    if order.runs:  # the rest has failed, as it had before
                        return
                    raise
                order.epoch = reach.map.epoch
                order.runs += 1
                self._sent[reach, number] = order, first, end
                if reach not in self._tellers:
                    self._tellers[reach] = thread = threading.Thread(target=self._tell, args=(reach,), name="kvstore-stores", daemon=True)
                    thread.start()

    def _tell(self, reach: Reach) -> None:
        while True:
            done = reach.core.wait_done(60.0)
            for number, outcomes, acks, newer in done:
                with self._changed:
                    order, first, end = self._sent.pop((reach, number))
                    order.outcomes[first:end], order.acks[first:end] = outcomes, acks
                    order.newer_epoch = max(order.newer_epoch, newer)
                    order.runs -= 1
                    last = not order.runs
                if newer > reach.map.epoch:
                    self._reaches.heard(newer)
                if last:
                    self._settle(order)
                self._reaches.let_go(reach)
                del order
            if reach.closed and not done:
                with self._changed:
                    del self._tellers[reach]
                return

    def _settle(self, order: Order) -> None:
        if FAILED in order.outcomes and order.newer_epoch > order.epoch and not order.anew:
            order.anew = True
            self._reaches.heard(order.newer_epoch, lambda reach: self._place_anew(order, reach))
        else:
            self._finish(order)

    def _place_anew(self, order: Order, reach: Reach) -> None:
        if reach.map.epoch > order.epoch:
            failed = np.flatnonzero(np.diff(np.frombuffer(order.outcomes, np.uint8) == FAILED, prepend=False, append=False))
            try:
                self._send(order, [(int(first), int(end)) for first, end in zip(failed[::2], failed[1::2], strict=True)])
                return
            except KvstoreError:
                log.debug("a store could not be placed anew", exc_info=True)  # closed meanwhile
        self._finish(order)

    def _finish(self, order: Order) -> None:
        order.future.set_result(order.result())  # callbacks run here; their faults are logged by concurrent.futures
        self.expect(-1)


def new_future() -> StoreFuture:
    future = StoreFuture()
    future.set_running_or_notify_cancel()
    return future


def nothing_to_store() -> StoreFuture:
    future = new_future()
    future.set_result(StoreResult(StoreOutcome.STORED, 0, 0, 0, 0, 0, 0, ()))
    return future


def not_sent(outcome: StoreOutcome, extents: int) -> StoreResult:
    """Of a store that never reached the native side."""
    dropped, declined = (extents, 0) if outcome is StoreOutcome.DROPPED else (0, extents)
    return StoreResult(outcome, 0, 0, 0, 0, 0, dropped, (), declined)


def write_ids(count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Random, one for each extent: two writings never share one."""
    return np.frombuffer(secrets.token_bytes(8 * count), np.uint64)


def _spans_of(spans: Sequence[ExtentSpan], groups: U32) -> U32:
    """(start block, blocks, placement group) of each extent."""
    table = np.empty((len(spans), 3), np.uint32)
    table[:, :2] = [(span.start, span.count) for span in spans]
    table[:, 2] = groups
    return table
