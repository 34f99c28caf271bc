"""The cluster as one thing, from what its nodes answered: retention attained, space, histograms merged. Pure functions over reports.

Retention. A node tells the latest use of anything that it dropped for room: every younger one is still there. An extent has a shard
on each of the k+m nodes of its placement group and can be read while k of them have it: of each group the (m+1)-th tightest node decides
(the third of twelve), and of the cluster the group that decides soonest. A node that does not answer keeps nothing. A node that dropped
nothing of a class for room sets no bound: what is gone there had outlived its class, or was its owner's over a cap. A
node whose data directory is younger than what others hold lost its disk: nothing from before is there.

A report is what `ask_nodes` of kvstore/cli/cluster.py gives; anything with these fields will do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.clustermap import EARLY_REASONS, ClusterMap, Node
from kvstore.placement import Placement

PACE_SECONDS: Final = 3600.0  # of looking on, after which any growth is a pace
PACE_SECONDS_MIN: Final = 60.0  # less says nothing
PACE_SHARE_MIN: Final = 0.01  # of the capacity, that has to come in between: a self-test alone is no pace
GROUPS_MAX: Final = 1 << 14  # looked at; of larger maps an even sample: the minimum is then of the sample
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')


class Growth(Protocol):
    """What a node's used bytes did in its last hours."""

    @property
    def seconds(self) -> float: ...
    @property
    def used_bytes(self) -> int: ...  # more than at the beginning; below 0: less
    @property
    def written_bytes(self) -> int: ...


class Report(Protocol):
    @property
    def node(self) -> Node: ...
    @property
    def up(self) -> bool: ...
    @property
    def values(self) -> Mapping[str, float]: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def growth(self) -> Growth | None: ...


# --- flat values: `name{label="value",...}` -> number, as Stats answers ---


def samples(values: Mapping[str, float], name: str) -> list[tuple[dict[str, str], float]]:
    """Every series of one metric: its labels, which are not to be changed, and its value."""
    front = name + "{"
    found = [(_labels(key), value) for key, value in values.items() if key.startswith(front)]
    return [({}, values[name]), *found] if name in values else found


@lru_cache(maxsize=1 << 16)  # all nodes have the same keys
def _labels(key: str) -> dict[str, str]:
    return dict(_LABEL.findall(key, key.index("{")))


def total(values: Mapping[str, float], name: str, **labels: str) -> float:
    """Sum over the series of one metric that carry these labels."""
    return sum(value for found, value in samples(values, name) if labels.items() <= found.items())


def by_label(values: Mapping[str, float], name: str, label: str, **labels: str) -> dict[str, float]:
    """Sums of one metric by one of its labels, over the series that carry `labels`."""
    sums: dict[str, float] = {}
    for found, value in samples(values, name):
        if label in found and labels.items() <= found.items():
            sums[found[label]] = sums.get(found[label], 0.0) + value
    return sums


def merged(several: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Values of several nodes added up, series by series; histograms, too: their buckets have the same bounds everywhere."""
    out: dict[str, float] = {}
    for values in several:
        for key, value in values.items():
            out[key] = out.get(key, 0.0) + value
    return out


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """What counters did between two looks at one process. Of a process that started anew in between give {} as `before`."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def buckets(values: Mapping[str, float], name: str, **labels: str) -> list[tuple[float, float]]:
    """(upper bound, cumulative count) of a histogram, in order, summed over the series that carry `labels`."""
    found: dict[float, float] = {}
    for edge, value in by_label(values, f"{name}_bucket", "le", **labels).items():
        bound = math.inf if edge == "+Inf" else float(edge)
        found[bound] = found.get(bound, 0.0) + value
    return sorted(found.items())


def quantile(buckets: Sequence[tuple[float, float]], q: float) -> float | None:
    """As PromQL's histogram_quantile: linear inside a bucket; the last finite bound beyond it. None without observations."""
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = q * buckets[-1][1]
    lower_bound = lower_count = 0.0
    for bound, count in buckets:
        if count >= rank:
            if bound == math.inf:
                return lower_bound
            return lower_bound + (bound - lower_bound) * (rank - lower_count) / max(count - lower_count, 1e-9)
        lower_bound, lower_count = bound, count
    return lower_bound


# --- retention ---


@dataclass(frozen=True, slots=True)
class NodeRetention:
    """One class on one node. `oldest_seconds`: since the last use of its oldest; 0: it holds nothing."""

    oldest_seconds: float
    dropped_early_bytes: int  # for room, before their time, since the node started
    told_seconds: float = 0.0  # every use younger than this is there; 0: nothing was dropped for room, or the node cannot tell

    @property
    def bound_seconds(self) -> float:
        """Every use younger than this survives here; infinite where nothing was dropped for room."""
        return self.told_seconds or (self.oldest_seconds if self.dropped_early_bytes else math.inf)


@dataclass(frozen=True, slots=True)
class ClassRetention:
    """One class in the cluster. `attained_seconds`: every use younger than this can still be read, in every group; None: no bound, nothing
    that matters was dropped for room. `p10`: the same in nine of ten groups."""

    retention_class: str
    contract_seconds: float | None
    attained_seconds: float | None
    attained_p10_seconds: float | None
    oldest_seconds: float  # of the node that keeps it the shortest, among those that hold any
    used_bytes: int
    evicted_bytes: int
    reached_bytes: int  # of them, those whose class's time since the last use was over
    early_bytes: int  # of them, those dropped for room
    groups: int  # looked at
    nodes: Mapping[str, NodeRetention]

    @property
    def short(self) -> bool:
        return self.attained_seconds is not None and self.contract_seconds is not None and self.attained_seconds < self.contract_seconds

    @property
    def reached_ratio(self) -> float | None:
        """Share of evicted bytes that reached their class's days."""
        return self.reached_bytes / self.evicted_bytes if self.evicted_bytes else None

    def data(self) -> dict[str, Any]:
        """For --json."""
        names = ("retention_class", "contract_seconds", "attained_seconds", "attained_p10_seconds", "oldest_seconds", "used_bytes")
        return {
            **{name: getattr(self, name) for name in names},
            "evicted_bytes": self.evicted_bytes,
            "evicted_early_bytes": self.early_bytes,
            "evicted_reached_contract_ratio": self.reached_ratio,
            "contract_met": None if self.contract_seconds is None else not self.short,
            "nodes": {name: node.oldest_seconds or None for name, node in self.nodes.items()},
        }


def group_lists(cluster_map: ClusterMap) -> NDArray[np.int32]:
    """(groups, k+m) node ordinals of the newest epoch; of large maps an even sample. Keep it: it changes with the map alone."""
    placement = Placement(cluster_map)
    if placement.pg_count <= GROUPS_MAX:
        return placement.table()
    return placement.lists_of(np.arange(0, placement.pg_count, placement.pg_count // GROUPS_MAX, dtype=np.uint64))


def node_retention(report: Report) -> dict[str, NodeRetention]:
    """By class."""
    early = merged(by_label(report.values, "kvstore_evicted_bytes_total", "retention_class", reason=reason) for reason in EARLY_REASONS)
    oldest = by_label(report.values, "kvstore_retention_seconds", "retention_class")
    told = by_label(report.values, "kvstore_retention_bound_seconds", "retention_class")
    names = sorted(oldest.keys() | early.keys() | told.keys())
    return {name: NodeRetention(oldest.get(name, 0.0), int(early.get(name, 0)), told.get(name, 0.0)) for name in names}


def retention(cluster_map: ClusterMap, reports: Sequence[Report], groups: NDArray[np.int32] | None = None) -> list[ClassRetention]:
    """Every class that is held, or was dropped, anywhere; by name."""
    lists = group_lists(cluster_map) if groups is None else groups
    up = [report for report in reports if report.up]
    summed = merged(report.values for report in up)
    contracts: dict[str, float] = {}
    for report in up:
        contracts |= {name: s for name, s in by_label(report.values, "kvstore_retention_contract_seconds", "retention_class").items() if s}
    used = by_label(summed, "kvstore_class_used_bytes", "retention_class")
    evicted = by_label(summed, "kvstore_evicted_bytes_total", "retention_class")
    reached = by_label(summed, "kvstore_evicted_contract_bytes_total", "retention_class", contract="kept")
    by_node = {report.node.id: node_retention(report) for report in up}
    nothing = NodeRetention(0.0, 0)
    found = []
    for name in sorted({name for classes in by_node.values() for name in classes}):
        nodes = {node: classes.get(name, nothing) for node, classes in by_node.items()}
        held = [node.oldest_seconds for node in nodes.values() if node.oldest_seconds]
        if not held and not evicted.get(name):
            continue
        bounds = {report.node.ordinal: nodes[report.node.id].bound_seconds for report in up}
        bounds |= _of_emptied(cluster_map, up, {report.node.ordinal: nodes[report.node.id].oldest_seconds for report in up}, bounds)
        lowest, p10 = _attained(cluster_map, bounds, lists)
        found.append(
            ClassRetention(
                retention_class=name,
                contract_seconds=contracts.get(name),
                attained_seconds=None if math.isinf(lowest) else lowest,
                attained_p10_seconds=None if math.isinf(p10) else p10,
                oldest_seconds=min(held, default=0.0),
                used_bytes=int(used.get(name, 0)),
                evicted_bytes=int(evicted.get(name, 0)),
                reached_bytes=int(reached.get(name, 0)),
                early_bytes=sum(node.dropped_early_bytes for node in nodes.values()),
                groups=len(lists),
                nodes=nodes,
            )
        )
    return found


def _of_emptied(
    cluster_map: ClusterMap, up: Sequence[Report], oldest: Mapping[int, float], bounds: Mapping[int, float]
) -> dict[int, float]:
    """Bounds of nodes whose data directory is younger than what is held by nodes that became members no sooner: they lost a disk. All of
    them get that of the latest such loss: what an earlier one left may have been used in between."""
    since: dict[int, int] = {}
    for number in sorted(cluster_map.epochs, reverse=True):
        since |= {node.ordinal: number for node in cluster_map.epochs[number].nodes}
    ages = {report.node.ordinal: report.values.get("kvstore_data_age_seconds", 0.0) for report in up}
    margin = 2 * cluster_map.bucket_seconds

    def is_emptied(ordinal: int, age: float) -> bool:
        return age > 0 and any(held > age + margin and since[other] >= since[ordinal] for other, held in oldest.items())

    emptied = {age for ordinal, age in ages.items() if is_emptied(ordinal, age)}
    return {ordinal: min(bounds[ordinal], min(emptied)) for ordinal, age in ages.items() if age in emptied}


def _attained(cluster_map: ClusterMap, bounds: Mapping[int, float], lists: NDArray[np.int32]) -> tuple[float, float]:
    """Minimum and lowest decile over the groups of the bound that the (m+1)-th tightest of each sets."""
    of_node = np.zeros(len(cluster_map.nodes))  # a node that does not answer keeps nothing
    of_node[list(bounds)] = list(bounds.values())
    deciding = np.sort(np.partition(of_node[lists], cluster_map.m, axis=1)[:, cluster_map.m])
    return float(deciding[0]), float(deciding[len(deciding) // 10])


# --- space ---


@dataclass(frozen=True, slots=True)
class Space:
    """Of all nodes that answered, parity included."""

    used_bytes: int
    capacity_bytes: int
    freeing_bytes: int  # dropped from the index, not yet given back
    zombie_bytes: int  # allocated, and nothing accounts for them
    index_bytes: int
    by_class: Mapping[str, int]
    by_owner: Mapping[str, int]
    growth_bytes_per_second: float | None  # None: nobody says yet
    written_bytes_per_second: float | None
    evicting: bool  # some node has begun to drop for room
    seconds_until_full: float | None  # of the nodes together, as they grow now; None: full and evicting, not growing, or too early to tell

    def data(self) -> dict[str, Any]:
        """For --json."""
        sizes = ("used_bytes", "capacity_bytes", "freeing_bytes", "zombie_bytes", "index_bytes")
        paces = ("growth_bytes_per_second", "written_bytes_per_second", "evicting", "seconds_until_full")
        listed = {"by_class": dict(self.by_class), "by_owner": dict(self.by_owner)}
        return {**{name: getattr(self, name) for name in (*sizes, *paces)}, **listed}


def space(reports: Sequence[Report]) -> Space:
    up = [report for report in reports if report.up]
    summed = merged(report.values for report in up)
    used, capacity = sum(report.used_bytes for report in up), sum(report.capacity_bytes for report in up)
    grown = [report.growth for report in up if report.growth is not None and report.growth.seconds > 0]
    growth = sum(each.used_bytes / each.seconds for each in grown) if grown else None
    written = sum(each.written_bytes / each.seconds for each in grown) if grown else None
    evicting = any(total(summed, "kvstore_evicted_bytes_total", reason=reason) for reason in EARLY_REASONS)
    until = (capacity - used) / growth if growth and growth > 0 and not evicting and capacity > used and _is_pace(grown, capacity) else None
    kinds = by_label(summed, "kvstore_disk_used_bytes", "kind")
    by_class = {name: int(size) for name, size in by_label(summed, "kvstore_class_used_bytes", "retention_class").items() if size}
    by_owner = {name: int(size) for name, size in by_label(summed, "kvstore_owner_used_bytes", "owner").items() if size}
    freeing, zombie, index = (int(kinds.get(kind, 0)) for kind in ("freeing", "zombie", "index"))
    return Space(used, capacity, freeing, zombie, index, by_class, by_owner, growth, written, evicting, until)


def _is_pace(grown: Sequence[Growth], capacity_bytes: int) -> bool:
    """Whether what came lets one tell what will."""
    seconds = min(each.seconds for each in grown)
    much = sum(each.used_bytes for each in grown) >= PACE_SHARE_MIN * capacity_bytes
    return seconds >= PACE_SECONDS or (seconds >= PACE_SECONDS_MIN and much)
