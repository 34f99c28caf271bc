"""Both codecs: one matrix, every survivor set, and refusal of what a decoder must not see."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import zfec
from hypothesis import given
from hypothesis import strategies as st

from kvstore.erasure import Codec, codec
from kvstore.errors import CodecError
from kvstore.kernels import _native

NAMES = ("isal", "zfec")
LENGTHS = (1, 15, 31, 32, 33, 63, 64, 65, 4095, 735_232)  # the last: one shard of a full v41 extent
SURVIVOR_SETS = list(itertools.combinations(range(12), 10))


@cache
def shards_of(length: int) -> np.ndarray:
    """All 12 shards of random data, parity by zfec itself."""
    data = np.random.default_rng(length).integers(0, 256, (10, length), np.uint8)
    parity = zfec.Encoder(10, 12).encode([row.tobytes() for row in data], [10, 11])
    return np.concatenate([data, [np.frombuffer(p, np.uint8) for p in parity]])


def test_the_matrix_of_10_plus_2_is_the_golden_one() -> None:
    """Decides every parity byte on disk."""
    assert _native.Codec(10, 2).matrix()[100:].hex() == "42c15c2d722ceb841bd9a9155162f59532206599"


@pytest.mark.parametrize("m", range(5))
def test_the_matrix_is_zfecs_for_every_k(m: int) -> None:
    for k in range(1, 33):
        unit = np.eye(k, dtype=np.uint8)
        encoded = zfec.Encoder(k, k + m).encode([row.tobytes() for row in unit], list(range(k, k + m))) if m else []
        assert _native.Codec(k, m).matrix() == unit.tobytes() + b"".join(encoded)


@given(k=st.integers(1, 32), m=st.integers(0, 4), length=st.integers(1, 300), data=st.data())
def test_parity_and_decoded_data_are_the_same_from_both(k: int, m: int, length: int, data: st.DataObject) -> None:
    isal, portable = codec("isal", k, m), codec("zfec", k, m)
    source = np.random.default_rng(length).integers(0, 256, (k, length), np.uint8)
    parity = isal.encode(source)
    assert np.array_equal(parity, portable.encode(source))
    shards = np.concatenate([source, parity])
    numbers = data.draw(st.permutations(range(k + m)))[: data.draw(st.integers(k, k + m))]
    for coder in (isal, portable):
        assert np.array_equal(coder.decode([(n, shards[n]) for n in numbers]), source)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_every_survivor_set_gives_the_data_back(name: str, length: int) -> None:
    shards = shards_of(length)
    coder = codec(name)
    for survivors in SURVIVOR_SETS:
        assert np.array_equal(coder.decode([(n, shards[n]) for n in survivors]), shards[:10]), survivors


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_every_survivor_set_gives_all_lost_shards_back_parity_included(name: str, length: int) -> None:
    shards = shards_of(length)
    coder = codec(name)
    native = _native.Codec(10, 2)
    for survivors in SURVIVOR_SETS:
        lost = [n for n in range(12) if n not in survivors]
        if name == "isal":
            rebuilt = np.zeros((2, length), np.uint8)
            order = survivors[::-1]  # any order will do
            native.decode(list(order), [shards[n] for n in order], lost[::-1], list(rebuilt[::-1]))
        else:
            data = coder.decode([(n, shards[n]) for n in survivors])
            rebuilt = np.concatenate([data, coder.encode(data)])[lost]
        assert np.array_equal(rebuilt, shards[lost]), survivors


Spoil = Callable[[list[tuple[int, np.ndarray]]], object]
BAD_SHARDS: dict[str, Spoil] = {
    "duplicate": lambda s: [s[0], *s[:9]],
    "duplicate behind ten good ones": lambda s: [*s[:10], s[3]],
    "missing": lambda s: s[:9],
    "none": lambda s: [],
    "number 200": lambda s: [(200, s[0][1]), *s[1:10]],
    "number 12": lambda s: [(12, s[0][1]), *s[1:10]],
    "negative number": lambda s: [(-1, s[0][1]), *s[1:10]],
    "number that is none": lambda s: [("0", s[0][1]), *s[1:10]],
    "boolean number": lambda s: [(True, s[1][1]), *s[2:11]],
    "unequal": lambda s: [(0, s[0][1][:-1]), *s[1:10]],
    "longer parity": lambda s: [*s[:9], (10, np.zeros(65, np.uint8))],
    "empty": lambda s: [(n, piece[:0]) for n, piece in s],
    "wrong type": lambda s: [(0, s[0][1].astype(np.int16)), *s[1:10]],
    "two dimensions": lambda s: [(0, s[0][1].reshape(8, 8)), *s[1:10]],
    "no array": lambda s: [(0, b"x" * 64), *s[1:10]],
}


@pytest.mark.parametrize("spoil", BAD_SHARDS.values(), ids=BAD_SHARDS)
@pytest.mark.parametrize("name", NAMES)
def test_bad_shards_are_refused_before_a_decoder_sees_them(name: str, spoil: Spoil) -> None:
    shards = shards_of(64)
    good = [(n, shards[n]) for n in range(12)]
    with pytest.raises(CodecError):
        codec(name).decode(spoil(good))  # type: ignore[arg-type]  # some are no shards on purpose


@pytest.mark.parametrize("name", NAMES)
def test_bad_data_is_refused_before_an_encoder_sees_it(name: str) -> None:
    for data in (
        np.zeros((9, 64), np.uint8),
        np.zeros((10, 0), np.uint8),
        np.zeros((10, 64), np.int8),
        np.zeros(640, np.uint8),
        [b"x"] * 10,
    ):
        with pytest.raises(CodecError):
            codec(name).encode(data)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("k", "m"), [(0, 2), (33, 2), (10, -1), (10, 5), (10.0, 2)])
def test_impossible_codes_are_refused(name: str, k: int, m: int) -> None:
    with pytest.raises(CodecError):
        codec(name, k, m)


def test_unknown_codecs_are_refused() -> None:
    with pytest.raises(CodecError, match="isal"):
        codec("rot13")


@pytest.mark.parametrize("name", NAMES)
def test_buffers_may_be_strided_and_read_only(name: str) -> None:
    shards = shards_of(65)
    coder: Codec = codec(name)
    apart = np.zeros((12, 130), np.uint8)
    apart[:, ::2] = shards
    frozen = apart[:, ::2]
    frozen.flags.writeable = False
    assert np.array_equal(coder.encode(frozen[:10]), shards[10:])
    assert np.array_equal(coder.decode([(n, frozen[n]) for n in range(2, 12)]), shards[:10])


def test_the_native_core_refuses_by_itself_what_the_checks_would() -> None:
    native = _native.Codec(4, 2)
    pieces = [np.zeros(8, np.uint8) for _ in range(4)]
    out = [np.zeros(8, np.uint8)]
    for have, given_pieces, want, target in (
        ([0, 0, 1, 2], pieces, [3], out),
        ([0, 1, 2, 6], pieces, [3], out),
        ([0, 1, 2, 3], pieces, [3], out),
        ([0, 1, 2, 4], pieces, [3, 3], out * 2),
        ([0, 1, 2, 4], pieces, [200], out),
        ([0, 1, 2], pieces[:3], [3], out),
        ([0, 1, 2, 4], pieces[:3], [3], out),
        ([0, 1, 2, 4], [*pieces[:3], np.zeros(7, np.uint8)], [3], out),
        ([0, 1, 2, 4], pieces, [3], [np.zeros(9, np.uint8)]),
        ([0, 1, 2, 4], pieces, [3, 5, 0], out * 3),
    ):
        with pytest.raises(CodecError):
            native.decode(have, given_pieces, want, target)
    with pytest.raises(CodecError):
        _native.Codec(33, 0)
    with pytest.raises(CodecError):
        native.encode(np.zeros((4, 8), np.uint8), np.zeros((2, 7), np.uint8))
