"""The client's three clocks. Tests and trace replay override what they must control; the rest stays real."""

import time


class Clock:
    """Real time. Override `bucket_time` to play a trace (all nodes of the cluster must then run with a virtual clock, too)."""

    def bucket_time(self) -> float:
        """Unix seconds that time buckets are cut from: what recency and retention count in."""
        return time.time()

    def wall_time(self) -> float:
        """Unix seconds, equal on all hosts: when a ticket expires."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never jump: how long a promise may be reused."""
        return time.monotonic()
