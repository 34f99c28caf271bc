"""What a client counts in Python: once for each lookup and load, never for each block."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from kvstore.metrics import LATENCY_BOUNDS_SECONDS, MISS_REASONS, Histogram


class Counters:
    """Safe to share between threads. Token counts are by retention class name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.lookup_tokens: Counter[str] = Counter()
        self.hit_tokens: Counter[str] = Counter()
        self.delivered_tokens: Counter[str] = Counter()
        self.lookups: Counter[str] = Counter()  # full, partial, miss, error
        self.fallbacks: Counter[str] = Counter()  # by LoadOutcome value
        self.missed_tokens: Counter[tuple[str, str]] = Counter()  # class, reason
        self.reuse_ages: dict[str, tuple[list[int], float]] = {}  # class: tokens by needed age, and the sum of those ages
        self.unexplained_lookups = 0
        self.short_hit_tokens = 0
        self.declined_extents = self.declined_bytes = self.unasked_bytes = 0
        self.compacted_extents = self.compacted_bytes = 0
        self.bad_shard_reports: Counter[str] = Counter()  # taken, absent, busy, unsent
        self.loads = 0
        self.loading = 0
        self.load_bytes = 0
        self.lookup_seconds = Histogram(LATENCY_BOUNDS_SECONDS)
        self.load_seconds = Histogram(LATENCY_BOUNDS_SECONDS)
        self.store_seconds = Histogram(LATENCY_BOUNDS_SECONDS)

    def looked_up(self, retention_class: str, tokens: int, hit_tokens: int, full: bool, seconds: float) -> None:
        """`full`: all that may hit did."""
        with self._lock:
            self.lookup_tokens[retention_class] += tokens
            self.hit_tokens[retention_class] += hit_tokens
            self.lookups["full" if full else "partial" if hit_tokens else "miss"] += 1
            self.lookup_seconds.observe(seconds)

    def accounted(self, retention_class: str, missed: Sequence[int], ages: Sequence[int], age_token_seconds: float) -> None:
        """`missed`: tokens by reason; `ages`: tokens by needed age; `age_token_seconds`: sum of their needed ages."""
        with self._lock:
            for reason, tokens in zip(MISS_REASONS, missed, strict=True):
                if tokens:
                    self.missed_tokens[retention_class, reason] += tokens
            counts, total = self.reuse_ages.get(retention_class, ([0] * len(ages), 0.0))
            self.reuse_ages[retention_class] = [a + b for a, b in zip(counts, ages, strict=True)], total + age_token_seconds

    def unexplained(self, lookups: int) -> None:
        with self._lock:
            self.unexplained_lookups += lookups

    def lookup_failed(self) -> None:
        with self._lock:
            self.lookups["error"] += 1

    def load_began(self) -> None:
        with self._lock:
            self.loading += 1

    def loaded(self, retention_class: str, outcome: str, tokens: int, short_tokens: int, loaded_bytes: int, seconds: float) -> None:
        with self._lock:
            self.loading -= 1
            self.loads += 1
            self.delivered_tokens[retention_class] += tokens
            self.short_hit_tokens += short_tokens
            self.load_bytes += loaded_bytes
            self.load_seconds.observe(seconds)
            if outcome not in ("complete", "cancelled"):
                self.fallbacks[outcome] += 1

    def delivered_from_ram(self, retention_class: str, tokens: int) -> None:
        with self._lock:
            self.delivered_tokens[retention_class] += tokens

    def stored(self, seconds: float) -> None:
        with self._lock:
            self.store_seconds.observe(seconds)

    def declined(self, extents: int, block_bytes: int) -> None:
        """The nodes voted against writing them."""
        with self._lock:
            self.declined_extents += extents
            self.declined_bytes += block_bytes

    def unasked(self, block_bytes: int) -> None:
        """Dropped while they waited for votes."""
        with self._lock:
            self.unasked_bytes += block_bytes

    def compacted(self, extents: int, block_bytes: int) -> None:
        """So many short ones were stored again as one."""
        with self._lock:
            self.compacted_extents += extents
            self.compacted_bytes += block_bytes

    def bad_shards_told(self, result: str, shards: int) -> None:
        """What their nodes said to it; "unsent": nothing, or they were not told."""
        with self._lock:
            self.bad_shard_reports[result] += shards

    def flat(self) -> dict[str, int | float]:
        with self._lock:
            return {
                "lookup_tokens": self.lookup_tokens.total(),
                "hit_tokens": self.hit_tokens.total(),
                "delivered_tokens": self.delivered_tokens.total(),
                "short_hit_tokens": self.short_hit_tokens,
                **{f"missed_{reason}_tokens": self._missed(reason) for reason in MISS_REASONS},
                "unexplained_lookups": self.unexplained_lookups,
                "lookups": self.lookups.total(),
                **{f"lookups_{kind}": self.lookups[kind] for kind in ("full", "partial", "miss", "error")},
                "lookup_seconds_sum": self.lookup_seconds.total,
                "loads": self.loads,
                **{f"bad_shard_reports_{result}": self.bad_shard_reports[result] for result in ("taken", "absent", "busy", "unsent")},
                "loads_short": self.fallbacks.total(),
                "load_bytes": self.load_bytes,
                "load_seconds_sum": self.load_seconds.total,
                "extents_declined": self.declined_extents,
                "bytes_declined": self.declined_bytes,
                "bytes_unasked": self.unasked_bytes,
                "extents_compacted": self.compacted_extents,
                "bytes_compacted": self.compacted_bytes,
                "stores": int(sum(self.store_seconds.counts)),
                "store_seconds_sum": self.store_seconds.total,
            }

    def _missed(self, reason: str) -> int:
        return sum(tokens for (_, why), tokens in self.missed_tokens.items() if why == reason)
