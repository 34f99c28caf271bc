"""Every verb of the data protocol over real sockets, with both read engines: what is answered is what was stored, and nothing else."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_tools import TAG, InProcess, assert_item, extent_of, make_record, serving, until

from kvstore import record, wire
from kvstore.wire import Status, Verb


@pytest.fixture(params=["buffered", "direct", "auto"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[InProcess]:
    with serving(tmp_path, io=request.param) as running:
        assert running.server.io == request.param, running.server.io_note
        yield running


def test_hello_tells_epoch_boot_id_and_bucket(server: InProcess) -> None:
    peer = server.small().peer
    assert peer is not None
    assert (peer.epoch, peer.cluster, peer.role, peer.bucket_seconds) == (1, TAG, wire.Role.SMALL, 60)
    assert peer.boot_id == server.server.boot_id != 0
    assert abs(peer.bucket - server.store.bucket_now()) <= 1


def test_a_stored_extent_is_discovered_by_its_first_key_only(server: InProcess) -> None:
    r = make_record(1, blocks=3, start_block=128, earlier=(0, 64), depth=3, fidelity=1, kv_group=7, pg=11, layout_tag=99)
    assert server.write(r) == [Status.OK]
    second_key = os.urandom(32)
    (found,) = server.discover(second_key, r.extent_key)
    assert (found.write_id, found.shard_mask, found.key_ordinal, found.start_block) == (r.write_id, 1, 1, 128)
    assert (found.earlier, found.tags, found.block_bytes) == ((0, 64), tuple(r.tags), r.block_bytes)
    assert (found.fidelity, found.depth, found.kv_group, found.pg, found.layout_tag) == (1, 3, 7, 11, 99)
    assert (found.k, found.m, found.plane_count, found.retention_class) == (10, 2, 4, 2)
    assert server.discover(second_key) == []


def test_another_owner_finds_nothing_under_the_same_key(server: InProcess) -> None:
    r = make_record(2, owner=b"A" * 16)
    assert server.write(r) == [Status.OK]
    assert server.discover(r.extent_key) == []
    assert len(server.discover(r.extent_key, owner=b"A" * 16)) == 1
    bulk = server.bulk()
    assert bulk.ask(Verb.READ, wire.encode_read([extent_of(r)], [(0, 0)])).status == Status.NOT_FOUND
    assert bulk.ask(Verb.READ, wire.encode_read([extent_of(r)], [(0, 0)], owner=b"A" * 16)).status == Status.OK


def test_many_keys_are_answered_in_one_message_with_their_ordinals(server: InProcess) -> None:
    records = [make_record(100 + i, blocks=1) for i in range(20)]
    assert set(server.write(*records)) == {Status.OK}
    keys = [os.urandom(32) for _ in range(1000)]
    places = sorted(random.Random(5).sample(range(1000), 20))
    for place, r in zip(places, records, strict=True):
        keys[place] = r.extent_key
    assert [(w.key_ordinal, w.write_id) for w in server.discover(*keys)] == [(p, r.write_id) for p, r in zip(places, records, strict=True)]


def test_promises_name_the_shards_held_and_tell_what_is_not_here(server: InProcess) -> None:
    r = make_record(3)
    other = make_record(3, extent_key=r.extent_key, write_id=r.write_id, shard=5)
    assert server.write(r, other) == [Status.OK, Status.OK]
    body = wire.encode_promise([(r.extent_key, r.write_id), (r.extent_key, r.write_id ^ 1)], bucket=server.store.bucket_now())
    answers = wire.decode_promise_reply(server.small().ask(Verb.PROMISE, body).body)
    assert answers == [(Status.OK, 0b100001), (Status.NOT_FOUND, 0)]


def test_a_withdrawn_writing_is_gone_and_its_late_shards_are_refused(server: InProcess) -> None:
    r = make_record(4)
    assert server.write(r) == [Status.OK]
    answers = wire.decode_withdraw_reply(server.small().ask(Verb.WITHDRAW, wire.encode_withdraw([(r.extent_key, r.write_id)])).body)
    assert answers == [Status.OK]
    assert server.discover(r.extent_key) == []
    assert server.write(make_record(4, shard=1)) == [Status.TOMBSTONED]


def test_a_promise_tells_the_last_use_before_its_own_touch(server: InProcess) -> None:
    now = server.store.bucket_now()
    r = make_record(3, bucket=now - 1)
    assert server.write(r) == [Status.OK]
    body = wire.encode_promise([(r.extent_key, r.write_id), (r.extent_key, r.write_id ^ 1)], bucket=now)
    told = [wire.decode_last_buckets(server.small().ask(Verb.PROMISE, body).body) for _ in range(2)]
    assert told == [[now - 1, 0], [now, 0]]


def test_why_tells_what_is_gone_and_how_far_it_went(server: InProcess) -> None:
    r, other = make_record(4, blocks=40, bucket=server.store.bucket_now()), make_record(5)
    assert server.write(r, other) == [Status.OK, Status.OK]
    server.small().ask(Verb.WITHDRAW, wire.encode_withdraw([(r.extent_key, r.write_id)]))
    ask = wire.encode_why([other.extent_key, r.extent_key, bytes(32)])
    (ghost,) = wire.decode_why_reply(server.small().ask(Verb.WHY, ask).body)
    assert (ghost.key_ordinal, ghost.reason, ghost.retention_class, ghost.last_bucket) == (1, 3, r.retention_class, r.bucket)
    assert ghost.tags == bytes(tag & 255 for tag in r.tags)
    assert wire.decode_why_reply(server.small().ask(Verb.WHY, wire.encode_why([r.extent_key], owner=bytes(15) + b"1")).body) == []
    assert server.small().ask(Verb.WHY, wire.encode_why([bytes(32)] * 513)).status == Status.TOO_LARGE


def test_items_come_back_byte_for_byte_in_the_order_asked(server: InProcess) -> None:
    records = [make_record(20 + i, blocks=blocks) for i, blocks in enumerate((64, 1, 3, 17, 40))]
    assert set(server.write(*records)) == {Status.OK}
    dice = random.Random(9)
    for _ in range(4):  # later rounds come from the cache
        parts = []
        for r in records:
            first = dice.randrange(r.block_count)
            parts.append((r, first, dice.randint(1, r.block_count - first)))
            parts.append((r, 0, r.block_count))
        items = [(e, p) for p in range(4) for e in range(len(parts))]
        dice.shuffle(items)
        bulk = server.bulk()
        bulk.send(wire.encode(Verb.READ, wire.encode_read([extent_of(r, f, c) for r, f, c in parts], items), request_id=7))
        for ordinal, (extent, plane) in enumerate(items):
            frame = bulk.receive()
            assert (frame.kind, frame.status, frame.aux, frame.request_id) == (wire.Kind.ITEM, Status.OK, ordinal, 7)
            r, first, count = parts[extent]
            assert_item(frame.body, r, plane, first, count)


def test_any_plane_sizes_and_geometry_read_back(server: InProcess) -> None:
    """One plane of one byte, odd sizes, k = 1, and a last plane far behind the head."""
    records = [
        make_record(30, blocks=1, planes=(1,)),
        make_record(31, blocks=5, planes=(1, 4097, 333)),
        make_record(32, blocks=7, planes=(70_001, 5), k=1, m=0),
        make_record(33, blocks=2, planes=(900_000, 1000, 70_000), k=2, m=1, shard=2),
    ]
    assert set(server.write(*records)) == {Status.OK}
    bulk = server.bulk()
    for r in records:
        items = [(0, p) for p in reversed(range(len(r.plane_bytes)))]
        bulk.send(wire.encode(Verb.READ, wire.encode_read([extent_of(r)], items)))
        for _, plane in items:
            assert_item(bulk.receive().body, r, plane)


def test_what_cannot_be_read_is_said_item_by_item_and_the_rest_is_served(server: InProcess) -> None:
    r = make_record(40, blocks=4)
    assert server.write(r) == [Status.OK]
    absent = wire.ReadExtent(r.extent_key, r.write_id ^ 1, 0, 0, 1)
    beyond = extent_of(r, 2, 3)
    nothing = extent_of(r, 0, 0)
    wrong_shard = wire.ReadExtent(r.extent_key, r.write_id, 1, 0, 1)
    bulk = server.bulk()
    items = [(0, 0), (1, 0), (2, 1), (3, 0), (4, 0), (0, 4), (0, 255), (0, 3)]
    bulk.send(wire.encode(Verb.READ, wire.encode_read([extent_of(r), absent, beyond, nothing, wrong_shard], items)))
    statuses = []
    for _ in items:
        frame = bulk.receive()
        statuses.append(frame.status)
        assert (frame.body != b"") == (frame.status == Status.OK)
    bad, gone = Status.BAD_REQUEST, Status.NOT_FOUND
    assert statuses == [Status.OK, gone, bad, bad, gone, bad, bad, Status.OK]


def test_bytes_read_from_disk_are_the_same_bytes(server: InProcess) -> None:
    """Pages are dropped, so that every engine goes to the disk; then again, and from whatever it has cached by then."""
    records = [make_record(300 + i, blocks=64) for i in range(4)]
    assert set(server.write(*records)) == {Status.OK}
    bulk = server.bulk()
    items = [(e, p) for p in range(4) for e in range(4)]
    for _ in range(4):
        server.drop_pages()
        bulk.send(wire.encode(Verb.READ, wire.encode_read([extent_of(r) for r in records], items)))
        for extent, plane in items:
            assert_item(bulk.receive().body, records[extent], plane)
    stats = server.stats
    assert (stats["reads_direct"] > 0) == (server.server.io != "buffered")
    assert stats["reads_cached"] > 0 or server.server.io != "direct"


def test_what_is_in_the_page_cache_is_not_read_from_disk_by_auto(tmp_path: Path) -> None:
    r = make_record(310, blocks=64)
    with serving(tmp_path, io="auto") as server:
        assert server.write(r) == [Status.OK]
        bulk = server.bulk()

        def read() -> int:
            before = server.stats["reads_direct"]
            bulk.send(wire.encode(Verb.READ, wire.encode_read([extent_of(r)], [(0, p) for p in range(4)])))
            for plane in range(4):
                assert_item(bulk.receive().body, r, plane)
            return int(server.stats["reads_direct"]) - before

        assert read() == 0  # as written
        server.drop_pages()
        assert read() > 0
        assert read() > 0  # read twice: now it is fetched into the page cache
        until(lambda: read() == 0, "it is served from there")


def test_planes_that_are_asked_for_one_after_the_other_count_as_read_once_by_auto(tmp_path: Path) -> None:
    """As a load by plane asks. Were the second plane a second read of the record, all of it would be read again into the page cache."""
    r = make_record(311, blocks=64)
    with serving(tmp_path, io="auto") as server:
        assert server.write(r) == [Status.OK]
        bulk = server.bulk()

        def read() -> tuple[int, int]:
            before = server.stats
            for plane in range(4):
                bulk.send(wire.encode(Verb.READ, wire.encode_read([extent_of(r)], [(0, plane)])))
                assert_item(bulk.receive().body, r, plane)
            now = server.stats
            return int(now["reads_direct"]) - int(before["reads_direct"]), int(now["reads_fell_back"]) - int(before["reads_fell_back"])

        server.drop_pages()
        assert read() == (4, 0)
        assert read() == (4, 0)
        until(lambda: read() == (0, 4), "what was read twice is served from the page cache")


SHORT = [make_record(320 + i, blocks=17) for i in range(12)]  # records of 194 KB, one behind the other


def read_whole(server: InProcess, records: list[record.Record], good: int, by_plane: bool = False) -> None:
    """All planes of all records, as loads ask for them: the first `good` arrive, the others are refused one by one."""
    bulk = server.bulk()
    items = [(extent, plane) for extent in range(len(records)) for plane in range(4)]
    if by_plane:
        items.sort(key=lambda item: item[1])
    bulk.send(wire.encode(Verb.READ, wire.encode_read([extent_of(r) for r in records], items)))
    for extent, plane in items:
        frame = bulk.receive()
        assert (frame.status == Status.OK) == (extent < good), (extent, plane, frame.status)
        if frame.status == Status.OK:
            assert_item(frame.body, records[extent], plane)


def test_records_that_lie_close_are_read_together_by_auto(tmp_path: Path) -> None:
    with serving(tmp_path, io="auto") as server:
        assert set(server.write(*SHORT)) == {Status.OK}
        server.drop_pages()
        read_whole(server, SHORT, len(SHORT))
        assert 0 < server.stats["reads_direct"] <= 2 + 1 + len(SHORT) // 5  # five of them are one MiB
        apart, before = SHORT[::2], server.stats["reads_direct"]
        server.drop_pages()
        read_whole(server, apart, len(apart))
        assert server.stats["reads_direct"] - before >= len(apart)  # what lies between is not read in vain


def test_a_record_in_the_page_cache_is_not_read_again_with_its_neighbours(tmp_path: Path) -> None:
    with serving(tmp_path, io="auto") as server:
        assert set(server.write(*SHORT)) == {Status.OK}
        server.drop_pages()
        (segment,) = tmp_path.rglob("*.seg")
        with segment.open("rb") as file:
            data = file.read()
        at = data.index(record.build(SHORT[4])[:256])
        server.drop_pages()
        with segment.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            assert os.pread(file.fileno(), len(record.build(SHORT[4])), at)
        before = server.stats["reads_direct_bytes"]
        read_whole(server, SHORT, len(SHORT))
        assert server.stats["reads_direct_bytes"] - before < 11.5 * len(record.build(SHORT[4]))
        assert server.stats["reads_fell_back"] > 0


@pytest.mark.parametrize("by_plane", [False, True])
@pytest.mark.parametrize("blocks", [1, 17])
@pytest.mark.parametrize("whole", [0, 3, 7, 11])
def test_where_a_segment_ends_too_soon_what_lies_before_is_served(tmp_path: Path, whole: int, blocks: int, by_plane: bool) -> None:
    """The shorter the records, the more of them a read has, and by plane it comes back to them."""
    records = [make_record(340 + i, blocks=blocks) for i in range(12)]
    with serving(tmp_path, io="auto") as server:
        assert set(server.write(*records)) == {Status.OK}
        server.drop_pages()
        (segment,) = tmp_path.rglob("*.seg")
        os.truncate(segment, segment.read_bytes().index(record.build(records[whole])[:256]) + 100)  # in the head of the next
        server.drop_pages()
        read_whole(server, records, whole, by_plane)


def test_an_empty_read_is_answered_by_nothing_and_does_not_hold_up_the_next(server: InProcess) -> None:
    r = make_record(41)
    assert server.write(r) == [Status.OK]
    bulk = server.bulk()
    bulk.send(wire.encode(Verb.READ, wire.encode_read([extent_of(r)], [])))
    bulk.send(wire.encode(Verb.READ, wire.encode_read([extent_of(r)], [(0, 2)]), request_id=2))
    frame = bulk.receive()
    assert frame.request_id == 2
    assert_item(frame.body, r, 2)


def test_answers_on_a_bulk_connection_keep_the_order_of_the_requests(server: InProcess) -> None:
    records = [make_record(50 + i, blocks=30) for i in range(6)]
    bulk = server.bulk()
    for i, r in enumerate(records):
        bulk.send(wire.encode(Verb.WRITE, record.build(r), request_id=2 * i))
        bulk.send(wire.encode(Verb.READ, wire.encode_read([extent_of(r)], [(0, 1)]), request_id=2 * i + 1))
    for i, r in enumerate(records):
        wrote = bulk.receive()
        assert (wrote.request_id, wrote.verb, wrote.status, wrote.body) == (2 * i, Verb.WRITE, Status.OK, b"")
        read = bulk.receive()
        assert (read.request_id, read.status) == (2 * i + 1, Status.NOT_FOUND) or read.request_id == 2 * i + 1
        if read.status == Status.OK:  # it was asked before the write was answered: it may or may not see it
            assert_item(read.body, r, 1)


def test_a_second_write_of_a_shard_exists_and_other_writings_stand_beside_it(server: InProcess) -> None:
    r = make_record(60)
    again = [make_record(61 + i, extent_key=r.extent_key) for i in range(8)]
    assert server.write(r, r) == [Status.OK, Status.EXISTS]
    assert server.write(*again) == [Status.OK] * 7 + [Status.TOO_MANY_WRITINGS]
    assert len(server.discover(r.extent_key)) == 8


def test_a_damaged_record_is_refused_and_the_connection_goes_on(server: InProcess) -> None:
    r = make_record(70)
    whole = record.build(r)
    bulk = server.bulk()
    for at in (0, 60, 300, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        assert bulk.ask(Verb.WRITE, bytes(damaged)).status in (Status.CORRUPT, Status.BAD_REQUEST)
    for body in (b"", b"short", whole[:255], whole[:-1], whole[:4000]):
        assert bulk.ask(Verb.WRITE, body).status in (Status.CORRUPT, Status.BAD_REQUEST)
    assert server.discover(r.extent_key) == []
    assert bulk.ask(Verb.WRITE, whole).status == Status.OK


def test_bytes_that_rot_on_disk_make_the_shard_lost_not_wrong(server: InProcess, tmp_path: Path) -> None:
    r = make_record(71, blocks=8)
    assert server.write(r) == [Status.OK]
    head = record.build(r)[:256]
    (segment,) = [p for p in tmp_path.rglob("*") if p.is_file() and head in p.read_bytes()]
    data = segment.read_bytes()
    with segment.open("r+b") as file:
        file.seek(data.index(head) + 100)
        file.write(bytes([data[data.index(head) + 100] ^ 0xFF]))
    bulk = server.bulk()
    assert bulk.ask(Verb.READ, wire.encode_read([extent_of(r)], [(0, 0)])).status == Status.CORRUPT
    assert bulk.ask(Verb.READ, wire.encode_read([extent_of(r)], [(0, 0)])).status == Status.NOT_FOUND
    assert server.discover(r.extent_key) == []


def test_an_older_epoch_is_stale_and_a_newer_one_is_taken(server: InProcess) -> None:
    server.server.set_epoch(5)
    bulk = server.bulk()
    stale = bulk.ask(Verb.WRITE, record.build(make_record(80, write_epoch=4)))
    assert (stale.status, stale.aux) == (Status.STALE_MAP, 5)
    assert server.write(make_record(81, write_epoch=5), make_record(82, write_epoch=6)) == [Status.OK, Status.OK]
    assert server.stats["epoch_seen"] == 6


def test_every_answer_is_counted_and_timed(server: InProcess) -> None:
    r = make_record(90)
    server.write(r)
    server.discover(r.extent_key)
    bulk = server.bulk()
    bulk.ask(Verb.READ, wire.encode_read([extent_of(r)], [(0, 0)]))
    bulk.ask(Verb.READ, wire.encode_read([extent_of(r)], [(0, 9)]))
    stats = server.stats
    assert stats["requests"]["write"] == {Status.OK: 1} and stats["requests"]["discover"] == {Status.OK: 1}
    assert stats["read_items"] == {Status.OK: 1, Status.BAD_REQUEST: 1}
    assert sum(stats["request_seconds"]["write"]["counts"]) == 1 and stats["request_seconds"]["write"]["sum_seconds"] > 0
    assert stats["bytes_in"] > len(record.build(r)) and stats["bytes_out"] > 4 * 2848
    assert stats["inflight"] == 0 and stats["write_arena_used_bytes"] == 0
