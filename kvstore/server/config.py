"""What one storage daemon is told at its start. What the whole cluster must agree on stands in the cluster map, not here."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from kvstore import tcp
from kvstore.clustermap import POLICIES, ClusterMap
from kvstore.config import parse_gid_index, parse_traffic_class
from kvstore.errors import ConfigError, KvstoreError
from kvstore.owners import Owner, merged, owner_of_argument
from kvstore.units import format_bytes, parse_bytes, parse_seconds

IO_ENGINES: Final = ("auto", "buffered", "direct")
RECORD_ROOM_BYTES: Final = 1 << 20
FLOORS_SHARE_MAX: Final = 0.9  # past it nothing may go when a node is full, and writes stop
_DEVICE_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,63}")
FREE_BYTES_MIN: Final = 64 << 20  # below this a disk is full already


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Valid by construction: a bad value raises ConfigError here, before anything is touched."""

    data_dir: Path
    capacity_bytes: int = 0  # records with their padding; 0: what the disk has, less a reserve
    host: str = "127.0.0.1"  # an IP address; nothing listens beyond loopback unless told to
    port: int = 0  # data protocol; 0: any free one
    admin_port: int = 0  # gRPC
    http_port: int = 0  # /livez /readyz /metrics
    node_id: str = "node-00"
    cluster_map_path: Path | None = None  # None: a cluster of this one node
    policy: str = ""  # what goes when room is needed; "": as the map says
    io: str = "auto"
    strict_sync: bool = False  # every commit durable before it is acknowledged; else synced each second
    virtual_clock: bool = False  # time is what clients say (trace replay)
    bulk_threads: int = 2  # 1..64, that send what is read
    write_threads: int = 4  # 1..64, that receive records and write them
    connections_max: int = 4096  # 1..1,000,000
    write_arena_bytes: int = 96 << 20  # records being received, all connections; past it BUSY
    read_arena_bytes: int = 32 << 20  # direct engine: read and not yet sent
    read_cache_bytes: int = 64 << 20  # direct engine: what was read twice; 0: none
    scrub_bytes_per_second: int = 0  # records that nobody reads are checked at this rate; 0: not
    read_depth: int = 8  # direct engine: reads at the disk at once, 1..256; together at most 1 MiB
    idle_timeout_seconds: float = 300.0  # a connection without requests is closed
    progress_timeout_seconds: float = 3.0  # a peer that neither takes nor gives what it owes is cut
    congestion_control: str = "cubic"  # of TCP; "host": what the host uses by default
    rdma_device: str = "auto"  # of RDMA, for answers to READs; "auto": the first that is active; "off": TCP only
    rdma_pool_bytes: int = 16 << 20  # registered at the start; the direct engine's memory is, too
    rdma_traffic_class: int = 0  # of what this end sends: DSCP are its upper six bits
    rdma_gid_index: int = -1  # of the device's port; -1: its best
    rdma_pairs_max: int = 1024  # queue pairs; past it clients stay on TCP
    drain_timeout_seconds: float = 25.0  # below the usual grace period of 30 s
    log_interval_seconds: float = 10.0
    owners: tuple[Owner, ...] = ()

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                shown = _size if name.endswith("_bytes") else str
                raise _bad(name, shown(value), f"give {shown(low)} to {shown(high)}")
        if self.io not in IO_ENGINES:
            raise _bad("io", self.io, "give auto, buffered or direct")
        if self.policy not in ("", *POLICIES):
            raise _bad("policy", self.policy, f"give one of {', '.join(POLICIES)}")
        if not tcp.is_name(self.congestion_control):
            raise _bad("congestion_control", self.congestion_control, f"give {tcp.NAME_TEXT}")
        if not _DEVICE_NAME.fullmatch(self.rdma_device):
            raise _bad("rdma_device", self.rdma_device, "give auto, off, or a name that ibv_devinfo tells")
        ports = [p for p in (self.port, self.admin_port, self.http_port) if p]
        if len(ports) != len(set(ports)):
            raise ConfigError("E121", f"ports {', '.join(map(str, ports))}", "two are the same", "give each its own, or 0 for any free one")

    def load_map(self) -> ClusterMap | None:
        """The map, None for a cluster of one. Raises ConfigError where it is bad or does not know this node."""
        if self.cluster_map_path is None:
            return None
        found = ClusterMap.load(self.cluster_map_path)
        found.node(self.node_id)
        return found


_RANGES: Final[tuple[tuple[str, float, float], ...]] = (
    ("capacity_bytes", 0, 1 << 60),
    ("port", 0, 65535),
    ("admin_port", 0, 65535),
    ("http_port", 0, 65535),
    ("bulk_threads", 1, 64),
    ("write_threads", 1, 64),
    ("connections_max", 1, 1_000_000),
    ("write_arena_bytes", 4 << 20, 1 << 40),
    ("read_arena_bytes", 4 << 20, 1 << 40),
    ("read_cache_bytes", 0, 1 << 40),
    ("scrub_bytes_per_second", 0, 1 << 40),
    ("read_depth", 1, 256),
    ("rdma_pool_bytes", 4 << 20, 1 << 40),
    ("rdma_pairs_max", 1, 1_000_000),
    ("rdma_traffic_class", 0, 255),
    ("rdma_gid_index", -1, 255),
    ("idle_timeout_seconds", 0.1, 1e6),
    ("progress_timeout_seconds", 0.1, 1e6),
    ("drain_timeout_seconds", 0.0, 1e6),
    ("log_interval_seconds", 0.1, 1e6),
)


def _size(count: float) -> str:
    """ "4MiB", as a flag takes it: the largest unit that divides it."""
    power = next((power for power in (4, 3, 2, 1) if count and count % (1 << 10 * power) == 0), 0)
    return f"{int(count) >> 10 * power}{('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _bad(name: str, value: object, fix: str) -> ConfigError:
    flag = next((flag for flag, (field, _) in _FLAGS.items() if field == name), None)  # what a person typed, beside what code calls it
    what = name if flag in (None, name) else f"--{flag.replace('_', '-')} ({name})"
    return ConfigError("E121", f"{what} is {value}", "out of range", fix)


def add_node_arguments(parser: argparse.ArgumentParser, *, map_argument: bool = True) -> None:
    """The flags of a daemon. `map_argument` False where `parser` has a --map already."""
    add = parser.add_argument
    add("--data", metavar="DIR", required=True, help="data directory, one per disk; it must exist")
    add("--capacity", metavar="SIZE", help="disk to use, as 4TB or 3.6TiB (default: what the disk has, less a reserve)")
    if map_argument:
        add("--map", metavar="FILE", help="cluster map (default: a cluster of this one node)")
    add("--id", metavar="NAME", help="this node's id in the map (default node-00)")
    add("--host", metavar="IP", help="address to listen on (default: the map's, else 127.0.0.1)")
    add("--port", type=int, metavar="N", help="port of the data protocol (default: the map's, else any free one)")
    add("--admin-port", type=int, metavar="N", help="port of gRPC (default: the map's, else any free one)")
    add("--http-port", type=int, metavar="N", help="port of /livez, /readyz and /metrics (default: the map's, else any free one)")
    add(
        "--io",
        metavar="ENGINE",
        choices=IO_ENGINES,
        help="auto (the page cache where it has the bytes, else direct), buffered or direct",
    )
    add("--policy", choices=POLICIES, help="what goes first when room is needed (default: as the map says, else lru); alike on all nodes")
    add("--strict-sync", action="store_true", help="make every commit durable before it is acknowledged")
    add("--virtual-clock", action="store_true", help="take the time from clients' buckets, for trace replay")
    add("--bulk-threads", type=int, metavar="N", help="threads that send what is read (default 2)")
    add("--write-threads", type=int, metavar="N", help="threads that receive records and write them (default 4)")
    add("--connections", type=int, metavar="N", help="connections at once (default 4096)")
    add("--write-memory", metavar="SIZE", help="records received and not yet stored; past it BUSY (default 96MiB)")
    add("--read-memory", metavar="SIZE", help="direct engine: read and not yet sent (default 32MiB)")
    add("--read-cache-bytes", metavar="SIZE", help="direct engine: kept of what was read twice (default 64MiB)")
    add("--read-depth", type=int, metavar="N", help="direct engine: reads at the disk at once, together at most 1 MiB (default 8)")
    add(
        "--scrub",
        metavar="SIZE",
        help="bytes a second of records that nobody reads to check: 6MB covers 1 TB in two days (default 0: none)",
    )
    add("--idle-timeout", metavar="TIME", help="a connection without requests is closed after this (default 5m)")
    add("--progress-timeout", metavar="TIME", help="a peer that stands still in mid-message is cut after this (default 3s)")
    add("--congestion-control", metavar="NAME", help="of TCP, or host for what this host uses by default (default cubic)")
    add("--rdma-device", metavar="NAME", help="auto (the first that is active; TCP where there is none), off, or a device (default auto)")
    add("--rdma-traffic-class", metavar="N", help="of what it sends by RDMA, 0 to 255: DSCP are the upper six bits (default 0)")
    add("--rdma-gid-index", metavar="N", help="of the device's GIDs, see kvstore doctor; E149 where it has none there (default auto)")
    add("--rdma-memory", metavar="SIZE", help="registered with it, beside --read-memory; at least 4MiB (default 16MiB)")
    add("--rdma-connections", type=int, metavar="N", help="queue pairs; past it clients stay on TCP (default 1024)")
    add(
        "--owner",
        metavar="LIMITS",
        action="append",
        default=[],
        help="floor and cap of an owner: name=acme,tag=HEX,floor=10GB,cap=400GB (repeatable; replaces [owners.acme] of the file)",
    )
    add("--drain-timeout", metavar="TIME", help="how long a SIGTERM may take (default 25s)")


_FLAGS: Final[dict[str, tuple[str, Any]]] = {
    "data": ("data_dir", Path),
    "capacity": ("capacity_bytes", parse_bytes),
    "map": ("cluster_map_path", Path),
    "id": ("node_id", str),
    "host": ("host", str),
    "port": ("port", int),
    "admin_port": ("admin_port", int),
    "http_port": ("http_port", int),
    "policy": ("policy", str),
    "io": ("io", str),
    "strict_sync": ("strict_sync", bool),
    "virtual_clock": ("virtual_clock", bool),
    "bulk_threads": ("bulk_threads", int),
    "write_threads": ("write_threads", int),
    "connections": ("connections_max", int),
    "write_memory": ("write_arena_bytes", parse_bytes),
    "read_memory": ("read_arena_bytes", parse_bytes),
    "read_cache_bytes": ("read_cache_bytes", parse_bytes),
    "read_depth": ("read_depth", int),
    "scrub": ("scrub_bytes_per_second", parse_bytes),
    "idle_timeout": ("idle_timeout_seconds", parse_seconds),
    "progress_timeout": ("progress_timeout_seconds", parse_seconds),
    "congestion_control": ("congestion_control", str),
    "rdma_device": ("rdma_device", str),
    "rdma_memory": ("rdma_pool_bytes", parse_bytes),
    "rdma_connections": ("rdma_pairs_max", int),
    "rdma_traffic_class": ("rdma_traffic_class", parse_traffic_class),
    "rdma_gid_index": ("rdma_gid_index", parse_gid_index),
    "drain_timeout": ("drain_timeout_seconds", parse_seconds),
}
assert {field for field, _ in _FLAGS.values()} <= {f.name for f in fields(NodeConfig)}


def config_from_args(args: argparse.Namespace, owners: Sequence[Owner] = ()) -> NodeConfig:
    """A NodeConfig from what add_node_arguments took: flag, else the map's entry for this node, else the default. `owners`: of the file."""
    given: dict[str, Any] = {"owners": merged(owners, [owner_of_argument(text) for text in args.owner])}
    for flag, (field, convert) in _FLAGS.items():
        value = getattr(args, flag, None)
        if value is None:
            continue
        if value == "":  # a variable that was not set: Path("") would be the current directory
            raise ConfigError("E121", f"--{flag.replace('_', '-')} is empty", fix="give a value")
        try:
            given[field] = convert(value)
        except KvstoreError as error:
            raise ConfigError(error.code, f'--{flag.replace("_", "-")} "{value}" not understood', fix=error.fix) from None
    config = NodeConfig(**given)
    if config.cluster_map_path is None:
        return config
    entry = ClusterMap.load(config.cluster_map_path).node(config.node_id)
    for address, name in ((entry.address, "port"), (entry.admin_address, "admin_port"), (entry.metrics_address, "http_port")):
        if address and name not in given:
            given[name] = int(address.rpartition(":")[2])
    if "host" not in given:
        given["host"] = entry.address.rpartition(":")[0].strip("[]")
    return NodeConfig(**given)


def capacity_of(config: NodeConfig) -> int:
    """Bytes this daemon may use. Raises ConfigError, in one line with its fix, for a directory that cannot be used."""
    path = config.data_dir
    if not path.exists():
        raise ConfigError("E122", f"data directory {path}", "does not exist", f"mkdir -p {path}, or mount the disk there")
    if not path.is_dir():
        raise ConfigError("E122", f"data directory {path}", "is not a directory", "name a directory with --data")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError("E122", f"data directory {path}", "not writable by this user", f"chown it to uid {os.geteuid()}, or name another")
    disk = os.statvfs(path)
    free = disk.f_bavail * disk.f_frsize
    used = sum(entry.stat().st_blocks * 512 for entry in path.rglob("*") if entry.is_file())
    if free < FREE_BYTES_MIN and used < FREE_BYTES_MIN:
        raise ConfigError("E123", f"disk of {path} is full", f"{free >> 20} MiB free", "free space on it, or name another disk with --data")
    reserve = max(1 << 30, disk.f_blocks * disk.f_frsize // 20)  # a full filesystem serves nobody, least of all the index
    capacity = config.capacity_bytes or max(used + free - reserve, FREE_BYTES_MIN)
    floors = sum(owner.limits.floor_bytes for owner in config.owners)
    if floors > FLOORS_SHARE_MAX * capacity:
        what = f"floors of {len(config.owners)} owners are {format_bytes(floors)} together"
        raise ConfigError("E121", what, f"this node has {format_bytes(capacity)}", f"lower them to {FLOORS_SHARE_MAX:.0%} of it or less")
    return capacity


def choose_io(config: NodeConfig) -> tuple[str, str]:
    """The engine to ask for, and why where it is not the one that was named: direct reads need a filesystem that has them."""
    if config.io == "buffered" or direct_io_works(config.data_dir):
        return config.io, ""
    return "buffered", f"the filesystem of {config.data_dir} has no O_DIRECT"


def direct_io_works(directory: Path) -> bool:
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    return True
