"""Stores: coded and sent in the background. Nothing is copied: the caller's memory is held until the future is done."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvstore.client.native import DEGRADED, DROPPED, FAILED, STORED, U8
from kvstore.client.values import StoreOutcome, StoreResult
from kvstore.errors import DeadlineExceeded
from kvstore.kernels import _native

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


@dataclass(frozen=True)
class _Open:
    future: StoreFuture
    buffer: Any  # keeps the caller's memory alive
    block_counts: tuple[int, ...]
    block_bytes: int
    declined: int


class Stores:
    """The stores of one client, and the thread that tells their futures."""

    def __init__(self, core: _native.ClientCore) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._over = False
        self._expected = 0

    def expect(self, change: int) -> None:
        """So many more stores, or fewer, are on their way to add(): flush() waits for them, too."""
        with self._changed:
            self._expected += change
            self._changed.notify_all()

    def add(
        self,
        submit: Any,
        buffer: Any,
        block_counts: Sequence[int],
        block_bytes: int,
        *,
        future: StoreFuture | None = None,
        declined: int = 0,
    ) -> StoreFuture:
        """`submit()` hands the store to the native side and returns its number. `declined`: extents that were left out of it."""
        future = future or new_future()
        with self._lock:  # so that the teller finds it, however fast it is done
            number = submit()
            self._open[number] = _Open(future, buffer, tuple(block_counts), block_bytes, declined)
            if self._thread is None:
                self._thread = threading.Thread(target=self._tell, name="kvstore-stores", daemon=True)
                self._thread.start()
        return future

    def flush(self, deadline_seconds: float) -> bool:
        """Waits until no store is open. False when the time passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open and not self._expected, deadline_seconds)

    def open_count(self) -> int:
        with self._lock:
            return len(self._open) + self._expected

    def end(self) -> None:
        """After the core has closed: all futures are done when this returns."""
        with self._lock:
            self._over = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _tell(self) -> None:
        while True:
            done = self._core.wait_done(60.0)
            for number, outcomes, acks in done:
                with self._lock:
                    one = self._open.pop(number)
                one.future.set_result(_result(one, outcomes, acks))  # callbacks run here; their faults are logged by concurrent.futures
                del one
            with self._changed:
                self._changed.notify_all()
                if self._over and not done:
                    return


def _result(one: _Open, outcomes: bytes, acks: bytes) -> StoreResult:
    counts = Counter(outcomes)
    worst = next((outcome for code, outcome in _OUTCOMES if counts[code]), StoreOutcome.STORED)
    blocks = sum(n for n, code in zip(one.block_counts, outcomes, strict=True) if code in (STORED, DEGRADED))
    return StoreResult(
        outcome=worst,
        blocks=blocks,
        bytes=blocks * one.block_bytes,
        extents_stored=counts[STORED] + counts[DEGRADED],
        extents_degraded=counts[DEGRADED],
        extents_failed=counts[FAILED],
        extents_dropped=counts[DROPPED],
        acks=tuple(acks),
        extents_declined=one.declined,
    )


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


def spans_of(spans: Sequence[tuple[int, int]], groups: U8 | Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """(start block, blocks, placement group) of each extent."""
    table = np.empty((len(spans), 3), np.uint32)
    table[:, :2] = spans
    table[:, 2] = groups
    return table
