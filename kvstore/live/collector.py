"""Polls all nodes, the window directories and the client processes named, sums up each look, and keeps what plots and windows need: an hour
at most.

`poll` asks once, on the caller's thread; `start` does so on a thread of its own, each `interval_seconds`, until `stop`. What is kept is
bounded: FRAMES_MAX frames, EVENTS_MAX events, and of each node a few numbers a frame.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.cli.cluster import NodeReport, ask_nodes, require_some
from kvstore.cli.directories import DirectoryReport, ask_directories
from kvstore.cli.health import evaluate, overall
from kvstore.cli.health_memory import HealthMemory
from kvstore.cli.output import Health, rfc3339_now
from kvstore.cluster_view import group_lists, merged, retention, space
from kvstore.clustermap import ClusterMap
from kvstore.errors import KvstoreError
from kvstore.live.counts import Counts, added
from kvstore.live.frame import Data, class_rows, errors_of, hits_of, node_row, owner_rows, ratio, traffic_of
from kvstore.live.recent_log import RecentLog
from kvstore.live.scrape import ClientReport, ask_clients
from kvstore.live.sliding import Sliding
from kvstore.live.window_rows import agent_row, directory_counters, directory_row, is_agent, kept_counters
from kvstore.placement import Losses, Placement

FRAMES_MAX: Final = 720  # an hour at 5 s
EVENTS_MAX: Final = 200
REMEMBER_SECONDS: Final = 60.0
NODE_SERIES: Final = (
    "load_bytes_per_second",
    "save_bytes_per_second",
    "read_p99_seconds",
    "queued_requests",
    "used_ratio",
    "errors_per_second",
)


class Collector:
    """The map is read at each poll, so that a new epoch is seen; `clients` are addresses of /metrics pages; `log` is an access log."""

    def __init__(
        self,
        map_path: Path,
        clients: Sequence[str] = (),
        *,
        directories: Sequence[str] = (),
        log: RecentLog | None = None,
        interval_seconds: float = 5.0,
        timeout_seconds: float = 5.0,
    ) -> None:
        self._log = log
        self._map_path = map_path
        self._clients = tuple(clients)
        self._named = tuple(directories)
        self.interval_seconds = interval_seconds
        self._timeout = timeout_seconds
        self.map = ClusterMap.load(map_path)
        self._placement: Placement | None = None
        self._lists: NDArray[np.int32] | None = None  # the map's groups
        self._lock = threading.Lock()
        self._polling = threading.Lock()  # one look at a time, and `losses` between looks
        self._frame: Data | None = None
        self._reports: list[NodeReport] = []
        self._answered: dict[str, float] = {}  # node id or client URL -> when it last answered
        self._client_values: dict[str, Mapping[str, float]] = {}
        self._directory_values: dict[str, Mapping[str, float]] = {}
        self._agents: set[str] = set()  # URLs of clients that were seen to be agents
        self._at: float | None = None  # when the newest frame was complete
        self._asked: float | None = None  # when its questions went out
        self._window = Sliding()
        self._history: deque[Data] = deque(maxlen=FRAMES_MAX)
        self._node_history: dict[str, deque[tuple[float | None, ...]]] = {}
        self._events: deque[Data] = deque(maxlen=EVENTS_MAX)
        self._firing: dict[tuple[str, str], Health] = {}
        self._status: tuple[str, str] | None = None  # word, since
        self._remembered: tuple[set[str], int] = (set(), 0)  # what the health memory was last written for
        self._remembered_at = 0.0
        self.watched_since = rfc3339_now()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.fault = ""  # what the last poll could not do

    # --- life ---

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvstore-collector", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * self._timeout + 1)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due = max(due + self.interval_seconds, time.monotonic())
            try:
                self.poll()
                self.fault = ""
            except Exception as error:  # the page goes on and says how old its data is
                self.fault = f"{type(error).__name__}: {error}"

    # --- what others read ---

    @property
    def frame(self) -> Data | None:
        """The newest, None before the first poll; not to be changed."""
        return self._frame

    def age_seconds(self) -> float | None:
        """Of the newest frame."""
        at = self._at
        return None if at is None else time.monotonic() - at

    def events(self) -> list[Data]:
        """Newest first."""
        with self._lock:
            return list(self._events)[::-1]

    def history(self) -> dict[str, list[Any]]:
        """Series by name, all as long as "unix_seconds"."""
        with self._lock:
            frames = list(self._history)
        names = [name for name in frames[-1] if name != "kept"] if frames else []
        columns: dict[str, list[Any]] = {name: [frame[name] for frame in frames] for name in names}
        for name in sorted({name for frame in frames for name in frame["kept"]}):
            columns[f"kept_seconds.{name}"] = [frame["kept"].get(name) for frame in frames]
        return columns

    def node_history(self, node_id: str) -> dict[str, list[float | None]] | None:
        with self._lock:
            rows = list(self._node_history.get(node_id, ()))
        return {name: [row[at] for row in rows] for at, name in enumerate(("unix_seconds", *NODE_SERIES))} if rows else None

    def losses(self, without: Sequence[str] = ()) -> Losses:
        """What may be lost beside what is down already and the nodes named here."""
        with self._polling:
            if self._placement is None:
                self._placement = Placement(self.map)
            down = {report.node.ordinal for report in self._reports if not report.up}
            return self._placement.losses_survived(down | {self.map.node(name).ordinal for name in without})

    def require_some(self) -> None:
        """Raises Unreachable where not one node answered the last look."""
        require_some(self._reports, self.map)

    # --- one look ---

    def poll(self) -> Data:
        with contextlib.suppress(KvstoreError):  # a map file being replaced: the old one goes on
            found = ClusterMap.load(self._map_path)
            if found != self.map:
                if found.epoch != self.map.epoch:
                    self._tell("INFO", "map", "cluster", f"epoch {found.epoch}, was {self.map.epoch}")
                with self._polling:
                    self.map, self._placement, self._lists, self._reports = found, None, None, []
        asked = time.monotonic()
        addresses = list(dict.fromkeys([*self.map.directories, *self._named]))
        with ThreadPoolExecutor(2, "kvstore-others") as pool:
            clients_later = pool.submit(ask_clients, self._clients, self._timeout)
            directories_later = pool.submit(ask_directories, self.map, addresses, self._timeout)
            reports = ask_nodes(self.map, self._timeout)
            clients, directories = clients_later.result(), directories_later.result()
        now, unix = time.monotonic(), time.time()
        seconds = 0.0 if self._asked is None else asked - self._asked
        self._asked = asked
        earlier = {report.node.id: report for report in self._reports}
        rows, moved = self._nodes(reports, earlier, seconds, now)
        by_client = self._count_clients(clients, now)
        client_counts = merged(list(by_client.values()))
        node_counts = merged(moved)
        by_owner = self._count_directories(directories, now) | by_client
        kept_counts = merged([kept_counters(whose, counts) for whose, counts in by_owner.items()])
        self._window.add(now, seconds, node_counts, client_counts, kept_counts)
        health = self._health(reports, earlier, clients, directories)
        with self._polling:
            self._reports = reports
        losses = self.losses()
        up = [report for report in reports if report.up]
        window, of_each, window_seconds = self._window.counts("clients"), self._window.counts("of_each"), self._window.seconds
        there, kept = space(reports), retention(self.map, reports, self._groups())
        word, since = self._status or ("OK", self.watched_since)
        frame: Data = {
            "time": rfc3339_now(),
            "unix_seconds": unix,
            "interval_seconds": seconds or None,
            "watched_since": self.watched_since,
            "status": word,
            "status_since": since,
            "k": self.map.k,
            "m": self.map.m,
            "nodes_up": len(up),
            "nodes_total": len(reports),
            "hosts_losable": losses.hosts,
            "nodes_losable": losses.nodes,
            "readable": losses.readable,
            "losses": str(losses),
            "space": {
                **there.data(),
                "used_ratio": ratio(there.used_bytes, there.capacity_bytes),
                "cache_bytes": there.used_bytes * self.map.k // (self.map.k + self.map.m),
                "evicting": there.evicting,
            },
            "traffic": {
                **traffic_of(Counts(node_counts) if moved else None, seconds),
                "errors": errors_of(self._window.counts("nodes")),
                "window_seconds": window_seconds,
            },
            "hits": hits_of(clients, window, seconds, window_seconds, Counts(client_counts)),
            "classes": class_rows(kept, window, {name: each.keep_seconds for name, each in self.map.classes.items()}),
            "owners": owner_rows(up, window),
            "log": self._log.data() if self._log else None,
            "clients": [self._client_row(client, now) for client in clients],
            "agents": [agent_row(client, of_each, self._age(client.url, now)) for client in clients if client.url in self._agents],
            "directories": [directory_row(each, of_each, window_seconds, self._age(each.address, now)) for each in directories],
            "nodes": rows,
            "health": [vars(check) for check in health],
        }
        self._keep(frame, unix)
        self._frame, self._at = frame, now
        return frame

    def _groups(self) -> NDArray[np.int32]:
        if self._lists is None:
            self._lists = group_lists(self.map)
        return self._lists

    def _nodes(
        self, reports: Sequence[NodeReport], earlier: Mapping[str, NodeReport], seconds: float, now: float
    ) -> tuple[list[Data], list[dict[str, float]]]:
        rows, moved = [], []
        for report in reports:
            before = earlier.get(report.node.id)
            counts = _between(before, report, seconds)
            if report.up:
                self._answered[report.node.id] = now
                if before is not None and before.up and before.pid != report.pid:
                    self._tell("INFO", "node", report.node.id, f"started again, pid {report.pid}")
                if before is not None and before.up and before.version != report.version:
                    self._tell("INFO", "node", report.node.id, f"version {report.version}, was {before.version}")
            if counts is not None:
                moved.append(counts)
            age = self._age(report.node.id, now)
            rows.append(node_row(report, self.map.epoch, None if counts is None else Counts(counts), seconds, age))
        return rows, moved

    def _age(self, name: str, now: float) -> float | None:
        """Of the last answer of a node, client or directory."""
        answered = self._answered.get(name)
        return None if answered is None else now - answered

    def _count_clients(self, clients: Sequence[ClientReport], now: float) -> dict[str, dict[str, float]]:
        """What each counted since the look before. One that was away in between is counted from this look on."""
        parts = {}
        for client in clients:
            before = self._client_values.pop(client.url, None)
            known = client.url in self._answered
            if client.up:
                if is_agent(client.values):
                    self._agents.add(client.url)
                if before is not None:
                    parts[client.url] = added(before, client.values)
                elif known:
                    self._tell("INFO", "client", client.url, "answers again")
                self._client_values[client.url] = client.values
                self._answered[client.url] = now
            elif before is not None:
                self._tell("INFO", "client", client.url, f"does not answer: {client.error}")
        return parts

    def _count_directories(self, directories: Sequence[DirectoryReport], now: float) -> dict[str, dict[str, float]]:
        """As _count_clients. That one does not answer is told by its check."""
        parts = {}
        for each in directories:
            before, counters = self._directory_values.pop(each.address, None), directory_counters(each)
            if each.up:
                if before is not None:
                    parts[each.address] = added(before, counters)
                self._directory_values[each.address] = counters
                self._answered[each.address] = now
        return parts

    def _client_row(self, client: ClientReport, now: float) -> Data:
        counts = Counts(client.values)
        return {
            "url": client.url,
            "state": "up" if client.up else "down",
            "error": client.error or None,
            "age_seconds": self._age(client.url, now),
            "connected_nodes": counts.sum("kvstore_agent_connected_nodes") if client.up else None,
            "queued_requests": counts.sum("kvstore_agent_queued_requests") if client.up else None,
        }

    def _health(
        self,
        reports: Sequence[NodeReport],
        earlier: Mapping[str, NodeReport],
        clients: Sequence[ClientReport],
        directories: Sequence[DirectoryReport],
    ) -> list[Health]:
        """What `kvstore status` would say, with an event for each check that begins or ends."""
        age = 0.0
        with contextlib.suppress(OSError):
            age = max(0.0, time.time() - self._map_path.stat().st_mtime)
        memory = HealthMemory(self._map_path)  # read anew: mutes come from other processes
        health = memory.settle(evaluate(self.map, reports, earlier or None, clients=clients, directories=directories, map_age_seconds=age))
        self._remember(memory)
        for mute in memory.ended:
            self._tell("INFO", "mute", mute.code, "is muted no more: there is more of it than when it was muted", mute.code)
        now = rfc3339_now()
        before, self._firing = self._firing, {}
        for check in health:
            known = before.pop((check.code, check.subject), None)
            self._firing[check.code, check.subject] = check
            if known is None or known.severity != check.severity:
                self._tell(check.severity, "health", check.subject, f"{check.code} {check.summary}", check.code)
        for check in before.values():
            self._tell("OK", "health", check.subject, f"{check.code} is over", check.code)
        word = overall(health)
        if self._status is None or self._status[0] != word:
            self._status = (word, now)
        return health

    def _remember(self, memory: HealthMemory) -> None:
        """Seldom, so that a mute which another process writes just now is not written over."""
        state = (set(memory.seen), len(memory.ended))
        if state != self._remembered or time.monotonic() - self._remembered_at > REMEMBER_SECONDS:
            memory.save()
            self._remembered, self._remembered_at = state, time.monotonic()

    def _tell(self, severity: str, kind: str, subject: str, text: str, code: str | None = None) -> None:
        event = {"time": rfc3339_now(), "unix_seconds": time.time(), "severity": severity, "kind": kind, "subject": subject, "text": text}
        with self._lock:
            self._events.append({**event, "code": code})

    def _keep(self, frame: Data, unix: float) -> None:
        hits, traffic = frame["hits"], frame["traffic"]
        slim: Data = {
            "unix_seconds": unix,
            "hit_ratio": hits["hit_ratio_now"],
            "load_p99_seconds": hits["load_p99_seconds_now"],
            "read_p50_seconds": traffic["read_p50_seconds"],
            "read_p99_seconds": traffic["read_p99_seconds"],
            "load_bytes_per_second": traffic["load_bytes_per_second"],
            "save_bytes_per_second": traffic["save_bytes_per_second"],
            "evicted_bytes_per_second": traffic["evicted_bytes_per_second"],
            "errors_per_second": traffic["errors_per_second"],
            "used_ratio": frame["space"]["used_ratio"],
            "nodes_up": frame["nodes_up"],
            "kept": {row["retention_class"]: kept_seconds(row) for row in frame["classes"]},
        }
        with self._lock:
            self._history.append(slim)
            ids = {row["id"] for row in frame["nodes"]}
            for name in self._node_history.keys() - ids:
                del self._node_history[name]
            for row in frame["nodes"]:
                kept = self._node_history.setdefault(row["id"], deque(maxlen=FRAMES_MAX))
                kept.append((unix, *(row[name] for name in NODE_SERIES)))


def _between(before: NodeReport | None, after: NodeReport, seconds: float) -> dict[str, float] | None:
    """What a node counted since the look before; None where that cannot be known: a first look, or away at the last one."""
    if not after.up or seconds <= 0:
        return None
    if before is not None and before.up and before.pid == after.pid:
        return added(before.values, after.values)
    if before is not None and after.uptime_seconds <= seconds:  # began in this interval
        return added({}, after.values)
    return None


def kept_seconds(row: Data) -> float | None:
    """Of a class: what is attained (0: too many nodes are down for anything to be read); where nothing bounds it, the age of its oldest."""
    attained: float | None = row["attained_seconds"]
    oldest: float | None = row["oldest_seconds"]
    return oldest if attained is None else attained
