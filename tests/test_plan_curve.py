"""Miss-ratio curves: equal to the published figures and to libCacheSim, and sampled ones within their error."""

from __future__ import annotations

import random

import libcachesim
import numpy as np
import pytest

from kvstore.errors import UsageError
from kvstore.kernels import _native, plan_reference
from kvstore.plan.accesses import NONE, Accesses, by_request, numbered
from kvstore.plan.curve import exact_curve, sampled_curve
from tests.plan_tools import accesses_of, conversation, dense, random_prompts, weka

SHARES = (0.01, 0.05, 0.10, 0.25, 0.50)
PUBLISHED = {  # traces/README.md
    "conversation 512": (15_080, 56_382, 80_323, 101_978, 104_759),
    "conversation 128": (59_639, 224_846, 319_298, 407_650, 418_772),
    "weka plain": (8_937_866, 9_062_310, 9_063_857, 9_065_793, 9_070_131),
    "weka busy1h": (2_263_647, 8_082_012, 8_893_086, 9_052_811, 9_068_776),
}


def trace(name: str) -> Accesses:
    if name.startswith("weka"):
        return weka("busy1h" if name.endswith("busy1h") else "plain")
    return conversation(int(name.split()[1]))


@pytest.mark.parametrize("name", PUBLISHED)
def test_lru_hit_blocks_equal_the_published_ones(name: str) -> None:
    accesses = trace(name)
    curve = exact_curve(accesses)
    assert tuple(curve.hit_blocks(int(share * accesses.unique)) for share in SHARES) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "tokens"), [("conversation 512", 54_098_411), ("conversation 128", 54_089_728), ("weka plain", 1_161_105_920)]
)
def test_an_infinite_cache_hits_the_published_tokens(name: str, tokens: int) -> None:
    accesses = trace(name)
    assert exact_curve(accesses).hit_tokens(accesses.unique) == tokens


def test_lru_hit_blocks_equal_libcachesim() -> None:
    accesses = conversation(512)
    curve = exact_curve(accesses)
    capacities = [int(share * accesses.unique) for share in (0.01, 0.10)]
    caches = [libcachesim.LRU(cache_size=capacity) for capacity in capacities]
    hits = [0] * len(caches)
    request = libcachesim.Request()
    request.obj_size = 1
    for one in accesses.ids.tolist():
        request.obj_id = one
        for at, cache in enumerate(caches):
            hits[at] += cache.get(request)
    assert [curve.hit_blocks(capacity) for capacity in capacities] == hits


def test_depths_equal_the_plain_reference_on_random_traces() -> None:
    rng = random.Random(5)
    for _ in range(200):
        prompts = random_prompts(rng)
        accesses = accesses_of(prompts)
        depth, previous = np.empty(len(accesses.ids), np.uint32), np.empty(len(accesses.ids), np.uint32)
        _native.plan_reuse_depths(accesses.ids, accesses.ends, accesses.unique, depth, previous)
        expected = plan_reference.reuse_depths(prompts)
        assert depth.tolist() == [NONE if one is None else one for one in expected]
        assert [one == NONE for one in previous.tolist()] == [one is None for one in expected]


def test_depths_survive_the_renumbering_of_times() -> None:
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 50, 20_000).astype(np.uint32)  # far more touches than the map of times has places
    ends = np.array([len(ids)], np.uint64)
    depth, previous = np.empty(len(ids), np.uint32), np.empty(len(ids), np.uint32)
    _native.plan_reuse_depths(ids, ends, 50, depth, previous)
    assert depth.tolist() == [NONE if one is None else one for one in plan_reference.reuse_depths([ids.tolist()])]


def test_a_sample_of_a_tenth_is_within_a_point_at_five_seeds() -> None:
    accesses = weka("busy1h")
    exact = exact_curve(accesses)
    for seed in range(5):
        sampled = sampled_curve(accesses, 0.1, seed)
        for share in np.arange(0.05, 1.0, 0.05):
            capacity = int(share * accesses.unique)
            assert abs(sampled.hit_ratio(capacity) - exact.hit_ratio(capacity)) <= 0.01, (seed, share)


def test_the_band_holds_the_exact_curve_nearly_always() -> None:
    accesses = weka("busy1h")
    exact = exact_curve(accesses)
    inside = []
    for seed in range(10):
        sampled = sampled_curve(accesses, 0.05, seed)
        for share in (0.02, 0.05, 0.08, 0.15):
            capacity = int(share * accesses.unique)
            inside.append(abs(sampled.hit_ratio(capacity) - exact.hit_ratio(capacity)) <= sampled.band(capacity))
    assert np.mean(inside) >= 0.8


def test_a_sample_of_everything_is_the_exact_curve() -> None:
    accesses = conversation(512)
    exact, sampled = exact_curve(accesses), sampled_curve(accesses, 1.0)
    for share in SHARES:
        assert sampled.hit_tokens(int(share * accesses.unique)) == exact.hit_tokens(int(share * accesses.unique))


def test_equal_seeds_choose_equal_blocks() -> None:
    accesses = conversation(512)
    assert sampled_curve(accesses, 0.1, 7).hit_ratio(9000) == sampled_curve(accesses, 0.1, 7).hit_ratio(9000)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, float("nan"), 1e-9])
def test_a_rate_that_leaves_no_sample_is_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="E131"):
        sampled_curve(conversation(512), rate)


def test_the_capacity_for_a_hit_ratio_reaches_it_and_one_block_less_does_not() -> None:
    accesses = conversation(512)
    curve = exact_curve(accesses)
    for wanted in (0.1, 0.3, 0.37):
        capacity = curve.capacity_for(wanted)
        assert capacity is not None
        assert curve.hit_ratio(capacity) >= wanted > curve.hit_ratio(capacity - 1)
    assert curve.capacity_for(0.5) is None


def test_longer_blocks_hit_what_their_last_part_says() -> None:
    rng = random.Random(11)
    for _ in range(50):
        prompts = random_prompts(rng)
        coarse = accesses_of(prompts).coarser(3)
        expected = [tuple(tuple(ids[:stop]) for stop in range(3, len(ids) + 1, 3)) for ids in prompts]  # each block is its whole prefix
        numbers: dict[tuple[int, ...], int] = {}
        for ids in expected:
            for one in ids:
                numbers.setdefault(one, len(numbers))
        assert coarse.counts.tolist() == [len(ids) for ids in expected]
        assert coarse.unique == len(numbers)


def test_large_ids_are_numbered_as_small_ones_are() -> None:
    ids = np.array([7, 3, 7, 9], np.uint64)
    for shift in (0, 2**60):
        numbers, fingerprints = numbered(ids + np.uint64(shift))
        assert numbers.tolist() == [1, 0, 1, 2]
        assert (fingerprints - np.uint64(shift)).tolist() == [3, 7, 9]


def test_sums_by_request_pass_over_empty_prompts() -> None:
    accesses = accesses_of([[], [0, 1], [], [0, 1, 2]])
    assert by_request(accesses, np.ones(5, np.int64)).tolist() == [0, 2, 0, 3]
    assert dense([[], [0, 1], [], [0, 1, 2]], accesses) == [[], [0, 1], [], [0, 1, 2]]


def test_arrays_that_do_not_fit_are_refused() -> None:
    ids, ends, out = np.array([0, 5], np.uint32), np.array([2], np.uint64), np.zeros(2, np.uint32)
    with pytest.raises(ValueError, match="not below"):
        _native.plan_reuse_depths(ids, ends, 5, out, out.copy())
    with pytest.raises(ValueError, match="must rise"):
        _native.plan_reuse_depths(ids, np.array([3], np.uint64), 6, out, out.copy())


def test_a_sample_holds_the_accesses_of_its_blocks_and_no_others() -> None:
    rng = np.random.default_rng(9)
    for _ in range(50):
        counts = rng.integers(0, 40, rng.integers(1, 20))
        ids = rng.integers(0, 70, counts.sum()).astype(np.uint32)
        ends, last = np.cumsum(counts).astype(np.uint64), rng.integers(1, 129, len(counts)).astype(np.uint32)
        inside = rng.random(70) < 0.3
        keep = np.where(inside, np.cumsum(inside), 0).astype(np.uint32)
        out, out_ends, out_last = np.empty(len(ids) + 8, np.uint32), np.empty_like(ends), np.empty_like(last)
        count = _native.plan_sample_accesses(ids, ends, last, keep, 128, out, out_ends, out_last)
        prompts = np.split(ids, ends[:-1].astype(np.int64))
        assert out[:count].tolist() == [keep[one] - 1 for prompt in prompts for one in prompt if inside[one]]
        assert out_ends.tolist() == np.cumsum([inside[prompt].sum() for prompt in prompts]).tolist()
        ends_inside = [len(prompt) > 0 and bool(inside[prompt[-1]]) for prompt in prompts]
        assert out_last.tolist() == [own if there else 128 for own, there in zip(last.tolist(), ends_inside, strict=True)]
