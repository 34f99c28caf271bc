"""`kvstore agent`: one agent for several engine workers of a host, by a Unix socket and shared memory. docs/AGENT.md tells how it behaves.

start   map -> shared memory (locked where the limits allow) -> HTTP -> socket -> `ready {json}`
run     a thread a worker reads its requests (session.py); what waits for nodes runs on one pool; the main thread waits
end     SIGTERM, SIGINT or `kvstore agent drain`: no new work -> loads and stores end -> what runs elsewhere later is moved ->
        the directory forgets this agent -> exit 0. A second signal ends the process at once: all it has is a cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from prometheus_client import generate_latest

from kvstore.client.agent.activity import LINE_SECONDS, AgentActivity
from kvstore.client.agent.agent import Agent
from kvstore.client.agent.arena import Arena, lock_memory, make_memory
from kvstore.client.agent.bodies import Hello
from kvstore.client.agent.config import AgentConfig
from kvstore.client.agent.frames import address_of
from kvstore.client.agent.link import Kind, Message, check_peer
from kvstore.client.agent.moving import move_windows
from kvstore.client.agent.process_config import ProcessConfig
from kvstore.client.agent.process_metrics import process_registry
from kvstore.client.agent.ram import RamTier
from kvstore.client.agent.session import REQUESTS_MAX, Session
from kvstore.client.agent.taker import Taker
from kvstore.client.client import Client
from kvstore.client.config import ClientConfig
from kvstore.client.ticket import read_ticket_key
from kvstore.clustermap import ClusterMap
from kvstore.daemon import address_text, run_daemon
from kvstore.errors import ConfigError, KvstoreError, ProtocolError, Unreachable
from kvstore.http import HttpServer, daemon_pages
from kvstore.layout import Layout
from kvstore.mapfile import LOOK_SECONDS, MapFile
from kvstore.server.log import Log, LogHandler
from kvstore.server.ports import port_fault
from kvstore.units import format_bytes, format_seconds
from kvstore.version import version

CONTROLS_MAX: Final = 4  # connections beside the workers': status, drain
POLL_SECONDS: Final = 0.2
NAMED_TRIES: Final = 4
CONNECTIONS_MAX: Final = 1024  # for bulk, to all nodes; a load takes up to twelve
IDLE_SECONDS: Final = 15.0  # after a burst they are closed
CONTROL_SECONDS: Final = 2.0  # what a `kvstore agent drain` may take to read its answer


@dataclass(slots=True)
class Drained:
    """How a drain went."""

    finished: bool = True  # nothing was cut off
    seconds: float = 0.0
    loads_cut: int = 0
    stores_cut: int = 0
    windows_moved: int = 0
    windows_left: int = 0
    windows_why: str = ""  # some are left
    windows_to: str = ""  # the agents that were asked to take them, the first first
    handoffs_moved: int = 0  # that nobody here had taken
    handoffs_left: int = 0


class AgentProcess:
    """The process without its signals; `run_agent` adds them. Safe to use from any thread."""

    def __init__(self, config: ProcessConfig) -> None:
        self.config = config
        self.log = Log("agent")
        self._log_handler = LogHandler(self.log)
        self.draining = False
        self.drained: Drained | None = None
        self.own_bytes = config.worker_bytes
        self.quota_bytes = config.quota_bytes or config.memory_bytes // 2
        self.ram = RamTier(config.ram_bytes) if config.ram_bytes else None
        self.pool = ThreadPoolExecutor(REQUESTS_MAX * config.workers_max, "kvstore-agent")  # made when needed
        self.locked = ""  # why the memory is not locked; "": it is
        self.http: HttpServer | None = None
        self._agents: dict[Hello, Agent] = {}
        self._takers: dict[Agent, Taker] = {}
        self._sessions: dict[Session, threading.Thread] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._done = threading.Event()
        self._listener: socket.socket | None = None
        self._socket_lock = -1
        self._acceptor: threading.Thread | None = None
        self._started_at = time.monotonic()

    # --- start ---

    def start(self) -> None:
        """Serves when it returns. On any error all that was taken is given back. Raises ConfigError."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        config = self.config
        logging.getLogger("kvstore").addHandler(self._log_handler)
        self.map_file = MapFile(config.map_path)
        self.map = ClusterMap.load(config.map_path)
        self._ticket_key = read_ticket_key(config.ticket_key_path, "E185") if config.ticket_key_path is not None else b""
        self._check_socket()
        self._check_transport()
        try:
            self.memory_fd, self.memory = make_memory("kvstore-agent", config.memory_bytes, read_only=True)
        except OSError as error:
            raise ConfigError(
                "E186", f"shared memory of {format_bytes(config.memory_bytes)}", str(error.strerror), "ask for less"
            ) from None
        self.arena = Arena(config.memory_bytes)
        self.locked = lock_memory(self.memory)
        if self.locked:
            wanted = format_bytes(config.memory_bytes)
            self.warn(f"memory is not locked ({self.locked}), it may be swapped. Fix: ulimit -l above {wanted}, or LimitMEMLOCK=infinity")
        registry = process_registry(self)
        with port_fault(config.http_host, config.http_port, "--http-port"):
            self.http = HttpServer(config.http_host, config.http_port, daemon_pages(self.checks, lambda: generate_latest(registry)))
        self._listen()
        self.log.info(f"kvstore {version()}, agent for cluster {self.map.cluster_id}, epoch {self.map.epoch}, pid {os.getpid()}")

    def _check_transport(self) -> None:
        """Raises ConfigError E145 to E149 where reads must go by RDMA and cannot: now, not when the first worker comes."""
        if (self.config.transport or ClientConfig().transport) == "rdma":
            own = ClientConfig(transport="rdma", **self.config.fabric)
            Client(self.map, layout=Layout.single(4096), config=own).close()  # of any layout: nothing is read

    def _check_socket(self) -> None:
        """Raises ConfigError E188 where another agent answers or starts, E100 where there is something that is no socket."""
        path = self.config.socket_path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.exists() and not path.is_socket():
                raise ConfigError("E100", str(path), "is there and is no socket", "name another path with --socket")
        except OSError as error:
            raise ConfigError("E100", f"socket {path}", (error.strerror or str(error)).lower(), "name a path you may write to") from None
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.settimeout(POLL_SECONDS)
            probe.connect(str(path))
            raise ConfigError("E188", f"socket {path}", "an agent answers there", "stop that one, or name another with --socket")
        self._lock_socket(path)

    def _lock_socket(self, path: Path) -> None:
        """Of two that start at once both would find no other, and the one whose socket is replaced would be deaf for ever."""
        try:
            self._socket_lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._socket_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "E188", f"socket {path}", "an agent starts or ends there", "stop that one, or name another with --socket"
            ) from None
        except OSError as error:
            raise ConfigError("E100", f"socket {path}", (error.strerror or str(error)).lower(), "name a path you may write to") from None

    def _listen(self) -> None:
        """Under a name of its own first, so that nobody finds it before only we may open it, and a stale one is replaced at once."""
        path = self.config.socket_path
        own = path.with_name(f"{path.name}.{os.getpid()}")
        own.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(own))
            own.chmod(0o600)
            self._listener.listen(64)
            own.rename(path)
        except OSError as error:
            own.unlink(missing_ok=True)
            raise ConfigError("E100", f"socket {path}", (error.strerror or str(error)).lower(), "name a path you may write to") from None
        self._socket_inode = path.stat().st_ino
        self._acceptor = threading.Thread(target=self._accept, name="kvstore-accept", daemon=True)
        self._acceptor.start()

    def facts(self) -> dict[str, Any]:
        """What the ready line says."""
        assert self.http is not None
        return {
            "pid": os.getpid(),
            "socket": str(self.config.socket_path),
            "http": address_text(self.config.http_host, self.http.port),
            "cluster": self.map.cluster_id,
            "epoch": self.map.epoch,
            "memory_bytes": self.config.memory_bytes,
            "locked": not self.locked,
        }

    # --- workers ---

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._done.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._done.wait(POLL_SECONDS):  # out of descriptors: whoever waits goes on waiting
                    return
                continue
            try:
                check_peer(connection)
                with self._lock:
                    if self._done.is_set() or len(self._sessions) >= self.config.workers_max + CONTROLS_MAX:
                        raise Unreachable("E213", "agent", "has as many connections as it takes")
                    session = Session(self, connection)
                    thread = threading.Thread(target=self._serve, args=(session,), name="kvstore-worker", daemon=True)
                    self._sessions[session] = thread
                    thread.start()
            except (KvstoreError, OSError, RuntimeError) as error:
                self.count("worker", "refused")
                self.warn(f"connection refused: {error}")
                connection.close()

    def _serve(self, session: Session) -> None:
        try:
            session.run()
        finally:
            with self._lock:
                del self._sessions[session]
            if session.hello is not None:
                self.count("worker", "ended")

    def attach(self, session: Session, hello: Hello) -> Agent:
        """The agent for this kind of engine. Raises Unreachable E213 while there is no place, ProtocolError E639 for one kind too many."""
        kind = replace(hello, name="")
        with self._lock:
            if self.draining:
                raise Unreachable("E213", "agent", "is draining", "attach to another, or wait for the next")
            if sum(other.hello is not None for other in self._sessions) >= self.config.workers_max:
                raise Unreachable("E213", "agent", f"has its {self.config.workers_max} workers", "end one, or --workers N")
            found = self._agents.get(kind)
            if found is None:
                if len(self._agents) >= self.config.kinds_max:
                    self._forget_unused_kind()
                found = self._agents[kind] = self._agent(kind)
            session.kind = kind
            return found

    def taker_of(self, agent: Agent) -> Taker:
        """What others send to this agent."""
        return self._takers[agent]

    def _forget_unused_kind(self) -> None:
        used = {session.kind for session in self._sessions}
        unused = next((kind for kind in self._agents if kind not in used), None)
        if unused is None:
            cause = f"serves {len(self._agents)} already (layout, owner, KV group, block tokens and slots make a kind)"
            raise ProtocolError("E639", "engine of another kind than this agent", cause, "start the agent with --kinds N")
        self._close_agent(self._agents.pop(unused))

    def _close_agent(self, agent: Agent) -> None:
        self._takers.pop(agent).close()
        agent.close()
        agent.client.close()

    def _agent(self, kind: Hello) -> Agent:
        config = self.config
        own = ClientConfig(
            block_tokens=kind.block_tokens, close_seconds=1.0,  # a drain has waited already
            bulk_connections_max=CONNECTIONS_MAX // config.kinds_max, idle_timeout_seconds=IDLE_SECONDS, **config.fabric,
        )  # fmt: skip
        if self._ticket_key:
            own = replace(own, ticket_key=self._ticket_key)
        if config.transport:
            own = replace(own, transport=config.transport)
        client = Client(self.map, layout=kind.layout, config=own, owner=kind.owner, kv_group=kind.kv_group, ram=self.ram)
        taker = Taker(kind.owner, config.handoff_bytes // config.kinds_max, self.quota_bytes)
        try:
            agent = Agent(
                client,
                handoffs=taker.inbox,
                config=AgentConfig(
                    window_bytes=config.window_bytes // config.kinds_max, slots=kind.slots,
                    directories=config.directories, advertise="" if self._agents else config.advertise,
                    host=config.host, port=0 if self._agents else config.port,
                ),
            )  # fmt: skip
        except OSError as error:
            client.close()
            what = f"cannot listen on {config.host}:{config.port} for other agents"
            raise ConfigError("E189", what, (error.strerror or str(error)).lower(), "--listen another HOST:PORT") from None
        except BaseException:
            client.close()
            raise
        taker.watch(agent)
        self._takers[agent] = taker
        return agent

    def request_reload(self) -> None:
        """Reads the map again, soon."""
        self.map_file.request()

    def look_at_map(self) -> None:
        """Takes a newer epoch over, from the map's file; where that is bad the old one stays."""
        if not self.map_file.changed():
            return
        try:
            found = self.map_file.newer(self.map)
            if found is not None:
                self.log.info(f"map has epoch {found.epoch}, was {self.map.epoch}")
                with self._lock:
                    self.map = found
                    for agent in self._agents.values():
                        agent.take_map(found)
        except KvstoreError as error:
            self.log.error(f"map not taken, epoch {self.map.epoch} stays: {error}")

    def count(self, what: str, result: str) -> None:
        with self._lock:
            self._counts[what, result] += 1

    def warn(self, text: str) -> None:
        self.log.warn(text)

    # --- faces ---

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        with self._lock:
            return Counter(self._counts)

    @property
    def agents(self) -> Sequence[Agent]:
        with self._lock:
            return tuple(self._agents.values())

    @property
    def sessions(self) -> Sequence[Session]:
        """Of workers."""
        with self._lock:
            return tuple(session for session in self._sessions if session.hello is not None)

    def checks(self) -> dict[str, str]:
        """Readiness by part: "" where it is well, else why not."""
        return {"socket": "" if self._acceptor else "not listening yet", "drain": "draining" if self.draining else ""}

    def control(self, message: Message) -> dict[str, Any]:
        """What `kvstore agent status` and `drain` are told."""
        if message.kind == Kind.STATUS:
            return self.status()
        try:
            asked = json.loads(message.body)
            seconds = min(3600.0, max(0.1, float(asked.get("seconds", self.config.drain_seconds))))
            to = asked.get("to", "")
            if to:
                address_of(to)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):  # 10^400 s; a list a thousand deep
            raise ProtocolError("E637", "drain", "is not understood") from None
        self.request_stop(seconds, to)
        self._done.wait(seconds + CONTROL_SECONDS)
        return asdict(self.drained or Drained(finished=False))

    def status(self) -> dict[str, Any]:
        ram = self.ram.stats() if self.ram else None
        agents = self.agents
        return {
            **self.facts(),
            "version": version(),
            "state": "draining" if self.draining else "ready",
            "uptime_seconds": round(time.monotonic() - self._started_at, 1),
            "quota_bytes": self.quota_bytes,
            "pinned_bytes": self.arena.taken_bytes,
            "workers": [session.facts() for session in self.sessions],
            "workers_max": self.config.workers_max,
            "ram": None if ram is None else {name: getattr(ram, name) for name in ram.__slots__},
            "windows": [asdict(agent.windows.stats()) for agent in agents],
            "addresses": [agent.address for agent in agents if agent.address],
            "nodes_connected": max((int(agent.client.stats()["connected_nodes"]) for agent in agents), default=0),
            "counts": {f"{what}_{result}": number for (what, result), number in sorted(self.counts.items())},
        }

    # --- end ---

    @property
    def stopping(self) -> bool:
        return self._wake.is_set()

    def request_stop(self, seconds: float | None = None, to: str = "") -> None:
        """Begins the drain; harmless twice. Safe in a signal handler. `to`: the agent that takes the windows."""
        if not self._wake.is_set():
            self._drain_seconds = seconds or self.config.drain_seconds
            self._drain_to = to or self.config.drain_to
            self._wake.set()

    def serve_until_stopped(self) -> int:
        """Returns the exit code: 0 after a drain in which nothing was cut off, else 1."""
        activity, told = AgentActivity(), time.monotonic()
        while not self._wake.wait(LOOK_SECONDS):
            self.look_at_map()
            for agent in self.agents:
                agent.peers.close_idle()
            if (now := time.monotonic()) - told >= LINE_SECONDS:
                stats = {agent: agent.client.stats() for agent in self.agents}
                if line := activity.line(stats, self.arena.taken_bytes, self.arena.size_bytes, now - told):
                    self.log.info(line)
                told = now
        drained = self.drain(self._drain_seconds, self._drain_to)
        self.close()
        return 0 if drained.finished else 1

    def drain(self, seconds: float, to: str = "") -> Drained:
        """No new work; what runs, and giving the windows to the agent at `to`, may take `seconds`; then it is cut. `to` "": to one that
        the directory names."""
        began = time.monotonic()
        end = began + seconds
        drained = Drained()
        self.log.info(f"draining, at most {seconds:g} s")
        with self._lock:
            self.draining = True
        for agent in self.agents:
            agent.leave()
        self._move(to, end, drained)
        pause = threading.Event()
        while any(session.working for session in self.sessions) and time.monotonic() < end:
            pause.wait(0.01)
        for session in self.sessions:
            facts = session.facts()
            drained.loads_cut += facts["loads"]
            drained.stores_cut += facts["stores"]
        for agent in self.agents:
            drained.finished &= agent.flush(max(0.0, end - time.monotonic()))
        drained.finished &= not (drained.loads_cut or drained.stores_cut)
        drained.seconds = round(time.monotonic() - began, 3)
        if not drained.finished:
            self.warn(f"{drained.loads_cut} loads and {drained.stores_cut} stores were cut off after {seconds:g} s")
        self.log.info(f"drained in {format_seconds(drained.seconds)}")
        self.drained = drained
        return drained

    def _move(self, to: str, end: float, drained: Drained) -> None:
        begun = []
        with ThreadPoolExecutor(2 * self.config.kinds_max, "kvstore-drain") as pool:  # none waits for another that takes all the time
            for agent in self.agents:
                taker, held = self._takers[agent], agent.windows.stats().entries
                if held or taker.waiting:
                    places = [place for place in ([to] if to else _named(agent, end)) if place != agent.address]
                    forwarding = pool.submit(taker.forward, agent.peers, places, end)
                    begun.append((places, pool.submit(move_windows, agent, places, end), forwarding))
        for places, moving, forwarding in begun:
            moved, handed = moving.result(), forwarding.result()
            drained.windows_moved += moved.entries
            drained.windows_left += moved.left
            drained.windows_why = drained.windows_why or moved.why or handed.why
            drained.windows_to = drained.windows_to or ", ".join(places)
            drained.handoffs_moved += handed.entries
            drained.handoffs_left += handed.left
        if drained.windows_left or drained.handoffs_left:
            lost = f"{drained.windows_left} window entries and {drained.handoffs_left} handoffs are lost"
            self.warn(f"{lost}, not moved to {drained.windows_to or 'another agent'}: {drained.windows_why}")
        if drained.windows_moved or drained.handoffs_moved:
            self.log.info(f"moved {drained.windows_moved} window entries and {drained.handoffs_moved} handoffs to {drained.windows_to}")

    def close(self) -> None:
        """Ends every session, forgets at the directory, gives all back. Safe after a failed start."""
        self._done.set()
        logging.getLogger("kvstore").removeHandler(self._log_handler)
        if self._listener is not None:
            with contextlib.suppress(OSError):
                if self.config.socket_path.stat().st_ino == self._socket_inode:
                    self.config.socket_path.unlink()
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accept
            self._listener.close()
        if self._socket_lock >= 0:
            os.close(self._socket_lock)
            self._socket_lock = -1
        if self._acceptor is not None:
            self._acceptor.join(POLL_SECONDS * 5)
        with self._lock:
            sessions = dict(self._sessions)
        for session in sessions:
            if session.hello is not None:
                session.end()
        end = time.monotonic() + CONTROL_SECONDS
        for thread in sessions.values():
            thread.join(max(0.0, end - time.monotonic()))
        for agent in self.agents:
            self._close_agent(agent)
        self.pool.shutdown(wait=False)
        if self.http is not None:
            self.http.close()
        if hasattr(self, "memory_fd"):
            os.close(self.memory_fd)
            del self.memory_fd


def _named(agent: Agent, end: float) -> list[str]:
    """Agents that the directory names; it may be slow now and then."""
    found: list[str] = []
    for _ in range(NAMED_TRIES if agent.directory is not None else 0):
        if not (found := agent.others()) and time.monotonic() < end:
            threading.Event().wait(POLL_SECONDS / 4)
            continue
        break
    return found


def run_agent(config: ProcessConfig) -> int:
    """Runs an agent until a signal or `kvstore agent drain` ends it; returns its exit code. Call it from the main thread.

    SIGHUP has it read the map again. Raises KvstoreError, with its one line, when it cannot start.
    """
    process = AgentProcess(config)
    return run_daemon(process, process.request_reload)
