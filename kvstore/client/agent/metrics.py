"""An agent's numbers as Prometheus series: its client's, and the tables WINDOW and PEER of kvstore/metrics.py, read when scraped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest

from kvstore.client.agent.agent import Agent
from kvstore.client.agent.inbox import HandoffInbox
from kvstore.client.metrics import client_table, read_client
from kvstore.http import HttpServer, daemon_pages
from kvstore.metrics import (
    HANDOFF_EVENTS,
    HANDOFF_OUTCOMES,
    PEER,
    WINDOW,
    WINDOW_FETCHES,
    WINDOW_PLACES,
    TableCollector,
    Values,
    registry_of,
)


def agent_collector(agent: Agent) -> TableCollector:
    """For a registry that the host process has already."""
    return TableCollector([*client_table(agent.client), *WINDOW, *PEER], lambda values: read_agent(agent, values))


def agent_registry(agent: Agent) -> CollectorRegistry:
    """A registry of this agent and its client, build_info included."""
    return registry_of([*client_table(agent.client), *WINDOW, *PEER], lambda values: read_agent(agent, values))


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
    read_peers(agent, values)


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


def read_peers(agent: Agent, values: Values) -> None:
    given, server = agent.peers.stats(), agent.server
    for outcome in HANDOFF_OUTCOMES:
        values.set("kvstore_handoffs_sent_total", given.get(f"handoff_{outcome}", 0), outcome)
    values.set("kvstore_handoff_sent_bytes_total", given.get("handoff_bytes", 0))
    values.set("kvstore_peer_connections", given["connections"], "here")
    if server is None:
        return
    served = server.stats()
    values.set("kvstore_peer_connections", served["connections"], "there")
    for reason in ("idle", "cut", "refused"):
        values.set("kvstore_peer_closed_connections_total", served.get(reason, 0), reason)
    values.set("kvstore_handoff_received_bytes_total", served.get("part_bytes_taken", 0))
    if isinstance(server.handoffs, HandoffInbox):
        inbox = server.handoffs.stats()
        for event in HANDOFF_EVENTS:
            values.set("kvstore_handoffs_received_total", inbox.get(event, 0), event)
        values.set("kvstore_handoff_corrupt_parts_total", inbox.get("corrupt_parts", 0))
        values.set("kvstore_handoff_arrivals", inbox["arrivals"])
        values.set("kvstore_handoff_memory_bytes", inbox["used_bytes"], "used")
        values.set("kvstore_handoff_memory_bytes", inbox["allocated_bytes"], "allocated")
        values.set("kvstore_handoff_memory_bytes", server.handoffs.capacity_bytes, "capacity")
