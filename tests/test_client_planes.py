"""Loads by plane ask for the next planes when little of those before is left to come, and go on whatever nodes do meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from client_tools import NO_REUSE, Blocks, chain, paced, store, whole_ticket
from faultpeer import Item, ItemRule, Peer, PeerCluster, Raw, Verdict

from kvstore.client import Client, ClientConfig, PlaneReady
from kvstore.keys import Keys
from kvstore.layout import Layout, Section
from kvstore.wire import Status

K, M, NODES = 2, 1, 3
PLANES, EXTENTS = 4, 5
WIDE = Layout(tuple(Section(f"part-{i}", 1 << 20) for i in range(PLANES)))  # a block an extent, a section a plane: 5 MiB of each plane
AHEAD_BYTES = 256 << 10  # kernels/client_pace.cpp
ZONE_BYTES = 8 << 20  # by RDMA: room for two planes, for what has no room in a node's zone is not asked for
PATIENT, IMPATIENT = 60.0, 0.001  # seconds without anything that came, until the next plane is asked for


@pytest.fixture(scope="module")
def stored() -> Iterator[tuple[PeerCluster, Keys, Blocks]]:
    assert len(WIDE.planes(K)) == PLANES
    with PeerCluster(NODES, k=K, m=M) as peers:
        keys = chain(EXTENTS, WIDE)
        with Client(peers.map, layout=WIDE) as client:
            data = store(client, keys, lengths=[1] * EXTENTS)
        yield peers, keys, data


@pytest.fixture
def peers(stored: tuple[PeerCluster, Keys, Blocks]) -> Iterator[list[Peer]]:
    yield stored[0].peers
    for peer in stored[0].peers:
        peer.item_rule = None


def load(
    stored: tuple[PeerCluster, Keys, Blocks], hedge: str = "lazy", plane_wait_seconds: float = ClientConfig().plane_wait_seconds
) -> list[PlaneReady]:
    """By plane; what each plane brought is right when it is handed on."""
    cluster, keys, data = stored
    place = np.full_like(data, 0xEE)
    config = replace(NO_REUSE, plane_wait_seconds=plane_wait_seconds, rdma_zone_bytes=ZONE_BYTES)
    with Client(cluster.map, layout=WIDE, config=config) as client:
        seen = []
        for ready in client.planes(whole_ticket(client, keys), place, hedge=hedge):  # type: ignore[arg-type]  # one of the two
            plane = WIDE.planes(K)[ready.plane]
            columns = slice(plane.offset_bytes, plane.offset_bytes + plane.bytes)
            assert (place[: ready.blocks, columns] == data[: ready.blocks, columns]).all()
            seen.append(ready)
    return seen


ALL = [PlaneReady(plane, EXTENTS) for plane in range(PLANES)]


class Order:
    """Of what peers are asked for: whether each plane was asked for too early. Its rule answers rightly, or waits for ever."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.answered_bytes = 0
        self.early: list[str] = []
        self.planes: set[int] = set()

    def rule(self, silent: bool) -> ItemRule:
        async def rule(item: Item) -> Verdict:
            with self.lock:
                self.planes.add(item.plane)
                before = EXTENTS * item.plane * K * len(item.body)  # of all planes before this one
                if self.answered_bytes < before - AHEAD_BYTES:
                    self.early.append(f"plane {item.plane} when {self.answered_bytes} of {before} bytes had been answered")
                if not silent:
                    self.answered_bytes += len(item.body)
            if silent:
                await asyncio.Event().wait()
            return None

        return rule


@pytest.mark.parametrize("hedge", ["lazy", "eager"])
def test_planes_are_asked_for_when_little_of_those_before_is_to_come(
    stored: tuple[PeerCluster, Keys, Blocks], peers: list[Peer], hedge: str
) -> None:
    order = Order()
    for peer in peers:
        peer.item_rule = order.rule(silent=False)
    assert load(stored, hedge, PATIENT) == ALL
    assert order.early == [] and order.planes == set(range(PLANES))


@pytest.mark.parametrize("wait_seconds", [PATIENT, IMPATIENT])
@pytest.mark.parametrize("hedge", ["lazy", "eager"])
@pytest.mark.parametrize("silent", range(NODES))
def test_planes_go_on_past_a_node_that_is_silent(
    stored: tuple[PeerCluster, Keys, Blocks], peers: list[Peer], silent: int, hedge: str, wait_seconds: float
) -> None:
    order = Order()
    for number, peer in enumerate(peers):
        peer.item_rule = order.rule(silent=number == silent)
    assert load(stored, hedge, wait_seconds) == ALL
    assert order.planes == set(range(PLANES))


def test_the_next_plane_is_asked_for_when_nothing_more_comes(stored: tuple[PeerCluster, Keys, Blocks], peers: list[Peer]) -> None:
    asked = asyncio.Event()

    async def when_the_next_is_asked_for(item: Item) -> Verdict:
        if item.ordinal and not asked.is_set():  # whoever is asked first is asked for the first plane alone
            await item.pipe.more()
            asked.set()
        return None

    for peer in peers:
        peer.item_rule = when_the_next_is_asked_for
    # Longer than connecting to the others takes: to them all planes would be due, and be asked for at once.
    assert load(stored, plane_wait_seconds=paced(0.2)) == ALL


def test_planes_go_on_past_items_that_are_refused(stored: tuple[PeerCluster, Keys, Blocks], peers: list[Peer]) -> None:
    async def refuse_odd_planes(item: Item) -> Verdict:
        return Status.BUSY if item.plane % 2 else None

    peers[1].item_rule = refuse_odd_planes
    assert load(stored) == ALL


def test_planes_of_the_extents_before_one_that_fails_all_come(stored: tuple[PeerCluster, Keys, Blocks], peers: list[Peer]) -> None:
    lost = stored[1][3].tobytes()  # the fourth extent's key

    async def forget_it(item: Item) -> Verdict:
        return Status.NOT_FOUND if item.extent_key == lost else None

    for peer in peers[:2]:
        peer.item_rule = forget_it
    seen = load(stored)
    assert [ready.plane for ready in seen] == list(range(PLANES)) and {ready.blocks for ready in seen} <= {3, EXTENTS}
    assert seen[-1].blocks == 3


@pytest.mark.parametrize("tail", [b"", b"x", bytes(100_000)], ids=["end", "byte", "much"])
def test_node_that_speaks_or_ends_when_it_owes_nothing_is_read_around(
    stored: tuple[PeerCluster, Keys, Blocks], peers: list[Peer], tail: bytes
) -> None:
    last = stored[1][EXTENTS - 1].tobytes()

    async def then_more(item: Item) -> Verdict:
        whole = item.extent_key == last and item.plane == 0  # what it was asked for first ends here, or an item before
        return Raw(item.frame(item.body) + tail) if whole else None

    for number in range(NODES):  # the shard that stands last is not on each of them
        for peer in peers:
            peer.item_rule = then_more if peer is peers[number] else None
        assert load(stored) == ALL
