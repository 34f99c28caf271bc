"""The policies that `kvstore plan --policy` compares: what goes first, in which order a prompt is written, and what is let in at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.errors import UsageError
from kvstore.kernels import _native
from kvstore.plan.accesses import I64, Accesses
from kvstore.tomlfile import suggestion

MEMORY_CAPACITIES: Final = 4  # second-touch remembers as many first requests as four caches hold: 8 bytes a block of 114 kB
DRIVE_WRITES_A_DAY: Final = 1.0  # of write-budget


@dataclass(frozen=True)
class Policy:
    """`tail_first`: later parts of a prompt are written first and go first, as on our nodes."""

    name: str
    eviction: str
    admission: str
    tail_first: bool
    meaning: str


POLICIES: Final = {
    policy.name: policy
    for policy in (
        Policy("lru", "lru", "always", False, "least recently used block, front to back: the classic, equal to libCacheSim"),
        Policy("lru-tail", "lru", "always", True, "the same, the later part of a prompt goes first: what our nodes do"),
        Policy("s3fifo", "s3fifo", "always", True, "small, main and ghost queue; later parts first"),
        Policy("sieve", "sieve", "always", True, "one queue and a hand; later parts first"),
        Policy("sieve-front", "sieve", "always", False, "sieve as it is elsewhere: the front of a prompt goes first"),
        Policy("second-touch", "lru", "second-touch", True, "lru-tail; a block is written at its second request"),
        Policy("write-budget", "lru", "write-budget", True, "lru-tail; writes are stopped at one drive write a day"),
    )
}


@dataclass(frozen=True)
class Outcome:
    """One policy at one capacity."""

    policy: Policy
    capacity_blocks: int
    hits: I64  # leading blocks of each request
    hit_ratio: float
    written_blocks: int


def chosen(names: str) -> list[Policy]:
    """ "all", or names with commas between. Raises UsageError."""
    if names == "all":
        return list(POLICIES.values())
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in POLICIES:
            raise UsageError("E131", f'--policy "{name}"', "is not known", suggestion(name, tuple(POLICIES)))
    return [POLICIES[name] for name in wanted]


def require_every_block(accesses: Accesses) -> None:
    """Raises UsageError for a log that holds a sample."""
    if accesses.sample < 1:
        raise UsageError("E140", "--policy", "needs every block, this log holds a sample", "take a log with sample 1.0, or a trace")


def simulate(accesses: Accesses, policy: Policy, capacity_blocks: int) -> Outcome:
    """Plays every request. A sampled log cannot tell which blocks lead: raises UsageError."""
    require_every_block(accesses)
    limit = {"second-touch": MEMORY_CAPACITIES * capacity_blocks, "write-budget": DRIVE_WRITES_A_DAY * capacity_blocks}
    hits, written, held = (np.empty(accesses.requests, np.uint32) for _ in range(3))
    trace = (accesses.ids, accesses.ends, accesses.times_ms, accesses.unique)
    rule = (policy.tail_first, limit.get(policy.admission, 0))
    _native.plan_simulate(policy.eviction, policy.admission, *trace, capacity_blocks, *rule, hits, written, held)
    total = accesses.total_input_tokens
    ratio = float(accesses.hit_tokens(hits).sum()) / total if total else 0.0
    return Outcome(policy, capacity_blocks, hits.astype(np.int64), ratio, int(written.sum()))


def compare(accesses: Accesses, policies: Sequence[Policy], capacities: Sequence[int]) -> list[Outcome]:
    """Every policy at every capacity, capacity by capacity."""
    return [simulate(accesses, policy, capacity) for capacity in capacities for policy in policies]
