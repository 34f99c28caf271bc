"""A record: one shard of one extent, as it lies on disk and as a WRITE carries it. Twin and plain reference of kernels/record.hpp.

    head    fixed 256 B | plane table | earlier starts | tags | zero padding to 8
    checks  u64 sums[plane][block] | 16-byte digests[plane][block]
    shards  plane-major: plane 0 of all blocks, then plane 1, ...; each piece shard_bytes(plane)

Invariants: head_sum covers the head with itself zero; checks_sum covers the checks; each sum covers one piece and is seeded with the
piece's full identity. What can never change: the fixed part up to `version`. docs/FORMAT.md is the text to this.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

MAGIC = int.from_bytes(b"KVSREC01", "little")
VERSION = 1
ALIGN = 4096
RECORD_BYTES_MAX = 80 << 20
BLOCKS_MAX, EARLIER_MAX, K_MAX, M_MAX, CLASSES_MAX = 64, 128, 32, 4, 16
EXTENT_BYTES_MAX, BLOCK_BYTES_MAX, SHARD_ALIGN = 8 << 20, 64 << 20, 32

HEAD = struct.Struct("<QIIQQ16s32sQBBBBHHIIQIIQBBHIB3sIQQ96s")
PLANE = struct.Struct("<II")
IDENTITY = struct.Struct("<16s32sQIIII")
assert HEAD.size == 256 and PLANE.size == 8 and IDENTITY.size == 72
_HEAD_SUM_AT = 16


class Check(enum.IntEnum):
    """What is wrong with a record; numbers as in kernels/common.hpp."""

    OK = 0
    BAD_REQUEST = 20
    BAD_VERSION = 22
    CORRUPT = 40


@dataclass(frozen=True)
class Record:
    """One shard of an extent. `pieces[p][b]` is the shard of plane p of block b; `digests[p][b]` 16 bytes; `tags` u64 numbers."""

    owner: bytes
    extent_key: bytes
    write_id: int
    shard: int
    k: int
    m: int
    plane_bytes: Sequence[int]
    tags: Sequence[int]
    pieces: Sequence[Sequence[bytes]]
    digests: Sequence[Sequence[bytes]]
    start_block: int = 0
    earlier: Sequence[int] = field(default=())
    pg: int = 0
    write_epoch: int = 1
    bucket: int = 0
    created_unix_ms: int = 0
    retention_class: int = 2
    fidelity: int = 0
    depth: int = 0
    kv_group: int = 0
    cipher: int = 0
    layout_tag: int = 0

    @property
    def block_count(self) -> int:
        return len(self.tags)

    @property
    def block_bytes(self) -> int:
        return sum(self.plane_bytes)


def shard_bytes_of(plane_bytes: int, k: int) -> int:
    """Bytes of one shard of a plane: the plane is zero-padded to a multiple of k * 32."""
    unit = k * SHARD_ALIGN
    return -(-plane_bytes // unit) * SHARD_ALIGN


def head_bytes_of(planes: int, earlier: int, blocks: int) -> int:
    return -(-(HEAD.size + 8 * planes + 4 * earlier) // 8) * 8 + 8 * blocks


def padded_bytes(record_bytes: int) -> int:
    """Bytes that a record takes on disk."""
    return -(-record_bytes // ALIGN) * ALIGN


def piece_sum(owner: bytes, extent_key: bytes, write_id: int, shard: int, plane: int, block: int, piece: bytes | memoryview) -> int:
    """Checksum of one piece, seeded with all that names its place: bytes of another place never pass."""
    seed = xxhash.xxh3_64_intdigest(IDENTITY.pack(owner, extent_key, write_id, shard, plane, block, 0))
    return xxhash.xxh3_64_intdigest(piece, seed=seed)


def plane_digest(block_key: bytes, write_id: int, data_sums: Sequence[int]) -> bytes:
    """Digest of one (block, plane) over its key, its writing and the sums of its k data shards: 16 bytes, low half first."""
    value = xxhash.xxh3_128_intdigest(block_key + struct.pack(f"<Q{len(data_sums)}Q", write_id, *data_sums))
    return value.to_bytes(16, "little")


def build(record: Record) -> bytes:
    """The bytes of a record, without the 4 KiB padding."""
    r = record
    blocks, planes = r.block_count, len(r.plane_bytes)
    head_bytes = head_bytes_of(planes, len(r.earlier), blocks)
    sums = [piece_sum(r.owner, r.extent_key, r.write_id, r.shard, p, b, r.pieces[p][b]) for p in range(planes) for b in range(blocks)]
    checks = struct.pack(f"<{len(sums)}Q", *sums) + b"".join(d for row in r.digests for d in row)
    shards = b"".join(piece for row in r.pieces for piece in row)
    tables = b"".join(PLANE.pack(n, shard_bytes_of(n, r.k)) for n in r.plane_bytes) + struct.pack(f"<{len(r.earlier)}I", *r.earlier)
    tables += bytes(-len(tables) % 8) + struct.pack(f"<{blocks}Q", *r.tags)
    fixed = HEAD.pack(
        MAGIC, VERSION, head_bytes, 0, head_bytes + len(checks) + len(shards), r.owner, r.extent_key, r.write_id, r.shard, r.k, r.m, planes,
        blocks, len(r.earlier), r.start_block, r.pg, r.write_epoch, r.bucket, 0, r.created_unix_ms, r.retention_class, r.fidelity, r.depth,
        r.kv_group, r.cipher, bytes(3), r.block_bytes, xxhash.xxh3_64_intdigest(checks), r.layout_tag, bytes(96),
    )  # fmt: skip
    head = fixed + tables
    assert len(head) == head_bytes
    return head[:_HEAD_SUM_AT] + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + head[_HEAD_SUM_AT + 8 :] + checks + shards


@dataclass(frozen=True)
class Head:
    """A parsed head: the numbers of RecordHead and its tables."""

    head_bytes: int
    record_bytes: int
    owner: bytes
    extent_key: bytes
    write_id: int
    shard: int
    k: int
    m: int
    start_block: int
    pg: int
    write_epoch: int
    bucket: int
    created_unix_ms: int
    retention_class: int
    fidelity: int
    depth: int
    kv_group: int
    cipher: int
    block_bytes: int
    checks_sum: int
    layout_tag: int
    plane_bytes: tuple[int, ...]
    shard_bytes: tuple[int, ...]
    earlier: tuple[int, ...]
    tags: tuple[int, ...]


def parse_head(data: bytes | memoryview) -> Head | Check:
    """The head at the start of `data`, or what is wrong with it. Any bytes may be given."""
    data = memoryview(data)
    if len(data) < HEAD.size:
        return Check.BAD_REQUEST
    (magic, version, head_bytes, head_sum, record_bytes, owner, extent_key, write_id, shard, k, m, planes, blocks, earlier_count,
     start_block, pg, write_epoch, bucket, flags, created, retention, fidelity, depth, kv_group, cipher, zero1, block_bytes, checks_sum,
     layout_tag, reserved) = HEAD.unpack_from(data)  # fmt: skip
    if magic != MAGIC:
        return Check.BAD_REQUEST
    if version != VERSION:
        return Check.BAD_VERSION
    if planes < 1 or not 1 <= blocks <= BLOCKS_MAX or earlier_count > EARLIER_MAX:
        return Check.BAD_REQUEST
    if head_bytes != head_bytes_of(planes, earlier_count, blocks) or head_bytes > len(data):
        return Check.BAD_REQUEST
    if head_sum != xxhash.xxh3_64_intdigest(bytes(data[:_HEAD_SUM_AT]) + bytes(8) + bytes(data[_HEAD_SUM_AT + 8 : head_bytes])):
        return Check.CORRUPT
    table = list(PLANE.iter_unpack(data[HEAD.size : HEAD.size + 8 * planes]))
    earlier = struct.unpack_from(f"<{earlier_count}I", data, HEAD.size + 8 * planes)
    tags = struct.unpack_from(f"<{blocks}Q", data, head_bytes - 8 * blocks)
    pieces = sum(shard_bytes for _, shard_bytes in table) * blocks
    sound = (
        1 <= k <= K_MAX
        and m <= M_MAX
        and shard < k + m
        and retention < CLASSES_MAX
        and fidelity <= 2
        and flags == 0
        and not any(zero1)
        and not any(reserved)
        and 1 <= block_bytes <= BLOCK_BYTES_MAX
        and (blocks == 1 or blocks * block_bytes <= EXTENT_BYTES_MAX)
        and all(1 <= n <= BLOCK_BYTES_MAX and s == shard_bytes_of(n, k) for n, s in table)
        and sum(n for n, _ in table) == block_bytes
        and record_bytes == head_bytes + 24 * planes * blocks + pieces
        and record_bytes <= RECORD_BYTES_MAX
        and tags[0] == int.from_bytes(extent_key[8:16], "little")
    )
    if not sound:
        return Check.BAD_REQUEST
    return Head(
        head_bytes, record_bytes, owner, extent_key, write_id, shard, k, m, start_block, pg, write_epoch, bucket, created, retention,
        fidelity, depth, kv_group, cipher, block_bytes, checks_sum, layout_tag, tuple(n for n, _ in table), tuple(s for _, s in table),
        earlier, tags,
    )  # fmt: skip


def parse(data: bytes | memoryview) -> Record | Check:
    """A whole record, every sum checked; or what is wrong with it."""
    head = parse_head(data)
    if isinstance(head, Check):
        return head
    data = memoryview(data)
    if head.record_bytes > len(data):
        return Check.BAD_REQUEST
    planes, blocks = len(head.plane_bytes), len(head.tags)
    checks = data[head.head_bytes : head.head_bytes + 24 * planes * blocks]
    if xxhash.xxh3_64_intdigest(checks) != head.checks_sum:
        return Check.CORRUPT
    sums = struct.unpack_from(f"<{planes * blocks}Q", checks)
    at = head.head_bytes + len(checks)
    pieces: list[list[bytes]] = []
    for p in range(planes):
        row = []
        for b in range(blocks):
            piece = bytes(data[at : at + head.shard_bytes[p]])
            at += len(piece)
            if piece_sum(head.owner, head.extent_key, head.write_id, head.shard, p, b, piece) != sums[p * blocks + b]:
                return Check.CORRUPT
            row.append(piece)
        pieces.append(row)
    flat = [bytes(checks[8 * planes * blocks + 16 * i : 8 * planes * blocks + 16 * i + 16]) for i in range(planes * blocks)]
    return Record(
        owner=head.owner, extent_key=head.extent_key, write_id=head.write_id, shard=head.shard, k=head.k, m=head.m,
        plane_bytes=head.plane_bytes, tags=head.tags, pieces=pieces, digests=[flat[p * blocks : (p + 1) * blocks] for p in range(planes)],
        start_block=head.start_block, earlier=head.earlier, pg=head.pg, write_epoch=head.write_epoch, bucket=head.bucket,
        created_unix_ms=head.created_unix_ms, retention_class=head.retention_class, fidelity=head.fidelity, depth=head.depth,
        kv_group=head.kv_group, cipher=head.cipher, layout_tag=head.layout_tag,
    )  # fmt: skip
