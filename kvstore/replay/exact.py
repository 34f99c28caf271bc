"""Exact reference figures of a trace: infinite cache, block-level LRU, sliding time-to-live. Plain code: the oracle of every replay.

Semantics: a prompt is looked up before it is inserted; a block hits only if all before it hit; hit tokens are
min(leading hits x block, input); blocks are touched front to back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.replay.requests import Request

BlockIds = npt.NDArray[np.int64]


class ModelCache(Protocol):
    """A simulated cache: how many leading blocks it holds; then all of them are inserted or touched."""

    def leading_hits(self, ids: BlockIds, time_ms: int) -> int: ...


@dataclass(frozen=True)
class HitTotals:
    """Sums over the requests of a trace."""

    requests: int
    input_tokens: int
    accesses: int
    hit_blocks: int
    hit_tokens: int

    @property
    def hit_ratio(self) -> float | None:
        """Hit tokens / input tokens; None where there was no input."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else None


def totals(requests: Iterable[Request], cache: ModelCache, block_tokens: int) -> HitTotals:
    count = input_tokens = accesses = hit_blocks = hit_token_sum = 0
    for request in requests:
        hits = cache.leading_hits(request.ids(), request.time_ms)
        count += 1
        input_tokens += request.input_tokens
        accesses += request.block_count
        hit_blocks += hits
        hit_token_sum += hit_tokens(hits, request, block_tokens)
    return HitTotals(count, input_tokens, accesses, hit_blocks, hit_token_sum)


def hit_tokens(leading_hits: int, request: Request, block_tokens: int) -> int:
    return min(leading_hits * block_tokens, request.input_tokens)


def unique_blocks(requests: Iterable[Request]) -> int:
    cache = InfiniteCache()
    for request in requests:
        cache.leading_hits(request.ids(), request.time_ms)
    return cache.block_count


class InfiniteCache:
    """Never forgets. Memory is one byte an id below 2^28; larger ids live in a set."""

    DENSE_IDS = 1 << 28

    def __init__(self) -> None:
        self._seen = np.zeros(1 << 16, dtype=np.bool_)
        self._sparse: set[int] = set()

    def leading_hits(self, ids: BlockIds, time_ms: int = 0) -> int:
        if not len(ids):
            return 0
        low = ids < self.DENSE_IDS
        dense = ids[low]
        self._grow(int(dense.max(initial=-1)) + 1)
        known = np.zeros(len(ids), dtype=np.bool_)
        known[low] = self._seen[dense]
        self._seen[dense] = True
        if len(dense) < len(ids):
            high = ids[~low].tolist()
            known[~low] = [one in self._sparse for one in high]
            self._sparse.update(high)
        return len(ids) if known.all() else int(known.argmin())

    def _grow(self, size: int) -> None:
        if size > len(self._seen):
            grown = np.zeros(max(size, 2 * len(self._seen)), dtype=np.bool_)
            grown[: len(self._seen)] = self._seen
            self._seen = grown

    @property
    def block_count(self) -> int:
        return int(self._seen.sum()) + len(self._sparse)


class LruCache:
    """Least recently used block out first. `hit_blocks` is plain LRU's count: it equals the leading hits, as ids are chained."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.hit_blocks = 0
        self._order: OrderedDict[int, None] = OrderedDict()

    def leading_hits(self, ids: BlockIds, time_ms: int = 0) -> int:
        order, leading, held = self._order, -1, 0
        for at, one in enumerate(ids.tolist()):
            if one in order:
                order.move_to_end(one)
                held += 1
                continue
            if leading < 0:
                leading = at
            order[one] = None
            if len(order) > self.capacity_blocks:
                order.popitem(last=False)
        self.hit_blocks += held
        return len(ids) if leading < 0 else leading


class TimeToLiveCache:
    """Infinite, but a block not used for longer than `ttl_ms` is forgotten."""

    def __init__(self, ttl_ms: int) -> None:
        self.ttl_ms = ttl_ms
        self._last_use_ms: dict[int, int] = {}

    def leading_hits(self, ids: BlockIds, time_ms: int) -> int:
        last_use_ms, leading = self._last_use_ms, -1
        for at, one in enumerate(ids.tolist()):
            last = last_use_ms.get(one)
            if leading < 0 and (last is None or time_ms - last > self.ttl_ms):
                leading = at
            last_use_ms[one] = time_ms
        return len(ids) if leading < 0 else leading
