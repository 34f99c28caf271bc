"""Capacity and retention together, and how much has to be kept: equal to plain simulations and to the published figures."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from kvstore.plan.curve import exact_curve, sampled
from kvstore.plan.reuse import reuse_of
from tests.plan_tools import accesses_of, conversation, random_prompts, weka


def leading_hits(prompts: list[list[int]], times_ms: list[int], capacity: int, keep_ms: int) -> list[int]:
    """LRU of so many blocks that forgets what was not used for longer than keep_ms."""
    order: OrderedDict[int, int] = OrderedDict()
    found = []
    for ids, now in zip(prompts, times_ms, strict=True):
        for one in [one for one, then in order.items() if now - then > keep_ms]:
            del order[one]
        hits = next((at for at, one in enumerate(ids) if one not in order), len(ids))
        for one in ids:
            order[one] = now
            order.move_to_end(one)
            if len(order) > capacity:
                order.popitem(last=False)
        found.append(hits)
    return found


def test_capacity_and_retention_together_equal_a_plain_simulation() -> None:
    rng = random.Random(21)
    for _ in range(300):
        prompts = random_prompts(rng)
        times = sorted(rng.randrange(100) * 1000 for _ in prompts)
        capacity, keep_seconds = rng.randint(1, 30), rng.randint(0, 60)
        reuse = reuse_of(accesses_of(prompts, times))
        assert reuse.hit_blocks(capacity, keep_seconds).tolist() == leading_hits(prompts, times, capacity, keep_seconds * 1000)


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("conversation", {60: 10.537, 300: 29.339, 900: 36.220, 1800: 37.065}),
        ("weka", {300: 95.242, 3600: 97.209, 21_600: 97.305, 86_400: 97.345, 259_200: 97.398, 604_800: 97.412}),
    ],
)
def test_a_time_to_live_gives_the_published_rates(name: str, rates: dict[int, float]) -> None:
    reuse = reuse_of(conversation(512) if name == "conversation" else weka())
    assert {keep: round(100 * reuse.hit_ratio(None, keep), 3) for keep in rates} == rates


def test_the_grid_agrees_with_the_curve() -> None:
    accesses = conversation(512)
    curve, reuse = exact_curve(accesses), reuse_of(accesses)
    for capacity in (1000, 9000, 40_000):
        assert reuse.hit_ratio(capacity) == pytest.approx(curve.hit_ratio(capacity), abs=1e-12)
        assert int(reuse.hit_blocks(capacity).sum()) == curve.hit_blocks(capacity)


def test_the_working_set_is_what_was_used_within_the_retention() -> None:
    rng = random.Random(8)
    for _ in range(200):
        prompts = random_prompts(rng)
        times = sorted(rng.randrange(60) * 1000 for _ in prompts)
        keep_ms = rng.randint(0, 40) * 1000
        expected = []
        for now in times:
            last = {one: then for ids, then in zip(prompts, times, strict=True) if then <= now for one in ids}
            expected.append(sum(now - then <= keep_ms for then in last.values()))
        assert reuse_of(accesses_of(prompts, times)).working_set(keep_ms / 1000).tolist() == expected


def test_a_capacity_keeps_just_as_long_as_its_working_set_fits() -> None:
    reuse = reuse_of(weka("busy1h"))
    for share in (0.1, 0.3):
        capacity = int(share * reuse.accesses.unique)
        kept = reuse.kept_seconds(capacity)
        assert kept is not None
        assert reuse.working_set(kept).max() <= capacity < reuse.working_set(kept * 1.01 + 1).max()
    assert reuse.kept_seconds(reuse.accesses.unique) is None


def test_a_sample_tells_nearly_the_same() -> None:
    whole = reuse_of(weka("busy1h"))
    part = reuse_of(sampled(whole.accesses, 0.1))
    capacity = 0.1 * whole.accesses.unique
    assert part.hit_ratio(capacity, 600) == pytest.approx(whole.hit_ratio(capacity, 600), abs=0.03)
    assert part.working_set(600).max() == pytest.approx(whole.working_set(600).max(), rel=0.1)
