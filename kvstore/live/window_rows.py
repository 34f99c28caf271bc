"""Rows of window directories and of agents, for a frame. What they counted is of the window that the caller keeps, under a label `of`:
the directory's address, the agent's URL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from kvstore.cli.directories import DirectoryReport
from kvstore.live.counts import Counts, joined, split
from kvstore.live.scrape import ClientReport
from kvstore.units import format_bytes

Data = dict[str, Any]

_KEPT: Final = ("kvstore_window_takes_total", "kvstore_agent_ram_asked_tokens_total", "kvstore_agent_ram_hit_tokens_total")
_LASTING: Final = ("entries", "agents", "memory_bytes", "memory_max_bytes")  # of a directory's answer
_NO_COUNTERS: Final = (*_LASTING, "lifetime_ms", "uptime_ms")
_FACTS: Final = (
    "workers", "pinned_bytes", "memory_bytes", "ram_used_bytes", "ram_capacity_bytes", "window_entries", "window_bytes",
    "window_capacity_bytes",
)  # fmt: skip


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def directory_counters(report: DirectoryReport) -> dict[str, float]:
    """What it counted since its start, as samples."""
    if report.status is None:
        return {}
    return {f"{name}_total": float(value) for name, value in asdict(report.status).items() if name not in _NO_COUNTERS}


def kept_counters(url: str, added: Mapping[str, float]) -> dict[str, float]:
    """Of what a client or a directory counted, what rows need, labelled with whose it is."""
    found = {}
    for key, value in added.items():
        name, labels = split(key)
        if value and (name in _KEPT or not name.startswith("kvstore_")):
            found[joined(name, {**labels, "of": url})] = value
    return found


def directory_row(report: DirectoryReport, window: Counts, seconds: float, age_seconds: float | None) -> Data:
    """`seconds`: of the window; 0: one look, which knows no rates."""
    of, status = report.address, report.status

    def per_second(*names: str) -> float | None:
        return sum(window.sum(f"{name}_total", of=of) for name in names) / seconds if seconds > 0 and status is not None else None

    return {
        "address": of,
        "state": "up" if report.up else "down",
        "error": report.error or None,
        "age_seconds": age_seconds,  # of the last answer; null: none yet
        "uptime_seconds": status.uptime_ms / 1000 if status else None,
        **{name: getattr(status, name) if status else None for name in _LASTING},
        "registered_per_second": per_second("keys_registered"),
        "located_per_second": per_second("keys_located"),
        "found_ratio": _ratio(window.sum("keys_found_total", of=of), window.sum("keys_located_total", of=of)),
        "lost_per_second": per_second("evicted", "displaced"),  # before their time: no room, or a fifth holder
    }


def is_agent(values: Mapping[str, float]) -> bool:
    """Whether a client's page is that of an agent: a process of its own, or one in an engine."""
    return "kvstore_window_entries" in values


def agent_row(client: ClientReport, window: Counts, age_seconds: float | None) -> Data:
    """`workers`, `pinned_bytes`, `memory_bytes` null: it is no process of its own. Ratios null: nothing was asked for."""
    of, now = client.url, Counts(client.values)
    ready = now.by_name("kvstore_agent_ready")
    found = {where: window.sum("kvstore_window_takes_total", of=of, where=where) for where in ("own", "peer", "missing")}
    asked = sum(found.values())
    ram, hit = (window.sum(f"kvstore_agent_ram_{word}_tokens_total", of=of) for word in ("asked", "hit"))
    row: Data = {
        "url": of,
        "state": "down" if not client.up else "draining" if ready == 0 else "up",
        "error": client.error or None,
        "age_seconds": age_seconds,
        "windows_asked": asked,
        "window_hit_ratio": _ratio(asked - found["missing"], asked),
        "window_peer_ratio": _ratio(found["peer"], asked),
        "ram_hit_ratio": _ratio(hit, ram),
    }
    if not client.up:
        return {**row, **dict.fromkeys(_FACTS)}
    facts: Data = {
        "workers": now.by_name("kvstore_agent_workers"),
        "pinned_bytes": now.by_name("kvstore_agent_memory_bytes", kind="pinned"),
        "memory_bytes": now.by_name("kvstore_agent_memory_bytes", kind="capacity"),
        "ram_used_bytes": now.by_name("kvstore_agent_ram_bytes", kind="used"),
        "ram_capacity_bytes": now.by_name("kvstore_agent_ram_bytes", kind="capacity"),
        "window_entries": now.by_name("kvstore_window_entries"),
        "window_bytes": now.by_name("kvstore_window_bytes", kind="used"),
        "window_capacity_bytes": now.by_name("kvstore_window_bytes", kind="capacity"),
    }
    assert tuple(facts) == _FACTS
    return {**row, **facts}


def agents_since_start(clients: Sequence[ClientReport]) -> list[Data]:
    """Rows of the agents among them, from one look: what they counted is since their start."""
    return [agent_row(each, Counts(kept_counters(each.url, each.values)), None) for each in clients if is_agent(each.values)]


def agents_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """ "2 agents   5 workers   81 window entries, 1.2 GB   93.1 % of 4,201 found"."""

    def total(values: Iterable[float | None]) -> float:
        return sum(value or 0 for value in values)

    draining = sum(row["state"] == "draining" for row in rows)
    text = f"{len(rows)} agent{'s' if len(rows) != 1 else ''}" + (f", {draining} draining" if draining else "")
    if any(row["workers"] is not None for row in rows):
        workers = total(row["workers"] for row in rows)
        text += f"   {workers:,.0f} worker{'s' if workers != 1 else ''}"
    entries, size = (total(row[name] for row in rows) for name in ("window_entries", "window_bytes"))
    asked = total(row["windows_asked"] for row in rows)
    hits = total(row["windows_asked"] * (row["window_hit_ratio"] or 0) for row in rows)
    text += f"   {entries:,.0f} window entries, {format_bytes(size)}"
    return text + (f"   {100 * hits / asked:.1f} % of {asked:,.0f} found" if asked else "")
