"""Bodies written straight into registered memory (kvstore/client/direct.py, path B of docs/GPU.md), host RAM in the place of a GPU's.

With a GPU the same in its memory (`gpu`). Kernels run there, or in Triton's interpreter (long: torch takes a guest minutes to import).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_tools import NO_REUSE, SMALL, V41, Blocks, bytes_of, chain, store, ticket_of_all, until, until_whole
from faultpeer import Item, PeerCluster
from verbs.nodes import CLIENT_DEVICE, DEVICE, cluster
from verbs.peer import End

from kvstore import record, wire
from kvstore.client import Client, LoadOutcome
from kvstore.client.direct import DirectMemory, DirectRead
from kvstore.errors import LayoutError, MisuseError
from kvstore.keys import Keys
from kvstore.layout import Layout

BLOCKS = 70  # two extents
WAIT_SECONDS = 100.0


Zone = Callable[[int, Layout], Any]


def zone_of(blocks: int, layout: Layout) -> Blocks:
    """Room for all bodies of so many blocks, with what must not be taken for bytes that arrived."""
    return np.full(2 * blocks * layout.block_bytes + (1 << 20), 0xEE, np.uint8)


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def zone(request: pytest.FixtureRequest) -> Zone:
    """Makes zones there."""
    if request.param == "host":
        return zone_of
    import torch

    return lambda blocks, layout: torch.from_numpy(zone_of(blocks, layout)).cuda()


def on_host(there: Any) -> Blocks:
    array: Blocks = there if isinstance(there, np.ndarray) else there.cpu().numpy()
    return array


def assert_bodies(arrived: DirectRead, data: Blocks) -> None:
    """Every body that is said to be there has its sums, and data shards have the bytes that were stored."""
    client, planes = arrived.client, arrived.client.layout.planes(10)
    for number, extent in enumerate(arrived.extents):
        for plane, shape in enumerate(planes):
            shards, bodies = arrived.shards[number][plane], on_host(arrived.bodies(number, plane))
            for shard in shards:
                item = wire.decode_item(bodies[shard].tobytes(), extent.blocks)
                for b in range(extent.blocks):
                    piece = item.pieces[b * shape.shard_bytes : (b + 1) * shape.shard_bytes]
                    place = (client.owner, extent.extent_key, extent.write_id, shard, plane, extent.first_block + b)
                    assert item.sums[b] == record.piece_sum(*place, piece)
                    if shard < 10:
                        at = shape.offset_bytes + shard * shape.shard_bytes
                        real = data[arrived.begin + extent.row + b, at : min(at + shape.shard_bytes, shape.offset_bytes + shape.bytes)]
                        assert piece[: len(real)] == real.tobytes()


def test_bodies_lie_in_the_callers_memory_and_links_leave_nothing(tmp_path: Path, zone: Zone) -> None:
    with cluster(tmp_path) as (nodes, map_, _), Client(map_, layout=V41, config=NO_REUSE) as client:
        keys = chain(BLOCKS, V41)
        data = store(client, keys)
        until_whole(client, keys)
        with DirectMemory(zone(BLOCKS, V41), CLIENT_DEVICE) as memory:
            own = 0 if memory.registration == "host" else 2  # the pair that reads back from a GPU
            assert memory._core.queue_pairs == own
            for blocks in (None, range(3, 66)):
                with memory.read(client, ticket_of_all(client, keys), blocks=blocks, deadline_seconds=WAIT_SECONDS) as arrived:
                    assert arrived.outcome is LoadOutcome.COMPLETE
                    assert all(len(shards) >= 10 for planes in arrived.shards for shards in planes)
                    assert_bodies(arrived, data)
                    assert memory._core.queue_pairs == own  # the fence
            assert memory._core.registered_bytes >= len(memory.zone)
        until(lambda: all(node.stats["verbs_queue_pairs"] == 0 for node in nodes), "all queue pairs are gone")
        assert client.stats()["read_bytes_tcp"] == 0


@pytest.fixture
def peers() -> Iterator[tuple[PeerCluster, Client, Keys, Blocks]]:
    with PeerCluster() as made, Client(made.map, layout=SMALL, config=NO_REUSE) as client:
        keys = chain(20, SMALL)
        data = store(client, keys)
        client.flush()
        yield made, client, keys, data


def test_who_is_late_is_fenced_off_and_writes_into_nothing(peers: tuple[PeerCluster, Client, Keys, Blocks], zone: Zone) -> None:
    """Row 23: two nodes answer when the memory has a new owner."""
    made, client, keys, data = peers
    gate, passed = made.gate(), [threading.Event(), threading.Event()]
    ticket = ticket_of_all(client, keys)
    late = [peer for peer in made.peers if any({2, 11} & set(shards) for shards in peer.records.values())]

    def held(event: threading.Event) -> object:
        async def rule(_: Item) -> None:
            await gate.wait()
            event.set()

        return rule

    for peer, event in zip(late, passed, strict=True):
        peer.item_rule = held(event)
    with DirectMemory(zone(20, SMALL), CLIENT_DEVICE) as memory, DirectMemory(zone(20, SMALL), CLIENT_DEVICE) as other:
        with memory.read(client, ticket, deadline_seconds=WAIT_SECONDS) as arrived:
            assert arrived.outcome is LoadOutcome.COMPLETE
            assert all({2, 11}.isdisjoint(shards) for planes in arrived.shards for shards in planes)
            assert_bodies(arrived, data)
        memory.zone[:] = 0x5A
        gate.open()
        until(lambda: all(event.is_set() for event in passed), "the late answers")
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), made.loop).result(WAIT_SECONDS)  # posted by now
        for peer in late:
            peer.item_rule = None
        with other.read(client, ticket_of_all(client, keys), deadline_seconds=WAIT_SECONDS) as again:  # what comes after them comes
            assert again.outcome is LoadOutcome.COMPLETE
        assert (on_host(memory.zone) == 0x5A).all()


def test_what_nobody_sends_ends_at_the_deadline_and_what_does_not_fit_before(peers: tuple[PeerCluster, Client, Keys, Blocks]) -> None:
    made, client, keys, _ = peers
    gate = made.gate()

    async def hold(_: Item) -> None:
        await gate.wait()

    for peer in made.peers:
        peer.item_rule = hold
    ticket = ticket_of_all(client, keys)
    with DirectMemory(np.zeros(1000, np.uint8), CLIENT_DEVICE) as small, pytest.raises(LayoutError, match="E508"):
        small.read(client, ticket)
    with DirectMemory(zone_of(20, SMALL), CLIENT_DEVICE) as memory:
        with memory.read(client, ticket, deadline_seconds=3.0) as arrived:
            assert arrived.outcome is LoadOutcome.TIMEOUT
            assert not any(shards for planes in arrived.shards for shards in planes)
            with pytest.raises(MisuseError, match="E518"):
                memory.read(client, ticket)
        gate.open()


def test_nobody_writes_past_the_ends_of_a_zone(zone: Zone) -> None:
    """Its key is good for the bytes of the zone, wherever they begin: not for their pages, nor for what memory they were cut from."""
    memory, size = zone(1, SMALL), 10_001
    made = DirectMemory(memory[5003 : 5003 + size], CLIENT_DEVICE)
    core, address = made._core, made.address
    for at, length, fits in ((0, size, True), (-1, 10, False), (size - 9, 10, False), (-2000, 100, False), (size + 4096, 1, False)):
        link = core.link(address, size, 4)
        there = wire.VerbsOpen.decode(link.address())
        assert (there.zone_addr, there.zone_bytes) == (address, size)
        memory[:] = 0xEE
        with End(DEVICE) as node:
            link.connect(wire.VerbsOpen(node.gid, node.qpn, node.psn, 5, 0, 0, 0, 0).encode())
            node.connect(there.gid, there.qpn, there.psn)
            node.write(there.rkey, address + at, length, immediate=7)
            (sent,) = node.completions(1)
            assert (sent.status == 0) == fits, (at, length, sent.status)
            if fits:
                assert link.take(WAIT_SECONDS) == [7]
        assert link.fence()
        made.after_fence()
        now = on_host(memory)
        assert (now[:5003] == 0xEE).all() and (now[5003 + size :] == 0xEE).all()
        assert (now[5003 : 5003 + size] == (0 if fits else 0xEE)).all()
    with pytest.raises(IndexError):
        core.link(address, size + 1, 4)
    core.read_back(WAIT_SECONDS)
    assert core.queue_pairs == 2
    made.close()
    assert core.queue_pairs == 0


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("zone", [pytest.param("host", marks=pytest.mark.long), pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True)
def test_kernels_bring_what_arrived_into_pages_past_wrong_pieces(peers: tuple[PeerCluster, Client, Keys, Blocks], zone: Zone) -> None:
    room = zone(20, SMALL)
    if isinstance(room, np.ndarray):
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from kvstore.kernels.gpu import Outcome, PageTable, Part

    made, client, keys, data = peers

    async def flip(item: Item) -> bytes:
        return item.body[:-1] + bytes([item.body[-1] ^ 1])

    wrong = next(peer for peer in made.peers if any(4 in shards for shards in peer.records.values()))
    wrong.item_rule = flip
    lost = next(peer for peer in made.peers if any(0 in shards for shards in peer.records.values()))
    lost.records.clear()
    part = Part(0, 1, SMALL.block_bytes)
    room = torch.from_numpy(room) if isinstance(room, np.ndarray) else room
    pages = torch.zeros((24, 1, SMALL.block_bytes), dtype=torch.uint8, device=room.device)
    table = np.random.default_rng(3).permutation(24)[:20]
    with (
        DirectMemory(room, CLIENT_DEVICE) as memory,
        memory.read(client, ticket_of_all(client, keys), deadline_seconds=WAIT_SECONDS, every=True) as arrived,
    ):
        for row, landed in arrived.land(0):
            assert set(landed.outcomes) == {Outcome.REBUILT}
            assert landed.wrong_pieces == ((19, 4),)
            landed.scatter(part, pages, PageTable(table.tolist(), 24, str(room.device)), first_row=row)
    there = on_host(pages)
    assert np.array_equal(there[table, 0], bytes_of(keys, SMALL))
    assert np.array_equal(data, bytes_of(keys, SMALL))
    assert not there[np.setdiff1d(np.arange(24), table)].any()
