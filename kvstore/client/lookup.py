"""Lookup: discovery, walk, promise. The longest prefix that can be read, promised by its nodes for a while.

    1. discovery   each key to one node of its list, few nodes in all; what fails or is late is asked elsewhere at once
    2. walk        interval cover (walk.py); where it stops, a "no" is checked with two other nodes, and so are the starts of earlier
                   extents that some writing names and nobody has told us of
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
from kvstore.client.native import DOWN, FOUND, I32, PROMISE_PIN, PROMISE_TOUCH, SILENT, U8, Flags, Records, names_of
from kvstore.client.planner import Planner
from kvstore.client.promises import Promises
from kvstore.client.reach import Reach
from kvstore.client.reasons import Gap, Miss
from kvstore.client.tracing import Interval
from kvstore.client.values import Accept
from kvstore.client.walk import Candidate, Piece, cover
from kvstore.kernels import _native
from kvstore.placement import nodes_of_writings

EXTENT_BLOCKS_MAX: Final = 64
OTHERS_ASKED: Final = 2  # beside the first: three nodes agree on a "no" before the walk believes it


@dataclass(frozen=True)
class Wanted:
    """What a writing must be to be read by this client: the bytes of one layout, in one code."""

    layout_tag: int
    block_bytes: int
    plane_count: int
    k: int
    m: int
    kv_group: int = 0


@dataclass
class Hit:
    """What was found: pieces, the rows of `found` they come from, and for each the shards that its nodes do not have."""

    pieces: list[Piece]
    found: Records
    absent: list[int]
    starts: list[int] = field(default_factory=list)  # of the extents of this chain, as far as they are known
    complete: bool = True  # False: the deadline passed before all was known
    last_buckets: list[int] = field(default_factory=list)  # by piece: time bucket of its last use before this one; 0: not known
    gaps: list[Gap] = field(default_factory=list)  # what is there beyond the hit, and cannot be used


class Lookup:
    """One lookup of one client. `run` may block until the deadline; it holds no lock."""

    def __init__(
        self,
        reach: Reach,
        config: ClientConfig,
        promises: Promises,
        wanted: Wanted,
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
        self._wanted = wanted
        self._owner = owner
        self._accept = accept
        self._class_id = class_id
        self._bucket = bucket
        self._now = now
        self.intervals: list[Interval] = []  # what it did when, for a trace
        self._refused: set[tuple[int, int]] = set()  # (start, write id) with too few shards
        self._late: set[tuple[int, int]] = set()  # of them, those whose nodes had no time to answer
        self._some_down = False  # when it began: such nodes were not asked
        self._absent: dict[tuple[int, int], int] = {}  # promised in this lookup: shards that are not there
        self._last: dict[tuple[int, int], int] = {}  # and the time bucket of its last use before

    def run(self, keys: U8, deadline: float) -> Hit:
        """`deadline` on time.monotonic()."""
        began = time.monotonic_ns()
        if time.monotonic() >= deadline:  # answers that came by luck would make the outcome depend on the scheduler
            return Hit([], np.empty(0, FOUND), [], complete=False)
        health = self._core.health()
        self._some_down = bool((health == DOWN).any())
        plan = Planner(self._placements, keys, health)
        call = self._core.discover(self._owner, self._newest, keys)
        call.ask(*plan.first(), True)
        complete = self._settle(call, plan, deadline)
        self.intervals.append(("kvstore.discover", began, time.monotonic_ns()))
        checked = np.zeros(len(keys), bool)
        while True:
            found = self._usable(call)
            candidates = self._candidates(found)
            pieces = cover(candidates)
            reach = pieces[-1].end if pieces else 0
            if reach < len(keys) and time.monotonic() < deadline:
                doubtful = self._doubtful(call, found, candidates, reach, checked)
                if len(doubtful):
                    checked[doubtful] = True
                    began = time.monotonic_ns()
                    complete &= self._check(call, plan, doubtful, deadline)
                    self.intervals.append(("kvstore.discover", began, time.monotonic_ns()))
                    continue
            short = self._promise(keys, found, pieces, deadline)
            if not short:
                break
            self._refused.update(short)
            if time.monotonic() >= deadline:  # no time for another walk: what holds before the first gap is the hit
                self._late.update(short)
                ids = found["write_id"].tolist()
                gap = next(at for at, piece in enumerate(pieces) if (piece.candidate.start, ids[piece.candidate.row]) in self._refused)
                pieces, complete = pieces[:gap], False
                break
        names = [(piece.candidate.start, int(found["write_id"][piece.candidate.row])) for piece in pieces]
        absent, last = [self._absent[name] for name in names], [self._last[name] for name in names]
        reach = pieces[-1].end if pieces else 0
        gaps = self._gaps(found, reach) if reach < len(keys) else []
        return Hit(pieces, found, absent, self._known_starts(found, call), complete, last, gaps)

    def _gaps(self, found: Records, reach: int) -> list[Gap]:
        """What was found beyond the hit, and why it is of no use."""
        gaps = []
        columns = (found[name].tolist() for name in ("start", "match", "write_id", "fidelity", "depth", "write_epoch"))
        for start, match, write_id, fidelity, depth, epoch in zip(*columns, strict=True):
            if start + match > reach:
                gaps.append(Gap(start, start + match, self._useless((start, write_id), fidelity, depth, epoch)))
        return gaps

    def _useless(self, name: tuple[int, int], fidelity: int, depth: int, epoch: int) -> Miss | None:
        if name in self._late:
            return Miss.DEADLINE
        if name in self._refused or epoch not in self._placements:
            return Miss.LOST_SHARDS
        return None if self._accept.takes(fidelity, depth) else Miss.FIDELITY

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

    def _usable(self, call: _native.ClientDiscover) -> Records:
        """The writings that this client can read."""
        found: Records = call.found().view(FOUND)
        want = self._wanted
        fits = (
            (found["layout_tag"] == want.layout_tag)
            & (found["block_bytes"] == want.block_bytes)
            & (found["plane_count"] == want.plane_count)
            & (found["k"] == want.k)
            & (found["m"] == want.m)
            & (found["kv_group"] == want.kv_group)
            & (found["cipher"] == 0)
            & (found["start_block"] == found["start"])
        )
        return found if fits.all() else found[fits]

    def _candidates(self, found: Records) -> list[Candidate]:
        takes, epochs = self._accept.takes, self._placements
        out = []
        columns = (found[name].tolist() for name in ("start", "match", "write_id", "fidelity", "depth", "write_epoch"))
        for row, (start, match, write_id, fidelity, depth, epoch) in enumerate(zip(*columns, strict=True)):
            if (start, write_id) not in self._refused and epoch in epochs and takes(fidelity, depth):
                out.append(Candidate(start, start + match, row))
        return out

    def _doubtful(self, call: _native.ClientDiscover, found: Records, candidates: list[Candidate], reach: int, checked: Flags) -> I32:
        """Keys whose "no" decides where the walk stops, and that were not checked yet."""
        known = np.zeros(len(checked), bool)
        known[[c.start for c in candidates]] = True
        doubt = np.zeros(len(checked), bool)
        doubt[max(0, reach - EXTENT_BLOCKS_MAX + 1) : reach + 1] = True
        if len(found):
            earlier = call.earlier()
            doubt[earlier[earlier < len(checked)]] = True
        if checked.any() and (checked & known).any():
            doubt[reach:] = True  # one node's "no" was wrong once: none is believed from here on
        return np.flatnonzero(doubt & ~known & ~checked).astype(np.int32)

    def _known_starts(self, found: Records, call: _native.ClientDiscover) -> list[int]:
        return sorted(set(call.earlier().tolist()) | set(found["start"].tolist()))

    # --- promise ---

    def _promise(self, keys: U8, found: Records, pieces: list[Piece], deadline: float) -> list[tuple[int, int]]:
        """Promises and touches what is not promised yet. The writings that have too few shards; none: all of them hold."""
        todo: list[tuple[tuple[int, int], bytes, Candidate]] = []
        write_ids = found["write_id"].tolist()
        for piece in pieces:
            name = piece.candidate.start, write_ids[piece.candidate.row]
            if name in self._absent:
                continue
            key = keys[name[0]].tobytes()
            kept = self._promises.get(key, name[1], self._bucket, self._class_id, self._now)
            if kept is not None:
                self._absent[name], self._last[name] = kept, self._bucket
            else:
                todo.append((name, key, piece.candidate))
        if not todo:
            return []
        rows = np.array([c.row for _, _, c in todo])
        extent_keys = keys[[name[0] for name, _, _ in todo]]
        nodes = nodes_of_writings(self._placements, extent_keys, found["write_epoch"][rows])
        call = self._core.promise(
            self._owner, self._newest, self._bucket, PROMISE_PIN | PROMISE_TOUCH, self._class_id, self._config.promise_seconds,
            names_of(extent_keys, found["write_id"][rows]), nodes, self._wanted.k,
        )  # fmt: skip
        began = time.monotonic_ns()
        self._await_promises(call, deadline)
        self.intervals.append(("kvstore.promise", began, time.monotonic_ns()))
        masks, answered, last = call.masks().tolist(), call.answered().tolist(), call.last_buckets().tolist()
        short = []
        for (name, key, _), mask, done, before in zip(todo, masks, answered, last, strict=True):
            if mask.bit_count() < self._wanted.k:
                short.append(name)
                continue
            self._absent[name], self._last[name] = done & ~mask, before
            self._promises.put(key, name[1], self._bucket, self._class_id, self._now, done & ~mask)
        if short and self._some_down:
            # A node that was down a moment ago may be back, and now it decides: not asking it would be a miss that need not be.
            self._some_down = False
            self._core.retry_down()
            return self._promise(keys, found, pieces, deadline)
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
