"""The evictor of one node: one thread that decides what goes; the native store deletes it, and frees the bytes at its own pace.

Verbs of the store, in order: wait_pressure (sleeps until there is something to do), queues, peek, evict. A batch is deleted in one short
transaction in which last use is read again, so what was touched or promised meanwhile stays. Reads never wait for any of it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from kvstore.gc.policy import EvictionPolicy, Usage
from kvstore.gc.replacement import Queue, Replacement, Row, View, class_of, replacement
from kvstore.wire import Gone

_BATCH_ROWS: Final = 256
_PEEK_ROWS: Final = 64
_NICE: Final = 12  # as kernels/priority.hpp
_BACKOFF_SECONDS: Final = (0.05, 2.0)  # nothing could go (all is promised): first and longest pause

OnEvicted = Callable[[str, str, Sequence[int], Sequence[float]], None]
log = logging.getLogger(__name__)


class EvictableStore(Protocol):
    """What the evictor needs of _native.Store."""

    def wait_started(self, timeout_seconds: float) -> bool: ...
    def bucket_now(self) -> int: ...
    def usage(self) -> tuple[int, int, int, int, float]: ...
    def queues(self) -> list[Queue]: ...
    def peek(self, queue: int, owner: bytes, limit: int, after: bytes = b"") -> list[tuple[int, bytes, int]]: ...
    def evict(self, rows: list[bytes], reason: int) -> list[tuple[int, int, int, int]]: ...
    def set_pressure_at(self, bytes: int) -> None: ...
    def set_second_chance(self, on: bool) -> None: ...
    def wait_pressure(self, timeout_seconds: float) -> int: ...
    def poke(self) -> None: ...


class Evictor:
    """`on_evicted(class name, "lru" | "share" | "quota" | "expired", sizes in bytes, ages in seconds)` is called for each batch, on this
    thread."""

    def __init__(self, store: EvictableStore, policy: EvictionPolicy, on_evicted: OnEvicted | None = None) -> None:
        self._store = store
        self.policy = policy
        self._replacement: Replacement = replacement(policy.replacement)
        store.set_second_chance(self._replacement.second_chance)
        self._on_evicted = on_evicted
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        capacity = store.usage()[2]
        if capacity:
            store.set_pressure_at(policy.high_bytes(capacity))

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="evictor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; a batch under way is finished first."""
        self._stopping.set()
        self._store.poke()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # as native threads that tidy up: behind those that read
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        pause = _BACKOFF_SECONDS[0]
        while not self._stopping.is_set() and not self._store.wait_started(1.0):
            pass  # before the start scan is over, only a part of the queues is known
        while not self._stopping.is_set():
            wanted = self._store.wait_pressure(self.policy.expiry_interval_seconds)
            if self._stopping.is_set():
                return
            try:
                stuck = self.step(wanted) == 0 and wanted > 0
            except Exception:
                log.exception("eviction failed; trying again")
                stuck = True
            pause = min(pause * 2, _BACKOFF_SECONDS[1]) if stuck else _BACKOFF_SECONDS[0]
            if stuck:
                self._stopping.wait(pause)

    def step(self, wanted_bytes: int = 0) -> int:
        """One round: what has expired, what is over its owner's cap, then what space demands. Returns the bytes deleted."""
        policy, store = self.policy, self._store
        bucket_now = store.bucket_now()
        queues = store.queues()
        owner_bytes: dict[bytes, int] = {}
        for _, owner, _, used_bytes in queues:
            owner_bytes[owner] = owner_bytes.get(owner, 0) + used_bytes
        freed = self._expire(queues, bucket_now, owner_bytes)
        for owner, used_bytes in list(owner_bytes.items()):
            cap = policy.limits(owner).cap_bytes
            if cap is not None and used_bytes > cap:
                own = [queue for queue in queues if queue[1] == owner]
                freed += self._drop(self._in_order(own, bucket_now), used_bytes - cap, "quota", owner_bytes, floors=False)
        usage = Usage(*store.usage())
        need = policy.bytes_to_free(usage, wanted_bytes)
        return freed + (self._make_room(need, usage.capacity_bytes, bucket_now, owner_bytes) if need > 0 else 0)

    def _make_room(self, need_bytes: int, capacity_bytes: int, bucket_now: int, owner_bytes: dict[bytes, int]) -> int:
        """What promises nothing, then what classes hold past their share, each from its oldest on; then as the replacement policy says."""
        policy, freed = self.policy, 0
        queues = self._store.queues()
        class_bytes: dict[int, int] = {}
        for number, _, _, used_bytes in queues:
            class_bytes[class_of(number)] = class_bytes.get(class_of(number), 0) + used_bytes
        over = policy.over_share(class_bytes, capacity_bytes) if capacity_bytes else []
        if over:
            unpromised = [queue for queue in queues if not policy.retention_seconds.get(class_of(queue[0]))]
            expired = itertools.takewhile(lambda row: not row[0][0], self._in_order(unpromised, bucket_now))
            freed += self._drop(expired, need_bytes, "lru", owner_bytes, floors=True)
        for retention_class, over_bytes in over:
            own = self._in_order([queue for queue in queues if class_of(queue[0]) == retention_class], bucket_now)
            freed += self._drop(own, min(over_bytes, need_bytes - freed), "share", owner_bytes, floors=True)
        view = View(queues, lambda some: self._in_order(some, bucket_now), bucket_now, capacity_bytes)
        return freed + self._drop(self._replacement.ordered(view), need_bytes - freed, "lru", owner_bytes, floors=True)

    def _expire(self, queues: list[Queue], bucket_now: int, owner_bytes: dict[bytes, int]) -> int:
        freed = 0
        for number, owner, _, _ in queues:
            if not self.policy.retention_seconds.get(class_of(number)):
                continue  # promised nothing: goes first, but only when room is needed
            live_from = self.policy.live_from(class_of(number), bucket_now)
            after = b""
            while not self._stopping.is_set():
                rows = [row for bucket, row, _ in self._store.peek(number, owner, _BATCH_ROWS, after) if bucket < live_from]
                if not rows:
                    break
                freed += self._evict(rows, "expired", owner_bytes)
                after = rows[-1]
        return freed

    def _in_order(self, queues: list[Queue], bucket_now: int) -> Iterator[Row]:
        """Rows of all queues in the total order: (rank, row, bytes). Each queue is sorted already, so their heads are merged."""
        return heapq.merge(*(self._queue(number, owner, bucket_now) for number, owner, _, _ in queues))

    def _queue(self, number: int, owner: bytes, bucket_now: int) -> Iterator[Row]:
        live_from = self.policy.live_from(class_of(number), bucket_now)
        after = b""
        while rows := self._store.peek(number, owner, _PEEK_ROWS, after):
            for _, row, size_bytes in rows:
                yield self.policy.rank(row, live_from), row, size_bytes
            after = rows[-1][1]

    def _drop(
        self,
        ordered: Iterator[Row],
        need_bytes: int,
        reason: str,
        owner_bytes: dict[bytes, int],
        *,
        floors: bool,
    ) -> int:
        """Deletes in order until `need_bytes` are gone. With `floors`, owners are left what they are assured of."""
        freed, batch, batch_bytes = 0, list[bytes](), 0
        planned = dict(owner_bytes)
        while freed < need_bytes and not self._stopping.is_set():
            for _, row, size_bytes in ordered:
                owner = row[1:17]
                if floors and planned.get(owner, 0) - size_bytes < self.policy.limits(owner).floor_bytes:
                    continue
                planned[owner] = planned.get(owner, 0) - size_bytes
                batch.append(row)
                batch_bytes += size_bytes
                if len(batch) >= _BATCH_ROWS or freed + batch_bytes >= need_bytes:
                    break
            if not batch:
                break
            freed += self._evict(batch, reason, owner_bytes)
            planned = dict(owner_bytes)  # what was skipped is still there
            batch, batch_bytes = [], 0
        return freed

    def _evict(self, rows: list[bytes], reason: str, owner_bytes: dict[bytes, int]) -> int:
        gone = self._store.evict(rows, Gone.EXPIRED if reason == "expired" else Gone.EVICTED)
        by_class: dict[int, tuple[list[int], list[float]]] = {}
        for at, retention_class, size_bytes, age_seconds in gone:
            sizes, ages = by_class.setdefault(retention_class, ([], []))
            sizes.append(size_bytes)
            ages.append(float(age_seconds))
            owner_bytes[rows[at][1:17]] -= size_bytes
        if self._on_evicted is not None:
            for retention_class, (sizes, ages) in by_class.items():
                self._on_evicted(self.policy.class_names.get(retention_class, "other"), reason, sizes, ages)
        return sum(size_bytes for _, _, size_bytes, _ in gone)
