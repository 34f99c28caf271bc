"""The window directory's process: the native server, its probes and metrics, from start to SIGTERM. docs/WINDOWS.md is the text to this.

It keeps nothing: a restart forgets every entry, which costs window misses until agents have touched theirs again.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from kvstore import tcp
from kvstore.clustermap import ClusterMap, Node
from kvstore.daemon import address_text, run_daemon
from kvstore.http import HttpServer, daemon_pages
from kvstore.kernels import _native
from kvstore.metrics_directory import directory_registry
from kvstore.server.directory_config import DirectoryConfig
from kvstore.server.log import Log
from kvstore.server.node import raise_descriptor_limit
from kvstore.server.ports import port_fault
from kvstore.units import format_bytes, format_seconds
from kvstore.version import version

if TYPE_CHECKING:
    from kvstore.server.control import HealthServer

SERVICE: Final = "kvstore.v1.Directory"
CONTROL_GRACE_SECONDS: Final = 0.5


class Directory:
    """A directory in this process: `start`, `serve_until_stopped`. `run_directory` adds signals and exit codes."""

    def __init__(self, config: DirectoryConfig) -> None:
        self.config = config
        self.log = Log("directory")
        self.map = ClusterMap.local([Node("node-00", "node-00", "127.0.0.1:1")], k=1, m=0)  # replaced where a file is given
        self.server: _native.DirectoryServer | None = None
        self.http: HttpServer | None = None
        self.control: HealthServer | None = None
        self._registry: Any = None
        self._stop = threading.Event()

    def start(self) -> None:
        """Serves when it returns. On any error all that was taken is given back."""
        try:
            self._start()
        except BaseException:
            self._close()
            raise

    def _start(self) -> None:
        config, log = self.config, self.log
        if config.cluster_map_path is not None:
            self.map = ClusterMap.load(config.cluster_map_path)
        raise_descriptor_limit()
        log.info(f"kvstore {version()}, window directory of cluster {self.map.cluster_id}, pid {os.getpid()}")
        with port_fault(config.host, config.http_port, "--http-port"):
            self.http = HttpServer(config.host, config.http_port, daemon_pages(self.checks, self.metrics_text))
        with port_fault(config.host, config.port, "--listen", "HOST:PORT"):
            self.server = _native.DirectoryServer(
                config.host,
                config.port,
                cluster16=self.map.tag,
                memory_bytes=config.memory_bytes,
                lifetime_seconds=config.lifetime_seconds,
                virtual_clock=config.virtual_clock,
                connections_max=config.connections_max,
                idle_timeout_seconds=config.idle_timeout_seconds,
                progress_timeout_seconds=config.progress_timeout_seconds,
                congestion_control=tcp.for_kernel(config.congestion_control),
            )
        if refused := tcp.refusal(config.congestion_control):
            log.warn(f"congestion control {config.congestion_control} not used, the host's is: {refused}")
        self._registry = directory_registry(self.server.stats)
        from kvstore.server.control import HealthServer  # gRPC takes 0.1 s to import: the data port is open by now

        with port_fault(config.host, config.admin_port, "--admin-port"):
            self.control = HealthServer(config.host, config.admin_port, SERVICE)
        self.control.start()
        self.control.set_ready(True)
        size, lifetime = format_bytes(config.memory_bytes), format_seconds(config.lifetime_seconds)
        address = address_text(config.host, self.server.port)
        log.info(f"serving on {address}, table of at most {size}, entries live {lifetime} after their last use")

    def facts(self) -> dict[str, object]:
        """What the ready line says. Only while serving."""
        assert self.server and self.control and self.http
        return {
            "pid": os.getpid(),
            "address": address_text(self.config.host, self.server.port),
            "admin": address_text(self.config.host, self.control.port),
            "http": address_text(self.config.host, self.http.port),
            "cluster": self.map.cluster_id,
            "boot_id": self.server.boot_id,
            "memory_bytes": self.config.memory_bytes,
            "lifetime_seconds": self.config.lifetime_seconds,
        }

    def serve_until_stopped(self) -> int:
        """Returns the exit code. Answers are given inline: nothing is in flight that could be cut off."""
        self._stop.wait()
        began = time.monotonic()
        if self.control:
            self.control.set_ready(False)
        self._close()
        self.log.info(f"stopped in {format_seconds(time.monotonic() - began)}")
        return 0

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def request_stop(self) -> None:
        """Harmless twice."""
        self._stop.set()

    def _close(self) -> None:
        if self.server:
            self.server.stop()
        if self.control:
            self.control.close(CONTROL_GRACE_SECONDS)
        if self.http:
            self.http.close()
        self.server = self.control = self.http = self._registry = None

    def checks(self) -> dict[str, str]:
        """Readiness by part: "" where it is well, else why not."""
        return {"server": "" if self.server else "not listening yet", "stop": "stopping" if self.stopping else ""}

    def metrics_text(self) -> bytes | None:
        registry = self._registry  # a drain takes it away
        if registry is None:
            return None
        from prometheus_client import generate_latest

        return generate_latest(registry)


def run_directory(config: DirectoryConfig) -> int:
    """Runs a directory until a signal ends it; returns its exit code. Call it from the main thread. Raises KvstoreError at the start."""
    return run_daemon(Directory(config))
