"""The daemon's end of RDMA against an independent peer: every byte in its place, in order, within credits; and what is refused."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import pyverbs.enums as e
from server_tools import CACHESTAT, InProcess, extent_of, make_record, serving, until
from verbs.peer import End
from verbs.reader import Reader, body_bytes, items_of

from kvstore import wire
from kvstore.wire import Status, Verb

NODES = Path(__file__).with_name("nodes.py")
SHARE = Path(os.environ["KVSTORE_GUEST_SHARE"]) if "KVSTORE_GUEST_SHARE" in os.environ else None


@pytest.fixture
def node(tmp_path: Path) -> Iterator[InProcess]:
    with serving(tmp_path / "node", rdma_device="rxe0", progress_timeout_seconds=8.0) as server:
        yield server
        come_to_rest(server)


def come_to_rest(node: InProcess) -> None:
    """Closes this side's connections and waits until the daemon holds nothing for any: both numbers fall when all of one is gone."""
    node.close_connections()
    until(lambda: node.stats["connections"] == 0 and node.stats["verbs_queue_pairs"] == 0, "all connections and queue pairs are gone", 40)


def test_each_item_lands_whole_and_in_order_at_its_offset(node: InProcess) -> None:
    records = [make_record(i, blocks=blocks) for i, blocks in enumerate([1, 4, 64, 3])]
    assert node.write(*records) == [Status.OK] * 4
    items = items_of(records)
    with Reader(node, zone_bytes=2 << 20) as reader:
        before = b"\xa5" * reader.zone_bytes
        reader.zone.write(before, len(before))
        reader.ask([extent_of(r) for r in records], items)
        assert reader.answers(len(items)) == [Status.OK] * len(items)
        for item in items:
            reader.assert_holds(item, records[item.extent])
            assert reader.zone.read(64, item.offset + item.count) == before[:64]  # and nothing beyond
        end = items[-1].offset + items[-1].count
        assert reader.zone.read(reader.zone_bytes - end, end) == before[end:]
    until(lambda: node.stats["verbs_bytes"] >= sum(i.count for i in items), "all is acknowledged")
    stats = node.stats
    assert stats["verbs_bytes"] == sum(i.count for i in items)
    assert (stats["verbs_opened"], stats["verbs_failed"], stats["read_items"][0]) == (1, 0, len(items))
    assert stats["verbs_registered_bytes"] > 0


def test_what_cannot_be_answered_is_told_and_the_next_item_follows(node: InProcess) -> None:
    held, absent = make_record(1), make_record(2)
    node.write(held)
    size = body_bytes(held, 0)
    items = [
        wire.VerbsItem(0, 0, size, 0),
        wire.VerbsItem(1, 0, size, 0),  # no such extent
        wire.VerbsItem(0, 9, size, 0),  # no such plane
        wire.VerbsItem(0, 1, size - 1, 0),  # another length than it has
        wire.VerbsItem(0, 1, size, (1 << 20) - size + 1),  # beyond the zone
        wire.VerbsItem(0, 1, size, 0xFFFFFFFF),
        wire.VerbsItem(0, 1, size, (1 << 20) - size),  # at its very end
    ]
    with Reader(node) as reader:
        reader.ask([extent_of(held), extent_of(absent)], items)
        bad = Status.BAD_REQUEST
        assert reader.answers(7) == [Status.OK, Status.NOT_FOUND, bad, bad, bad, bad, Status.OK]
        reader.assert_holds(items[0], held)
        reader.assert_holds(items[6], held)


def test_without_credits_it_waits_and_goes_on_with_new_ones(node: InProcess) -> None:
    r = make_record(3)
    node.write(r)
    items = items_of([r])
    with Reader(node, credits=3) as reader, Reader(node) as other:
        reader.ask([extent_of(r)], items)
        until(lambda: reader.pending() == 3, "as many as it had credits")
        other.ask([extent_of(r)], items)  # others go on meanwhile
        assert other.answers(4) == [Status.OK] * 4
        assert reader.pending() == 3
        reader.receive(5)
        reader.ask([], [], credits_told=5)  # has no answer
        assert reader.answers(4) == [Status.OK] * 4
        reader.ask([extent_of(r)], items, round_=255)
        assert reader.answers(4, 255) == [Status.OK] * 4


def test_more_than_fits_in_flight_arrives_whole(node: InProcess) -> None:
    """More items than the send queue has room for, more bytes than the pool."""
    r = make_record(5, blocks=64)
    node.write(r)
    size = body_bytes(r, 0)
    items = [wire.VerbsItem(0, i % 4, size, i % 5 * size) for i in range(120)]
    with Reader(node, credits=128, zone_bytes=5 * size) as reader:
        reader.ask([extent_of(r)], items)
        assert reader.answers(120) == [Status.OK] * 120
        for item in items[-5:]:
            reader.assert_holds(item, r)


def test_connections_that_wait_for_one_small_pool_all_go_on(tmp_path: Path) -> None:
    r = make_record(6, blocks=64)
    size = body_bytes(r, 0)
    items = [wire.VerbsItem(0, i % 4, size, i % 4 * size) for i in range(40)]
    with (
        serving(tmp_path, rdma_device="rxe0", rdma_pool_bytes=1, bulk_threads=1, progress_timeout_seconds=30.0) as node,
        ExitStack() as stack,
    ):
        node.write(r)  # of one thread the pool is 2 MiB, as much as one connection may have in flight
        readers = [stack.enter_context(Reader(node, credits=40, zone_bytes=4 * size)) for _ in range(4)]
        for reader in readers:
            reader.ask([extent_of(r)], items)
        for reader in readers:
            assert reader.answers(40) == [Status.OK] * 40
            for item in items[-4:]:
                reader.assert_holds(item, r)


def test_too_little_locked_memory_is_one_error_that_names_the_limit(tmp_path: Path) -> None:
    command = ["prlimit", "--memlock=1048576", "setpriv", "--bounding-set=-ipc_lock", sys.executable, str(NODES), str(tmp_path), "rxe0"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    last = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 1
    assert "E147" in last and "1024 KiB" in last and "ulimit -l" in last, ended.stderr


def test_garbage_for_a_set_up_harms_nobody(node: InProcess) -> None:
    dice = random.Random(20)
    r = make_record(12)
    node.write(r)
    for _ in range(30):
        answer = node.bulk().ask(Verb.VERBS_OPEN, dice.randbytes(56))
        assert answer.status in (Status.BAD_REQUEST, Status.INTERNAL, Status.OK)
    node.close_connections()
    with Reader(node) as reader:
        reader.ask([extent_of(r)], items_of([r]))
        assert reader.answers(4) == [Status.OK] * 4


def test_the_direct_engine_answers_from_its_registered_memory(tmp_path: Path) -> None:
    directory = (SHARE or tmp_path) / "direct"  # a file system with O_DIRECT: that of the guest's own files has none
    records = [make_record(i, blocks=48) for i in range(3)]
    with serving(directory, rdma_device="rxe0", io="direct", read_arena_bytes=4 << 20, read_cache_bytes=0) as node:
        node.write(*records)
        items = items_of(records)
        with Reader(node, zone_bytes=2 << 20) as reader:
            reader.ask([extent_of(r) for r in records], items)
            assert reader.answers(12) == [Status.OK] * 12
            for item in items:
                reader.assert_holds(item, records[item.extent])
        assert node.stats["reads_direct"] > 0


def has_cachestat() -> bool:
    ctypes.set_errno(0)
    ctypes.CDLL(None, use_errno=True).syscall(CACHESTAT, -1, None, None, 0)
    return ctypes.get_errno() != errno.ENOSYS


@pytest.mark.skipif(has_cachestat(), reason="this kernel has cachestat")
def test_where_the_kernel_has_no_cachestat_auto_says_so_and_reads_through_the_page_cache(tmp_path: Path) -> None:
    r = make_record(14, blocks=48)
    with serving((SHARE or tmp_path) / "auto", rdma_device="rxe0", io="auto") as node:
        assert node.server.io == "buffered"
        assert "cachestat" in node.server.io_note
        node.write(r)
        with Reader(node, zone_bytes=2 << 20) as reader:
            reader.ask([extent_of(r)], items_of([r]))
            assert reader.answers(4) == [Status.OK] * 4
            for item in items_of([r]):
                reader.assert_holds(item, r)


@pytest.mark.parametrize(
    "changed",
    [{"qpn": 1 << 24}, {"psn": 1 << 24}, {"mtu": 0}, {"mtu": 6}, {"credits": 0}, {"credits": 65537}, {"zone_bytes": 0},
     {"zone_bytes": (1 << 30) + 1}, {"zone_addr": (1 << 64) - 4096}, {"gid": bytes(16)}, {"gid": b"\xff" * 16}],
    ids=str,
)  # fmt: skip
def test_a_set_up_out_of_range_is_refused_and_ends_the_connection(node: InProcess, changed: dict[str, object]) -> None:
    with Reader(node, go=False) as reader:
        assert reader.ask_open(**changed).status == Status.BAD_REQUEST
        with pytest.raises(EOFError):
            reader.connection.receive()


def test_an_address_without_a_route_is_refused_and_the_connection_goes_on_over_tcp(node: InProcess) -> None:
    r = make_record(7)
    node.write(r)
    with Reader(node, go=False) as reader:
        assert reader.ask_open(gid=bytes(10) + b"\xff\xff\xc6\x33\x64\x07").status in (Status.INTERNAL, Status.OK)  # a device may not look
        answer = reader.connection.ask(Verb.READ, wire.encode_read([extent_of(r)], [(0, 0)]))
        assert answer.status == Status.OK


def test_a_second_set_up_a_read_without_one_and_too_many_credits_end_the_connection(node: InProcess) -> None:
    r = make_record(8)
    node.write(r)
    with Reader(node) as reader:
        assert reader.ask_open(credits=1).status == Status.BAD_REQUEST
    with Reader(node, go=False) as reader:
        reader.ask([extent_of(r)], items_of([r]))
        assert reader.connection.receive().status == Status.BAD_REQUEST
    with Reader(node) as reader:
        reader.ask([], [], credits_told=65536)
        assert reader.connection.receive().status == Status.BAD_REQUEST


def test_past_its_queue_pairs_and_without_a_device_it_says_so(tmp_path: Path) -> None:
    with serving(tmp_path / "one", rdma_device="rxe0", rdma_pairs_max=1) as node, Reader(node), Reader(node, go=False) as second:
        assert second.ask_open().status == Status.BUSY
        assert node.stats["verbs_refused"] == 1
    with serving(tmp_path / "none", rdma_device="off") as node, Reader(node, go=False) as reader:
        assert reader.ask_open().status == Status.NOT_FOUND


# The last two end by a deadline, of 8 s and more.
LATE = [pytest.param(how, marks=pytest.mark.long) for how in ("queue pair", "never receives")]


@pytest.mark.parametrize("torn", ["tcp", "window", *LATE])
def test_a_peer_that_breaks_in_mid_transfer_costs_its_own_connection_only(node: InProcess, torn: str) -> None:
    r = make_record(9, blocks=64)
    node.write(r)
    items = items_of([r] * 4)
    with Reader(node, zone_bytes=4 << 20) as reader, Reader(node, zone_bytes=4 << 20) as other:
        if torn == "never receives":
            reader.ask([], [], credits_told=1000)  # which it has not
        reader.ask([extent_of(r)] * 4, items * (8 if torn == "never receives" else 2))
        reader.completions(1)
        if torn == "tcp":
            reader.end_tcp()
        elif torn == "queue pair":
            reader.window.close()
            reader.window = None
            reader.qp.close()
            reader.qp = None
        elif torn == "window":
            reader.window.close()
            reader.window = None
        other.ask([extent_of(r)] * 4, items)
        assert other.answers(16) == [Status.OK] * 16
        until(lambda: node.stats["verbs_queue_pairs"] == 1, "the daemon lets go of it", 40)
        if torn != "tcp":
            with pytest.raises((EOFError, ConnectionError)):
                reader.connection.receive()
        other.ask([extent_of(r)] * 4, items)
        assert other.answers(16) == [Status.OK] * 16


@pytest.mark.parametrize("cycles", [20, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(3000)])])
def test_connections_that_come_and_go_leave_nothing_behind(node: InProcess, cycles: int) -> None:
    """In every state: asked for something and waiting, answered, refused, never connected."""
    r = make_record(11)
    node.write(r)
    items = items_of([r])

    def cycle(number: int, base: End) -> None:
        with Reader(node, base=base, credits=4, go=number % 5 != 4) as reader:
            if number % 5 == 4:
                reader.ask_open(**({} if number % 2 else {"mtu": 0}))  # opened on one side and left, or refused
            elif number % 5:
                reader.ask([extent_of(r)], items)
                assert reader.answers(number % 4) == [Status.OK] * (number % 4)
            reader.end_tcp()

    def held() -> list[int]:
        """Descriptors, KiB pinned, bytes registered; only at rest is that a number to compare with."""
        come_to_rest(node)
        pinned = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmPin"))
        return [len(list(Path("/proc/self/fd").iterdir())), int(pinned.split()[1]), node.stats["verbs_registered_bytes"]]

    with End("rxe1") as base:
        for number in range(10):
            cycle(number, base)
        before = held()
        for number in range(10, cycles):
            cycle(number, base)
            if number % 100 == 99:
                come_to_rest(node)
        after = held()
        print(f"{cycles} cycles: descriptors, KiB pinned, bytes registered: {before} after 10, {after} at the end")
        assert all(now <= then for now, then in zip(after, before, strict=True)), f"{before} after 10 cycles, {after} after {cycles}"


def test_a_late_write_after_the_fence_is_refused_and_the_memory_stays_as_it_was_handed_on(node: InProcess) -> None:
    """Row 23: the daemon has answers to write when the zone is closed; the memory has a new owner by then."""
    r = make_record(10)
    node.write(r)
    with Reader(node, credits=1) as reader:
        reader.ask([extent_of(r)], items_of([r]))
        assert reader.answers(1) == [Status.OK]  # three more are due, and wait for credits
        reader.close_zone()
        canary = b"\x5a" * reader.zone_bytes
        reader.zone.write(canary, len(canary))
        reader.receive(8)
        reader.ask([], [], credits_told=8)  # now they come
        until(lambda: node.stats["verbs_failed"] == 1, "the device refused them")
        assert reader.zone.read(len(canary), 0) == canary
        assert reader.completions(1)[0].status != e.IBV_WC_SUCCESS
