"""What a trace says: requests in time order, each a prompt as runs of block ids.

Ids are prefix-chained: one id names one block *and its whole prefix*, so equal ids mean reusable bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 128

Runs = tuple[tuple[int, int], ...]  # ((first id, count), ...): ids first, first + 1, ..., first + count - 1


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. `runs` holds its whole blocks only when blocks have 128 tokens; see Trace for 512."""

    time_ms: int
    input_tokens: int
    output_tokens: int
    runs: Runs
    session: int = 0

    @property
    def block_count(self) -> int:
        return sum(count for _, count in self.runs)

    def ids(self) -> npt.NDArray[np.int64]:
        """Block ids front to back, shape (block_count,)."""
        if len(self.runs) == 1:
            first, count = self.runs[0]
            return np.arange(first, first + count, dtype=np.int64)
        if not self.runs:
            return np.empty(0, dtype=np.int64)
        return np.concatenate([np.arange(first, first + count, dtype=np.int64) for first, count in self.runs])


def runs_of(ids: list[int]) -> Runs:
    """Consecutive ids joined: [0, 14, 15, 16] gives ((0, 1), (14, 3))."""
    runs: list[tuple[int, int]] = []
    start = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or ids[at] != ids[at - 1] + 1:
            runs.append((ids[start], at - start))
            start = at
    return tuple(runs)


def split_blocks(runs: Runs, input_tokens: int) -> Runs:
    """512-token blocks as 128-token ones: each full block b gives 4b..4b+3, the partial last one its whole quarters."""
    left = input_tokens // BLOCK_TOKENS
    split: list[tuple[int, int]] = []
    for first, count in runs:
        take = min(4 * count, left)
        if take == 0:
            break
        split.append((4 * first, take))
        left -= take
    return tuple(split)


def busy_hour_ms(session: int) -> int:
    """Where the busy1h variant starts a session: a hash of its number, spread over one hour."""
    return (session * 2654435761 % 2**32) * 3_600_000 // 2**32
