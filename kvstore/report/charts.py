"""The plots of a report, by kvstore/plots.py: what tokens came to by day, how old reuse is, the hit rate by retention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kvstore.plots import Series, bars, lines
from kvstore.report.page import printable
from kvstore.report.schema import AGE_WORDS, AGES, DAY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN: Final = ("unknown", "expired", "evicted", "tail")  # the other four are small as a rule, and are one part of a bar
_NAMED_DAYS_MAX: Final = 10


def charts(measured: Mapping[str, Any]) -> dict[str, Figure]:
    """By name, which is a file's name, too. Nothing for a log without requests."""
    if not measured["input_tokens"]:
        return {}
    found = {"reuse_ages": _ages(measured), "retention": _retention(measured)}
    return ({"days": _days(measured)} if "day" in measured["by"] else {}) | found


def _days(measured: Mapping[str, Any]) -> Figure:
    rows = [row for row in measured["by"]["day"] if row["day"] and row["hit_ratio"] is not None]
    every = -(-len(rows) // _NAMED_DAYS_MAX)
    labels = [row["day"][5:] if at % every == 0 else "" for at, row in enumerate(rows)]
    stacks = {"hit": [100 * row["hit_ratio"] for row in rows]}
    stacks |= {reason: [100 * row["miss_ratio"][reason] for row in rows] for reason in _SHOWN}
    stacks["other misses"] = [100 * sum(ratio for reason, ratio in row["miss_ratio"].items() if reason not in _SHOWN) for row in rows]
    used = {name: values for name, values in stacks.items() if name == "hit" or any(values)}
    return bars(labels, used, title="What input tokens came to, by day (UTC)", y_label="% of input tokens", y_range=(0, 100))


def _ages(measured: Mapping[str, Any]) -> Figure:
    labels = [AGE_WORDS[age] for age in AGES]
    shares = [100 * (each["share_of_reuse"] or 0) for each in measured["reuse_ages"]]
    title = "Reuse by needed age: hit, expired and evicted tokens"
    return bars(labels, {"": shares}, title=title, x_label="up to", y_label="% of reused tokens", y_range=(0, None))


def _retention(measured: Mapping[str, Any]) -> Figure:
    """One line for all and one a class; classes without requests are left out. A dollar would begin a formula."""
    bounds = [bound for bound in AGES.values() if bound]
    days = [bound / DAY for bound in bounds]

    def line(name: str, ages: list[Mapping[str, Any]]) -> Series:
        return Series(name.replace("$", r"\$"), days, [100 * each["hit_ratio_at_least"] for each in ages if each["up_to_seconds"]])

    classes = [(name, each["reuse_ages"]) for name, each in measured["by_class"].items() if each["hit_ratio"] is not None]
    several = [line(printable(name), ages) for name, ages in classes] if len(classes) > 1 else []
    ticks = {bound / DAY: AGE_WORDS[age] for age, bound in AGES.items() if bound and age in ("1m", "1h", "6h", "1d", "3d", "7d", "14d")}
    return lines(
        [line("all", measured["reuse_ages"]), *several],
        title="Hit rate if everything were kept so long (at least)",
        x_label="retention since last use",
        y_label="hit, % of input tokens",
        x_log=True,
        x_ticks=ticks,
        y_range=(0, 100),
    )
