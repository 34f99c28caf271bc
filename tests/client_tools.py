"""What the tests of the client share: clusters of real daemons, chains of keys, blocks whose bytes follow from their keys."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.client import Client, ClientConfig, LoadResult, Ticket
from kvstore.client.native import names_of
from kvstore.clustermap import ClusterMap
from kvstore.kernels import _native
from kvstore.keys import KeyChain, Keys, Namespace
from kvstore.layout import PRESETS, Layout, Section
from kvstore.placement import nodes_of_writings
from kvstore.server.local import LocalCluster

Blocks = npt.NDArray[np.uint8]
V41 = PRESETS["v41"]
SMALL = Layout((Section("a", 3_200), Section("b", 1_000)))  # 4,200 B a block: one plane, padded
EMULATED = os.environ.get("KVSTORE_TRANSPORT") == "rdma"  # tests/verbs: what takes a millisecond elsewhere takes fifty there
if EMULATED:
    ClientConfig.__init__.__kwdefaults__.update(  # type: ignore[attr-defined]  # a function, whatever a class says of it
        connect_timeout_seconds=60.0, stall_timeout_seconds=60.0, drain_timeout_seconds=20.0, lookup_deadline_seconds=60.0,
        load_deadline_seconds=200.0, store_deadline_seconds=200.0, ticket_seconds=900.0, rdma_zone_bytes=512 << 10,
    )  # fmt: skip
    once = Client.lookup

    def lookup(self: Client, keys: Keys, **options: Any) -> Ticket:
        """Again while it falls short, three times, or more beside nodes that are late: after half a second nobody waits for one, which is
        little there. (One that answered meanwhile is not late any more.)"""
        for attempt in range(20):
            found = once(self, keys, **options)
            stats = self.stats()
            if found.hit_blocks == len(keys) or (attempt > 2 and not stats["nodes_late"] + stats["nodes_down"]):
                break
        return found

    Client.lookup = lookup  # type: ignore[method-assign]  # of all tests of an emulated run
NO_REUSE = ClientConfig(promise_reuse_seconds=0)
WAIT_SECONDS = 200.0 if EMULATED else 20.0
_numbers = itertools.count(1)


def paced(seconds: float) -> float:
    """A deadline, or what something may take: by the pace of the machine that it runs on."""
    return seconds * 20 if EMULATED else seconds


class Cluster(Protocol):
    """What a test has of its daemons."""

    @property
    def map(self) -> ClusterMap: ...
    def kill(self, node: int, signum: int = signal.SIGKILL) -> None: ...
    def restart(self, node: int) -> None: ...


@contextmanager
def cluster_of(directory: Path, nodes: int = 12, *, k: int = 10, m: int = 2, capacity_bytes: int = 256 << 20) -> Iterator[Cluster]:
    """Daemons that can be killed and started again. Emulated they are servers of this process: a process takes half a minute to start."""
    if not EMULATED:
        with processes_of(directory, nodes, k=k, m=m, capacity_bytes=capacity_bytes) as processes:
            yield processes
        return
    from verbs.far import FarCluster
    from verbs.nodes import NativeCluster

    far = "KVSTORE_FAR_CLUSTERS" in os.environ
    with FarCluster(nodes, k=k, m=m) if far else NativeCluster(directory, nodes, k=k, m=m) as servers:
        yield servers


@contextmanager
def processes_of(directory: Path, nodes: int = 12, *, k: int = 10, m: int = 2, capacity_bytes: int = 256 << 20) -> Iterator[LocalCluster]:
    """Daemons that can be stopped (SIGSTOP), too."""
    start_seconds = 1200.0 if EMULATED else 60.0
    with LocalCluster(directory, nodes, k=k, m=m, capacity_bytes=capacity_bytes, start_seconds=start_seconds) as cluster:
        yield cluster


def chain(blocks: int, layout: Layout, seed: int | None = None) -> Keys:
    """Keys of a prompt that no other call has seen, unless `seed` is given."""
    number = next(_numbers) if seed is None else seed
    space = Namespace(weights=f"test-{number}", kv_dtype="test", layout_digest=layout.digest())
    return KeyChain(space).extend(np.arange(blocks * 128, dtype=np.uint32))


def bytes_of(keys: Keys, layout: Layout, salt: int = 0) -> Blocks:
    out = np.empty((len(keys), layout.block_bytes), np.uint8)
    _native.generate_blocks(keys, layout.block_bytes, out, salt)
    return out


def store(client: Client, keys: Keys, *, first: int = 0, salt: int = 0, lengths: list[int] | None = None) -> Blocks:
    """Stores keys[first:] in runs of `lengths` (one run by default), one after the other; the bytes that were stored."""
    data = bytes_of(keys[first:], client.layout, salt)
    at = first
    for length in lengths or [len(keys) - first]:
        result = client.store(keys[: at + length], data[at - first : at - first + length], first_block=at).result(WAIT_SECONDS)
        assert result.blocks == length, result
        at += length
    return data


def ticket_of_all(client: Client, keys: Keys) -> Ticket:
    """Names every shard. (A node that was silent for too long has none in it, and that is a whole hit, too.)"""
    found: list[Ticket] = []

    def whole() -> bool:
        found[:] = [client.lookup(keys)]
        return found[0].hit_blocks == len(keys) and not found[0].extents["absent"].any()

    until(whole, "a ticket with every shard")
    return found[0]


def whole_ticket(client: Client, keys: Keys) -> Ticket:
    """Of all blocks, at once; emulated, where a lookup may find its nodes silent for longer than it waits, after a while."""
    found = client.lookup(keys)
    if EMULATED:

        def whole() -> bool:
            nonlocal found
            found = client.lookup(keys)
            return found.hit_blocks == len(keys)

        until(whole, "a whole hit")
    assert found.hit_blocks == len(keys)
    return found


def until_whole(client: Client, keys: Keys) -> None:
    """Waits until every node has its shards of every extent: no acknowledgement waits for the last one, and no lookup."""
    until(partial(_whole, client, keys), "the last shards")


def _whole(client: Client, keys: Keys) -> bool:
    extents = client.lookup(keys).extents
    if int(extents["count"].sum()) < len(keys):
        return False
    with client._reaches.using() as reach:
        nodes = nodes_of_writings(reach.placements, extents["extent_key"], extents["write_epoch"])
        names = names_of(extents["extent_key"], extents["write_id"])
        asked = reach.core.promise(client.owner, reach.map.epoch, 0, 0, 0, 1, names, nodes, nodes.shape[1])  # neither pins nor touches
        return asked.wait(WAIT_SECONDS) and bool((asked.masks() == (1 << nodes.shape[1]) - 1).all())


def load(client: Client, ticket: Ticket, **options: object) -> tuple[LoadResult, Blocks]:
    """Loads into memory full of 0xEE, so that what was not written shows."""
    place = np.full((ticket.hit_blocks, client.layout.block_bytes), 0xEE, np.uint8)
    return client.load(ticket, place, **options), place  # type: ignore[arg-type]  # passed through


def until(true: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Waits for something that another process or thread will do; gives the processor away in between."""
    from threading import Event

    end, pause = time.monotonic() + seconds, Event()
    while not true():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        pause.wait(0.005)
