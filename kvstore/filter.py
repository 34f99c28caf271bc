"""The saved filter of a node that was stopped cleanly: DIR/filter. Twin of kernels/filter.hpp and filter_file.hpp, for checks and tests.

    magic 8 | version, slots u32 | stop, last txn u64 | buckets, stash u32 | keys, zero, sum u64
    buckets x 6 bytes: 4 fingerprints of 12 bits, low first, 0 for none      stash x { u32 bucket, u32 fingerprint }

A cuckoo filter over owner | extent key. "no" is always true for the index it belongs to; docs/FORMAT.md says which that is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

MAGIC: Final = int.from_bytes(b"KVSFILT1", "little")
VERSION: Final = 1
SLOTS: Final = 4
BUCKET_BYTES: Final = 6
STASH_MAX: Final = 8
HEAD: Final = struct.Struct("<QIIQQIIQQQ")
HOMELESS: Final = struct.Struct("<II")
STOP_KEY: Final = b"stop"  # in the unnamed table of the index
assert HEAD.size == 64


@dataclass(frozen=True)
class Filter:
    """`stop` and `last_txn` name the state of the index that it belongs to."""

    stop: int
    last_txn: int
    buckets: int
    keys: int
    table: bytes
    stash: tuple[tuple[int, int], ...]

    def maybe(self, owner_and_key: bytes) -> bool:
        """False: nothing is stored under this owner (16 bytes) and extent key (32)."""
        h = xxhash.xxh3_64_intdigest(owner_and_key)
        print_ = h & 0xFFF or 1
        first = (h >> 32) * self.buckets >> 32
        partner = ((print_ * 0x9E3779B1 & 0xFFFFFFFF) * self.buckets >> 32) - first
        pair = (first, partner % self.buckets)
        return any(print_ in self.slots(bucket) or (bucket, print_) in self.stash for bucket in pair)

    def slots(self, bucket: int) -> list[int]:
        word = int.from_bytes(self.table[bucket * BUCKET_BYTES : (bucket + 1) * BUCKET_BYTES], "little")
        return [word >> 12 * slot & 0xFFF for slot in range(SLOTS)]


def build(found: Filter) -> bytes:
    fields = (MAGIC, VERSION, SLOTS, found.stop, found.last_txn, found.buckets, len(found.stash), found.keys, 0)
    body = found.table + b"".join(HOMELESS.pack(*each) for each in found.stash)
    return HEAD.pack(*fields, xxhash.xxh3_64_intdigest(HEAD.pack(*fields, 0) + body)) + body


def parse(raw: bytes) -> Filter | None:
    """None: not a sound one of this version."""
    if len(raw) < HEAD.size:
        return None
    magic, version, slots, stop, last_txn, buckets, stashed, keys, _, total = HEAD.unpack_from(raw)
    end = HEAD.size + buckets * BUCKET_BYTES
    if (magic, version, slots) != (MAGIC, VERSION, SLOTS) or not buckets or stashed > STASH_MAX:
        return None
    if len(raw) != end + stashed * HOMELESS.size or xxhash.xxh3_64_intdigest(raw[: HEAD.size - 8] + bytes(8) + raw[HEAD.size :]) != total:
        return None
    return Filter(stop, last_txn, buckets, keys, raw[HEAD.size : end], tuple(HOMELESS.iter_unpack(raw[end:])))


def load(path: Path) -> Filter | None:
    try:
        return parse(path.read_bytes())
    except OSError:
        return None
