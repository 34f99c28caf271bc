"""Restarts of every kind: nothing acknowledged is lost, nothing deleted comes back, and no byte is left that nobody owns."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
from server_tools import until
from store_tools import NOT_FOUND, OK, OWNER, Store, discover, promise, read, record_of, withdraw

from kvstore.record import Record, build, padded_bytes

KILLS = 100 if os.environ.get("SIZE", "") == "full" else 6


def allocated(directory: Path) -> int:
    """Bytes of the segments that are no holes. (st_blocks would count the file system's own extent tree as well.)"""
    total = 0
    for path in (directory / "segments").iterdir():
        with path.open("rb") as f:
            at, size = 0, path.stat().st_size
            while at < size:
                try:
                    start = os.lseek(f.fileno(), at, os.SEEK_DATA)
                except OSError:
                    break  # only a hole is left
                at = os.lseek(f.fileno(), start, os.SEEK_HOLE)
                total += at - start
    return total


def footers(directory: Path) -> int:
    """Bytes of the footers of sealed segments."""
    total = 0
    for f in (directory / "segments").iterdir():
        trailer = f.read_bytes()[-64:]
        if trailer[:8] == b"KVSFOOT1":
            total += struct.unpack_from("<Q", trailer, 32)[0]
    return total


def until_on_disk(directory: Path, store: Store) -> None:
    """Waits until the segments take what is used and their footers: one may be in the middle of being sealed or given back."""
    until(lambda: allocated(directory) - footers(directory) == store.stats()["used_bytes"], "the disk holds what is used and no more")


def filled(directory: Path, count: int = 120, **options: object) -> list[Record]:
    store = Store(str(directory), segment_bytes=1 << 16, **options)
    records = [record_of(n) for n in range(count)]
    assert all(store.put(build(r)) == OK for r in records)
    withdraw(store, *records[::10])
    store.flush()
    store.close(clean=False)
    return records


def change_state(directory: Path, **changes: str) -> None:
    lines = (directory / "state").read_text().splitlines()[:-1]
    lines = [f"{name} {changes.get(name, value)}" for name, value in (line.split(" ", 1) for line in lines)]
    body = "".join(line + "\n" for line in lines)
    (directory / "state").write_text(f"{body}sum {xxhash.xxh3_64_intdigest(body.encode()):016x}\n")


def assert_as_before(directory: Path, records: list[Record], mode: str) -> None:
    store = Store(str(directory), segment_bytes=1 << 16)
    assert store.wait_started(30)
    assert store.stats()["start_mode"] == mode
    for n, r in enumerate(records):
        assert read(store, r) == ((NOT_FOUND, b"") if n % 10 == 0 else (OK, build(r))), f"record {n}"
    found, busy = discover(store, OWNER, *(r.extent_key for r in records))
    assert not busy and len(found) == len(records) * 9 // 10
    assert store.check_integrity(deep=True) == []
    store.flush()
    live = sum(padded_bytes(len(build(r))) for n, r in enumerate(records) if n % 10)
    assert store.stats()["used_bytes"] == live
    until_on_disk(directory, store)
    store.close()


def test_a_clean_stop_and_start(tmp_path: Path) -> None:
    records = filled(tmp_path)
    Store(str(tmp_path)).close()
    assert_as_before(tmp_path, records, "clean")


def test_a_killed_process_keeps_its_index(tmp_path: Path) -> None:
    assert_as_before(tmp_path, filled(tmp_path), "killed")


def test_bytes_that_nobody_owns_are_freed_after_a_kill(tmp_path: Path) -> None:
    """A record written but not committed, half a record, and noise, behind and between the records of an unsealed segment."""
    records = filled(tmp_path)
    newest = max((tmp_path / "segments").iterdir())
    with newest.open("ab") as f:
        f.write(build(record_of(1000)).ljust(8192, b"\0"))
        f.write(build(record_of(1001, blocks=8))[:3000])
        f.write(random.Random(1).randbytes(20_000))
    assert_as_before(tmp_path, records, "killed")


def test_a_power_loss_rebuilds_the_index(tmp_path: Path) -> None:
    records = filled(tmp_path)
    change_state(tmp_path, boot="another-boot")
    assert_as_before(tmp_path, records, "rebuild")


def test_a_power_loss_after_a_clean_stop_does_not(tmp_path: Path) -> None:
    records = filled(tmp_path)
    Store(str(tmp_path)).close()
    change_state(tmp_path, boot="another-boot")
    assert_as_before(tmp_path, records, "clean")


def test_a_power_loss_in_strict_mode_keeps_the_index(tmp_path: Path) -> None:
    records = filled(tmp_path, strict_sync=True)
    change_state(tmp_path, boot="another-boot")
    assert_as_before(tmp_path, records, "killed")


def test_two_crashes_within_a_minute_rebuild_the_index(tmp_path: Path) -> None:
    records = filled(tmp_path)
    store = Store(str(tmp_path), segment_bytes=1 << 16)
    assert store.wait_started(10) and store.stats()["start_mode"] == "killed"
    store.close(clean=False)
    assert_as_before(tmp_path, records, "rebuild")


@pytest.mark.parametrize("lost", ["index", "state", "index/data.mdb"])
def test_lost_files_are_made_again_from_the_segments(tmp_path: Path, lost: str) -> None:
    records = filled(tmp_path)
    Store(str(tmp_path)).close()
    path = tmp_path / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert_as_before(tmp_path, records, "rebuild")


def test_the_golden_state_is_read_and_its_lines_are_those_that_are_written(tmp_path: Path) -> None:
    golden = (Path(__file__).with_name("golden") / "state-v1.txt").read_text()
    records = filled(tmp_path)
    Store(str(tmp_path)).close()
    written = (tmp_path / "state").read_text()
    assert [line.split(" ")[0] for line in written.splitlines()] == [line.split(" ")[0] for line in golden.splitlines()]
    (tmp_path / "state").write_text(golden)
    assert_as_before(tmp_path, records, "clean")
    assert (tmp_path / "state").read_text().splitlines()[:2] == golden.splitlines()[:2], "the directory's id stays"


def test_a_state_file_with_a_flipped_bit_is_not_believed(tmp_path: Path) -> None:
    records = filled(tmp_path)
    raw = bytearray((tmp_path / "state").read_bytes())
    raw[30] ^= 1
    (tmp_path / "state").write_bytes(raw)
    assert_as_before(tmp_path, records, "rebuild")


def test_a_rebuild_that_was_cut_short_begins_again(tmp_path: Path) -> None:
    records = filled(tmp_path)
    Store(str(tmp_path)).close()
    (tmp_path / "index.rebuild").touch()
    assert_as_before(tmp_path, records, "rebuild")
    assert not (tmp_path / "index.rebuild").exists()


def test_a_rebuild_takes_last_use_and_class_from_the_records(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    now = store.bucket_now()
    r = record_of(1, bucket=now, retention_class=3)
    store.put(build(r))
    store.close()
    shutil.rmtree(tmp_path / "index")
    store = Store(str(tmp_path))
    assert store.wait_started(10)
    [(bucket, _, _)] = store.peek(3, OWNER, 10)
    assert bucket == now
    store.close()


def test_a_damaged_record_in_an_unsealed_segment_is_dropped_and_those_behind_it_are_found(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    records = [record_of(n) for n in range(20)]
    places = []
    for r in records:
        store.put(build(r))
        ref = store.open_read(OWNER, r.extent_key, r.write_id, 0)
        places.append(ref.offset)
        ref.close()
    store.close(clean=False)
    with next((tmp_path / "segments").iterdir()).open("r+b") as f:
        for n, at in ((3, 0), (7, 40), (11, len(build(records[11])) - 1)):
            f.seek(places[n] + at)
            byte = f.read(1)
            f.seek(places[n] + at)
            f.write(bytes([byte[0] ^ 4]))
    change_state(tmp_path, boot="another-boot")
    store = Store(str(tmp_path))
    assert store.wait_started(10)
    for n, r in enumerate(records):
        assert read(store, r) == ((NOT_FOUND, b"") if n in (3, 7, 11) else (OK, build(r)))
    assert store.stats()["orphan_bytes_freed_total"] == sum(padded_bytes(len(build(records[n]))) for n in (3, 7, 11))
    assert store.check_integrity(deep=True) == []
    store.close()


@pytest.mark.parametrize("seed", range(40 if KILLS == 100 else 8))
def test_a_power_loss_that_drops_tears_and_zeroes_unsynced_writes_costs_only_what_it_hit(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    store = Store(str(tmp_path), segment_bytes=1 << 18)
    records, places = [record_of(n) for n in range(150)], []
    for r in records:
        assert store.put(build(r)) == OK
        ref = store.open_read(OWNER, r.extent_key, r.write_id, 0)
        places.append((f"{ref.segment:08x}.seg", ref.offset))
        ref.close()
    store.close(clean=False)
    # What is sealed was synced before its footer was written: a power loss cannot touch it.
    synced = {path.name for path in (tmp_path / "segments").iterdir() if path.read_bytes()[-64:-56] == b"KVSFOOT1"}
    hit = set()
    for n in rng.sample(range(150), 60):
        name, offset = places[n]
        if name in synced:
            continue
        size = padded_bytes(len(build(records[n])))
        first = rng.randrange(0, size, 512)
        torn = min(size - first, 512 * rng.randrange(1, 9))
        with (tmp_path / "segments" / name).open("r+b") as f:
            f.seek(offset + first)
            before = f.read(torn)
            after = bytes(torn) if rng.random() < 0.5 else build(rng.choice(records))[:torn].ljust(torn, b"\0")
            f.seek(offset + first)
            f.write(after)
        if first < len(build(records[n])) and before != after:
            hit.add(n)
    change_state(tmp_path, boot="another-boot")
    store = Store(str(tmp_path), segment_bytes=1 << 18)
    assert store.wait_started(30)
    for n, r in enumerate(records):
        status, raw = read(store, r)
        assert status in (OK, NOT_FOUND) and (status == NOT_FOUND or raw == build(r))
        assert n in hit or status == OK, f"record {n} was not touched"
    assert store.check_integrity(deep=True) == []
    store.flush()
    until_on_disk(tmp_path, store)
    store.close()


def test_a_copy_that_filled_the_holes_brings_nothing_back(tmp_path: Path) -> None:
    """Records freed after their segment was sealed are still named in its footer."""
    store = Store(str(tmp_path / "first"), segment_bytes=1 << 16)
    records = [record_of(n) for n in range(120)]
    assert all(store.put(build(r)) == OK for r in records)
    store.close()
    store = Store(str(tmp_path / "first"), segment_bytes=1 << 16)
    assert store.wait_started(10)
    withdraw(store, *records[::10])
    store.flush()
    store.close()
    for path in (tmp_path / "first" / "segments").iterdir():
        path.write_bytes(path.read_bytes())  # in place, and no hole is left
    shutil.rmtree(tmp_path / "first" / "index")
    assert_as_before(tmp_path / "first", records, "rebuild")


def test_a_torn_footer_is_no_footer(tmp_path: Path) -> None:
    records = filled(tmp_path)
    Store(str(tmp_path)).close()
    for n, f in enumerate(sorted((tmp_path / "segments").iterdir())):
        raw = bytearray(f.read_bytes())
        raw[-4096 + (n * 977) % 4096] ^= 1
        f.write_bytes(raw) if n % 2 else os.truncate(f, len(raw) - 1000)
    shutil.rmtree(tmp_path / "index")
    store = Store(str(tmp_path), segment_bytes=1 << 16)
    assert store.wait_started(30)
    for n, r in enumerate(records):
        assert read(store, r) == ((NOT_FOUND, b"") if n % 10 == 0 else (OK, build(r)))
    assert store.check_integrity(deep=True) == []
    store.close()


def test_puts_and_reads_are_served_while_the_index_is_rebuilt(tmp_path: Path) -> None:
    filled(tmp_path, 400)
    shutil.rmtree(tmp_path / "index")
    store = Store(str(tmp_path), segment_bytes=1 << 16)
    fresh = [record_of(n) for n in range(5000, 5100)]
    again = [record_of(n) for n in range(390, 400)]  # stored again before they are found again
    assert all(store.put(build(r)) in (OK, 4) for r in fresh + again)
    assert all(read(store, r) == (OK, build(r)) for r in fresh + again)
    assert store.wait_started(30)
    assert store.check_integrity(deep=True) == []
    store.close()


def test_an_index_damaged_while_running_is_replaced_and_filled_again(tmp_path: Path) -> None:
    store = Store(str(tmp_path), segment_bytes=1 << 16)
    records = [record_of(n, blocks=5) for n in range(200)]
    assert all(store.put(build(r)) == OK for r in records)
    data = tmp_path / "index" / "data.mdb"
    raw = bytearray(data.read_bytes())
    tag = struct.pack("<Q", records[77].tags[3])
    with data.open("r+b") as f:
        at = raw.find(tag)
        while at >= 0:
            f.seek(at)
            f.write(b"\0\0\0\0")
            at = raw.find(tag, at + 1)
    read(store, records[77])
    assert store.stats()["index_faults_total"] == 1
    deadline = 0
    while store.stats()["start_mode"] != "rebuild" and deadline < 10_000:
        store.wait_pressure(0.001)
        deadline += 1
    assert store.wait_started(30)
    assert all(read(store, r) == (OK, build(r)) for r in records)
    assert promise(store, *records, pin_seconds=1) == [(OK, 1)] * 200
    assert store.check_integrity(deep=True) == []
    store.close()


def test_kill_9_under_writes_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """Three threads put, evict and withdraw; the process is killed at random, again and again on the same directory."""
    child = str(Path(__file__).with_name("store_child.py"))
    rng = random.Random(20)
    alive: set[int] = set()
    modes: set[object] = set()
    for kill in range(KILLS):
        evicting = False
        with subprocess.Popen([sys.executable, child, "write", str(tmp_path), str(kill)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            stop_after = rng.randrange(1, 1500)
            for count, line in enumerate(writer.stdout):
                if count == stop_after:
                    writer.kill()
                word, number = line.split()
                if word == "put":
                    alive.add(int(number))
                elif word == "withdrawing":
                    alive.discard(int(number))
                else:
                    evicting = True
        if rng.random() < 0.7:
            change_state(tmp_path, crashed_ms="0")  # else it would be rebuilt each time: two crashes in a minute
        store = Store(str(tmp_path), segment_bytes=1 << 18, capacity_bytes=8 << 20)
        assert store.wait_started(30)
        modes.add(store.stats()["start_mode"])
        lost = []
        for number in alive:
            r = record_of(number)
            status, raw = read(store, r)
            assert status in (OK, NOT_FOUND)
            assert status != OK or raw == build(r)
            if status != OK:
                lost.append(number)
        assert evicting or not lost, f"kill {kill}: {len(lost)} acknowledged records are gone"
        alive.difference_update(lost)
        assert store.check_integrity(deep=True) == []
        store.flush()
        until_on_disk(tmp_path, store)
        store.close(clean=False)
        if rng.random() < 0.7:
            change_state(tmp_path, crashed_ms="0")
    assert modes == {"killed", "rebuild"}
