"""Shared memory between the agent and its workers: a sealed memfd, and the books of who holds what of it.

The agent makes every memory and seals its size, so that nobody can cut it under another's feet (SIGBUS). One that workers only read is
sealed against writing, too: the agent's own mapping, made before, is the only one that can write. Descriptors travel by SCM_RIGHTS.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import mmap
import os
import threading
from typing import Final

import numpy as np

from kvstore.client.native import U8

ALIGN_BYTES: Final = 4096
F_SEAL_FUTURE_WRITE: Final = 0x0010  # linux/fcntl.h, 5.1
_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def make_memory(name: str, size_bytes: int, *, read_only: bool) -> tuple[int, U8]:
    """A new memory of `size_bytes`: its descriptor, for others (they can only read where `read_only`), and our own view, which can write.

    Raises OSError where there is no such memory to be had. Pages are taken when they are first touched.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        view = map_memory(descriptor, size_bytes, write=True)
        seals = _SIZE_SEALS | (F_SEAL_FUTURE_WRITE if read_only else 0) | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, view


def map_memory(descriptor: int, size_bytes: int, *, write: bool) -> U8:
    """The whole of a memory as bytes; unmapped when the last view of it is gone. `descriptor` may be closed afterwards."""
    rights = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    return np.frombuffer(mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, rights), np.uint8)


def is_sealed(descriptor: int) -> bool:
    """Whether nobody can cut it any more."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SIZE_SEALS == _SIZE_SEALS
    except OSError:
        return False


def lock_memory(view: U8) -> str:
    """Keeps it from being swapped, which touches all of it; "" or why not."""
    address = ctypes.c_void_p(view.ctypes.data)
    if ctypes.CDLL(None, use_errno=True).mlock(address, ctypes.c_size_t(view.nbytes)) == 0:
        return ""
    return os.strerror(ctypes.get_errno()).lower()


class Arena:
    """Ranges of one memory, each with one holder. First fit, neighbours merged. Safe to share between threads."""

    def __init__(self, size_bytes: int) -> None:
        """`size_bytes`: rounded down to whole pages."""
        self.size_bytes = size_bytes // ALIGN_BYTES * ALIGN_BYTES
        self._lock = threading.Lock()
        self._free = [(0, self.size_bytes)] if self.size_bytes else []  # (offset, bytes), in order, no two touch
        self._taken: dict[int, int] = {}

    def take(self, size_bytes: int) -> int | None:
        """Offset of a free range, whole pages; None where there is none as long."""
        size = max(ALIGN_BYTES, -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES)
        with self._lock:
            for at, (offset, length) in enumerate(self._free):
                if length >= size:
                    if length == size:
                        del self._free[at]
                    else:
                        self._free[at] = offset + size, length - size
                    self._taken[offset] = size
                    return offset
        return None

    def give(self, offset: int) -> None:
        """Gives back what `take` gave. KeyError for anything else: a bug that must not go on."""
        with self._lock:
            size = self._taken.pop(offset)
            at = bisect.bisect(self._free, (offset, 0))
            if at < len(self._free) and self._free[at][0] == offset + size:
                size += self._free.pop(at)[1]
            if at and sum(self._free[at - 1]) == offset:
                offset, before = self._free[at - 1]
                self._free[at - 1] = offset, before + size
            else:
                self._free.insert(at, (offset, size))

    @property
    def taken_bytes(self) -> int:
        with self._lock:
            return sum(self._taken.values())

    def check_integrity(self) -> None:
        """Raises AssertionError where the ranges do not tile the memory. For tests."""
        with self._lock:
            at = 0
            ranges = [*((offset, size, False) for offset, size in self._taken.items()), *((o, s, True) for o, s in self._free)]
            before_free = False
            for offset, size, free in sorted(ranges):
                assert offset == at and size > 0 and not (free and before_free)
                at, before_free = offset + size, free
            assert at == self.size_bytes
