"""A client's numbers as Prometheus series: the CLIENT table of kvstore/metrics.py, read from Client.stats() when scraped.

A host process with a registry of its own adds `client_collector`; one without calls `serve_metrics`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest

from kvstore.client.agent.ram import RamTier
from kvstore.client.client import Client
from kvstore.client.values import LoadOutcome
from kvstore.http import HttpServer, daemon_pages
from kvstore.metrics import CLASSES, CLIENT, Metric, TableCollector, Values, registry_of


def client_collector(client: Client) -> TableCollector:
    """For a registry that the host process has already."""
    return TableCollector(client_table(client), lambda values: read_client(client, values))


def client_registry(client: Client) -> CollectorRegistry:
    """A registry of this client alone, build_info included."""
    return registry_of(client_table(client), lambda values: read_client(client, values))


@contextlib.contextmanager
def serve_metrics(client: Client, port: int, host: str = "127.0.0.1") -> Iterator[int]:
    """/metrics, /livez and /readyz of this client over HTTP while the block runs; gives the port. Raises OSError where it cannot be had."""
    registry = client_registry(client)
    server = HttpServer(host, port, daemon_pages(dict, lambda: generate_latest(registry)))
    try:
        yield server.port
    finally:
        server.close()


def client_table(client: Client) -> list[Metric]:
    """The table with the closed lists of this process: one tenant, one model."""
    own = {"owner": (client.tenant,), "model_name": (client.config.model_name,)}
    return [
        replace(metric, labels={name: own.get(name, closed) for name, closed in metric.labels.items()}) if metric.labels else metric
        for metric in CLIENT
    ]


def _class(retention_class: str) -> str:
    return retention_class if retention_class in CLASSES else "other"


def read_client(client: Client, values: Values) -> None:
    stats, counters = client.stats(), client.counters
    owner, model = client.tenant, client.config.model_name
    for name, tokens, extra in (
        ("kvstore_lookup_tokens_total", counters.lookup_tokens, ()),
        ("kvstore_hit_tokens_total", counters.hit_tokens, ("ssd",)),
        ("kvstore_delivered_tokens_total", counters.delivered_tokens, ()),
    ):
        for retention_class, count in list(tokens.items()):
            values.add(name, count, owner, model, _class(retention_class), *extra)
    for (retention_class, reason), count in list(counters.missed_tokens.items()):
        values.add("kvstore_missed_tokens_total", count, owner, model, _class(retention_class), reason)
    ages: dict[str, tuple[list[int], float]] = {}
    for retention_class, (counts, total) in list(counters.reuse_ages.items()):
        before = ages.get(_class(retention_class), ([0] * len(counts), 0.0))
        ages[_class(retention_class)] = [a + b for a, b in zip(before[0], counts, strict=True)], before[1] + total
    for label, (counts, total) in ages.items():
        values.histogram("kvstore_reuse_age_seconds", counts, total, label)
    values.set("kvstore_unexplained_lookups_total", counters.unexplained_lookups)
    if client.access_log is not None:
        values.set("kvstore_access_log_rows_total", client.access_log.written, "written")
        values.set("kvstore_access_log_rows_total", client.access_log.dropped, "dropped")
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
    values.set("kvstore_save_extents_total", stats["extents_declined"], "declined")
    values.set("kvstore_save_compacted_bytes_total", stats["bytes_compacted"])
    values.set("kvstore_compacted_extents_total", stats["extents_compacted"])
    values.set("kvstore_save_dropped_bytes_total", stats["bytes_dropped"] + stats["bytes_unasked"], "full")
    values.set("kvstore_save_dropped_bytes_total", stats["bytes_declined"], "declined")
    values.set("kvstore_save_dropped_bytes_total", stats["bytes_busy"], "busy")
    values.set("kvstore_save_dropped_bytes_total", stats["bytes_failed"], "error")
    values.set("kvstore_shards_asked_total", stats["shards_asked"] - stats["parity_shards_asked"], "data")
    values.set("kvstore_shards_asked_total", stats["parity_shards_asked"] + stats["late_asked"], "parity")
    values.set("kvstore_late_requests_total", stats["late_asked"] - stats["late_asked_after_errors"], "late")
    values.set("kvstore_late_requests_total", stats["late_asked_after_errors"], "error")
    values.set("kvstore_decoded_planes_total", stats["decoded_pieces"])
    values.set("kvstore_bad_shards_total", stats["bad_shards"])
    for result in ("taken", "absent", "busy", "unsent"):
        values.set("kvstore_bad_shard_reports_total", stats[f"bad_shard_reports_{result}"], result)
    values.set("kvstore_degraded_reads_total", stats["degraded_extents"])
    values.set("kvstore_agent_queued_requests", counters.loading, "load")
    values.set("kvstore_agent_queued_requests", stats["stores_open"], "save")
    values.set("kvstore_agent_pinned_bytes", stats["scratch_bytes"])
    values.set("kvstore_agent_connected_nodes", stats["connected_nodes"])
    known, up, down = (int(stats[name]) for name in ("nodes_known", "nodes_well", "nodes_down"))
    for state, count in (("up", up), ("late", known - up - down), ("down", down)):
        values.set("kvstore_cluster_nodes", max(0, count), state)
    values.set("kvstore_load_transport_bytes_total", stats["read_bytes_tcp"], "tcp")
    values.set("kvstore_load_transport_bytes_total", stats["read_bytes_rdma"], "rdma")
    values.set("kvstore_rdma_fallbacks_total", stats["rdma_fallbacks"])
    values.set("kvstore_rdma_faults_total", stats["rdma_faults"])
    values.set("kvstore_rdma_queue_pairs", stats["rdma_queue_pairs"])
    values.set("kvstore_rdma_registered_bytes", stats["rdma_registered_bytes"])
    if client.ram is not None:
        read_ram(client.ram, values)


def read_ram(tier: RamTier, values: Values) -> None:
    stats = tier.stats()
    values.set("kvstore_agent_ram_asked_tokens_total", stats.asked_tokens)
    values.set("kvstore_agent_ram_hit_tokens_total", stats.hit_tokens)
    values.set("kvstore_agent_ram_extents_total", stats.admitted_extents, "admitted")
    values.set("kvstore_agent_ram_extents_total", stats.evicted_extents, "evicted")
    values.set("kvstore_agent_ram_bytes", stats.used_bytes, "used")
    values.set("kvstore_agent_ram_bytes", stats.capacity_bytes, "capacity")
