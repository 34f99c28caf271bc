"""The scrub: every record once a pass, at its rate, on from where it stood after a restart; what is bad is dropped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from server_tools import daemon, make_record
from server_tools import until as waited
from store_tools import NOT_FOUND, OK, OWNER, Store, read, record_of

from kvstore.gc.scrub import FILE, PASS_SECONDS_MIN, Scrubber
from kvstore.kernels import _native
from kvstore.record import Record, build
from kvstore.wire import Status

COUNT = 40


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


def stored(directory: Path, count: int = COUNT) -> tuple[_native.Store, list[Record]]:
    store = Store(str(directory))
    records = [record_of(n) for n in range(count)]
    assert all(store.put(build(r)) == OK for r in records)
    return store, records


def rot(store: _native.Store, directory: Path, r: Record) -> None:
    ref = store.open_read(OWNER, r.extent_key, r.write_id, 0)
    assert isinstance(ref, _native.ReadRef)
    with (directory / "segments" / f"{ref.segment:08x}.seg").open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), bytes([build(r)[-2] ^ 4]), ref.offset + len(build(r)) - 2)
        os.fsync(file.fileno())
    ref.close()


@pytest.mark.parametrize("bytes_max", [1, 9_000, 1 << 20])
def test_a_pass_looks_at_each_record_once_and_drops_the_bad(tmp_path: Path, bytes_max: int) -> None:
    store, records = stored(tmp_path)
    for r in records[3:6]:
        rot(store, tmp_path, r)
    after, looked, damaged, steps = b"", 0, 0, 0
    while steps == 0 or after:
        after, step_bytes, bad = store.scrub(after, bytes_max)
        assert 0 < step_bytes <= max(bytes_max, max(len(build(r)) for r in records))
        looked, damaged, steps = looked + step_bytes, damaged + bad, steps + 1
    assert (looked, damaged) == (sum(len(build(r)) for r in records), 3) and (steps == COUNT) == (bytes_max == 1)
    assert [read(store, r)[0] for r in records] == [OK] * 3 + [NOT_FOUND] * 3 + [OK] * (COUNT - 6)
    stats = store.stats()
    assert stats["scrubbed_bytes_total"] == looked and stats["corrupt_found_total"] == 3 and store.take_damages()[1] == 3
    assert store.scrub(b"", 1 << 20)[1:] == (looked - sum(len(build(r)) for r in records[3:6]), 0)
    with pytest.raises(ValueError, match="after"):
        store.scrub(b"x", 1)
    store.close()


def test_a_pass_goes_on_after_a_restart_and_the_next_waits_its_hour(tmp_path: Path) -> None:
    store, records = stored(tmp_path)
    total, clock = sum(len(build(r)) for r in records), Clock()
    scrubber = Scrubber(store, tmp_path, total // 4, clock)
    assert 0 < scrubber.step() <= 1.0 and scrubber.ended == 0
    scrubber.start()
    scrubber.stop()
    scrubber = Scrubber(store, tmp_path, total // 4, clock)
    while not scrubber.ended:
        clock.now += scrubber.step()
    assert store.stats()["scrubbed_bytes_total"] == total, "each record once, over the restart"
    assert clock.now - 1e9 >= 2.0, "no faster than its rate"
    assert 1e9 < scrubber.ended <= clock.now
    due = scrubber.step()
    assert PASS_SECONDS_MIN - 60 < due <= PASS_SECONDS_MIN and store.stats()["scrubbed_bytes_total"] == total
    clock.now += due
    scrubber.step()
    assert store.stats()["scrubbed_bytes_total"] > total
    store.close()


@pytest.mark.parametrize("text", ["", "after zz\n", "after -\nbegan x\nended 1\n", "after 00ff\nbegan 1\n", "\0" * 99])
def test_a_damaged_file_costs_the_place_alone(tmp_path: Path, text: str) -> None:
    store, _ = stored(tmp_path, 3)
    (tmp_path / FILE).write_text(text)
    scrubber = Scrubber(store, tmp_path, 1 << 20, Clock())
    scrubber.step()
    assert scrubber.ended == 1e9 and store.stats()["scrubbed_bytes_total"] > 0
    store.close()


def test_an_empty_store_is_a_pass(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert store.scrub(b"", 1 << 20) == (b"", 0, 0)
    store.close()


def test_a_daemon_scrubs_where_it_is_told_to_and_says_what_it_dropped(tmp_path: Path) -> None:
    bad = make_record(70, planes=(6_400,))
    with daemon(tmp_path / "node") as server:
        assert server.write(bad) == [Status.OK]
        assert server.stop().code == 0
    (segment,) = (tmp_path / "node" / "segments").iterdir()
    with segment.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"\0\0", len(build(bad)) - 3)
        os.fsync(file.fileno())
    with daemon(tmp_path / "node", "--scrub", "1MB") as server:
        server.wait_line("dropped 1 damaged shard", segment.name)
        assert server.discover(bad.extent_key) == []
        assert server.stop().code == 0
    waited((tmp_path / "node" / FILE).exists, "its place is written down")
