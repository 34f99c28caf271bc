"""Checksums and digests of pieces: golden values, and the native core against the xxhash package."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.kernels import _native, hash_reference

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
OWNER = st.binary(min_size=16, max_size=16)
KEY = st.binary(min_size=32, max_size=32)
WRITE_ID = 0x1122334455667788


def test_sums_are_the_golden_ones() -> None:
    """Stored on disk: if one changes, every stored shard is lost."""
    key = bytes(range(32))
    seed = _native.shard_seed(bytes(16), key, WRITE_ID, 11, 3, 63)
    assert seed == 0xF46DFF0148E8A6EC
    assert _native.shard_sum(bytes(range(256)), seed) == 0xE201F5049A947D6B
    assert _native.plane_digest(key, WRITE_ID, np.arange(10, dtype=np.uint64)) == (0x8550D9BB23AD38EC, 0x383C84166AD85211)
    assert _native.block_tag(key) == 0x0F0E0D0C0B0A0908


@given(owner=OWNER, key=KEY, write_id=U64, numbers=st.tuples(U32, U32, U32))
def test_seeds_equal_the_plain_reference(owner: bytes, key: bytes, write_id: int, numbers: tuple[int, int, int]) -> None:
    assert _native.shard_seed(owner, key, write_id, *numbers) == hash_reference.shard_seed(owner, key, write_id, *numbers)


@given(piece=st.binary(max_size=700), seed=U64)
def test_sums_equal_the_plain_reference(piece: bytes, seed: int) -> None:
    assert _native.shard_sum(piece, seed) == hash_reference.shard_sum(piece, seed)
    assert _native.shard_sum(np.frombuffer(piece, np.uint8), seed) == hash_reference.shard_sum(piece, seed)


@given(key=KEY, write_id=U64, sums=st.lists(U64, max_size=32))
def test_digests_equal_the_plain_reference(key: bytes, write_id: int, sums: list[int]) -> None:
    of_data = np.array(sums, np.uint64)
    assert _native.plane_digest(key, write_id, of_data) == hash_reference.plane_digest(key, write_id, of_data)


def test_a_piece_passes_at_its_own_place_only() -> None:
    piece = bytes(range(256))
    place = (bytes(16), bytes(32), WRITE_ID, 1, 2, 3)
    elsewhere = [
        (b"\x01" + bytes(15), *place[1:]),
        (place[0], b"\x01" + bytes(31), *place[2:]),
        (*place[:2], WRITE_ID + 1, *place[3:]),
        (*place[:3], 2, 1, 3),
        (*place[:3], 1, 3, 2),
        (*place[:3], 3, 2, 1),
    ]
    sums = {_native.shard_sum(piece, _native.shard_seed(*where)) for where in (place, *elsewhere)}
    assert len(sums) == 1 + len(elsewhere)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="owner"):
        _native.shard_seed(bytes(15), bytes(32), 1, 0, 0, 0)
    with pytest.raises(ValueError, match="32"):
        _native.plane_digest(bytes(32), 1, np.zeros(33, np.uint64))
    with pytest.raises(ValueError, match="32"):
        _native.block_tag(bytes(31))
