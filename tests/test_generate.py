"""Generated block bytes: the native core against numpy, and that every wrong byte is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.kernels import _native
from kvstore.kernels.generate_reference import generate_block


def some_keys(count: int) -> np.ndarray:
    return np.random.default_rng(4).integers(0, 256, (count, 32), np.uint8)


@given(block_bytes=st.integers(1, 300), salt=st.integers(0, 2**64 - 1), gap=st.integers(0, 40), count=st.integers(1, 5))
def test_native_bytes_equal_the_numpy_reference_and_stay_in_their_rows(block_bytes: int, salt: int, gap: int, count: int) -> None:
    keys = some_keys(count)
    buffer = np.full((count, block_bytes + gap), 0xAA, np.uint8)
    rows = buffer[:, :block_bytes]
    _native.generate_blocks(keys, block_bytes, rows, salt)
    for key, row in zip(keys, rows, strict=True):
        assert np.array_equal(row, generate_block(key.tobytes(), block_bytes, salt))
    assert (buffer[:, block_bytes:] == 0xAA).all()
    assert _native.verify_blocks(keys, block_bytes, rows, salt) == -1


@given(block_bytes=st.integers(1, 300), at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_every_flipped_bit_is_found_and_the_first_bad_block_is_named(block_bytes: int, at: int, bit: int) -> None:
    keys = some_keys(4)
    blocks = np.empty((4, block_bytes), np.uint8)
    _native.generate_blocks(keys, block_bytes, blocks)
    place = at % blocks.size
    blocks.reshape(-1)[place] ^= 1 << bit
    blocks[3, 0] ^= 0x80
    expected = min(place // block_bytes, 3)
    if (place, 1 << bit) == (3 * block_bytes, 0x80):  # the two flips undo each other
        expected = -1
    assert _native.verify_blocks(keys, block_bytes, blocks) == expected


def test_another_key_or_salt_gives_other_bytes() -> None:
    keys = some_keys(2)
    rows = [np.empty((2, 64), np.uint8) for _ in range(2)]
    _native.generate_blocks(keys, 64, rows[0], 0)
    _native.generate_blocks(keys, 64, rows[1], 1)
    assert len({row.tobytes() for part in rows for row in part}) == 4
    assert _native.verify_blocks(keys, 64, rows[0], 1) == 0
    assert _native.verify_blocks(keys[::-1].copy(), 64, rows[0], 0) == 0


def test_sizes_that_do_not_fit_are_refused() -> None:
    keys = some_keys(2)
    for bad_keys, block_bytes, out in (
        (keys, 64, np.empty((3, 64), np.uint8)),
        (keys, 63, np.empty((2, 64), np.uint8)),
        (np.empty((2, 31), np.uint8), 64, np.empty((2, 64), np.uint8)),
        (keys, 32, np.empty((2, 64), np.uint8)[:, ::2]),
    ):
        with pytest.raises(ValueError, match=r"."):
            _native.generate_blocks(bad_keys, block_bytes, out)
    with pytest.raises(TypeError):
        _native.generate_blocks(keys, 64, np.empty((2, 64), np.int16))  # type: ignore[arg-type]  # never into a converted copy
    frozen = np.empty((2, 64), np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(TypeError):
        _native.generate_blocks(keys, 64, frozen)
