"""A trace or an access log as flat arrays: what every figure of `kvstore plan` is computed from.

Ids are dense (0 .. unique - 1); `fingerprints` holds what each stands for, so that sampling picks the same blocks in every run and log.
A log that was sampled has only some of each prompt's blocks; `sample` says what share, the token counts are of whole prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvstore.errors import InputError
from kvstore.replay.requests import Request

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
NONE = 2**32 - 1
DENSE_TABLE_MAX = 1 << 28  # ids below this are numbered by a table of as many bytes, others by sorting


@dataclass(frozen=True)
class Accesses:
    """Requests in time order. Shapes: (accesses,) for ids, (requests,) for all others, (unique,) for fingerprints."""

    ids: U32
    ends: U64  # where each request's ids end
    times_ms: U64
    input_tokens: U64
    output_tokens: U64
    sessions: I64  # -1: the source knows none
    fingerprints: U64
    block_tokens: int
    sample: float = 1.0

    @cached_property
    def starts(self) -> I64:
        return np.concatenate([[0], self.ends[:-1]]).astype(np.int64) if len(self.ends) else np.empty(0, np.int64)

    @cached_property
    def counts(self) -> I64:
        """Blocks of each request."""
        return self.ends.astype(np.int64) - self.starts

    @cached_property
    def request_of(self) -> I64:
        """For each access its request's number."""
        return np.repeat(np.arange(self.requests), self.counts)

    @cached_property
    def last_tokens(self) -> U32:
        """Tokens of each request's last block: fewer than block_tokens where the format keeps partial blocks."""
        if self.sample < 1:
            return np.full(self.requests, self.block_tokens, np.uint32)
        rest = self.input_tokens.astype(np.int64) - (self.counts - 1) * self.block_tokens
        tokens: U32 = np.clip(rest, 0, self.block_tokens).astype(np.uint32)
        return tokens

    @property
    def requests(self) -> int:
        return len(self.ends)

    @property
    def unique(self) -> int:
        return len(self.fingerprints)

    @property
    def unique_estimate(self) -> float:
        """Unique blocks of the whole traffic, also where the log is sampled."""
        return self.unique / self.sample

    @property
    def total_input_tokens(self) -> int:
        return int(self.input_tokens.sum())

    @property
    def seconds(self) -> float:
        return float(self.times_ms[-1] - self.times_ms[0]) / 1000 if self.requests else 0.0

    def hit_tokens(self, hits: npt.NDArray[np.integer]) -> I64:
        """Tokens of so many leading blocks of each request; never more than its input."""
        return np.minimum(hits.astype(np.int64) * self.block_tokens, self.input_tokens.astype(np.int64))

    def coarser(self, factor: int) -> Accesses:
        """The same prompts in blocks `factor` times as long: an id names its whole prefix, so the last one in each such block will do."""
        keep = (np.arange(len(self.ids)) - self.starts[self.request_of]) % factor == factor - 1
        used, ids = np.unique(self.ids[keep], return_inverse=True)
        ends = np.cumsum(self.counts // factor).astype(np.uint64)
        fingerprints = self.fingerprints[used]
        return replace(self, ids=ids.astype(np.uint32), ends=ends, fingerprints=fingerprints, block_tokens=self.block_tokens * factor)


@dataclass
class Collector:
    """Takes requests one by one, gives Accesses."""

    block_tokens: int
    sample: float = 1.0
    firsts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def add(self, request: Request) -> None:
        for first, count in request.runs:
            self.firsts.append(first)
            self.lengths.append(count)
        self.rows.append((request.time_ms, request.input_tokens, request.output_tokens, request.session, request.block_count))

    def finish(self, has_sessions: bool) -> Accesses:
        lengths = np.array(self.lengths, np.int64)
        firsts = np.array(self.firsts, np.int64)
        ids = np.repeat(firsts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
        columns = np.array(self.rows, np.int64).reshape(-1, 5)
        dense, fingerprints = numbered(ids.astype(np.uint64))
        return Accesses(
            ids=dense,
            ends=np.cumsum(columns[:, 4]).astype(np.uint64),
            times_ms=columns[:, 0].astype(np.uint64),
            input_tokens=columns[:, 1].astype(np.uint64),
            output_tokens=columns[:, 2].astype(np.uint64),
            sessions=columns[:, 3].copy() if has_sessions else np.full(len(columns), -1, np.int64),
            fingerprints=fingerprints,
            block_tokens=self.block_tokens,
        )


def of_requests(requests: Iterable[Request], block_tokens: int, *, has_sessions: bool = False) -> Accesses:
    """Raises InputError where there is no request."""
    collector = Collector(block_tokens)
    for request in requests:
        collector.add(request)
    if not collector.rows:
        raise InputError("E111", "the trace", "it has no request to plan from", "name another trace")
    return collector.finish(has_sessions)


def numbered(ids: U64) -> tuple[U32, U64]:
    """Dense ids in the order of the given ones, and what each stands for."""
    if len(ids) and int(ids.max()) < DENSE_TABLE_MAX:
        there = np.zeros(int(ids.max()) + 1, np.bool_)
        there[ids] = True
        place = np.cumsum(there, dtype=np.uint32)
        return place[ids] - np.uint32(1), np.flatnonzero(there).astype(np.uint64)
    fingerprints, dense = np.unique(ids, return_inverse=True)
    return dense.astype(np.uint32), fingerprints


def by_request(of: Accesses, values: I64) -> I64:
    """Sums one value an access to one a request."""
    sums = np.zeros(of.requests, np.int64)
    some = of.counts > 0
    if some.any():
        sums[some] = np.add.reduceat(values, of.starts[some])
    return sums
