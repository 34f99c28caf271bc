"""What goes first, and when anything has to go: one total order, retention by class, floors and caps by owner, watermarks.

The order: first what promises nothing, then the oldest of each class that holds more than its share of the node, then the rest. "Oldest"
means: expired classes first, then the older time bucket, then the later part of a prompt, then the key; so go the rest, too, unless
another replacement policy is asked for (kvstore/gc/replacement.py). All of it is equal on the twelve nodes that hold an extent, so each of
them, alone, chooses the same extents, and none is left with too few shards to be of use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvstore.clustermap import DEFAULT_CLASSES, POLICIES, RetentionClass
from kvstore.errors import ConfigError
from kvstore.owners import OwnerLimits
from kvstore.thresholds import DISK_RESERVE_BYTES, DISK_ROOM_BYTES

CLASSES_MAX: Final = 16
ROW_BYTES: Final = 66  # queue 1 | owner 16 | bucket 4 | ~start 4 | extent key 32 | write id 8 | shard 1 (docs/FORMAT.md)
EXPIRY_INTERVAL_SECONDS: Final = 10.0
CAP_INTERVAL_SECONDS: Final = 1.0
_ORDER_AT: Final = 17  # from here on rows of different queues compare as they go


@dataclass(frozen=True, slots=True)
class Usage:
    """Space of one store, bytes. `zombie_bytes`: deleted, not yet given back. `index_share`: 0..1 of the index's map."""

    used_bytes: int
    zombie_bytes: int
    capacity_bytes: int
    disk_free_bytes: int
    index_share: float


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """`retention_seconds` by class number. `owners`: limits of single owners, the others have none."""

    retention_seconds: Mapping[int, float]
    class_names: Mapping[int, str]
    bucket_seconds: int = 60
    owners: Mapping[bytes, OwnerLimits] = field(default_factory=dict)
    shares: Mapping[int, float] = field(default_factory=dict)  # of the capacity, by class number; the others have no share to keep to
    replacement: str = "lru"
    disk_reserve_bytes: int = DISK_RESERVE_BYTES
    expiry_interval_seconds: float = EXPIRY_INTERVAL_SECONDS

    def __post_init__(self) -> None:
        if not all(0 <= number < CLASSES_MAX for number in self.retention_seconds):
            raise ConfigError("E134", "a retention class", "its id is out of range", "give it an id from 0 to 15")
        if self.replacement not in POLICIES:
            raise ConfigError("E132", f'replacement policy "{self.replacement}"', fix=f"write one of {', '.join(POLICIES)}")
        if self.bucket_seconds < 1:
            raise ConfigError("E131", f"bucket_seconds {self.bucket_seconds}", fix="write a whole number from 1")

    @classmethod
    def of_classes(
        cls,
        classes: Iterable[RetentionClass] = DEFAULT_CLASSES,
        *,
        bucket_seconds: int = 60,
        owners: Mapping[bytes, OwnerLimits] | None = None,
        replacement: str = "lru",
    ) -> EvictionPolicy:
        listed = list(classes)
        limits = owners or {}
        # A cap is looked at on a clock alone: what is written between two looks is over it.
        interval = CAP_INTERVAL_SECONDS if any(each.cap_bytes is not None for each in limits.values()) else EXPIRY_INTERVAL_SECONDS
        names = {c.id: c.name for c in listed}
        shares = {c.id: c.share for c in listed if c.share < 1}
        return cls(
            {c.id: c.keep_seconds for c in listed}, names, bucket_seconds, limits, shares, replacement, expiry_interval_seconds=interval
        )

    def retention_table(self) -> list[int]:
        """Seconds of each of the 16 classes, as Store.set_retentions takes them; classes nobody defined keep nothing."""
        return [min(math.ceil(self.retention_seconds.get(number, 0)), 2**32 - 1) for number in range(CLASSES_MAX)]

    def live_from(self, retention_class: int, bucket_now: int) -> int:
        """The first bucket of last use that has not expired: its end lies less than the retention ago."""
        return bucket_now - math.ceil(self.retention_seconds.get(retention_class, 0) / self.bucket_seconds)

    def rank(self, row: bytes, live_from: int) -> tuple[bool, bytes]:
        """Where a recency row stands in the total order; lower goes first."""
        return int.from_bytes(row[_ORDER_AT : _ORDER_AT + 4], "big") >= live_from, row[_ORDER_AT:]

    def limits(self, owner: bytes) -> OwnerLimits:
        return self.owners.get(owner, _NO_LIMITS)

    def over_share(self, class_bytes: Mapping[int, int], capacity_bytes: int) -> list[tuple[int, int]]:
        """(class, bytes past its share) of the classes that hold more than that; the shortest-lived first."""
        over = {number: class_bytes.get(number, 0) - int(share * capacity_bytes) for number, share in self.shares.items()}
        return sorted(((n, b) for n, b in over.items() if b > 0), key=lambda one: (self.retention_seconds.get(one[0], 0.0), one[0]))

    def slack_bytes(self, capacity_bytes: int) -> int:
        """Kept free so that writes seldom wait: an evictor that starts within milliseconds meets at most some MB of writes meanwhile."""
        return min(max(capacity_bytes // 64, min(16 << 20, capacity_bytes // 16)), 256 << 20)

    def high_bytes(self, capacity_bytes: int) -> int:
        """Eviction starts above this."""
        return capacity_bytes - self.slack_bytes(capacity_bytes)

    def low_bytes(self, capacity_bytes: int) -> int:
        """And stops here: near the high mark, because what is kept is what this cache is for."""
        return self.high_bytes(capacity_bytes) - self.slack_bytes(capacity_bytes) // 4

    def bytes_to_free(self, usage: Usage, wanted_bytes: int = 0) -> int:
        """How much has to go now; `wanted_bytes` is what was refused since the last time."""
        need = 0
        if usage.capacity_bytes:
            if usage.used_bytes > self.high_bytes(usage.capacity_bytes):
                need = usage.used_bytes - self.low_bytes(usage.capacity_bytes)
            need = max(need, usage.used_bytes + wanted_bytes - usage.capacity_bytes)
        # What is being given back already will be free soon.
        disk_short = self.disk_reserve_bytes + DISK_ROOM_BYTES + wanted_bytes - usage.disk_free_bytes - usage.zombie_bytes
        if disk_short > 0:
            need = max(need, disk_short)
        if usage.index_share > 0.8:
            need = max(need, usage.used_bytes // 50)
        return min(need, usage.used_bytes)


_NO_LIMITS: Final = OwnerLimits()
