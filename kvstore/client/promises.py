"""Promises this client holds: a popular extent is promised once in half a minute and touched once in a time bucket, not at every lookup."""

from __future__ import annotations

import threading
from typing import Final, NamedTuple

KEPT_MAX: Final = 1 << 16  # about 15 MB
ABSENT_REUSE_SECONDS: Final = 1.0  # a shard that was not there may have been on its way: without it every load has to decode


class _Promise(NamedTuple):
    until: float  # monotonic seconds
    bucket: int
    class_id: int
    absent: int  # shards whose nodes do not have them


class Promises:
    """By extent key and write id. Safe to share between threads."""

    def __init__(self, reuse_seconds: float) -> None:
        self._reuse_seconds = reuse_seconds
        self._lock = threading.Lock()
        self._kept: dict[tuple[bytes, int], _Promise] = {}

    def get(self, key: bytes, write_id: int, bucket: int, class_id: int, now: float) -> int | None:
        """The shards that are not there (a mask), or None when nodes must be asked: the promise is old, or this bucket's touch is due."""
        kept = self._kept.get((key, write_id))
        if kept is None or kept.until <= now or kept.bucket != bucket or kept.class_id != class_id:
            return None
        return kept.absent

    def put(self, key: bytes, write_id: int, bucket: int, class_id: int, now: float, absent: int) -> None:
        if self._reuse_seconds <= 0:
            return
        with self._lock:
            if len(self._kept) >= KEPT_MAX:
                self._kept = {name: p for name, p in self._kept.items() if p.until > now}
                if len(self._kept) >= KEPT_MAX:
                    self._kept.clear()
            seconds = min(self._reuse_seconds, ABSENT_REUSE_SECONDS) if absent else self._reuse_seconds
            self._kept[key, write_id] = _Promise(now + seconds, bucket, class_id, absent)

    def forget(self, key: bytes, write_id: int) -> None:
        """A load found less than was promised."""
        with self._lock:
            self._kept.pop((key, write_id), None)
