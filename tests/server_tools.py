"""What the tests of the storage daemon share: records with known bytes, a server in this process, a daemon in its own."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore import record, wire
from kvstore.clustermap import ClusterMap, Node
from kvstore.kernels import _native
from kvstore.server.nursery import Forked, nursery

if TYPE_CHECKING:
    from kvstore.server.proto import node_pb2

ROOT = Path(__file__).resolve().parent.parent
TAG = ClusterMap.local([Node("node-00", "node-00", "127.0.0.1:1")], k=1, m=0).tag  # of cluster "dev"
V41_PLANES = (28_480,) * 4
DEADLINE_SECONDS = 20.0
CACHESTAT = 451  # the system call, Linux 6.5


def make_record(seed: int, *, blocks: int = 4, planes: Sequence[int] = V41_PLANES, **fields: Any) -> record.Record:
    """A record whose every byte follows from `seed`."""
    dice = random.Random(seed)
    key = fields.pop("extent_key", None) or dice.randbytes(32)
    k = fields.get("k", 10)
    tags = [int.from_bytes(key[8:16], "little"), *(dice.getrandbits(64) for _ in range(blocks - 1))]
    return record.Record(
        owner=fields.pop("owner", wire.NO_OWNER),
        extent_key=key,
        write_id=fields.pop("write_id", dice.getrandbits(64)),
        shard=fields.pop("shard", 0),
        k=fields.pop("k", 10),
        m=fields.pop("m", 2),
        plane_bytes=planes,
        tags=tags,
        pieces=[[dice.randbytes(record.shard_bytes_of(n, k)) for _ in range(blocks)] for n in planes],
        digests=[[dice.randbytes(16) for _ in range(blocks)] for _ in planes],
        **fields,
    )


def extent_of(r: record.Record, first: int = 0, count: int | None = None) -> wire.ReadExtent:
    return wire.ReadExtent(r.extent_key, r.write_id, r.shard, first, r.block_count - first if count is None else count)


def assert_item(body: bytes, r: record.Record, plane: int, first: int = 0, count: int | None = None) -> None:
    """An OK item's body is exactly that plane of that block range of `r`."""
    count = r.block_count - first if count is None else count
    item = wire.decode_item(body, count)
    pieces = r.pieces[plane][first : first + count]
    assert item.pieces == b"".join(pieces)
    assert item.digests == tuple(r.digests[plane][first : first + count])
    sums = (record.piece_sum(r.owner, r.extent_key, r.write_id, r.shard, plane, first + i, p) for i, p in enumerate(pieces))
    assert item.sums == tuple(sums)


def until(holds: Callable[[], Any], what: str, deadline_seconds: float = DEADLINE_SECONDS) -> Any:
    """The first true answer of `holds`, asked every 10 ms."""
    pause = threading.Event()
    deadline = time.monotonic() + deadline_seconds
    while time.monotonic() < deadline:
        if answer := holds():
            return answer
        pause.wait(0.01)
    raise AssertionError(f"not within {deadline_seconds:g} s: {what}")


def pages_dropped(descriptor: int) -> bool:
    """Asks the kernel to forget a file's pages; False where some are still there.

    Pages that went out by sendfile stay as long as a network buffer has them, and a processor frees those when its next packet comes.
    """
    home = os.sched_getaffinity(0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.bind(("127.0.0.1", 0))
        for processor in home:
            os.sched_setaffinity(0, {processor})
            here.sendto(b"", here.getsockname())
    os.sched_setaffinity(0, home)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    whole, found = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 5)()
    if ctypes.CDLL(None).syscall(CACHESTAT, descriptor, whole, found, 0):
        return True  # this kernel does not tell
    return found[0] == 0


class Client:
    """Connections to one server, closed together."""

    def __init__(self, address: tuple[str, int], tag: bytes = TAG) -> None:
        self.address = address
        self.tag = tag
        self._open: list[wire.Connection] = []

    def connect(self, role: wire.Role | None, timeout_seconds: float = DEADLINE_SECONDS) -> wire.Connection:
        """Greeted with that role; None: connected and silent."""
        hello = None if role is None else wire.Hello(role, self.tag, epoch=1)
        connection = wire.Connection(self.address, hello, timeout_seconds)
        self._open.append(connection)
        return connection

    def small(self) -> wire.Connection:
        return self.connect(wire.Role.SMALL)

    def bulk(self) -> wire.Connection:
        return self.connect(wire.Role.BULK)

    def write(self, *records: record.Record, bulk: wire.Connection | None = None) -> list[wire.Status]:
        """Stores records over one connection, one after the other."""
        with nullcontext(bulk) if bulk else self._for_a_moment(wire.Role.BULK) as connection:
            return [wire.Status(connection.ask(wire.Verb.WRITE, record.build(r)).status) for r in records]

    def discover(self, *keys: bytes, owner: bytes = wire.NO_OWNER) -> list[wire.Writing]:
        with self._for_a_moment(wire.Role.SMALL) as connection:
            found, busy = wire.decode_discover_reply(connection.ask(wire.Verb.DISCOVER, wire.encode_discover(keys, owner=owner)).body)
        assert not busy
        return found

    @contextmanager
    def _for_a_moment(self, role: wire.Role) -> Iterator[wire.Connection]:
        """Closed at once: who asks again and again would come to the limit of connections."""
        connection = self.connect(role)
        try:
            yield connection
        finally:
            self._open.remove(connection)
            connection.close()

    def close_connections(self) -> None:
        while self._open:
            self._open.pop().close()

    def close(self) -> None:
        self.close_connections()


class InProcess(Client):
    """A store and a native server in this process."""

    def __init__(self, directory: Path, **limits: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.store = _native.Store(str(directory), capacity_bytes=1 << 30)
        try:
            host = limits.pop("host", "127.0.0.1")
            self.server = _native.Server(self.store, host, limits.pop("port", 0), cluster16=TAG, epoch=limits.pop("epoch", 1), **limits)
        except BaseException:
            self.store.close(False)
            raise
        super().__init__((host, self.server.port))

    def drop_pages(self) -> None:
        """Nothing of the stored bytes is in the page cache when this returns."""
        self.store.flush()
        for path in self.directory.rglob("*.seg"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                until(partial(pages_dropped, file.fileno()), f"{path.name} is out of the page cache")

    @property
    def stats(self) -> dict[str, Any]:
        return self.server.stats()

    def close(self, *, in_order: bool = True) -> None:
        """Not in order: what the store would leave at its end it does not."""
        super().close()
        self.server.stop()
        self.store.close(in_order)


@contextmanager
def serving(directory: Path, **limits: Any) -> Iterator[InProcess]:
    server = InProcess(directory, **limits)
    try:
        yield server
    finally:
        server.close()


@dataclass
class Ended:
    code: int
    stdout: list[str]
    stderr: list[str]


class Daemon(Client):
    """A daemon in a process of its own; starts in the constructor, which returns when it serves."""

    def __init__(
        self, directory: Path, *arguments: str, id: str = "node-00", map_path: Path | None = None, tag: bytes = TAG, nofile: int = 0
    ) -> None:
        """`nofile`: its limit of open descriptors."""
        self.process, self._lines = spawn(directory, *arguments, "--id", id, *(["--map", str(map_path)] if map_path else []), nofile=nofile)
        self.stderr: list[str] = []
        self.ready = self._wait_ready()
        host, _, port = self.ready["address"].rpartition(":")
        super().__init__((host, int(port)), tag)

    def _wait_ready(self) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            stream, line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            if stream == "stdout" and line.startswith("ready "):
                found: dict[str, Any] = json.loads(line[6:])
                return found
            if stream == "stderr":
                self.stderr.append(line)
            if stream == "end":
                raise AssertionError(f"the daemon ended at its start: {self.stderr}")

    def wait_line(self, *words: str) -> str:
        """A line of its log that holds all words, waited for where it has not come yet."""
        for line in self.stderr:
            if all(word in line for word in words):
                return line
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            stream, line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            if stream == "stderr":
                self.stderr.append(line)
                if all(word in line for word in words):
                    return line
            if stream == "end":
                raise AssertionError(f"the daemon ended: {self.stderr}")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def proc(self, name: str) -> str:
        return Path(f"/proc/{self.process.pid}/{name}").read_text()

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    def rss_bytes(self) -> int:
        return int(self.proc("statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def status(self) -> node_pb2.StatusReply:
        import grpc  # not above: it costs who does without it seconds, where all is emulated

        from kvstore.server.proto import node_pb2, node_pb2_grpc

        with grpc.insecure_channel(self.ready["admin"]) as channel:
            reply: node_pb2.StatusReply = node_pb2_grpc.NodeStub(channel).Status(node_pb2.StatusRequest(), timeout=DEADLINE_SECONDS)
            return reply

    def connections(self) -> int:
        return int(self.status().connections)

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def wait(self) -> Ended:
        code = self.process.wait(DEADLINE_SECONDS)
        return replace(drain_lines(self._lines, self.stderr), code=code)

    def stop(self) -> Ended:
        if self.alive:
            self.signal(signal.SIGTERM)
        return self.wait()

    def close(self) -> None:
        super().close()
        if self.alive:
            self.process.kill()
        self.process.wait(DEADLINE_SECONDS)
        drain_lines(self._lines, self.stderr)


@contextmanager
def daemon(directory: Path, *arguments: str, **options: Any) -> Iterator[Daemon]:
    directory.mkdir(parents=True, exist_ok=True)
    running = Daemon(directory, *arguments, **options)
    try:
        yield running
    finally:
        running.close()


Lines = queue.Queue[tuple[str, str]]


def spawn(directory: Path, *arguments: str, nofile: int = 0) -> tuple[Forked | subprocess.Popen[bytes], Lines]:
    """Starts a daemon; its output lines arrive in the queue as ("stdout" | "stderr", line), and ("end", "") at each stream's end."""
    full = ["--data", str(directory), "--capacity", "1GB", *arguments]
    pipes = [os.pipe(), os.pipe()]
    (_, stdout), (_, stderr) = pipes
    process: Forked | subprocess.Popen[bytes]
    if nofile:
        command = ["prlimit", f"--nofile={nofile}:{nofile}", sys.executable, "-m", "kvstore.server", *full]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environ)
    else:
        process = nursery().start(full, stdout, stderr)
    lines: Lines = queue.Queue()

    def read(name: str, descriptor: int) -> None:
        with os.fdopen(descriptor) as stream:
            for line in stream:
                lines.put((name, line.rstrip("\n")))
        lines.put(("end", ""))

    for name, (descriptor, written) in zip(("stdout", "stderr"), pipes, strict=True):
        os.close(written)
        threading.Thread(target=read, args=(name, descriptor), daemon=True).start()
    return process, lines


def run_to_end(directory: Path, *arguments: str) -> Ended:
    """A daemon that is expected to end by itself."""
    process, lines = spawn(directory, *arguments)
    try:
        code = process.wait(DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return replace(drain_lines(lines, []), code=code)


def drain_lines(lines: Lines, stderr: list[str]) -> Ended:
    """All output of a process that has ended."""
    ended = Ended(0, [], stderr)
    ends = 0
    while ends < 2:
        try:
            stream, line = lines.get(timeout=1.0)
        except queue.Empty:
            break  # an end was taken by someone who waited for a line
        ends += stream == "end"
        if stream == "stdout":
            ended.stdout.append(line)
        elif stream == "stderr":
            ended.stderr.append(line)
    return ended
