"""May this process lock and pin memory, and does the kernel give huge pages? Tried, not read from a table."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from pathlib import Path
from typing import Final

from kvstore.doctor.finding import Finding, Word
from kvstore.sysfs import text_of
from kvstore.units import format_bytes

MLOCK_ONFAULT: Final = 1  # sys/mman.h: pages are locked as they come, so that trying costs nothing
MAP_NORESERVE: Final = 0x4000  # not in the mmap module before 3.13
MAP_HUGETLB: Final = 0x40000
HUGE_BYTES: Final = 2 << 20


def memlock(need_bytes: int, rdma: bool) -> Finding:
    """`need_bytes`: what an agent here would lock. With an RDMA device too little is bad: buffers cannot be registered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    why = lock_refusal(need_bytes)
    measured = {
        "limit_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "hard_limit_bytes": None if hard == resource.RLIM_INFINITY else hard,
        "needed_bytes": need_bytes,
        "locked": not why,
    }
    if not why:
        beyond = " all the same: this user is not held to it (CAP_IPC_LOCK)" if soft != resource.RLIM_INFINITY and soft < need_bytes else ""
        return Finding("memlock", Word.OK, f"limit {limit}; {format_bytes(need_bytes)} can be locked{beyond}", "", measured)
    fix = f"ulimit -l above {need_bytes >> 10} (kB), LimitMEMLOCK=infinity in the unit, or docker run --ulimit memlock=-1"
    after = "RDMA buffers of that size cannot be registered" if rdma else "the agent's memory may be swapped"
    found = f"limit {limit}; {format_bytes(need_bytes)} cannot be locked ({why}): {after}"
    return Finding("memlock", Word.BAD if rdma else Word.WARN, found, fix, measured)


def lock_refusal(size_bytes: int) -> str:
    """ "" where this process may lock so many bytes more, else why not. Locks them for a moment, without touching them."""
    try:
        view = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except (OSError, OverflowError) as error:
        return f"no address space: {error}"
    libc = ctypes.CDLL(None, use_errno=True)
    held = ctypes.c_char.from_buffer(view)
    try:
        failed = libc.mlock2(ctypes.c_void_p(ctypes.addressof(held)), ctypes.c_size_t(size_bytes), MLOCK_ONFAULT)
        return os.strerror(ctypes.get_errno()).lower() if failed else ""
    finally:
        del held
        view.close()  # unlocks, too


def huge_pages(root: Path = Path("/")) -> Finding:
    reserved, free = 0, 0
    for pool in sorted((root / "sys/kernel/mm/hugepages").glob("hugepages-*kB")):
        size = int(pool.name.removeprefix("hugepages-").removesuffix("kB")) << 10
        reserved += size * _number(pool / "nr_hugepages")
        free += size * _number(pool / "free_hugepages")
    transparent = text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = transparent.partition("[")[2].partition("]")[0] or "unknown"
    explicit, given = _explicit_works(), transparent_bytes()
    measured = {
        "reserved_bytes": reserved,
        "free_bytes": free,
        "transparent": chosen,
        "explicit_given": explicit,
        "transparent_given": given is not None and given > 0,
    }
    if explicit:
        return Finding("huge pages", Word.OK, f"{format_bytes(free)} of {format_bytes(reserved)} free in the pool", "", measured)
    if given:
        return Finding("huge pages", Word.OK, f"none in the pool; transparent ones ({chosen}) are given on demand", "", measured)
    told = "given on demand: not told by this kernel" if given is None else "not given"
    fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, or reserve some: sysctl vm.nr_hugepages=1024"
    return Finding("huge pages", Word.WARN, f"none in the pool; transparent ones ({chosen}) {told}", fix, measured)


def _explicit_works() -> bool:
    """The kernel refuses the mapping, and not the first touch, where the pool has none left."""
    try:
        mmap.mmap(-1, HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB).close()
    except OSError:
        return False
    return True


def transparent_bytes() -> int | None:
    """Of 8 MiB that ask for huge pages and are touched: how many came as such. None where /proc/self/smaps does not tell."""
    view = mmap.mmap(-1, 4 * HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        view.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):
        view.close()
        return 0
    for offset in range(0, len(view), mmap.PAGESIZE):
        view[offset] = 1
    held = ctypes.c_char.from_buffer(view)
    at = ctypes.addressof(held)
    del held
    try:
        return _huge_at(Path("/proc/self/smaps"), at)
    finally:
        view.close()


def _huge_at(smaps: Path, address: int) -> int | None:
    """AnonHugePages of the mapping that holds `address`."""
    inside = False
    for line in text_of(smaps).splitlines():
        head = line.split(" ", 1)[0]
        low, dash, high = head.partition("-")
        if dash and ":" not in head:
            inside = int(low, 16) <= address < int(high, 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return None


def _number(path: Path) -> int:
    text = text_of(path)
    return int(text) if text.isdecimal() else 0
