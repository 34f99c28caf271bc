"""The figures of a log: one pass makes a small table of sums by day, class, tenant and model, another counts latencies."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvstore.metrics import MISS_REASONS
from kvstore.report.database import Database
from kvstore.report.schema import AGE_COLUMNS, AGES, DAY, MISS_COLUMNS, TOKEN_COLUMNS

WHAT_IF_DAYS: Final = (1, 3, 7, 14)
BY: Final = {"day": "day", "class": "retention_class", "tenant": "tenant", "model": "model"}
ROWS_MAX: Final = 20  # of a table by labels; with days among them DAY_ROWS_MAX
DAY_ROWS_MAX: Final = 400
_LATENCY_STEPS: Final = 16  # buckets for each doubling of a latency: quantiles are right within 2.2 %
_SUMS: Final = ("requests", "bad_rows", *TOKEN_COLUMNS)


def measure(database: Database, by: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Everything the log alone tells; `by` names the tables, each by one or more of BY."""
    database.select(_cube())
    total = _total(database)
    classes = _grouped(database, ("class",))
    first, last = database.select("select min(first_ms), max(last_ms) from cube")[0]
    return {
        "log": {
            "files": len(database.files.paths),
            "bytes": database.files.bytes,
            "skipped": [{"path": str(each.path), "cause": each.cause} for each in database.files.skipped],
            "since": time_text(database.period.since_ms),
            "until": time_text(database.period.until_ms),
            "first_time": time_text(first),
            "last_time": time_text(last),
            "span_seconds": None if first is None else (last - first) / 1000,
            "requests": total["requests"],
            "rows_that_do_not_add_up": total["bad_rows"],
        },
        **_rates(total),
        "age_unknown_tokens": _age_unknown(total),
        "lookup_p50_seconds": _quantile(database, 0.5),
        "lookup_p99_seconds": _quantile(database, 0.99),
        "reuse_ages": reuse_ages(total),
        "what_if": what_if(total),
        "by_class": {str(row["class"]): _class(row) for row in classes},
        "by": {",".join(labels): [_labelled(row, labels) for row in _grouped(database, labels, total)] for labels in by},
    }


def reuse_ages(sums: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each age column: its tokens, and what all up to it are of all reuse and of all input."""
    reuse = sum(sums[column] for column in AGE_COLUMNS)
    found, running = [], 0
    for (_, bound), column in zip(AGES.items(), AGE_COLUMNS, strict=True):
        running += sums[column]
        found.append(
            {
                "up_to_seconds": bound,
                "tokens": sums[column],
                "share_of_reuse": sums[column] / reuse if reuse else None,
                "cumulative_share_of_reuse": running / reuse if reuse else None,
                "hit_ratio_at_least": running / sums["input_tokens"] if sums["input_tokens"] and bound else None,
            }
        )
    return found


def what_if(sums: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The hit rate at some days of retention. At most: as if every unknown token had been stored and only forgotten."""
    found = []
    tokens = sums["input_tokens"]
    for days in WHAT_IF_DAYS:
        served = sum(sums[column] for column, bound in zip(AGE_COLUMNS, AGES.values(), strict=True) if bound and bound <= days * DAY)
        found.append(
            {
                "retention_seconds": days * DAY,
                "hit_tokens_at_least": served,
                "hit_ratio_at_least": served / tokens if tokens else None,
                "hit_ratio_at_most": (served + sums["miss_unknown"]) / tokens if tokens else None,
            }
        )
    return found


def time_text(milliseconds: int | None) -> str | None:
    if milliseconds is None:
        return None
    at = datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC)
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")


def _cube() -> str:
    sums = ", ".join(f"sum({column})::ubigint as {column}" for column in TOKEN_COLUMNS)
    parts = " + ".join(f"{column}::bigint" for column in ("hit_tokens", *MISS_COLUMNS))
    return f"""
        create or replace temp table cube as
        select epoch_ms(time) // {DAY * 1000} as day, retention_class, tenant, model, count(*) as requests,
               min(epoch_ms(time)) as first_ms, max(epoch_ms(time)) as last_ms,
               count_if(input_tokens::bigint <> {parts}) as bad_rows, {sums}
        from rows_of_log group by all"""


def _total(database: Database) -> dict[str, int]:
    row = database.select(f"select {', '.join(f'coalesce(sum({name}), 0)' for name in _SUMS)} from cube")[0]
    return dict(zip(_SUMS, map(int, row), strict=True))


def _grouped(database: Database, labels: Sequence[str], total: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
    """The largest groups, days in their order; with `total`, a last row for the others (labels None, `others`: how many)."""
    columns = ", ".join(BY[label] for label in labels)
    limit = DAY_ROWS_MAX if "day" in labels else ROWS_MAX
    sums = ", ".join(f"sum({name}) as {name}" for name in _SUMS)
    largest = f"""select {columns}, {sums}, count(*) over () as groups from cube
                  group by {columns} order by sum(input_tokens) desc, {columns} limit {limit}"""
    order = f"order by day, input_tokens desc, {columns}" if "day" in labels else f"order by input_tokens desc, {columns}"
    rows = database.select(f"with largest as ({largest}) select * from largest {order}")
    found: list[dict[str, Any]] = []
    for row in rows:
        named = dict(zip(labels, row, strict=False))
        if "day" in named and named["day"] is not None:
            named["day"] = (time_text(int(named["day"]) * DAY * 1000) or "")[:10]
        found.append({**named, **dict(zip(_SUMS, map(int, row[len(labels) : -1]), strict=True))})
    if total and rows and rows[0][-1] > len(rows):
        rest = {name: total[name] - sum(each[name] for each in found) for name in _SUMS}
        found.append({**dict.fromkeys(labels), **rest, "others": int(rows[0][-1]) - len(rows)})
    return found


def _labelled(row: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    return {
        **{label: row[label] for label in labels},
        "others": row.get("others"),
        "requests": row["requests"],
        **_rates(row),
        "what_if": what_if(row),
    }


def _rates(sums: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": sums["input_tokens"],
        "hit_tokens": sums["hit_tokens"],
        "hit_ratio": _ratio(sums, "hit_tokens"),
        "miss_tokens": {reason: sums[f"miss_{reason}"] for reason in MISS_REASONS},
        "miss_ratio": {reason: _ratio(sums, f"miss_{reason}") for reason in MISS_REASONS},
    }


def _class(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"hit_ratio": _ratio(row, "hit_tokens"), "what_if": what_if(row), "reuse_ages": reuse_ages(row)}


def _ratio(sums: Mapping[str, Any], name: str) -> float | None:
    return sums[name] / sums["input_tokens"] if sums["input_tokens"] else None


def _age_unknown(sums: Mapping[str, int]) -> int:
    """Tokens that were stored once and whose age is not in the columns."""
    return max(0, sums["hit_tokens"] + sums["miss_expired"] + sums["miss_evicted"] - sum(sums[column] for column in AGE_COLUMNS))


def _quantile(database: Database, q: float) -> float | None:
    """By buckets of which there are 16 a doubling: exact sorting would need all rows at once."""
    database.select(
        f"""create temp table if not exists latencies as
            select round(log2(lookup_seconds) * {_LATENCY_STEPS})::integer as step, count(*) as requests from rows_of_log
            where lookup_seconds > 0 and isfinite(lookup_seconds) group by 1"""
    )
    rows = database.select("select step, requests from latencies order by step")
    rank, running = q * sum(count for _, count in rows), 0
    for step, count in rows:
        running += count
        if running >= rank:
            return float(2.0 ** (step / _LATENCY_STEPS))
    return None
