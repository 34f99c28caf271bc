"""Layouts and planes: the published sizes, golden digests, and the rule by which planes close."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import layout as layout_module
from kvstore.erasure.checks import M_MAX
from kvstore.errors import LayoutError
from kvstore.layout import PRESETS, SHARD_ALIGN_BYTES, Layout, Plane, Section, gqa, mla, shard_bytes_of

# Part of every key (docs/KEYS.md prints them): a preset whose digest changes is another preset.
GOLDEN_DIGESTS = {
    "v41": "139c5c9b264d761f4ce57ae2c680affe7a160eed7fcb2d91638387216dbf21cd",
    "llama-gqa-8b": "e0d6cc218a9592d30ea120d85a9a776c1ca9e998c6bd54fdc1c0c981fbc44c0f",
    "llama-gqa-70b-tp8": "cf7227f72ba5fa3d61cce0bd8cbb830b00d57a76ca8a192c9d7e25382a6f0545",
    "mla-bf16": "e75a4d649834c9b6c57d54747f8e1aa9e6bae9d97b8614902bba61b43b229045",
    "mla-fp8-sparse": "4b9e1ad975d5dfadf57d8bc56b98ab704641725cf5efe5b3e5f6c51cb64803cd",
}

layouts = st.builds(
    lambda sizes: Layout(tuple(Section(f"s{i}", size) for i, size in enumerate(sizes))),
    st.lists(st.integers(1, 200_000), min_size=1, max_size=40),
)


def test_v41_has_the_published_sizes_and_one_plane_for_each_source_layer() -> None:
    layout = PRESETS["v41"]
    assert layout.block_bytes == 113_920 == 128 * 890
    assert layout.blocks_per_extent_max == 64
    assert layout.planes() == (
        Plane(0, 64 * 356, 2304),
        Plane(64 * 356, 64 * 356, 2304),
        Plane(2 * 64 * 356, 64 * 356, 2304),
        Plane(3 * 64 * 356, 128 * 356, 4576),
    )
    assert [s.name.split(".")[1] for s in layout.sections] == ["2", "2", "8", "8", "14", "14", "20", "20"]


def test_presets_have_the_sizes_of_their_models() -> None:
    assert PRESETS["llama-gqa-8b"].block_bytes == 128 * 32 * 8 * 128 * 2 * 2
    assert PRESETS["llama-gqa-70b-tp8"].block_bytes * 8 == 128 * 80 * 8 * 128 * 2 * 2
    assert PRESETS["mla-bf16"].block_bytes == 128 * 61 * 576 * 2
    assert PRESETS["mla-fp8-sparse"].block_bytes == 128 * 61 * (656 + 132)
    assert PRESETS["llama-gqa-8b"].blocks_per_extent_max == 1  # one block alone is larger than 8 MiB


@pytest.mark.parametrize(("name", "digest"), GOLDEN_DIGESTS.items())
def test_digests_are_the_golden_ones(name: str, digest: str) -> None:
    assert PRESETS[name].digest().hex() == digest


def test_every_preset_has_a_golden_digest() -> None:
    assert PRESETS.keys() == GOLDEN_DIGESTS.keys()


@given(layout=layouts, k=st.integers(1, 32))
def test_planes_cover_the_block_and_close_at_section_ends(layout: Layout, k: int) -> None:
    planes = layout.planes(k)
    ends = []
    at = 0
    for section in layout.sections:
        at += section.bytes
        ends.append(at)
    assert planes[0].offset_bytes == 0
    for plane, following in itertools.pairwise(planes):
        assert plane.offset_bytes + plane.bytes == following.offset_bytes
        assert following.offset_bytes in ends
    assert planes[-1].offset_bytes + planes[-1].bytes == layout.block_bytes


@given(layout=layouts, k=st.integers(1, 32))
def test_a_plane_closes_as_soon_as_a_full_extents_shard_reaches_64_kib(layout: Layout, k: int) -> None:
    ends = {0}
    for section in layout.sections:
        ends.add(max(ends) + section.bytes)
    planes = layout.planes(k)
    for number, plane in enumerate(planes):
        full = plane.shard_bytes * layout.blocks_per_extent_max
        assert full >= 64 << 10 or number == len(planes) - 1
        stops = sorted(end for end in ends if plane.offset_bytes < end < plane.offset_bytes + plane.bytes)
        if stops:
            assert shard_bytes_of(stops[-1] - plane.offset_bytes, k) * layout.blocks_per_extent_max < 64 << 10


@given(plane_bytes=st.integers(1, 1 << 20), k=st.integers(1, 32))
def test_shards_are_the_least_multiple_of_32_that_holds_the_plane(plane_bytes: int, k: int) -> None:
    shard = shard_bytes_of(plane_bytes, k)
    assert shard % SHARD_ALIGN_BYTES == 0
    assert shard * k >= plane_bytes > (shard - SHARD_ALIGN_BYTES) * k


@given(layout=layouts)
def test_full_extents_stay_under_8_mib_and_64_blocks(layout: Layout) -> None:
    blocks = layout.blocks_per_extent_max
    assert 1 <= blocks <= 64
    assert blocks == 1 or blocks * layout.block_bytes <= 8 << 20
    assert blocks == 64 or (blocks + 1) * layout.block_bytes > 8 << 20


@given(one=layouts, other=layouts)
def test_layouts_are_equal_exactly_when_their_digests_are(one: Layout, other: Layout) -> None:
    assert (one == other) == (one.digest() == other.digest())


def test_names_sizes_order_and_splits_of_sections_change_the_digest() -> None:
    a, b = Section("a", 100), Section("b", 200)
    variants = [
        (a, b),
        (b, a),
        (Section("a", 200), Section("b", 100)),
        (Section("ab", 300),),
        (a, Section("c", 200)),
        (a, b, Section("c", 1)),
        (Section("a", 300),),
    ]
    assert len({Layout(v).digest() for v in variants}) == len(variants)


def test_limits_are_those_of_the_native_core() -> None:
    """Twins of the constants in kernels/common.hpp."""
    text = (Path(__file__).resolve().parent.parent / "kernels" / "common.hpp").read_text()
    for name, value in (
        ("BLOCKS_PER_EXTENT_MAX", layout_module.BLOCKS_PER_EXTENT_MAX),
        ("EXTENT_BYTES_MAX", layout_module.EXTENT_BYTES_MAX),
        ("BLOCK_BYTES_MAX", layout_module.BLOCK_BYTES_MAX),
        ("PLANES_MAX", layout_module.PLANES_MAX),
        ("SHARD_ALIGN", layout_module.SHARD_ALIGN_BYTES),
        ("K_MAX", layout_module.K_MAX),
        ("M_MAX", M_MAX),
    ):
        found = re.search(rf"\b{name} = (\d+)u?(?: << (\d+))?[;,]", text)
        assert found, name
        assert int(found[1]) << int(found[2] or 0) == value, name


def test_opaque_blocks_have_one_plane() -> None:
    layout = Layout.single(4096)
    assert layout.block_bytes == 4096
    assert layout.planes() == (Plane(0, 4096, 416),)


@pytest.mark.parametrize(
    "sections",
    [(), (Section("a", 0),), (Section("a", -1),), (Section("a", 1), Section("a", 1)), (Section("a", (64 << 20) + 1),)],
)
def test_impossible_layouts_are_refused(sections: tuple[Section, ...]) -> None:
    with pytest.raises(LayoutError):
        Layout(sections)


def test_more_planes_than_a_record_can_list_are_refused() -> None:
    many = Layout(tuple(Section(f"s{i}", 200_000) for i in range(300)))
    with pytest.raises(LayoutError, match="planes"):
        many.planes(2)
    assert len(many.planes(32)) <= 255


@pytest.mark.parametrize("k", [0, -1, 33])
def test_impossible_counts_of_data_shards_are_refused(k: int) -> None:
    with pytest.raises(LayoutError):
        PRESETS["v41"].planes(k)


def test_deep_models_fit_by_rank() -> None:
    """126 layers x 8 KV heads are 63 MiB a block unsharded: one rank of eight has 7.9 MiB."""
    assert gqa(layers=126, kv_heads=8, head_dim=128).block_bytes == 63 << 20
    assert len(gqa(layers=126, kv_heads=1, head_dim=128).planes()) <= 255
    assert mla(layers=3, row_bytes=10, block_tokens=16).block_bytes == 480
