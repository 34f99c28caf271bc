"""What the filesystem of a data directory can do for a node: each thing is tried on a file of our own there, which is removed."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from kvstore.doctor.finding import Finding, Word
from kvstore.sysfs import text_of
from kvstore.units import format_bytes, format_seconds

SIZE_BYTES: Final = 1 << 20  # of the file
BLOCK_BYTES: Final = 4096
PUNCH: Final = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
SLOW_SYNC_SECONDS: Final = 0.05  # an SSD takes a few ms at most
IN_MEMORY: Final = ("tmpfs", "ramfs")
NOT_LOCAL: Final = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "virtiofs")


def data_directory(directory: Path | None) -> list[Finding]:
    """One line for each thing; raises nothing. None: not looked at."""
    if directory is None:
        return [Finding("data", Word.SKIP, "no directory was named: --data DIR looks at its filesystem")]
    try:
        place = directory.resolve(strict=True)
        descriptor, name = tempfile.mkstemp(prefix=".kvstore-doctor-", dir=place)
    except OSError as error:
        fix = "make it, or give this user the right to write there"
        return [Finding("data", Word.BAD, f"{directory}: {(error.strerror or str(error)).lower()}", fix)]
    path = Path(name)
    try:
        return [_filesystem(place), _direct(path), _punch(descriptor), _sync(descriptor)]
    except OSError as error:
        return [Finding("data", Word.BAD, f"{place}: {(error.strerror or str(error)).lower()}", "look at the disk: dmesg")]
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            path.unlink()


def _filesystem(place: Path) -> Finding:
    kind, source, mount = mount_of(place)
    disk = os.statvfs(place)
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    measured: dict[str, Any] = {"path": str(place), "filesystem": kind, "source": source, "size_bytes": size, "free_bytes": free}
    number = place.stat().st_dev
    queue = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    spinning = text_of(queue / "queue/rotational") or text_of(queue / "../queue/rotational")
    measured["rotational"] = spinning == "1" if spinning else None
    found = f"{place}: {kind} on {source}, {format_bytes(free)} of {format_bytes(size)} free"
    if kind in IN_MEMORY:
        return Finding("data", Word.WARN, f"{found}: in RAM, gone after a restart", "name a directory on a disk", measured)
    if kind.split(".")[0] in NOT_LOCAL:
        return Finding("data", Word.WARN, f"{found}: not a local disk", "name a directory on a local SSD", measured)
    if mount == "/":
        return Finding("data", Word.WARN, f"{found}: the root filesystem", "mount a disk there, and name its directory", measured)
    if spinning == "1":
        return Finding("data", Word.WARN, f"{found}: a disk that says it spins", "name a directory on an SSD", measured)
    return Finding("data", Word.OK, found, "", measured)


def mount_of(place: Path, table: Path = Path("/proc/self/mountinfo")) -> tuple[str, str, str]:
    """Filesystem, source and mount point that hold a path; ("unknown", "unknown", "") where the table does not tell."""
    best = ("unknown", "unknown", "")
    for line in text_of(table).splitlines():
        left, dash, right = line.partition(" - ")
        fields, more = left.split(" "), right.split(" ")
        if not dash or len(fields) < 5 or len(more) < 2:
            continue
        mount = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        if place.is_relative_to(mount) and len(mount) >= len(best[2]):
            best = (more[0], more[1], mount)
    return best


def _direct(path: Path) -> Finding:
    """Writes with O_DIRECT and reads it back so, from page-aligned memory."""
    buffer = mmap.mmap(-1, SIZE_BYTES)
    buffer[:] = os.urandom(BLOCK_BYTES) * (SIZE_BYTES // BLOCK_BYTES)
    again = mmap.mmap(-1, SIZE_BYTES)
    fix = "use a filesystem with O_DIRECT (ext4, XFS), or run nodes with --io buffered"
    try:
        file = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        return Finding("O_DIRECT", Word.WARN, f"refused ({(error.strerror or '').lower()}): reads go through the page cache", fix)
    try:
        if os.pwritev(file, [buffer], 0) != SIZE_BYTES or os.preadv(file, [again], 0) != SIZE_BYTES:
            return Finding("O_DIRECT", Word.WARN, "opened, but a read or write came out short", fix)
        equal = again[:] == buffer[:]
    except OSError as error:
        return Finding("O_DIRECT", Word.WARN, f"opened, but does not work ({(error.strerror or '').lower()})", fix)
    finally:
        os.close(file)
        buffer.close()
        again.close()
    if not equal:
        return Finding("O_DIRECT", Word.BAD, "what was read is not what was written", "do not use this disk; look at dmesg and SMART")
    return Finding("O_DIRECT", Word.OK, f"{format_bytes(SIZE_BYTES)} written and read back equal", "", {"bytes": SIZE_BYTES})


def _punch(descriptor: int) -> Finding:
    """A node gives bytes back by punching holes: the file must get smaller, and read as zeros there."""
    os.pwrite(descriptor, os.urandom(SIZE_BYTES), 0)
    os.fsync(descriptor)
    before = os.fstat(descriptor).st_blocks * 512
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.fallocate(ctypes.c_int(descriptor), ctypes.c_int(PUNCH), ctypes.c_int64(0), ctypes.c_int64(SIZE_BYTES // 2))
    fix = "use a filesystem that punches holes (ext4, XFS, btrfs): without, nothing that is evicted frees space"
    if failed:
        return Finding("holes", Word.BAD, f"cannot be punched ({os.strerror(ctypes.get_errno()).lower()})", fix)
    os.fsync(descriptor)
    given = before - os.fstat(descriptor).st_blocks * 512
    measured = {"punched_bytes": SIZE_BYTES // 2, "given_back_bytes": given}
    if any(os.pread(descriptor, SIZE_BYTES // 2, 0)):
        return Finding("holes", Word.BAD, "a punched hole still reads as what was there", fix, measured)
    if given < SIZE_BYTES // 2:
        found = f"{format_bytes(SIZE_BYTES // 2)} punched, {format_bytes(max(0, given))} given back"
        return Finding("holes", Word.WARN, found, fix, measured)
    return Finding("holes", Word.OK, f"{format_bytes(given)} punched and given back", "", measured)


def _sync(descriptor: int) -> Finding:
    """The middle of five small writes with fdatasync."""
    times = []
    for turn in range(5):
        os.pwrite(descriptor, bytes([turn]) * BLOCK_BYTES, turn * BLOCK_BYTES)
        began = time.monotonic()
        os.fdatasync(descriptor)
        times.append(time.monotonic() - began)
    middle = sorted(times)[2]
    measured = {"fdatasync_seconds": middle}
    if middle > SLOW_SYNC_SECONDS:
        fix = "an SSD with power-loss protection; commits are synced once a second, so writes are not held up by it"
        return Finding("fsync", Word.WARN, f"{format_seconds(middle)} each (of 5)", fix, measured)
    return Finding("fsync", Word.OK, f"{format_seconds(middle)} each (of 5)", "", measured)
