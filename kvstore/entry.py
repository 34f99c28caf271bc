"""Rows of a node's index, as LMDB holds them. Twin of kernels/index.hpp, for checks and tests; docs/FORMAT.md is the text to this.

    extents   owner 16 | extent key 32 | write id 8 | shard 1  ->  FIXED | tags u64[blocks] | tail
    recency   queue 1 | owner 16 | bucket BE4 | ~start BE4 | extent key 32 | write id 8 | shard 1  ->  u32 padded bytes / 4096, u32 check
    freed     segment BE4 | offset / 4096 BE4  ->  u32 bytes / 4096

A queue: class, + 16 for what was used in a later bucket than its first. The tail: earlier starts as zigzag varints of their differences
(the first to the start block), then runs over the planes: varint count, varint shard bytes / 32. Invariants: each extents row has exactly
one recency row; a check covers the key and the rest of the value.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvstore.record import ALIGN, SHARD_ALIGN, Head, head_bytes_of, padded_bytes

VERSION = 1
REUSED = 16  # of a queue's number: used in a later bucket than its first; below it the class
SEGMENT_SYNTHETIC = 0  # of entries without bytes (benchmarks)
KEY = struct.Struct("<16s32s8sB")
FIXED = struct.Struct("<IIIIIIIIIHHHBBBBBBQQBBHI")
assert KEY.size == 57 and FIXED.size == 72


@dataclass(frozen=True)
class Row:
    """One entry as its two rows."""

    key: bytes
    value: bytes
    recency_key: bytes
    recency_value: bytes


@dataclass(frozen=True)
class Entry:
    """One decoded entry: who, where, and last use."""

    owner: bytes
    extent_key: bytes
    write_id: int
    shard: int
    segment: int
    offset_bytes: int
    record_bytes: int
    bucket: int
    retention_class: int
    reused: bool
    start_block: int
    tags: tuple[int, ...]
    earlier: tuple[int, ...]
    shard_bytes: tuple[int, ...]

    @property
    def padded_bytes(self) -> int:
        return padded_bytes(self.record_bytes)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _varints(data: bytes) -> list[int]:
    out, number, shift = [], 0, 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            out.append(number)
            number = shift = 0
    if shift:
        raise ValueError("cut short")
    return out


def _check(*parts: bytes) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(parts)) & 0xFFFFFFFF


def _tail(start_block: int, earlier: Sequence[int], shard_bytes: Sequence[int]) -> bytes:
    out, last = b"", start_block
    for start in earlier:
        out += _varint((start - last) << 1 if start >= last else (last - start) * 2 - 1)
        last = start
    at = 0
    while at < len(shard_bytes):
        run = next((n for n in range(at, len(shard_bytes)) if shard_bytes[n] != shard_bytes[at]), len(shard_bytes)) - at
        out += _varint(run) + _varint(shard_bytes[at] // SHARD_ALIGN)
        at += run
    return out


def recency_key(key: bytes, retention_class: int, bucket: int, start_block: int, reused: bool = False) -> bytes:
    return bytes([retention_class + (REUSED if reused else 0)]) + key[:16] + struct.pack(">II", bucket, 0xFFFFFFFF - start_block) + key[16:]


def encode(head: Head, segment: int, offset_bytes: int, bucket: int, reused: bool = False) -> Row:
    """The rows of a record at a place, last used in `bucket`."""
    key = KEY.pack(head.owner, head.extent_key, struct.pack("<Q", head.write_id), head.shard)
    tail = _tail(head.start_block, head.earlier, head.shard_bytes)
    value = FIXED.pack(
        0, segment, offset_bytes // ALIGN, head.record_bytes, bucket, head.start_block, head.pg, head.block_bytes, head.kv_group,
        head.depth, len(head.tags), len(head.earlier), VERSION, head.retention_class, head.k, head.m, head.cipher, len(head.plane_bytes),
        head.write_epoch, head.layout_tag, head.fidelity, reused, len(tail), 0,
    )  # fmt: skip
    value += struct.pack(f"<{len(head.tags)}Q", *head.tags) + tail
    value = struct.pack("<I", _check(key, value[4:])) + value[4:]
    row = recency_key(key, head.retention_class, bucket, head.start_block, reused)
    pages = struct.pack("<I", padded_bytes(head.record_bytes) // ALIGN)
    return Row(key, value, row, pages + struct.pack("<I", _check(row, pages)))


def decode(key: bytes, value: bytes) -> Entry | None:
    """An extents row; None: damaged."""
    if len(key) != KEY.size or len(value) < FIXED.size:
        return None
    (check, segment, offset_4k, record_bytes, bucket, start, _, _, _, _, blocks, earlier_count, version, retention, _, _, _, planes,
     _, _, _, reused, tail_bytes, _) = FIXED.unpack_from(value)  # fmt: skip
    if version != VERSION or len(value) != FIXED.size + 8 * blocks + tail_bytes or check != _check(key, value[4:]):
        return None
    tags = struct.unpack_from(f"<{blocks}Q", value, FIXED.size)
    try:
        numbers = _varints(value[FIXED.size + 8 * blocks :])
    except ValueError:
        return None
    earlier, last = [], start
    for number in numbers[:earlier_count]:
        last += number >> 1 if number % 2 == 0 else -(number + 1 >> 1)
        earlier.append(last)
    runs = numbers[earlier_count:]
    shard_bytes = [units * SHARD_ALIGN for run, units in zip(runs[::2], runs[1::2], strict=False) for _ in range(min(run, 255))]
    whole = head_bytes_of(planes, earlier_count, blocks) + 24 * planes * blocks + sum(shard_bytes) * blocks
    if len(shard_bytes) != planes or len(earlier) != earlier_count or whole != record_bytes:
        return None
    owner, extent_key, write_id, shard = KEY.unpack(key)
    return Entry(
        owner, extent_key, int.from_bytes(write_id, "little"), shard, segment, offset_4k * ALIGN, record_bytes, bucket, retention,
        bool(reused), start, tags, tuple(earlier), tuple(shard_bytes),
    )  # fmt: skip


def recency_sound(key: bytes, value: bytes) -> bool:
    """Whether a recency row's check is right."""
    return len(value) == 8 and struct.unpack("<I", value[4:])[0] == _check(key, value[:4])
