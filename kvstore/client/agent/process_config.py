"""What one agent process is told at its start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvstore.client.agent.frames import address_of
from kvstore.errors import ConfigError

SOCKET_PATH_BYTES_MAX: Final = 100  # sun_path has 108; a temporary name beside it needs some


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """A value outside its range raises ConfigError E185."""

    map_path: Path
    socket_path: Path
    memory_bytes: int = 1 << 30  # shared: what loads are staged in
    worker_bytes: int = 256 << 20  # shared: of each worker, what it stores from
    quota_bytes: int = 0  # of the first, that one worker may have pinned; 0: half of it
    ram_bytes: int = 1 << 30  # of the RAM tier; 0: none
    window_bytes: int = 1 << 30  # of window entries; 0: none
    handoff_bytes: int = 0  # of handoffs from other hosts that wait for a worker here; 0: none are taken
    workers_max: int = 16
    kinds_max: int = 1  # of engines (layout, owner, KV group, block tokens); windows are shared out among them
    host: str = "127.0.0.1"  # where other agents reach this one
    port: int = 0
    advertise: str = ""  # host:port by which others reach it, where that is another; of the first kind of engines
    directories: tuple[str, ...] = ()  # window directories, host:port; none: those of the map
    http_host: str = "127.0.0.1"
    http_port: int = 0
    ticket_key_path: Path | None = None  # a file of 16 to 64 bytes that agents share; None: a key of this process alone
    transport: str = ""  # of reads: auto, tcp or rdma; "": as ClientConfig has it
    fabric: Mapping[str, Any] = field(default_factory=dict)  # rdma_traffic_class, rdma_gid_index; without: as ClientConfig has them
    drain_seconds: float = 60.0
    drain_to: str = ""  # host:port of the agent that takes the windows when this one ends; "": one that the directory names

    def __post_init__(self) -> None:
        self._need("memory_bytes", 1 << 20 <= self.memory_bytes <= 1 << 44, "1 MiB to 16 TiB")
        self._need("worker_bytes", 1 << 20 <= self.worker_bytes <= 1 << 44, "1 MiB to 16 TiB")
        self._need("quota_bytes", 0 <= self.quota_bytes <= self.memory_bytes, "at most memory_bytes")
        self._need("ram_bytes", self.ram_bytes == 0 or self.ram_bytes >= 1 << 20, "0, or at least 1 MiB")
        self._need("window_bytes", self.window_bytes >= 0, "0 or more")
        self._need("handoff_bytes", self.handoff_bytes >= 0, "0 or more")
        self._need("workers_max", 1 <= self.workers_max <= 256, "1 to 256")
        self._need("kinds_max", 1 <= self.kinds_max <= 16, "1 to 16")
        self._need("port", 0 <= self.port <= 65535, "0 to 65535")
        self._need("http_port", 0 <= self.http_port <= 65535, "0 to 65535")
        self._need("drain_seconds", 0 < self.drain_seconds <= 3600, "above 0, at most 3600")
        for address in (self.drain_to, self.advertise):
            if address:
                address_of(address)
        if len(os.fsencode(self.socket_path)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigError("E187", f"socket {self.socket_path}", f"is longer than {SOCKET_PATH_BYTES_MAX} bytes", "name a shorter path")

    def _need(self, name: str, fine: bool, range_text: str) -> None:
        if not fine:
            raise ConfigError("E185", f"agent {name} = {getattr(self, name)}", f"must be {range_text}")
