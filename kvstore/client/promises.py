"""Promises this client holds: a popular extent is promised once in half a minute and touched once in a time bucket, not at every lookup."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final, NamedTuple

KEPT_MAX: Final = 1 << 16  # about 15 MB
ABSENT_REUSE_SECONDS: Final = 1.0  # a shard that was not there may have been on its way: without it every load has to decode


class _Promise(NamedTuple):
    until: float  # monotonic seconds
    bucket: int
    class_id: int
    absent: int  # shards whose nodes do not have them


class Promises:
    """By name: extent key and write id, as NAME of kvstore/client/native.py has them. Safe to share between threads."""

    def __init__(self, reuse_seconds: float) -> None:
        self._reuse_seconds = reuse_seconds
        self._lock = threading.Lock()
        self._kept: dict[bytes, _Promise] = {}

    def get(self, names: Iterable[bytes], bucket: int, class_id: int, now: float) -> dict[bytes, int]:
        """Of those that nodes need not be asked for: shards that are not there, a mask. Others are old, or this bucket's touch is due."""
        found = {}
        for name in names if self._kept else ():
            kept = self._kept.get(name)
            if kept is not None and kept.until > now and kept.bucket == bucket and kept.class_id == class_id:
                found[name] = kept.absent
        return found

    def put(self, absent: Mapping[bytes, int], bucket: int, class_id: int, now: float) -> None:
        """By name: the shards whose nodes do not have them."""
        if self._reuse_seconds <= 0:
            return
        with self._lock:
            new = sum(name not in self._kept for name in absent)
            if len(self._kept) + new > KEPT_MAX:
                self._kept = {name: p for name, p in self._kept.items() if p.until > now}
                if len(self._kept) + new > KEPT_MAX:
                    self._kept.clear()
            for name, mask in islice(absent.items(), KEPT_MAX):
                seconds = min(self._reuse_seconds, ABSENT_REUSE_SECONDS) if mask else self._reuse_seconds
                self._kept[name] = _Promise(now + seconds, bucket, class_id, mask)

    def forget(self, name: bytes) -> None:
        """A load found less than was promised."""
        with self._lock:
            self._kept.pop(name, None)
