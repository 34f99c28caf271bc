"""What is worth writing: a store asks the nodes first, where the cluster map says so (`admit`, `write_budget`).

    add       any thread, never waits: the store is put in a queue
    one thread   asks all nodes of each extent (ADMIT), many stores at a time; the majority decides; hands on what is to be written

Nodes alone would decide apart: one that has restarted, or written more than its neighbours, would refuse a shard that they take, and what
has fewer than ten shards is withdrawn again: wear for nothing. So a node only votes, and the writer, who sees all twelve votes before it
has sent a byte, decides once for all of them. A node that does not answer has no vote; where nobody answers, it is written.

Of a run of extents the leading ones that won are written: what lies behind a hole in a prompt is worth nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.client.counters import Counters
from kvstore.client.native import I32, SILENT, U8
from kvstore.client.planner import by_node
from kvstore.client.reach import Reach, Reaches
from kvstore.client.store import Order, Stores, not_sent
from kvstore.client.values import StoreOutcome
from kvstore.wire import KEYS_MAX, Verb, Vote, encode_admit

log = logging.getLogger(__name__)

ASK_SECONDS: Final = 0.5
BATCH_MAX: Final = 64  # stores asked for at once


@dataclass(frozen=True, slots=True)
class Candidate:
    """One store that waits for its votes. `keys` (n, 32) and `nodes` (n, k+m; -1: none) of its extents."""

    keys: U8
    nodes: I32
    bucket: int
    order: Order

    @property
    def bytes(self) -> int:
        return self.order.rows.nbytes


class Admission:
    """Of one client."""

    def __init__(self, reaches: Reaches, stores: Stores, owner: bytes, counters: Counters, queue_bytes_max: int) -> None:
        self._reaches = reaches
        self._stores = stores
        self._owner = owner
        self._counters = counters
        self._bytes_max = queue_bytes_max
        self._bytes = 0
        self._queue: deque[Candidate] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._thread: threading.Thread | None = None

    def add(self, one: Candidate) -> None:
        """Past `queue_bytes_max` the oldest that wait are dropped, as those behind them in the native queue are."""
        dropped = []
        self._stores.expect(1)
        with self._changed:
            self._queue.append(one)
            self._bytes += one.bytes
            while self._queue and (self._bytes > self._bytes_max or self._ended):
                dropped.append(self._queue.popleft())
                self._bytes -= dropped[-1].bytes
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._run, name="kvstore-admission", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        self._drop(dropped)

    def end(self) -> None:
        """What still waits is dropped. Safe to call twice."""
        with self._changed:
            self._ended = True
            left = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        self._drop(left)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * ASK_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._ended)
                if self._ended:
                    return
                batch = [self._queue.popleft() for _ in range(min(BATCH_MAX, len(self._queue)))]
                self._bytes -= sum(one.bytes for one in batch)
            try:
                admitted = self._votes(batch)
            except Exception:  # a client that is being closed
                log.debug("asking for votes failed", exc_info=True)
                self._drop(batch)
                continue
            for one, count in zip(batch, admitted, strict=True):
                self._hand_on(one, count)

    def _hand_on(self, one: Candidate, count: int) -> None:
        declined = one.order.counts[count:]
        if declined:
            self._counters.declined(len(declined), sum(declined) * one.order.block_bytes)
        if count == 0 and declined:
            self._stores.expect(-1)
            one.order.future.set_result(not_sent(StoreOutcome.DECLINED, len(declined)))
            return
        try:
            one.order.declined = len(declined)
            self._stores.add(one.order, count)
        except Exception:
            self._drop([one])
            return
        self._stores.expect(-1)

    def _drop(self, candidates: list[Candidate]) -> None:
        for one in candidates:
            self._counters.unasked(one.bytes)
            self._stores.expect(-1)
            one.order.future.set_result(not_sent(StoreOutcome.DROPPED, len(one.order.spans)))

    def _votes(self, batch: list[Candidate]) -> list[int]:
        """For each store how many of its extents, from the first on, are to be written."""
        keys = np.concatenate([one.keys for one in batch])
        nodes = np.concatenate([one.nodes for one in batch])
        with self._reaches.using() as reach:
            return self._voted(reach, batch, keys, nodes)

    def _voted(self, reach: Reach, batch: list[Candidate], keys: U8, nodes: I32) -> list[int]:
        answering = np.append(reach.core.health() < SILENT, False)  # -1, no node, is the last
        frames = by_node(nodes, np.unique(nodes[answering[nodes]]).tolist(), KEYS_MAX)
        bucket = max(one.bucket for one in batch)
        requests = [(node, int(Verb.ADMIT), encode_admit(keys[some].tobytes(), owner=self._owner, bucket=bucket)) for node, some in frames]
        balance = np.zeros(len(keys), np.int64)
        for (_, some), (status, body) in zip(frames, reach.core.call_many(requests, ASK_SECONDS), strict=True):
            if status == 0 and len(body) == 4 * len(some):
                no = np.isin(np.frombuffer(body, "<u4"), (Vote.UNSEEN, Vote.BUDGET))
                balance[some] += np.where(no, -1, 1)
        won = balance >= 0
        admitted, at = [], 0
        for one in batch:
            mine = won[at : at + len(one.keys)]
            admitted.append(len(mine) if mine.all() else int(mine.argmin()))
            at += len(one.keys)
        return admitted
