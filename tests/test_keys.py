"""Block keys: golden vectors, the native core against its plain reference, and what must change a key."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import statistics
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from interpreter import runs_beside

from kvstore.errors import KeyFormatError
from kvstore.kernels import _native, hash_reference
from kvstore.keys import KeyChain, Namespace, block_tags, external_keys
from kvstore.layout import PRESETS

SECRET = b"a secret of thirty-two bytes ..."
V41 = PRESETS["v41"].digest()
PLAIN = Namespace(weights=bytes(range(32)), kv_dtype="v41", layout_digest=V41)
FULL = Namespace(
    weights=bytes(range(32)),
    adapter=b"adapter",
    rope="yarn factor 4",
    kv_dtype="bf16",
    kv_scales=b"scales",
    layout_digest=V41,
    kv_group=1,
    rank=2,
    rank_count=8,
)

# docs/KEYS.md prints these. If one changes, every stored block is lost: make a new key format instead.
GOLDEN_NAMESPACES = {
    PLAIN: "efd605972e2f71d7c24d5250d87ffb99f20f595397908dd2ebb2c6cf2a6accb5",
    FULL: "5d3930b658db4af62755d9b24a3fbcb0bd17ce6dfb1f69b2a151c3d3b1659ad9",
}
GOLDEN_CHAINS = [  # of token ids 0, 1, ... 255
    (
        PLAIN,
        b"",
        [
            "3118c3ae4d0d8daf3599c6335266f7d21bc12cba06c569564bdbec97cfc776cf",
            "a559ee8c058cd8ff0ea4eeaaa341d71b977555258c6df49b829be4d3d27cb718",
        ],
    ),
    (
        PLAIN,
        SECRET,
        [
            "b6825ad745b8e1abe55c03f0f5b84d92376a018cfb61e186606498b562b78b01",
            "4dd50048a1fc9c113495497c1ca7926e3960c7f9a17a8e71e22d95fcd83ae421",
        ],
    ),
    (
        FULL,
        SECRET,
        [
            "f87a64b3a26b66c19f6c7964c2d75f11919d5b07ca1624dff1439095ddeffd6a",
            "6c02386ffb641d9305b2b746e4a71dbc9e38ba437dcd87d8cd59b1d201cfcf76",
        ],
    ),
]
GOLDEN_EXTERNAL = {
    b"\x01" * 32: "fbd26677839c7b6781de55525eca7b006fdd1c3400cf12ec8dd391f28af1aa82",
    b"x": "e07be677f7ec6f3c4dc80c8275569c9381e4250eaeaf93a002a5b19c9a979686",
}


def keys_of(namespace: Namespace, tokens: list[int], secret: bytes = b"", block_tokens: int = 128) -> list[str]:
    chain = KeyChain(namespace, secret, block_tokens=block_tokens)
    chain.extend(tokens)
    return [key.tobytes().hex() for key in chain.keys]


@pytest.mark.parametrize(("namespace", "digest"), GOLDEN_NAMESPACES.items())
def test_namespace_digests_are_the_golden_ones(namespace: Namespace, digest: str) -> None:
    assert namespace.digest().hex() == digest


@pytest.mark.parametrize(("namespace", "secret", "golden"), GOLDEN_CHAINS)
def test_keys_are_the_golden_ones(namespace: Namespace, secret: bytes, golden: list[str]) -> None:
    assert keys_of(namespace, list(range(256)), secret) == golden


def test_external_keys_are_the_golden_ones() -> None:
    keys = external_keys(PLAIN, b"", list(GOLDEN_EXTERNAL))
    assert [key.tobytes().hex() for key in keys] == list(GOLDEN_EXTERNAL.values())
    assert external_keys(PLAIN, b"", []).shape == (0, 32)


def test_a_key_is_what_the_documents_say_byte_by_byte() -> None:
    """Written out with hashlib alone, so that a mistake shared by the native core and its reference would show."""
    tokens = struct.pack("<128I", *range(128))
    message = b"\x00\x10\x00\x00\x00kvstore.block.v1" + b"\x01\x20\x00\x00\x00" + PLAIN.digest()
    message += b"\x02\x00\x00\x00\x00" + b"\x03\x00\x02\x00\x00" + tokens
    expected = hashlib.blake2b(message, key=SECRET, digest_size=32).hexdigest()
    assert keys_of(PLAIN, list(range(128)), SECRET) == [expected]


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=300),
    block_tokens=st.integers(1, 40),
    secret=st.binary(max_size=64),
    previous=st.sampled_from([b"", bytes(32), b"\xff" * 32]),
)
def test_native_keys_equal_the_plain_reference(tokens: list[int], block_tokens: int, secret: bytes, previous: bytes) -> None:
    blocks = len(tokens) // block_tokens
    ids = np.array(tokens[: blocks * block_tokens], np.uint32)
    out = np.zeros((blocks, 32), np.uint8)
    _native.block_keys(secret, PLAIN.digest(), previous, ids, block_tokens, out)
    assert [key.tobytes() for key in out] == hash_reference.block_keys(secret, PLAIN.digest(), previous, tokens, block_tokens)


@given(hashes=st.lists(st.binary(min_size=1, max_size=80), max_size=20), secret=st.binary(max_size=64))
def test_native_external_keys_equal_the_plain_reference(hashes: list[bytes], secret: bytes) -> None:
    keys = external_keys(FULL, secret, hashes)
    assert [key.tobytes() for key in keys] == hash_reference.external_keys(secret, FULL.digest(), hashes)


@given(cuts=st.lists(st.integers(0, 1000), max_size=8))
def test_a_prompt_appended_in_pieces_has_the_keys_of_the_whole(cuts: list[int]) -> None:
    tokens = np.arange(1000, dtype=np.uint32) * 7919
    edges = [0, *sorted(cuts), 1000]
    chain = KeyChain(PLAIN, SECRET, block_tokens=16)
    completed = [chain.extend(tokens[a:b]) for a, b in itertools.pairwise(edges)]
    assert chain.token_count == 1000
    assert [k.tobytes().hex() for k in np.concatenate(completed)] == [k.tobytes().hex() for k in chain.keys]
    assert [k.tobytes().hex() for k in chain.keys] == keys_of(PLAIN, tokens.tolist(), SECRET, 16)


def test_an_appended_turn_hashes_only_its_own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    real = _native.block_keys

    def counting(secret: bytes, namespace: bytes, previous: bytes, tokens: np.ndarray, block_tokens: int, out: np.ndarray) -> None:
        hashed.append(len(out))
        real(secret, namespace, previous, tokens, block_tokens, out)

    monkeypatch.setattr(_native, "block_keys", counting)
    chain = KeyChain(PLAIN)
    chain.extend(range(600 * 128 + 100))
    chain.extend(range(27))  # still no whole block
    chain.extend(range(1 + 3 * 128))
    assert hashed == [600, 4]
    assert len(chain.keys) == 604


def test_keys_that_were_handed_out_stay_as_they_are_and_cannot_be_written() -> None:
    chain = KeyChain(PLAIN)
    early = chain.extend(range(128))
    before = early.tobytes()
    chain.extend(range(200 * 128))  # outgrows the first buffer
    assert early.tobytes() == before == chain.keys[0].tobytes()
    for view in (early, chain.keys):
        with pytest.raises(ValueError, match="read-only"):
            view[0, 0] = 1


@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=40, max_size=40), at=st.integers(0, 39), other=st.integers(0, 2**32 - 1))
def test_one_other_token_changes_its_key_and_all_after_it_and_none_before(tokens: list[int], at: int, other: int) -> None:
    changed = [*tokens[:at], other, *tokens[at + 1 :]]
    pairs = zip(keys_of(PLAIN, tokens, block_tokens=8), keys_of(PLAIN, changed, block_tokens=8), strict=True)
    assert [a != b for a, b in pairs] == [other != tokens[at] and block >= at // 8 for block in range(5)]


CONTENTS = ("weights", "adapter", "rope", "kv_dtype", "kv_scales", "layout_digest")
NUMBERS = ("kv_group", "rank", "rank_count")
namespaces = st.builds(
    Namespace,
    weights=st.binary(min_size=1, max_size=40),
    adapter=st.binary(max_size=40),
    rope=st.text(max_size=20),
    kv_dtype=st.text(min_size=1, max_size=20),
    kv_scales=st.binary(max_size=40),
    layout_digest=st.binary(min_size=32, max_size=32),
    kv_group=st.integers(0, 9),
    rank=st.integers(0, 7),
    rank_count=st.integers(8, 64),
)


def as_bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value


@given(namespace=namespaces, other=namespaces, field=st.sampled_from([*CONTENTS, *NUMBERS]))
def test_any_one_field_changed_changes_the_key(namespace: Namespace, other: Namespace, field: str) -> None:
    changed = dataclasses.replace(namespace, **{field: getattr(other, field)})
    same = dict(changed.fields())[field] == dict(namespace.fields())[field]
    assert (keys_of(namespace, list(range(128))) == keys_of(changed, list(range(128)))) == same


@given(namespace=namespaces, pair=st.sampled_from([*itertools.combinations(CONTENTS[:5], 2), *itertools.combinations(NUMBERS, 2)]))
def test_any_two_fields_swapped_change_the_key(namespace: Namespace, pair: tuple[str, str]) -> None:
    """Of one kind and unlike each other; where the swap itself is no namespace (rank past rank_count, no weights) it is refused."""
    a, b = (getattr(namespace, name) for name in pair)
    texts = [x.decode("latin-1") if isinstance(x, bytes) else x for x in (a, b)]  # kv_dtype takes text only
    values = (a, b) if pair[0] in NUMBERS else tuple(texts)
    plain = {pair[0]: values[0], pair[1]: values[1]}
    swapped = {pair[0]: values[1], pair[1]: values[0]}
    try:
        first, second = dataclasses.replace(namespace, **plain), dataclasses.replace(namespace, **swapped)
    except KeyFormatError:
        return
    assert (keys_of(first, list(range(128))) == keys_of(second, list(range(128)))) == (values[0] == values[1])


def test_moving_a_byte_from_one_field_to_the_next_changes_the_key() -> None:
    one = dataclasses.replace(PLAIN, adapter=b"ab", rope=b"c")
    two = dataclasses.replace(PLAIN, adapter=b"a", rope=b"bc")
    assert one.digest() != two.digest()


def test_secrets_and_block_sizes_and_foreign_hashes_never_share_keys() -> None:
    tokens = list(range(128))
    named = [
        keys_of(PLAIN, tokens)[0],
        keys_of(PLAIN, tokens, SECRET)[0],
        keys_of(PLAIN, tokens, SECRET + b"\x00")[0],
        keys_of(PLAIN, tokens, bytes(1))[0],
        keys_of(PLAIN, tokens, block_tokens=64)[0],
        external_keys(PLAIN, b"", [struct.pack("<128I", *tokens)])[0].tobytes().hex(),
        external_keys(PLAIN, b"", [struct.pack("<128I", *tokens) + b"\x00"])[0].tobytes().hex(),
    ]
    assert len(set(named)) == len(named)


def test_processes_with_different_hash_seeds_agree() -> None:
    program = (
        "from kvstore.keys import KeyChain, Namespace\n"
        "from kvstore.layout import PRESETS\n"
        "n = Namespace(weights=bytes(range(32)), kv_dtype='v41', layout_digest=PRESETS['v41'].digest())\n"
        "c = KeyChain(n); c.extend(range(256)); print(c.keys.tobytes().hex())"
    )
    printed = set()
    for seed in ("0", "1", "random"):
        run = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        printed.add(run.stdout.strip())
    assert printed == {"".join(GOLDEN_CHAINS[0][2])}


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int64, np.uint64, list, tuple, range])
def test_token_ids_may_come_in_any_integer_form(dtype: type) -> None:
    source: object
    if dtype is range:
        source = range(100)
    else:
        source = dtype(range(100)) if dtype in (list, tuple) else np.arange(100, dtype=dtype)
    chain = KeyChain(PLAIN, block_tokens=50)
    chain.extend(source)  # type: ignore[arg-type]  # one of several forms
    assert [key.tobytes().hex() for key in chain.keys] == keys_of(PLAIN, list(range(100)), block_tokens=50)


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], [[1, 2]], ["a"], [None], [2**70], np.array([True]), np.array([-5]), "text", 7])
def test_what_is_no_list_of_token_ids_is_refused(tokens: object) -> None:
    chain = KeyChain(PLAIN)
    with pytest.raises(KeyFormatError):
        chain.extend(tokens)  # type: ignore[arg-type]  # that is the point
    assert chain.token_count == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"weights": b""},
        {"weights": 5},
        {"kv_dtype": ""},
        {"layout_digest": b"short"},
        {"rank": 1},
        {"rank": -1},
        {"rank_count": 0},
        {"kv_group": 1.0},
        {"kv_group": 2**32},
        {"key_format": 2},
    ],
)
def test_impossible_namespaces_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(KeyFormatError):
        dataclasses.replace(PLAIN, **fields)  # type: ignore[arg-type]  # that is the point


def test_bad_secrets_hashes_and_key_arrays_are_refused() -> None:
    with pytest.raises(KeyFormatError):
        KeyChain(PLAIN, b"x" * 65)
    with pytest.raises(KeyFormatError):
        external_keys(PLAIN, b"", [b"fine", b""])
    for keys in (np.zeros((2, 31), np.uint8), np.zeros((2, 32), np.int8), np.zeros(32, np.uint8), [b"x" * 32]):
        with pytest.raises(KeyFormatError):
            block_tags(keys)  # type: ignore[arg-type]  # that is the point


def test_tags_are_the_second_eight_bytes_of_the_keys() -> None:
    chain = KeyChain(PLAIN)
    chain.extend(range(5 * 128))
    expected = [hash_reference.block_tag(key.tobytes()) for key in chain.keys]
    assert block_tags(chain.keys).tolist() == expected == [_native.block_tag(key.tobytes()) for key in chain.keys]
    assert block_tags(chain.keys[::2]).tolist() == expected[::2]
    assert block_tags(chain.keys[:0]).shape == (0,)


def test_native_refuses_sizes_that_do_not_fit() -> None:
    ids = np.zeros(10, np.uint32)
    keys = np.zeros((2, 32), np.uint8)
    for arguments in (
        (b"x" * 65, bytes(32), b"", ids, 5, keys),
        (b"", bytes(31), b"", ids, 5, keys),
        (b"", bytes(32), b"short", ids, 5, keys),
        (b"", bytes(32), b"", ids, 4, keys),
        (b"", bytes(32), b"", ids, 0, keys),
        (b"", bytes(32), b"", ids, 5, np.zeros((2, 31), np.uint8)),
    ):
        with pytest.raises(ValueError, match=r"."):
            _native.block_keys(*arguments)
    with pytest.raises(TypeError):
        _native.block_keys(b"", bytes(32), b"", ids.astype(np.int64), 5, keys)  # type: ignore[arg-type]  # never converted silently
    for ends in ([5, 3], [0, 11]):
        with pytest.raises(ValueError, match="ends"):
            _native.external_keys(b"", bytes(32), np.zeros(10, np.uint8), np.array(ends, np.uint64), keys)


def test_hashing_600_blocks_takes_under_3_ms() -> None:
    tokens = np.arange(600 * 128, dtype=np.uint32)

    def once() -> float:
        chain = KeyChain(PLAIN, SECRET)
        begin = time.perf_counter()
        chain.extend(tokens)
        return time.perf_counter() - begin

    assert statistics.median(once() for _ in range(21)) < 0.003


def test_hashing_does_not_hold_the_interpreter() -> None:
    tokens = np.zeros(100_000 * 128, np.uint32)
    out = np.empty((100_000, 32), np.uint8)
    assert runs_beside(lambda: _native.block_keys(b"", bytes(32), b"", tokens, 128, out))
