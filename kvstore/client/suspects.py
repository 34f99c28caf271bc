"""Bad shards that loads found are told to their nodes (SUSPECT), so that these look at their disks and drop what is damaged.

    look      after each load, never waits: takes what the native core has noted
    one thread   a message a node, SHARDS_PER_SECOND in all at most, each shard once in AGAIN_SECONDS

Nothing depends on it: a shard that was not told is found bad again by whoever reads it next. A node that answers BAD_REQUEST does not know
the verb, and has ended the connection over it: it is told nothing for DEAF_SECONDS.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from typing import Any, Final

from kvstore.client.counters import Counters
from kvstore.client.native import BAD_SHARD, name_of
from kvstore.client.promises import Promises
from kvstore.client.reach import Reaches
from kvstore.wire import Status, Verb, encode_suspect

log = logging.getLogger(__name__)

QUEUE_MAX: Final = 256
SHARDS_PER_SECOND: Final = 64  # more than a node looks at
TOLD_MAX: Final = 4096
AGAIN_SECONDS: Final = 60.0  # as often as a node looks at one
DEAF_SECONDS: Final = 3600.0
LINGER_SECONDS: Final = 0.05  # one message for the loads of so long
ASK_SECONDS: Final = 2.0
_RESULTS: Final = {Status.OK: "taken", Status.NOT_FOUND: "absent", Status.BUSY: "busy"}

Shard = tuple[int, bytes, bytes, int, int]  # node, owner, extent key, write id, shard


class Suspects:
    """Of one client. `close()` before the core is closed."""

    def __init__(self, reaches: Reaches, promises: Promises, counters: Counters) -> None:
        self._reaches = reaches
        self._promises = promises
        self._counters = counters
        self._queue: deque[Shard] = deque()
        self._told: dict[Shard, float] = {}  # when; oldest first
        self._deaf: dict[int, float] = {}  # node: until when it is told nothing
        self._changed = threading.Condition()
        self._busy = self._ended = False
        self._hurry = False
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        rows: Any = self._reaches.current.core.take_bad_shards().view(BAD_SHARD)
        if len(rows):
            names = ((r["owner"].tobytes(), r["extent_key"].tobytes(), int(r["write_id"]), int(r["shard"])) for r in rows)
            self._add([(node, *name) for node, name in zip(rows["node"].tolist(), names, strict=True)])

    def _add(self, shards: list[Shard]) -> None:
        now, unsent = time.monotonic(), 0
        with self._changed:
            while self._told and (len(self._told) > TOLD_MAX or now - next(iter(self._told.values())) >= AGAIN_SECONDS):
                del self._told[next(iter(self._told))]
            for shard in shards:
                if shard in self._told:
                    continue
                if self._ended or shard[0] < 0 or len(self._queue) >= QUEUE_MAX or self._deaf.get(shard[0], now) > now:
                    unsent += 1
                    continue
                self._told[shard] = now
                self._queue.append(shard)
            if self._queue and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-suspects", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if unsent:
            self._counters.bad_shards_told("unsent", unsent)

    def close(self, timeout_seconds: float) -> None:
        """Tells what waits, where that takes no longer. Safe to call twice."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_seconds)
        self.end()

    def end(self) -> None:
        """What still waits is not told."""
        with self._changed:
            self._ended = True
            left = len(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        if left:
            self._counters.bad_shards_told("unsent", left)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._queue) or self._ended)
                self._changed.wait_for(lambda: self._hurry or self._ended, LINGER_SECONDS)
                if self._ended:
                    return
                batch = [self._queue.popleft() for _ in range(min(SHARDS_PER_SECOND, len(self._queue)))]
                self._busy = bool(batch)
            try:
                self._tell(batch)
            except Exception:  # a client that is being closed
                log.debug("telling of bad shards failed", exc_info=True)
                self._counters.bad_shards_told("unsent", len(batch))
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._hurry or self._ended, 1.0)

    def _tell(self, batch: list[Shard]) -> None:
        frames: dict[tuple[int, bytes], list[Shard]] = {}
        for shard in batch:
            frames.setdefault(shard[:2], []).append(shard)
        requests = [
            (node, int(Verb.SUSPECT), encode_suspect([shard[2:] for shard in mine], owner=owner)) for (node, owner), mine in frames.items()
        ]
        with self._reaches.using() as reach:
            answers = reach.core.call_many(requests, ASK_SECONDS)
        for ((node, _), mine), (status, body) in zip(frames.items(), answers, strict=True):
            if status == Status.BAD_REQUEST:
                self._deaf[node] = time.monotonic() + DEAF_SECONDS
            if status != Status.OK or len(body) != 4 * len(mine):
                self._counters.bad_shards_told("unsent", len(mine))
                continue
            for (_, _, extent_key, write_id, _), (said,) in zip(mine, struct.iter_unpack("<I", body), strict=True):
                self._counters.bad_shards_told(_RESULTS.get(said, "busy"), 1)
                self._promises.forget(name_of(extent_key, write_id))  # the next lookup hears what became of it
