"""What one look cannot know of a fault: since when it is there, whether it lasts long enough to count, whether it is muted.

    FILE     MAP.health.json beside the cluster map, shared by all who may write there; for others one of their own below XDG state
    seen     "CODE subject" -> unix time of the first look that found it and of the last; forgotten at the first look that does not find it
    mutes    "CODE subject" or "CODE *" -> until when, and how bad it was: a mute ends early where severity or count grows

A file that is damaged or cannot be written costs no more than what it says: looks work without it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvstore.cli.codes import HEALTH
from kvstore.cli.output import Health
from kvstore.config import xdg
from kvstore.errors import UsageError
from kvstore.wholefile import write_whole

GAP_SECONDS: Final = 7 * 86400.0  # a fault last seen longer ago is taken as new
MUTE_SECONDS_MAX: Final = 30 * 86400.0
UNIX_SECONDS_MAX: Final = 1e11  # past any clock; dates end soon after
ANY: Final = "*"
_RANK: Final = {"INFO": 0, "WARN": 1, "ERR": 2}


@dataclass(frozen=True, slots=True)
class Mute:
    """`severity` and `count` are of the first look that found it while muted; "" until then: work that is planned can be muted before."""

    code: str
    subject: str
    until: float
    severity: str = ""
    count: int = 0

    def outgrown_by(self, severity: str, count: int) -> bool:
        return bool(self.severity) and (_RANK[severity] > _RANK[self.severity] or count > self.count)

    def data(self) -> dict[str, Any]:
        return {"code": self.code, "subject": self.subject, "until": rfc3339(self.until), "severity": self.severity or None}


class HealthMemory:
    """Of one cluster map. Read it, `settle` what was found, `save`."""

    def __init__(self, map_path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        absolute = map_path.absolute()
        digest = hashlib.blake2b(str(absolute).encode(), digest_size=8).hexdigest()
        beside, own = absolute.with_name(f"{absolute.name}.health.json"), xdg("state") / "health" / f"{digest}.json"
        self.path = beside if os.access(beside.parent, os.W_OK) else own
        self.seen: dict[str, tuple[float, float]] = {}
        self.mutes: dict[str, Mute] = {}
        self.ended: list[Mute] = []  # by the last settle, because the fault grew
        self._read()

    def settle(self, found: Iterable[Health]) -> list[Health]:
        """The same checks with `since` and `muted_until`; what is younger than its code's time is INFO until then."""
        now, checks = self._clock(), list(found)
        before, self.seen = self.seen, {}
        for check in checks:
            first, last = before.get(_key(check.code, check.subject), (now, now))
            first = now if now - last > GAP_SECONDS else min(first, now)
            self.seen[_key(check.code, check.subject)] = (min(first, now - check.lasted_seconds), now)
        self.mutes = {key: mute for key, mute in self.mutes.items() if mute.until > now}
        settled = [self._dated(check, now) for check in checks]
        self.ended = []
        for key, mute in list(self.mutes.items()):
            mine = [check for check in checks if check.code == mute.code and mute.subject in (ANY, check.subject)]
            if not mine:
                continue
            severity, count = max((check.severity for check in mine), key=_RANK.__getitem__), sum(check.count for check in mine)
            if mute.outgrown_by(severity, count):
                self.ended.append(self.mutes.pop(key))
            elif not mute.severity:
                self.mutes[key] = replace(mute, severity=severity, count=count)
        for check in settled:
            untils = [mute.until for mute in self.mutes.values() if mute.code == check.code and mute.subject in (ANY, check.subject)]
            check.muted_until = rfc3339(max(untils)) if untils else None
        return sorted(settled, key=lambda check: (-_RANK[check.severity], check.code, check.subject))

    def _dated(self, check: Health, now: float) -> Health:
        first = self.seen[_key(check.code, check.subject)][0]
        check = replace(check, since=rfc3339(first), lasted_seconds=now - first)
        due = first + HEALTH[check.code].for_seconds
        if now < due and check.severity != "INFO":
            return replace(
                check, severity="INFO", summary=f"{check.summary} ({check.severity} if it lasts until {rfc3339(due)[11:16]} UTC)"
            )
        return check

    def mute(self, code: str, seconds: float, subject: str = ANY) -> Mute:
        """Replaces a mute of the same. Raises UsageError where it is too long."""
        if not 0 < seconds <= MUTE_SECONDS_MAX:
            raise UsageError("E131", f"a mute of {seconds:g} s", "a mute must end", "write 1m to 30d")
        mute = Mute(code, subject, self._clock() + seconds)
        self.mutes[_key(code, subject)] = mute
        return mute

    def unmute(self, code: str, subject: str | None = None) -> list[Mute]:
        """All of a code, or one. Returns what was there."""
        gone = [key for key, mute in self.mutes.items() if mute.code == code and subject in (None, mute.subject)]
        return [self.mutes.pop(key) for key in gone]

    def live_mutes(self) -> list[Mute]:
        now = self._clock()
        return sorted((mute for mute in self.mutes.values() if mute.until > now), key=lambda mute: mute.until)

    def remaining_seconds(self, mute: Mute) -> float:
        return mute.until - self._clock()

    def save(self, *, must: bool = False) -> None:
        """Whole or not at all. `must`: raises OSError where it cannot be written; else that is let be."""
        data = {
            "schema": "kvstore.health-memory/1",
            "seen": {key: list(times) for key, times in self.seen.items()},
            "mutes": [vars_of(mute) for mute in self.mutes.values()],
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(data))
        except OSError:
            if must:
                raise

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
            data = json.loads(self.path.read_text())
            seen = {str(key): (float(first), float(last)) for key, (first, last) in data["seen"].items()}
            mutes = [Mute(str(m["code"]), str(m["subject"]), float(m["until"]), str(m["severity"]), int(m["count"])) for m in data["mutes"]]
            sound = all(0 <= first < UNIX_SECONDS_MAX and 0 <= last < UNIX_SECONDS_MAX for first, last in seen.values())
            latest = self._clock() + MUTE_SECONDS_MAX
            if sound and all(m.code in HEALTH and m.severity in ("", *_RANK) and 0 <= m.until <= latest for m in mutes):
                self.seen, self.mutes = seen, {_key(mute.code, mute.subject): mute for mute in mutes}


def muted_words(memory: HealthMemory, checks: Sequence[Health]) -> str:
    """ "(muted: NODE_DOWN node-03, 3.0 h left)"; "" where nothing is."""
    from kvstore.units import format_seconds

    firing = {check.code for check in checks}
    words = []
    for mute in memory.live_mutes():
        subject = "" if mute.subject == ANY else f" {mute.subject}"
        quiet = "" if mute.code in firing else ", does not fire"
        words.append(f"{mute.code}{subject}, {format_seconds(memory.remaining_seconds(mute))} left{quiet}")
    return f"  (muted: {'; '.join(words)})" if words else ""


def vars_of(mute: Mute) -> dict[str, Any]:
    return {name: getattr(mute, name) for name in Mute.__slots__}


def rfc3339(unix_seconds: float) -> str:
    return datetime.datetime.fromtimestamp(unix_seconds, datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _key(code: str, subject: str) -> str:
    return f"{code} {subject}"
