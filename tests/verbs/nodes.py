"""Twelve native daemons' servers in this process, with RDMA: as a cluster of processes, but seconds to start where all is emulated.

python tests/verbs/nodes.py DIRECTORY DEVICE     one of them as a process, to be stopped (SIGSTOP); prints its port, ends with its input
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from server_tools import InProcess, serving
from verbs.guest import device_or_first

from kvstore.clustermap import ClusterMap, Node

POOL_BYTES = 4 << 20
DEVICE = os.environ.get("KVSTORE_NODE_RDMA_DEVICE") or device_or_first("rxe0")
CLIENT_DEVICE = os.environ.get("KVSTORE_RDMA_DEVICE") or device_or_first("rxe1")


@contextmanager
def cluster(
    directory: Path, *, device: str = DEVICE, host: str = "127.0.0.1", child: int = -1
) -> Iterator[tuple[list[InProcess], ClusterMap, int]]:
    """Nodes, their map, and the process id of node `child`, which is a process of its own and missing from the list; else 0."""
    with ExitStack() as stack:
        nodes, addresses, pid = [], [], 0
        for i in range(12):
            home = directory / f"node-{i:02}"
            if i == child:
                process = stack.enter_context(_child(home, device))
                assert process.stdout
                addresses.append(f"127.0.0.1:{int(process.stdout.readline())}")
                pid = process.pid
                continue
            nodes.append(
                stack.enter_context(serving(home, host=host, rdma_device=device, rdma_pool_bytes=POOL_BYTES, progress_timeout_seconds=20.0))
            )
            addresses.append(f"{host}:{nodes[-1].server.port}")
        yield nodes, ClusterMap.local([Node(f"node-{i:02}", f"host-{i:02}", a) for i, a in enumerate(addresses)], k=10, m=2), pid


class NativeCluster:
    """Servers of this process, which end and start again: client_tools.cluster_of where all is emulated."""

    def __init__(self, directory: Path, nodes: int = 12, *, k: int = 10, m: int = 2, host: str = "127.0.0.1") -> None:
        self._host = host
        self._homes = [directory / f"node-{i:02}" for i in range(nodes)]
        self._ports = [0] * nodes
        self._nodes: list[InProcess | None] = [None] * nodes
        self._shape = (k, m)

    def __enter__(self) -> Self:
        try:
            for node in range(len(self._homes)):
                self.restart(node)
        except BaseException:
            self.close()
            raise
        k, m = self._shape
        listed = [Node(f"node-{i:02}", f"host-{i:02}", f"{self._host}:{port}") for i, port in enumerate(self._ports)]
        self.map = ClusterMap.local(listed, k=k, m=m)
        return self

    def kill(self, node: int, signum: int = signal.SIGKILL) -> None:
        assert signum in (signal.SIGKILL, signal.SIGTERM), "a server of this process cannot stand still: client_tools.processes_of"
        if running := self._nodes[node]:
            self._nodes[node] = None
            running.close(in_order=signum == signal.SIGTERM)

    def restart(self, node: int) -> None:
        self.kill(node, signal.SIGTERM)
        limits = {"rdma_device": DEVICE, "rdma_pool_bytes": POOL_BYTES, "progress_timeout_seconds": 20.0}
        running = InProcess(self._homes[node], host=self._host, port=self._ports[node], **limits)
        self._nodes[node] = running
        self._ports[node] = running.server.port

    def close(self) -> None:
        for node in range(len(self._nodes)):
            self.kill(node, signal.SIGTERM)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@contextmanager
def _child(directory: Path, device: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, __file__, str(directory), device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
        assert process.stdin
        process.stdin.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()


def _serve(directory: Path, device: str) -> None:
    with serving(directory, rdma_device=device, rdma_pool_bytes=POOL_BYTES, progress_timeout_seconds=20.0) as node:
        print(node.server.port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2])
