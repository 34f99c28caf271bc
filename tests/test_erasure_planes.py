"""Planes coded in place: nothing outside the plane is read or written, threads share a codec, the interpreter runs on."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from interpreter import runs_beside

from benchmarks.bench_codec import measure
from kvstore.erasure import Codec, codec, cut_plane
from kvstore.errors import CodecError
from kvstore.kernels import _native
from kvstore.layout import PRESETS, Plane, shard_bytes_of

NAMES = ("isal", "zfec")


def plane_of(plane_bytes: int, k: int, offset_bytes: int = 0) -> Plane:
    return Plane(offset_bytes, plane_bytes, shard_bytes_of(plane_bytes, k))


@pytest.mark.parametrize("name", NAMES)
def test_parity_of_a_plane_is_the_parity_of_its_padded_shards(name: str) -> None:
    rng = np.random.default_rng(1)
    coder = codec(name, 10, 2)
    for plane_bytes in (1, 31, 32, 33, 319, 320, 321, 3200, 4097, 22_784):
        blocks = rng.integers(0, 256, (3, plane_bytes + 50), np.uint8)
        plane = plane_of(plane_bytes, 10, offset_bytes=17)
        parity = coder.encode_plane(blocks, plane)
        data = cut_plane(blocks, plane, 10)
        for b in range(3):
            assert np.array_equal(parity[:, b], coder.encode(data[:, b]))


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_is_rebuilt_in_place_and_nothing_else_is_written(name: str) -> None:
    """Canaries before, between and behind the planes; survivors in mixed order; v41's cut shard and one of padding alone among the lost."""
    rng = np.random.default_rng(2)
    coder = codec(name, 10, 2)
    for plane_bytes in (22_784, 33, 320):
        plane = plane_of(plane_bytes, 10, offset_bytes=40)
        buffer = rng.integers(0, 256, (3, plane_bytes + 90), np.uint8)
        whole = buffer.copy()
        parity = coder.encode_plane(buffer, plane)
        for lost in itertools.combinations(range(12), 2):
            for number in lost:
                if number < 10:
                    begin = min(number * plane.shard_bytes, plane_bytes)
                    buffer[:, 40 + begin : 40 + min(begin + plane.shard_bytes, plane_bytes)] ^= 0x55
            have = [number for number in reversed(range(12)) if number not in lost]
            coder.rebuild_plane(buffer, plane, have, [parity[number - 10] for number in have if number >= 10])
            assert np.array_equal(buffer, whole), (plane_bytes, lost)


BAD_CALLS = {
    "duplicate": ([0, 0, 2, 3], 0),
    "missing": ([0, 1, 2], 0),
    "too many": ([0, 1, 2, 3, 4], 1),
    "out of range": ([0, 1, 2, 200], 1),
    "parity array missing": ([0, 1, 2, 4], 0),
    "parity array too many": ([0, 1, 2, 3], 1),
}


@pytest.mark.parametrize(("have", "arrays"), BAD_CALLS.values(), ids=BAD_CALLS)
@pytest.mark.parametrize("name", NAMES)
def test_bad_survivors_of_a_plane_are_refused_and_nothing_is_written(name: str, have: list[int], arrays: int) -> None:
    blocks = np.full((2, 500), 7, np.uint8)
    plane = plane_of(500, 4)
    with pytest.raises(CodecError):
        codec(name, 4, 2).rebuild_plane(blocks, plane, have, [np.zeros((2, plane.shard_bytes), np.uint8)] * arrays)
    assert (blocks == 7).all()


@pytest.mark.parametrize("name", NAMES)
def test_planes_that_do_not_fit_their_blocks_are_refused(name: str) -> None:
    coder: Codec = codec(name, 4, 2)
    blocks = np.zeros((2, 500), np.uint8)
    for plane in (Plane(0, 501, 128), Plane(400, 101, 32), Plane(-1, 10, 32), Plane(0, 0, 32), Plane(0, 500, 96)):
        with pytest.raises(CodecError):
            coder.encode_plane(blocks, plane)
        with pytest.raises(CodecError):
            coder.rebuild_plane(blocks, plane, [0, 1, 2, 3], [])
    with pytest.raises(CodecError):
        coder.encode_plane(blocks.astype(np.int8), plane_of(500, 4))  # type: ignore[arg-type]  # that is the point
    with pytest.raises(CodecError):
        coder.rebuild_plane(blocks, plane_of(500, 4), [0, 1, 2, 4], [np.zeros((2, 64), np.uint8)])


def test_native_refuses_rows_that_overlap_or_are_not_contiguous() -> None:
    native = _native.Codec(4, 2)
    parity = np.zeros((2, 3, 32), np.uint8)
    overlapping = np.lib.stride_tricks.as_strided(np.zeros(300, np.uint8), (3, 100), (50, 1))
    for blocks in (overlapping, np.zeros((3, 200), np.uint8)[:, ::2], np.zeros((3, 100), np.uint8)[::-1]):
        with pytest.raises(CodecError):
            native.encode_plane(blocks, 0, 100, parity)


def test_threads_share_a_codec_while_its_tables_are_being_made() -> None:
    """Thousands of survivor sets of 32+4 from four threads: the cache fills, is emptied, and no answer is wrong."""
    coder = codec("isal", 32, 4)
    data = np.random.default_rng(3).integers(0, 256, (32, 64), np.uint8)
    shards = np.concatenate([data, coder.encode(data)])
    sets = list(itertools.islice(itertools.combinations(range(36), 32), 0, 58_905, 11))
    assert len(sets) > 4096

    def decode_all(step: int) -> bool:
        return all(np.array_equal(coder.decode([(n, shards[n]) for n in have]), data) for have in sets[step % 2 :: 2])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(decode_all, range(4))) == [True] * 4


def test_coding_does_not_hold_the_interpreter() -> None:
    layout = PRESETS["v41"]
    blocks = np.zeros((2000, layout.block_bytes), np.uint8)
    plane = Plane(0, layout.block_bytes, shard_bytes_of(layout.block_bytes, 10))
    parity = np.empty((2, len(blocks), plane.shard_bytes), np.uint8)
    native = _native.Codec(10, 2)
    assert runs_beside(lambda: native.encode_plane(blocks, 0, plane.bytes, parity))


def test_the_benchmark_runs_at_a_smoke_size_and_gives_its_ids() -> None:
    figures = measure(rounds=2, blocks_count=2)
    assert {"codec_vs_isal", "codec_vs_zfec"} <= figures.keys()
    assert all(value > 0 for value in figures.values())
