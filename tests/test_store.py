"""The storage of one node: what was put is read back, what was not is not found, and every limit has its answer."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_tools import (
    BAD_REQUEST,
    BUSY,
    CORRUPT,
    EXISTS,
    NO_SPACE,
    NOT_FOUND,
    OK,
    OWNER,
    TOMBSTONED,
    TOO_MANY_WRITINGS,
    Store,
    discover,
    key_of,
    promise,
    read,
    record_of,
    until_ahead_is_back,
    withdraw,
)

from kvstore.errors import ConfigError, DirectoryInUse
from kvstore.kernels import _native
from kvstore.record import build, padded_bytes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(str(tmp_path / "data"))
    assert opened.wait_started(10)
    yield opened
    assert opened.check_integrity(deep=True) == []
    opened.close()


def test_what_was_put_is_found_and_read_back_equal(store: Store) -> None:
    records = [record_of(n) for n in range(50)]
    assert [store.put(build(r)) for r in records] == [OK] * 50
    for r in records:
        assert read(store, r) == (OK, build(r))
    found, busy = discover(store, OWNER, *(r.extent_key for r in records))
    assert not busy and [f.key_ordinal for f in found] == list(range(50))
    for f, r in zip(found, records, strict=True):
        assert (f.write_id, f.tags, f.start_block, f.shard_mask) == (r.write_id, tuple(r.tags), r.start_block, 1)


def test_a_read_ref_says_where_each_piece_lies(store: Store) -> None:
    r = record_of(1, blocks=3, plane_bytes=(640, 330, 5000))
    store.put(build(record_of(2)))
    store.put(build(r))
    ref = store.open_read(OWNER, r.extent_key, r.write_id, 0)
    assert isinstance(ref, _native.ReadRef)
    assert ref.shard_bytes == [64, 64, 512] and ref.offset % 4096 == 0 and ref.read() == build(r)
    ref.close()
    with pytest.raises(ValueError, match="closed"):
        ref.read()


def test_earlier_starts_come_back_in_their_order(store: Store) -> None:
    earlier = (7, 64, 5, 5, 2**32 - 1, 0, 1000)
    r = record_of(1, earlier=earlier)
    store.put(build(r))
    assert discover(store, OWNER, r.extent_key)[0][0].earlier == earlier


def test_writings_of_one_key_stand_side_by_side_up_to_eight_and_are_never_overwritten(store: Store) -> None:
    key = key_of(9)
    writings = [record_of(n, extent_key=key, write_id=n) for n in range(9)]
    assert [store.put(build(r)) for r in writings] == [OK] * 8 + [TOO_MANY_WRITINGS]
    assert store.put(build(record_of(99, extent_key=key, write_id=3))) == EXISTS
    assert read(store, writings[3]) == (OK, build(writings[3]))
    assert sorted(f.write_id for f in discover(store, OWNER, key)[0]) == list(range(8))
    # A further shard of a writing that is here needs no ninth place.
    assert store.put(build(record_of(50, extent_key=key, write_id=3, shard=5))) == OK
    assert next(f.shard_mask for f in discover(store, OWNER, key)[0] if f.write_id == 3) == 0b100001


def test_owners_never_see_each_other(store: Store) -> None:
    r = record_of(1)
    store.put(build(r))
    stranger = bytes(15) + b"\1"
    assert discover(store, stranger, r.extent_key) == ([], False)
    assert store.read(stranger, r.extent_key, r.write_id, 0) == (NOT_FOUND, b"")
    assert promise(store, record_of(1, owner=stranger), pin_seconds=60) == [(NOT_FOUND, 0)]
    assert withdraw(store, record_of(1, owner=stranger)) == [NOT_FOUND]
    assert read(store, r)[0] == OK


def test_a_promise_names_the_shards_held(store: Store) -> None:
    key = key_of(3)
    for shard in (0, 4, 11):
        store.put(build(record_of(1, extent_key=key, write_id=5, shard=shard)))
    here = record_of(1, extent_key=key, write_id=5)
    gone = record_of(1, extent_key=key, write_id=6)
    assert promise(store, gone, here, gone, pin_seconds=60) == [(NOT_FOUND, 0), (OK, 0b100000010001), (NOT_FOUND, 0)]


def test_a_promise_of_a_pinned_writing_sees_shards_that_came_and_went_since(store: Store) -> None:
    r, more = record_of(1, write_id=5), record_of(1, write_id=5, shard=4)
    store.put(build(r))
    assert promise(store, r, pin_seconds=60) == promise(store, r, pin_seconds=60) == [(OK, 1)]
    store.put(build(more))
    assert promise(store, r, pin_seconds=60) == promise(store, r, pin_seconds=60) == [(OK, 0b10001)]
    assert withdraw(store, r) == [OK]
    assert promise(store, r, pin_seconds=60) == [(NOT_FOUND, 0)]


def test_promises_past_their_bound_are_busy_and_still_say_what_is_held(tmp_path: Path) -> None:
    store = Store(str(tmp_path), pins_max=16)
    records = [record_of(n) for n in range(200)]
    for r in records:
        store.put(build(r))
    answers = promise(store, *records, pin_seconds=60)
    assert {status for status, _ in answers} == {OK, BUSY} and all(mask == 1 for _, mask in answers)
    assert store.stats()["pins"] <= 32
    store.close()


def test_a_withdrawn_writing_is_gone_and_cannot_come_back(store: Store) -> None:
    r, other = record_of(1), record_of(1, write_id=2)
    store.put(build(r))
    store.put(build(other))
    assert promise(store, r, pin_seconds=60) == [(OK, 1)]
    assert withdraw(store, r) == [OK]
    assert withdraw(store, r) == [NOT_FOUND]
    assert read(store, r)[0] == NOT_FOUND
    assert store.put(build(r)) == TOMBSTONED
    assert read(store, other) == (OK, build(other))


def test_a_withdrawal_before_its_write_keeps_it_out(store: Store) -> None:
    r = record_of(1)
    assert withdraw(store, r) == [NOT_FOUND]
    assert store.put(build(r)) == TOMBSTONED


def test_damaged_and_impossible_records_are_refused(store: Store) -> None:
    raw = build(record_of(1))
    for at in (20, 100, 400, len(raw) - 1):
        bad = bytearray(raw)
        bad[at] ^= 1
        assert store.put(bytes(bad)) == CORRUPT
    assert store.put(raw[:-1]) == BAD_REQUEST
    assert store.put(raw + b"x") == BAD_REQUEST
    assert store.put(b"") == BAD_REQUEST
    assert store.stats()["used_bytes"] == 0


def test_a_read_beyond_the_extent_or_of_another_shard_is_refused(store: Store) -> None:
    r = record_of(1, blocks=2)
    store.put(build(r))
    assert store.read(OWNER, r.extent_key, r.write_id, 1) == (NOT_FOUND, b"")
    assert store.read(OWNER, r.extent_key, r.write_id + 1, 0) == (NOT_FOUND, b"")


def test_a_full_store_says_so_and_still_reads(tmp_path: Path) -> None:
    store = Store(str(tmp_path), capacity_bytes=40 * 4096)
    records = [record_of(n) for n in range(60)]
    answers = [store.put(build(r)) for r in records]
    assert set(answers) == {OK, NO_SPACE}
    assert store.stats()["used_bytes"] <= 40 * 4096
    assert store.wait_pressure(0.0) > 1  # the evictor is told how much was refused
    kept = [r for r, status in zip(records, answers, strict=True) if status == OK]
    assert all(read(store, r) == (OK, build(r)) for r in kept)
    withdraw(store, *kept[:5])
    assert store.put(build(records[-1])) == OK
    assert store.check_integrity(deep=True) == []
    store.close()


def test_a_full_index_is_an_answer_and_reads_and_deletes_go_on(tmp_path: Path) -> None:
    store = Store(str(tmp_path), index_map_bytes=1 << 20)
    records, status = [], OK
    while status == OK and len(records) < 20_000:
        r = record_of(len(records), blocks=1, plane_bytes=(32,))
        status = store.put(build(r))
        records += [r] if status == OK else []
    assert status == NO_SPACE and len(records) > 500
    assert all(read(store, r) == (OK, build(r)) for r in records[::37])
    rows = [row for _, row, _ in store.peek(2, OWNER, 10_000)]
    assert len(store.evict(rows[:500], 2)) > 0
    assert store.check_integrity() == []
    store.close()


def test_segments_roll_over_are_sealed_and_emptied_ones_are_removed(tmp_path: Path) -> None:
    store = Store(str(tmp_path), segment_bytes=1 << 16)
    records = [record_of(n) for n in range(60)]
    for r in records:
        assert store.put(build(r)) == OK
    files = sorted((tmp_path / "segments").iterdir())
    assert len(files) > 3 and all(f.stat().st_size <= 1 << 16 for f in files)
    store.close()
    store = Store(str(tmp_path), segment_bytes=1 << 16)
    assert store.wait_started(10)
    assert all(read(store, r) == (OK, build(r)) for r in records)
    withdraw(store, *records)
    store.close()
    store = Store(str(tmp_path))
    assert store.wait_started(10)
    store.flush()
    assert list((tmp_path / "segments").iterdir()) == []
    assert store.check_integrity() == []
    store.close()


def test_blocks_asked_for_ahead_of_records_go_back_when_none_comes(store: Store, tmp_path: Path) -> None:
    first = [record_of(n) for n in range(20)]
    assert [store.put(build(r)) for r in first] == [OK] * 20
    (segment,) = (tmp_path / "data" / "segments").glob("*.seg")
    written = segment.stat().st_size
    assert segment.stat().st_blocks * 512 >= written + (1 << 20)  # asked for in advance
    until_ahead_is_back(segment)
    assert segment.stat().st_size == written
    later = [record_of(n) for n in range(20, 40)]
    assert [store.put(build(r)) for r in later] == [OK] * 20
    assert all(read(store, r) == (OK, build(r)) for r in first + later)


def test_a_record_larger_than_a_segment_gets_one_of_its_own(tmp_path: Path) -> None:
    store = Store(str(tmp_path), segment_bytes=1 << 16)
    r = record_of(1, blocks=1, plane_bytes=(4 << 20,))
    assert store.put(build(r)) == OK and read(store, r) == (OK, build(r))
    store.close()


def test_a_free_place_is_punched_only_when_nobody_reads_it(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    r, beside = record_of(1, plane_bytes=(200_000,)), record_of(2)
    store.put(build(r))
    store.put(build(beside))
    ref = store.open_read(OWNER, r.extent_key, r.write_id, 0)
    assert isinstance(ref, _native.ReadRef)
    withdraw(store, r)
    store.flush()
    assert ref.read() == build(r) and store.stats()["freeing_bytes"] == padded_bytes(len(build(r)))
    segment = next((tmp_path / "segments").iterdir())
    before = segment.stat().st_blocks
    ref.close()
    store.flush()
    assert store.stats()["freeing_bytes"] == 0
    assert before - segment.stat().st_blocks == padded_bytes(len(build(r))) // 512
    assert read(store, beside) == (OK, build(beside))
    assert store.check_integrity(deep=True) == []
    store.close()


def test_neighbours_are_punched_in_one_go(store: Store) -> None:
    records = [record_of(n) for n in range(20)]
    for r in records:
        store.put(build(r))
    withdraw(store, *records[3:17])
    store.flush()
    assert store.stats()["punches_total"] == 1 and store.stats()["freeing_bytes"] == 0


def test_a_reported_record_goes_only_if_it_is_bad(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    good, bad = record_of(1), record_of(2)
    store.put(build(good))
    store.put(build(bad))
    ref = store.open_read(OWNER, bad.extent_key, bad.write_id, 0)
    assert isinstance(ref, _native.ReadRef)
    offset = ref.offset
    ref.close()
    with next((tmp_path / "segments").iterdir()).open("r+b") as f:
        f.seek(offset + len(build(bad)) - 5)
        f.write(b"\0\0\0")
    for r in (good, bad):
        store.report_corrupt(OWNER, r.extent_key, r.write_id, 0)
    assert read(store, good)[0] == OK and read(store, bad)[0] == NOT_FOUND
    assert store.stats()["corrupt_reported_total"] == 2 and store.stats()["corrupt_found_total"] == 1
    store.close()


def test_a_segment_that_vanished_is_a_miss(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    r = record_of(1)
    store.put(build(r))
    store.close()
    next((tmp_path / "segments").iterdir()).unlink()
    store = Store(str(tmp_path))
    assert read(store, r) == (NOT_FOUND, b"")
    assert promise(store, r) == [(NOT_FOUND, 0)]
    store.close()


def test_a_second_store_on_the_directory_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
    code = "import sys; from kvstore.kernels import _native; s = _native.Store(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "open\n"
        with pytest.raises(DirectoryInUse) as refused:
            Store(str(tmp_path))
        assert refused.value.pid == holder.pid
        holder.kill()
    Store(str(tmp_path)).close()


def test_a_directory_that_cannot_be_used_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make data directory"):
        Store(str(tmp_path / "file" / "data"))
    with pytest.raises(ConfigError, match="segment_bytes"):
        Store(str(tmp_path / "data"), segment_bytes=1)
    Store(str(tmp_path / "data")).close()
    (tmp_path / "data" / "state").write_text("kvstore-data 2\n")
    with pytest.raises(ConfigError, match="has format 2"):
        Store(str(tmp_path / "data"))


def test_an_answer_too_long_says_that_it_is_not_whole(store: Store) -> None:
    key = key_of(1)
    for n in range(8):
        store.put(build(record_of(n, extent_key=key, write_id=n, blocks=64, plane_bytes=(32,), earlier=tuple(range(128)))))
    found, busy = discover(store, OWNER, *([key] * 200))
    assert busy and 0 < len(found) < 1600


def test_strict_mode_stores_and_restarts_alike(tmp_path: Path) -> None:
    store = Store(str(tmp_path), strict_sync=True)
    records = [record_of(n) for n in range(20)]
    assert [store.put(build(r)) for r in records] == [OK] * 20
    store.close(clean=False)
    store = Store(str(tmp_path), strict_sync=True)
    assert store.wait_started(10) and store.stats()["start_mode"] == "killed"
    assert all(read(store, r) == (OK, build(r)) for r in records)
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB of its own."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mounted)], capture_output=True)
    if made.returncode:
        pytest.skip("may not mount a file system here")
    yield mounted
    subprocess.run(["umount", "--lazy", str(mounted)], check=True)  # a store left open by a failure must not keep it


@pytest.mark.parametrize("reserve", [0, 8 << 20], ids=["to the last byte", "with a reserve"])
def test_a_full_disk_is_an_answer_and_writes_come_back_with_space(small_disk: Path, reserve: int) -> None:
    store = Store(str(small_disk / "data"), segment_bytes=4 << 20, disk_reserve_bytes=reserve)
    records, status, n = [], OK, 0
    while status == OK:
        r = record_of(n, blocks=8, plane_bytes=(200_000,))
        n += 1
        status = store.put(build(r))
        records += [r] if status == OK else []
    assert status == NO_SPACE and len(records) > 50
    assert all(read(store, r) == (OK, build(r)) for r in records)
    more = [store.put(build(record_of(n + more, blocks=8, plane_bytes=(200_000,)))) for more in range(5)]
    assert set(more) <= {OK, NO_SPACE} and more[-1] == NO_SPACE  # what was asked for ahead is given back after a second
    rows = [row for _, row, _ in store.peek(2, OWNER, 1000)]
    assert len(store.evict(rows[: len(rows) // 2], 2)) == len(rows) // 2
    store.flush()
    late, deadline = build(record_of(n + 5, blocks=8, plane_bytes=(200_000,))), time.monotonic() + 30
    while (status := store.put(late)) == NO_SPACE and time.monotonic() < deadline:  # the free space is looked at once a second
        store.wait_pressure(0.01)
    assert status == OK, "writes did not come back"
    assert store.check_integrity(deep=True) == [] and store.stats()["index_faults_total"] == 0
    store.close()
