"""Which health checks fire: a pure function of the map and what the nodes answered. The catalogue is kvstore/cli/codes.py."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.cli.cluster import NodeReport
from kvstore.cli.codes import HEALTH
from kvstore.cli.directories import DirectoryReport
from kvstore.cli.output import Health
from kvstore.cluster_view import by_label, group_lists, quantile, retention
from kvstore.clustermap import ClusterMap
from kvstore.live.scrape import ClientReport
from kvstore.placement import Placement
from kvstore.thresholds import CHECKSUM_ERRORS_ERR, FULL_RATIO, WEAR_ERR, WEAR_WARN, ZOMBIE_RATIO, disk_full, disk_full_words
from kvstore.units import format_bytes, format_seconds

CLOCK_SKEW_SECONDS: Final = 0.25
SLOW_TIMES: Final = 4.0
SLOW_SECONDS_MIN: Final = 0.005  # below it a node is only slow in comparison
SLOW_READS_MIN: Final = 100
SLOW_PEERS_MIN: Final = 3
_ORDER: Final = {"ERR": 0, "WARN": 1, "INFO": 2}


def evaluate(
    cluster_map: ClusterMap,
    reports: Sequence[NodeReport],
    earlier: Mapping[str, NodeReport] | None = None,
    *,
    clients: Sequence[ClientReport] = (),
    directories: Sequence[DirectoryReport] = (),
    map_age_seconds: float = 0.0,
) -> list[Health]:
    """Checks that fire now, worst first. `earlier` reports, by node id, let checks see movement; `map_age_seconds`: for how long the map
    has been as it is. For how long a fault has lasted and what is muted is not known here: HealthMemory.settle adds it."""
    found: list[Health] = []
    ids = {node.id for node in cluster_map.newest.nodes}
    members = [report for report in reports if report.node.id in ids]
    up = [report for report in members if report.up]
    down = [report for report in members if not report.up]
    found += _hosts(cluster_map, up, down)
    found += _losses(cluster_map)
    found += _down(cluster_map, down)
    lists = group_lists(cluster_map)
    found += _stripes(cluster_map, down, lists)
    for report in up:
        found += _node(cluster_map, report, (earlier or {}).get(report.node.id), map_age_seconds)
    found += _slow(up)
    found += _retention(cluster_map, members, lists)
    found += _versions(up)
    if (epoch := max((report.epoch for report in up), default=0)) > cluster_map.epoch:
        found.append(_health("MAP_BEHIND", "cluster", f"this map has epoch {cluster_map.epoch}, nodes have epoch {epoch}"))
    for client in clients:
        found += _client(client)
    found += [_health("DIRECTORY_DOWN", each.address, f"does not answer: {each.error}") for each in directories if not each.up]
    return sorted(found, key=_rank)


def _rank(check: Health) -> tuple[int, str, str]:
    return _ORDER[check.severity], check.code, check.subject


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
        text = f"{alive} {noun} up, whole writes need {needed}"
        return [_health("HOSTS_BELOW_STRIPE", "cluster", text, severity, count=needed - alive)]
    if alive == needed and down:
        return [_health("HOSTS_NO_MARGIN", "cluster", f"{alive} {noun} up: the next loss stops whole writes")]
    return []


def _losses(cluster_map: ClusterMap) -> list[Health]:
    losses = Placement(cluster_map).losses_survived()
    return [] if losses.full else [_health("LOSSES_NOT_SURVIVED", "cluster", str(losses))]


def _down(cluster_map: ClusterMap, down: Sequence[NodeReport]) -> list[Health]:
    severity = "ERR" if len({report.node.host for report in down}) > cluster_map.m else "WARN"
    return [_health("NODE_DOWN", report.node.id, f"does not answer: {report.error}", severity) for report in down]


def _stripes(cluster_map: ClusterMap, down: Sequence[NodeReport], lists: NDArray[np.int32]) -> list[Health]:
    """By placement groups: all of them, or an even sample of many."""
    if not down:
        return []
    missing = np.isin(lists, [report.node.ordinal for report in down]).sum(axis=1)
    degraded, lost = int(((missing > 0) & (missing <= cluster_map.m)).sum()), int((missing > cluster_map.m).sum())
    found, of = [], f"of {len(lists):,} placement groups"
    if degraded:
        text = f"{degraded:,} {of} miss {'a shard' if missing.max() == 1 else 'shards'}"
        found.append(_health("STRIPE_DEGRADED", "cluster", text, count=degraded))
    if lost:
        found.append(_health("STRIPE_LOST", "cluster", f"{lost:,} {of} cannot be read: more than {cluster_map.m} nodes down", count=lost))
    return found


def _node(cluster_map: ClusterMap, report: NodeReport, earlier: NodeReport | None, map_age_seconds: float) -> list[Health]:
    found = []
    name = report.node.id
    if report.epoch < cluster_map.epoch:
        text = f"at {report.epoch}, cluster {cluster_map.epoch}"
        found.append(_health("NODE_EPOCH_BEHIND", name, text, lasted_seconds=map_age_seconds))
    if report.clock_offset_seconds is not None:
        # Half the flight is the most that the path itself can account for.
        certain = abs(report.clock_offset_seconds) - (report.answer_seconds or 0.0) / 2
        if certain > CLOCK_SKEW_SECONDS:
            found.append(_health("CLOCK_SKEW", name, f"{report.clock_offset_seconds * 1000:+.0f} ms off (limit 250 ms)"))
    bad = report.values.get('kvstore_disk_errors_total{kind="checksum"}', 0)
    if bad:
        severity = "ERR" if bad >= CHECKSUM_ERRORS_ERR else "WARN"
        found.append(_health("CHECKSUM_ERRORS", name, f"{bad:,.0f} bad shards since its start", severity, count=int(bad)))
    if (wear := report.values.get("kvstore_disk_wear_ratio", 0.0)) > WEAR_WARN:
        severity = "ERR" if wear > WEAR_ERR else "WARN"
        found.append(_health("DISK_WEAR", name, f"{100 * wear:.0f} % of its rated life used", severity, count=round(100 * wear)))
    if report.values.get('kvstore_index_starts_total{mode="rebuild"}'):
        found.append(_health("INDEX_REBUILT", name, report.index_start or "rebuilt at its start"))
    free = report.values.get("kvstore_disk_free_bytes")  # None: an older daemon
    if free is not None and (severity := disk_full(free, report.values.get('kvstore_disk_used_bytes{kind="freeing"}', 0))):
        found.append(_health("DISK_FULL", name, disk_full_words(severity, free), severity))
    if _eviction_stalled(report, earlier):
        refused = _refused_for_space(report)
        found.append(_health("EVICTION_STALLED", name, f"full, {refused:,.0f} writes refused, nothing evicted"))
    if _own_word(report, "NODE_FLAPPING"):
        starts = report.values.get("kvstore_node_starts_total", 0)
        found.append(_health("NODE_FLAPPING", name, f"up for {format_seconds(report.uptime_seconds)}, start number {starts:.0f}"))
    freeing, lost = (report.values.get(f'kvstore_disk_used_bytes{{kind="{kind}"}}', 0) for kind in ("freeing", "zombie"))
    if report.capacity_bytes and freeing + lost > ZOMBIE_RATIO * report.capacity_bytes:
        lasted = HEALTH["ZOMBIE_BYTES"].for_seconds if _own_word(report, "ZOMBIE_BYTES") else 0.0
        share = f"{100 * (freeing + lost) / report.capacity_bytes:.1f} % (limit 2 %)"
        text = f"{format_bytes(lost)} that nothing accounts for, {format_bytes(freeing)} not given back yet: {share}"
        found.append(_health("ZOMBIE_BYTES", name, text, lasted_seconds=lasted))
    return found


def _own_word(report: NodeReport, code: str) -> bool:
    """What the node found out about itself: kvstore/server/selfcheck.py."""
    return any(report.values.get(f'kvstore_health_check{{code="{code}",severity="{severity}"}}') for severity in _ORDER)


def read_p99_seconds(report: NodeReport) -> float | None:
    """Of the last five minutes; None where there were too few READ requests to tell."""
    from kvstore.metrics import LATENCY_BOUNDS_SECONDS  # Prometheus takes 50 ms to import

    counts = report.traffic.read_counts if report.traffic else ()
    if sum(counts) < SLOW_READS_MIN:
        return None
    return quantile(list(zip((*LATENCY_BOUNDS_SECONDS, float("inf")), itertools.accumulate(counts), strict=True)), 0.99)


def _slow(up: Sequence[NodeReport]) -> list[Health]:
    p99s = {report.node.id: p99 for report in up if (p99 := read_p99_seconds(report)) is not None}
    found = []
    for name, p99 in p99s.items():
        peers = [other for peer, other in p99s.items() if peer != name]
        if len(peers) >= SLOW_PEERS_MIN and p99 > SLOW_SECONDS_MIN and p99 > SLOW_TIMES * (usual := statistics.median(peers)):
            found.append(_health("DISK_SLOW", name, f"read p99 {format_seconds(p99)}, the others {format_seconds(usual)}"))
    return found


def _versions(up: Sequence[NodeReport]) -> list[Health]:
    """Mixed since the newest of the versions came up; its oldest daemon has run for that long."""
    longest: dict[str, float] = {}
    for report in up:
        longest[report.version] = max(longest.get(report.version, 0.0), report.uptime_seconds)
    if len(longest) < 2:
        return []
    text = f"versions {', '.join(sorted(longest))}"
    return [_health("VERSION_MIXED", "cluster", text, lasted_seconds=min(longest.values()), count=len(longest))]


def _client(client: ClientReport) -> list[Health]:
    found = []
    hits = by_label(client.values, "kvstore_hit_tokens_total", "owner")
    for owner, tokens in by_label(client.values, "kvstore_lookup_tokens_total", "owner").items():
        if tokens and not hits.get(owner):
            found.append(_health("NAMESPACE_ZERO_HIT", f"{client.url} {owner}", f"{tokens:,.0f} tokens looked up, not one hit"))
    return found


def _retention(cluster_map: ClusterMap, reports: Sequence[NodeReport], lists: NDArray[np.int32]) -> list[Health]:
    return [
        _health("RETENTION_SHORT", each.retention_class, f"keeps {age_words(kept)}, contract {format_seconds(contract)}")
        for each in retention(cluster_map, reports, lists)
        if (kept := each.attained_seconds) is not None and (contract := each.contract_seconds) is not None and kept < contract
    ]


def age_words(seconds: float) -> str:
    """Ages are counted in time buckets, of a minute as a rule."""
    return format_seconds(seconds) if seconds else "less than a minute"


def _refused_for_space(report: NodeReport) -> float:
    return report.values.get('kvstore_node_requests_total{op="write",result="no_space"}', 0)


def _eviction_stalled(report: NodeReport, earlier: NodeReport | None) -> bool:
    full = report.capacity_bytes > 0 and report.used_bytes >= FULL_RATIO * report.capacity_bytes
    if not full or not _refused_for_space(report):
        return False
    if _own_word(report, "EVICTION_STALLED"):
        return True
    evicted = report.value("kvstore_evicted_bytes_total")
    return evicted == (earlier.value("kvstore_evicted_bytes_total") if earlier else 0)


def _health(code: str, subject: str, summary: str, severity: str | None = None, *, count: int = 1, lasted_seconds: float = 0.0) -> Health:
    known = HEALTH[code]
    return Health(code, severity or known.severity, subject, summary, known.fix, count=count, lasted_seconds=lasted_seconds)
