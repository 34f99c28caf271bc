"""Where health checks begin that a daemon makes about itself and `kvstore status` makes about it: one number for both."""

from __future__ import annotations

from typing import Final

from kvstore.units import format_bytes

FULL_RATIO: Final = 0.99  # of the capacity: full
ZOMBIE_RATIO: Final = 0.02  # of the capacity: on disk and in nobody's use
CHECKSUM_ERRORS_ERR: Final = 100  # bad shards since the start: from here on the disk repeats itself
DISK_RESERVE_BYTES: Final = 32 << 20  # with less free on the file system writes are refused (kernels/store.hpp): deleting needs room
DISK_ROOM_BYTES: Final = 64 << 20  # so much more is kept free by eviction
RECORD_ROOM_BYTES: Final = 1 << 20  # of one write, about
WEAR_WARN: Final = 0.8  # of a disk's rated life
WEAR_ERR: Final = 0.95


def disk_full(free_bytes: float, freeing_bytes: float) -> str:
    """Severity of a file system that has so much free: "" where a node's own capacity decides alone what it may hold."""
    if free_bytes + freeing_bytes >= DISK_RESERVE_BYTES + DISK_ROOM_BYTES:
        return ""
    return "ERR" if free_bytes < DISK_RESERVE_BYTES + RECORD_ROOM_BYTES else "WARN"


def disk_full_words(severity: str, free_bytes: float) -> str:
    does = "writes are refused" if severity == "ERR" else f"drops blocks to have {format_bytes(DISK_RESERVE_BYTES + DISK_ROOM_BYTES)}"
    return f"{format_bytes(free_bytes)} free on its file system: {does}"
