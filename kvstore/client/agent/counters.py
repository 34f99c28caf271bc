"""What an agent counts of window entries."""

from __future__ import annotations

import threading
from collections import Counter

from kvstore.metrics import LATENCY_BOUNDS_SECONDS, Histogram


class WindowCounters:
    """Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.lookups: Counter[str] = Counter()  # own, peer, missing: where the entry at the end of the hit is said to be
        self.takes: Counter[str] = Counter()  # own, peer, missing: where it came from when it was wanted
        self.faults: Counter[str] = Counter()  # corrupt: did not open with its key; address: a holder's name that is none
        self.fetch_seconds = Histogram(LATENCY_BOUNDS_SECONDS)
        self.fetched_bytes = 0

    def looked_up(self, where: str) -> None:
        with self._lock:
            self.lookups[where] += 1

    def taken(self, where: str) -> None:
        with self._lock:
            self.takes[where] += 1

    def fault(self, kind: str) -> None:
        with self._lock:
            self.faults[kind] += 1

    def fetched(self, seconds: float, entry_bytes: int) -> None:
        with self._lock:
            self.fetch_seconds.observe(seconds)
            self.fetched_bytes += entry_bytes
