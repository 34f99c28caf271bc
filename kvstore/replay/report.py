"""What a replay found, as numbers: sums over requests, latencies, and the model figures beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvstore.client import StoreOutcome


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Percentiles of one verb in seconds; all None where it was never called."""

    count: int
    p50_seconds: float | None = None
    p90_seconds: float | None = None
    p99_seconds: float | None = None
    max_seconds: float | None = None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        if not seconds:
            return cls(count=0)
        p50, p90, p99, top = np.percentile(seconds, [50, 90, 99, 100]).tolist()
        return cls(count=len(seconds), p50_seconds=p50, p90_seconds=p90, p99_seconds=p99, max_seconds=top)


@dataclass(slots=True, kw_only=True)
class RequestOutcome:
    """What happened to one request. Seconds are None where the verb was not needed."""

    number: int
    trace_time_ms: int
    input_tokens: int
    blocks: int
    ideal_hit_tokens: int
    lru_hit_tokens: int = 0
    hit_blocks: int = 0
    hit_tokens: int = 0
    loaded_blocks: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    checked_bytes: int = 0
    wrong_bytes: int = 0
    extents: int = 0
    decodes: int = 0
    late_requests: int = 0
    bad_shards: int = 0
    stored_bytes: int = 0
    store_outcome: str | None = None
    started_seconds: float = 0.0  # since the replay began
    lookup_seconds: float = 0.0
    load_seconds: float | None = None
    store_seconds: float | None = None

    @property
    def seconds(self) -> float:
        return self.lookup_seconds + (self.load_seconds or 0.0) + (self.store_seconds or 0.0)

    def log_row(self) -> dict[str, Any]:
        """The row of access_log.SCHEMA."""
        return {
            "request": self.number,
            "trace_time_ms": self.trace_time_ms,
            "input_tokens": self.input_tokens,
            "hit_tokens": self.hit_tokens,
            "loaded_tokens": self.loaded_tokens,
            "ideal_hit_tokens": self.ideal_hit_tokens,
            "blocks": self.blocks,
            "extents": self.extents,
            "decodes": self.decodes,
            "late_requests": self.late_requests,
            "bad_shards": self.bad_shards,
            "loaded_bytes": self.loaded_bytes,
            "checked_bytes": self.checked_bytes,
            "wrong_bytes": self.wrong_bytes,
            "stored_bytes": self.stored_bytes,
            "lookup_seconds": self.lookup_seconds,
            "load_seconds": self.load_seconds,
            "store_seconds": self.store_seconds,
            "store_outcome": self.store_outcome,
        }


_SUMMED = (
    "input_tokens", "hit_tokens", "loaded_tokens", "ideal_hit_tokens", "extents", "decodes", "late_requests", "bad_shards",
    "loaded_bytes", "checked_bytes", "wrong_bytes", "stored_bytes",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """Sums of a replay. Tokens count as traces/README.md says; bytes are logical block bytes, without parity."""

    requests: int
    input_tokens: int
    hit_tokens: int  # found at lookup
    loaded_tokens: int  # delivered: less than hit_tokens where a load came back short
    ideal_hit_tokens: int  # of an infinite cache, over the same requests
    lru_capacity_blocks: int | None  # None: no capacity was given
    lru_hit_tokens: int | None  # of exact LRU with that many blocks
    block_accesses: int
    short_loads: int
    extents: int  # on the walks
    decodes: int  # (extent, plane) pieces with a data shard rebuilt
    late_requests: int
    bad_shards: int
    loaded_bytes: int
    checked_bytes: int
    wrong_bytes: int
    stored_bytes: int
    store_outcomes: dict[str, int]
    seconds: float
    behind_seconds_max: float  # wall clock only: how late the latest request started
    lookup: Latency
    load: Latency
    store: Latency
    client: Mapping[str, int | float]  # the client's own counters

    @classmethod
    def of(
        cls,
        outcomes: Sequence[RequestOutcome],
        *,
        seconds: float,
        lru_capacity_blocks: int | None,
        behind_seconds_max: float = 0.0,
        client: Mapping[str, int | float] | None = None,
    ) -> ReplayReport:
        sums: dict[str, int] = {name: sum(getattr(one, name) for one in outcomes) for name in _SUMMED}
        lru_hit_tokens = sum(one.lru_hit_tokens for one in outcomes)
        return cls(
            requests=len(outcomes),
            block_accesses=sum(one.blocks for one in outcomes),
            short_loads=sum(one.loaded_blocks < one.hit_blocks for one in outcomes),
            lru_capacity_blocks=lru_capacity_blocks,
            lru_hit_tokens=None if lru_capacity_blocks is None else lru_hit_tokens,
            store_outcomes=dict(Counter(one.store_outcome for one in outcomes if one.store_outcome is not None)),
            seconds=seconds,
            behind_seconds_max=behind_seconds_max,
            lookup=Latency.of([one.lookup_seconds for one in outcomes]),
            load=Latency.of([one.load_seconds for one in outcomes if one.load_seconds is not None]),
            store=Latency.of([one.store_seconds for one in outcomes if one.store_seconds is not None]),
            client=dict(client or {}),
            **sums,
        )

    def _ratio(self, tokens: int | None) -> float | None:
        return tokens / self.input_tokens if tokens is not None and self.input_tokens else None

    @property
    def hit_ratio(self) -> float | None:
        return self._ratio(self.hit_tokens)

    @property
    def ideal_hit_ratio(self) -> float | None:
        return self._ratio(self.ideal_hit_tokens)

    @property
    def lru_hit_ratio(self) -> float | None:
        return self._ratio(self.lru_hit_tokens)

    @property
    def points_from_lru(self) -> float | None:
        """Percentage points of token hit rate above (below: negative) exact LRU."""
        if self.hit_ratio is None or self.lru_hit_ratio is None:
            return None
        return 100 * (self.hit_ratio - self.lru_hit_ratio)

    @property
    def failed_stores(self) -> int:
        """Of which something is not there that was to be: too few nodes took it, or it was never sent."""
        lost = (StoreOutcome.FAILED, StoreOutcome.STALE_MAP, StoreOutcome.DROPPED)
        return sum(self.store_outcomes.get(outcome.value, 0) for outcome in lost)

    @property
    def load_bytes_per_second(self) -> float | None:
        return self.loaded_bytes / self.seconds if self.seconds and self.loaded_bytes else None

    @property
    def store_bytes_per_second(self) -> float | None:
        return self.stored_bytes / self.seconds if self.seconds and self.stored_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """For --json: fields and derived figures; units in the keys."""
        ratios = ("hit_ratio", "ideal_hit_ratio", "lru_hit_ratio", "points_from_lru")
        derived = (*ratios, "failed_stores", "load_bytes_per_second", "store_bytes_per_second")
        return asdict(self) | {name: getattr(self, name) for name in derived}
