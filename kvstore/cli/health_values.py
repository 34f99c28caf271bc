"""What each health check looks at, as it is now, whether it fires or not: for `kvstore explain CODE`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.cli.cluster import NodeReport
from kvstore.cli.health import age_words, evaluate, read_p99_seconds
from kvstore.cluster_view import retention, total
from kvstore.clustermap import ClusterMap
from kvstore.placement import Placement
from kvstore.units import format_bytes, format_seconds

LINES_MAX: Final = 12
Reports = Sequence[NodeReport]


def values_now(code: str, cluster_map: ClusterMap, reports: Reports) -> list[str]:
    """What fires of this code, else the values that it was judged by."""
    firing = [f"{check.severity} {check.subject} {check.summary}" for check in evaluate(cluster_map, reports) if check.code == code]
    if firing:
        more = [f"and {len(firing) - LINES_MAX} more"] if len(firing) > LINES_MAX else []
        return firing[:LINES_MAX] + more
    look = _VALUES.get(code)
    return ["does not fire" + (f": {look(cluster_map, [r for r in reports if r.up])}" if look else "")]


def _hosts(cluster_map: ClusterMap, up: Reports) -> str:
    return f"{len({r.node.host for r in up})} of {len({n.host for n in cluster_map.newest.nodes})} hosts up"


def _answering(cluster_map: ClusterMap, up: Reports) -> str:
    return f"{len(up)} of {len(cluster_map.newest.nodes)} nodes answer"


def _losses(cluster_map: ClusterMap, up: Reports) -> str:
    return str(Placement(cluster_map).losses_survived())


def _epochs(cluster_map: ClusterMap, up: Reports) -> str:
    return f"map {cluster_map.epoch}, " + ", ".join(f"{count} nodes at {epoch}" for epoch, count in Counter(r.epoch for r in up).items())


def _fullest(cluster_map: ClusterMap, up: Reports) -> str:
    worst = max(up, key=lambda r: r.used_bytes / max(1, r.capacity_bytes))
    return f"the fullest is {worst.node.id} with {100 * worst.used_bytes / max(1, worst.capacity_bytes):.1f} %"


def _least_free(cluster_map: ClusterMap, up: Reports) -> str:
    known = [(r.values["kvstore_disk_free_bytes"], r.node.id) for r in up if "kvstore_disk_free_bytes" in r.values]
    return f"the least is free on {min(known)[1]}: {format_bytes(min(known)[0])}" if known else "no node tells: older daemons"


def _kept(cluster_map: ClusterMap, up: Reports) -> str:
    found = retention(cluster_map, up)
    return (
        ", ".join(
            f"{each.retention_class} {'all' if each.attained_seconds is None else age_words(each.attained_seconds)}"
            + (f" of {format_seconds(each.contract_seconds)}" if each.contract_seconds else "")
            for each in found
        )
        or "nothing is held"
    )


def _worst(metric: str, unit: str, **labels: str) -> Callable[[ClusterMap, Reports], str]:
    def look(cluster_map: ClusterMap, up: Reports) -> str:
        worst = max(up, key=lambda r: total(r.values, metric, **labels))
        value = total(worst.values, metric, **labels)
        shown = format_bytes(value) if unit == "bytes" else f"{value:.0f} {unit}"
        return f"most on {worst.node.id}: {shown}" if value else f"no {unit} on any node"

    return look


def _skew(cluster_map: ClusterMap, up: Reports) -> str:
    offsets = [(abs(r.clock_offset_seconds), r.node.id) for r in up if r.clock_offset_seconds is not None]
    return f"most on {max(offsets)[1]}: {1000 * max(offsets)[0]:.1f} ms" if offsets else "no node tells its clock"


def _versions(cluster_map: ClusterMap, up: Reports) -> str:
    return ", ".join(f"{count} nodes run {name}" for name, count in Counter(r.version for r in up).items())


def _starts(cluster_map: ClusterMap, up: Reports) -> str:
    youngest = min(up, key=lambda r: r.uptime_seconds)
    return f"the last to start was {youngest.node.id}, {format_seconds(youngest.uptime_seconds)} ago"


def _wear(cluster_map: ClusterMap, up: Reports) -> str:
    known = [(r.values["kvstore_disk_wear_ratio"], r.node.id) for r in up if "kvstore_disk_wear_ratio" in r.values]
    return f"most on {max(known)[1]}: {100 * max(known)[0]:.0f} %" if known else "no disk tells: no smartctl, or no right to ask"


def _p99s(cluster_map: ClusterMap, up: Reports) -> str:
    known = sorted((p99, r.node.id) for r in up if (p99 := read_p99_seconds(r)) is not None)
    if not known:
        return "fewer than 100 reads a node in the last five minutes"
    return f"read p99 from {format_seconds(known[0][0])} to {format_seconds(known[-1][0])} ({known[-1][1]})"


def _directories(cluster_map: ClusterMap, up: Reports) -> str:
    return f"{len(cluster_map.directories)} in the map, which kvstore status asks"


_VALUES: Final[dict[str, Callable[[ClusterMap, Reports], str]]] = {
    "HOSTS_BELOW_STRIPE": _hosts,
    "HOSTS_NO_MARGIN": _hosts,
    "LOSSES_NOT_SURVIVED": _losses,
    "NODE_DOWN": _answering,
    "STRIPE_DEGRADED": _answering,
    "STRIPE_LOST": _answering,
    "NODE_EPOCH_BEHIND": _epochs,
    "MAP_BEHIND": _epochs,
    "EVICTION_STALLED": _fullest,
    "RETENTION_SHORT": _kept,
    "CHECKSUM_ERRORS": _worst("kvstore_disk_errors_total", "bad shards", kind="checksum"),
    "ZOMBIE_BYTES": _worst("kvstore_disk_used_bytes", "bytes", kind="zombie"),
    "INDEX_REBUILT": _worst("kvstore_index_starts_total", "rebuilds", mode="rebuild"),
    "CLOCK_SKEW": _skew,
    "VERSION_MIXED": _versions,
    "NODE_FLAPPING": _starts,
    "DISK_SLOW": _p99s,
    "DISK_FULL": _least_free,
    "DISK_WEAR": _wear,
    "DIRECTORY_DOWN": _directories,
}
