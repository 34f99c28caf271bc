"""Lookup: discovery, walk, promise. The longest prefix that can be read, promised by its nodes for a while.

    1. discovery   each key to one node of its list, few nodes in all; what fails or is late is asked elsewhere at once
    2. walk        interval cover (kernels/walk.hpp); where it stops, a "no" is checked with two other nodes, and so are the starts of
                   earlier extents that some writing names and nobody has told us of
    3. promise     every extent on the walk, at all nodes of its list, with a touch; k shards of one writing make it a hit. What has fewer
                   is dropped and the walk is done again

Rounds end at the deadline; what is not known by then is a miss.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvstore.client.config import ClientConfig
from kvstore.client.native import DOWN, FOUND, I32, NAME, PIECE, PROMISE_PIN, PROMISE_TOUCH, SILENT, U8, U32, Flags, Records
from kvstore.client.planner import Planner
from kvstore.client.promises import Promises
from kvstore.client.reach import Reach
from kvstore.client.reasons import Gap, Miss
from kvstore.client.ticket import EXTENT
from kvstore.client.tracing import Interval
from kvstore.client.values import Accept, FidelityKind
from kvstore.kernels import _native

EXTENT_BLOCKS_MAX: Final = 64
_EXACT: Final = int(FidelityKind.EXACT)
OTHERS_ASKED: Final = 2  # beside the first: three nodes agree on a "no" before the walk believes it


@dataclass
class Hit:
    """What was found: `extents` as they stand in a ticket, in order; `ends` and `last_buckets` are theirs."""

    extents: Records = field(default_factory=lambda: np.empty(0, EXTENT))
    ends: list[int] = field(default_factory=list)  # in blocks of the chain
    starts: list[int] = field(default_factory=list)  # of the extents of this chain, as far as they are known
    complete: bool = True  # False: the deadline passed before all was known
    last_buckets: list[int] = field(default_factory=list)  # time bucket of the last use before this one; 0: not known
    gaps: list[Gap] = field(default_factory=list)  # what is there beyond the hit, and cannot be used

    @property
    def blocks(self) -> int:
        return self.ends[-1] if self.ends else 0


class Lookup:
    """One lookup of one client. `run` may block until the deadline; it holds no lock."""

    def __init__(
        self,
        reach: Reach,
        config: ClientConfig,
        promises: Promises,
        readable: _native.ClientReadable,
        owner: bytes,
        accept: Accept,
        class_id: int,
        bucket: int,
        now: float,
    ) -> None:
        self._core = reach.core
        self._placements = reach.placements
        self._newest = reach.map.epoch
        self._config = config
        self._promises = promises
        self._readable = readable
        self._owner = owner
        self._accept = accept
        self._class_id = class_id
        self._bucket = bucket
        self._now = now
        self._epochs = np.array(list(reach.placements), np.uint64)
        self.intervals: list[Interval] = []  # what it did when, for a trace
        # Writings are named by their row of what was found: rows stay what they are.
        self._refused: set[int] = set()  # too few shards
        self._late: set[int] = set()  # of them, those whose nodes had no time to answer
        self._promised: dict[int, tuple[int, int]] = {}  # shards that are not there, time bucket of the last use before
        self._some_down = False  # when it began: such nodes were not asked

    def run(self, keys: U8, deadline: float) -> Hit:
        """`deadline` on time.monotonic()."""
        began = time.monotonic_ns()
        if time.monotonic() >= deadline:  # answers that came by luck would make the outcome depend on the scheduler
            return Hit(complete=False)
        health = self._core.health()
        self._some_down = bool((health == DOWN).any())
        plan = Planner(self._placements, keys, health)
        call = self._core.discover(self._owner, self._newest, keys, self._readable)
        call.ask(*plan.first(), True)
        complete = self._settle(call, plan, deadline)
        self.intervals.append(("kvstore.discover", began, time.monotonic_ns()))
        checked = np.zeros(len(keys), bool)
        while True:
            found: Records = call.found().view(FOUND)
            pieces, starts = call.walk(len(found), self._epochs, self._unusable(found))  # late answers add rows at any time
            walk: Records = pieces.view(PIECE)
            reach = int(walk["end"][-1]) if len(walk) else 0
            if reach < len(keys) and time.monotonic() < deadline:
                doubtful = self._doubtful(call, starts, reach, checked)
                if len(doubtful):
                    checked[doubtful] = True
                    began = time.monotonic_ns()
                    complete &= self._check(call, plan, doubtful, deadline)
                    self.intervals.append(("kvstore.discover", began, time.monotonic_ns()))
                    continue
            rows = walk["row"].tolist()
            short = self._promise(plan, call, found, rows, deadline)
            if not short:
                break
            self._refused.update(short)
            if time.monotonic() >= deadline:  # no time for another walk: what holds before the first gap is the hit
                self._late.update(short)
                walk, complete = walk[: next(at for at, row in enumerate(rows) if row in self._refused)], False
                break
        promised = [self._promised[row] for row in walk["row"].tolist()]
        ends = walk["end"].tolist()
        extents: Records = call.extents(walk.view(np.uint8), np.array([absent for absent, _ in promised], np.uint64)).view(EXTENT)
        gaps = self._gaps(found, ends[-1] if ends else 0, len(keys))
        return Hit(extents, ends, call.starts().tolist(), complete, [last for _, last in promised], gaps)

    def _gaps(self, found: Records, reach: int, blocks: int) -> list[Gap]:
        """What was found beyond the hit, and why it is of no use."""
        if reach >= blocks:
            return []
        ends = found["start"] + found["match"]
        return [
            Gap(int(found["start"][row]), int(ends[row]), self._useless(found[row], row)) for row in np.flatnonzero(ends > reach).tolist()
        ]

    def _useless(self, writing: Records, row: int) -> Miss | None:
        if row in self._late:
            return Miss.DEADLINE
        if row in self._refused or int(writing["write_epoch"]) not in self._placements:
            return Miss.LOST_SHARDS
        return None if self._accept.takes(int(writing["fidelity"]), int(writing["depth"])) else Miss.FIDELITY

    def _unusable(self, found: Records) -> U32:
        """Rows that the walk leaves out."""
        odd = found["fidelity"] != _EXACT  # what is exact everybody takes
        rows = list(self._refused)
        if odd.any():
            rows += [
                row for row in np.flatnonzero(odd).tolist() if not self._accept.takes(int(found["fidelity"][row]), int(found["depth"][row]))
            ]
        return np.array(rows, np.uint32)

    # --- discovery ---

    def _settle(self, call: _native.ClientDiscover, plan: Planner, deadline: float) -> bool:
        """Waits until every key has the answers it wants. False when some never came."""
        while True:
            left = deadline - time.monotonic()
            delay = self._core.discover_delay_seconds
            done = call.wait(min(left, delay))
            failed = call.take_failed()
            if len(failed):
                call.ask(*plan.elsewhere(np.unique(failed), 1), False)
                continue
            if done or left <= 0:
                return len(call.unsettled()) == 0
            late = call.owing(delay)
            self._core.mark_late(late)
            plan.avoid(late)
            indices, nodes = plan.elsewhere(call.unsettled(), 1)
            call.ask(indices, nodes, False)
            if not len(indices):  # all were asked: there is nothing left but to wait
                call.wait(deadline - time.monotonic())

    def _check(self, call: _native.ClientDiscover, plan: Planner, doubtful: I32, deadline: float) -> bool:
        call.ask(*plan.elsewhere(doubtful, OTHERS_ASKED), True)
        return self._settle(call, plan, deadline)

    def _doubtful(self, call: _native.ClientDiscover, starts: U32, reach: int, checked: Flags) -> I32:
        """Keys whose "no" decides where the walk stops, and that were not checked yet. `starts`: of what the walk chose from."""
        known = np.zeros(len(checked), bool)
        known[starts] = True
        doubt = np.zeros(len(checked), bool)
        doubt[max(0, reach - EXTENT_BLOCKS_MAX + 1) : reach + 1] = True
        doubt[call.earlier()] = True  # in front of a writing that was found
        if checked.any() and (checked & known).any():
            doubt[reach:] = True  # one node's "no" was wrong once: none is believed from here on
        return np.flatnonzero(doubt & ~known & ~checked).astype(np.int32)

    # --- promise ---

    def _promise(self, plan: Planner, call: _native.ClientDiscover, found: Records, rows: list[int], deadline: float) -> list[int]:
        """Promises and touches what is not promised yet. The rows that have too few shards; none: all of them hold."""
        rows = [row for row in rows if row not in self._promised]
        joined = call.names(np.array(rows, np.uint32)).tobytes()
        names = [joined[at : at + NAME.itemsize] for at in range(0, len(joined), NAME.itemsize)]
        kept = self._promises.get(names, self._bucket, self._class_id, self._now)
        if kept:
            self._promised.update((row, (kept[name], self._bucket)) for row, name in zip(rows, names, strict=True) if name in kept)
            rows = [row for row in rows if row not in self._promised]
            names = [name for name in names if name not in kept]
        if not rows:
            return []
        in_frames = np.frombuffer(b"".join(names), np.uint8).reshape(-1, NAME.itemsize)
        nodes = plan.nodes_of(found["start"][rows], found["write_epoch"][rows].tolist())
        promise = self._core.promise(
            self._owner, self._newest, self._bucket, PROMISE_PIN | PROMISE_TOUCH, self._class_id, self._config.promise_seconds,
            in_frames, nodes, self._readable.k,
        )  # fmt: skip
        began = time.monotonic_ns()
        self._await_promises(promise, deadline)
        self.intervals.append(("kvstore.promise", began, time.monotonic_ns()))
        masks, answered, last = promise.masks().tolist(), promise.answered().tolist(), promise.last_buckets().tolist()
        short, held = [], {}
        for row, name, mask, done, before in zip(rows, names, masks, answered, last, strict=True):
            if mask.bit_count() < self._readable.k:
                short.append(row)
                continue
            held[name] = done & ~mask
            self._promised[row] = held[name], before
        self._promises.put(held, self._bucket, self._class_id, self._now)
        if short and self._some_down:
            # A node that was down a moment ago may be back, and now it decides: not asking it would be a miss that need not be.
            self._some_down = False
            self._core.retry_down()
            return self._promise(plan, call, found, short, deadline)
        return short

    def _await_promises(self, call: _native.ClientPromise, deadline: float) -> None:
        """Until all have k shards, or nobody owes an answer but nodes that have been silent for long."""
        delay = self._core.promise_delay_seconds
        while not call.wait(min(deadline - time.monotonic(), delay)) and time.monotonic() < deadline:
            owing = call.owing(delay)
            self._core.mark_late(owing)
            if len(owing) and all(self._core.health()[owing] >= SILENT):
                return
            delay = max(delay, 0.02)
