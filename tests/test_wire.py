"""kvstore/wire.py against bytes written out by hand, and against itself."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import ProtocolError

U8, U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
KEYS = st.binary(min_size=32, max_size=32)


def test_a_frame_is_laid_out_as_the_protocol_says() -> None:
    body = bytes(range(8))
    frame = wire.encode(wire.Verb.DISCOVER, body, request_id=0x1122334455667788)
    assert frame[:8] == b"KVF1" + bytes([1, 2, 0, 0])
    assert frame[8:16] == bytes.fromhex("8877665544332211")
    assert struct.unpack("<IIII", frame[16:32]) == (0, 8, wire.body_check(body), 0)
    assert frame[32:] == body


def test_checks_stand_in_small_frames_and_read_requests_only() -> None:
    def check(*args: object, **fields: int) -> int:
        return wire.decode_header(wire.encode(*args, **fields)[:32])[0].check  # type: ignore[arg-type]  # any verb and body

    assert check(wire.Verb.PROMISE, b"x") == check(wire.Verb.READ, b"x") == wire.body_check(b"x") != 0
    assert check(wire.Verb.WRITE, b"x") == 0
    assert check(wire.Verb.READ, b"x", kind=wire.Kind.ITEM) == 0


def test_a_foreign_magic_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="magic"):
        wire.decode_header(b"HTTP" + bytes(28))


@given(role=st.sampled_from(wire.Role), cluster=st.binary(min_size=16, max_size=16), epoch=U64, boot=U64, capability=st.binary(max_size=99))
def test_hello_survives_coding(role: int, cluster: bytes, epoch: int, boot: int, capability: bytes) -> None:
    hello = wire.Hello(role, cluster, epoch, boot, 60, 7, capability=capability)
    assert wire.Hello.decode(hello.encode()) == hello
    assert len(hello.encode()) == 48 + len(capability)


writings = st.builds(
    wire.Writing, U64, U64, U64, U32, U32, U8, U8, U16, U32, U32, U32, U8, U8, U8, U8, U64,
    st.lists(U32, max_size=5).map(tuple), st.lists(U64, max_size=5).map(tuple),
)  # fmt: skip


@given(found=st.lists(writings, max_size=4), busy=st.booleans())
def test_a_discover_reply_survives_coding(found: list[wire.Writing], busy: bool) -> None:
    body = wire.encode_discover_reply(found, busy)
    assert wire.decode_discover_reply(body) == (found, busy)
    assert len(body) % 8 == 0
    with pytest.raises(ProtocolError):
        wire.decode_discover_reply(body + b"\0")
    if found:
        with pytest.raises(ProtocolError):
            wire.decode_discover_reply(body[:-1])


@given(names=st.lists(st.tuples(KEYS, U64), max_size=4), bucket=U32, pin=U16)
def test_requests_have_the_lengths_the_protocol_says(names: list[tuple[bytes, int]], bucket: int, pin: int) -> None:
    assert len(wire.encode_promise(names, bucket=bucket, pin_seconds=pin)) == 40 + 40 * len(names)
    assert len(wire.encode_withdraw(names)) == 24 + 40 * len(names)
    assert len(wire.encode_why([key for key, _ in names])) == 24 + 32 * len(names)
    assert len(wire.encode_suspect([(key, write_id, 1) for key, write_id in names])) == 24 + 48 * len(names)
    assert len(wire.encode_discover([key for key, _ in names])) == 32 + 32 * len(names)
    extents = [wire.ReadExtent(key, write_id, 1, 2, 3) for key, write_id in names]
    assert len(wire.encode_read(extents, [(0, 1), (0, 2)])) == 32 + 48 * len(names) + 8


def test_an_item_is_sums_then_digests_then_pieces() -> None:
    body = struct.pack("<2Q", 1, 2) + b"a" * 16 + b"b" * 16 + b"pieces"
    assert wire.decode_item(body, 2) == wire.Item((1, 2), (b"a" * 16, b"b" * 16), b"pieces")
    with pytest.raises(ProtocolError):
        wire.decode_item(body[:47], 2)


def test_the_verbs_of_rdma_are_laid_out_as_the_protocol_says() -> None:
    one = wire.VerbsOpen(
        bytes(range(16)), qpn=0x11, psn=0xABCDEF, mtu=5, credits=256, zone_addr=1 << 40, zone_bytes=4 << 20, rkey=0xCAFE, lid=7
    )
    body = one.encode()
    assert wire.VerbsOpen.decode(body) == one
    assert len(body) == 56
    assert body[:16] == bytes(range(16))
    assert body[24:28] == bytes([5, 0, 7, 0])
    assert struct.unpack_from("<IQQII", body, 28) == (256, 1 << 40, 4 << 20, 0xCAFE, 0)
    with pytest.raises(ProtocolError):
        wire.VerbsOpen.decode(body[:-1])

    extents = [wire.ReadExtent(bytes(32), 1, 2, 3, 4)]
    items = [wire.VerbsItem(0, 1, 4096, 8192), wire.VerbsItem(0, 2, 100, 0)]
    asked = wire.encode_verbs_read(extents, items, credits_told=9, round_=255)
    assert len(asked) == 40 + 48 + 2 * 12
    assert struct.unpack_from("<IIII", asked, 24) == (1, 2, 9, 255)
    assert struct.unpack_from("<HBBII", asked, 88) == (0, 1, 0, 4096, 8192)
    assert wire.decode_verbs_read(asked) == (extents, items, 9, 255)
    with pytest.raises(ProtocolError):
        wire.decode_verbs_read(asked + b"x")
    assert wire.verbs_immediate(40, 0x1FE, 65535) == 0x28FEFFFF

    frame = wire.encode(wire.Verb.VERBS_READ, asked)
    assert wire.decode_header(frame[:32])[0].check == wire.body_check(asked)
