"""Shards that readers call bad, at a node: dropped where the disk says so too, else left alone, within bounds that no client can pass."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from server_tools import InProcess, assert_item, daemon, extent_of, make_record, serving, until

from kvstore import record, wire
from kvstore.kernels import _native
from kvstore.record import Record
from kvstore.wire import Status, Verb

PLANES = (6_400, 3_300)
WAITING_MAX = 64


@pytest.fixture
def server(tmp_path: Path) -> Iterator[InProcess]:
    with serving(tmp_path / "node") as running:
        yield running


def place_of(store: _native.Store, r: Record) -> tuple[int, int]:
    """Number of its segment, and where the record lies there."""
    ref = store.open_read(r.owner, r.extent_key, r.write_id, r.shard)
    assert isinstance(ref, _native.ReadRef)
    found = ref.segment, ref.offset
    ref.close()
    return found


def hurt(server: InProcess, r: Record, at: int = -7) -> None:
    """One byte of it on the disk, by default of its last piece; nothing of it is in the page cache after that."""
    segment, offset = place_of(server.store, r)
    at = offset + (at if at >= 0 else len(record.build(r)) + at)
    with (server.directory / "segments" / f"{segment:08x}.seg").open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 0x10]), at)
    server.drop_pages()


def suspect(server: InProcess, records: Sequence[Record], *, shard: int | None = None, owner: bytes = wire.NO_OWNER) -> list[Status]:
    names = [(r.extent_key, r.write_id, r.shard if shard is None else shard) for r in records]
    return wire.decode_suspect_reply(server.small().ask(Verb.SUSPECT, wire.encode_suspect(names, owner=owner)).body)


def counts(server: InProcess) -> dict[str, int]:
    stats = server.store.stats()
    return {name: stats[f"suspects_{name}_total"] for name in ("damaged", "unfounded", "absent", "refused")}


def looked_at(server: InProcess, *, damaged: int = 0, unfounded: int = 0, absent: int = 0, refused: int = 0) -> None:
    """Waits until it comes to this, exactly."""
    expected = {"damaged": damaged, "unfounded": unfounded, "absent": absent, "refused": refused}
    until(lambda: sum(counts(server).values()) >= sum(expected.values()), "the looks")
    assert counts(server) == expected


def statuses_of(server: InProcess, r: Record) -> list[Status]:
    bulk = server.bulk()
    bulk.send(wire.encode(Verb.READ, wire.encode_read([extent_of(r)], [(0, plane) for plane in range(len(PLANES))])))
    return [Status(bulk.receive().status) for _ in PLANES]


@pytest.mark.parametrize("at", [-7, 0, 300], ids=["last piece", "magic", "tables"])
def test_what_the_disk_has_bad_is_dropped_and_nobody_is_sent_there_any_more(server: InProcess, at: int) -> None:
    bad, other = make_record(1, planes=PLANES), make_record(2, planes=PLANES)
    assert server.write(bad, other) == [Status.OK] * 2
    hurt(server, bad, at)
    assert suspect(server, [bad]) == [Status.OK]
    looked_at(server, damaged=1)
    assert server.discover(bad.extent_key) == []
    names = [(bad.extent_key, bad.write_id), (other.extent_key, other.write_id)]
    assert [status for status, _ in wire.decode_promise_reply(server.small().ask(Verb.PROMISE, wire.encode_promise(names)).body)] == [
        Status.NOT_FOUND, Status.OK,
    ]  # fmt: skip
    assert statuses_of(server, bad) == [Status.NOT_FOUND] * 2 and statuses_of(server, other) == [Status.OK] * 2
    (ghost,) = wire.decode_why_reply(server.small().ask(Verb.WHY, wire.encode_why([bad.extent_key])).body)
    assert ghost.reason == wire.Gone.CORRUPT
    assert server.store.stats()["corrupt_found_total"] == 1
    (damage,), count = server.store.take_damages()
    assert count == 1 and damage[2:] == (len(record.build(bad)), bad.shard, True) and server.store.take_damages() == ([], 0)
    server.store.flush()
    assert server.store.stats()["freeing_bytes"] == 0 and server.store.check_integrity(deep=True) == []


def test_a_shard_that_is_read_while_it_is_dropped_is_freed_after_the_read(server: InProcess) -> None:
    bad = make_record(3, planes=PLANES)
    server.write(bad)
    hurt(server, bad)
    ref = server.store.open_read(bad.owner, bad.extent_key, bad.write_id, bad.shard)
    assert isinstance(ref, _native.ReadRef)
    suspect(server, [bad])
    looked_at(server, damaged=1)
    server.store.flush()
    assert ref.read()[: len(record.build(bad)) - 8] == record.build(bad)[:-8] and server.store.stats()["freeing_bytes"] > 0
    ref.close()
    server.store.flush()
    assert server.store.stats()["freeing_bytes"] == 0


def test_a_shard_whose_bytes_cannot_be_read_is_dropped(server: InProcess) -> None:
    gone = make_record(4, planes=PLANES)
    server.write(gone)
    segment, offset = place_of(server.store, gone)
    os.truncate(server.directory / "segments" / f"{segment:08x}.seg", offset + 4096)
    assert suspect(server, [gone]) == [Status.OK]
    looked_at(server, damaged=1)
    assert server.store.take_damages()[0][0][-1] is False


def test_unfounded_reports_change_nothing(server: InProcess) -> None:
    records = [make_record(n, planes=PLANES) for n in range(10, 30)]
    server.write(*records)
    before = server.store.stats()
    assert suspect(server, records) == [Status.OK] * 20
    looked_at(server, unfounded=20)
    after = server.store.stats()
    assert all(after[name] == before[name] for name in ("entries", "used_bytes", "pins", "corrupt_found_total", "corrupt_reported_total"))
    for r in records:
        bulk = server.bulk()
        bulk.send(wire.encode(Verb.READ, wire.encode_read([extent_of(r)], [(0, 1)])))
        assert_item(bulk.receive().body, r, 1)


def test_what_is_not_here_and_what_is_anothers_is_not_looked_at(server: InProcess) -> None:
    r = make_record(40, planes=PLANES)
    server.write(r)
    hurt(server, r)
    reads = server.store.stats()["reads_total"]
    assert suspect(server, [r], owner=bytes(15) + b"1") == [Status.NOT_FOUND]
    assert suspect(server, [r], shard=1) == suspect(server, [r], shard=255) == [Status.NOT_FOUND]
    assert suspect(server, [make_record(n) for n in range(1000, 1064)]) == [Status.NOT_FOUND] * 64
    assert suspect(server, []) == []
    looked_at(server, absent=67)
    assert server.store.stats()["entries"] == 1 and server.store.stats()["reads_total"] == reads


def test_one_record_is_looked_at_once_a_minute(server: InProcess) -> None:
    one, two = make_record(50, planes=PLANES), make_record(51, planes=PLANES)
    server.write(one, two)
    assert suspect(server, [one, one]) == [Status.OK, Status.BUSY]
    looked_at(server, unfounded=1, refused=1)
    assert suspect(server, [one, two]) == [Status.BUSY, Status.OK]
    looked_at(server, unfounded=2, refused=2)


def test_a_flood_of_reports_is_bounded_and_harms_nobody(server: InProcess) -> None:
    """As fast as they can be sent: what is taken is what waits and what was looked at meanwhile; loads go on."""
    records = [make_record(n, planes=PLANES, blocks=1) for n in range(1000, 1400)]
    bulk = server.bulk()
    assert set(server.write(*records, bulk=bulk)) == {Status.OK}
    names = [(r.extent_key, r.write_id, r.shard) for r in records]
    small, taken, refused = server.small(), 0, 0
    for at in random.Random(1).choices(range(0, 384, 16), k=200):
        said = wire.decode_suspect_reply(small.ask(Verb.SUSPECT, wire.encode_suspect(names[at : at + 64])).body)
        taken += said.count(Status.OK)
        refused += said.count(Status.BUSY)
        assert len(said) == min(64, 400 - at) == said.count(Status.OK) + said.count(Status.BUSY)
    now = counts(server)
    assert refused == now["refused"] and taken <= WAITING_MAX + now["unfounded"] + 1
    assert statuses_of(server, records[0]) == [Status.OK] * 2
    looked_at(server, unfounded=taken, refused=refused)
    assert server.store.stats()["entries"] == len(records) and server.store.stats()["corrupt_found_total"] == 0


def test_more_than_a_message_holds_is_refused(server: InProcess) -> None:
    small = server.small()
    small.send(wire.encode(Verb.SUSPECT, wire.encode_suspect([(bytes(32), 1, 0)] * (wire.SUSPECTS_MAX + 1))))
    assert small.receive().status == Status.TOO_LARGE


def test_a_daemon_says_in_one_line_what_it_dropped(tmp_path: Path) -> None:
    bad = make_record(60, planes=PLANES)
    with daemon(tmp_path / "node") as server:
        assert server.write(bad) == [Status.OK]
        (segment,) = (tmp_path / "node" / "segments").iterdir()
        with segment.open("r+b", buffering=0) as file:
            file.seek(len(record.build(bad)) - 3)
            file.write(b"\0\0")
            os.fsync(file.fileno())
        names = [(bad.extent_key, bad.write_id, bad.shard)]
        assert wire.decode_suspect_reply(server.small().ask(Verb.SUSPECT, wire.encode_suspect(names)).body) == [Status.OK]
        line = server.wait_line("dropped 1 damaged shard")
        assert f"at 0 of segments/{segment.name}, fails its sums" in line and bad.extent_key.hex() not in line
