"""Samples by family and labels, looked up often; and what a process added between two looks, a restart not counted as a fall."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

_LABEL: Final = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPED: Final = re.compile(r'[\\"]')
_CUMULATIVE: Final = ("_total", "_count", "_sum", "_bucket")

Labels = Mapping[str, str]


@lru_cache(maxsize=65_536)
def split(key: str) -> tuple[str, Labels]:
    """The name and labels of `name{label="value",...}`."""
    name, _, inner = key.partition("{")
    return name, {label: re.sub(r"\\(.)", r"\1", value) for label, value in _LABEL.findall(inner)}


def joined(name: str, labels: Labels) -> str:
    """The other way round."""
    written = ((label, _ESCAPED.sub(r"\\\g<0>", value)) for label, value in labels.items())
    inner = ",".join(f'{label}="{value}"' for label, value in written)
    return f"{name}{{{inner}}}" if inner else name


class Counts:
    """Numbers by family; asked by name and by labels that must be so."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._families: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
        for key, value in values.items():
            name, labels = split(key)
            self._families[name].append((labels, value))

    def sum(self, name: str, **labels: str) -> float:
        return sum(value for found, value in self._families.get(name, ()) if labels.items() <= found.items())

    def by_name(self, name: str, **labels: str) -> float | None:
        """As sum; None where there is no such sample."""
        found = [value for have, value in self._families.get(name, ()) if labels.items() <= have.items()]
        return sum(found) if found else None

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums by the values of one label."""
        sums: dict[str, float] = defaultdict(float)
        for found, value in self._families.get(name, ()):
            if label in found and labels.items() <= found.items():
                sums[found[label]] += value
        return dict(sums)

    def buckets(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """Of a histogram: (upper bound, cumulative count), in order; for `quantile` of kvstore/cluster_view.py."""
        return sorted((float(bound), count) for bound, count in self.by(f"{name}_bucket", "le", **labels).items())


def added(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What counters counted in between. One that fell belongs to a process that started again: all of its numbers then count from 0."""
    falls = any(value < before.get(key, 0.0) for key, value in after.items() if is_counter(key))
    base: Mapping[str, float] = {} if falls else before
    return {key: value - base.get(key, 0.0) for key, value in after.items() if is_counter(key)}


@lru_cache(maxsize=65_536)
def is_counter(key: str) -> bool:
    return key.partition("{")[0].endswith(_CUMULATIVE)
