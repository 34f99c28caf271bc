"""Wrong frames, slow and greedy peers at a window directory: refused in time, bounded, and felt by nobody else."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from directory_tools import CLUSTER, Peer, Served, keys_of, names, served
from server_tools import until

from kvstore import wire, wire_directory
from kvstore.errors import ProtocolError
from kvstore.kernels import _native
from kvstore.wire import Role, Status, Verb

VERBS = (Verb.REGISTER, Verb.LOCATE, Verb.TOUCH, Verb.FORGET, Verb.REPORT, Verb.STATUS)
A = wire_directory.Speaker("10.0.0.1:7600", 1, 2)
KEYS = keys_of(1, 3).tobytes()
BODIES = {
    Verb.REGISTER: wire_directory.encode_agent(A, KEYS),
    Verb.TOUCH: wire_directory.encode_agent(A, KEYS),
    Verb.FORGET: wire_directory.encode_agent(A, KEYS),
    Verb.LOCATE: wire_directory.encode_locate(KEYS),
    Verb.REPORT: wire_directory.encode_report("10.0.0.1:7600", 1),
    Verb.STATUS: b"",
}


@pytest.fixture(scope="module")
def directory() -> Iterator[Served]:
    with served(progress_timeout_seconds=1.0) as running:
        yield running


def refused(directory: Served, frame: bytes, status: Status) -> None:
    """A bare answer with that status, then the end of the connection."""
    with directory.connect() as connection:
        connection.send(frame)
        assert connection.receive().status == status
        with pytest.raises(EOFError):
            connection.receive()


@pytest.mark.parametrize("verb", [*VERBS[:5]])
@pytest.mark.parametrize("change", ["empty", "one short", "one long", "head only"])
def test_a_body_that_does_not_add_up_is_refused(directory: Served, verb: Verb, change: str) -> None:
    body = BODIES[verb]
    changed = {"empty": b"", "one short": body[:-1], "one long": body + b"\0", "head only": body[:15]}[change]
    refused(directory, wire.encode(verb, changed), Status.BAD_REQUEST)


def test_fields_out_of_range_are_refused(directory: Served) -> None:
    def agent(
        count: int = 0, size: int = 3, flags: int = 0, clock_ms: int = 0, address: bytes = b"a:1\0\0\0\0\0", keys: bytes = b""
    ) -> bytes:
        return wire_directory._AGENT_REQUEST.pack(bytes(16), 1, 1, clock_ms, count, size, flags) + address + keys

    refused(directory, wire.encode(Verb.REGISTER, agent(count=wire.KEYS_MAX + 1)), Status.TOO_LARGE)
    refused(directory, wire.encode(Verb.REGISTER, agent(count=2**32 - 1)), Status.TOO_LARGE)
    refused(directory, wire.encode(Verb.REGISTER, agent(size=129, address=b"a" * 136)), Status.TOO_LARGE)
    for body in (
        agent(size=0, address=b""),
        agent(address=b"a:1\0\0x\0\0"),  # padding that is none
        agent(address=b"a 1\0\0\0\0\0"),
        agent(address=b"\xff:1\0\0\0\0\0"),
        agent(flags=1),  # of FORGET alone
        agent(clock_ms=2**51),
    ):
        refused(directory, wire.encode(Verb.REGISTER, body), Status.BAD_REQUEST)
    refused(directory, wire.encode(Verb.FORGET, agent(flags=2)), Status.BAD_REQUEST)
    refused(directory, wire.encode(Verb.FORGET, agent(flags=1, count=1, keys=bytes(32))), Status.BAD_REQUEST)
    locate = wire_directory._LOCATE_REQUEST
    refused(directory, wire.encode(Verb.LOCATE, locate.pack(bytes(16), 0, 1025, 0)), Status.TOO_LARGE)
    refused(directory, wire.encode(Verb.LOCATE, locate.pack(bytes(16), 0, 0, 1)), Status.BAD_REQUEST)
    refused(directory, wire.encode(Verb.STATUS, b"x"), Status.BAD_REQUEST)


@pytest.mark.parametrize("verb", VERBS)
def test_a_length_beyond_its_limit_is_refused_before_anything_is_allocated(directory: Served, verb: Verb) -> None:
    for length in (wire.SMALL_BODY_MAX + 1, 2**31, 2**32 - 1):
        refused(directory, wire.encode_header(verb, length), Status.TOO_LARGE)


def test_verbs_and_roles_of_a_node_are_not_known_here_and_the_other_way_round(directory: Served) -> None:
    for verb in (Verb.DISCOVER, Verb.PROMISE, Verb.WITHDRAW, Verb.READ, Verb.WRITE, 99):
        refused(directory, wire.encode(verb, b""), Status.BAD_REQUEST)
    for role in (Role.SMALL, Role.BULK):
        with pytest.raises(ProtocolError, match="BAD_REQUEST"):
            wire.Connection(directory.address, wire.Hello(role, CLUSTER))
    with pytest.raises(ProtocolError, match="WRONG_CLUSTER"):
        wire.Connection(directory.address, wire.Hello(Role.DIRECTORY, b"x" * 16))


def test_a_body_that_fails_its_check_is_refused_as_corrupt(directory: Served) -> None:
    for verb in VERBS[:5]:
        frame = bytearray(wire.encode(verb, BODIES[verb]))
        frame[40] ^= 0x10
        refused(directory, bytes(frame), Status.CORRUPT)


def test_the_longest_reply_there_is_fits_its_frame(directory: Served) -> None:
    """1,024 keys with four holders each, all of different agents with the longest names."""
    keys = keys_of(20, wire_directory.LOCATE_KEYS_MAX)
    with served(connections_max=5000, memory_bytes=64 << 20) as big:
        agents = 512  # each a connection; the reply names every one of them
        for n in range(agents):
            peer = Peer(big, f"{n:0>123}:7600")
            for turn in range(4):
                peer.register(keys[(n + turn * 128) % 512 :: 512])
        found = Peer(big, "w:1").locate(keys)
        assert [len(held) for held in found] == [4] * len(keys)
        assert len({holder.address for held in found for holder in held}) == agents


def test_a_reader_that_takes_no_answers_is_cut_and_holds_up_nobody(directory: Served) -> None:
    with directory.connect() as slow, directory.connect() as other:
        Peer(directory, "10.0.0.9:1").register(keys_of(30, 1024))
        frame = wire.encode(Verb.LOCATE, wire_directory.encode_locate(keys_of(30, 1024).tobytes(), clock_ms=int(directory.now * 1000)))
        slow.socket.settimeout(5.0)
        cut = directory.stats["connections_cut"]
        with pytest.raises(OSError):  # the directory has stopped reading: first our buffers are full, then we are cut
            for _ in range(20_000):
                slow.send(frame)
        assert other.ask(Verb.STATUS, b"").status == Status.OK
        until(lambda: directory.stats["connections_cut"] > cut, "it is cut")


def test_a_peer_that_stands_still_in_mid_frame_is_cut(directory: Served) -> None:
    cut = directory.stats["connections_cut"]
    with directory.connect() as half, wire.Connection(directory.address, None):
        half.send(wire.encode(Verb.LOCATE, BODIES[Verb.LOCATE])[:50])
        until(lambda: directory.stats["connections_cut"] >= cut + 2, "both are cut: the one in mid-frame, the one without a HELLO")


def test_connections_have_a_limit_and_are_told() -> None:
    with served(connections_max=3) as small:
        for _ in range(3):
            small.connect()
        with pytest.raises(ProtocolError, match="BUSY"):
            small.connect()


class Frames:
    """An endless source of frames, right and wrong; the same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def body(self, verb: int) -> bytes:
        dice = self.dice
        keys = dice.randbytes(32 * dice.choice((0, 1, 3, 100))) if dice.random() < 0.7 else KEYS
        if verb == Verb.LOCATE:
            return wire_directory.encode_locate(keys, owner=dice.choice((bytes(16), b"o" * 16)), clock_ms=dice.choice((0, 0, 2**40, 2**63)))
        if verb == Verb.REPORT:
            return wire_directory.encode_report(f"10.0.0.{dice.randrange(30)}:1", dice.randrange(4))
        if verb in (Verb.REGISTER, Verb.TOUCH, Verb.FORGET):
            speaker = wire_directory.Speaker(f"10.0.0.{dice.randrange(30)}:1", dice.randrange(4), dice.randrange(2))
            return wire_directory.encode_agent(speaker, keys, flags=dice.choice((0, 0, 0, 1, 2)))
        return b""

    def frame(self) -> bytes:
        dice = self.dice
        verb = dice.choice(VERBS) if dice.random() < 0.95 else dice.randrange(256)
        body, kind = self.body(verb), dice.random()
        if kind < 0.4:
            return wire.encode(verb, body, request_id=dice.getrandbits(64))
        if kind < 0.7:  # the body is changed and the check is right for it
            changed = bytearray(body)
            for _ in range(dice.randrange(1, 4)):
                if changed:
                    changed[dice.randrange(min(len(changed), 64))] = dice.getrandbits(8)
            if dice.random() < 0.3 and len(changed) >= 4:
                struct.pack_into(
                    "<I", changed, dice.randrange(min(len(changed), 64) - 3), dice.choice((0, 1, 8192, 8193, 2**31, 2**32 - 1))
                )
            changed = changed[: dice.randrange(len(changed) + 1)] if dice.random() < 0.3 else changed + dice.randbytes(dice.randrange(8))
            return wire.encode(verb, bytes(changed))
        whole = bytearray(wire.encode(verb, body))
        if kind < 0.9:
            at = dice.randrange(32 if dice.random() < 0.5 else len(whole))
            whole[at] ^= 1 << dice.randrange(8)
        else:
            whole[:] = dice.randbytes(dice.randrange(1, 200))
        return bytes(whole)


def attack(address: tuple[str, int], seed: int, frames_count: int, hung: list[int]) -> None:
    source = Frames(seed)
    dice, sent = source.dice, 0
    while sent < frames_count:
        batch = [source.frame() for _ in range(dice.randrange(1, 8))]
        sent += len(batch)
        data = wire.encode(Verb.HELLO, wire.Hello(Role.DIRECTORY, CLUSTER).encode()) + b"".join(batch)
        data = data[: dice.randrange(len(data) + 1)] if dice.random() < 0.2 else data
        try:
            with socket.create_connection(address, 20.0) as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
        except TimeoutError:
            hung.append(seed)
            return
        except OSError:
            pass  # the directory ended it: that is its answer


@pytest.mark.parametrize(
    "frames_count", [20_000, pytest.param(500_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])], ids=["quick", "long"]
)
def test_no_frame_harms_the_directory(frames_count: int) -> None:
    with served(virtual_clock=False, memory_bytes=4 << 20) as target:
        hung: list[int] = []
        threads = [threading.Thread(target=attack, args=(target.address, seed, frames_count // 4, hung)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not hung
        until(lambda: target.stats["connections"] == 0, "all connections are forgotten")
        stats = target.stats
        assert stats["faults"] == 0 and stats["agents_connected"] == 0 and stats["frames_malformed"] > 0
        peer = Peer(target, "w:1")
        keys = keys_of(9, 100)
        assert peer.register(keys) == 100 and names(peer.locate(keys)) == [["w:1"]] * 100


def test_a_port_that_is_taken_is_an_error_with_its_number() -> None:
    with served() as first, pytest.raises(OSError) as error:
        _native.DirectoryServer("127.0.0.1", first.address[1], cluster16=CLUSTER)
    assert error.value.errno == 98
