"""Window entries: the sliding-window state that an engine needs at the place where its hit ends, kept in RAM for seconds.

A prompt of L tokens hits at most floor((L - 134) / 128) blocks, and its work resumes there with a window entry or else computes one block
again. A request leaves entries at multiples of 128: at floor(L / 128), where the next turn's hit may end, and at floor((L - 134) / 128),
where a repeat of the same prompt ends (traces/README.md; DESIGN: only the first 47%, both 93% on weka at 180 s).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.plan.accesses import I64, Accesses

WINDOW_TOKENS: Final = 134  # 128 and six spare ones
BOTH: Final = (0, WINDOW_TOKENS)
ENTRY_BYTES: Final = 1_415_040


@dataclass(frozen=True)
class WindowUse:
    """`gap_ms` of each request that needs an entry: since that entry was left; -1 where there never was one. `needed`: which requests."""

    gap_ms: I64
    needed: I64
    entries: int  # left in all

    def hit_ratio(self, keep_seconds: float) -> float:
        """Of the requests that needed one."""
        return float(((self.gap_ms >= 0) & (self.gap_ms <= keep_seconds * 1000)).mean()) if len(self.gap_ms) else 0.0

    def missed(self, keep_seconds: float) -> I64:
        """Requests whose entry was gone: each computes one block again."""
        return self.needed[(self.gap_ms < 0) | (self.gap_ms > keep_seconds * 1000)]


def capped_hits(accesses: Accesses, hits: I64) -> I64:
    """Leading hits under the rule that the last 134 tokens are computed: at most floor((L - 134) / 128) blocks."""
    most = (accesses.input_tokens.astype(np.int64) - WINDOW_TOKENS) // accesses.block_tokens
    return np.minimum(hits, np.maximum(most, 0))


def window_use(accesses: Accesses, hits: I64, left_at: Sequence[int] = BOTH) -> WindowUse:
    """Plays the entries; `hits` are leading hits of each request (of an infinite cache, or any)."""
    boundary = capped_hits(accesses, hits)
    left_ms = np.full(accesses.unique, -1, np.int64)
    ids, starts, counts = accesses.ids, accesses.starts, accesses.counts
    block = accesses.block_tokens
    gaps, needed, entries = [], [], 0
    for r, (now, tokens) in enumerate(zip(accesses.times_ms.tolist(), accesses.input_tokens.tolist(), strict=True)):
        if boundary[r] > 0:
            then = int(left_ms[ids[starts[r] + boundary[r] - 1]])
            gaps.append(now - then if then >= 0 else -1)
            needed.append(r)
        places = {place for back in left_at if 0 < (place := (tokens - back) // block) <= counts[r]}
        for place in places:
            left_ms[ids[starts[r] + place - 1]] = now
        entries += len(places)
    return WindowUse(np.array(gaps, np.int64), np.array(needed, np.int64), entries)
