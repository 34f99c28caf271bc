"""Why tokens of a prompt did not hit: what lookup saw and what ghost indexes remember, put together. Pure; docs/ACCESS_LOG.md is the text.

blocks      [0, hit)                [hit, blocks)                             beyond
tokens      hit                     by reason, block by block                 tail
needed age  of the extents so far   of what expired or was evicted, as far    -
                                    as nothing else is in between
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.client.native import U8
from kvstore.metrics import MISS_REASONS, REUSE_AGE_BOUNDS_SECONDS
from kvstore.wire import Gone

U64s = npt.NDArray[np.uint64]
I64s = npt.NDArray[np.int64]
_TAG_AT: Final = 8  # of a key: the lowest byte of its block tag


class Miss(IntEnum):
    """Index into MISS_REASONS (kvstore/metrics.py)."""

    UNKNOWN = 0
    EXPIRED = 1
    EVICTED = 2
    LOST_SHARDS = 3
    FIDELITY = 4
    WINDOW = 5
    TAIL = 6
    DEADLINE = 7


assert tuple(reason.name.lower() for reason in Miss) == MISS_REASONS
_THERE: Final = 100  # usable, but behind a block that is not
_OF_GONE: Final[dict[int, Miss]] = {Gone.EXPIRED: Miss.EXPIRED, Gone.EVICTED: Miss.EVICTED, Gone.CORRUPT: Miss.LOST_SHARDS}


class Gap(NamedTuple):
    """Blocks [start, end) that a writing covers and that no piece of the hit uses."""

    start: int
    end: int
    why: Miss | None  # None: it can be read


class Ghost(NamedTuple):
    """A dropped writing whose first block is block `start` of the prompt."""

    start: int
    reason: int  # a Gone
    last_bucket: int
    tags: bytes  # lowest byte of each block's tag


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens of a prompt by block. `input_tokens` of it, the last `recompute_tokens` are computed anyway; n keys are known."""

    input_tokens: int
    recompute_tokens: int
    block_tokens: int
    keys: int

    @property
    def usable_tokens(self) -> int:
        """As far as a hit may go."""
        if not self.recompute_tokens:
            return self.input_tokens
        return max(0, self.input_tokens - self.recompute_tokens) // self.block_tokens * self.block_tokens

    @property
    def blocks(self) -> int:
        """That may hit; what is beyond is tail."""
        return min(self.keys, -(-self.usable_tokens // self.block_tokens))

    def before(self, block: int) -> int:
        """Tokens in front of a block of them, or of the tail."""
        return min(block * self.block_tokens, self.usable_tokens)


@dataclass(frozen=True, slots=True)
class Split:
    """One request in tokens: `hit + sum(missed) == input`. `ages`: tokens by needed age, one more than there are bounds."""

    input_tokens: int
    hit_tokens: int
    missed: tuple[int, ...]  # by Miss
    ages: tuple[int, ...]
    age_token_seconds: float = 0.0  # sum over them


def split(
    keys: U8,
    limits: Limits,
    hit_blocks: int,
    window_missing: bool,
    hit_ages: Sequence[tuple[int, float]],
    gaps: Iterable[Gap],
    ghosts: Iterable[Ghost],
    late: bool,
    bucket: int,
    bucket_seconds: int,
) -> Split:
    """`hit_ages`: (end of a piece in blocks, seconds since its last use), in order. `late`: what is unknown could not be asked in time."""
    blocks = limits.blocks
    hit = min(hit_blocks, blocks)
    missed = [0] * len(Miss)
    missed[Miss.TAIL] = limits.input_tokens - limits.before(blocks)
    ages = [0] * (len(REUSE_AGE_BOUNDS_SECONDS) + 1)
    needed = age_token_seconds = 0.0

    def use(first: int, end: int, seconds: float) -> None:
        """Blocks [first, end) need this age, or what those before them need."""
        nonlocal needed, age_token_seconds
        needed = max(needed, seconds)
        tokens = limits.before(end) - limits.before(first)
        ages[bisect.bisect_left(REUSE_AGE_BOUNDS_SECONDS, needed)] += tokens
        age_token_seconds += needed * tokens

    at = 0
    for piece_end, seconds in hit_ages:
        end = min(piece_end, hit)
        if end > at:
            use(at, end, seconds)
            at = end
    use(at, hit, 0.0)
    if hit < blocks:
        reasons, own_ages = _label(keys[:blocks], hit, gaps, ghosts, late, bucket, bucket_seconds)
        bounds = np.minimum(np.arange(hit, blocks + 1) * limits.block_tokens, limits.usable_tokens)
        for at, tokens in enumerate(np.bincount(reasons, np.diff(bounds), len(Miss)).tolist()):
            missed[at] += int(tokens)
        priced = (reasons == Miss.EXPIRED) | (reasons == Miss.EVICTED)
        counted = len(priced) if priced.all() else int(priced.argmin())  # behind anything else no retention would have helped
        for block, seconds in enumerate(own_ages[:counted].tolist(), hit):
            use(block, block + 1, seconds)
    hit_tokens = limits.before(hit)
    if window_missing and hit:
        lost = hit_tokens - limits.before(hit - 1)
        hit_tokens -= lost
        missed[Miss.WINDOW] += lost
    return Split(limits.input_tokens, hit_tokens, tuple(missed), tuple(ages), age_token_seconds)


def _label(
    keys: U8, hit: int, gaps: Iterable[Gap], ghosts: Iterable[Ghost], late: bool, bucket: int, bucket_seconds: int
) -> tuple[I64s, npt.NDArray[np.float64]]:
    """(reason, needed age of its own or 0) of each block from `hit` on."""
    blocks = len(keys)
    reasons: I64s = np.full(blocks, Miss.UNKNOWN, np.int64)
    ages: npt.NDArray[np.float64] = np.zeros(blocks)
    tags = keys[:, _TAG_AT]
    remembered = set()
    for ghost in sorted(ghosts, key=lambda g: g.last_bucket):  # the latest has the last word
        reason = _OF_GONE.get(ghost.reason)
        if reason is None or ghost.start >= blocks:
            continue
        theirs = np.frombuffer(ghost.tags, np.uint8)[: blocks - ghost.start]
        equal = theirs == tags[ghost.start : ghost.start + len(theirs)]
        end = ghost.start + (len(equal) if equal.all() else int(equal.argmin()))
        reasons[ghost.start : end] = reason
        ages[ghost.start : end] = max(0, bucket - ghost.last_bucket) * bucket_seconds
        if end > ghost.start:
            remembered.add(ghost.start)
    listed = list(gaps)
    for gap in listed:
        # A writing of which some nodes still have shards and others remember why theirs went is gone for that reason.
        if gap.why is not None and not (gap.why is Miss.LOST_SHARDS and gap.start in remembered):
            reasons[gap.start : gap.end] = gap.why
    for gap in listed:
        if gap.why is None:
            reasons[gap.start : gap.end] = _THERE
    reasons, ages = reasons[hit:], ages[hit:]
    if late:
        reasons[reasons == Miss.UNKNOWN] = Miss.DEADLINE
    there = reasons == _THERE
    if there.any():
        broken = reasons[~there]
        reasons[there] = broken[0] if len(broken) and not there[0] else Miss.DEADLINE
    return reasons, ages
