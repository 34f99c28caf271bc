"""Records: the Python twin and the native check agree on what is sound, and on everything that is not."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_tools import record_of

from kvstore.kernels import _native
from kvstore.record import HEAD, Check, Head, Record, build, head_bytes_of, parse, parse_head, piece_sum, plane_digest, shard_bytes_of


def reseal(raw: bytearray, head_bytes: int) -> bytes:
    """Writes a right head sum over a changed head."""
    import xxhash

    raw[16:24] = bytes(8)
    raw[16:24] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(raw[:head_bytes])))
    return bytes(raw)


@given(
    st.integers(0, 2**32),
    st.integers(1, 12),
    st.lists(st.integers(1, 700), min_size=1, max_size=6),
    st.lists(st.integers(0, 2**32 - 1), max_size=128),
    st.integers(1, 32),
)
def test_what_the_twin_builds_both_accept_and_read_back_equal(
    seed: int, blocks: int, planes: list[int], earlier: list[int], k: int
) -> None:
    record = record_of(seed, blocks=blocks, plane_bytes=tuple(planes), earlier=tuple(earlier), k=k)
    raw = build(record)
    assert _native.check_record(raw) == Check.OK
    back = parse(raw)
    assert isinstance(back, Record) and build(back) == raw
    head = parse_head(raw)
    assert isinstance(head, Head)
    assert head.head_bytes == head_bytes_of(len(planes), len(earlier), blocks)
    assert head.shard_bytes == tuple(shard_bytes_of(n, k) for n in planes)


def test_every_flipped_bit_is_found_by_both() -> None:
    record = record_of(7, blocks=2, plane_bytes=(330, 40), earlier=(1, 2, 3))
    raw = build(record)
    head = parse_head(raw)
    assert isinstance(head, Head)
    digests = range(head.head_bytes + 8 * 4, head.head_bytes + 24 * 4)
    for at in range(len(raw)):
        bad = bytearray(raw)
        bad[at] ^= 1 << (at % 8)
        native = _native.check_record(bytes(bad))
        assert native != Check.OK and parse(bytes(bad)) == native, f"byte {at}, in digests: {at in digests}"


@given(st.integers(0, 2**32), st.integers(0, 4000), st.binary(min_size=1, max_size=64))
def test_any_bytes_get_the_same_answer_from_both(seed: int, at: int, noise: bytes) -> None:
    raw = bytearray(build(record_of(seed % 50)))
    at %= len(raw)
    raw[at : at + len(noise)] = noise
    mine = parse(bytes(raw))
    assert _native.check_record(bytes(raw)) == (Check.OK if isinstance(mine, Record) else mine)


@given(st.integers(0, 255), st.binary(min_size=1, max_size=8))
def test_a_head_with_a_right_sum_and_wrong_fields_gets_the_same_answer_from_both(at: int, noise: bytes) -> None:
    raw = bytearray(build(record_of(3)))
    head = parse_head(bytes(raw))
    assert isinstance(head, Head)
    raw[at : at + len(noise)] = noise
    changed = reseal(raw, head.head_bytes)
    mine = parse(changed)
    assert _native.check_record(changed) == (Check.OK if isinstance(mine, Record) else mine)


@pytest.mark.parametrize("cut", [0, 1, 255, 256, 300, 500, -1])
def test_a_cut_record_is_refused_by_both(cut: int) -> None:
    raw = build(record_of(11))[:cut]
    assert _native.check_record(raw) == parse(raw) == Check.BAD_REQUEST


def test_an_unknown_version_is_told_apart() -> None:
    raw = bytearray(build(record_of(1)))
    raw[8:12] = struct.pack("<I", 2)
    assert _native.check_record(bytes(raw)) == parse(bytes(raw)) == Check.BAD_VERSION


def test_bytes_of_another_place_do_not_pass() -> None:
    """Two blocks swapped, or a shard under another number: every sum is seeded with its place."""
    record = record_of(5, blocks=2, plane_bytes=(640,))
    (first, second), *_ = record.pieces
    honest = build(record)
    at = len(honest) - 2 * len(first)
    assert _native.check_record(honest[:at] + second + first) == Check.CORRUPT
    other = bytearray(honest)
    other[88] = 1
    head = parse_head(honest)
    assert isinstance(head, Head)
    assert _native.check_record(reseal(other, head.head_bytes)) == Check.CORRUPT


def test_impossible_shapes_are_refused() -> None:
    ok = record_of(2, blocks=1)
    assert _native.check_record(build(replace(ok, retention_class=16))) == Check.BAD_REQUEST
    assert _native.check_record(build(replace(ok, fidelity=3))) == Check.BAD_REQUEST
    assert _native.check_record(build(replace(ok, shard=12))) == Check.BAD_REQUEST
    assert _native.check_record(build(replace(ok, tags=[1]))) == Check.BAD_REQUEST
    large = record_of(2, blocks=9, plane_bytes=(1 << 20,))
    assert _native.check_record(build(large)) == Check.BAD_REQUEST  # 9 MiB in more than one block


def test_sums_and_digests_are_those_of_the_native_core() -> None:
    rng = random.Random(4)
    owner, key, piece = rng.randbytes(16), rng.randbytes(32), rng.randbytes(977)
    seed = _native.shard_seed(owner, key, 77, 3, 2, 9)
    assert piece_sum(owner, key, 77, 3, 2, 9, piece) == _native.shard_sum(piece, seed)
    import numpy as np

    sums = np.array([rng.getrandbits(64) for _ in range(10)], np.uint64)
    low, high = _native.plane_digest(key, 77, sums)
    assert plane_digest(key, 77, [int(s) for s in sums]) == struct.pack("<QQ", low, high)
    assert HEAD.size == 256
