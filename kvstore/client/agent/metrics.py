"""An agent's numbers as Prometheus series: its client's, and the WINDOW table of kvstore/metrics.py, read when scraped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest

from kvstore.client.agent.agent import Agent
from kvstore.client.metrics import client_table, read_client
from kvstore.http import HttpServer, daemon_pages
from kvstore.metrics import WINDOW, WINDOW_FETCHES, WINDOW_PLACES, TableCollector, Values, registry_of


def agent_collector(agent: Agent) -> TableCollector:
    """For a registry that the host process has already."""
    return TableCollector([*client_table(agent.client), *WINDOW], lambda values: read_agent(agent, values))


def agent_registry(agent: Agent) -> CollectorRegistry:
    """A registry of this agent and its client, build_info included."""
    return registry_of([*client_table(agent.client), *WINDOW], lambda values: read_agent(agent, values))


@contextlib.contextmanager
def serve_metrics(agent: Agent, port: int, host: str = "127.0.0.1") -> Iterator[int]:
    """/metrics, /livez and /readyz of this agent over HTTP while the block runs; gives the port. Raises OSError where it cannot be had."""
    registry = agent_registry(agent)
    server = HttpServer(host, port, daemon_pages(dict, lambda: generate_latest(registry)))
    try:
        yield server.port
    finally:
        server.close()


def read_agent(agent: Agent, values: Values) -> None:
    read_client(agent.client, values)
    read_windows(agent, values)


def read_windows(agent: Agent, values: Values) -> None:
    counters, stats, fetches = agent.counters, agent.windows.stats(), agent.peers.stats()
    for where in WINDOW_PLACES:
        values.set("kvstore_window_lookups_total", counters.lookups[where], where)
        values.set("kvstore_window_takes_total", counters.takes[where], where)
    for kind in ("corrupt", "address"):
        values.set("kvstore_window_faults_total", counters.faults[kind], kind)
    values.histogram("kvstore_window_fetch_duration_seconds", list(counters.fetch_seconds.counts), counters.fetch_seconds.total)
    values.set("kvstore_window_fetched_bytes_total", counters.fetched_bytes)
    for result in WINDOW_FETCHES:
        values.set("kvstore_window_fetches_total", fetches.get(result, 0), result)
    if agent.server is not None:
        served = agent.server.stats()
        for result, name in (("sent", "windows_sent"), ("missing", "windows_missing"), ("busy", "busy")):
            values.set("kvstore_window_served_total", served.get(name, 0), result)
        values.set("kvstore_window_served_bytes_total", served.get("window_bytes_sent", 0))
    values.set("kvstore_window_kept_total", stats.kept, "kept")
    values.set("kvstore_window_kept_total", stats.refused, "refused")
    for reason, count in stats.dropped.items():
        values.set("kvstore_window_dropped_total", count, reason)
    values.set("kvstore_window_entries", stats.entries)
    values.set("kvstore_window_bytes", stats.entry_bytes, "used")
    values.set("kvstore_window_bytes", stats.allocated_bytes, "allocated")
    values.set("kvstore_window_bytes", agent.windows.capacity_bytes, "capacity")
    if agent.directory is not None:
        told = agent.directory.stats()
        for event in ("registered", "touched", "forgotten", "found", "missed"):
            values.set("kvstore_window_directory_keys_total", told[event], event)
        for reason in ("timeout", "unreachable", "refused", "protocol"):
            values.set("kvstore_window_directory_failures_total", told[f"failed_{reason}"], reason)
        values.set("kvstore_window_directory_failures_total", told["skipped"], "skipped")
