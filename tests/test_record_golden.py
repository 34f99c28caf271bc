"""Golden files: what version 1 wrote, every later version reads, and version 1 writes the same bytes again (docs/FORMAT.md)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_tools import OK, Store, discover, read, record_of

from kvstore import entry, segment
from kvstore.kernels import _native
from kvstore.record import ALIGN, Head, Record, build, padded_bytes, parse, parse_head, piece_sum, plane_digest, shard_bytes_of

GOLDEN = Path(__file__).with_name("golden")
OWNER = bytes(range(16))
SEGMENT = 7
CREATED_UNIX_MS = 1_790_000_000_123


def golden_record(number: int) -> Record:
    """No randomness from a library: the bytes must be the same in ten years."""
    k, m, planes, blocks = 10, 2, (330, 640), 3
    keys = [bytes((number * 50 + block * 7 + at) % 256 for at in range(32)) for block in range(blocks)]
    pieces = [
        [bytes((number + 3 * p + 5 * b + 11 * at) % 256 for at in range(shard_bytes_of(n, k))) for b in range(blocks)]
        for p, n in enumerate(planes)
    ]
    write_id, shard = 0x0123_4567_89AB_CDEF + number, 11 - number
    sums = [[piece_sum(OWNER, keys[0], write_id, shard, p, b, pieces[p][b]) for b in range(blocks)] for p in range(len(planes))]
    return Record(
        owner=OWNER,
        extent_key=keys[0],
        write_id=write_id,
        shard=shard,
        k=k,
        m=m,
        plane_bytes=planes,
        tags=[int.from_bytes(each[8:16], "little") for each in keys],
        pieces=pieces,
        digests=[[plane_digest(keys[b], write_id, [sums[p][b]] * k) for b in range(blocks)] for p in range(len(planes))],
        start_block=128 + number,
        earlier=(0, 64, 100 + number),
        pg=4095,
        write_epoch=3,
        bucket=29_833_333,
        created_unix_ms=CREATED_UNIX_MS,
        retention_class=3,
        fidelity=1,
        depth=2,
        kv_group=1,
        cipher=0,
        layout_tag=0xFEED_F00D_DEAD_BEEF,
    )


def golden_segment() -> bytes:
    raws = [build(golden_record(n)) for n in range(2)]
    body = b"".join(raw.ljust(padded_bytes(len(raw)), b"\0") for raw in raws)
    return body + segment.build_footer(segment.Footer(SEGMENT, len(body), CREATED_UNIX_MS, _heads(raws)))


def _heads(raws: list[bytes]) -> list[tuple[int, bytes]]:
    out, at = [], 0
    for raw in raws:
        head = parse_head(raw)
        assert isinstance(head, Head)
        out.append((at, raw[: head.head_bytes]))
        at += padded_bytes(len(raw))
    return out


def golden_rows(*, reused: bool) -> dict[str, str]:
    head = parse_head(build(golden_record(0)))
    assert isinstance(head, Head)
    row = entry.encode(head, SEGMENT, 3 * ALIGN, 29_833_334, reused)
    return {name: getattr(row, name).hex() for name in ("key", "value", "recency_key", "recency_value")}


def test_the_golden_record_is_what_both_write_and_read() -> None:
    raw = (GOLDEN / "record-v1.bin").read_bytes()
    assert build(golden_record(0)) == raw
    back = parse(raw)
    assert isinstance(back, Record) and build(back) == raw and back.start_block == 128 and back.earlier == (0, 64, 100)
    assert _native.check_record(raw) == OK


def test_the_golden_segment_is_what_both_write_and_read(tmp_path: Path) -> None:
    raw = (GOLDEN / "segment-v1.seg").read_bytes()
    assert golden_segment() == raw
    records = [build(golden_record(n)) for n in range(2)]
    data_end = sum(padded_bytes(len(r)) for r in records)
    assert raw[data_end:] == _native.segment_footer(SEGMENT, data_end, CREATED_UNIX_MS, _heads(records))
    fd = os.open(GOLDEN / "segment-v1.seg", os.O_RDONLY)
    footer = segment.read_footer(fd, SEGMENT)
    assert footer is not None and list(footer.entries) == _heads(records) and segment.read_footer(fd, SEGMENT + 1) is None
    os.close(fd)


def test_a_store_takes_up_a_golden_segment(tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()
    target = tmp_path / "segments" / segment.segment_name(SEGMENT)
    shutil.copyfile(GOLDEN / "segment-v1.seg", target)
    store = Store(str(tmp_path), virtual_clock=True)
    assert store.wait_started(10) and store.stats()["start_mode"] == "rebuild"
    for number in range(2):
        r = golden_record(number)
        assert read(store, r) == (OK, build(r))
        [found], busy = discover(store, OWNER, r.extent_key)
        assert not busy and found.earlier == r.earlier and found.tags == tuple(r.tags)
    assert store.check_integrity(deep=True) == []
    store.close()
    assert target.read_bytes() == (GOLDEN / "segment-v1.seg").read_bytes()


@pytest.mark.parametrize(("name", "reused"), [("index-rows-v1.json", False), ("index-rows-reused-v1.json", True)])
def test_the_golden_index_rows_are_what_both_write(name: str, reused: bool) -> None:
    rows = json.loads((GOLDEN / name).read_text())
    assert golden_rows(reused=reused) == rows
    native = _native.index_rows(build(golden_record(0)), SEGMENT, 3 * ALIGN, 29_833_334, reused)
    assert [each.hex() for each in native] == [rows[name] for name in ("key", "value", "recency_key", "recency_value")]
    back = entry.decode(bytes.fromhex(rows["key"]), bytes.fromhex(rows["value"]))
    assert back is not None and back.earlier == (0, 64, 100) and back.shard_bytes == (64, 64) and back.offset_bytes == 3 * ALIGN
    assert back.reused == reused and bytes.fromhex(rows["recency_key"])[0] == back.retention_class + 16 * reused


@given(
    st.integers(0, 2**32),
    st.integers(1, 64),
    st.lists(st.integers(1, 9000), min_size=1, max_size=40),
    st.lists(st.integers(0, 2**32 - 1), max_size=128),
    st.integers(0, 2**32 - 1),
)
def test_index_rows_of_both_are_equal_and_read_back(seed: int, blocks: int, planes: list[int], earlier: list[int], bucket: int) -> None:
    while blocks * sum(planes) > 1 << 19:
        blocks = blocks // 2 or 1
        planes = planes[: len(planes) // 2 or 1]
    raw = build(record_of(seed, blocks=blocks, plane_bytes=tuple(planes), earlier=tuple(earlier)))
    head = parse_head(raw)
    assert isinstance(head, Head)
    row = entry.encode(head, 9, seed % 1000 * ALIGN, bucket)
    assert (row.key, row.value, row.recency_key, row.recency_value) == _native.index_rows(raw, 9, seed % 1000 * ALIGN, bucket)
    back = entry.decode(row.key, row.value)
    assert back is not None and (back.earlier, back.shard_bytes, back.tags) == (head.earlier, head.shard_bytes, head.tags)
    assert (back.bucket, back.segment, back.record_bytes) == (bucket, 9, head.record_bytes)
    assert entry.recency_sound(row.recency_key, row.recency_value)
    for at in range(0, len(row.value), 17):
        damaged = bytearray(row.value)
        damaged[at] ^= 1
        assert entry.decode(row.key, bytes(damaged)) is None
