"""The trace's time as the client's: buckets, and with them recency and retention, follow the trace; tickets and deadlines stay real."""

from __future__ import annotations

import threading
import time

from kvstore.client import Clock


class TraceClock(Clock):
    """Starts at the real time and goes on only as the trace does. Never goes back, whichever worker is ahead."""

    def __init__(self) -> None:
        self._start_seconds = time.time()
        self._trace_ms = 0
        self._lock = threading.Lock()

    def advance_to(self, trace_ms: int) -> None:
        with self._lock:
            self._trace_ms = max(self._trace_ms, trace_ms)

    def bucket_time(self) -> float:
        return self._start_seconds + self._trace_ms / 1000
