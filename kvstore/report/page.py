"""What a report says, as facts and tables: shown as text, Markdown or HTML. Everything that came from outside is made printable here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.metrics import MISS_REASONS
from kvstore.report.schema import AGE_WORDS, AGES, GHOST_DAYS
from kvstore.units import format_bytes, format_seconds

REASON_WORDS: Final = {
    "unknown": "never stored, or forgotten",
    "expired": "its class's time had passed",
    "evicted": "dropped for room before its time",
    "lost_shards": "fewer than k shards to be had",
    "fidelity": "only an approximation was there",
    "window": "window entry missing at the boundary",
    "tail": "cannot hit: last partial block",
    "deadline": "not told in time",
}


@dataclass(frozen=True)
class Table:
    """Cells are text already; the first `labels` columns are names, the others numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int = 1
    note: str = ""


@dataclass
class Page:
    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


def log_page(measured: Mapping[str, Any], title: str) -> Page:
    """The log's part of a report."""
    page = Page(title)
    log = measured["log"]
    spell = f"{log['files']} file{'s' if log['files'] != 1 else ''}, {format_bytes(log['bytes'])}"
    if not log["requests"]:
        page.facts.append(("log", f"{spell}; no request in this period"))
        return page
    span = f"{log['first_time'][:16].replace('T', ' ')} to {log['last_time'][:16].replace('T', ' ')} UTC"
    page.facts.append(("log", f"{spell}; {log['requests']:,} requests, {span} ({format_seconds(log['span_seconds'])})"))
    page.facts.append(("hit", f"{percent(measured['hit_ratio'])} of {count(measured['input_tokens'])} tokens, counted at lookup"))
    worst = sorted(MISS_REASONS, key=lambda reason: -measured["miss_tokens"][reason])
    shown = "   ".join(f"{_words(reason)} {percent(measured['miss_ratio'][reason])}" for reason in worst if measured["miss_tokens"][reason])
    page.facts.append(("missed", shown or "nothing"))
    rates = "   ".join(f"{format_days(each['retention_seconds'])} {percent(each['hit_ratio_at_least'])}" for each in measured["what_if"])
    page.facts.append(("keep for", f"{rates}   (hit rate at least, with room for all of it)"))
    p50, p99 = measured["lookup_p50_seconds"], measured["lookup_p99_seconds"]
    page.facts.append(("lookup", "-" if p50 is None else f"p50 {format_seconds(p50)}   p99 {format_seconds(p99)}   (within 2.2 %)"))
    page.tables += [_by(labels.split(","), rows) for labels, rows in measured["by"].items()]
    page.tables += [_misses(measured), _ages(measured), _what_if(measured)]
    page.doubts += _log_doubts(measured)
    return page


def _by(labels: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Table:
    reasons = [reason for reason in MISS_REASONS if any(row["miss_tokens"][reason] for row in rows)]
    cells = []
    for row in rows:
        names = [f"({row['others']:,} others)", *[""] * (len(labels) - 1)] if row["others"] else [printable(row[label]) for label in labels]
        points = [points_of(row["miss_ratio"][reason]) for reason in reasons]
        cells.append([*names, f"{row['requests']:,}", count(row["input_tokens"]), points_of(row["hit_ratio"]), *points])
    columns = [*labels, "requests", "tokens", "hit", *map(_words, reasons)]
    return Table(f"Hit rate by {' and '.join(labels)}", columns, cells, len(labels), "hit and misses in % of input tokens")


def _misses(measured: Mapping[str, Any]) -> Table:
    rows = [
        [_words(reason), REASON_WORDS[reason], count(measured["miss_tokens"][reason]), points_of(measured["miss_ratio"][reason])]
        for reason in sorted(MISS_REASONS, key=lambda reason: -measured["miss_tokens"][reason])
    ]
    return Table("Why tokens missed", ["reason", "the block", "tokens", "%"], rows, 2, "what to do about one: kvstore explain REASON")


def _ages(measured: Mapping[str, Any]) -> Table:
    rows = [
        [
            f"up to {AGE_WORDS[age]}" if AGES[age] else "older",
            count(each["tokens"]),
            points_of(each["share_of_reuse"]),
            points_of(each["cumulative_share_of_reuse"]),
            points_of(each["hit_ratio_at_least"]),
        ]
        for age, each in zip(AGES, measured["reuse_ages"], strict=True)
    ]
    note = "the longest time since last use of a token's extents: of what hit, expired or was evicted"
    return Table("Reuse ages", ["needed age", "tokens", "% of reuse", "running", "hit % at that retention"], rows, 1, note)


def _what_if(measured: Mapping[str, Any]) -> Table:
    days = [format_days(each["retention_seconds"]) for each in measured["what_if"]]

    def row(name: str, hit_ratio: float | None, rates: Sequence[Mapping[str, Any]]) -> list[str]:
        return [name, points_of(hit_ratio), *(points_of(each["hit_ratio_at_least"]) for each in rates)]

    rows = [row("all", measured["hit_ratio"], measured["what_if"])]
    rows += [row(printable(name), each["hit_ratio"], each["what_if"]) for name, each in measured["by_class"].items()]
    rows.append(["all, at most", "", *(points_of(each["hit_ratio_at_most"]) for each in measured["what_if"])])
    note = "hit % at least, with room for all; at most: as if every unknown token had been stored before"
    return Table("What if it were kept for ...", ["class", "now", *days], rows, 1, note)


def _log_doubts(measured: Mapping[str, Any]) -> list[str]:
    log = measured["log"]
    found = [
        f"what-if rates are at least: nodes remember what they dropped for up to {GHOST_DAYS} days; forgotten tokens count as misses",
        "hits are counted at lookup; what loads then failed to deliver is in the clients' metrics, not in the log",
    ]
    if log["span_seconds"] < 14 * 86400:
        found.append(f"the log covers {format_seconds(log['span_seconds'])}: reuse older than the cache itself cannot show")
    if log["skipped"]:
        found.append(f"{len(log['skipped'])} files could not be used")
    if log["rows_that_do_not_add_up"]:
        found.append(f"{log['rows_that_do_not_add_up']:,} rows whose hits and misses do not add up to their input tokens")
    if measured["age_unknown_tokens"]:
        found.append(f"{count(measured['age_unknown_tokens'])} tokens were stored once, with no age told: no what-if rate counts them")
    return found


def _words(reason: str) -> str:
    return reason.replace("_", " ")


def percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.1f} %"


def points_of(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.1f}"


def count(number: float | None) -> str:
    """ "999", "13.4 G": three digits or four, as tokens are told."""
    if number is None:
        return "-"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.1f} {unit}"
    return f"{number:,.0f}"


def format_days(seconds: float) -> str:
    return f"{seconds / 86400:g} d"


def printable(text: Any) -> str:
    """A name from outside as one short piece of a line: no control characters, which a terminal would obey."""
    if text in (None, ""):
        return "-"
    shown = "".join(letter if letter.isprintable() else "�" for letter in str(text))
    return shown if len(shown) <= 60 else shown[:59] + "…"
