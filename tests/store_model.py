"""A node as a plain dict: the oracle of the store's tests. Knows nothing of segments, indexes, filters or locks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from store_tools import EXISTS, NOT_FOUND, OK, TOMBSTONED, TOO_MANY_WRITINGS

from kvstore.entry import REUSED
from kvstore.record import Record, build, padded_bytes

Name = tuple[bytes, bytes, int]  # owner, extent key, write id


@dataclass
class Held:
    record: Record
    raw: bytes
    bucket: int
    retention_class: int
    reused: bool = False  # in a later bucket than its first


@dataclass
class NodeModel:
    retention_seconds: list[int]
    held: dict[tuple[Name, int], Held] = field(default_factory=dict)
    pinned: set[Name] = field(default_factory=set)
    withdrawn: set[Name] = field(default_factory=set)
    ghosts: dict[tuple[bytes, bytes], int] = field(default_factory=dict)

    def put(self, r: Record) -> int:
        name = r.owner, r.extent_key, r.write_id
        if name in self.withdrawn:
            return TOMBSTONED
        if (name, r.shard) in self.held:
            return EXISTS
        writings = {held[2] for held, _ in self.held if held[:2] == name[:2]}
        if r.write_id not in writings and len(writings) >= 8:
            return TOO_MANY_WRITINGS
        self.held[name, r.shard] = Held(r, build(r), r.bucket, r.retention_class)
        return OK

    def mask(self, name: Name) -> int:
        return sum(1 << shard for held, shard in self.held if held == name)

    def promise(self, name: Name, *, pin: bool, touch: tuple[int, int] | None) -> tuple[int, int]:
        mask = self.mask(name)
        if not mask:
            return NOT_FOUND, 0
        if pin:
            self.pinned.add(name)
        if touch is not None:
            bucket, retention_class = touch
            for (held, _), h in self.held.items():
                if held == name:
                    h.reused = h.reused or bucket > h.bucket
                    h.bucket = max(h.bucket, bucket)
                    if self.retention_seconds[retention_class] > self.retention_seconds[h.retention_class]:
                        h.retention_class = retention_class
        return OK, mask

    def withdraw(self, name: Name) -> int:
        self.withdrawn.add(name)
        return OK if self._drop([key for key in self.held if key[0] == name], 3) else NOT_FOUND

    def order(self) -> list[tuple[int, bytes, int, int, bytes, bytes, int]]:
        """What stands in each queue, in the order in which it goes: (queue, owner, bucket, -start, key, write id, shard)."""
        return sorted(
            (
                h.retention_class + (REUSED if h.reused else 0),
                name[0],
                h.bucket,
                -h.record.start_block,
                name[1],
                name[2].to_bytes(8, "little"),
                shard,
            )
            for (name, shard), h in self.held.items()
        )

    def evict(self, owner: bytes, extent_key: bytes, write_id: int, shard: int, reason: int) -> bool:
        name = owner, extent_key, write_id
        return name not in self.pinned and bool(self._drop([(name, shard)], reason))

    def restart(self, *, index_lost: bool) -> None:
        self.pinned.clear()
        self.withdrawn.clear()
        if index_lost:  # records know their first use and class, not their last
            for h in self.held.values():
                h.bucket, h.retention_class, h.reused = h.record.bucket, h.record.retention_class, False

    def used_bytes(self) -> int:
        return sum(padded_bytes(len(h.raw)) for h in self.held.values())

    def _drop(self, keys: Iterable[tuple[Name, int]], reason: int) -> int:
        gone = [key for key in keys if self.held.pop(key, None) is not None]
        for name, _ in gone:
            if not any(held == name for held, _ in self.held):
                self.ghosts[name[0], name[1]] = reason
        return len(gone)
