"""Frames that are wrong: each gets its typed answer where its header can be read, then the end, and the server goes on unharmed."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_tools import TAG, InProcess, assert_item, extent_of, make_record, serving, until

from kvstore import record, wire
from kvstore.errors import ProtocolError
from kvstore.wire import Role, Status, Verb


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    with serving(tmp_path_factory.mktemp("frames")) as running:
        yield running


def assert_ended(connection: wire.Connection) -> None:
    """The server has closed; what it had sent was taken before."""
    with pytest.raises((EOFError, ConnectionError)):
        connection.receive()


def refused(connection: wire.Connection, data: bytes, status: Status, request_id: int = 0) -> None:
    """`data` is answered by one bare frame of that status, then the connection ends."""
    connection.send(data)
    frame = connection.receive()
    assert (frame.status, frame.body, frame.request_id) == (status, b"", request_id)
    assert_ended(connection)


SMALL_VERBS = (Verb.DISCOVER, Verb.PROMISE, Verb.WITHDRAW, Verb.WHY, Verb.ADMIT, Verb.SUSPECT)
HEADER_FAULTS = {
    "version 0": ({"version": 0}, Status.BAD_VERSION),
    "version 2": ({"version": 2}, Status.BAD_VERSION),
    "kind reply": ({"kind": wire.Kind.REPLY}, Status.BAD_REQUEST),
    "kind unknown": ({"kind": 9}, Status.BAD_REQUEST),
    "flags": ({"flags": 1}, Status.BAD_REQUEST),
    "status": ({"status": 1}, Status.BAD_REQUEST),
    "aux": ({"aux": 1}, Status.BAD_REQUEST),
}


@pytest.mark.parametrize("fault", HEADER_FAULTS)
@pytest.mark.parametrize("role", [None, Role.SMALL, Role.BULK])
def test_a_header_field_out_of_place_is_refused(server: InProcess, role: Role | None, fault: str) -> None:
    fields, status = HEADER_FAULTS[fault]
    verb = Verb.HELLO if role is None else Verb.DISCOVER if role == Role.SMALL else Verb.READ
    refused(server.connect(role), wire.encode_header(verb, 8, request_id=77, **fields) + bytes(8), status, 77)


@pytest.mark.parametrize("role", [None, Role.SMALL, Role.BULK])
def test_what_is_not_our_protocol_is_closed_without_a_word(server: InProcess, role: Role | None) -> None:
    connection = server.connect(role)
    connection.send(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
    assert_ended(connection)


@pytest.mark.parametrize("role", [None, Role.SMALL, Role.BULK])
@pytest.mark.parametrize("verb", [0, *Verb, 8, 15, 20, 255])
def test_a_verb_that_the_role_does_not_have_is_refused(server: InProcess, role: Role | None, verb: int) -> None:
    allowed = {None: {Verb.HELLO}, Role.SMALL: set(SMALL_VERBS), Role.BULK: {Verb.READ, Verb.WRITE, Verb.VERBS_OPEN, Verb.VERBS_READ}}[role]
    if verb in allowed:
        return
    refused(server.connect(role), wire.encode(verb, bytes(64), request_id=5), Status.BAD_REQUEST, 5)


LIMITS = {
    Verb.HELLO: wire.HELLO_BODY_MAX,
    **dict.fromkeys(SMALL_VERBS, wire.SMALL_BODY_MAX),
    Verb.READ: wire.READ_BODY_MAX,
    Verb.WRITE: wire.RECORD_BYTES_MAX,
    Verb.VERBS_OPEN: 56,
    Verb.VERBS_READ: wire.READ_BODY_MAX,
}


@pytest.mark.parametrize("verb", LIMITS)
@pytest.mark.parametrize("excess", ["one", "2^31", "2^32-1"])
def test_a_length_beyond_its_limit_is_refused_before_anything_is_allocated(server: InProcess, verb: Verb, excess: str) -> None:
    role = None if verb == Verb.HELLO else Role.SMALL if verb < 16 else Role.BULK
    length = {"one": LIMITS[verb] + 1, "2^31": 2**31, "2^32-1": 2**32 - 1}[excess]
    before = resident_bytes()
    refused(server.connect(role), wire.encode_header(verb, length, request_id=3), Status.TOO_LARGE, 3)
    assert resident_bytes() - before < 4 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("count", [wire.KEYS_MAX + 1, 2**31, 2**32 - 1])
def test_more_keys_or_names_than_allowed_are_refused(server: InProcess, count: int) -> None:
    discover = wire._DISCOVER_REQUEST.pack(wire.NO_OWNER, 0, count, 0)
    promise = wire._PROMISE_REQUEST.pack(wire.NO_OWNER, 0, count, 0, 3, 2, 60, 0)
    withdraw = wire._WITHDRAW_REQUEST.pack(wire.NO_OWNER, count, 0)
    packs = (wire._WHY_REQUEST, wire._ADMIT_REQUEST, wire._SUSPECT_REQUEST)
    why, admit, suspect = (pack.pack(wire.NO_OWNER, count, 0) for pack in packs)
    for verb, body in zip(SMALL_VERBS, (discover, promise, withdraw, why, admit, suspect), strict=True):
        refused(server.small(), wire.encode(verb, body), Status.TOO_LARGE)


@pytest.mark.parametrize("extents, items", [(wire.READ_EXTENTS_MAX + 1, 0), (0, wire.READ_ITEMS_MAX + 1), (2**32 - 1, 2**32 - 1)])
def test_more_extents_or_items_than_allowed_are_refused(server: InProcess, extents: int, items: int) -> None:
    body = wire._READ_REQUEST.pack(wire.NO_OWNER, 0, extents, items)
    refused(server.bulk(), wire.encode(Verb.READ, body), Status.TOO_LARGE)


NAME = (bytes(32), 1)
SHORT_BODIES = {
    Verb.DISCOVER: wire.encode_discover([bytes(32)] * 3),
    Verb.PROMISE: wire.encode_promise([NAME] * 3),
    Verb.WITHDRAW: wire.encode_withdraw([NAME] * 3),
    Verb.WHY: wire.encode_why([bytes(32)] * 3),
    Verb.ADMIT: wire.encode_admit([bytes(32)] * 3),
    Verb.SUSPECT: wire.encode_suspect([(bytes(32), 1, 0)] * 3),
    Verb.READ: wire.encode_read([wire.ReadExtent(bytes(32), 1, 0, 0, 1)] * 2, [(0, 0), (1, 0)]),
}


@pytest.mark.parametrize("verb", SHORT_BODIES)
@pytest.mark.parametrize("change", ["empty", "one byte", "one short", "one long", "fixed part only"])
def test_a_body_that_does_not_add_up_is_refused(server: InProcess, verb: Verb, change: str) -> None:
    body = SHORT_BODIES[verb]
    changed = {"empty": b"", "one byte": b"\0", "one short": body[:-1], "one long": body + b"\0", "fixed part only": body[:24]}[change]
    refused(server.connect(Role.BULK if verb == Verb.READ else Role.SMALL), wire.encode(verb, changed), Status.BAD_REQUEST)


def test_reserved_fields_must_be_zero(server: InProcess) -> None:
    owner = wire.NO_OWNER
    for body in (
        wire._PROMISE_REQUEST.pack(owner, 0, 0, 0, 4, 2, 60, 0),  # an unknown flag
        wire._PROMISE_REQUEST.pack(owner, 0, 0, 0, 3, 16, 60, 0),  # a class out of range
        wire._PROMISE_REQUEST.pack(owner, 0, 0, 0, 3, 2, 60, 1),
    ):
        refused(server.small(), wire.encode(Verb.PROMISE, body), Status.BAD_REQUEST)
    refused(server.small(), wire.encode(Verb.DISCOVER, wire._DISCOVER_REQUEST.pack(owner, 0, 0, 1)), Status.BAD_REQUEST)
    refused(server.small(), wire.encode(Verb.WITHDRAW, wire._WITHDRAW_REQUEST.pack(owner, 0, 1)), Status.BAD_REQUEST)
    refused(server.small(), wire.encode(Verb.WHY, wire._WHY_REQUEST.pack(owner, 0, 1)), Status.BAD_REQUEST)
    refused(server.small(), wire.encode(Verb.SUSPECT, wire._SUSPECT_REQUEST.pack(owner, 0, 1)), Status.BAD_REQUEST)
    suspect = bytearray(wire.encode_suspect([(*NAME, 0)]))
    suspect[-1] = 1
    refused(server.small(), wire.encode(Verb.SUSPECT, bytes(suspect)), Status.BAD_REQUEST)
    head = wire._READ_REQUEST.pack(owner, 0, 1, 1)
    extent = (bytes(32), 1, 0, 0, 0, 1, 0)
    item = wire._READ_ITEM.pack(0, 0, 0)
    for at in (3, 6):
        bad = wire._READ_EXTENT.pack(*(1 if i == at else value for i, value in enumerate(extent)))
        refused(server.bulk(), wire.encode(Verb.READ, head + bad + item), Status.BAD_REQUEST)
    good = wire._READ_EXTENT.pack(*extent)
    refused(server.bulk(), wire.encode(Verb.READ, head + good + wire._READ_ITEM.pack(0, 0, 1)), Status.BAD_REQUEST)
    refused(server.bulk(), wire.encode(Verb.READ, head + good + wire._READ_ITEM.pack(1, 0, 0)), Status.BAD_REQUEST)


@pytest.mark.parametrize("verb", [*SMALL_VERBS, Verb.READ])
def test_a_body_that_fails_its_check_is_refused_as_corrupt(server: InProcess, verb: Verb) -> None:
    frame = bytearray(wire.encode(verb, SHORT_BODIES[verb], request_id=9))
    frame[40] ^= 0x10
    refused(server.connect(Role.BULK if verb == Verb.READ else Role.SMALL), bytes(frame), Status.CORRUPT, 9)


def test_a_bad_hello_is_told_why(server: InProcess) -> None:
    def hello(**changes: object) -> bytes:
        fields = {"role": Role.SMALL, "cluster": TAG, **changes}
        return wire.encode(Verb.HELLO, wire.Hello(**fields).encode())  # type: ignore[arg-type]  # fields vary by case

    refused(server.connect(None), hello(cluster=bytes(16)), Status.WRONG_CLUSTER)
    refused(server.connect(None), hello(version_min=2, version_max=9), Status.BAD_VERSION)
    refused(server.connect(None), hello(version_min=0, version_max=0), Status.BAD_VERSION)
    refused(server.connect(None), hello(role=2), Status.BAD_REQUEST)
    lying = bytearray(wire.Hello(Role.SMALL, TAG).encode())
    struct.pack_into("<I", lying, 4, 2**32 - 1)
    refused(server.connect(None), wire.encode(Verb.HELLO, bytes(lying)), Status.BAD_REQUEST)
    refused(server.connect(None), wire.encode(Verb.HELLO, bytes(lying[:47])), Status.BAD_REQUEST)


def test_a_range_of_versions_and_a_capability_are_accepted(server: InProcess) -> None:
    hello = wire.Hello(Role.SMALL, TAG, version_min=1, version_max=7, capability=b"x" * 4096)
    with wire.Connection(server.address, hello) as connection:
        assert connection.peer is not None and connection.peer.version_max == 1


def test_a_second_hello_is_refused(server: InProcess) -> None:
    for role in (Role.SMALL, Role.BULK):
        refused(server.connect(role), wire.encode(Verb.HELLO, wire.Hello(role, TAG).encode()), Status.BAD_REQUEST)


def test_a_silent_hello_error_is_a_protocol_error_in_the_python_client(server: InProcess) -> None:
    with pytest.raises(ProtocolError, match="WRONG_CLUSTER"):
        wire.Connection(server.address, wire.Hello(Role.SMALL, bytes(16)))


def test_everything_may_arrive_in_single_bytes(server: InProcess) -> None:
    r = make_record(1, blocks=1, planes=(100,))
    small = server.connect(None)
    for byte in wire.encode(Verb.HELLO, wire.Hello(Role.SMALL, TAG).encode()) + wire.encode(
        Verb.DISCOVER, wire.encode_discover([b"k" * 32])
    ):
        small.send(bytes([byte]))
    assert small.receive().verb == Verb.HELLO
    assert small.receive().status == Status.OK
    bulk = server.connect(None)
    whole = wire.encode(Verb.HELLO, wire.Hello(Role.BULK, TAG).encode()) + wire.encode(Verb.WRITE, record.build(r))
    for byte in whole + wire.encode(Verb.READ, wire.encode_read([extent_of(r)], [(0, 0)])):
        bulk.send(bytes([byte]))
    assert [bulk.receive().status for _ in range(3)] == [Status.OK] * 3


def test_hello_and_requests_may_arrive_in_one_piece(server: InProcess) -> None:
    requests = b"".join(wire.encode(Verb.DISCOVER, wire.encode_discover([os.urandom(32)]), request_id=i) for i in range(100))
    small = server.connect(None)
    small.send(wire.encode(Verb.HELLO, wire.Hello(Role.SMALL, TAG).encode()) + requests)
    small.receive()
    assert [small.receive().request_id for _ in range(100)] == list(range(100))
    bulk = server.connect(None)
    reads = b"".join(wire.encode(Verb.READ, SHORT_BODIES[Verb.READ], request_id=i) for i in range(50))
    bulk.send(wire.encode(Verb.HELLO, wire.Hello(Role.BULK, TAG).encode()) + reads)
    bulk.receive()
    assert [(bulk.receive().request_id) for _ in range(100)] == [i for i in range(50) for _ in range(2)]


@pytest.mark.parametrize("seed", range(4))
def test_writes_and_reads_that_take_turns_on_one_connection_are_answered_in_order(server: InProcess, seed: int) -> None:
    """A thread of its own receives records, and connections move to and from it: between requests, and with some still unanswered."""
    dice = random.Random(seed)
    known = [make_record(1000 * seed + 5000, blocks=2)]
    assert server.write(known[0]) == [Status.OK]
    bulk = server.bulk()
    for first in range(0, 100, 5):
        asked: list[record.Record | None] = []
        frames = b""
        for number in range(first, first + dice.randint(1, 5)):
            asked.append(dice.choice((None, *known[-3:])))
            if (r := asked[-1]) is None:
                known.append(make_record(1000 * seed + 5001 + number, blocks=dice.randint(1, 3)))
                frames += wire.encode(Verb.WRITE, record.build(known[-1]), request_id=number)
            else:
                frames += wire.encode(Verb.READ, wire.encode_read([extent_of(r)], [(0, 2)]), request_id=number)
        while frames:
            cut = dice.choice((1, 31, 40, 5000, 100_000, len(frames)))
            bulk.send(frames[:cut])
            frames = frames[cut:]
        for number, r in enumerate(asked, first):
            frame = bulk.receive()
            assert (frame.request_id, frame.status) == (number, Status.OK)
            if r is not None:
                assert_item(frame.body, r, 2)


def test_requests_before_a_bad_frame_are_still_answered(server: InProcess) -> None:
    bulk = server.bulk()
    bulk.send(wire.encode(Verb.READ, SHORT_BODIES[Verb.READ], request_id=1) + wire.encode(99, b"", request_id=2))
    assert [(bulk.receive().request_id, bulk.receive().request_id)] == [(1, 1)]
    last = bulk.receive()
    assert (last.request_id, last.status) == (2, Status.BAD_REQUEST)
    assert_ended(bulk)


def test_malformed_frames_are_counted_and_leave_no_connection_behind(server: InProcess) -> None:
    before = server.stats["frames_malformed"]
    refused(server.small(), wire.encode(77), Status.BAD_REQUEST)
    assert server.stats["frames_malformed"] == before + 1
    server.close_connections()
    until(lambda: server.stats["connections"] == 0, "all connections are closed")


def test_rdma_where_there_is_none_is_refused_and_tcp_goes_on(server: InProcess) -> None:
    """The daemon's end without a device; with one: tests/verbs."""
    ask = wire.VerbsOpen(bytes(10) + b"\xff\xff\x0a\x4d\x00\x01", 17, 5, 5, credits=4, zone_addr=1 << 20, zone_bytes=4096, rkey=9).encode()
    connection = server.connect(Role.BULK)
    for faulty in (ask[:-1], ask + b"\0", ask[:25] + b"\1" + ask[26:]):
        status = Status.TOO_LARGE if len(faulty) > 56 else Status.BAD_REQUEST
        refused(server.connect(Role.BULK), wire.encode(Verb.VERBS_OPEN, faulty, request_id=2), status, 2)
    refused(server.connect(Role.BULK), wire.encode_header(Verb.VERBS_OPEN, 56) + ask, Status.CORRUPT)
    answer = connection.ask(Verb.VERBS_OPEN, ask)
    assert (answer.status, answer.body) == (Status.NOT_FOUND, b"")
    assert connection.ask(Verb.READ, wire.encode_read([wire.ReadExtent(bytes(32), 1, 0, 0, 1)], [(0, 0)])).status == Status.NOT_FOUND
    refused(connection, wire.encode(Verb.VERBS_READ, wire.encode_verbs_read([], [], credits_told=1), request_id=3), Status.BAD_REQUEST, 3)
    assert server.stats["verbs_refused"] == 0  # nothing was tried
