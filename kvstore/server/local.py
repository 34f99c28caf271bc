"""A cluster of real daemon processes on this machine: for `kvstore up`, the demo, benchmarks and tests.

    DIRECTORY/map.toml            the cluster map: node i is "node-<i>", its own host, so that killing one process is losing a host
    DIRECTORY/node-00/            data of node 0, kept between starts
    DIRECTORY/node-00.log, .pid   what it said on stderr; its process id while it runs
    DIRECTORY/directory-00.log, .pid   the same of a window directory, where there is one
    DIRECTORY/lock                held while a LocalCluster runs here, with its pid inside

Daemons end in order when the process that started them is killed (kvstore.server.nursery). Not safe for use by several threads at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from kvstore.clustermap import DEFAULT_CLASSES, NO_RULES, ClusterMap, Node, RetentionClass, Rules
from kvstore.errors import ConfigError, DirectoryInUse, Unreachable
from kvstore.server.nursery import Forked, nursery

HOST: Final = "127.0.0.1"
PORTS_PER_NODE: Final = (
    3  # data, gRPC, HTTP: all data ports first, then all gRPC ports, then all HTTP ports; then one of each window directory
)
LOG_TAIL_BYTES: Final = 4096


class LocalCluster:
    """N daemons and their map. `start()` returns when all serve; leaving the context stops them. Data stays in `directory`.

    Window directories, where asked for, count on where the nodes end: `kill(cluster.nodes_count)` ends the first one."""

    def __init__(
        self,
        directory: str | Path,
        nodes: int = 12,
        *,
        capacity_bytes: int = 4 << 30,
        io: str | None = None,
        k: int = 10,
        m: int = 2,
        cluster_id: str = "dev",
        bucket_seconds: int = 60,
        classes: Sequence[RetentionClass] = DEFAULT_CLASSES,
        rules: Rules = NO_RULES,
        base_port: int = 0,
        extra_arguments: Sequence[str] = (),
        start_seconds: float = 60.0,
        stop_seconds: float = 20.0,
        fresh: bool = False,
        directories: int = 0,
        directory_arguments: Sequence[str] = (),
    ) -> None:
        """`capacity_bytes` is each node's. `io` None lets the daemon choose. `base_port` 0 takes any free ports. `extra_arguments` go to
        every node, `directory_arguments` to each of the `directories` window directories. `fresh`: the first start() erases what an
        earlier cluster left here. Raises ConfigError where `directory` holds a cluster of another shape."""
        self.directory = Path(directory)
        self.nodes_count = nodes
        self.capacity_bytes = capacity_bytes
        self.io = io
        self.base_port = base_port
        self.extra_arguments = tuple(extra_arguments)
        self.start_seconds = start_seconds
        self.stop_seconds = stop_seconds
        self.map_path = self.directory / "map.toml"
        self.directories_count = directories
        self.directory_arguments = tuple(directory_arguments)
        self.ready: list[dict[str, Any]] = [{} for _ in range(nodes + directories)]
        self._shape = (cluster_id, k, m, bucket_seconds, tuple(classes), rules)
        self._processes: list[Forked | None] = [None] * (nodes + directories)
        self._lock: IO[str] | None = None
        self._kept_ports: list[socket.socket] = []
        self._fresh = fresh
        self.map: ClusterMap = self._load_or_plan()

    # --- life ---

    def claim(self) -> None:
        """Takes the directory, and looks whether the ports that were asked for are free: what start() needs, before anything is said of it.
        Raises DirectoryInUse or ConfigError; else stop() gives the directory back."""
        self._acquire()
        try:
            for port in range(self.base_port, self.base_port + self._ports_count()) if self.base_port else ():
                if not port_is_free(port):
                    raise ConfigError("E107", f"port {port} is taken{port_owner(port)}", fix="stop it, or choose another with --port")
        except BaseException:
            self.stop()
            raise

    def start(self) -> Self:
        """Starts every daemon and waits until all serve. On DirectoryInUse, ConfigError or Unreachable nothing is left running."""
        self.claim()
        try:
            if self._fresh:
                self._remove_data()
            for attempt in range(3):
                self._choose_ports(fresh=attempt > 0 and self.base_port == 0)
                self.map.save(self.map_path)
                try:
                    self._start_nodes(range(len(self._processes)))
                    return self
                except Unreachable as error:
                    # A port that was free a moment ago may be taken now; any other reason is the caller's to see.
                    if self.base_port or ("in use" not in error.cause and "E107" not in error.cause) or attempt == 2:
                        raise
                    self._stop_nodes()
            raise AssertionError("unreachable")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """SIGTERM to all, then SIGKILL to whoever is left after `stop_seconds`. Safe to call twice. Data stays."""
        self._stop_nodes()
        self._keep_ports(())
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    # --- single nodes ---

    def kill(self, node: int, signum: int = signal.SIGKILL) -> None:
        """Sends a signal to one daemon; after SIGKILL or SIGTERM waits until the process is gone, after SIGSTOP until it stands still."""
        process = self._processes[node]
        if process is None:
            return
        process.send_signal(signum)
        deadline = time.monotonic() + self.stop_seconds
        if signum in (signal.SIGKILL, signal.SIGTERM):
            self._reap(node, process, deadline)
        elif signum == signal.SIGSTOP:
            # One thread takes the signal, when it next has a processor; until then the others serve on.
            while not _stands_still(process.pid) and time.monotonic() < deadline:
                time.sleep(0.001)

    def restart(self, node: int) -> None:
        """Starts one daemon again on its directory and ports, stopping it first where it runs."""
        process = self._processes[node]
        if process is not None:
            process.send_signal(signal.SIGCONT)
            self.kill(node, signal.SIGTERM)
        self._await_ports(node)
        self._start_nodes([node])

    def _await_ports(self, node: int) -> None:
        """The ports of a daemon that was killed a moment ago may still be held by what is left of it."""
        ports = [int(address.rpartition(":")[2]) for address in self._addresses_of(node) if address]
        deadline = time.monotonic() + self.stop_seconds
        while not all(port_is_free(port) for port in ports) and time.monotonic() < deadline:
            time.sleep(0.02)

    def alive(self, node: int) -> bool:
        process = self._processes[node]
        return process is not None and process.poll() is None

    def pid(self, node: int) -> int | None:
        process = self._processes[node]
        return process.pid if process is not None and process.poll() is None else None

    def node_directory(self, node: int) -> Path:
        return self.directory / f"node-{node:02}"

    def log_path(self, node: int) -> Path:
        return self.directory / f"{self._name(node)}.log"

    # --- inside ---

    def _name(self, node: int) -> str:
        return f"node-{node:02}" if node < self.nodes_count else f"directory-{node - self.nodes_count:02}"

    def _addresses_of(self, node: int) -> tuple[str, ...]:
        if node >= self.nodes_count:
            return (self.map.directories[node - self.nodes_count],)
        entry = self.map.nodes[node]
        return entry.address, entry.admin_address, entry.metrics_address

    def _remove_data(self) -> None:
        """Under the lock: no other cluster runs here."""
        for path in (*self.directory.glob("node-*"), *self.directory.glob("directory-*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.map_path.unlink(missing_ok=True)
        self._fresh = False

    def _load_or_plan(self) -> ClusterMap:
        cluster_id, k, m, bucket_seconds, classes, rules = self._shape
        ports = range(1, 1 + PORTS_PER_NODE * self.nodes_count)  # stand-ins until start() chooses
        nodes = [Node(f"node-{i:02}", f"node-{i:02}", *_addresses(ports, i)) for i in range(self.nodes_count)]
        planned = ClusterMap.local(nodes, cluster_id=cluster_id, k=k, m=m, bucket_seconds=bucket_seconds, classes=classes, rules=rules)
        if self._fresh or not self.map_path.exists():
            return planned
        found = ClusterMap.load(self.map_path)
        same = (found.cluster_id, found.k, found.m, len(found.nodes)) == (cluster_id, k, m, self.nodes_count)
        if not same:
            raise ConfigError(
                "E136",
                f'{self.directory} holds cluster "{found.cluster_id}" of {len(found.nodes)} nodes, {found.k}+{found.m}',
                f'asked for "{cluster_id}" of {self.nodes_count}, {k}+{m}',
                "ask for the same shape, name another directory, or start empty with --fresh",
            )
        directories = found.directories[: self.directories_count]
        return replace(found, bucket_seconds=bucket_seconds, classes=planned.classes, rules=rules, directories=directories)

    def _acquire(self) -> None:
        if self._lock is not None:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = (self.directory / "lock").open("a+")
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError("E100", f"cannot use directory {self.directory}", reason, "name one you may write to") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip()
            lock.close()
            raise DirectoryInUse(int(holder) if holder.isdigit() else 0, str(self.directory)) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock

    def _choose_ports(self, fresh: bool) -> None:
        """Keeps the map's ports where they are free; else the ones from base_port on, or any free ones."""
        if self.base_port:
            ports = list(range(self.base_port, self.base_port + self._ports_count()))
        else:
            kinds = zip(*((n.address, n.admin_address, n.metrics_address) for n in self.map.nodes), strict=True)
            kept = [int(address.rpartition(":")[2] or 0) for kind in (*kinds, self.map.directories) for address in kind]
            usable = not fresh and len(kept) == self._ports_count() and min(kept) > 1024 and all(port_is_free(port) for port in kept)
            ports = kept if usable else free_ports(self._ports_count())
        self._keep_ports(ports)
        ports, directory_ports = ports[: PORTS_PER_NODE * self.nodes_count], ports[PORTS_PER_NODE * self.nodes_count :]
        placed = [_addresses(ports, i) for i in range(self.nodes_count)]
        nodes = tuple(
            replace(node, address=data, admin_address=admin, metrics_address=http)
            for node, (data, admin, http) in zip(self.map.nodes, placed, strict=True)
        )
        epochs = {number: replace(e, nodes=tuple(nodes[n.ordinal] for n in e.nodes)) for number, e in self.map.epochs.items()}
        self.map = replace(self.map, nodes=nodes, epochs=epochs, directories=tuple(f"{HOST}:{port}" for port in directory_ports))

    def _ports_count(self) -> int:
        return PORTS_PER_NODE * self.nodes_count + self.directories_count

    def _keep_ports(self, ports: Sequence[int]) -> None:
        """Other clusters of this host leave these ports alone while a daemon of ours is down: their UDP twins, unused, are the sign."""
        for each in self._kept_ports:
            each.close()
        self._kept_ports = [twin for port in ports if (twin := _udp_twin(port)) is not None]

    def _arguments(self, node: int) -> list[str]:
        if node >= self.nodes_count:
            return ["directory", "--listen", *self._addresses_of(node), "--map", str(self.map_path), *self.directory_arguments]
        entry = self.map.nodes[node]
        data, admin, http = (a.rpartition(":")[2] for a in (entry.address, entry.admin_address, entry.metrics_address))
        arguments = ["--data", str(self.node_directory(node)), "--capacity", str(self.capacity_bytes), "--host", HOST]
        arguments += ["--port", data, "--admin-port", admin, "--http-port", http, "--id", entry.id, "--map", str(self.map_path)]
        return arguments + (["--io", self.io] if self.io else []) + list(self.extra_arguments)

    def _start_nodes(self, nodes: Sequence[int]) -> None:
        waits = [(node, self._spawn(node)) for node in nodes]
        deadline = time.monotonic() + self.start_seconds
        for node, ready in waits:
            try:
                self.ready[node] = ready.result(max(0.0, deadline - time.monotonic()))
            except FutureTimeout:
                what = f"{self._name(node)} did not serve in {self.start_seconds:g} s"
                raise Unreachable("E201", what, self._log_tail(node), f"read {self.log_path(node)}") from None
            except EOFError:
                code = self._reap(node, self._processes[node], time.monotonic() + self.stop_seconds)
                what = f"{self._name(node)} ended at its start with exit code {code}"
                raise Unreachable("E201", what, self._log_tail(node), f"read {self.log_path(node)}") from None

    def _spawn(self, node: int) -> Future[dict[str, Any]]:
        if node < self.nodes_count:
            self.node_directory(node).mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self.log_path(node).open("ab"))
            said, stdout = os.pipe()
            stack.callback(os.close, stdout)
            output = os.fdopen(said, "rb")
            try:
                process = nursery().start(self._arguments(node), stdout, log.fileno())
            except OSError as error:
                output.close()
                raise Unreachable("E201", f"{self._name(node)} could not be started", str(error), "start again") from None
        self._processes[node] = process
        self.directory.joinpath(f"{self._name(node)}.pid").write_text(f"{process.pid}\n")
        ready: Future[dict[str, Any]] = Future()
        threading.Thread(target=_read_stdout, args=(output, ready), name=f"kvstore-stdout-{node}", daemon=True).start()
        return ready

    def _reap(self, node: int, process: Forked | None, deadline: float) -> int | None:
        if process is None:
            return None
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._processes[node] = None
        self.directory.joinpath(f"{self._name(node)}.pid").unlink(missing_ok=True)
        return process.returncode

    def _stop_nodes(self) -> None:
        running = [(node, process) for node, process in enumerate(self._processes) if process is not None]
        for _, process in running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGCONT)  # a stopped process takes its SIGTERM when it goes on
        deadline = time.monotonic() + self.stop_seconds
        for node, process in running:
            self._reap(node, process, deadline)

    def _log_tail(self, node: int) -> str:
        """The last line the daemon wrote, which by our own rule is its error."""
        with contextlib.suppress(OSError):
            text = self.log_path(node).read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
            return text.splitlines()[-1] if text else "it said nothing"
        return "it said nothing"


def _addresses(ports: Sequence[int], node: int) -> tuple[str, str, str]:
    """Data, gRPC and HTTP address of one node out of all ports."""
    data, admin, http = ports[node :: len(ports) // PORTS_PER_NODE]
    return f"{HOST}:{data}", f"{HOST}:{admin}", f"{HOST}:{http}"


def _read_stdout(stream: IO[bytes], ready: Future[dict[str, Any]]) -> None:
    """Takes the `ready {json}` line and throws away the rest, so that a daemon can never block on a full pipe."""
    with stream:
        for line in stream:
            if line.startswith(b"ready ") and not ready.done():
                try:
                    ready.set_result(json.loads(line[6:]))
                except ValueError:
                    ready.set_result({})
    if not ready.done():
        ready.set_exception(EOFError())


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now and no local cluster keeps, below those that the kernel gives to outgoing connections: a daemon that is
    down for a moment must find its port free when it comes back. All are held until all are found, so none comes twice."""
    try:
        first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        first_outgoing = 32768
    candidates = list(range(min(10_000, first_outgoing // 2), first_outgoing))
    random.SystemRandom().shuffle(candidates)
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in candidates:
            if len(found) == count:
                return found
            each = stack.enter_context(socket.socket())
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                each.bind((HOST, port))
                if (twin := _udp_twin(port)) is not None:
                    stack.enter_context(twin)
                    found.append(port)
    raise ConfigError("E107", f"fewer than {count} ports are free", fix="end some of the programs that listen")


def _udp_twin(port: int) -> socket.socket | None:
    """The UDP port of this number, bound; None where somebody has it."""
    twin = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        twin.bind((HOST, port))
    except OSError:
        twin.close()
        return None
    return twin


def _stands_still(pid: int) -> bool:
    """Whether all threads are stopped, or gone."""
    states = set()
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            states.add(task.read_text().rpartition(")")[2].split()[0])
    return states <= {"T", "t", "X", "Z"}


def port_is_free(port: int, host: str = HOST) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def port_owner(port: int) -> str:
    """ " by pid 4121 (kvstore)" where /proc tells who listens there, else ""."""
    wanted = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    wanted.add(f"socket:[{fields[9]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*") if wanted else ():
        with contextlib.suppress(OSError):
            if str(link.readlink()) in wanted:
                pid = link.parts[2]
                return f" by pid {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    return ""
