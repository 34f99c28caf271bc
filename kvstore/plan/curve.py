"""Miss-ratio curves of LRU by one pass of reuse distances: exact, or of a spatial sample of the blocks (SHARDS), with its error band.

A block is in the sample if a hash of its identity is below the rate, so all its accesses are, and distances in the sample are the true ones
times the rate. Two corrections, both exact: the sample's share of *unique* blocks scales distances where it is known, and accesses that the
sample has too many or too few of, because popular blocks fell in or out, are added at the shortest distance (SHARDS-adj).
The band: the sample is split by other bits of the hash into parts, each gives a curve, and their spread tells that of the mean.
Plain LRU over chained ids, touched front to back, hits exactly the leading blocks: its curve is that of prefix hits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvstore.errors import UsageError
from kvstore.kernels import _native
from kvstore.placement import xxh3_64_u64
from kvstore.plan.accesses import F64, U32, U64, Accesses

PARTS: Final = 8  # of a sample, for its band: fewer say little of the spread, more have too few blocks each
SIGMAS: Final = 2.0  # of the band: 19 of 20 curves lie inside


@dataclass(frozen=True)
class Curve:
    """Hits of LRU by capacity. `hit_blocks` and `hit_tokens` are cumulative over depth (index 0: none), in units of the whole traffic."""

    cumulative_blocks: F64
    cumulative_tokens: F64
    accesses: float
    input_tokens: int
    unique: float
    rate: float  # depth in the sample / true depth
    parts: tuple[Curve, ...] = ()

    def hit_blocks(self, capacity_blocks: float) -> float:
        return self._at(self.cumulative_blocks, capacity_blocks)

    def hit_tokens(self, capacity_blocks: float) -> float:
        return self._at(self.cumulative_tokens, capacity_blocks)

    def hit_ratio(self, capacity_blocks: float) -> float:
        """Of input tokens, 0..1."""
        return self.hit_tokens(capacity_blocks) / self.input_tokens if self.input_tokens else 0.0

    def band(self, capacity_blocks: float) -> float:
        """Half the width of the error band of hit_ratio, 0..1; 0 where the curve is exact."""
        if not self.parts:
            return 0.0
        ratios = [part.hit_ratio(capacity_blocks) for part in self.parts]
        return float(SIGMAS * np.std(ratios, ddof=1) / np.sqrt(len(ratios)))

    def capacity_for(self, hit_ratio: float) -> float | None:
        """Blocks with which LRU reaches the ratio; None where no capacity does."""
        wanted = hit_ratio * self.input_tokens
        at = int(np.searchsorted(self.cumulative_tokens, wanted * (1 - 1e-12)))
        return None if at >= len(self.cumulative_tokens) else max(1.0, (at - 1) / self.rate + 1)

    def _at(self, cumulative: F64, capacity_blocks: float) -> float:
        depth = (capacity_blocks - 1) * self.rate + 1  # a block itself is one at any rate
        if depth < 1:
            return 0.0
        low = min(int(depth), len(cumulative) - 1)
        high = min(low + 1, len(cumulative) - 1)
        return float(cumulative[low] + (depth - int(depth)) * (cumulative[high] - cumulative[low]))


def exact_curve(accesses: Accesses) -> Curve:
    """Of all that the source holds: exact for a trace; of a sampled log, what its sample says, with a band."""
    if accesses.sample < 1:
        return sampled_curve(accesses, 1.0)
    return _curve(accesses.ids, accesses.ends, accesses.last_tokens, accesses, accesses.unique, 1.0, 1.0)


def sampled_curve(accesses: Accesses, rate: float, seed: int = 0, *, with_band: bool = True) -> Curve:
    """SHARDS at a fixed rate of the blocks; its band takes as long again. Raises UsageError where the sample would be empty."""
    hashes, inside = _sample(accesses, rate, seed)
    ids, ends, last = _kept(accesses.ids, accesses.ends, accesses.last_tokens, inside, accesses.block_tokens)
    share = float(inside.mean()) * accesses.sample  # of unique blocks; for a sampled log its own share is only known as its rate
    part_of = (hashes[inside] % np.uint64(PARTS)).astype(np.int64)
    parts = []
    for part in range(PARTS) if with_band else ():
        chosen = part_of == part
        if chosen.any():
            few = _kept(ids, ends, last, chosen, accesses.block_tokens)
            parts.append(_curve(*few, accesses, int(chosen.sum()), share * float(chosen.mean()), rate * accesses.sample / PARTS))
    whole = _curve(ids, ends, last, accesses, int(inside.sum()), share, rate * accesses.sample)
    return Curve(**{**vars(whole), "parts": tuple(parts)})


def sampled(accesses: Accesses, rate: float, seed: int = 0) -> Accesses:
    """The same requests with only the sample's blocks in them, as a sampled log has. Raises as sampled_curve does."""
    _, inside = _sample(accesses, rate, seed)
    ids, ends, _ = _kept(accesses.ids, accesses.ends, accesses.last_tokens, inside, accesses.block_tokens)
    return replace(accesses, ids=ids, ends=ends, fingerprints=accesses.fingerprints[inside], sample=accesses.sample * float(inside.mean()))


def _sample(accesses: Accesses, rate: float, seed: int) -> tuple[U64, np.ndarray]:
    if not 0 < rate <= 1:
        raise UsageError("E131", f"--sample {rate}", "out of range", "give a share above 0, at most 1")
    hashes = xxh3_64_u64(accesses.fingerprints, np.full(1, seed, np.uint64))
    inside = hashes <= np.uint64(min(int(rate * 2**64), 2**64 - 1))
    if inside.sum() < 2 * PARTS:
        raise UsageError("E131", f"--sample {rate}", f"{int(inside.sum())} of {accesses.unique} blocks", "give a larger share")
    return hashes, inside


def _kept(ids: U32, ends: U64, last: U32, inside: np.ndarray, block_tokens: int) -> tuple[U32, U64, U32]:
    keep = np.where(inside, np.cumsum(inside), 0).astype(np.uint32)
    out, out_ends, out_last = np.empty(len(ids) + 8, np.uint32), np.empty_like(ends), np.empty_like(last)
    count = _native.plan_sample_accesses(ids, ends, last, keep, block_tokens, out, out_ends, out_last)
    return out[:count], out_ends, out_last


def _curve(ids: U32, ends: U64, last: U32, accesses: Accesses, unique: int, share: float, rate: float) -> Curve:
    blocks, tokens = np.zeros(unique + 1, np.uint64), np.zeros(unique + 1, np.uint64)
    _native.plan_reuse_histogram(ids, ends, last, unique, accesses.block_tokens, blocks, tokens)
    hit_blocks, hit_tokens = blocks.astype(np.float64), tokens.astype(np.float64)
    hit_blocks[0] = hit_tokens[0] = 0  # first touches
    if rate < 1:
        total = _all_accesses(accesses)
        missing = total - len(ids) / rate
        hit_blocks /= rate
        hit_tokens /= rate
        hit_blocks[1] += missing
        hit_tokens[1] += missing * accesses.block_tokens
        accessed, everything = total, accesses.unique_estimate
    else:
        accessed, everything = float(len(ids)), float(unique)
    blocks_sum, tokens_sum = np.cumsum(hit_blocks), np.cumsum(hit_tokens)
    return Curve(np.maximum(blocks_sum, 0), np.maximum(tokens_sum, 0), accessed, accesses.total_input_tokens, everything, share)


def _all_accesses(accesses: Accesses) -> float:
    """Blocks of all prompts, known from their tokens even where a log holds a sample of them."""
    if accesses.sample == 1:
        return float(len(accesses.ids))
    return float((accesses.input_tokens // np.uint64(accesses.block_tokens)).sum())
