"""Damaged bytes, in every kind of file: what is handed out is right or is found to be wrong, and the node comes up again by itself."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from store_tools import NOT_FOUND, OK, OWNER, Store, read, record_of

from kvstore.kernels import _native
from kvstore.record import Record, build

FULL = os.environ.get("SIZE", "") == "full"
CHILD = str(Path(__file__).with_name("store_child.py"))
COUNT = 60


def stored(directory: Path) -> list[Record]:
    store = Store(str(directory), segment_bytes=1 << 17)
    records = [record_of(n) for n in range(COUNT)]
    assert all(store.put(build(r)) == OK for r in records)
    store.close()
    return records


def right_or_noticed(store: Store, records: list[Record]) -> int:
    """Reads all; returns how many came back right. Bytes that are not must fail their own check."""
    right = 0
    for r in records:
        status, raw = read(store, r)
        if status == OK and raw == build(r):
            right += 1
        elif status == OK:
            assert _native.check_record(raw) != OK
    return right


@pytest.mark.parametrize("rebuilt", [False, True], ids=["index kept", "index lost"])
def test_flipped_bits_of_a_segment_are_found(tmp_path: Path, rebuilt: bool) -> None:
    """Heads, checks, pieces, padding, footers: one flip in each of the segments, many times over."""
    records = stored(tmp_path / "sound")
    rng = random.Random(6)
    worst = COUNT
    for _ in range(1000 if FULL else 40):
        shutil.copytree(tmp_path / "sound", tmp_path / "hurt")
        files = list((tmp_path / "hurt" / "segments").iterdir())
        for path in files:
            raw = bytearray(path.read_bytes())
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            path.write_bytes(raw)
        if rebuilt:
            shutil.rmtree(tmp_path / "hurt" / "index")
        store = Store(str(tmp_path / "hurt"))
        assert store.wait_started(30)
        worst = min(worst, right_or_noticed(store, records))
        for r in records:
            store.report_corrupt(OWNER, r.extent_key, r.write_id, 0)
        assert store.check_integrity(deep=True) == []  # what was bad has been dropped
        assert right_or_noticed(store, records) == store.stats()["entries"]
        store.close()
        shutil.rmtree(tmp_path / "hurt")
    assert worst >= COUNT - len(files), "a flip may cost the record it hit and no other"


def test_misplaced_and_lost_writes_are_found(tmp_path: Path) -> None:
    """A's bytes in B's place, a write that never reached the disk, a write cut at each 512 bytes."""
    store = Store(str(tmp_path))
    records = [record_of(n, blocks=4, plane_bytes=(10240,)) for n in range(12)]
    places = []
    for r in records:
        assert store.put(build(r)) == OK
        ref = store.open_read(OWNER, r.extent_key, r.write_id, 0)
        places.append(ref.offset)
        ref.close()
    segment = next((tmp_path / "segments").iterdir())
    with segment.open("r+b") as f:
        for n, r in enumerate(records[1:], 1):
            f.seek(places[n])
            whole = build(r)
            f.write(build(records[0]) if n == 1 else whole[: 512 * (n - 2)].ljust(len(whole), b"\0"))
    assert read(store, records[0]) == (OK, build(records[0]))
    status, raw = read(store, records[1])
    assert raw == build(records[0])
    assert sum(problem.endswith("another record lies in its place") for problem in store.check_integrity(deep=True)) == 1
    for r in records[1:]:
        status, raw = read(store, r)
        assert status == OK and (raw == build(r)) == (_native.check_record(raw) == OK and raw != build(records[0]))
        store.report_corrupt(OWNER, r.extent_key, r.write_id, 0)
    for n, r in enumerate(records):
        cut_whole = n >= 2 and 512 * (n - 2) >= len(build(r))
        assert read(store, r)[0] == (OK if n == 0 or cut_whole else NOT_FOUND)
    assert store.check_integrity(deep=True) == []
    store.close()


def test_flipped_bits_of_the_index_never_give_wrong_bytes_and_never_stop_the_node(tmp_path: Path) -> None:
    records = stored(tmp_path / "sound")
    numbers = ",".join(str(n) for n in range(COUNT))
    size = (tmp_path / "sound" / "index" / "data.mdb").stat().st_size
    rng = random.Random(8)
    positions = [rng.randrange(8 * size) for _ in range(3000 if FULL else 120)]
    crashes = 0
    while positions:
        hurt = tmp_path / "hurt"
        shutil.copytree(tmp_path / "sound", hurt)
        command = [sys.executable, CHILD, "flip", str(hurt), numbers, ",".join(map(str, positions))]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=110)
        lines = [json.loads(line) for line in ran.stdout.splitlines()]
        for at, result in zip(lines[::2], lines[1::2], strict=False):
            assert 2 not in result["answers"] and result["started"] and result["problems"] == [], (at, result)
            if result["stats"]["index_faults_total"] or result["stats"]["start_mode"] == "rebuild":
                continue
            assert result["answers"] == [1] * COUNT or 0 in result["answers"]
        if ran.returncode:  # LMDB itself died on it: a second crash within the minute discards the index
            crashes += 1
            assert ran.returncode < 0 and len(lines) % 2 == 1
            for _ in range(3):
                again = subprocess.run([sys.executable, CHILD, "check", str(hurt), numbers], stdout=subprocess.PIPE, text=True, timeout=110)
                if again.returncode == 0:
                    break
            result = json.loads(again.stdout)
            assert 2 not in result["answers"] and result["started"] and result["problems"] == [], (lines[-1], result)
        positions = positions[len(lines) // 2 + len(lines) % 2 :]
        shutil.rmtree(hurt)
    assert crashes <= len(records)


def test_an_index_that_was_cut_off_does_not_end_the_node(tmp_path: Path) -> None:
    """Past the end of its file a map is a SIGBUS."""
    stored(tmp_path / "sound")
    numbers = ",".join(str(n) for n in range(COUNT))
    size = (tmp_path / "sound" / "index" / "data.mdb").stat().st_size
    for left in (0, 1, 4096, 8191, 8192, 12_288, size // 2, size - 8192, size - 4096, size - 1):
        hurt = tmp_path / f"cut-{left}"
        shutil.copytree(tmp_path / "sound", hurt)
        os.truncate(hurt / "index" / "data.mdb", left)
        ran = subprocess.run([sys.executable, CHILD, "check", str(hurt), numbers], stdout=subprocess.PIPE, text=True, timeout=110)
        assert ran.returncode == 0, left
        result = json.loads(ran.stdout)
        assert 2 not in result["answers"] and result["started"] and result["problems"] == [], (left, result)


def test_any_bytes_as_ghosts_are_no_fault(tmp_path: Path) -> None:
    stored(tmp_path)
    (tmp_path / "ghosts" / "19000.ghost").write_bytes(random.Random(1).randbytes(1003))
    (tmp_path / "ghosts" / "x.ghost").write_bytes(b"")
    store = Store(str(tmp_path))
    import numpy as np

    assert store.ghosts(OWNER, np.zeros((3, 32), np.uint8)) == []
    store.close()


def test_a_ghost_file_of_a_million_equal_rows_costs_neither_time_nor_room_past_its_limit(tmp_path: Path) -> None:
    """A hole after a power loss reads as zeros; two files of 80 MB on a node whose ghosts may take 1 MB, or 150."""
    stored(tmp_path)
    for capacity, limit in ((64 << 20, 1 << 20), (300_000_000_000, 150_000_000)):
        for day in (19000, 19001):
            path = tmp_path / "ghosts" / f"{day}.ghost"
            path.write_bytes(struct.pack("<QII", 0x325453484753564B, 2, day))
            os.truncate(path, 16 + 80 * 1_000_000)
        store = Store(str(tmp_path), capacity_bytes=capacity)
        assert store.wait_started(20)
        assert 0 < store.stats()["ghost_bytes"] <= limit
        store.close()
