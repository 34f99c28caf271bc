"""stream_planes: planes go on into pages in order, the next is waited for meanwhile; whatever ends it, nothing is touched afterwards, and
no page holds wrong bytes. tests/verbs/test_loopback.py has it with an RDMA device."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_tools import NO_REUSE, V41, Blocks, chain, cluster_of, store, ticket_of_all, until
from faultpeer import Item, PeerCluster, Verdict
from mover_tools import Given

from kvstore.client import AsyncClient, Client, LoadOutcome, streaming
from kvstore.client.agent.ram import RamTier
from kvstore.client.streaming import PlaneStream, stream_planes
from kvstore.errors import LayoutError, MisuseError, Unreachable
from kvstore.keys import Keys
from kvstore.placement import Placement
from kvstore.wire import Status

K, NODES = 2, 3
BLOCKS, FIRST = 70, 64  # two extents, the first of 64 blocks
PLANES = V41.planes(K)
PAGES = 100
TABLE = np.random.default_rng(5).permutation(PAGES)[:BLOCKS]


@contextmanager
def mover_of(blocks: int = BLOCKS) -> Iterator[tuple[Given, Blocks]]:
    """Pages over canaries, and rows."""
    with Given(np.full((PAGES, V41.block_bytes + 64), 0xAB, np.uint8)[:, : V41.block_bytes]) as mover:
        yield mover, mover.host_rows(blocks)


def check_pages(mover: Given, data: Blocks, whole: int) -> None:
    """The first `whole` blocks are there; pages of others hold, plane by plane, right bytes or what was there; nothing else was touched."""
    pages = np.asarray(mover.pages)
    assert np.array_equal(pages[TABLE[:whole]], data[:whole])
    for block in range(whole, len(data)):
        for plane in PLANES:
            there = pages[TABLE[block], plane.columns]
            assert np.array_equal(there, data[block, plane.columns]) or (there == 0xAB).all()
    assert (pages[np.setdiff1d(np.arange(PAGES), TABLE)] == 0xAB).all()
    assert (pages.base[:, V41.block_bytes :] == 0xAB).all()


def take(stream: PlaneStream) -> list[tuple[int, int]]:
    taken = []
    for moved in stream:
        assert moved.columns == PLANES[moved.plane].columns and moved.event.wait(5)
        taken.append((moved.plane, moved.blocks))
    return taken


# --- real daemons ---


@pytest.mark.parametrize("ram", [False, True])
def test_planes_go_on_into_their_pages_in_order(tmp_path: Path, ram: bool) -> None:
    tier = RamTier(64 << 20) if ram else None
    with (
        cluster_of(tmp_path, NODES, k=K, m=NODES - K) as cluster,
        Client(cluster.map, layout=V41, config=NO_REUSE, ram=tier) as client,
        mover_of() as (mover, rows),
    ):
        keys = chain(BLOCKS, V41)
        data = store(client, keys)
        ticket = client.lookup(keys)
        for _ in range(3):  # with a RAM tier the third comes from there
            mover.pages[:] = 0xAB
            with stream_planes(client, ticket, mover, TABLE, rows) as stream:
                assert take(stream) == [(plane, BLOCKS) for plane in range(len(PLANES))]
            assert (stream.outcome, stream.blocks) == (LoadOutcome.COMPLETE, BLOCKS) and not stream.lost
            check_pages(mover, data, BLOCKS)
        mover.pages[:] = 0xAB
        with stream_planes(client, ticket, mover, TABLE[:5], rows, blocks=range(60, 65)) as stream:
            assert take(stream) == [(plane, 5) for plane in range(len(PLANES))]
        assert stream.blocks == 5 and np.array_equal(mover.pages[TABLE[:5]], data[60:65])
        with stream_planes(client, ticket, mover, [], rows, blocks=range(0)) as stream:
            assert take(stream) == []
        assert (stream.outcome, stream.blocks) == (LoadOutcome.COMPLETE, 0)
        for node in (0, 1):
            cluster.kill(node)
        mover.pages[:] = 0xAB
        with stream_planes(client, ticket, mover, TABLE, rows, deadline_seconds=0.0) as stream:
            blocks = [blocks for _, blocks in take(stream)]
        assert stream.blocks in (0, BLOCKS) and (stream.outcome is LoadOutcome.COMPLETE) == bool(stream.blocks) == bool(blocks)
        check_pages(mover, data, stream.blocks)


def test_an_engine_may_take_longer_than_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MOVE_SECONDS", 0.2)
    with (
        cluster_of(tmp_path, NODES, k=K, m=NODES - K) as cluster,
        Client(cluster.map, layout=V41, config=NO_REUSE, ram=RamTier(64 << 20)) as client,
        mover_of() as (mover, rows),
    ):
        keys = chain(1, V41)
        data = store(client, keys)
        ticket = client.lookup(keys)
        for _ in range(2):  # from now on it comes from RAM, at once
            client.load(ticket, rows[:1])
        with stream_planes(client, ticket, mover, TABLE, rows, deadline_seconds=0.0) as stream:
            for _ in stream:
                end = time.monotonic() + 0.3
                until(lambda end=end: time.monotonic() > end, "a layer to be computed")  # type: ignore[misc]  # bound now
        assert (stream.outcome, stream.blocks) == (LoadOutcome.COMPLETE, 1)
        assert np.array_equal(mover.pages[TABLE[:1]], data)


# --- peers that fail as they are told ---


class Held:
    def __init__(self, peers: PeerCluster, client: Client) -> None:
        self.peers, self.client = peers, client
        self.keys: Keys = next(filter(self.apart, (chain(BLOCKS, V41) for _ in range(100))))
        self.data = store(client, self.keys)
        client.flush()
        self.ticket = ticket_of_all(client, self.keys)
        self.gates = [peers.gate() for _ in PLANES]
        self.sent: list[int] = []

    def apart(self, keys: Keys) -> bool:
        """Whether some node has data of one extent alone. Else k streams stand still with the second, and m are too few."""
        placement = Placement(self.peers.map)
        first, second = ({*placement.nodes_of(int(pg))[:K]} for pg in placement.pg_of(keys[[0, FIRST]]))
        return first != second

    def rule(self, what: Any) -> None:
        for peer in self.peers.peers:
            peer.item_rule = what

    def behind_gates(self) -> None:
        """Nothing of a plane is sent before its gate is open."""

        async def rule(item: Item) -> Verdict:
            await self.gates[item.plane].wait()
            self.sent.append(item.plane)
            return None

        self.rule(rule)

    def second_extent(self, plane: int, verdict: Any) -> None:
        """Of the second extent, plane `plane` and those after it come out so at every peer."""

        async def rule(item: Item) -> Verdict:
            if item.block_count == FIRST or item.plane < plane:
                return None
            return await verdict() if callable(verdict) else verdict

        self.rule(rule)


@pytest.fixture
def held() -> Iterator[Held]:
    with PeerCluster(NODES, k=K, m=NODES - K) as peers, Client(peers.map, layout=V41, config=NO_REUSE) as client:
        yield Held(peers, client)


def test_a_plane_is_on_its_way_before_the_next_is_sent(held: Held) -> None:
    held.behind_gates()
    with mover_of() as (mover, rows):
        with stream_planes(held.client, held.ticket, mover, TABLE, rows) as stream:
            for plane, gate in enumerate(held.gates):
                gate.open()
                moved = next(stream)
                assert moved.plane == plane and max(held.sent) == plane
                assert np.array_equal(mover.pages[TABLE][:, moved.columns], held.data[:, moved.columns])
            assert next(stream, None) is None
        assert (stream.outcome, stream.blocks) == (LoadOutcome.COMPLETE, BLOCKS)
        assert mover.begun == [(BLOCKS, plane.columns) for plane in PLANES]


@pytest.mark.parametrize("plane", range(len(PLANES)))
def test_a_load_that_falls_short_moves_no_wrong_byte(held: Held, plane: int) -> None:
    held.second_extent(plane, Status.NOT_FOUND)
    with mover_of() as (mover, rows):
        rows[:] = 0x5A  # what lies there is garbage until it is received
        with stream_planes(held.client, held.ticket, mover, TABLE, rows) as stream:
            taken = take(stream)
        assert [at for at, _ in taken] == list(range(len(PLANES))) and taken[-1] == (len(PLANES) - 1, FIRST)
        assert [blocks for _, blocks in taken] == sorted((blocks for _, blocks in taken), reverse=True)
        assert (stream.outcome, stream.blocks) == (LoadOutcome.MISSING, FIRST)
        check_pages(mover, held.data, FIRST)


@pytest.mark.parametrize("plane", range(len(PLANES)))
def test_at_the_deadline_what_is_whole_comes_into_its_pages(held: Held, plane: int) -> None:
    gate = held.peers.gate()

    async def never() -> Verdict:
        await gate.wait()
        return None

    held.second_extent(plane, never)
    with mover_of() as (mover, rows):
        rows[:] = 0x5A
        with stream_planes(held.client, held.ticket, mover, TABLE, rows, deadline_seconds=1.0) as stream:
            taken = take(stream)
        assert (stream.outcome, stream.blocks) == (LoadOutcome.TIMEOUT, FIRST)
        assert taken[:plane] == [(at, BLOCKS) for at in range(plane)] and taken[plane:] == [(at, FIRST) for at in range(plane, len(PLANES))]
        check_pages(mover, held.data, FIRST)
        pages = np.asarray(mover.pages).copy()
        rows[:] = 0x77  # the caller's again
        gate.open()
        held.rule(None)
        again = np.empty_like(held.data)
        assert held.client.load(held.client.lookup(held.keys), again).outcome is LoadOutcome.COMPLETE  # behind what came late
        assert (rows == 0x77).all() and np.array_equal(mover.pages, pages)


@pytest.mark.parametrize("how", ["cancel", "break", "raise", "device"])
def test_however_it_is_left_in_mid_way_both_memories_are_the_callers(held: Held, how: str) -> None:
    held.behind_gates()
    held.gates[0].open()
    with mover_of() as (mover, rows):
        stream = stream_planes(held.client, held.ticket, mover, TABLE, rows)

        def stop() -> None:
            held.gates[1].reached.wait(20)
            stream.cancel()

        thread = threading.Thread(target=stop)
        with pytest.raises((RuntimeError, Unreachable)) if how in ("raise", "device") else nullcontext(), stream:
            for moved in stream:
                assert moved.plane == 0
                if how == "cancel":
                    thread.start()
                elif how == "break":
                    break
                elif how == "raise":
                    raise RuntimeError("of the engine")
                else:
                    mover.fails = True
                    held.gates[1].open()
        if how == "cancel":
            thread.join(20)
        assert (stream.outcome, stream.blocks, stream.lost) == (LoadOutcome.CANCELLED, 0, False)
        check_pages(mover, held.data, 0)
        pages = np.asarray(mover.pages).copy()
        rows[:] = 0x77
        for gate in held.gates:
            gate.open()
        until(lambda: len(held.sent) >= K, "what comes late")
        again = np.empty_like(held.data)
        assert held.client.load(held.client.lookup(held.keys), again).outcome is LoadOutcome.COMPLETE
        assert (rows == 0x77).all() and np.array_equal(mover.pages, pages)
        stream.close()  # harmless twice


def test_what_does_not_fit_is_refused_before_a_byte_is_asked_for(held: Held) -> None:
    asked = [len(peer.items_asked) for peer in held.peers.peers]
    with mover_of() as (mover, rows):
        for table, into in (
            (TABLE[:-1], rows),
            (np.zeros(BLOCKS, np.int64), rows),
            (TABLE, np.zeros_like(rows)),  # the mover was not given it
            (TABLE, rows[:, :-1]),
            (TABLE, None),
        ):
            with pytest.raises(LayoutError, match=r"E51[47]"):
                stream_planes(held.client, held.ticket, mover, table, into)
        with pytest.raises(MisuseError, match="E564"):
            stream_planes(held.client, held.ticket, mover, TABLE, rows, blocks=range(BLOCKS + 1))
        with stream_planes(held.client, held.ticket, mover, TABLE, rows):
            pass  # never iterated: nothing is asked for
    assert [len(peer.items_asked) for peer in held.peers.peers] == asked


def test_an_expired_ticket_moves_nothing(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held.client.clock, "wall_time", lambda: 1e12)
    with mover_of() as (mover, rows), stream_planes(held.client, held.ticket, mover, TABLE, rows) as stream:
        assert take(stream) == []
    assert (stream.outcome, stream.blocks) == (LoadOutcome.EXPIRED, 0)


# --- asyncio ---


def test_a_cancelled_task_has_let_go_of_both_memories(held: Held) -> None:
    async def run(mover: Given, rows: Blocks) -> None:
        client = AsyncClient(held.client)
        taken = []
        async with client.stream_planes(held.ticket, mover, TABLE, rows) as planes:
            async for moved in planes:
                taken.append(moved.plane)
        assert taken == list(range(len(PLANES))) and planes.stream.blocks == BLOCKS
        check_pages(mover, held.data, BLOCKS)
        mover.pages[:] = 0xAB
        held.behind_gates()
        held.gates[0].open()
        first = asyncio.Event()

        async def answer() -> None:
            async with client.stream_planes(held.ticket, mover, TABLE, rows) as planes:
                async for _ in planes:
                    first.set()

        task = asyncio.create_task(answer())
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        rows[:] = 0x77
        pages = np.asarray(mover.pages).copy()
        for gate in held.gates:
            gate.open()
        again = np.empty_like(held.data)
        assert (await client.load(await client.lookup(held.keys), again)).outcome is LoadOutcome.COMPLETE
        assert (rows == 0x77).all() and np.array_equal(mover.pages, pages)
        check_pages(mover, held.data, 0)

    with mover_of() as (mover, rows):
        asyncio.run(run(mover, rows))
