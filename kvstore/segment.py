"""A segment file: records, one after another, then a footer with the heads of all of them. Twin of kernels/segments.hpp.

    record | zero padding to 4 KiB | record | ...          holes where records were freed
    footer, from a multiple of 4 KiB: count x { u32 offset / 4096, u32 head bytes, head }, zero padding, trailer of 64 bytes at the end

A file with a sound footer is never written again, only punched. A record listed in it may have been freed since: then its place is a hole.
What can never change: the trailer's place and its first 16 bytes. docs/FORMAT.md is the text to this.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from kvstore.record import ALIGN

MAGIC = int.from_bytes(b"KVSFOOT1", "little")
VERSION = 1
FOOTER_BYTES_MAX = 256 << 20

ENTRY = struct.Struct("<II")
TRAILER = struct.Struct("<QIIIIQQQQQ")
assert ENTRY.size == 8 and TRAILER.size == 64


@dataclass(frozen=True)
class Footer:
    """`entries`: (offset in bytes, head) of each record, in the order in which they lie."""

    segment: int
    data_end_bytes: int
    created_unix_ms: int
    entries: Sequence[tuple[int, bytes]]


def segment_name(number: int) -> str:
    return f"{number:08x}.seg"


def build_footer(footer: Footer) -> bytes:
    body = b"".join(ENTRY.pack(offset // ALIGN, len(head)) + head for offset, head in footer.entries)
    size = -(-(len(body) + TRAILER.size) // ALIGN) * ALIGN
    trailer = TRAILER.pack(
        MAGIC, VERSION, footer.segment, len(footer.entries), 0, footer.data_end_bytes, size, footer.created_unix_ms, 0, 0
    )
    whole = body + bytes(size - len(body) - TRAILER.size) + trailer
    return whole[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(whole))


def read_footer(fd: int, segment: int) -> Footer | None:
    """The footer of an open file, every byte of it checked; None: it has none, or not a sound one."""
    size = os.fstat(fd).st_size
    if size < ALIGN or size % ALIGN:
        return None
    magic, version, number, count, _, data_end, footer_bytes, created, _, total = TRAILER.unpack(
        os.pread(fd, TRAILER.size, size - TRAILER.size)
    )
    if (magic, version, number) != (MAGIC, VERSION, segment):
        return None
    if not TRAILER.size <= footer_bytes <= min(size, FOOTER_BYTES_MAX) or data_end != size - footer_bytes or data_end % ALIGN:
        return None
    whole = os.pread(fd, footer_bytes, data_end)
    if xxhash.xxh3_64_intdigest(whole[:-8] + bytes(8)) != total:
        return None
    entries, at = [], 0
    for _ in range(count):
        if at + ENTRY.size > len(whole):
            return None
        offset_4k, head_bytes = ENTRY.unpack_from(whole, at)
        at += ENTRY.size
        if head_bytes % 8 or at + head_bytes > len(whole):
            return None
        entries.append((offset_4k * ALIGN, whole[at : at + head_bytes]))
        at += head_bytes
    return Footer(segment, data_end, created, tuple(entries))


def data_runs(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of what is allocated in [start, end) of an open file."""
    while start < end:
        try:
            begin = os.lseek(fd, start, os.SEEK_DATA)
        except OSError:
            return  # only a hole is left
        if begin >= end:
            return
        start = min(os.lseek(fd, begin, os.SEEK_HOLE), end)
        yield begin, start
