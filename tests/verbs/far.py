"""Clusters on another host, for the clients' suite on this one (client_tools.cluster_of): two guests, joined by a wire.

    python tests/verbs/far.py serve               on the one: a connection is a cluster, which ends with it
    python tests/verbs/far.py run WORD ...        on the other: runs the command, with KVSTORE_FAR_CLUSTERS set, then ends the server

A line each way, JSON: {"nodes": 12, "k": 10, "m": 2} is answered by the map as TOML; {"kill": 3, "signal": 9} and {"restart": 3} by true
when it is done. {"end": true} ends the server.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from verbs.nodes import NativeCluster

from kvstore.clustermap import ClusterMap

HOST: Final = "10.77.0.1"  # of the first guest
PORT: Final = 5001
SECONDS: Final = 300.0


class _Line:
    def __init__(self) -> None:
        self._socket = _connected()
        self._file = self._socket.makefile("rw")

    def ask(self, **what: Any) -> Any:
        print(json.dumps(what), file=self._file, flush=True)
        return json.loads(self._file.readline())

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class FarCluster:
    """NativeCluster, over there."""

    def __init__(self, nodes: int = 12, *, k: int = 10, m: int = 2) -> None:
        self._line = _Line()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "map.toml"
            path.write_text(self._line.ask(nodes=nodes, k=k, m=m))
            self.map = ClusterMap.load(path)

    def kill(self, node: int, signum: int = signal.SIGKILL) -> None:
        assert self._line.ask(kill=node, signal=int(signum))

    def restart(self, node: int) -> None:
        assert self._line.ask(restart=node)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._line.close()


def _connected() -> socket.socket:
    from client_tools import until  # which asks us for clusters

    found: list[socket.socket] = []

    def listens() -> bool:
        try:
            found.append(socket.create_connection((HOST, PORT), SECONDS))
        except OSError:
            return False
        return True

    until(listens, f"{HOST} listens", SECONDS)
    return found[0]


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True


class _Asked(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        first = self._next()
        if "end" in first:
            self._answer(True)
            self.server.shutdown()
            return
        with tempfile.TemporaryDirectory() as folder, NativeCluster(Path(folder), host=HOST, **first) as cluster:
            path = Path(folder) / "map.toml"
            cluster.map.save(path)
            self._answer(path.read_text())
            while asked := self._next():
                if "kill" in asked:
                    cluster.kill(asked["kill"], asked["signal"])
                else:
                    cluster.restart(asked["restart"])
                self._answer(True)

    def _next(self) -> dict[str, Any]:
        """Nothing: the other side has gone."""
        line = self.rfile.readline()
        asked: dict[str, Any] = json.loads(line) if line else {}
        return asked

    def _answer(self, what: object) -> None:
        self.wfile.write(json.dumps(what).encode() + b"\n")


def _serve() -> int:
    with _Server((HOST, PORT), _Asked) as server:
        server.serve_forever()
    return 0


def _run(words: list[str]) -> int:
    ended = subprocess.run(words, env={**os.environ, "KVSTORE_FAR_CLUSTERS": "yes"}, check=False)
    _Line().ask(end=True)
    return ended.returncode


if __name__ == "__main__":
    sys.exit(_serve() if sys.argv[1] == "serve" else _run(sys.argv[2:]))
