"""What a window directory is told at its start."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore import tcp
from kvstore.errors import ConfigError, KvstoreError
from kvstore.units import parse_bytes, parse_seconds

LISTEN: Final = "127.0.0.1:7399"
ENTRY_BYTES: Final = 25  # of memory, for --help: 16 of an entry, in segments that are two thirds full


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    """Valid by construction: a bad value raises ConfigError E180 here, before anything is touched."""

    host: str = "127.0.0.1"  # an IP address; nothing listens beyond loopback unless told to
    port: int = 7399  # 0: any free one
    admin_port: int = 0  # gRPC health
    http_port: int = 0  # /livez /readyz /metrics
    memory_bytes: int = 1_000_000_000  # of the table; taken as it fills
    lifetime_seconds: float = 180.0  # of an entry after its last use
    cluster_map_path: Path | None = None  # whose cluster it serves; None: "dev"
    virtual_clock: bool = False  # time is what clients say (trace replay)
    connections_max: int = 4096
    idle_timeout_seconds: float = 300.0
    progress_timeout_seconds: float = 3.0
    congestion_control: str = "cubic"

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            if not low <= (value := getattr(self, name)) <= high:
                raise ConfigError("E180", f"directory {name} is {value:g}", "out of range", f"give {low:g} to {high:g}")
        if not tcp.is_name(self.congestion_control):
            raise ConfigError("E180", f"directory congestion_control is {self.congestion_control}", "no name", f"give {tcp.NAME_TEXT}")


_RANGES: Final[tuple[tuple[str, float, float], ...]] = (
    ("port", 0, 65535),
    ("admin_port", 0, 65535),
    ("http_port", 0, 65535),
    ("memory_bytes", 2 << 20, 1 << 40),
    ("lifetime_seconds", 1, 86400),
    ("connections_max", 1, 1_000_000),
    ("idle_timeout_seconds", 0.1, 1e6),
    ("progress_timeout_seconds", 0.1, 1e6),
)


def add_directory_arguments(parser: argparse.ArgumentParser, *, map_argument: bool = True) -> None:
    """The flags of a directory. `map_argument` False where `parser` has a --map already."""
    add = parser.add_argument
    add("--listen", metavar="HOST:PORT", help=f"IP address and port of the data protocol (default {LISTEN}; port 0: any free one)")
    add("--memory", metavar="SIZE", help=f"of the table, about {ENTRY_BYTES} bytes an entry (default 1GB); full: what expires first goes")
    add("--lifetime", metavar="TIME", help="of an entry after its last use (default 180s)")
    if map_argument:
        add("--map", metavar="FILE", help="cluster map, for the cluster's name (default: cluster dev)")
    add("--admin-port", type=int, metavar="N", help="port of gRPC health (default: any free one)")
    add("--http-port", type=int, metavar="N", help="port of /livez, /readyz and /metrics (default: any free one)")
    add("--virtual-clock", action="store_true", help="take the time from clients, for trace replay")
    add("--connections", type=int, metavar="N", help="connections at once (default 4096)")
    add("--idle-timeout", metavar="TIME", help="a connection without requests is closed after this (default 5m)")
    add("--progress-timeout", metavar="TIME", help="a peer that stands still in mid-message is cut after this (default 3s)")
    add("--congestion-control", metavar="NAME", help="of TCP, or host for what this host uses by default (default cubic)")


_FLAGS: Final[dict[str, tuple[str, Any]]] = {
    "memory": ("memory_bytes", parse_bytes),
    "lifetime": ("lifetime_seconds", parse_seconds),
    "map": ("cluster_map_path", Path),
    "admin_port": ("admin_port", int),
    "http_port": ("http_port", int),
    "virtual_clock": ("virtual_clock", bool),
    "connections": ("connections_max", int),
    "idle_timeout": ("idle_timeout_seconds", parse_seconds),
    "progress_timeout": ("progress_timeout_seconds", parse_seconds),
    "congestion_control": ("congestion_control", str),
}


def directory_config(args: argparse.Namespace) -> DirectoryConfig:
    """A DirectoryConfig from what add_directory_arguments took. Raises ConfigError."""
    given: dict[str, Any] = {}
    for flag, (field, convert) in _FLAGS.items():
        if (value := getattr(args, flag, None)) is None:
            continue
        try:
            given[field] = convert(value)
        except KvstoreError as error:
            raise ConfigError(error.code, f'--{flag.replace("_", "-")} "{value}" not understood', fix=error.fix) from None
    host, port = _listen(args.listen or LISTEN)
    return DirectoryConfig(host=host, port=port, **given)


def _listen(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isascii() or not port.isdecimal() or len(port) > 5 or (":" in host) != text.startswith("["):
        raise ConfigError("E180", f'--listen "{text}"', fix="write an IP address and a port, as in 10.0.0.1:7399 or [::1]:7399")
    return host, int(port)
