"""What one client process may choose for itself. What the whole cluster must agree on stands in the cluster map."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvstore import tcp
from kvstore.config import of_environment
from kvstore.errors import ConfigError
from kvstore.keys import BLOCK_TOKENS

_DEVICE: Final = re.compile(r"[A-Za-z0-9_.-]{1,63}")
TRANSPORTS: Final = ("auto", "tcp", "rdma")
_NAME: Final = re.compile(r"[A-Za-z0-9._:/-]{0,64}")


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Every field has a range; a value outside it raises ConfigError E150."""

    threads: int = 2  # native threads that receive and send bulk, 1 to 64
    block_tokens: int = BLOCK_TOKENS  # tokens that one block counts as in hits and metrics, 1 or more
    lookup_deadline_seconds: float = 2.0
    load_deadline_seconds: float = 10.0
    store_deadline_seconds: float = 10.0  # of one extent, from its first byte
    close_seconds: float = 10.0  # how long close() waits for stores on their way
    queue_bytes_max: int = 1 << 30  # blocks handed to store() and not yet sent; past it the oldest extents are dropped
    ask_first: bool = True  # where the cluster map has rules for what is written; off: writes without asking the nodes
    compact_bytes_per_second: float = 0.0  # block bytes; 0: never. Runs of short extents that are loaded are stored again as one
    bulk_connections_max: int = 2048
    # Of reads: "auto" RDMA where both ends can, else TCP; "rdma" never TCP (docs/RDMA.md). Default: KVSTORE_TRANSPORT, else auto.
    transport: str = field(default_factory=lambda: os.environ.get("KVSTORE_TRANSPORT") or "auto")
    rdma_device: str = field(default_factory=lambda: os.environ.get("KVSTORE_RDMA_DEVICE") or "auto")  # a name of ibv_devinfo
    rdma_pool_bytes: int = 256 << 20  # at most so much registered memory for what arrives
    rdma_zone_bytes: int = 4 << 20  # of it for each connection; more where one item of the layout needs it
    rdma_traffic_class: int = field(default_factory=lambda: of_environment("rdma_traffic_class"))  # of what this end sends, 0 to 255
    rdma_gid_index: int = field(default_factory=lambda: of_environment("rdma_gid_index"))  # of the device's port; -1: its best
    rdma_windows: bool = True  # memory windows where the device has them; off: a registration for each connection
    congestion_control: str = "cubic"  # of TCP (kvstore/tcp.py); "host": what the host uses by default
    connect_timeout_seconds: float = 1.0
    stall_timeout_seconds: float = 3.0  # a peer that owes something and says nothing: the connection is half open
    drain_timeout_seconds: float = 1.0  # what a load left unread
    plane_wait_seconds: float = 0.002  # a load by plane to which nothing more came for so long asks for the plane after that
    idle_timeout_seconds: float = 60.0
    promise_seconds: int = 60  # how long nodes keep what a lookup found, 1 to 600
    promise_reuse_seconds: float = 30.0  # a second lookup relies on the first one's promise; at most half of promise_seconds
    ticket_seconds: float = 10.0
    tenant: str = ""  # a name for metrics and the access log; "": "default", or "other" with an owner tag
    model_name: str = "default"  # likewise
    accounting: bool = True  # find out why tokens did not hit (docs/ACCESS_LOG.md)
    access_log: Path | str | None = None  # a folder: one row a lookup, in Parquet files
    access_log_bytes_max: int = 1 << 30  # of the folder, at least 1 MiB; the oldest files go first
    access_log_file_seconds: float = 300.0  # a file is closed after so long, or 100,000 rows
    access_log_sample: float = 1.0  # share of blocks whose fingerprints are logged, 0 to 1
    # Shared by all agents that redeem each other's tickets: 16 to 64 bytes, random by default.
    ticket_key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def __post_init__(self) -> None:
        self._need("threads", 1 <= self.threads <= 64, "1 to 64")
        self._need("block_tokens", self.block_tokens >= 1, "at least 1")
        for name in (
            "lookup_deadline_seconds", "load_deadline_seconds", "store_deadline_seconds", "connect_timeout_seconds",
            "stall_timeout_seconds", "drain_timeout_seconds", "plane_wait_seconds", "idle_timeout_seconds", "ticket_seconds",
        ):  # fmt: skip
            self._need(name, 0 < getattr(self, name) <= 3600, "above 0, at most 3600")
        self._need("congestion_control", tcp.is_name(self.congestion_control), tcp.NAME_TEXT)
        self._need("transport", self.transport in TRANSPORTS, f"one of {', '.join(TRANSPORTS)}")
        named = isinstance(self.rdma_device, str) and bool(_DEVICE.fullmatch(self.rdma_device))
        self._need("rdma_device", named, "auto, or the name of a device")
        for name, low in (("rdma_traffic_class", 0), ("rdma_gid_index", -1)):
            self._need(name, isinstance(getattr(self, name), int) and low <= getattr(self, name) <= 255, f"{low} to 255")
        for name in ("rdma_zone_bytes", "rdma_pool_bytes"):
            self._need(name, isinstance(getattr(self, name), int), "a whole number of bytes")
        self._need("rdma_zone_bytes", 64 << 10 <= self.rdma_zone_bytes <= 1 << 30, "64 KiB to 1 GiB")
        self._need("rdma_pool_bytes", self.rdma_zone_bytes <= self.rdma_pool_bytes <= 1 << 40, "at least one zone, at most 1 TiB")
        self._need("close_seconds", 0 <= self.close_seconds <= 3600, "0 to 3600")
        self._need("queue_bytes_max", self.queue_bytes_max >= 1 << 20, "at least 1 MiB")
        self._need("compact_bytes_per_second", 0 <= self.compact_bytes_per_second <= 1e12, "0 to 1e12")
        self._need("bulk_connections_max", self.bulk_connections_max >= 1, "at least 1")
        self._need("promise_seconds", 1 <= self.promise_seconds <= 600, "1 to 600")
        self._need("promise_reuse_seconds", 0 <= self.promise_reuse_seconds <= self.promise_seconds / 2, "0 to half of promise_seconds")
        for name in ("tenant", "model_name"):
            self._need(name, bool(_NAME.fullmatch(getattr(self, name))), "at most 64 of a-z, A-Z, 0-9 and ._:/-")
        self._need("model_name", bool(self.model_name), "a name")
        self._need("access_log", self.access_log is None or self.accounting, "None where accounting is off")
        self._need("access_log_bytes_max", self.access_log_bytes_max >= 1 << 20, "at least 1 MiB")
        self._need("access_log_file_seconds", 0 < self.access_log_file_seconds <= 86400, "above 0, at most 86400")
        self._need("access_log_sample", 0 <= self.access_log_sample <= 1, "0 to 1")
        self._need("ticket_key", 16 <= len(self.ticket_key) <= 64, "16 to 64 bytes")

    def _need(self, name: str, fine: bool, range_text: str) -> None:
        if not fine:
            value: Any = "..." if name == "ticket_key" else getattr(self, name)
            raise ConfigError("E150", f"client {name} = {value}", f"must be {range_text}")
