"""Extents: how chains are cut, and that any plane survives cutting, coding, losing any m shards and joining."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.erasure import codec, cut_plane, place_pieces
from kvstore.errors import LayoutError
from kvstore.extents import ExtentSpan, cut
from kvstore.layout import PRESETS, Layout, Section

V41 = PRESETS["v41"]


@given(start=st.integers(0, 10_000), count=st.integers(0, 2_000), block_bytes=st.integers(1, 20 << 20))
def test_extents_cover_the_run_in_order_and_only_the_last_is_short(start: int, count: int, block_bytes: int) -> None:
    layout = Layout.single(block_bytes)
    spans = cut(start, count, layout)
    assert [b for span in spans for b in range(span.start, span.stop)] == list(range(start, start + count))
    assert all(span.count == layout.blocks_per_extent_max for span in spans[:-1])
    assert all(1 <= span.count <= layout.blocks_per_extent_max for span in spans)


def test_a_mean_prompt_is_nine_full_extents_and_a_rest() -> None:
    spans = cut(0, 600, V41)
    assert spans == [*(ExtentSpan(64 * i, 64) for i in range(9)), ExtentSpan(576, 24)]
    assert spans[0].shard_bytes(V41) == 64 * (3 * 2304 + 4576) == 735_232


def test_negative_runs_are_refused() -> None:
    for start, count in ((-1, 5), (0, -5)):
        with pytest.raises(LayoutError):
            cut(start, count, V41)


@given(data=st.data(), name=st.sampled_from(["isal", "zfec"]))
def test_any_plane_and_any_block_count_survive_cutting_coding_losing_and_joining(data: st.DataObject, name: str) -> None:
    """Whole way of a store and a load in memory: planes of 1 to 4,097 B, blocks apart in a larger buffer, any m of k + m shards lost."""
    k, m = data.draw(st.sampled_from([(10, 2), (1, 4), (4, 2), (32, 4), (7, 0)]), label="k, m")
    sizes = data.draw(st.lists(st.integers(1, 4097), min_size=1, max_size=3), label="section bytes")
    layout = Layout(tuple(Section(f"s{i}", size) for i, size in enumerate(sizes)))
    count = data.draw(st.integers(1, 70), label="blocks")
    gap = data.draw(st.integers(0, 100), label="bytes between blocks")
    lost = set(data.draw(st.permutations(range(k + m)), label="lost first")[:m])
    coder = codec(name, k, m)
    source = np.random.default_rng(len(sizes)).integers(0, 256, (count, layout.block_bytes + gap), np.uint8)
    loaded = np.full_like(source, 0xAA)
    for span in cut(0, count, layout):
        blocks = source[span.start : span.stop, : layout.block_bytes]
        into = loaded[span.start : span.stop, : layout.block_bytes]
        for plane in layout.planes(k):
            shards = np.concatenate([cut_plane(blocks, plane, k), coder.encode_plane(blocks, plane)])
            have = [number for number in range(k + m) if number not in lost]
            place_pieces(into, plane, k, {number: shards[number] for number in have if number < k})
            coder.rebuild_plane(into, plane, have, [shards[number] for number in have if number >= k])
    assert np.array_equal(loaded[:, : layout.block_bytes], source[:, : layout.block_bytes])
    assert (loaded[:, layout.block_bytes :] == 0xAA).all()
