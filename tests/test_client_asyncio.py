"""The asyncio face: the same bytes, many verbs at once, and cancelled tasks that leave memory alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from client_tools import EMULATED, NO_REUSE, SMALL, Blocks, bytes_of, chain, paced, store
from faultpeer import Gate, Item, PeerCluster

from kvstore.client import AsyncClient, Client, StoreOutcome, Ticket
from kvstore.client.aio import WAITERS_MAX


@pytest.fixture
def cluster() -> Iterator[PeerCluster]:
    with PeerCluster() as running:
        yield running


def test_stores_lookups_and_loads_run_side_by_side(cluster: PeerCluster) -> None:
    async def one(client: AsyncClient, number: int) -> None:
        keys = chain(20 + number, SMALL)
        data = bytes_of(keys, SMALL)
        assert (await client.store(keys, data, first_block=0)).outcome is StoreOutcome.STORED
        ticket = await client.lookup(keys)
        while EMULATED and ticket.hit_blocks < len(keys):  # nodes are silent for longer than a lookup waits
            ticket = await client.lookup(keys)
        place = np.zeros_like(data)
        assert (await client.load(ticket, place)).blocks == len(keys) and np.array_equal(place, data)
        place[:] = 0
        planes = [ready.plane async for ready in client.planes(ticket, place)]
        assert planes == [0] and np.array_equal(place, data)

    async def all_of_them() -> None:
        async with AsyncClient(Client(cluster.map, layout=SMALL, config=NO_REUSE)) as client:
            await asyncio.gather(*(one(client, number) for number in range(12)))
            assert await client.flush()
            assert client.stats()["loads"] == 24

    asyncio.run(all_of_them())


@asynccontextmanager
async def held_back(cluster: PeerCluster) -> AsyncIterator[tuple[AsyncClient, Gate, Blocks, Ticket]]:
    """A client, ten stored blocks and their ticket; peers answer no item until the gate opens."""
    gate = cluster.gate()

    async def hold(_: Item) -> None:
        await gate.wait()

    async with AsyncClient(Client(cluster.map, layout=SMALL, config=NO_REUSE)) as client:
        keys = chain(10, SMALL)
        data = store(client.client, keys)
        ticket = await client.lookup(keys)
        for peer in cluster.peers:
            peer.item_rule = hold
        yield client, gate, data, ticket


def test_the_loop_goes_on_while_verbs_wait(cluster: PeerCluster) -> None:
    async def use() -> None:
        async with held_back(cluster) as (client, gate, data, ticket):
            place = np.zeros_like(data)
            waiting = asyncio.create_task(client.load(ticket, place, deadline_seconds=paced(10)))
            while not gate.reached.is_set():
                await asyncio.sleep(0)
            for _ in range(100):  # the loop turns while the load waits
                await asyncio.sleep(0)
            assert not waiting.done()
            gate.open()
            assert (await waiting).blocks == 10 and np.array_equal(place, data)

    asyncio.run(use())


@pytest.mark.parametrize("verb", ["load", "planes"])
def test_a_cancelled_task_returns_only_when_its_memory_is_free(cluster: PeerCluster, verb: str) -> None:
    async def use() -> None:
        async with held_back(cluster) as (client, gate, data, ticket):
            place = np.zeros_like(data)

            async def read() -> None:
                if verb == "load":
                    await client.load(ticket, place, deadline_seconds=paced(30))
                else:
                    async for _ in client.planes(ticket, place, deadline_seconds=paced(30)):
                        pass

            waiting = asyncio.create_task(read())
            await asyncio.get_running_loop().run_in_executor(None, gate.reached.wait, paced(10))
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            place[:] = 0x5A
            gate.open()
            for peer in cluster.peers:
                peer.item_rule = None
            again = np.zeros_like(data)
            assert (await client.load(await client.lookup(ticket.keys), again)).blocks == 10
            assert np.array_equal(again, data) and (place == 0x5A).all()

    asyncio.run(use())


def test_a_cancelled_load_whose_turn_has_not_come_returns_at_once(cluster: PeerCluster) -> None:
    turn = threading.Event()

    async def read(client: AsyncClient, ticket: Ticket, place: Blocks) -> None:
        async for _ in client.planes(ticket, place):
            pass

    async def use() -> None:
        async with AsyncClient(Client(cluster.map, layout=SMALL, config=NO_REUSE)) as client:
            keys = chain(10, SMALL)
            data = store(client.client, keys)
            ticket = await client.lookup(keys)
            others = [asyncio.create_task(client._run(turn.wait)) for _ in range(WAITERS_MAX)]
            waiting = asyncio.create_task(client.load(ticket, np.zeros_like(data)))
            first = asyncio.create_task(read(client, ticket, np.zeros_like(data)))
            await asyncio.sleep(0)
            for task in (waiting, first):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.wait_for(asyncio.shield(task), paced(10))
            assert not any(other.done() for other in others)
            turn.set()
            await asyncio.gather(*others)

    try:
        asyncio.run(use())
    finally:
        turn.set()
