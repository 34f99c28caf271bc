"""Finding the cluster that a command means, and asking all its nodes at once over their control plane."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvstore.clustermap import ClusterMap, Node
from kvstore.config import xdg
from kvstore.errors import ConfigError, Unreachable
from kvstore.server.activity import Grown, Moved

ASKED_AT_ONCE: Final = 32
_STATES: Final = {0: "starting", 1: "starting", 2: "ready", 3: "draining"}


def default_directory() -> Path:
    """Where `kvstore up` keeps its cluster."""
    return xdg("data") / "dev"


def map_path(args: argparse.Namespace) -> Path:
    """The map of --map, KVSTORE_MAP or the configuration file; else of this user's `kvstore up`. Raises ConfigError where there is none."""
    if (named := args.settings["map"]) is not None:
        return Path(named)
    path = default_directory() / "map.toml"
    if not path.exists():
        raise ConfigError("E141", "no cluster is known", f"no --map, and no {path}", "start one with kvstore up, or give --map FILE")
    return path


def find_map(args: argparse.Namespace) -> ClusterMap:
    """The map at map_path. Raises ConfigError where there is none."""
    return ClusterMap.load(map_path(args))


@dataclass(frozen=True)
class NodeReport:
    """What one node answered; `state` is "down" where it did not, and `error` says why."""

    node: Node
    state: str
    error: str = ""
    epoch: int = 0
    version: str = ""
    pid: int = 0
    io: str = ""
    index_start: str = ""
    uptime_seconds: float = 0.0
    capacity_bytes: int = 0
    used_bytes: int = 0
    extents: int = 0
    clock_offset_seconds: float | None = None
    answer_seconds: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    traffic: Moved | None = None  # None: an older daemon, which does not say
    growth: Grown | None = None

    @property
    def up(self) -> bool:
        return self.state != "down"

    def value(self, name: str) -> float:
        """Sum of a metric over all its series whose name starts with `name`."""
        return sum(v for key, v in self.values.items() if key == name or key.startswith(name + "{"))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """A metric with this label alone, by the label's value."""
        front = f'{name}{{{label}="'
        return {key[len(front) : -2]: value for key, value in self.values.items() if key.startswith(front)}


def ask_nodes(cluster_map: ClusterMap, timeout_seconds: float, *, values: bool = True) -> list[NodeReport]:
    """One report a node of the newest epoch, in order. All are asked at once; a node that does not answer in time is "down"."""
    nodes, cluster = cluster_map.newest.nodes, cluster_map.cluster_id
    with ThreadPoolExecutor(min(ASKED_AT_ONCE, max(1, len(nodes))), "kvstore-ask") as pool:
        return list(pool.map(lambda node: _ask(node, cluster, timeout_seconds, values), nodes))


def require_some(reports: Iterable[NodeReport], cluster_map: ClusterMap) -> None:
    """Raises Unreachable where not one node answered."""
    found = list(reports)
    if not any(report.up for report in found):
        first = next((report.error for report in found if report.error), "no answer")
        raise Unreachable(
            "E202", f'no node of cluster "{cluster_map.cluster_id}" answers ({len(found)} asked)', first, "kvstore up, or correct --map"
        )


def tell_of_maps_here() -> None:
    """What a client logs of a map that is too old, on stderr, the command says itself where it matters."""
    logging.getLogger("kvstore.client.reach").addHandler(logging.NullHandler())


def why_short(cluster_map: ClusterMap, timeout_seconds: float, otherwise: str) -> str:
    """The cause to tell when blocks did not come or go: nodes down, or `otherwise`. Raises Unreachable where no node answers at all."""
    reports = ask_nodes(cluster_map, timeout_seconds, values=False)
    require_some(reports, cluster_map)
    if (epoch := max(report.epoch for report in reports)) > cluster_map.epoch:
        return f"this map has epoch {cluster_map.epoch}, nodes have epoch {epoch}"
    down = [report.node.id for report in reports if not report.up]
    shown = ", ".join(down[:4]) + (f" and {len(down) - 4} more" if len(down) > 4 else "")
    return f"down: {shown}" if down else otherwise


def _ask(node: Node, cluster: str, timeout_seconds: float, want_values: bool) -> NodeReport:
    if not node.admin_address:
        return NodeReport(node, "down", "the map has no admin address for it")
    import grpc

    from kvstore.server.proto import node_pb2, node_pb2_grpc

    deadline = time.monotonic() + timeout_seconds
    try:
        with grpc.insecure_channel(node.admin_address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub: Any = node_pb2_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]  # generated code has no types
            asked, asked_at = time.monotonic(), time.time()
            status = stub.Status(node_pb2.StatusRequest(), timeout=timeout_seconds)
            took = time.monotonic() - asked
            if (status.id, status.cluster) != (node.id, cluster):  # another's daemon has taken the port
                return NodeReport(node, "down", f'{node.admin_address} is "{status.id}" of cluster "{status.cluster}"')
            values = {}
            if want_values:
                values = dict(stub.Stats(node_pb2.StatsRequest(), timeout=max(0.01, deadline - time.monotonic())).values)
    except grpc.RpcError as error:
        return NodeReport(node, "down", _reason(error, timeout_seconds))
    moved, grown = status.traffic, status.growth
    traffic = Moved(moved.seconds, moved.requests, moved.bytes_in, moved.bytes_out, tuple(moved.read_counts))
    offset = status.unix_seconds - (asked_at + took / 2) if status.unix_seconds else None
    return NodeReport(
        node=node,
        state=_STATES.get(status.state, "starting"),
        epoch=status.epoch,
        version=status.version,
        pid=status.pid,
        io=status.io,
        index_start=status.index_start,
        uptime_seconds=status.uptime_seconds,
        capacity_bytes=status.capacity_bytes,
        used_bytes=status.used_bytes,
        extents=status.extents,
        clock_offset_seconds=offset,
        answer_seconds=took,
        values=values,
        traffic=traffic if traffic.seconds else None,
        growth=Grown(grown.seconds, grown.used_bytes, grown.written_bytes) if grown.seconds else None,
    )


def _reason(error: Any, timeout_seconds: float) -> str:
    """A few words out of gRPC's many."""
    import grpc

    details = str(error.details() or "").lower()
    if "connection refused" in details:
        return "connection refused"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer in {timeout_seconds:g} s"
    return details.splitlines()[0][:120] if details else str(error.code().name).lower()
