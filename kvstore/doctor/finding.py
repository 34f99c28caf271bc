"""What a check of the host says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Word(StrEnum):
    """`OK` also where something is absent that nothing here needs; `SKIP`: it was not looked at, and the finding says why."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: `check` is a stable name, `found` what was seen, `fix` what to do ("": nothing), `measured` the same for programs."""

    check: str
    word: Word
    found: str
    fix: str = ""
    measured: Mapping[str, Any] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "result": self.word.value,
            "found": self.found,
            "fix": self.fix or None,
            "measured": dict(self.measured),
        }
