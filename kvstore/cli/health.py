"""Which health checks fire: a pure function of the map and what the nodes answered. The catalogue is kvstore/cli/codes.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kvstore.cli.cluster import NodeReport
from kvstore.cli.codes import HEALTH
from kvstore.cli.output import Health
from kvstore.cluster_view import retention
from kvstore.clustermap import ClusterMap
from kvstore.placement import Placement
from kvstore.units import format_seconds

CLOCK_SKEW_SECONDS: Final = 0.25
CHECKSUM_ERRORS_ERR: Final = 100  # from here on the disk repeats itself
FULL_RATIO: Final = 0.99
_ORDER: Final = {"ERR": 0, "WARN": 1, "INFO": 2}


def evaluate(cluster_map: ClusterMap, reports: Sequence[NodeReport], earlier: Mapping[str, NodeReport] | None = None) -> list[Health]:
    """Checks that fire now, worst first. `earlier` reports, by node id, let checks see movement."""
    found: list[Health] = []
    members = [report for report in reports if report.node in cluster_map.newest.nodes]
    up = [report for report in members if report.up]
    down = [report for report in members if not report.up]
    found += _hosts(cluster_map, up, down)
    found += _losses(cluster_map)
    found += _down(cluster_map, down)
    for report in up:
        found += _node(cluster_map, report, (earlier or {}).get(report.node.id))
    found += _retention(cluster_map, members)
    versions = sorted({report.version for report in up})
    if len(versions) > 1:
        found.append(_health("VERSION_MIXED", "cluster", f"versions {', '.join(versions)}"))
    return sorted(found, key=lambda check: (_ORDER[check.severity], check.code, check.subject))


def overall(health: Sequence[Health]) -> str:
    """ "OK", "WARN" or "ERR"; INFO does not change the colour, nor does what is muted."""
    severities = {check.severity for check in health if check.muted_until is None}
    return "ERR" if "ERR" in severities else "WARN" if "WARN" in severities else "OK"


def _hosts(cluster_map: ClusterMap, up: Sequence[NodeReport], down: Sequence[NodeReport]) -> list[Health]:
    """Where the map has hosts enough, hosts count; in smaller clusters, nodes."""
    needed = cluster_map.k + cluster_map.m
    known = {node.host for node in cluster_map.newest.nodes}
    by_host = len(known) >= needed
    alive = len({report.node.host for report in up}) if by_host else len(up)
    needed = needed if by_host else len(cluster_map.newest.nodes)
    noun = "hosts" if by_host else "nodes"
    if alive < needed:
        # Stores go on, degraded, down to k shards: only below that is the service lost.
        severity = "ERR" if alive < needed - cluster_map.m else "WARN"
        return [_health("HOSTS_BELOW_STRIPE", "cluster", f"{alive} {noun} up, whole writes need {needed}", severity)]
    if alive == needed and down:
        return [_health("HOSTS_NO_MARGIN", "cluster", f"{alive} {noun} up: the next loss stops whole writes")]
    return []


def _losses(cluster_map: ClusterMap) -> list[Health]:
    losses = Placement(cluster_map).losses_survived()
    return [] if losses.full else [_health("LOSSES_NOT_SURVIVED", "cluster", str(losses))]


def _down(cluster_map: ClusterMap, down: Sequence[NodeReport]) -> list[Health]:
    severity = "ERR" if len({report.node.host for report in down}) > cluster_map.m else "WARN"
    return [_health("NODE_DOWN", report.node.id, f"does not answer: {report.error}", severity) for report in down]


def _node(cluster_map: ClusterMap, report: NodeReport, earlier: NodeReport | None) -> list[Health]:
    found = []
    name = report.node.id
    if report.epoch < cluster_map.epoch:
        found.append(_health("NODE_EPOCH_BEHIND", name, f"at {report.epoch}, cluster {cluster_map.epoch}"))
    if report.clock_offset_seconds is not None:
        # Half the flight is the most that the path itself can account for.
        certain = abs(report.clock_offset_seconds) - (report.answer_seconds or 0.0) / 2
        if certain > CLOCK_SKEW_SECONDS:
            found.append(_health("CLOCK_SKEW", name, f"{report.clock_offset_seconds * 1000:+.0f} ms off (limit 250 ms)"))
    bad = report.values.get('kvstore_disk_errors_total{kind="checksum"}', 0)
    if bad:
        severity = "ERR" if bad >= CHECKSUM_ERRORS_ERR else "WARN"
        found.append(_health("CHECKSUM_ERRORS", name, f"{bad:,.0f} bad shards since its start", severity))
    if report.values.get('kvstore_index_starts_total{mode="rebuild"}'):
        found.append(_health("INDEX_REBUILT", name, report.index_start or "rebuilt at its start"))
    if _eviction_stalled(report, earlier):
        refused = _refused_for_space(report)
        found.append(_health("EVICTION_STALLED", name, f"full, {refused:,.0f} writes refused, nothing evicted"))
    return found


def _retention(cluster_map: ClusterMap, reports: Sequence[NodeReport]) -> list[Health]:
    return [
        _health("RETENTION_SHORT", each.retention_class, f"keeps {format_seconds(kept)}, contract {format_seconds(contract)}")
        for each in retention(cluster_map, reports)
        if (kept := each.attained_seconds) is not None and (contract := each.contract_seconds) is not None and kept < contract
    ]


def _refused_for_space(report: NodeReport) -> float:
    return report.values.get('kvstore_node_requests_total{op="write",result="no_space"}', 0)


def _eviction_stalled(report: NodeReport, earlier: NodeReport | None) -> bool:
    full = report.capacity_bytes > 0 and report.used_bytes >= FULL_RATIO * report.capacity_bytes
    if not full or not _refused_for_space(report):
        return False
    evicted = report.value("kvstore_evicted_bytes_total")
    return evicted == (earlier.value("kvstore_evicted_bytes_total") if earlier else 0)


def _health(code: str, subject: str, summary: str, severity: str | None = None) -> Health:
    known = HEALTH[code]
    return Health(code, severity or known.severity, subject, summary, known.fix)
