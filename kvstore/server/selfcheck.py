"""The health checks that a daemon can make about itself, from its own metrics: exported as kvstore_health_check, read by `kvstore status`.

A check fires once its condition has held for its time at every look, and stops once it has not held for as long: no flapping. The file
`starts` in the data directory remembers the last starts: "total, then unix seconds", one line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.clustermap import EARLY_REASONS
from kvstore.metrics import CLASSES
from kvstore.thresholds import CHECKSUM_ERRORS_ERR, FULL_RATIO, WEAR_ERR, WEAR_WARN, ZOMBIE_RATIO, disk_full, disk_full_words

LOOK_SECONDS: Final = 10.0
TELL_SECONDS: Final = 600.0  # between two lines of the log about one fault
FLAPPING_STARTS: Final = 3
FLAPPING_SECONDS: Final = 600.0
STARTS_KEPT: Final = 16
STARTS_FILE: Final = "starts"
FOR_SECONDS: Final = {"NODE_EPOCH_BEHIND": 60.0, "RETENTION_SHORT": 300.0, "ZOMBIE_BYTES": 600.0}  # the others at once

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Starts:
    """Of daemons on one data directory, this one included. `recent`: unix seconds, oldest first."""

    total: int
    recent: tuple[float, ...]


def note_start(directory: Path, now: float) -> Starts:
    """Adds one. A file that is damaged or cannot be written costs the count alone."""
    path = directory / STARTS_FILE
    try:
        total, *times = path.read_text().split()
        before = Starts(int(total), tuple(float(each) for each in times))
    except (OSError, ValueError):
        before = Starts(0, ())
    starts = Starts(before.total + 1, (*(each for each in before.recent if each <= now), now)[-STARTS_KEPT:])
    try:
        fresh = path.with_name(f"{STARTS_FILE}.new")
        fresh.write_text(" ".join([str(starts.total), *(f"{each:.3f}" for each in starts.recent)]) + "\n")
        fresh.replace(path)
    except OSError:
        pass
    return starts


def judge(values: Values, before: Values | None, starts: Sequence[float], now: float) -> dict[str, str]:
    """Code -> severity of what holds at this moment. `before`: the values of the look before."""
    found: dict[str, str] = {}
    bad = values['kvstore_disk_errors_total{kind="checksum"}']
    if bad:
        found["CHECKSUM_ERRORS"] = "ERR" if bad >= CHECKSUM_ERRORS_ERR else "WARN"
    if severity := disk_full(values["kvstore_disk_free_bytes"], values['kvstore_disk_used_bytes{kind="freeing"}']):
        found["DISK_FULL"] = severity
    if (wear := values.get("kvstore_disk_wear_ratio", 0.0)) > WEAR_WARN:
        found["DISK_WEAR"] = "ERR" if wear > WEAR_ERR else "WARN"
    if values['kvstore_index_starts_total{mode="rebuild"}']:
        found["INDEX_REBUILT"] = "INFO"
    if values["kvstore_epoch_seen"] > values["kvstore_epoch"]:
        found["NODE_EPOCH_BEHIND"] = "WARN"
    if sum(now - each <= FLAPPING_SECONDS for each in starts) >= FLAPPING_STARTS:
        found["NODE_FLAPPING"] = "WARN"
    capacity = values["kvstore_disk_capacity_bytes"]
    if sum(values[f'kvstore_disk_used_bytes{{kind="{kind}"}}'] for kind in ("freeing", "zombie")) > ZOMBIE_RATIO * capacity:
        found["ZOMBIE_BYTES"] = "WARN"
    if before is not None and values['kvstore_disk_used_bytes{kind="shards"}'] >= FULL_RATIO * capacity:
        refused = 'kvstore_node_requests_total{op="write",result="no_space"}'
        if values[refused] > before[refused] and _evicted(values) == _evicted(before):
            found["EVICTION_STALLED"] = "ERR"
    if any(_short(values, name) for name in CLASSES):
        found["RETENTION_SHORT"] = "WARN"
    return found


def told(code: str, severity: str, values: Values) -> str:
    """What the log says of it."""
    words = disk_full_words(severity, values["kvstore_disk_free_bytes"]) if code == "DISK_FULL" else "fires"
    return f"{code} {words}; kvstore explain {code}"


def _evicted(values: Values) -> float:
    return sum(value for key, value in values.items() if key.startswith("kvstore_evicted_bytes_total{"))


def _short(values: Values, name: str) -> bool:
    """A class was dropped for room here before its time. One node is no loss yet: status looks at all."""
    if bound := values.get(f'kvstore_retention_bound_seconds{{retention_class="{name}"}}', 0.0):
        return bound < values[f'kvstore_retention_contract_seconds{{retention_class="{name}"}}']
    oldest, contract = (values[f'kvstore_{what}_seconds{{retention_class="{name}"}}'] for what in ("retention", "retention_contract"))
    early = (f'kvstore_evicted_bytes_total{{retention_class="{name}",reason="{reason}"}}' for reason in EARLY_REASONS)
    return oldest < contract and any(values.get(key, 0) for key in early)


class SelfCheck:
    """`look` as often as you like: it looks each 10 s. `firing` is read by other threads. `tell` (severity, line) gets what begins, and
    again each ten minutes while it lasts."""

    def __init__(
        self,
        values: Callable[[], Values],
        starts: Sequence[float],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        tell: Callable[[str, str], None] = lambda severity, line: None,
    ) -> None:
        self._values, self._starts, self._clock, self._wall_clock, self._tell = values, starts, clock, wall_clock, tell
        self.firing: dict[str, str] = {}
        self._before: Values | None = None
        self._looked: float | None = None
        self._held_since: dict[str, float] = {}  # conditions that hold, and have not fired yet
        self._told_last: dict[tuple[str, str], float] = {}  # code and severity
        self._held_last: dict[str, float] = {}  # of what fires: when its condition last held

    def look(self) -> None:
        now = self._clock()
        if self._looked is not None and now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        values = self._values()
        holds = judge(values, self._before, self._starts, self._wall_clock())
        self._before = values
        self._held_since = {code: self._held_since.get(code, now) for code in holds}
        firing = dict(self.firing)
        for code, severity in holds.items():
            self._held_last[code] = now
            if now - self._held_since[code] >= FOR_SECONDS.get(code, 0.0):
                firing[code] = severity
        over = (code for code in self.firing if code not in holds and now - self._held_last[code] >= FOR_SECONDS.get(code, 0.0))
        for code in over:
            del firing[code]
        self.firing = firing  # replaced whole: other threads iterate
        for fault in firing.items():
            if now - self._told_last.get(fault, -TELL_SECONDS) >= TELL_SECONDS:
                self._told_last[fault] = now
                self._tell(fault[1], told(*fault, values))
