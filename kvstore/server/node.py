"""One storage daemon: store, native server, eviction and its two control faces under one roof, from start to drain.

    start   check directory -> HTTP (alive, not ready) -> open the store -> data port -> gRPC -> eviction -> `ready {json}`
    run     all work is on native threads and gRPC's; the main thread waits, writes a log line now and then, looks for a newer map
    end     SIGTERM or SIGINT (or the Drain call): not ready -> no new work -> what runs is finished -> flush -> exit 0.
            A second signal ends the process at once: the store is made for that.

Epochs: the daemon knows the newest epoch of its map file. It reads the file again on SIGHUP, on ReloadMap, and when a client names a
newer one. A WRITE of an older epoch is answered STALE_MAP; of a newer one it is taken, for readers use the list of a record's own epoch.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvstore import tcp
from kvstore.clustermap import EARLY_REASONS, ClusterMap
from kvstore.clustermap import Node as Member
from kvstore.daemon import address_text, run_daemon
from kvstore.errors import ConfigError, DirectoryInUse, KvstoreError
from kvstore.gc import EvictionPolicy, Evictor, Scrubber, class_of
from kvstore.http import HttpServer, daemon_pages
from kvstore.kernels import _native
from kvstore.metrics import CLASSES, EvictionMetrics, Holding, NodeFacts, flat_values, node_registry
from kvstore.server import owned
from kvstore.server.activity import Activity, Growth, Traffic
from kvstore.server.config import NodeConfig, capacity_of, choose_io
from kvstore.server.dropped import Dropped
from kvstore.server.log import Log, LogHandler
from kvstore.server.ports import port_fault
from kvstore.server.selfcheck import SelfCheck, note_start
from kvstore.server.wear import LOOK_SECONDS as WEAR_LOOK_SECONDS
from kvstore.server.wear import wear_ratio
from kvstore.units import format_bytes, format_seconds
from kvstore.version import version

if TYPE_CHECKING:
    from kvstore.server.control import ControlServer
    from kvstore.server.proto import node_pb2

MAP_POLL_SECONDS: Final = 1.0
CONTROL_GRACE_SECONDS: Final = 0.5
DESCRIPTORS_MIN: Final = 64
RDMA_AMISS: Final = ("E147", "E148")  # locked memory, a device that refuses; that there is none is no fault


class Node:
    """A daemon in this process: `start`, `serve_until_stopped`, which ends with `stop`. `run_node` adds signals and exit codes."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.log = Log(config.node_id)
        self._log_handler = LogHandler(self.log)
        logging.getLogger("kvstore").addHandler(self._log_handler)
        self.capacity_bytes = 0
        self.map = ClusterMap.local([Member(config.node_id, config.node_id, "127.0.0.1:1")], k=1, m=0)  # replaced where a file is given
        self.store: _native.Store | None = None
        self.evictor: Evictor | None = None
        self.scrubber: Scrubber | None = None
        self.server: _native.Server | None = None
        self.http: HttpServer | None = None
        self.control: ControlServer | None = None
        self.index_start = ""
        self.drain_finished: bool | None = None  # set once drained
        self._facts = NodeFacts()
        self._evictions = EvictionMetrics()
        self._dropped: Dropped | None = None
        self._mark_read: tuple[int, ...] = ()
        self._registry: Any = None
        self._traffic: Traffic | None = None
        self._growth: Growth | None = None
        self._check: SelfCheck | None = None
        self._started_at = time.monotonic()
        self._draining = False
        self._drain_seconds = config.drain_timeout_seconds
        self._wake = threading.Event()
        self._reload = threading.Event()
        self._drained = threading.Event()
        self._lock = threading.Lock()

    # --- start ---

    def start(self) -> None:
        """Serves when it returns. On any error all that was taken is given back."""
        try:
            self._start()
        except BaseException:
            self._close(clean=False)
            raise

    def _start(self) -> None:
        config, log = self.config, self.log
        self.capacity_bytes = capacity_of(config)
        self._mark_read = self._map_mark()
        self.map = config.load_map() or self.map
        raise_descriptor_limit()
        log.info(f"kvstore {version()}, node {config.node_id} of cluster {self.map.cluster_id}, epoch {self.map.epoch}, pid {os.getpid()}")
        log.info(f"disk {config.data_dir}, {format_bytes(self.capacity_bytes)} to use")
        for owner in config.owners:
            log.info(f"owner {owner.name}: {owner.limits}")
        self._check_directory()
        with port_fault(config.host, config.http_port, "--http-port"):
            self.http = HttpServer(config.host, config.http_port, daemon_pages(self.checks, self.metrics_text))
        self._open_store()
        assert self.store is not None
        io, io_note = choose_io(config)
        with port_fault(config.host, config.port, "--port"):
            self.server = _native.Server(
                self.store,
                config.host,
                config.port,
                cluster16=self.map.tag,
                epoch=self.map.epoch,
                bucket_seconds=self.map.bucket_seconds,
                io=io,
                bulk_threads=config.bulk_threads,
                write_threads=config.write_threads,
                connections_max=config.connections_max,
                write_arena_bytes=config.write_arena_bytes,
                read_arena_bytes=config.read_arena_bytes,
                read_cache_bytes=config.read_cache_bytes,
                read_depth=config.read_depth,
                idle_timeout_seconds=config.idle_timeout_seconds,
                progress_timeout_seconds=config.progress_timeout_seconds,
                congestion_control=tcp.for_kernel(config.congestion_control),
                rdma_device=config.rdma_device,
                rdma_pool_bytes=config.rdma_pool_bytes,
                rdma_pairs_max=config.rdma_pairs_max,
                rdma_traffic_class=config.rdma_traffic_class,
                rdma_gid_index=config.rdma_gid_index,
            )
        if io_note := io_note or self.server.io_note:
            log.warn(f"io {self.server.io}, not {config.io}: {io_note}")
        else:
            log.info(f"io {self.server.io}")
        self._tell_of_rdma(self.server)
        if refused := tcp.refusal(config.congestion_control):
            log.warn(f"congestion control {config.congestion_control} not used, the host's is: {refused}")
        from kvstore.server.control import ControlServer  # gRPC takes 0.1 s to import: the data port is open by now

        with port_fault(config.host, config.admin_port, "--admin-port"):
            self.control = ControlServer(self, config.host, config.admin_port)
        self._facts.capacity_bytes = self.capacity_bytes
        self._facts.epoch = self.map.epoch
        self._facts.retention_seconds = {c.name: c.keep_seconds for c in self.map.classes.values()}
        self._facts.write_budget_bytes = self.map.rules.write_budget_bytes
        self._facts.class_shares = {c.name: c.share for c in self.map.classes.values()}
        self._facts.started_unix_seconds = time.time()
        self._facts.class_names = {c.id: c.name for c in self.map.classes.values()}
        self._facts.owners = config.owners
        self._traffic = Traffic(self.server.stats)
        self._growth = Growth(self._bytes_now)
        self._registry = node_registry(self.server.stats, self.store.stats, self._facts, self._evictions, self._holdings)
        starts = note_start(config.data_dir, time.time())
        self._facts.starts = starts.total
        self._check = SelfCheck(self.values, starts.recent, tell=self._tell_of_fault)
        self._look_at_itself(self._check)
        self._facts.ready = True
        self.control.start()
        self.control.set_ready(True)
        ports = {"data": self.server.port, "gRPC": self.control.port, "http": self.http.port}
        log.info(f"serving on {', '.join(f'{address_text(self.config.host, port)} ({name})' for name, port in ports.items())}")

    def _tell_of_rdma(self, server: _native.Server) -> None:
        if server.rdma:
            self.log.info(f"RDMA {server.rdma}, {format_bytes(server.stats()['verbs_registered_bytes'])} registered")
        elif server.rdma_note.startswith(RDMA_AMISS):
            self.log.warn(f"no RDMA, though there is a device: {server.rdma_note}")
        else:
            self.log.info(f"no RDMA: {server.rdma_note or 'switched off'}")

    def _check_directory(self) -> None:
        """Whose it is, and that nobody serves it, before any port: a second daemon of a directory has the ports of the first, too."""
        directory = self.config.data_dir
        owned.check(directory, self.map.cluster_id, self.config.node_id)
        with owned.held(directory):
            pass  # the store takes it for good: HTTP answers while that loads its index

    def _open_store(self) -> None:
        directory = self.config.data_dir
        limits = {owner.tag: owner.limits for owner in self.config.owners}
        rule = self.config.policy or self.map.rules.policy
        policy = EvictionPolicy.of_classes(
            self.map.classes.values(), bucket_seconds=self.map.bucket_seconds, owners=limits, replacement=rule
        )
        began = time.monotonic()
        try:
            self.store = _native.Store(
                str(directory),
                capacity_bytes=self.capacity_bytes,
                strict_sync=self.config.strict_sync,
                bucket_seconds=self.map.bucket_seconds,
                virtual_clock=self.config.virtual_clock,
                retention_seconds=policy.retention_table(),
            )
        except DirectoryInUse as error:
            raise DirectoryInUse(error.pid, str(directory)) from None
        except RuntimeError as error:
            raise ConfigError("E122", f"data directory {directory}", str(error), "mend that, or name another with --data") from None
        owned.claim(directory, self.map.cluster_id, self.config.node_id)
        stats = self.store.stats()
        how = "loaded" if stats["start_mode"] == "clean" else stats["start_mode"]
        why = f": {stats['start_reason']}" if stats["start_reason"] else ""
        self.index_start = f"{how} in {format_seconds(time.monotonic() - began)}{why}"
        loaded = f", filter of {stats['filter_keys']} keys loaded" if stats["filter_start"] == "loaded" else ""
        self.log.info(f"index {self.index_start}, {stats['entries']} extents{loaded}")
        if stats["filter_start"] and not loaded:
            self.log.warn(f"saved filter ignored: {stats['filter_start']}; the start scan builds another")
        if rule != "lru":
            self.log.info(f"replacement {rule}")
        self.store.set_admission(self.map.rules.admit == "second-touch", self.map.rules.write_budget_bytes)
        self._evictions.contract_seconds = {c.name: c.keep_seconds for c in self.map.classes.values()}
        now = self._bucket_seconds_now()
        self._dropped = Dropped(directory, now if stats["start_mode"] == "fresh" else 0.0)
        self._facts.retention_bounds = self._retention_bounds
        self.evictor = Evictor(self.store, policy, self._evicted)
        self.evictor.start()
        if self.config.scrub_bytes_per_second:
            self.scrubber = Scrubber(self.store, directory, self.config.scrub_bytes_per_second)
            self._facts.scrub_ended = lambda: self.scrubber.ended if self.scrubber else 0.0
            self.scrubber.start()
            self.log.info(f"scrub of {format_bytes(self.config.scrub_bytes_per_second)} a second")

    def _bucket_seconds_now(self) -> float:
        return float(self.store.bucket_now() * self.map.bucket_seconds) if self.store else 0.0

    def _evicted(self, retention_class: str, reason: str, sizes_bytes: Sequence[int], ages_seconds: Sequence[float]) -> None:
        self._evictions.evicted(retention_class, reason, sizes_bytes, ages_seconds)
        if reason in EARLY_REASONS and self._dropped and ages_seconds:
            name = retention_class if retention_class in CLASSES else "other"
            self._dropped.note(name, self._bucket_seconds_now() - min(ages_seconds) + self.map.bucket_seconds)  # the bucket's end

    def _retention_bounds(self) -> tuple[dict[str, float], float]:
        if self._dropped is None or self.store is None:
            return {}, 0.0
        now = self._bucket_seconds_now()
        bounds = {name: max(1.0, now - until) for name, until in list(self._dropped.until.items()) if name in CLASSES}
        return bounds, max(1.0, now - self._dropped.born) if self._dropped.born else 0.0

    def facts(self) -> dict[str, object]:
        """What the ready line says. Only while serving."""
        assert self.server and self.control and self.http
        return {
            "id": self.config.node_id,
            "pid": os.getpid(),
            "address": address_text(self.config.host, self.server.port),
            "admin": address_text(self.config.host, self.control.port),
            "http": address_text(self.config.host, self.http.port),
            "cluster": self.map.cluster_id,
            "epoch": self.map.epoch,
            "boot_id": self.server.boot_id,
            "io": self.server.io,
            "rdma": self.server.rdma,
            "index": self.index_start,
        }

    # --- run ---

    def serve_until_stopped(self) -> int:
        """Returns the exit code: 0 after a drain in which nothing was cut off, else 1."""
        activity = Activity()
        looked = logged = time.monotonic()
        wear_due = looked
        assert self.server and self.store and self._traffic and self._growth and self._check
        while not self._draining:
            self._wake.wait(min(MAP_POLL_SECONDS, self.config.log_interval_seconds))
            self._wake.clear()
            now = time.monotonic()
            self._traffic.sample()
            self._growth.sample()
            if now >= wear_due:
                wear_due = now + WEAR_LOOK_SECONDS
                threading.Thread(target=self._read_wear, name="kvstore-wear", daemon=True).start()  # a disk may take seconds to tell
            self._look_at_itself(self._check)
            self._tell_of_damage(self.store)
            behind = now - looked >= MAP_POLL_SECONDS and self.server.stats()["epoch_seen"] > self.map.epoch
            if self._reload.is_set() or (behind and self._map_mark() != self._mark_read):
                looked = now
                self._reload.clear()
                self._reload_quietly()
            if now - logged >= self.config.log_interval_seconds:
                if line := activity.line(self.server.stats(), self.store.stats()["used_bytes"], self.capacity_bytes, now - logged):
                    self.log.info(line)
                logged = now
        return self._stop()

    @property
    def stopping(self) -> bool:
        return self._draining

    def request_stop(self) -> None:
        """Begins the drain; harmless twice."""
        self._draining = True
        self._wake.set()

    def request_reload(self) -> None:
        self._reload.set()
        self._wake.set()

    def reload_map(self) -> int:
        """Reads the map again and gives the newest epoch. Raises ConfigError where it is bad; then the old one stays."""
        with self._lock:
            self._mark_read = self._map_mark()
            found = self.config.load_map()
            if found is not None and found.epoch >= self.map.epoch:
                self.map.check_successor(found)
                if found.epoch > self.map.epoch:
                    self.log.info(f"map has epoch {found.epoch}, was {self.map.epoch}")
                self.map = found
                self._facts.epoch = found.epoch
                if self.server:
                    self.server.set_epoch(found.epoch)
            return self.map.epoch

    def _map_mark(self) -> tuple[int, ...]:
        """Changes when the map file does: a client may name any epoch, and need not make us parse the same file each second."""
        try:
            stat = self.config.cluster_map_path.stat() if self.config.cluster_map_path else None
        except OSError:
            return ()
        return (stat.st_mtime_ns, stat.st_size, stat.st_ino) if stat else ()

    def _reload_quietly(self) -> None:
        try:
            self.reload_map()
        except KvstoreError as error:
            self.log.error(f"map not taken, epoch {self.map.epoch} stays: {error}")

    # --- end ---

    def drain(self, timeout_seconds: float) -> bool:
        """For the Drain call: begins the drain and waits for its end. True: nothing was cut off."""
        if timeout_seconds > 0:
            self._drain_seconds = timeout_seconds
        self.request_stop()
        self._drained.wait(self._drain_seconds + 5)
        return bool(self.drain_finished)

    def _stop(self) -> int:
        assert self.server
        began = time.monotonic()
        self._facts.ready = False
        if self.control:
            self.control.set_ready(False)
        self.log.info(f"draining, at most {self._drain_seconds:g} s")
        self.drain_finished = self.server.drain(self._drain_seconds)
        if not self.drain_finished:
            self.log.warn(f"{self.server.stats()['inflight']} requests were cut off after {self._drain_seconds:g} s")
        self._drained.set()
        self._close(clean=True)
        self.log.info(f"stopped in {format_seconds(time.monotonic() - began)}")
        return 0 if self.drain_finished else 1

    def _close(self, clean: bool) -> None:
        logging.getLogger("kvstore").removeHandler(self._log_handler)
        if self.server:
            self.server.stop()
        if self.control:
            self.control.close(CONTROL_GRACE_SECONDS)
        if self.http:
            self.http.close()
        if self.evictor:
            self.evictor.stop()
        if self.scrubber:
            self.scrubber.stop()
        if self.store:
            self.store.close(clean)
        self.server = self.store = self.evictor = self.scrubber = self.control = self.http = self._registry = None

    # --- faces ---

    def checks(self) -> dict[str, str]:
        """Readiness by part: "" where it is well, else why not."""
        return {
            "store": "" if self.store else "starting: the index is being loaded",
            "server": "" if self.server else "not listening yet",
            "drain": "draining" if self._draining else "",
        }

    def metrics_text(self) -> bytes | None:
        registry = self._registry  # a drain takes it away
        if registry is None:
            return None
        from prometheus_client import generate_latest

        return generate_latest(registry)

    def _holdings(self) -> list[Holding]:
        store = self.store
        if store is None:
            return []
        now, seconds, found = store.bucket_now(), self.map.bucket_seconds, []
        for number, owner, _, used_bytes in store.queues():
            oldest = [bucket for bucket, _, _ in store.peek(number, owner, 1)]
            found.append(Holding(class_of(number), owner, used_bytes, max(0.0, float(seconds * (now - oldest[0]))) if oldest else 0.0))
        return found

    def _read_wear(self) -> None:
        self._facts.wear_ratio = wear_ratio(self.config.data_dir)

    def _tell_of_fault(self, severity: str, line: str) -> None:
        {"INFO": self.log.info, "WARN": self.log.warn, "ERR": self.log.error}[severity](line)

    def _look_at_itself(self, check: SelfCheck) -> None:
        check.look()
        self._facts.firing = check.firing

    def _tell_of_damage(self, store: _native.Store) -> None:
        """One line a look, however much was found."""
        damages, count = store.take_damages()
        if count:
            segment, offset, size_bytes, shard, was_read = damages[0]
            what = "fails its sums" if was_read else "cannot be read"
            where = f"shard {shard}, {format_bytes(size_bytes)} at {offset} of segments/{segment:08x}.seg, {what}"
            self.log.warn(f"dropped {count} damaged shard{'s' if count > 1 else ''}: {where}{', and others' if count > 1 else ''}")

    def _bytes_now(self) -> tuple[int, int]:
        assert self.store
        stats = self.store.stats()
        return stats["used_bytes"], stats["put_bytes_total"]

    def values(self) -> dict[str, float]:
        return flat_values(self._registry)

    def status(self) -> node_pb2.StatusReply:
        from kvstore.server.proto import node_pb2

        assert self.server and self.store and self.control and self.http and self._traffic and self._growth
        server, store, moved, grown = self.server.stats(), self.store.stats(), self._traffic.window(), self._growth.window()
        return node_pb2.StatusReply(
            id=self.config.node_id,
            cluster=self.map.cluster_id,
            epoch=self.map.epoch,
            epoch_seen=server["epoch_seen"],
            state=node_pb2.STATE_DRAINING if self._draining else node_pb2.STATE_READY,
            boot_id=self.server.boot_id,
            pid=os.getpid(),
            version=version(),
            uptime_seconds=time.monotonic() - self._started_at,
            data_address=address_text(self.config.host, self.server.port),
            admin_address=address_text(self.config.host, self.control.port),
            http_address=address_text(self.config.host, self.http.port),
            data_directory=str(self.config.data_dir),
            io=self.server.io,
            capacity_bytes=self.capacity_bytes,
            used_bytes=store["used_bytes"],
            extents=store["entries"],
            connections=server["connections"],
            requests_in_flight=server["inflight"],
            index_start=self.index_start,
            unix_seconds=time.time(),
            traffic=node_pb2.Traffic(
                seconds=moved.seconds,
                requests=moved.requests,
                bytes_in=moved.bytes_in,
                bytes_out=moved.bytes_out,
                read_counts=moved.read_counts,
            ),
            growth=node_pb2.Growth(seconds=grown.seconds, used_bytes=grown.used_bytes, written_bytes=grown.written_bytes),
        )

    def queues(self) -> node_pb2.ListQueuesReply:
        from kvstore.server.proto import node_pb2

        assert self.server
        stats = self.server.stats()
        return node_pb2.ListQueuesReply(
            queues=[node_pb2.Queue(op=op, requests=count) for op, count in stats["queued"].items()],
            write_bytes=stats["write_arena_used_bytes"],
            write_bytes_max=self.config.write_arena_bytes,
            read_head_bytes=stats["read_head_bytes"],
            read_head_bytes_max=stats["read_head_bytes_max"],
        )


def run_node(config: NodeConfig) -> int:
    """Runs a daemon until a signal (or the Drain call) ends it; returns its exit code. Call it from the main thread.

    Raises KvstoreError, with its one line, when it cannot start.
    """
    node = Node(config)
    return run_daemon(node, node.request_reload)


def raise_descriptor_limit() -> None:
    """Connections and segments need more than the 1,024 of a login shell; the hard limit is the system's word."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < DESCRIPTORS_MIN:
        what = f"only {hard} files may be open"
        raise ConfigError("E143", what, f"a daemon needs {DESCRIPTORS_MIN} and one for each connection", "ulimit -n 65536")
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
