"""Window entries from agent to agent, over real sockets and processes: right bytes or a miss, and nobody waits for the dead."""

from __future__ import annotations

import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from leaks import Counts, at_rest, until_no_more
from peer_child import entry_of
from server_tools import until

from kvstore import wire
from kvstore.client.agent import frames
from kvstore.client.agent.frames import PeerConfig, Verb
from kvstore.client.agent.peer_server import PeerServer
from kvstore.client.agent.peers import Peers
from kvstore.errors import Closed, ConfigError, MisuseError
from kvstore.wire import Frame, Kind, Status

PATIENT = PeerConfig(silence_seconds=10.0)  # this machine is shared: only tests of that limit have it short
ENTRY_BYTES = 1_415_040
WAIT_SECONDS = 10.0


def key(number: int) -> bytes:
    return bytes([1]) + number.to_bytes(31, "little")


@contextmanager
def holder(*words: str, size: int = ENTRY_BYTES) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """An agent in a process of its own: its address, and the process."""
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("peer_child.py")), str(size), *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        address = f"127.0.0.1:{int(child.stdout.readline())}"
        if "stop" in words:
            until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T", "it stands still")
        yield address, child
    finally:
        child.kill()
        child.communicate()


@pytest.fixture(scope="module")
def agent() -> Iterator[str]:
    with holder() as (address, _):
        yield address


@contextmanager
def served(entries: dict[bytes, bytes], config: PeerConfig | None = None) -> Iterator[PeerServer]:
    server = PeerServer("127.0.0.1", 0, windows=lambda owner, key: entries.get(key), config=config)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def scripted(answer: bytes) -> Iterator[str]:
    """A peer that takes one connection, sends `answer` and says no more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken: list[socket.socket] = []

        def run() -> None:
            connection, _ = listener.accept()
            taken.append(connection)
            connection.sendall(answer)

        thread = threading.Thread(target=run)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(WAIT_SECONDS)
        for connection in taken:
            connection.close()


def greeted(*more: bytes) -> bytes:
    return wire.encode(Verb.HELLO, frames.hello(bytes(16)), kind=Kind.REPLY) + b"".join(more)


def reply(entry: bytes, check: bytes) -> bytes:
    return frames.window_reply_head(Frame(Verb.WINDOW, Kind.REQUEST, 1), check, len(entry)) + entry


# --- what is fetched ---


def test_an_entry_comes_whole_from_another_process_into_ones_own_memory_or_new(agent: str) -> None:
    with Peers(config=PATIENT) as peers:
        place = memoryview(bytearray(ENTRY_BYTES + 5))
        assert peers.fetch_window(agent, key(1), WAIT_SECONDS) == entry_of(key(1), ENTRY_BYTES)
        got = peers.fetch_window(agent, key(2), WAIT_SECONDS, place)
        assert got is not None
        assert got.obj is place.obj
        assert got == entry_of(key(2), ENTRY_BYTES)
        assert peers.fetch_window(agent, bytes(32), WAIT_SECONDS) is None
        assert peers.fetch_window(agent, key(3), WAIT_SECONDS, memoryview(bytearray(100))) is None
        stats = peers.stats()
        assert (stats["hit"], stats["missing"], stats["refused"], stats["window_bytes"]) == (2, 1, 1, 2 * ENTRY_BYTES)


def test_many_threads_share_connections(agent: str) -> None:
    found: list[bool] = []
    with Peers(config=PATIENT) as peers:

        def fetch(number: int) -> None:
            for i in range(5):
                entry = peers.fetch_window(agent, key(10 * number + i), WAIT_SECONDS)
                found.append(entry == entry_of(key(10 * number + i), ENTRY_BYTES))

        threads = [threading.Thread(target=fetch, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == [True] * 20
        assert peers.stats()["connections"] <= 4


def test_the_first_holder_that_has_it_is_taken() -> None:
    with served({}) as empty, served({key(1): b"entry"}) as full, Peers(config=PATIENT) as peers:
        assert peers.fetch_first([empty.address, full.address], key(1), WAIT_SECONDS) == b"entry"
        assert peers.stats()["missing"] == 1


def test_owners_and_clusters_are_apart() -> None:
    with PeerServer_of_owner(b"a" * 16) as server:
        with Peers(owner=b"a" * 16, config=PATIENT) as own, Peers(owner=b"b" * 16, config=PATIENT) as other:
            assert own.fetch_window(server.address, key(1), WAIT_SECONDS) == b"entry"
            assert other.fetch_window(server.address, key(1), WAIT_SECONDS) is None
        with Peers(cluster=b"c" * 16, owner=b"a" * 16, config=PATIENT) as stranger:
            assert stranger.fetch_window(server.address, key(1), WAIT_SECONDS) is None
            assert stranger.stats()["refused"] == 1


@contextmanager
def PeerServer_of_owner(owner: bytes) -> Iterator[PeerServer]:
    server = PeerServer("127.0.0.1", 0, windows=lambda asked, _: b"entry" if asked == owner else None)
    try:
        yield server
    finally:
        server.close()


# --- what goes wrong ---


def test_a_dead_holder_costs_20_ms_once_then_nothing_until_its_pause_is_over() -> None:
    with holder("stop") as (address, _), Peers(config=PeerConfig(pause_seconds=0.5)) as peers:
        began = time.monotonic()
        assert peers.fetch_window(address, key(1), WAIT_SECONDS) is None
        assert time.monotonic() - began < 0.02 + 0.25  # the machine is shared
        assert peers.stats()["dead"] == 1
        began = time.process_time()
        assert all(peers.fetch_window(address, key(1), WAIT_SECONDS) is None for _ in range(100))
        assert time.process_time() - began < 0.1
        assert peers.stats()["dead"] == 1
        assert peers.stats()["skipped"] == 100
        until(lambda: not peers.paused(address), "the end of the pause")
        assert peers.fetch_window(address, key(1), WAIT_SECONDS) is None
        assert peers.stats()["dead"] == 2


def test_a_refused_connection_is_dead_and_the_next_candidate_is_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
    with served({key(1): b"entry"}) as server, Peers(config=PATIENT) as peers:
        assert peers.fetch_first([gone, server.address], key(1), WAIT_SECONDS) == b"entry"
        assert peers.stats()["dead"] == 1


def test_a_caller_in_a_hurry_makes_nobody_dead() -> None:
    with holder("stop") as (address, _), Peers(config=PATIENT) as peers:
        assert peers.fetch_window(address, key(1), 0.01) is None
        assert peers.stats()["late"] == 1
        assert not peers.paused(address)


def test_a_holder_killed_in_mid_entry_is_a_miss_at_once() -> None:
    half = reply(bytes(ENTRY_BYTES), bytes(16))[: ENTRY_BYTES // 2]
    with socket.create_server(("127.0.0.1", 0)) as listener, Peers(config=PATIENT) as peers:

        def run() -> None:
            connection, _ = listener.accept()
            connection.sendall(greeted(half))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()  # a reset, as from a killed process with unread input

        thread = threading.Thread(target=run)
        thread.start()
        assert peers.fetch_window(f"127.0.0.1:{listener.getsockname()[1]}", key(1), WAIT_SECONDS) is None
        thread.join()
        assert peers.stats()["dead"] == 1
        assert peers.stats()["connections"] == 0


def test_a_restarted_holder_is_asked_again_on_a_new_connection() -> None:
    with served({key(1): b"entry"}) as first, Peers(config=PATIENT) as peers:
        assert peers.fetch_window(first.address, key(1), WAIT_SECONDS) == b"entry"
        port = first.port
        first.close()
        second = PeerServer("127.0.0.1", port, windows=lambda owner, key: b"again")
        assert peers.fetch_window(second.address, key(1), WAIT_SECONDS) == b"again"
        second.close()
        assert "dead" not in peers.stats()


@pytest.mark.parametrize("what", ["flipped", "other key", "other owner", "other length"])
def test_bytes_of_another_place_never_pass(what: str) -> None:
    entry = bytes(range(256))
    check = frames.window_sum(
        bytes([what == "other owner"]) * 16, key(2) if what == "other key" else key(1), entry[:-1] if what == "other length" else entry
    )
    sent = bytes([1]) + entry[1:] if what == "flipped" else entry
    with scripted(greeted(reply(sent, check))) as address, Peers(config=PATIENT) as peers:
        assert peers.fetch_window(address, key(1), WAIT_SECONDS) is None
        assert peers.stats()["corrupt"] == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100),
        greeted(wire.encode_header(Verb.WINDOW, 2**32 - 1, kind=Kind.REPLY)),
        greeted(wire.encode_header(Verb.WINDOW, 3, kind=Kind.REPLY)),
        greeted(wire.encode(Verb.PART, kind=Kind.REPLY)),
        greeted(wire.encode(Verb.WINDOW, b"x", kind=Kind.REPLY, status=Status.BUSY)),
        greeted(wire.encode(Verb.WINDOW, kind=Kind.REPLY, status=99)),
        wire.encode(Verb.HELLO, bytes(48) + b"x", kind=Kind.REPLY),
        wire.encode(Verb.HELLO, kind=Kind.REPLY, status=Status.BUSY),
        wire.encode_header(Verb.HELLO, 2**32 - 1, kind=Kind.REPLY),
    ],
)
def test_a_peer_that_lies_is_a_miss(answer: bytes) -> None:
    with scripted(answer) as address, Peers(config=PATIENT) as peers:
        assert peers.fetch_window(address, key(1), WAIT_SECONDS) is None
        assert peers.stats()["refused"] == 1
        assert peers.stats()["connections"] == 0


def test_what_cannot_be_asked_is_refused_before_anything_is_sent() -> None:
    with Peers() as peers:
        for address in ("", "host", "host:0", "host:70000", ":1", "host:٣"):
            with pytest.raises(MisuseError, match="E575"):
                peers.fetch_window(address, key(1))
        with pytest.raises(MisuseError, match="E575"):
            peers.fetch_window("127.0.0.1:1", b"short")
    with pytest.raises(Closed):
        peers.fetch_window("127.0.0.1:1", key(1))
    with pytest.raises(ConfigError, match="E196"):
        PeerConfig(threads=0)


def test_a_source_that_fails_costs_its_asker_the_connection_and_nobody_else_anything() -> None:
    def windows(owner: bytes, asked: bytes) -> bytes:
        if asked == key(1):
            raise RuntimeError("a bug of the source")
        return b"entry"

    server = PeerServer("127.0.0.1", 0, windows=windows, config=PeerConfig(threads=1))
    with Peers(config=PATIENT) as peers, Peers(config=PATIENT) as others:
        assert peers.fetch_window(server.address, key(1), WAIT_SECONDS) is None
        assert others.fetch_window(server.address, key(2), WAIT_SECONDS) == b"entry"
        assert server.stats()["faults"] == 1
    server.close()


# --- limits ---


def test_past_its_limit_of_connections_it_says_busy() -> None:
    with served({key(1): b"entry"}, PeerConfig(connections_max=2)) as server:
        held = [wire.Connection(("127.0.0.1", server.port), None) for _ in range(2)]
        until(lambda: server.stats()["connections"] == 2, "the connections")
        with wire.Connection(("127.0.0.1", server.port), None) as third:
            answer = third.receive()
            assert (answer.verb, answer.status) == (Verb.HELLO, Status.BUSY)
        for connection in held:
            connection.close()
        with Peers(config=PATIENT) as peers:
            until(lambda: peers.fetch_window(server.address, key(1), WAIT_SECONDS) == b"entry" or peers._dead_until.clear(), "a free place")


def test_bytes_on_their_way_out_are_bounded() -> None:
    entry = bytes(8 << 20)
    with served({key(1): entry}, PeerConfig(bytes_out_max=10 << 20)) as server, Peers(config=PATIENT) as peers:
        with wire.Connection(("127.0.0.1", server.port), None) as slow:
            slow.send(wire.encode(Verb.HELLO, frames.hello(bytes(16))))
            slow.send(frames.request(Verb.WINDOW, frames.encode_window(bytes(16), key(1))))
            until(lambda: server.stats()["bytes_out"] > 0, "the first answer")
            assert peers.fetch_window(server.address, key(1), WAIT_SECONDS) is None
            assert peers.stats()["busy"] == 1
        until(lambda: server.stats()["bytes_out"] == 0, "the end of the slow one")
        assert peers.fetch_window(server.address, key(1), WAIT_SECONDS) == entry


def test_who_stands_still_is_cut_and_holds_up_nobody() -> None:
    quick = PeerConfig(threads=1, progress_seconds=0.3)
    with served({key(1): bytes(16 << 20), key(2): b"entry"}, quick) as server, Peers(config=PATIENT) as peers:
        silent = wire.Connection(("127.0.0.1", server.port), None)  # never greets
        half = wire.Connection(("127.0.0.1", server.port), None)
        half.send(wire.encode(Verb.HELLO, frames.hello(bytes(16)))[:40])
        greedy = wire.Connection(("127.0.0.1", server.port), None)  # never takes what it asked for
        greedy.send(wire.encode(Verb.HELLO, frames.hello(bytes(16))) + frames.request(Verb.WINDOW, frames.encode_window(bytes(16), key(1))))
        assert peers.fetch_window(server.address, key(2), WAIT_SECONDS) == b"entry"
        until(lambda: server.stats().get("cut") == 3, "three cuts")
        until(lambda: server.stats()["bytes_out"] == 0, "what the third was owed")
        for connection in (silent, half, greedy):
            connection.close()


def test_answers_that_nobody_takes_stop_the_reading() -> None:
    """A peer that asks without end and never reads fills its own connection, not our memory."""
    entry = bytes(1 << 20)
    with served({key(1): entry}) as server, wire.Connection(("127.0.0.1", server.port), None) as greedy:
        greedy.socket.setblocking(False)
        ask = frames.request(Verb.WINDOW, frames.encode_window(bytes(16), key(1)))
        greedy.socket.send(wire.encode(Verb.HELLO, frames.hello(bytes(16))))
        sent = 0
        while sent < 20_000:
            try:
                greedy.socket.send(ask)
                sent += 1
            except BlockingIOError:
                break
        until(lambda: server.stats()["bytes_out"] > 0, "an answer that waits")
        assert server.stats()["bytes_out"] <= 2 * len(entry)


# --- strangers ---


@pytest.mark.parametrize(
    ("frame", "status"),
    [
        (wire.encode_header(Verb.HELLO, 0, version=9), Status.BAD_VERSION),
        (wire.encode_header(Verb.HELLO, 2**32 - 1), Status.TOO_LARGE),
        (wire.encode_header(Verb.WINDOW, 48), Status.BAD_REQUEST),  # no greeting
        (wire.encode_header(7, 0), Status.BAD_REQUEST),
        (wire.encode_header(Verb.HELLO, 0, kind=1), Status.BAD_REQUEST),
        (wire.encode_header(Verb.HELLO, 4, check=1) + b"body", Status.CORRUPT),
        (wire.encode(Verb.HELLO, b"body"), Status.BAD_REQUEST),
        (wire.encode(Verb.HELLO, wire.Hello(0, bytes(16)).encode()), Status.BAD_REQUEST),
        (wire.encode(Verb.HELLO, frames.hello(b"x" * 16)), Status.WRONG_CLUSTER),
        (wire.encode(Verb.HELLO, frames.hello(bytes(16))) * 2, Status.BAD_REQUEST),
        (wire.encode(Verb.HELLO, frames.hello(bytes(16))) + frames.request(Verb.WINDOW, b"x"), Status.BAD_REQUEST),
        (wire.encode(Verb.HELLO, frames.hello(bytes(16))) + wire.encode_header(Verb.PART, 80 << 20), Status.TOO_LARGE),
        (wire.encode(Verb.HELLO, frames.hello(bytes(16))) + frames.request(Verb.ABORT, b"x"), Status.BAD_REQUEST),
    ],
)
def test_each_wrong_frame_has_its_answer_and_ends_the_connection(frame: bytes, status: Status) -> None:
    with served({}) as server, wire.Connection(("127.0.0.1", server.port), None) as stranger:
        stranger.send(frame)
        answer = stranger.receive()
        if answer.verb == Verb.HELLO and answer.status == Status.OK:
            answer = stranger.receive()
        assert answer.status == status
        with pytest.raises(EOFError):
            stranger.receive()


def test_strangers_and_noise_end_without_a_word_and_without_harm() -> None:
    """Seeded. Not covered: frames made with knowledge of branches, time (above)."""
    dice = random.Random(3)
    with served({key(1): b"entry"}) as server:
        for _ in range(150):
            noise = _noise(dice)
            with wire.Connection(("127.0.0.1", server.port), None) as stranger:
                try:
                    stranger.send(noise)
                    if dice.random() < 0.5:
                        stranger.socket.shutdown(socket.SHUT_WR)
                        while stranger.socket.recv(4096):
                            pass
                except OSError:
                    pass
        until(lambda: server.stats()["connections"] == 0, "the end of all of them")
        with Peers(config=PATIENT) as peers:
            assert peers.fetch_window(server.address, key(1), WAIT_SECONDS) == b"entry"


def _noise(dice: random.Random) -> bytes:
    """Anything from random bytes to almost right frames, cut anywhere."""
    if dice.random() < 0.2:
        return dice.randbytes(dice.randrange(200))
    offer = frames.Offer(dice.randbytes(16), bytes(16), (("a", 5000), ("b", 0)), 4096, 5, b"note").encode()
    bodies = {
        Verb.HELLO: frames.hello(bytes(16)),
        Verb.WINDOW: frames.encode_window(bytes(16), key(1)),
        Verb.OFFER: offer,
        Verb.PART: frames.PART.pack(dice.randbytes(16), 0, 0, 0) + dice.randbytes(100),
        Verb.COMMIT: dice.randbytes(32),
        Verb.ABORT: dice.randbytes(16),
    }
    parts = [wire.encode(Verb.HELLO, bodies[Verb.HELLO])] if dice.random() < 0.8 else []
    for _ in range(dice.randrange(4)):
        verb = dice.choice(list(bodies))
        body = bytearray(bodies[verb])
        if dice.random() < 0.5:
            body[dice.randrange(len(body))] = dice.randrange(256)
        if dice.random() < 0.2:
            body = body[: dice.randrange(len(body))]
        frame = bytearray(frames.request(verb, bytes(body)))
        if dice.random() < 0.3:
            frame[dice.randrange(32)] = dice.randrange(256)
        parts.append(bytes(frame))
    whole = b"".join(parts)
    return whole[: dice.randrange(len(whole) + 1)] if dice.random() < 0.3 else whole


def test_no_descriptor_and_no_thread_is_left_after_200_connections_and_servers() -> None:
    began = at_rest()
    with served({key(1): b"entry"}) as server:
        before: Counts = ()
        for cycle in range(200):
            with Peers(config=PATIENT) as peers:
                assert peers.fetch_window(server.address, key(1), WAIT_SECONDS) == b"entry"
            if cycle == 5:
                until(lambda: server.stats()["connections"] == 0, "the end of all connections")
                before = at_rest()
        until(lambda: server.stats()["connections"] == 0, "the end of all connections")
        until_no_more(before)
    for _ in range(20):
        with served({}) as server, wire.Connection(("127.0.0.1", server.port), None):
            pass
    until_no_more(began)
