"""Window entries of this host, in RAM: opaque bytes under 32-byte keys, gone 180 s after their last use or when room is needed.

    put       copies an entry in; the longest unused go until it fits. What cannot fit is not kept: an outcome, and counted
    get       a read-only view of the entry's own memory, and a use. While any view of it lives an entry is neither expired nor dropped
    discard   after it (or clear) no get finds the entry; memory that is still viewed is used again only when the last view is gone

Memory is bounded exactly: `allocated_bytes` <= `capacity_bytes`, always. The buffer of an entry that goes is kept and filled again by the
next one of its size: a host with one model allocates each buffer once, nothing fragments, and no request waits for new pages. Where entries
of another size need the room, buffers that hold nothing are given back first.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import MisuseError
from kvstore.keys import KEY_BYTES

LIFETIME_SECONDS: Final = 180.0
ENTRY_OVERHEAD_BYTES: Final = 512  # counted for each buffer beside its bytes: key, index, Python objects
DROP_REASONS: Final = ("expired", "capacity", "discarded")

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class WindowStats:
    """Counts since the start; `entries`, `entry_bytes` and `allocated_bytes` are of now."""

    kept: int
    refused: int  # not kept: larger than the store, or all that could have gone was being read
    hits: int
    misses: int
    dropped: dict[str, int]  # by DROP_REASONS
    entries: int
    entry_bytes: int
    allocated_bytes: int  # of entries, and buffers for the next ones


@dataclass(slots=True)
class _Entry:
    buffer: Bytes
    used_at: float
    readers: list[weakref.ref[Bytes]] = field(default_factory=list)

    def being_read(self) -> bool:
        self.readers = [reader for reader in self.readers if reader() is not None]
        return bool(self.readers)


class WindowStore:
    """Safe to share between threads. The lock is held for bookkeeping only, never while bytes are copied."""

    def __init__(
        self,
        capacity_bytes: int,
        lifetime_seconds: float = LIFETIME_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        *,
        on_drop: Callable[[Sequence[bytes]], None] | None = None,
    ) -> None:
        """`clock`: seconds that never go back. `on_drop`: told the keys that a put drove out, on its thread, after it; expiry is not told.

        Raises MisuseError E570 for a negative capacity or a lifetime that is not above 0.
        """
        if capacity_bytes < 0 or not lifetime_seconds > 0:
            what = f"window store of {capacity_bytes} bytes and {lifetime_seconds} s"
            raise MisuseError("E570", what, "impossible", "give it 0 bytes or more, and a lifetime above 0")
        self.capacity_bytes = capacity_bytes
        self.lifetime_seconds = lifetime_seconds
        self._clock = clock
        self._on_drop = on_drop
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the longest unused first
        self._free: defaultdict[int, list[Bytes]] = defaultdict(list)  # by size
        self._viewed: list[_Entry] = []  # discarded, and still being read
        self._allocated = self._entry_bytes = 0
        self._kept = self._refused = self._hits = self._misses = 0
        self._dropped: Counter[str] = Counter()

    def put(self, key: bytes, *parts: Any) -> bool:
        """Copies in `parts`, contiguous buffers, one after the other. True when `key` is held afterwards: an entry that is there already
        is the same state, so it stays and counts as used. Raises MisuseError E571 for a key that is not 32 bytes or an entry of none."""
        sources = [np.frombuffer(part, np.uint8) for part in parts]
        size = sum(len(source) for source in sources)
        if len(key) != KEY_BYTES or not size:
            raise MisuseError("E571", "window entry", f"{len(key)} bytes of key, {size} of entry", "pass a block key and the entry's bytes")
        driven_out: list[bytes] = []
        with self._lock:
            if self._use(key) is not None:
                return True
            buffer = self._room(size, driven_out)
        if buffer is not None:
            at = 0
            for source in sources:
                buffer[at : at + len(source)] = source
                at += len(source)
        with self._lock:
            if buffer is None:
                self._refused += 1
            elif key in self._entries:  # another thread was quicker
                self._free[size].append(buffer)
            else:
                self._kept += 1
                self._entry_bytes += size
                self._entries[key] = _Entry(buffer, self._clock())
        if driven_out and self._on_drop is not None:
            self._on_drop(driven_out)
        return buffer is not None

    def get(self, key: bytes) -> memoryview | None:
        """The entry's own bytes, read-only, good as long as the view (or a slice of it) is held. None: not here, or expired."""
        with self._lock:
            entry = self._use(key)
            if entry is None:
                self._misses += 1
                return None
            self._hits += 1
            entry.being_read()  # forgets readers that are gone
            view = entry.buffer[:]
            entry.readers.append(weakref.ref(view))
        return view.data.toreadonly()

    def holds(self, keys: Iterable[bytes]) -> list[bool]:
        """Whether each is here; not a use."""
        with self._lock:
            alive_from = self._clock() - self.lifetime_seconds
            found = [self._entries.get(key) for key in keys]
            return [entry is not None and (entry.used_at >= alive_from or entry.being_read()) for entry in found]

    def touch(self, key: bytes) -> bool:
        """A use without a view. False: not here."""
        with self._lock:
            return self._use(key) is not None

    def discard(self, key: bytes) -> bool:
        """False: it was not here."""
        with self._lock:
            self._expire()
            return self._drop(key, "discarded")

    def keys(self) -> list[bytes]:
        """Of the entries that are here, the longest unused first; not a use."""
        with self._lock:
            self._expire()
            return list(self._entries)

    def clear(self) -> None:
        with self._lock:
            for key in list(self._entries):
                self._drop(key, "discarded")

    def stats(self) -> WindowStats:
        with self._lock:
            self._expire()
            return WindowStats(
                self._kept, self._refused, self._hits, self._misses, {reason: self._dropped[reason] for reason in DROP_REASONS},
                len(self._entries), self._entry_bytes, self._allocated,
            )  # fmt: skip

    # --- under the lock ---

    def _use(self, key: bytes) -> _Entry | None:
        entry, now = self._entries.get(key), self._clock()
        if entry is None:
            return None
        if now - entry.used_at > self.lifetime_seconds and not entry.being_read():
            self._drop(key, "expired")
            return None
        entry.used_at = now
        self._entries.move_to_end(key)
        return entry

    def _expire(self) -> None:
        now = self._clock()
        too_old = itertools.takewhile(lambda item: now - item[1].used_at > self.lifetime_seconds, self._entries.items())
        for key in [key for key, entry in too_old if not entry.being_read()]:
            self._drop(key, "expired")

    def _drop(self, key: bytes, reason: str) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._dropped[reason] += 1
        self._entry_bytes -= len(entry.buffer)
        if entry.being_read():
            self._viewed.append(entry)
        else:
            self._free[len(entry.buffer)].append(entry.buffer)
        return True

    def _room(self, size: int, driven_out: list[bytes]) -> Bytes | None:
        """A buffer of `size` bytes that nobody reads; None where there is none to be had. `driven_out` gets the keys that went for it."""
        if size + ENTRY_OVERHEAD_BYTES > self.capacity_bytes:
            return None
        self._expire()
        still_viewed = []
        for entry in self._viewed:
            if entry.being_read():
                still_viewed.append(entry)
            else:
                self._free[len(entry.buffer)].append(entry.buffer)
        self._viewed = still_viewed
        while not self._free[size]:
            if self._allocated + size + ENTRY_OVERHEAD_BYTES <= self.capacity_bytes:
                self._allocated += size + ENTRY_OVERHEAD_BYTES
                return np.empty(size, np.uint8)
            if not self._give_back() and not self._drive_out(driven_out):
                return None
        return self._free[size].pop()

    def _give_back(self) -> bool:
        """One buffer of another size than the one wanted, whose list is empty."""
        for size, buffers in self._free.items():
            if buffers:
                buffers.pop()
                self._allocated -= size + ENTRY_OVERHEAD_BYTES
                return True
        return False

    def _drive_out(self, driven_out: list[bytes]) -> bool:
        key = next((key for key, entry in self._entries.items() if not entry.being_read()), None)
        if key is None:
            return False
        self._drop(key, "capacity")
        driven_out.append(key)
        return True
