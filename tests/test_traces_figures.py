"""The exact reference figures equal every number that traces/README.md states."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from kvstore.replay.exact import InfiniteCache, LruCache, TimeToLiveCache, totals
from kvstore.replay.requests import Request
from kvstore.replay.trace import Variant, open_trace

TRACES = Path(__file__).parent.parent / "traces"
CONVERSATION = TRACES / "mooncake_conversation_trace.jsonl.gz"
WEKA = TRACES / "weka_v6_dev.b128.jsonl.zst"


@lru_cache(maxsize=4)
def requests(path: Path, block_tokens: int, variant: Variant = "plain") -> tuple[Request, ...]:
    return tuple(open_trace(path, block_tokens=block_tokens, variant=variant))


@pytest.mark.parametrize(
    ("path", "block_tokens", "count", "input_tokens", "accesses", "unique", "hit_blocks", "hit_tokens"),
    [
        (CONVERSATION, 512, 12_031, 144_793_823, 288_500, 182_790, 105_710, 54_098_411),
        (CONVERSATION, 128, 12_031, 144_793_823, 1_125_476, 702_900, 422_576, 54_089_728),
        (WEKA, 128, 12_904, 1_191_948_482, 9_305_737, 234_597, 9_071_140, 1_161_105_920),
    ],
    ids=["conversation-512", "conversation-128", "weka-128"],
)
def test_infinite_cache_gives_the_published_totals(
    path: Path, block_tokens: int, count: int, input_tokens: int, accesses: int, unique: int, hit_blocks: int, hit_tokens: int
) -> None:
    cache = InfiniteCache()
    found = totals(requests(path, block_tokens), cache, block_tokens)
    assert (found.requests, found.input_tokens, found.accesses) == (count, input_tokens, accesses)
    assert (cache.block_count, found.hit_blocks, found.hit_tokens) == (unique, hit_blocks, hit_tokens)


@pytest.mark.parametrize(
    ("path", "block_tokens", "variant", "unique", "hit_blocks"),
    [
        (CONVERSATION, 512, "plain", 182_790, {1: 15_080, 5: 56_382, 10: 80_323, 25: 101_978, 50: 104_759}),
        (CONVERSATION, 128, "plain", 702_900, {1: 59_639, 5: 224_846, 10: 319_298, 25: 407_650, 50: 418_772}),
        pytest.param(
            WEKA,
            128,
            "plain",
            234_597,
            {1: 8_937_866, 5: 9_062_310, 10: 9_063_857, 25: 9_065_793, 50: 9_070_131},
            marks=pytest.mark.long,
        ),
        pytest.param(
            WEKA,
            128,
            "busy1h",
            234_597,
            {1: 2_263_647, 5: 8_082_012, 10: 8_893_086, 25: 9_052_811, 50: 9_068_776},
            marks=pytest.mark.long,
        ),
    ],
    ids=["conversation-512", "conversation-128", "weka-7d", "weka-busy1h"],
)
def test_exact_lru_gives_the_published_hit_blocks(
    path: Path, block_tokens: int, variant: Variant, unique: int, hit_blocks: dict[int, int]
) -> None:
    trace = requests(path, block_tokens, variant)
    found = {}
    for percent in hit_blocks:
        cache = LruCache(unique * percent // 100)
        found[percent] = totals(trace, cache, block_tokens).hit_blocks
        assert cache.hit_blocks == found[percent], "leading hits equal plain LRU hits, as ids are chained"
    assert found == hit_blocks


def test_lru_of_a_busy_hour_of_agents_gives_the_published_hit_blocks() -> None:
    assert totals(requests(WEKA, 128, "busy1h"), LruCache(23_459), 128).hit_blocks == 8_893_086


@pytest.mark.parametrize(
    ("path", "block_tokens", "rates"),
    [
        (CONVERSATION, 512, {60: 10.537, 300: 29.339, 900: 36.220, 1800: 37.065}),
        pytest.param(
            WEKA,
            128,
            {300: 95.242, 3600: 97.209, 21_600: 97.305, 86_400: 97.345, 259_200: 97.398, 604_800: 97.412},
            marks=pytest.mark.long,
        ),
    ],
    ids=["conversation-512", "weka-7d"],
)
def test_sliding_time_to_live_gives_the_published_rates(path: Path, block_tokens: int, rates: dict[int, float]) -> None:
    for seconds, percent in rates.items():
        ratio = totals(requests(path, block_tokens), TimeToLiveCache(seconds * 1000), block_tokens).hit_ratio
        assert ratio is not None and round(100 * ratio, 3) == percent
