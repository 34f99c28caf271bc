"""A client's numbers as Prometheus series: the CLIENT table of kvstore/metrics.py, read from Client.stats() when scraped.

A host process with a registry of its own adds `client_collector`; one without calls `serve_metrics`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest

from kvstore.client.client import Client
from kvstore.client.values import LoadOutcome
from kvstore.http import HttpServer, daemon_pages
from kvstore.metrics import CLASSES, CLIENT, OWNERS, TableCollector, Values, registry_of


def client_collector(client: Client) -> TableCollector:
    """For a registry that the host process has already."""
    return TableCollector(CLIENT, lambda values: read_client(client, values))


def client_registry(client: Client) -> CollectorRegistry:
    """A registry of this client alone, build_info included."""
    return registry_of(CLIENT, lambda values: read_client(client, values))


@contextlib.contextmanager
def serve_metrics(client: Client, port: int, host: str = "127.0.0.1") -> Iterator[int]:
    """/metrics, /livez and /readyz of this client over HTTP while the block runs; gives the port. Raises OSError where it cannot be had."""
    registry = client_registry(client)
    server = HttpServer(host, port, daemon_pages(dict, lambda: generate_latest(registry)))
    try:
        yield server.port
    finally:
        server.close()


def read_client(client: Client, values: Values) -> None:
    stats, counters = client.stats(), client.counters
    owner = OWNERS[0] if client.owner == bytes(16) else OWNERS[1]
    for name, tokens, extra in (
        ("kvstore_lookup_tokens_total", counters.lookup_tokens, ()),
        ("kvstore_hit_tokens_total", counters.hit_tokens, ("ssd",)),
        ("kvstore_delivered_tokens_total", counters.delivered_tokens, ()),
    ):
        for retention_class, count in list(tokens.items()):
            values.add(name, count, owner, retention_class if retention_class in CLASSES else "other", *extra)
    for kind in ("full", "partial", "miss", "error"):
        values.set("kvstore_lookups_total", stats[f"lookups_{kind}"], kind)
    for name, histogram in (
        ("kvstore_lookup_duration_seconds", counters.lookup_seconds),
        ("kvstore_load_duration_seconds", counters.load_seconds),
        ("kvstore_save_duration_seconds", counters.store_seconds),
    ):
        values.histogram(name, list(histogram.counts), histogram.total)
    values.set("kvstore_load_bytes_total", stats["load_bytes"], "ssd")
    for outcome in (LoadOutcome.TIMEOUT, LoadOutcome.MISSING, LoadOutcome.CORRUPT, LoadOutcome.UNREACHABLE):
        values.set("kvstore_load_fallbacks_total", counters.fallbacks[outcome.value], outcome.value)
    values.add("kvstore_load_fallbacks_total", counters.fallbacks[LoadOutcome.EXPIRED.value], LoadOutcome.TIMEOUT.value)
    values.set("kvstore_short_hit_tokens_total", stats["short_hit_tokens"])
    values.set("kvstore_save_bytes_total", stats["bytes_stored"])
    values.set("kvstore_save_extents_total", stats["extents_stored"] - stats["extents_degraded"], "whole")
    values.set("kvstore_save_extents_total", stats["extents_degraded"], "degraded")
    values.set("kvstore_save_extents_total", stats["withdrawals"], "withdrawn")
    values.set("kvstore_save_dropped_bytes_total", stats["bytes_dropped"], "full")
    values.set("kvstore_save_dropped_bytes_total", stats["bytes_failed"], "error")
    values.set("kvstore_shards_asked_total", stats["shards_asked"] - stats["parity_shards_asked"], "data")
    values.set("kvstore_shards_asked_total", stats["parity_shards_asked"] + stats["late_asked"], "parity")
    values.set("kvstore_late_requests_total", stats["late_asked"] - stats["late_asked_after_errors"], "late")
    values.set("kvstore_late_requests_total", stats["late_asked_after_errors"], "error")
    values.set("kvstore_decoded_planes_total", stats["decoded_pieces"])
    values.set("kvstore_bad_shards_total", stats["bad_shards"])
    values.set("kvstore_degraded_reads_total", stats["degraded_extents"])
    values.set("kvstore_agent_queued_requests", counters.loading, "load")
    values.set("kvstore_agent_queued_requests", stats["stores_open"], "save")
    values.set("kvstore_agent_pinned_bytes", stats["scratch_bytes"])
    values.set("kvstore_agent_connected_nodes", stats["connected_nodes"])
