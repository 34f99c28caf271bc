"""The daemon's end of RDMA against clients that mean harm, or die: it costs their own connection, and nobody else waits for them."""

from __future__ import annotations

import random
import signal
import struct
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from server_tools import Client, InProcess, extent_of, make_record, serving, until
from verbs.peer import End
from verbs.reader import Reader, body_bytes, items_of
from verbs.test_daemon import come_to_rest, node

from kvstore import record, wire
from kvstore.errors import ConfigError
from kvstore.wire import Kind, Status, Verb

__all__ = ["node"]
NETWORK = bytes(10) + b"\xff\xff\x0a\x4d\x00"  # 10.77.0.x, the devices' own: the kernel looks a second for an address there
TRIES = 30


def ask_open_to_nobody(client: Client, base: End, count: int = TRIES) -> list[wire.Connection]:
    """As many connections, each of which wants the daemon to write to a host that is not there; nobody waits for the answers."""
    asked = []
    for number in range(count):
        mine = wire.VerbsOpen(NETWORK + bytes([100 + number]), base.qpn, base.psn, 5, 4, base.zone.buf, base.zone_bytes, 1)
        connection = client.bulk()
        connection.send(wire.encode(Verb.VERBS_OPEN, mine.encode()))
        asked.append(connection)
    return asked


def test_who_names_addresses_where_nobody_is_keeps_no_other_host_waiting(tmp_path: Path) -> None:
    r = make_record(1)
    with serving(tmp_path / "node", host="0.0.0.0", rdma_device="rxe0") as node, End("rxe1") as base:
        node.write(r)
        asked = ask_open_to_nobody(node, base)
        honest = Client(("10.77.0.1", node.server.port))  # from that address, too
        with closing(honest), Reader(honest) as reader:
            reader.ask([extent_of(r)], items_of([r]))
            assert reader.answers(4) == [Status.OK] * 4
            assert node.stats["verbs_refused"] < TRIES / 2, "they were all looked for first"
            for connection in asked:
                connection.close()
            until(lambda: node.stats["connections"] <= 2, "the daemon lets go of who has gone", 40)
            assert node.stats["verbs_refused"] < TRIES / 2, "they were looked for though nobody waits"
        come_to_rest(node)


def test_a_daemon_ends_without_looking_for_everybody_it_was_asked_to(tmp_path: Path) -> None:
    with End("rxe1") as base:
        node = InProcess(tmp_path / "node", rdma_device="rxe0")
        ask_open_to_nobody(node, base)
        began = time.monotonic()
        node.close()
        assert time.monotonic() - began < TRIES / 2


def test_a_pool_larger_than_the_host_is_one_error_and_locks_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"E147.*this host has"):
        InProcess(tmp_path / "node", rdma_device="rxe0", rdma_pool_bytes=1 << 40, bulk_threads=1)


def test_reads_and_writes_between_reads_by_rdma_are_answered_in_order(node: InProcess) -> None:
    first = make_record(21, blocks=64)
    node.write(first)
    items = items_of([first])
    with Reader(node, credits=8, zone_bytes=2 << 20) as reader:
        for turn in range(3):
            new = make_record(30 + turn, blocks=16)
            reader.ask([extent_of(first)], items)
            reader.connection.send(wire.encode(Verb.READ, wire.encode_read([extent_of(first)], [(0, 0), (0, 1)]), request_id=5))
            reader.connection.send(wire.encode(Verb.WRITE, record.build(new), request_id=6))
            reader.ask([extent_of(first)], items)
            assert reader.answers(4) == [Status.OK] * 4
            told = [reader.connection.receive() for _ in range(3)]
            assert [(f.request_id, f.kind, f.status) for f in told] == [(5, Kind.ITEM, 0), (5, Kind.ITEM, 0), (6, Kind.REPLY, 0)]
            assert reader.answers(4) == [Status.OK] * 4
            for item in items:
                reader.assert_holds(item, first)
            reader.receive(8)
            reader.ask([], [], credits_told=8)


def garbage(dice: random.Random, r: record.Record) -> bytes:
    """Of a VERBS_READ: numbers at the edges of their range, a few words of it replaced, cut, too long, or nothing but noise."""
    edges = [0, 1, 2, 255, 256, 4095, 4096, 4097, 65535, 65536, 65537, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
    lengths = [body_bytes(r, 0), *edges]
    items = [
        wire.VerbsItem(dice.randrange(2), dice.randrange(6), dice.choice(lengths), dice.choice(edges))
        for _ in range(dice.choice([0, 1, 2, 9, 70]))
    ]
    told, round_ = dice.choice([0, 0, 0, *edges]), dice.choice([0, 5, 255, 256, (1 << 32) - 1])
    body = bytearray(wire.encode_verbs_read([extent_of(r)] * 2, items, credits_told=told, round_=round_))
    match dice.randrange(5):
        case 1:
            for _ in range(4):
                at = dice.randrange(len(body) // 4) * 4
                body[at : at + 4] = struct.pack("<I", dice.choice(edges))
        case 2:
            del body[dice.randrange(len(body)) :]
        case 3:
            body += dice.randbytes(dice.randrange(200))
        case 4:
            body[:] = dice.randbytes(dice.randrange(300))
    return bytes(body)


def test_garbage_for_reads_costs_its_own_connection_and_leaves_nothing_behind(node: InProcess) -> None:
    dice = random.Random(5)
    r = make_record(23, blocks=64)
    node.write(r)
    items = items_of([r])
    with End("rxe1", 2 << 20) as base, Reader(node, zone_bytes=2 << 20) as honest:
        for number in range(100):
            with Reader(node, base=base, credits=dice.choice([1, 4, 32])) as reader:
                with suppress(OSError):  # it may have been cut for what came before
                    for _ in range(dice.randrange(1, 4)):
                        verb = dice.choice([Verb.VERBS_READ] * 4 + [Verb.READ, Verb.VERBS_OPEN])
                        reader.connection.send(wire.encode(verb, garbage(dice, r)))
                reader.end_tcp()
            if number % 25 == 0:
                honest.ask([extent_of(r)], items)
                assert honest.answers(4) == [Status.OK] * 4
                for item in items:
                    honest.assert_holds(item, r)
                honest.receive(4)
                honest.ask([], [], credits_told=4)
        until(lambda: node.stats["verbs_queue_pairs"] == 1, "the daemon lets go of all others", 60)
        assert node.stats["faults"] == 0


def test_who_lies_about_credits_is_cut_whatever_else_it_sends(tmp_path: Path) -> None:
    """It asks for more than it has receive requests for, so that writes wait in the daemon's memory, and goes on talking."""
    r = make_record(25, blocks=64)
    talk = wire.encode(Verb.VERBS_READ, wire.encode_verbs_read([], [], credits_told=0, round_=0)) * 80
    with serving(tmp_path / "node", rdma_device="rxe0", progress_timeout_seconds=3.0) as node:
        node.write(r)
        with Reader(node, credits=4, zone_bytes=2 << 20) as liar:
            liar.ask([], [], credits_told=1000)
            liar.ask([extent_of(r)], items_of([r]) * 10)

            def cut() -> bool:
                with suppress(OSError):
                    liar.connection.socket.sendall(talk)
                return node.stats["connections_cut"] == 1

            until(cut, "the daemon cuts it", 60)
            until(lambda: node.stats["verbs_queue_pairs"] == 0, "the daemon lets go of it", 60)
        come_to_rest(node)


# Opens a connection, asks for much with credits for it, says so and waits: to be stopped, or killed, in mid-transfer.
VICTIM = """
import sys
sys.path[:0] = [sys.argv[1]]
from server_tools import Client, extent_of, make_record
from verbs.reader import Reader, body_bytes
from kvstore import wire
r = make_record(24, blocks=64)
size = body_bytes(r, 0)
reader = Reader(Client(("127.0.0.1", int(sys.argv[2]))), credits=2000, zone_bytes=size)
for _ in range(20):
    reader.ask([extent_of(r)], [wire.VerbsItem(0, 0, size, 0)] * 100)
reader.completions(1)
print("under way", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_dies_or_stands_still_in_mid_transfer_holds_nothing(node: InProcess, end: signal.Signals) -> None:
    r = make_record(24, blocks=64)
    node.write(r)
    tests = str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", VICTIM, tests, str(node.server.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
        try:
            assert victim.stdout and victim.stdout.readline() == "under way\n"
            victim.send_signal(end)
            with Reader(node, zone_bytes=2 << 20) as reader:
                reader.ask([extent_of(r)], items_of([r]))
                assert reader.answers(4) == [Status.OK] * 4
                for item in items_of([r]):
                    reader.assert_holds(item, r)
                until(lambda: node.stats["verbs_queue_pairs"] == 1 or end == signal.SIGSTOP, "the daemon lets go of it", 60)
        finally:
            victim.kill()
