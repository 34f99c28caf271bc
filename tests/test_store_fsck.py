"""fsck: silent about a sound directory, exact about a damaged one, and after a repair silent again."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from store_tools import OK, OWNER, Store, read, record_of, withdraw

from kvstore.errors import ConfigError, DirectoryInUse
from kvstore.record import Record, build, padded_bytes
from kvstore.server.fsck import FsckReport, fsck

COUNT = 40


@pytest.fixture
def data(tmp_path: Path) -> Path:
    store = Store(str(tmp_path / "data"), segment_bytes=1 << 16)
    for r in records():
        assert store.put(build(r)) == OK
    withdraw(store, *records()[::8])
    store.flush()
    store.close()
    return tmp_path / "data"


def records() -> list[Record]:
    return [record_of(n) for n in range(COUNT)]


def place_of(data: Path, r: Record) -> tuple[Path, int]:
    store = Store(str(data))
    ref = store.open_read(OWNER, r.extent_key, r.write_id, 0)
    found = data / "segments" / f"{ref.segment:08x}.seg", ref.offset
    ref.close()
    store.close()
    return found


def overwrite(path: Path, at: int, noise: bytes) -> None:
    with path.open("r+b") as f:
        f.seek(at)
        f.write(noise)


def kinds(report: FsckReport) -> set[str]:
    return {finding.kind for finding in report.findings}


def right(data: Path) -> list[int]:
    store = Store(str(data))
    assert store.wait_started(10) and store.check_integrity(deep=True) == []
    found = [n for n, r in enumerate(records()) if read(store, r) == (OK, build(r))]
    store.close()
    return found


ALIVE = [n for n in range(COUNT) if n % 8]


def test_a_sound_directory_is_clean_and_unchanged(data: Path) -> None:
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in data.rglob("*") if p.is_file()}
    told: list[tuple[int, int]] = []
    report = fsck(data, progress=lambda done, total: told.append((done, total)))
    assert report.ok and report.clean_stop and report.index_trusted
    assert report.records == len(ALIVE) and report.segments == report.segments_sealed > 1 and report.orphan_bytes == 0
    assert told[-1][0] == told[-1][1] > 0
    assert before == {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in data.rglob("*") if p.is_file()}


def test_a_sound_directory_after_a_kill_and_after_a_power_loss_is_clean(data: Path) -> None:
    Store(str(data)).close(clean=False)
    report = fsck(data)
    assert report.ok and not report.clean_stop and report.index_trusted and report.records == len(ALIVE)
    (data / "index.rebuild").touch()
    report = fsck(data)
    assert report.ok and not report.index_trusted and report.records == len(ALIVE)


def test_a_directory_in_use_is_refused(data: Path) -> None:
    store = Store(str(data))
    with pytest.raises(DirectoryInUse):
        fsck(data)
    store.close()
    assert fsck(data).ok


def test_what_is_no_data_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        fsck(tmp_path)


def test_a_bad_record_is_named_and_dropped(data: Path) -> None:
    path, at = place_of(data, records()[3])
    overwrite(path, at + 400, b"\xff\0\xff")
    report = fsck(data)
    assert kinds(report) == {"record"} and report.records_bad == 1
    assert (report.findings[0].segment, report.findings[0].offset_bytes) == (int(path.stem, 16), at)
    assert fsck(data).records_bad == 1  # looking changed nothing
    assert fsck(data, repair=True).repaired == ["1 bad records were dropped"]
    assert fsck(data).ok and right(data) == [n for n in ALIVE if n != 3]


def test_a_record_in_anothers_place_is_named_and_dropped(data: Path) -> None:
    path, at = place_of(data, records()[5])
    other = record_of(5, write_id=1)
    assert len(build(other)) == len(build(records()[5]))
    overwrite(path, at, build(other))
    report = fsck(data, repair=True)
    assert kinds(report) == {"record"} and "not the one" in report.findings[0].text
    assert fsck(data).ok and right(data) == [n for n in ALIVE if n != 5]


def test_bytes_that_nobody_owns_are_found_and_freed(data: Path) -> None:
    withdrawn_hole = next((data / "segments").glob("*.seg"))
    overwrite(withdrawn_hole, 0, random.Random(1).randbytes(padded_bytes(len(build(records()[0])))))  # record 0 was withdrawn: a hole
    report = fsck(data, repair=True)
    assert kinds(report) == {"orphan"} and report.orphan_bytes == padded_bytes(len(build(records()[0])))
    assert fsck(data).ok and right(data) == ALIVE


def test_a_damaged_footer_is_found_and_written_again(data: Path) -> None:
    path = sorted((data / "segments").glob("*.seg"))[1]
    overwrite(path, path.stat().st_size - 300, b"\xff")
    overwrite(path, path.stat().st_size - 4000, b"\xff\xff\xff\xff\xff\xff\xff\xff")
    report = fsck(data, repair=True)
    assert "footer" in kinds(report)
    assert fsck(data).ok and right(data) == ALIVE


def test_a_vanished_segment_is_told_and_its_entries_are_dropped(data: Path) -> None:
    path = sorted((data / "segments").glob("*.seg"))[1]
    lost = [n for n in ALIVE if place_of(data, records()[n])[0] == path]
    path.unlink()
    report = fsck(data, repair=True)
    assert kinds(report) == {"missing"} and report.findings_count == len(lost) > 0
    assert fsck(data).ok and right(data) == [n for n in ALIVE if n not in lost]


def test_any_damage_of_the_index_is_told_and_mended(data: Path, tmp_path: Path) -> None:
    rng = random.Random(2)
    index = data / "index" / "data.mdb"
    for _ in range(6):
        shutil.rmtree(tmp_path / "hurt", ignore_errors=True)
        shutil.copytree(data, tmp_path / "hurt")
        raw = bytearray(index.read_bytes())
        for _ in range(40):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        (tmp_path / "hurt" / "index" / "data.mdb").write_bytes(raw)
        report = fsck(tmp_path / "hurt", repair=True)
        assert not report.ok
        assert fsck(tmp_path / "hurt").ok and right(tmp_path / "hurt") == ALIVE


def test_a_lost_index_and_a_lost_state_are_told(data: Path) -> None:
    (data / "state").unlink()
    assert kinds(fsck(data)) == {"state"}
    assert fsck(data, repair=True).repaired and fsck(data).ok
    shutil.rmtree(data / "index")
    assert kinds(fsck(data, repair=True)) == {"index"}
    assert fsck(data).ok and right(data) == ALIVE
