"""What a daemon did lately: the log line of every 10 s, nothing when nothing happened; the traffic of five minutes, the growth of hours."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstore.units import format_bytes
from kvstore.wire import Status


class Activity:
    """Differences of Server.stats() between two looks."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def line(self, server: Mapping[str, Any], used_bytes: int, capacity_bytes: int, seconds: float) -> str:
        """One line, "" if no request was answered since the last call."""
        now = {op: sum(by_status.values()) for op, by_status in server["requests"].items()}
        now |= {key: int(server[key]) for key in ("bytes_in", "bytes_out", "connections_cut", "frames_malformed", "faults")}
        for name, status in (("busy", Status.BUSY), ("no space", Status.NO_SPACE)):
            now[name] = sum(by_status.get(int(status), 0) for by_status in server["requests"].values())
        did = {key: value - self._last.get(key, 0) for key, value in now.items()}
        self._last = now
        if not any(did[op] for op in server["requests"]):
            return ""
        parts = [
            f"out {format_bytes(did['bytes_out'] / seconds)}/s",
            f"in {format_bytes(did['bytes_in'] / seconds)}/s",
            *(f"{op} {did[op] / seconds:.0f}/s" for op in ("discover", "promise", "read", "write") if did[op]),
            f"queue {server['inflight']}",
            f"connections {server['connections']}",
            f"used {100 * used_bytes / max(1, capacity_bytes):.0f} %",
            *(f"{name} {did[key]}" for name, key in _COMPLAINTS if did[key]),
        ]
        return ", ".join(parts)


_COMPLAINTS = (
    ("busy", "busy"),
    ("no space", "no space"),
    ("cut", "connections_cut"),
    ("malformed", "frames_malformed"),
    ("faults", "faults"),
)

GROWTH_WINDOW_SECONDS: Final = 6 * 3600.0
GROWTH_SAMPLE_SECONDS: Final = 60.0
WINDOW_SECONDS: Final = 300.0
SAMPLE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Moved:
    """Counts of a span: since the start of the daemon, or between two looks. `read_counts`: READ requests by bucket of their duration."""

    seconds: float
    requests: int
    bytes_in: int
    bytes_out: int
    read_counts: tuple[int, ...]

    @classmethod
    def of(cls, server: Mapping[str, Any], now: float) -> Moved:
        requests = sum(sum(by_status.values()) for by_status in server["requests"].values())
        return cls(now, requests, server["bytes_in"], server["bytes_out"], tuple(server["request_seconds"]["read"]["counts"]))

    def since(self, earlier: Moved) -> Moved:
        return Moved(
            self.seconds - earlier.seconds,
            self.requests - earlier.requests,
            self.bytes_in - earlier.bytes_in,
            self.bytes_out - earlier.bytes_out,
            tuple(a - b for a, b in zip(self.read_counts, earlier.read_counts, strict=True)),
        )


class Traffic:
    """`sample` on one thread each 10 s or more often; `window` on any."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]], clock: Callable[[], float] = time.monotonic) -> None:
        self._stats = stats
        self._clock = clock
        self._samples = deque([Moved.of(stats(), clock())])

    def sample(self) -> None:
        now = self._clock()
        if now - self._samples[-1].seconds >= SAMPLE_SECONDS:
            self._samples.append(Moved.of(self._stats(), now))
        while len(self._samples) > 1 and now - self._samples[1].seconds >= WINDOW_SECONDS:
            self._samples.popleft()

    def window(self) -> Moved:
        """Of the last five minutes, or since the start where that is later."""
        return Moved.of(self._stats(), self._clock()).since(self._samples[0])


@dataclass(frozen=True, slots=True)
class Grown:
    """How a node's bytes changed in a span. `used_bytes`: more than at its beginning."""

    seconds: float
    used_bytes: int
    written_bytes: int


class Growth:
    """`sample` on one thread each minute or more often; `window` on any. `bytes_now` gives (used, written since the start)."""

    def __init__(self, bytes_now: Callable[[], tuple[int, int]], clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_now = bytes_now
        self._clock = clock
        self._samples = deque([(clock(), *bytes_now())])

    def sample(self) -> None:
        now = self._clock()
        if now - self._samples[-1][0] >= GROWTH_SAMPLE_SECONDS:
            self._samples.append((now, *self._bytes_now()))
        while len(self._samples) > 1 and now - self._samples[1][0] >= GROWTH_WINDOW_SECONDS:
            self._samples.popleft()

    def window(self) -> Grown:
        """Of the last six hours, or since the start where that is later."""
        (then, used, written), (used_now, written_now) = self._samples[0], self._bytes_now()
        return Grown(self._clock() - then, used_now - used, written_now - written)
