"""Accounts of lookups: each, once, split into hit and reasons (reasons.py), counted, and written to the access log.

    add(account)   any thread, never waits: what the lookup knows is put in a queue
    one thread     asks two nodes of each missing key what they remember (WHY), a batch of lookups at a time; counts; logs

Nothing waits for it: a lookup has been answered by then. A queue that is full, or a client that closes, leaves lookups counted with what is
known without asking (`unexplained`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvstore.client.access_log import AccessLog
from kvstore.client.counters import Counters
from kvstore.client.lookup import Hit
from kvstore.client.native import GHOST, I32, U8
from kvstore.client.planner import by_node
from kvstore.client.reach import Reach, Reaches
from kvstore.client.reasons import Ghost, I64s, Limits, Miss, Split, split
from kvstore.placement import lists_by_epoch
from kvstore.wire import WHY_KEYS_MAX, Verb, encode_why

log = logging.getLogger(__name__)

QUEUE_MAX: Final = 4096  # lookups waiting
QUEUE_KEYS_MAX: Final = 2_500_000  # of all of them: 80 MB
BATCH_MAX: Final = 64
KEYS_AT_ONCE: Final = 1 << 12  # asked in one round: a node answers its half in half a millisecond
LINGER_SECONDS: Final = 0.05  # one batch for the lookups of so long
ASK_SECONDS: Final = 2.0
WORK_SECONDS: Final = 0.5e-3  # of settling in one go: who wants the interpreter meanwhile gets it after 5 ms, two lookups' time
REST_SECONDS: Final = 50e-6  # long enough for a thread that waits for the interpreter to wake up and take it
NODES_ASKED: Final = 2  # about each key: a node that was down while it happened remembers nothing


@dataclass(slots=True)
class Account:
    """What one lookup knows of itself. `keys` (n, 32) is not copied: the caller leaves it as it is."""

    unix_ms: int
    retention_class: str
    keys: U8
    limits: Limits
    hit: Hit
    window_missing: bool
    bucket: int
    lookup_seconds: float
    ghosts: list[Ghost] = field(default_factory=list)

    def missing(self) -> I64s:
        """Blocks whose reason only the ghost index can tell."""
        blocks = self.limits.blocks
        if self.hit.blocks >= blocks:
            return np.empty(0, np.int64)
        open_blocks = np.ones(blocks, bool)
        open_blocks[: self.hit.blocks] = False
        for gap in self.hit.gaps:
            if gap.why is None or gap.why is Miss.FIDELITY:
                open_blocks[gap.start : gap.end] = False
        return np.flatnonzero(open_blocks)


class Accounts:
    """Of one client. `close()` before the core is closed."""

    def __init__(
        self,
        reaches: Reaches,
        owner: bytes,
        bucket_seconds: int,
        counters: Counters,
        access_log: AccessLog | None,
    ) -> None:
        self._reaches = reaches
        self._owner = owner
        self._bucket_seconds = bucket_seconds
        self._counters = counters
        self._log = access_log
        self._queue: deque[Account] = deque()
        self._queue_keys = 0
        self._changed = threading.Condition()
        self._busy = self._stopping = False
        self._hurry = 0  # who waits in flush()
        self._thread: threading.Thread | None = None

    def add(self, account: Account) -> None:
        with self._changed:
            if self._stopping:
                return
            if len(self._queue) < QUEUE_MAX and self._queue_keys + len(account.keys) <= QUEUE_KEYS_MAX:
                self._queue.append(account)
                self._queue_keys += len(account.keys)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="kvstore-accounts", daemon=True)
                    self._thread.start()
                elif len(self._queue) == 1:
                    self._changed.notify_all()
                return
        self._counters.unexplained(1)
        self._settle([account])

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until all that was added is counted, and logged in a file. False when time passed first."""
        with self._changed:
            self._hurry += 1
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_seconds)
            self._hurry -= 1
        if done and self._log is not None:
            self._log.roll()
        return done

    def close(self, timeout_seconds: float) -> None:
        """Counts what waits, without asking when time is short; closes the log."""
        self.flush(timeout_seconds)
        with self._changed:
            self._stopping = True
            left = list(self._queue)
            self._queue.clear()
            self._queue_keys = 0
            self._changed.notify_all()
        if left:
            self._counters.unexplained(len(left))
            self._settle(left)
        if self._thread is not None:
            self._thread.join(ASK_SECONDS + 1)
        if self._log is not None:
            self._log.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                due = self._log.due_seconds() if self._log is not None else None
                self._changed.wait_for(lambda: bool(self._queue) or self._stopping, due)
                if self._stopping:
                    return
                self._changed.wait_for(lambda: bool(self._hurry) or self._stopping or len(self._queue) >= BATCH_MAX, LINGER_SECONDS)
                batch = [self._queue.popleft() for _ in range(min(BATCH_MAX, len(self._queue)))]
                self._queue_keys -= sum(len(account.keys) for account in batch)
                self._busy = bool(batch)
            try:
                if batch:
                    self._ask(batch)
            except Exception:  # a client that is being closed, or a bug: the lookups are counted all the same
                log.debug("asking for reasons failed", exc_info=True)
                self._counters.unexplained(len(batch))
            self._settle(batch, resting=True)
            if self._log is not None and self._log.due_seconds() == 0:
                self._log.roll()

    def _rest(self) -> None:
        """Leaves the interpreter to lookups. Coming back takes 5 ms beside each thread that computes: not where somebody waits."""
        if not (self._stopping or self._hurry or len(self._queue) >= BATCH_MAX):
            time.sleep(REST_SECONDS)

    def _settle(self, batch: list[Account], *, resting: bool = False) -> None:
        began = time.monotonic()
        for account in batch:
            try:
                parts = self._split(account)
                self._counters.accounted(account.retention_class, parts.missed, parts.ages, parts.age_token_seconds)
                if self._log is not None:
                    self._log.append(account.unix_ms, account.retention_class, parts, account.lookup_seconds, account.keys)
            except Exception:
                log.exception("a lookup could not be accounted for")
            if resting and time.monotonic() - began > WORK_SECONDS:
                self._rest()
                began = time.monotonic()

    def _split(self, account: Account) -> Split:
        hit, step = account.hit, self._bucket_seconds
        ages = [
            (end, float(max(0, account.bucket - last) * step) if last else 0.0)
            for end, last in zip(hit.ends, hit.last_buckets, strict=True)
        ]
        return split(
            account.keys, account.limits, hit.blocks, account.window_missing, ages, hit.gaps,
            account.ghosts, not hit.complete, account.bucket, step,
        )  # fmt: skip

    def _ask(self, batch: list[Account]) -> None:
        missing = [account.missing() for account in batch]
        whose = np.repeat(np.arange(len(batch)), [len(blocks) for blocks in missing])
        if not len(whose):
            return
        blocks = np.concatenate(missing)
        keys = np.concatenate([account.keys[wanted] for account, wanted in zip(batch, missing, strict=True)])
        for at in range(0, len(keys), KEYS_AT_ONCE):
            part = slice(at, at + KEYS_AT_ONCE)
            with self._reaches.using() as reach:
                self._ask_some(reach, batch, whose[part], blocks[part], keys[part])

    def _ask_some(self, reach: Reach, batch: list[Account], whose: I64s, blocks: I64s, keys: U8) -> None:
        """All of it in arrays: what runs here takes the interpreter from lookups that somebody waits for."""
        lists = _nodes(reach, keys)
        self._rest()
        frames = by_node(lists, np.unique(lists).tolist(), WHY_KEYS_MAX)
        requests = [(node, int(Verb.WHY), encode_why(keys[mine].tobytes(), owner=self._owner)) for node, mine in frames]
        answers = reach.core.call_many(requests, ASK_SECONDS)  # lets go of the interpreter
        for (_, mine), (status, answer) in zip(frames, answers, strict=True):
            if status != 0 or len(answer) < 8 or (len(answer) - 8) % GHOST.itemsize:
                continue
            for row in np.frombuffer(answer, GHOST, offset=8):
                if row["ordinal"] < len(mine) and 0 < row["blocks"] <= GHOST["tags"].itemsize:
                    index = mine[row["ordinal"]]
                    tags = row["tags"][: row["blocks"]].tobytes()
                    batch[whose[index]].ghosts.append(Ghost(int(blocks[index]), int(row["reason"]), int(row["last_bucket"]), tags))


def _nodes(reach: Reach, keys: U8) -> I32:
    """(n, any) nodes to ask: in each epoch NODES_ASKED of each key's list, the same few for as many keys and epochs as possible, others
    in every batch."""
    health = reach.core.health().astype(np.int64)
    rank = health * len(health) + np.random.permutation(len(health))
    lists = lists_by_epoch(reach.placements, keys)
    asked = min(NODES_ASKED, lists.shape[2])
    best = np.take_along_axis(lists, np.argpartition(rank[lists], asked - 1, axis=2)[:, :, :asked], axis=2)
    return np.ascontiguousarray(best.swapaxes(0, 1).reshape(len(keys), -1))
