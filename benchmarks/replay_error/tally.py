"""What is kept of a measurement: how many tokens moved how far (in classes a twentieth of a decade wide), and one number a sample.

A sample is one prompt with its answer. Its tokens are not independent of each other, so spreads are over samples, never over tokens.
Tallies add up over runs; the file they are saved in is all that the document is made from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from benchmarks.replay_error.probe import Deviation

STEPS: Final = 20  # classes a decade: what is read off them is true to 6%
SMALLEST: Final = 1e-15  # below is noise of float64 itself
RESAMPLES: Final = 2_000


@dataclass
class Tally:
    tokens: int = 0
    zeros: int = 0  # tokens that did not move at all
    greatest: float = 0.0  # nats
    classes: dict[int, int] = field(default_factory=dict)  # floor(STEPS * log10(nats)) -> tokens
    lists: dict[str, list[float]] = field(default_factory=dict)  # name -> a number a sample

    @property
    def samples(self) -> int:
        return len(self.lists.get("nats", ()))

    def add(self, found: Deviation, **values: float) -> None:
        self.tokens += len(found.nats)
        self.zeros += int((found.nats == 0).sum())
        self.greatest = max(self.greatest, float(found.nats.max()))
        moved = found.nats[found.nats > 0]
        for number, count in zip(*np.unique(np.floor(STEPS * np.log10(np.maximum(moved, SMALLEST))), return_counts=True), strict=True):
            self.classes[int(number)] = self.classes.get(int(number), 0) + int(count)
        values |= {
            "nats": float(found.nats.mean()),
            "nats_max": float(found.nats.max()),
            "changed": float((~found.same_top).sum()),
            "nll": float(found.nll.mean()),
        }
        for name, value in values.items():
            self.lists.setdefault(name, []).append(float(f"{value:.4g}"))

    # --- what is read off ---

    @property
    def mean_nats(self) -> float:
        return mean(self.lists.get("nats", ()))

    @property
    def top_agreement(self) -> float:
        return 1.0 - sum(self.lists.get("changed", ())) / max(1, self.tokens)

    def percentile(self, percent: float) -> float:
        """Nats that so many percent of the tokens stay at or below; upper edge of a class."""
        rest = math.ceil(self.tokens * percent / 100) - self.zeros
        if rest <= 0:
            return 0.0
        for number, count in sorted(self.classes.items()):
            rest -= count
            if rest <= 0:
                return min(self.greatest, float(10 ** ((number + 1) / STEPS)))
        return self.greatest

    def exceeding(self) -> tuple[list[float], list[float]]:
        """Nats, and the share of tokens that moved at least as far: the tail, as it is plotted."""
        nats, shares, above = [], [], 0
        for number, count in sorted(self.classes.items(), reverse=True):
            above += count
            nats.append(10 ** (number / STEPS))
            shares.append(above / self.tokens)
        return nats[::-1], shares[::-1]

    # --- file ---

    def to_json(self) -> dict[str, Any]:
        classes = {str(number): count for number, count in sorted(self.classes.items())}
        return {"tokens": self.tokens, "zeros": self.zeros, "greatest": self.greatest, "classes": classes, "lists": self.lists}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Tally:
        classes = {int(number): count for number, count in found["classes"].items()}
        return cls(found["tokens"], found["zeros"], found["greatest"], classes, found["lists"])


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95% of the means of as many samples drawn again (bootstrap, fixed seed)."""
    if not len(values):
        return math.nan, math.nan
    drawn = np.random.default_rng(0).choice(np.asarray(values), (RESAMPLES, len(values))).mean(1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)
