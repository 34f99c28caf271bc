"""One page that answers who buys cached tokens: where they sit, how long, how that is known, how fast, how exact, what may fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvstore.report.page import Page, Table, count, percent, printable
from kvstore.units import format_bytes, format_seconds

EXACT: Final = "exact: a block is given out as the bytes that were stored, each checked; an approximation only to requests that accept one"
HOW: Final = (
    "retention: every use younger than this can still be read, in every placement group, without the nodes that its code can spare; asked "
    "of the nodes now. Hits: tokens promised at lookup over tokens asked for"
)


def datasheet(
    measured: Mapping[str, Any] | None,
    cluster: Mapping[str, Any] | None,
    clients: Mapping[str, Any] | None,
    engines: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The answers as data; null is "not known", and nothing is guessed."""
    there = cluster or {}
    attained = {row["retention_class"]: row for row in there.get("retention") or ()}
    log = (measured or {}).get("log") or {}
    hits = measured if measured and measured["input_tokens"] else clients
    return {
        "where": None
        if not cluster
        else {
            "cluster": there["id"],
            "medium": "ssd",
            "nodes": there["nodes_total"],
            "hosts": there["hosts"],
            "k": there["k"],
            "m": there["m"],
            "capacity_bytes": (there["space"] or {}).get("capacity_bytes"),
        },
        "retention": [_promise(name, keep, attained.get(name), there["answers"]) for name, keep in there.get("promised", {}).items()],
        "how_measured": HOW,
        "hit_ratio": (hits or {}).get("hit_ratio"),
        "hit_ratio_from": None if not hits else "access log" if hits is measured else "client metrics",
        "log_first_time": log.get("first_time"),
        "log_last_time": log.get("last_time"),
        "ttft_p50_seconds": (engines or {}).get("ttft_p50_seconds"),
        "ttft_p99_seconds": (engines or {}).get("ttft_p99_seconds"),
        "lookup_p50_seconds": _either(clients, measured, "lookup_p50_seconds"),
        "lookup_p99_seconds": _either(clients, measured, "lookup_p99_seconds"),
        "load_p50_seconds": (clients or {}).get("load_p50_seconds"),
        "load_p99_seconds": (clients or {}).get("load_p99_seconds"),
        "exact": True,
        "refused_approximate_tokens": None if not measured else measured["miss_tokens"]["fidelity"],
        "hosts_losable_now": there.get("hosts_losable"),
        "nodes_losable_now": there.get("nodes_losable"),
        "nodes_up": there.get("nodes_up"),
    }


def _promise(name: str, keep: float, row: Mapping[str, Any] | None, answers: bool) -> dict[str, Any]:
    """`all_kept`: nothing of the class was dropped for room since the nodes started: the promise has held, however young they are."""
    attained = (row or {}).get("attained_seconds")
    return {
        "retention_class": name,
        "promised_seconds": keep,
        "attained_seconds": attained,
        "all_kept": None if not answers or row is None else attained is None,
        "oldest_seconds": (row or {}).get("oldest_seconds") or None,
        "met": None if not answers or row is None else attained is None or attained >= keep,
        "reached_contract_ratio": (row or {}).get("evicted_reached_contract_ratio"),
    }


def datasheet_page(sheet: Mapping[str, Any], losses: str | None) -> Page:
    where = sheet["where"]
    page = Page("Datasheet: " + (f"prompt cache of cluster {printable(where['cluster'])}" if where else "prompt cache"))
    if where:
        raw = "" if where["capacity_bytes"] is None else f", {format_bytes(where['capacity_bytes'])} raw"
        nodes = f"{where['nodes']} storage nodes on {where['hosts']} host{'s' if where['hosts'] != 1 else ''}"
        page.facts.append(("where", f"on SSDs of {nodes}, {where['k']}+{where['m']} coded{raw}; shared by all inference hosts"))
    else:
        page.facts.append(("where", "not known: no cluster was asked"))
    page.facts.append(("how", sheet["how_measured"]))
    span = f", {sheet['log_first_time'][:10]} to {sheet['log_last_time'][:10]}" if sheet["log_first_time"] else ""
    page.facts.append(
        (
            "hit",
            f"{percent(sheet['hit_ratio'])} of input tokens" + (f" ({sheet['hit_ratio_from']}{span})" if sheet["hit_ratio_from"] else ""),
        )
    )
    ttft = (
        "not known: no engine reports it" if sheet["ttft_p50_seconds"] is None else _pair(sheet, "ttft") + " (all requests, cached or not)"
    )
    page.facts.append(("first token", ttft))
    page.facts.append(("lookup", _pair(sheet, "lookup")))
    page.facts.append(("load", _pair(sheet, "load")))
    refused = sheet["refused_approximate_tokens"]
    page.facts.append(("exactness", EXACT + (f"; {count(refused)} tokens were refused for it" if refused else "")))
    page.facts.append(("may fail now", losses or "not known: no node was reached"))
    rows = [
        [
            printable(each["retention_class"]),
            format_seconds(each["promised_seconds"]),
            _attained(each),
            "-" if each["met"] is None else "yes" if each["met"] else "NO",
            percent(each["reached_contract_ratio"]),
        ]
        for each in sheet["retention"]
    ]
    if rows:
        note = "since last use; the last column: of what was dropped since the nodes started"
        page.tables.append(Table("Retention", ["class", "promised", "attained now", "met", "reached its time"], rows, 3, note))
    return page


def _attained(each: Mapping[str, Any]) -> str:
    if each["all_kept"] is None:
        return "-"
    oldest = "" if each["oldest_seconds"] is None else f", oldest {format_seconds(each['oldest_seconds'])}"
    return f"all kept{oldest}" if each["all_kept"] else format_seconds(each["attained_seconds"])


def _pair(sheet: Mapping[str, Any], name: str) -> str:
    p50, p99 = sheet[f"{name}_p50_seconds"], sheet[f"{name}_p99_seconds"]
    return "not known" if p50 is None else f"p50 {format_seconds(p50)}   p99 {format_seconds(p99)}"


def _either(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None, name: str) -> Any:
    value = (first or {}).get(name)
    return value if value is not None else (second or {}).get(name)
