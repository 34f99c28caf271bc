"""What every measurement shares: bars, the registry, interleaved rounds, and the results file.

A measurement is a function `(Bench) -> dict[str, Figure]` registered under the ids of the table in docs/PERFORMANCE.md. Its keys are
ids, `id` alone or `id.part`; where there are only parts, `id` becomes the worst of them. bench-results.json is a list of
{"id", "value", "bar", "ok", "machine", "commit"}; a run replaces the ids it measured and keeps all others.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench-results.json"
T = TypeVar("T")


class NotMeasurable(Exception):
    """Raised by a measurement for which this machine lacks something; the text says what. No figure is better than a wrong one."""


@dataclass(frozen=True)
class Bar:
    """What a value is held against."""

    sense: Literal["at least", "at most", "equal to"]
    limit: float

    def met_by(self, value: float) -> bool:
        if self.sense == "at least":
            return value >= self.limit
        return value <= self.limit if self.sense == "at most" else value == self.limit

    def margin(self, value: float) -> float:
        """At or above 1 when met; the smaller, the worse. Only for picking the worst of several."""
        if self.met_by(value):
            return 1.0 + abs(value - self.limit) / (abs(self.limit) or 1.0)
        return 1.0 - abs(value - self.limit) / (abs(self.limit) + abs(value))


def at_least(limit: float) -> Bar:
    return Bar("at least", limit)


def at_most(limit: float) -> Bar:
    return Bar("at most", limit)


def equal_to(limit: float) -> Bar:
    return Bar("equal to", limit)


@dataclass(frozen=True)
class Figure:
    value: float
    bar: Bar
    note: str = ""  # shown in the table: how spread, of how many

    @property
    def ok(self) -> bool:
        return self.bar.met_by(self.value)


@dataclass(frozen=True)
class Scale:
    """How much of everything; smoke is the same code at a size that runs as a test."""

    name: Literal["smoke", "ci", "full"]
    rounds: int  # interleaved rounds of a ratio
    chain_blocks: int  # of one prompt
    index_extents: int  # per daemon, where the index is to be full
    samples: int  # of a latency
    kills: int
    writer_rounds: int
    trace_requests: int  # 0: the whole trace


SCALES = {
    "smoke": Scale("smoke", 2, chain_blocks=80, index_extents=500, samples=10, kills=1, writer_rounds=2, trace_requests=60),
    "ci": Scale("ci", 15, chain_blocks=600, index_extents=1_000_000, samples=1_000, kills=100, writer_rounds=1_000, trace_requests=0),
    "full": Scale(
        "full", 31, chain_blocks=600, index_extents=1_000_000, samples=3_000, kills=1_000, writer_rounds=10_000, trace_requests=0
    ),
}


@dataclass
class Bench:
    """One run: its scale, its scratch folder, and what several measurements share (a filled cluster), made once and closed at the end."""

    scale: Scale
    directory: Path
    _shared: dict[Callable[..., Any], Any] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def shared(self, make: Callable[[Bench, ExitStack], T]) -> T:
        """`make(bench, stack)` once a run; what it enters into the stack is closed when the run ends."""
        if make not in self._shared:
            self._shared[make] = make(self, self._stack)
        value: T = self._shared[make]
        return value

    def close(self) -> None:
        self._stack.close()


Measure = Callable[[Bench], Mapping[str, Figure]]
REGISTRY: dict[str, Measure] = {}  # id -> its measurement; several ids may share one


def measures(*ids: str) -> Callable[[Measure], Measure]:
    """Registers a measurement under the ids that it gives."""

    def register(measure: Measure) -> Measure:
        for name in ids:
            if name in REGISTRY:
                raise ValueError(f"{name} is measured twice")
            REGISTRY[name] = measure
        return measure

    return register


def interleaved(rounds: int, *takes: Callable[[], float], warm_up: int = 3) -> list[list[float]]:
    """Values of each take, round by round in turn, so that what the machine does meanwhile meets all alike.

    The order alternates between rounds; the first `warm_up` rounds are not kept.
    """
    kept: list[list[float]] = [[] for _ in takes]
    for number in range(-warm_up, rounds):
        order = range(len(takes)) if number % 2 else range(len(takes) - 1, -1, -1)
        for index in order:
            value = takes[index]()
            if number >= 0:
                kept[index].append(value)
    return kept


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(ours) / statistics.median(theirs)


def spread(values: Sequence[float]) -> str:
    """Quartiles over the median, as text."""
    if len(values) < 4:
        return f"n={len(values)}"
    low, mid, high = statistics.quantiles(values, n=4)
    return f"n={len(values)}, quartiles {low / mid - 1:+.0%} {high / mid - 1:+.0%}"


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: a value that was really seen."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(len(ordered) * percent / 100) - 1))]


def seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def machine() -> str:
    """This machine in one line: processor, cores, memory, kernel."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, Linux {platform.release()}"


def commit() -> str:
    """The commit measured, with `+` if files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = [line for line in git("status", "--porcelain", "--untracked-files=no").splitlines() if RESULTS.name not in line]
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("+" if changed else "")


def with_worst(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """Adds for each `id.part...` the plain id, worst of its parts, where the measurement gave none itself."""
    whole = dict(figures)
    for name in list(figures):
        plain = name.split(".")[0]
        if plain not in figures:
            parts = [figure for part, figure in figures.items() if part.split(".")[0] == plain]
            whole[plain] = min(parts, key=lambda figure: figure.bar.margin(figure.value))
    return whole


def rows_of(figures: Mapping[str, Figure]) -> Iterator[dict[str, Any]]:
    where, at = machine(), commit()
    for name, figure in figures.items():
        yield {"id": name, "value": figure.value, "bar": figure.bar.limit, "ok": figure.ok, "machine": where, "commit": at}


def merge_results(path: Path, figures: Mapping[str, Figure]) -> None:
    """Writes the file anew: rows of other ids stay, in their order; the file is never seen half-written."""
    rows = {row["id"]: row for row in json.loads(path.read_text())} if path.exists() else {}
    rows.update({row["id"]: row for row in rows_of(figures)})
    scratch = path.with_suffix(".new")
    scratch.write_text("[\n" + ",\n".join("  " + json.dumps(row) for row in rows.values()) + "\n]\n")
    scratch.replace(path)
