"""Slow, silent, greedy and dying peers: each is bounded, and none is felt by another."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from pathlib import Path

import pytest
from leaks import at_rest, until_no_more
from server_tools import TAG, assert_item, daemon, extent_of, make_record, serving, until

from kvstore import record, wire
from kvstore.wire import Role, Status, Verb


def test_past_the_connection_limit_a_client_is_told_busy_and_served_once_there_is_room(tmp_path: Path) -> None:
    with serving(tmp_path, connections_max=4) as server:
        held = [server.small() for _ in range(4)]
        late = server.connect(None)
        answer = late.receive()
        assert (answer.verb, answer.status, answer.aux) == (Verb.HELLO, Status.BUSY, 1000)
        with pytest.raises(EOFError):
            late.receive()
        late.close()
        held[0].close()
        until(lambda: server.stats["connections"] <= 3, "the closed connection is forgotten")
        assert server.small().ask(Verb.DISCOVER, wire.encode_discover([])).status == Status.OK
        assert server.stats["connections_refused"] == 1


def test_writes_past_the_memory_limit_are_drained_and_answered_busy(tmp_path: Path) -> None:
    """Three connections stop in mid-record and hold 4 MB each; a fourth record does not fit, the next after they are gone does."""
    with serving(tmp_path, write_arena_bytes=14 << 20) as server:
        large = make_record(1, blocks=8, planes=(1_000_000,), k=2, m=0)
        body = record.build(large)
        assert 3.9e6 < len(body) < 4.1e6
        holders = [server.bulk() for _ in range(3)]
        for holder in holders:
            holder.send(wire.encode_header(Verb.WRITE, len(body)) + body[:100_000])
        until(lambda: server.stats["write_arena_used_bytes"] > 12_000_000, "three records are being received")
        bulk = server.bulk()
        assert bulk.ask(Verb.WRITE, body).status == Status.BUSY
        assert bulk.ask(Verb.READ, wire.encode_read([extent_of(large)], [(0, 0)])).status == Status.NOT_FOUND
        for holder in holders:
            holder.close()
        until(lambda: server.stats["write_arena_used_bytes"] == 0, "their memory is back")
        assert bulk.ask(Verb.WRITE, body).status == Status.OK


def test_a_record_larger_than_the_write_memory_is_too_large_not_busy(tmp_path: Path) -> None:
    with serving(tmp_path, write_arena_bytes=4 << 20) as server:
        bulk = server.bulk()
        assert bulk.ask(Verb.WRITE, bytes(5 << 20)).status == Status.TOO_LARGE
        assert bulk.ask(Verb.WRITE, record.build(make_record(1))).status == Status.OK


@pytest.mark.parametrize("io", ["buffered", "direct", "auto"])
def test_a_reader_that_does_not_read_holds_up_nobody(tmp_path: Path, io: str) -> None:
    """Eight connections ask for 60 MB each and read nothing, on two bulk threads; others are served as if alone."""
    r = make_record(1, blocks=64)
    with serving(tmp_path, io=io, progress_timeout_seconds=60.0) as server:
        assert server.write(r) == [Status.OK]
        greedy = wire.encode(Verb.READ, wire.encode_read([extent_of(r)], [(0, p) for p in range(4)] * 80))
        for _ in range(8):
            server.bulk().send(greedy)
        until(lambda: server.stats["inflight"] == 8, "eight reads stand still")
        for _ in range(20):
            bulk = server.bulk()
            began = time.perf_counter()
            bulk.send(wire.encode(Verb.READ, wire.encode_read([extent_of(r)], [(0, p) for p in range(4)])))
            for plane in range(4):
                assert_item(bulk.receive().body, r, plane)
            assert time.perf_counter() - began < 2.0
            bulk.close()
        assert server.stats["inflight"] == 8


@pytest.mark.parametrize("io", ["buffered", "direct", "auto"])
def test_a_reader_that_stands_still_is_cut_and_all_it_held_is_given_back(tmp_path: Path, io: str) -> None:
    r = make_record(1, blocks=64)
    with serving(tmp_path, io=io, progress_timeout_seconds=0.3) as server:
        assert server.write(r) == [Status.OK]
        server.bulk().send(wire.encode(Verb.READ, wire.encode_read([extent_of(r)], [(0, p) for p in range(4)] * 80)))
        until(lambda: server.stats["connections_cut"] == 1, "it is cut")
        until(lambda: server.stats["inflight"] == 0 and server.stats["read_head_bytes"] == 0, "nothing is held for it")


def test_a_reader_that_is_slow_but_alive_is_not_cut(tmp_path: Path) -> None:
    r = make_record(1, blocks=64)
    pause = threading.Event()
    with serving(tmp_path, progress_timeout_seconds=0.5) as server:
        assert server.write(r) == [Status.OK]
        bulk = server.bulk()
        planes = [0, 1, 2, 3] * 12
        bulk.send(wire.encode(Verb.READ, wire.encode_read([extent_of(r)], [(0, p) for p in planes])))
        for plane in planes:
            assert_item(bulk.receive().body, r, plane)
            pause.wait(0.04)
        assert server.stats["connections_cut"] == 0


@pytest.mark.parametrize("stop_after", [0, 10, 40, 90])
def test_a_peer_that_stops_in_mid_message_is_cut(tmp_path: Path, stop_after: int) -> None:
    with serving(tmp_path, progress_timeout_seconds=0.3) as server:
        hello = wire.encode(Verb.HELLO, wire.Hello(Role.SMALL, TAG).encode())
        request = hello + wire.encode(Verb.DISCOVER, wire.encode_discover([bytes(32)]))
        connection = server.connect(None)
        if stop_after:
            connection.send(request[:stop_after])
        if stop_after > len(hello):
            connection.receive()
        with pytest.raises((EOFError, ConnectionError)):
            connection.receive()
        assert server.stats["connections_cut"] == 1


def test_an_idle_connection_is_closed_and_a_used_one_is_not(tmp_path: Path) -> None:
    pause = threading.Event()
    with serving(tmp_path, idle_timeout_seconds=1.0) as server:
        quiet, busy = server.small(), server.small()
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            assert busy.ask(Verb.DISCOVER, wire.encode_discover([])).status == Status.OK
            pause.wait(0.1)
        with pytest.raises((EOFError, ConnectionError)):
            quiet.receive()
        assert server.stats["connections_idle_closed"] == 1 and server.stats["connections_cut"] == 0


@pytest.mark.parametrize("io", ["buffered", "direct", "auto"])
def test_two_hundred_connections_come_and_go_without_a_trace(tmp_path: Path, io: str) -> None:
    """Each in another state: silent, greeted, in mid-frame, in mid-record, in mid-answer; half are reset instead of closed."""
    r = make_record(1, blocks=64)
    body = record.build(r)
    with serving(tmp_path, io=io) as server:
        assert server.write(r) == [Status.OK]
        server.bulk().ask(Verb.READ, wire.encode_read([extent_of(r)], [(0, 0)]))  # the segment's descriptors are open from now on
        server.close_connections()
        until(lambda: server.stats["connections"] == 0, "quiet")
        before = at_rest()
        for i in range(200):
            connection = server.connect((None, Role.SMALL, Role.BULK, Role.BULK, Role.BULK)[i % 5])
            if i % 5 == 1:
                connection.send(wire.encode(Verb.DISCOVER, wire.encode_discover([r.extent_key]))[:50])
            elif i % 5 == 2:
                connection.send(wire.encode(Verb.WRITE, body)[: 1000 * i])
            elif i % 5 > 2:
                connection.send(wire.encode(Verb.READ, wire.encode_read([extent_of(r)], [(0, p) for p in range(4)] * 20)))
                if i % 5 == 4:
                    connection.receive()
            if i % 2:
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
        until(lambda: server.stats["connections"] == 0, "all are forgotten")
        until(lambda: server.stats["inflight"] == 0 and server.stats["write_arena_used_bytes"] == 0, "nothing is held for them")
        until(lambda: server.stats["read_head_bytes"] == 0, "what the disk was still reading for them has come, and gone")
        until_no_more(before)
        assert len(server.discover(r.extent_key)) == 1


def test_a_client_that_dies_in_mid_write_leaves_nothing_to_find(tmp_path: Path) -> None:
    r = make_record(1, blocks=64)
    body = record.build(r)
    with serving(tmp_path) as server:
        for part in (1, 255, 4096, len(body) // 2, len(body) - 1):
            bulk = server.bulk()
            bulk.send(wire.encode_header(Verb.WRITE, len(body)) + body[:part])
            bulk.close()
        until(lambda: server.stats["connections"] == 0, "all are forgotten")
        assert server.stats["write_arena_used_bytes"] == 0
        assert server.discover(r.extent_key) == []
        assert server.write(r) == [Status.OK]


def test_sixty_four_requests_may_wait_on_one_connection_and_more_wait_in_the_socket(tmp_path: Path) -> None:
    r = make_record(1, blocks=1)
    with serving(tmp_path) as server:
        assert server.write(r) == [Status.OK]
        bulk = server.bulk()
        ask = wire.encode_read([extent_of(r)], [(0, 0)])
        sender = threading.Thread(target=lambda: bulk.send(b"".join(wire.encode(Verb.READ, ask, request_id=i) for i in range(5000))))
        sender.start()
        for i in range(5000):
            frame = bulk.receive()
            assert (frame.request_id, frame.status) == (i, Status.OK)
        sender.join()


def test_small_answers_that_nobody_reads_stop_the_asking_not_the_server(tmp_path: Path) -> None:
    records = [make_record(i, blocks=64, planes=(64,)) for i in range(50)]
    with serving(tmp_path, progress_timeout_seconds=60.0) as server:
        assert set(server.write(*records)) == {Status.OK}
        small = server.small()
        ask = wire.encode(Verb.DISCOVER, wire.encode_discover([r.extent_key for r in records] * 10))
        small.socket.settimeout(0.5)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 3000:  # 48 MB of questions, 900 MB of answers
                small.send(ask)
                sent += 1
        assert 0 < sent < 2000
        assert server.small().ask(Verb.DISCOVER, wire.encode_discover([])).status == Status.OK


def test_a_reply_that_would_pass_its_limit_says_that_it_is_not_whole(tmp_path: Path) -> None:
    records = [make_record(i, blocks=64, planes=(64,)) for i in range(50)]
    with serving(tmp_path) as server:
        assert set(server.write(*records)) == {Status.OK}
        answer = server.small().ask(Verb.DISCOVER, wire.encode_discover([r.extent_key for r in records] * 100))
        found, busy = wire.decode_discover_reply(answer.body)
        assert busy and len(answer.body) <= wire.SMALL_BODY_MAX
        assert [w.key_ordinal for w in found] == list(range(len(found))) and len(found) > 1000


def test_a_daemon_killed_in_mid_write_starts_again_without_the_half_record(tmp_path: Path) -> None:
    whole, half = make_record(1, blocks=64), make_record(2, blocks=64)
    with daemon(tmp_path) as first:
        assert first.write(whole) == [Status.OK]
        body = record.build(half)
        first.bulk().send(wire.encode_header(Verb.WRITE, len(body)) + body[: len(body) // 2])
        first.process.kill()
        first.process.wait()
    with daemon(tmp_path) as second:
        assert [w.write_id for w in second.discover(whole.extent_key, half.extent_key)] == [whole.write_id]
        bulk = second.bulk()
        bulk.send(wire.encode(Verb.READ, wire.encode_read([extent_of(whole)], [(0, p) for p in range(4)])))
        for plane in range(4):
            assert_item(bulk.receive().body, whole, plane)
        assert second.write(half) == [Status.OK]


def test_a_daemon_out_of_descriptors_serves_the_others_and_accepts_again(tmp_path: Path) -> None:
    with daemon(tmp_path, nofile=90) as server:
        served = server.small()
        waiting = [server.connect(None) for _ in range(100)]
        until(lambda: server.descriptors() == 90, "it has no descriptor left")
        assert served.ask(Verb.DISCOVER, wire.encode_discover([])).status == Status.OK
        for each in waiting:
            each.close()
        assert server.small().ask(Verb.DISCOVER, wire.encode_discover([])).status == Status.OK
        assert server.stop().code == 0


def test_a_thousand_connections_cost_little_memory_and_new_ones_are_served(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with daemon(tmp_path) as server:
            server.small().ask(Verb.DISCOVER, wire.encode_discover([]))
            before = server.rss_bytes()
            for i in range(1000):
                server.connect(Role(i % 2))
            assert server.small().ask(Verb.DISCOVER, wire.encode_discover([])).status == Status.OK
            assert server.rss_bytes() - before < 16 << 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(os.geteuid() != 0, reason="closing a connection without a word needs CAP_NET_ADMIN")
@pytest.mark.parametrize("role", [Role.SMALL, Role.BULK])
def test_a_peer_that_vanished_without_a_word_is_found_within_three_seconds(tmp_path: Path, role: Role) -> None:
    tcp_repair = 19
    with serving(tmp_path, progress_timeout_seconds=60.0) as server:
        gone = server.connect(role)
        gone.socket.setsockopt(socket.IPPROTO_TCP, tcp_repair, 1)
        gone.close()
        assert server.stats["connections"] == 1
        began = time.monotonic()
        until(lambda: server.stats["connections"] == 0, "it is found")
        assert time.monotonic() - began < 3.0


def test_withdrawals_beyond_all_room_for_tombstones_are_answered_at_once(tmp_path: Path) -> None:
    """Small questions have one thread: whoever holds it holds up everyone."""
    with serving(tmp_path) as server:
        small = server.small()
        statuses = set()
        for round_ in range(20):
            names = [(round_.to_bytes(16, "big") + at.to_bytes(16, "big"), 1) for at in range(8192)]
            statuses |= set(wire.decode_withdraw_reply(small.ask(Verb.WITHDRAW, wire.encode_withdraw(names)).body))
        assert statuses == {Status.NOT_FOUND, Status.BUSY}


def test_what_unanswered_reads_ask_for_is_bounded_over_all_connections(tmp_path: Path) -> None:
    absent = make_record(1)
    body = wire.encode_read([extent_of(absent)] * 4096, [(at % 4096, 0) for at in range(65_536)])
    with daemon(tmp_path) as server:
        before = server.rss_bytes()
        for _ in range(20):
            bulk = server.connect(Role.BULK, timeout_seconds=0.2)
            try:
                for _ in range(64):
                    bulk.send(wire.encode(Verb.READ, body))
            except TimeoutError:
                pass
        assert server.rss_bytes() - before < 250 << 20
        assert server.bulk().ask(Verb.READ, wire.encode_read([extent_of(absent)], [(0, 0)])).status == Status.NOT_FOUND
