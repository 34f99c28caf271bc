"""The lookup service's process: both faces, probes and metrics, from start to SIGTERM. docs/LOOKUP_SERVICE.md is the text to this."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.client.ticket import read_ticket_key
from kvstore.clustermap import ClusterMap
from kvstore.daemon import address_text, run_daemon
from kvstore.errors import ConfigError, KvstoreError
from kvstore.http import REQUESTS_MAX, HttpServer, Page, Request, daemon_pages
from kvstore.mapfile import LOOK_SECONDS, MapFile
from kvstore.memory import give_back
from kvstore.metrics_lookup import LookupCounters
from kvstore.modelcard import ModelCard
from kvstore.server.log import Log
from kvstore.server.lookup import DIRECTORY_SECONDS, TOKENS_MAX, Lookups, load_tenants
from kvstore.server.lookup_faces import BODY_BYTES_MAX, CALL_BYTES_MAX, PATH, RUNNING_MAX, Faces
from kvstore.server.ports import port_fault
from kvstore.version import version

if TYPE_CHECKING:
    from kvstore.server.control import HealthServer

SERVICE: Final = "kvstore.v1.Lookup"


@dataclass(frozen=True, kw_only=True)
class LookupServiceConfig:
    """What the process is told; ConfigError E198 for what it cannot be."""

    map_path: Path
    model_path: Path  # a model card
    ticket_key_path: Path  # 16 to 64 bytes, the same as the agents'
    tenants_path: Path | None = None
    directories: tuple[str, ...] = ()
    directory_seconds: float = DIRECTORY_SECONDS
    host: str = "127.0.0.1"
    port: int = 7398  # gRPC; 0: any free one
    http_port: int = 0
    deadline_seconds: float = 0.5
    tokens_max: int = TOKENS_MAX
    running_max: int = RUNNING_MAX

    def __post_init__(self) -> None:
        for name, low, high in (("port", 0, 65535), ("http_port", 0, 65535), ("running_max", 1, 1024)):
            if not low <= (value := getattr(self, name)) <= high:
                raise ConfigError("E198", f"lookup service {name} is {value}", fix=f"give {low} to {high}")


class LookupService:
    """A lookup service in this process: `start`, `serve_until_stopped`. `run_lookup_service` adds signals and exit codes."""

    def __init__(self, config: LookupServiceConfig) -> None:
        self.config = config
        self.counters = LookupCounters()
        self.log = Log("lookup-service")
        self._lookups: Lookups | None = None
        self._map_file: MapFile | None = None
        self._faces: Faces | None = None
        self._http: HttpServer | None = None
        self._control: HealthServer | None = None
        self._stop = threading.Event()
        self._cluster = ""

    def start(self) -> None:
        """Serves when it returns. On any error all that was taken is given back."""
        try:
            self._start()
        except BaseException:
            self._close()
            raise

    def _start(self) -> None:
        from kvstore.server.control import HealthServer

        config = self.config
        self._map_file = MapFile(config.map_path)
        cluster_map, card = ClusterMap.load(config.map_path), ModelCard.load(config.model_path)
        self._cluster = cluster_map.cluster_id
        tenants = load_tenants(config.tenants_path) if config.tenants_path is not None else None
        self._lookups = Lookups(
            cluster_map, card, ticket_key=read_ticket_key(config.ticket_key_path, "E198"), tenants=tenants, directories=config.directories,
            directory_seconds=config.directory_seconds, deadline_seconds=config.deadline_seconds, tokens_max=config.tokens_max,
        )  # fmt: skip
        self._faces = faces = Faces(self._lookups, self.counters, config.running_max)
        registry = self.counters.registry()

        def metrics() -> bytes:
            from prometheus_client import generate_latest

            return generate_latest(registry)

        probes = daemon_pages(lambda: {"stop": "stopping" if self.stopping else ""}, metrics)

        def pages(request: Request) -> Page:
            if request.path == PATH:
                return faces.page(request)
            return probes(request) if request.method == "GET" else Page(b"read-only\n", status=HTTPStatus.METHOD_NOT_ALLOWED)

        with port_fault(config.host, config.http_port, "--http-port"):
            self._http = HttpServer(config.host, config.http_port, pages, BODY_BYTES_MAX, REQUESTS_MAX + config.running_max, faces.bytes)
        with port_fault(config.host, config.port, "--listen", "HOST:PORT"):
            self._control = HealthServer(
                config.host, config.port, SERVICE, faces.add_to, workers=config.running_max, request_bytes_max=CALL_BYTES_MAX
            )
        self._control.start()
        self._control.set_ready(True)
        self.log.info(f"kvstore {version()}, lookup service of cluster {self._cluster}, model {card.name}, pid {os.getpid()}")
        if not (config.directories or cluster_map.directories):
            self.log.info("no window directory named: whether a window entry is at hand is not known here")

    def facts(self) -> dict[str, object]:
        """What the ready line says. Only while serving."""
        assert self._control and self._http
        return {
            "pid": os.getpid(),
            "address": address_text(self.config.host, self._control.port),
            "http": address_text(self.config.host, self._http.port),
            "cluster": self._cluster,
        }

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def request_reload(self) -> None:
        """Reads the map again, soon."""
        if self._map_file is not None:
            self._map_file.request()

    def look_at_map(self) -> None:
        """Takes a newer epoch over, from the map's file; where that is bad the old one stays."""
        assert self._map_file and self._lookups
        self._lookups.tick()
        if not self._map_file.changed():
            return
        try:
            found = self._map_file.newer(self._lookups.map)
            if found is not None:
                self.log.info(f"map has epoch {found.epoch}, was {self._lookups.map.epoch}")
                self._lookups.take_map(found)
        except KvstoreError as error:
            self.log.error(f"map not taken, epoch {self._lookups.map.epoch} stays: {error}")

    def request_stop(self) -> None:
        """Harmless twice."""
        self._stop.set()

    def serve_until_stopped(self) -> int:
        """Returns the exit code. Questions that are being answered are finished."""
        while not self._stop.wait(LOOK_SECONDS):
            self.look_at_map()
            if self._faces is not None and self._faces.were_large and not self.counters.running:
                self._faces.were_large = False
                give_back()
        if self._control:
            self._control.set_ready(False)
        self._close()
        self.log.info("stopped")
        return 0

    def _close(self) -> None:
        if self._control:
            self._control.close(self.config.deadline_seconds)
        if self._http:
            self._http.close()
        if self._lookups:
            self._lookups.close()
        self._control = self._http = self._lookups = None


def run_lookup_service(config: LookupServiceConfig) -> int:
    """Runs one until a signal ends it; returns its exit code. Call it from the main thread. SIGHUP has it read the map again.

    Raises KvstoreError at the start."""
    service = LookupService(config)
    return run_daemon(service, service.request_reload)
