"""Clusters of real daemons for the measurements, and what can be seen of them from outside: memory, disk reads, where records lie."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import Bench
from benchmarks.prompts import LAYOUT
from kvstore.client import Client, ClientConfig
from kvstore.server.local import LocalCluster

NODES = 12
BUSY_TICKS_MAX = 3  # hundredths of a second, of all daemons together in half a second


class Rig:
    """A cluster and one client of it."""

    def __init__(self, cluster: LocalCluster, client: Client) -> None:
        self.cluster = cluster
        self.client = client

    @property
    def pids(self) -> list[int]:
        return [pid for node in range(NODES) if (pid := self.cluster.pid(node)) is not None]

    def disk_read_bytes(self) -> int:
        """Bytes that the daemons made the disk read since they started."""
        total = 0
        for pid in self.pids:
            for line in Path(f"/proc/{pid}/io").read_text().splitlines():
                if line.startswith("read_bytes:"):
                    total += int(line.split()[1])
        return total

    def settle(self, timeout_seconds: float = 60.0) -> None:
        """Returns when what was written is on disk and the daemons rest: a start scan is over, nothing is freed or sealed."""
        os.sync()
        deadline = time.monotonic() + timeout_seconds
        before = self._busy_ticks()
        while time.monotonic() < deadline:
            time.sleep(0.5)
            now = self._busy_ticks()
            if now - before <= BUSY_TICKS_MAX:
                return
            before = now

    def _busy_ticks(self) -> int:
        return sum(sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) for pid in self.pids)

    @contextlib.contextmanager
    def stopped(self, *nodes: int) -> Iterator[None]:
        """These daemons under SIGSTOP."""
        for node in nodes:
            self.cluster.kill(node, signal.SIGSTOP)
        try:
            yield
        finally:
            for node in nodes:
                self.cluster.kill(node, signal.SIGCONT)


def rig(
    bench: Bench,
    stack: ExitStack,
    name: str,
    *,
    capacity_bytes: int = 4 << 30,
    io: str | None = None,
    config: ClientConfig | None = None,
) -> Rig:
    """A cluster in its own folder, with a client; both end with the stack. What earlier measurements wrote is on disk by then."""
    os.sync()
    cluster = stack.enter_context(LocalCluster(bench.directory / name, NODES, capacity_bytes=capacity_bytes, io=io))
    client = stack.enter_context(Client(cluster.map, layout=LAYOUT, config=config or ClientConfig()))
    return Rig(cluster, client)


def forget_pages(folder: Path) -> None:
    """All files under `folder` leave the page cache, but for pages that are dirty (os.sync() first) or mapped by a process (the index)."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that is its own: neither the index file's pages nor libraries, which the kernel can take back."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return (int(fields["RssAnon"].split()[0]) + int(fields["RssShmem"].split()[0])) << 10


def resident_bytes_without(pid: int, folder: Path) -> int:
    """Resident memory of a process without what it maps from files under `folder` (the index is a file: its pages are a cache)."""
    total = 0
    skip = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if words and "-" in words[0] and not words[0].endswith(":"):
            skip = len(words) > 5 and words[5].startswith(str(folder))
        elif words and words[0] == "Rss:" and not skip:
            total += int(words[1]) << 10
    return total


def bytes_on_disk(folder: Path) -> int:
    """What the file system gave to all files under `folder`: holes do not count."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
