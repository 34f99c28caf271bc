"""Congestion control: both ends use the algorithm that was named, and one that this kernel lacks is said and changes nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from client_tools import SMALL, chain
from server_tools import Client as Peer
from server_tools import daemon, serving

from kvstore import tcp
from kvstore.client import Client, ClientConfig
from kvstore.clustermap import ClusterMap, Node
from kvstore.errors import ConfigError
from kvstore.server.config import NodeConfig

OTHER = "reno"  # in every kernel, allowed to everybody
HOSTS = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


@contextmanager
def sockets_of_this_process() -> Iterator[list[socket.socket]]:
    """Own handles of all its TCP sockets, the native parts' included."""
    found = []
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            handle = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed meanwhile
            continue
        if handle.family == socket.AF_INET and handle.type == socket.SOCK_STREAM:
            found.append(handle)
        else:
            handle.close()
    try:
        yield found
    finally:
        for handle in found:
            handle.close()


def algorithms(local_port: int | None = None, peer_port: int | None = None) -> list[str]:
    """Of the connected sockets of this process with one of these ports."""
    names = []
    with sockets_of_this_process() as handles:
        for handle in handles:
            try:
                peer = handle.getpeername()[1]
            except OSError:  # not connected
                continue
            if handle.getsockname()[1] == local_port or peer == peer_port:
                names.append(handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode())
    return names


@pytest.mark.parametrize("name", [OTHER, "cubic", ""])
def test_a_server_uses_what_it_was_told_on_every_connection(tmp_path: Path, name: str) -> None:
    with serving(tmp_path, congestion_control=name) as server:
        server.small()
        server.bulk()
        assert algorithms(local_port=server.address[1]) == [name or HOSTS] * 2


@pytest.mark.parametrize("name", [OTHER, tcp.HOST])
def test_a_client_uses_what_it_was_told_on_every_connection(tmp_path: Path, name: str) -> None:
    with daemon(tmp_path) as server:
        port = int(server.ready["address"].rpartition(":")[2])
        cluster_map = ClusterMap.local([Node("node-00", "node-00", f"127.0.0.1:{port}")], k=1, m=0)
        with Client(cluster_map, layout=SMALL, config=ClientConfig(congestion_control=name)) as client:
            assert client.lookup(chain(2, SMALL)).hit_blocks == 0
            assert set(algorithms(peer_port=port)) == {HOSTS if name == tcp.HOST else name}


def test_a_daemon_says_that_this_kernel_lacks_the_algorithm_and_serves(tmp_path: Path) -> None:
    with daemon(tmp_path, "--congestion-control", "nosuch") as server:
        assert "no such file" in server.wait_line("congestion control nosuch", "not used")
        assert isinstance(server, Peer) and server.discover(bytes(32)) == []


def test_the_kernels_own_words_say_why_it_refuses() -> None:
    assert tcp.refusal("host") == "" and tcp.refusal(OTHER) == ""
    assert tcp.refusal("nosuch")


@pytest.mark.parametrize("name", ["", "Cubic", "a" * 16, "a b", "../x", "cubic\n"])
def test_what_cannot_be_a_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="congestion_control"):
        NodeConfig(tmp_path, congestion_control=name)
    with pytest.raises(ConfigError, match="congestion_control"):
        ClientConfig(congestion_control=name)
