"""The native policies do what the plain reference does, block for block, and two of them what libCacheSim does."""

from __future__ import annotations

import random

import libcachesim
import numpy as np
import pytest

from kvstore.kernels import _native, plan_reference
from kvstore.plan.accesses import Accesses
from tests.plan_tools import accesses_of, conversation, dense, random_prompts

EVICTIONS = ("lru", "sieve", "s3fifo")
ADMISSIONS = ("always", "second-touch", "write-budget")


def simulated(accesses: Accesses, eviction: str, admission: str, capacity: int, tail_first: bool, limit: float) -> list[tuple[int, ...]]:
    hits, written, held = (np.empty(accesses.requests, np.uint32) for _ in range(3))
    trace = (accesses.ids, accesses.ends, accesses.times_ms, accesses.unique)
    _native.plan_simulate(eviction, admission, *trace, capacity, tail_first, limit, hits, written, held)
    return list(zip(hits.tolist(), written.tolist(), held.tolist(), strict=True))


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("tail_first", [False, True])
def test_policies_equal_their_reference_on_random_traces(eviction: str, admission: str, tail_first: bool) -> None:
    rng = random.Random(f"{eviction} {admission} {tail_first}")
    for _ in range(150):
        prompts = random_prompts(rng)
        times = sorted(rng.randrange(10**8) for _ in prompts)
        accesses = accesses_of(prompts, times)
        capacity, limit = rng.randint(1, 30), rng.randint(0, 400 if admission == "write-budget" else 30)
        expected = plan_reference.simulate(eviction, admission, dense(prompts, accesses), times, capacity, tail_first, limit)
        assert simulated(accesses, eviction, admission, capacity, tail_first, limit) == expected


@pytest.mark.parametrize(("eviction", "theirs"), [("lru", libcachesim.LRU), ("sieve", libcachesim.Sieve)])
def test_front_to_back_every_block_hits_as_in_libcachesim(eviction: str, theirs: type) -> None:
    accesses = conversation(512)
    capacity = accesses.unique // 20
    cache, request, hits = theirs(cache_size=capacity), libcachesim.Request(), 0
    request.obj_size = 1
    for one in accesses.ids.tolist():
        request.obj_id = one
        hits += cache.get(request)
    assert sum(held for _, _, held in simulated(accesses, eviction, "always", capacity, False, 0)) == hits


def test_what_cannot_be_simulated_is_refused() -> None:
    accesses = accesses_of([[0, 1]])
    for eviction, admission, capacity, limit in [
        ("mru", "always", 1, 0),
        ("lru", "never", 1, 0),
        ("lru", "always", 0, 0),
        ("lru", "always", 1, -1),
    ]:
        with pytest.raises(ValueError):
            simulated(accesses, eviction, admission, capacity, False, limit)
