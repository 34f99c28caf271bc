"""Each access with its reuse depth and age: hit rates at any capacity and retention together, and how much must be kept for how long.

In LRU's order what is above a block was used more recently, so a block of age a at depth d hits with c blocks kept for r seconds exactly if
d <= c and a <= r: one pass gives the whole grid. Both grow along a prompt, so what hits is its front.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvstore.kernels import _native
from kvstore.plan.accesses import F64, I64, NONE, U32, Accesses, by_request
from kvstore.units import format_seconds

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Reuse:
    """`depth` and `previous` (request of the last touch) of each access; NONE for first touches."""

    accesses: Accesses
    depth: U32
    previous: U32

    @cached_property
    def first(self) -> Bools:
        first: Bools = self.depth == NONE
        return first

    @cached_property
    def age_ms(self) -> I64:
        """Since the last touch; of first touches, more than anything."""
        times = self.accesses.times_ms.astype(np.int64)
        age = times[self.accesses.request_of] - times[np.where(self.first, 0, self.previous)]
        age[self.first] = np.iinfo(np.int64).max
        return age

    @cached_property
    def tokens(self) -> F64:
        """What each access stands for, in tokens of the whole traffic."""
        tokens = np.full(len(self.depth), self.accesses.block_tokens / self.accesses.sample)
        some = self.accesses.counts > 0
        if self.accesses.sample == 1:
            tokens[self.accesses.ends[some].astype(np.int64) - 1] = self.accesses.last_tokens[some]
        return tokens

    def hits(self, capacity_blocks: float | None = None, retention_seconds: float | None = None) -> Bools:
        """Which accesses hit; None: no limit."""
        found = ~self.first
        if capacity_blocks is not None:
            found &= self.depth <= (capacity_blocks - 1) * self.accesses.sample + 1
        if retention_seconds is not None:
            found &= self.age_ms <= retention_seconds * 1000
        return found

    def hit_blocks(self, capacity_blocks: float | None = None, retention_seconds: float | None = None) -> I64:
        """Leading hits of each request."""
        return by_request(self.accesses, self.hits(capacity_blocks, retention_seconds).astype(np.int64))

    def hit_ratio(self, capacity_blocks: float | None = None, retention_seconds: float | None = None) -> float:
        total = self.accesses.total_input_tokens
        return float(self.tokens[self.hits(capacity_blocks, retention_seconds)].sum()) / total if total else 0.0

    @cached_property
    def _groups(self) -> tuple[I64, I64, I64]:
        """Runs of accesses of one request whose blocks were last touched by one other (-1: by none): request, previous, how many."""
        requests, previous = self.accesses.request_of, np.where(self.first, -1, self.previous.astype(np.int64))
        begins = np.flatnonzero(np.diff(requests, prepend=-1) | np.diff(previous, prepend=-2))
        return requests[begins], previous[begins], np.diff(begins, append=len(requests)).astype(np.int64)

    @cached_property
    def _last_uses(self) -> I64:
        """Blocks whose last use of all is each request."""
        last = np.zeros(self.accesses.unique, np.int64)
        last[self.accesses.ids] = self.accesses.request_of  # the last one wins
        return np.bincount(last, minlength=self.accesses.requests).astype(np.int64)

    def working_set(self, retention_seconds: float) -> I64:
        """At each request, distinct blocks used within the retention before it: the room that keeps them that long."""
        keep_ms = int(retention_seconds * 1000)
        times = self.accesses.times_ms.astype(np.int64)
        request, previous, count = self._groups
        came = (previous < 0) | (times[request] - times[previous] > keep_ms)  # was not there any more, or never
        lapsed = came & (previous >= 0)
        arrived = np.cumsum(np.bincount(request[came], count[came], self.accesses.requests))
        left = np.bincount(previous[lapsed], count[lapsed], self.accesses.requests) + self._last_uses
        over = np.concatenate([[0.0], np.cumsum(left)])[np.searchsorted(times + keep_ms, times, side="left")]  # requests whose time is up
        same = np.searchsorted(times, times, side="right") - 1  # requests of one moment count together
        alive: I64 = ((arrived[same] - over) / self.accesses.sample).astype(np.int64)
        return alive

    def kept_seconds(self, capacity_blocks: float, *, steps: int = 24) -> float | None:
        """The retention that this capacity attains at the worst moment; None where nothing ever has to go."""
        if capacity_blocks >= self.accesses.unique_estimate:
            return None
        low, high = 0.0, max(self.accesses.seconds, 1.0)
        for _ in range(steps):
            middle = (low + high) / 2
            low, high = (middle, high) if self.working_set(middle).max(initial=0) <= capacity_blocks else (low, middle)
        return low


def reuse_of(accesses: Accesses) -> Reuse:
    depth, previous = np.empty(len(accesses.ids), np.uint32), np.empty(len(accesses.ids), np.uint32)
    _native.plan_reuse_depths(accesses.ids, accesses.ends, accesses.unique, depth, previous)
    return Reuse(accesses, depth, previous)


def kept_text(seconds: float | None) -> str:
    """What kept_seconds says, for people."""
    return "all" if seconds is None else "under 1 s" if seconds < 1 else format_seconds(seconds)
