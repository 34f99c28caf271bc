"""Metrics of a window directory: its table, and how it is filled. Rules: kvstore/metrics.py. Text: docs/METRICS.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry

from kvstore.metrics import RESULTS, Metric, Values, read_front, registry_of

DIRECTORY_OPS: Final = ("hello", "register", "locate", "touch", "forget", "report", "status")
DIRECTORY_KEYS: Final = ("registered", "refused", "located", "found", "touched", "forgotten")

DIRECTORY: Final = (
    Metric(
        "kvstore_directory_requests_total", "counter", "Requests answered, by verb and outcome.", {"op": DIRECTORY_OPS, "result": RESULTS}
    ),
    Metric(
        "kvstore_directory_request_duration_seconds", "histogram", "Seconds from a request's arrival to its answer.", {"op": DIRECTORY_OPS}
    ),
    Metric("kvstore_directory_transfer_bytes_total", "counter", "Bytes on data connections.", {"direction": ("in", "out")}),
    Metric("kvstore_directory_connections", "gauge", "Data connections open now."),
    Metric(
        "kvstore_directory_connection_events_total",
        "counter",
        "Data connections, by what became of them.",
        {"event": ("opened", "refused", "idle_closed", "cut")},
    ),
    Metric("kvstore_directory_malformed_frames_total", "counter", "Frames that broke the protocol; their connections were closed."),
    Metric("kvstore_directory_keys_total", "counter", "Keys in requests, by what became of them.", {"what": DIRECTORY_KEYS}),
    Metric("kvstore_directory_entries", "gauge", "Pairs of a key and an agent that holds its window entry."),
    Metric(
        "kvstore_directory_gone_entries_total",
        "counter",
        "Entries gone: their time over, no room, or a fifth holder of one key.",
        {"reason": ("expired", "evicted", "displaced")},
    ),
    Metric("kvstore_directory_memory_bytes", "gauge", "Bytes of the table, and the most it may have.", {"kind": ("used", "limit")}),
    Metric(
        "kvstore_directory_agents",
        "gauge",
        "Agents known, by whether one of their connections is open.",
        {"state": ("connected", "silent")},
    ),
    Metric("kvstore_directory_hidden_agents", "gauge", "Silent agents that were reported, and are left out of answers."),
    Metric("kvstore_directory_reports_total", "counter", "Reports of agents that could not be reached."),
    Metric("kvstore_directory_superseded_total", "counter", "Requests refused because another start of their agent speaks for it."),
    Metric("kvstore_directory_lifetime_seconds", "gauge", "Seconds that an entry lives after its last use."),
)


def directory_registry(stats: Callable[[], Mapping[str, Any]]) -> CollectorRegistry:
    """A window directory's metrics, from DirectoryServer.stats."""
    return registry_of(DIRECTORY, lambda values: read_directory(stats(), values))


def read_directory(stats: Mapping[str, Any], values: Values) -> None:
    """DirectoryServer.stats() -> the directory table."""
    read_front(stats, "kvstore_directory", DIRECTORY_OPS, values)
    for what in DIRECTORY_KEYS:
        values.set("kvstore_directory_keys_total", stats[f"keys_{what}"], what)
    values.set("kvstore_directory_entries", stats["entries"])
    for reason in ("expired", "evicted", "displaced"):
        values.set("kvstore_directory_gone_entries_total", stats[reason], reason)
    values.set("kvstore_directory_memory_bytes", stats["memory_bytes"], "used")
    values.set("kvstore_directory_memory_bytes", stats["memory_max_bytes"], "limit")
    values.set("kvstore_directory_agents", stats["agents_connected"], "connected")
    values.set("kvstore_directory_agents", stats["agents"] - stats["agents_connected"], "silent")
    values.set("kvstore_directory_hidden_agents", stats["agents_hidden"])
    values.set("kvstore_directory_reports_total", stats["reports"])
    values.set("kvstore_directory_superseded_total", stats["superseded"])
    values.set("kvstore_directory_lifetime_seconds", stats["lifetime_ms"] / 1000)
