"""Calling code that is wrong gets a typed error before anything is done; what it misuses afterwards harms nobody."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from client_tools import NO_REUSE, SMALL, V41, WAIT_SECONDS, Blocks, Cluster, bytes_of, chain, cluster_of, load, paced, store

from kvstore.client import AsyncClient, Client, ClientConfig, Fidelity, Ticket
from kvstore.errors import Closed, ConfigError, DeadlineExceeded, KeyFormatError, KvstoreError, LayoutError, MisuseError, ProtocolError
from kvstore.keys import Keys
from kvstore.layout import Layout


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of(tmp_path_factory.mktemp("cluster"), 3) as running:
        yield running


class World:
    """A client with a stored chain, and what a caller has at hand."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.keys: Keys = chain(10, SMALL)
        self.data: Blocks = store(client, self.keys)
        self.ticket: Ticket = client.lookup(self.keys)


@pytest.fixture
def world(cluster: Cluster) -> Iterator[World]:
    config = ClientConfig(promise_reuse_seconds=0, ticket_seconds=900.0)  # the first to import torch may wait for longer than ten
    with Client(cluster.map, layout=SMALL, config=config) as client:
        yield World(client)


BYTES = SMALL.block_bytes


def read_only() -> Blocks:
    array = np.zeros((10, BYTES), np.uint8)
    array.flags.writeable = False
    return array


def cuda_like() -> Any:
    torch = pytest.importorskip("torch")
    return torch.zeros((10, BYTES), dtype=torch.uint8, device="meta")


def sparse_rows() -> Any:
    torch = pytest.importorskip("torch")
    return torch.zeros((BYTES, 10), dtype=torch.uint8).t()


LOADS: list[tuple[str, Callable[[World], Any], type[KvstoreError]]] = [
    ("too few rows", lambda w: np.zeros((9, BYTES), np.uint8), LayoutError),
    ("rows too short", lambda w: np.zeros((10, BYTES - 1), np.uint8), LayoutError),
    ("rows too long", lambda w: np.zeros((10, BYTES + 1), np.uint8), LayoutError),
    ("transposed", lambda w: np.zeros((BYTES, 10), np.uint8).T, LayoutError),
    ("backwards", lambda w: np.zeros((10, BYTES), np.uint8)[::-1], LayoutError),
    ("every second byte", lambda w: np.zeros((10, 2 * BYTES), np.uint8)[:, ::2], LayoutError),
    ("overlapping rows", lambda w: np.lib.stride_tricks.as_strided(np.zeros(2 * BYTES, np.uint8), (10, BYTES), (1, 1)), LayoutError),
    ("same row again", lambda w: np.lib.stride_tricks.as_strided(np.zeros(BYTES, np.uint8), (10, BYTES), (0, 1)), LayoutError),
    ("read-only", lambda w: read_only(), LayoutError),
    ("bytes", lambda w: bytes(10 * BYTES), LayoutError),
    ("flat, one byte short", lambda w: bytearray(10 * BYTES - 1), LayoutError),
    ("a list", lambda w: [0] * 10, LayoutError),
    ("a string", lambda w: "x" * BYTES, LayoutError),
    ("objects", lambda w: np.empty((10, BYTES), object), LayoutError),
    ("a scalar", lambda w: np.float64(1), LayoutError),
    ("not on the CPU", lambda w: cuda_like(), LayoutError),
    ("a tensor of columns", lambda w: sparse_rows(), LayoutError),
]


@pytest.mark.parametrize(("name", "make", "error"), LOADS, ids=[case[0] for case in LOADS])
def test_a_destination_that_does_not_fit_is_refused(
    world: World, name: str, make: Callable[[World], Any], error: type[KvstoreError]
) -> None:
    with pytest.raises(error):
        world.client.load(world.ticket, make(world))
    with pytest.raises(error):
        next(world.client.planes(world.ticket, make(world)))
    result, place = load(world.client, world.ticket)
    assert result.blocks == 10 and np.array_equal(place, world.data)


CALLS: list[tuple[str, Callable[[World], Any], type[KvstoreError]]] = [
    ("keys as a list", lambda w: w.client.lookup([bytes(32)]), KeyFormatError),
    ("keys of 31 bytes", lambda w: w.client.lookup(np.zeros((3, 31), np.uint8)), KeyFormatError),
    ("keys as int64", lambda w: w.client.lookup(np.zeros((3, 32), np.int64)), KeyFormatError),
    ("one key, no rows", lambda w: w.client.lookup(np.zeros(32, np.uint8)), KeyFormatError),
    ("unknown class", lambda w: w.client.lookup(w.keys, retention_class="forever"), MisuseError),
    ("unknown class in a store", lambda w: w.client.store(w.keys, w.data, first_block=0, retention_class="x"), MisuseError),
    ("more blocks than keys", lambda w: w.client.store(w.keys[:9], w.data, first_block=0), LayoutError),
    ("first block past the end", lambda w: w.client.store(w.keys, w.data, first_block=1), LayoutError),
    ("negative first block", lambda w: w.client.store(w.keys, w.data, first_block=-1), LayoutError),
    ("blocks too short", lambda w: w.client.store(w.keys, w.data[:, 1:], first_block=0), LayoutError),
    ("blocks as text", lambda w: w.client.store(w.keys, "blocks", first_block=0), LayoutError),
    ("fidelity without depth", lambda w: Fidelity.approx(0), MisuseError),
    ("depth too great", lambda w: Fidelity.approx(1 << 16), MisuseError),
    ("unknown hedge", lambda w: w.client.load(w.ticket, hedge="maybe"), MisuseError),
    ("range past the hit", lambda w: w.client.load(w.ticket, blocks=range(5, 11)), MisuseError),
    ("range with steps", lambda w: w.client.load(w.ticket, blocks=range(0, 10, 2)), MisuseError),
    ("range backwards", lambda w: w.client.load(w.ticket, blocks=range(-1, 5)), MisuseError),
    ("owner too short", lambda w: Client(w.client.map, layout=SMALL, owner=b"x"), MisuseError),
    ("a ticket of no bytes", lambda w: w.client.ticket(b""), ProtocolError),
    ("a ticket as text", lambda w: w.client.ticket("ticket"), MisuseError),
    ("half a ticket", lambda w: w.client.ticket(w.ticket.to_bytes()[:-40]), ProtocolError),
    ("a changed ticket", lambda w: w.client.ticket(w.ticket.to_bytes()[:-1] + b"\0"), ProtocolError),
    ("a ticket of another key", lambda w: Ticket.from_bytes(w.ticket.to_bytes(), b"another key of 32 bytes, at least"), ProtocolError),
    ("threads 0", lambda w: ClientConfig(threads=0), ConfigError),
    ("deadline 0", lambda w: ClientConfig(lookup_deadline_seconds=0), ConfigError),
    ("reuse longer than half a promise", lambda w: ClientConfig(promise_reuse_seconds=31), ConfigError),
    ("short ticket key", lambda w: ClientConfig(ticket_key=b"short"), ConfigError),
    ("a small queue", lambda w: ClientConfig(queue_bytes_max=1000), ConfigError),
]


@pytest.mark.parametrize(("name", "call", "error"), CALLS, ids=[case[0] for case in CALLS])
def test_a_wrong_argument_is_refused(world: World, name: str, call: Callable[[World], Any], error: type[KvstoreError]) -> None:
    with pytest.raises(error):
        call(world)
    result, place = load(world.client, world.ticket)
    assert result.blocks == 10 and np.array_equal(place, world.data)


def test_every_verb_of_a_closed_client_says_so(cluster: Cluster) -> None:
    client = Client(cluster.map, layout=SMALL)
    world = World(client)
    planes = client.planes(world.ticket, np.zeros_like(world.data))
    client.close()
    client.close()
    for call in (
        lambda: client.lookup(world.keys),
        lambda: client.load(world.ticket),
        lambda: client.store(world.keys, world.data, first_block=0),
        lambda: next(planes),
        lambda: client.begin_load(world.ticket, None, hedge="lazy", deadline_seconds=1, blocks=range(10)),
    ):
        with pytest.raises(Closed):
            call()
    assert client.flush() and client.stats()["connections"] == 0


def test_closing_from_another_thread_ends_what_waits(cluster: Cluster) -> None:
    client = Client(cluster.map, layout=SMALL, config=NO_REUSE)
    world = World(client)
    under_way = client.begin_load(world.ticket, np.zeros_like(world.data), hedge="lazy", deadline_seconds=paced(5), blocks=range(10))
    thread = threading.Thread(target=client.close)
    thread.start()
    result = under_way.finish()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive() and result.blocks in range(11)


def test_a_ticket_of_another_layout_is_refused(world: World) -> None:
    with Client(world.client.map, layout=Layout.single(BYTES)) as other, pytest.raises(MisuseError, match="another layout"):
        other.load(world.ticket)


def test_memory_let_go_in_mid_load_and_store_is_kept_alive(cluster: Cluster) -> None:
    with Client(cluster.map, layout=V41, config=NO_REUSE) as client:
        keys = chain(64, V41)
        future = client.store(keys, bytes_of(keys, V41), first_block=0)
        gc.collect()
        assert future.result(WAIT_SECONDS).blocks == 64
        ticket = client.lookup(keys)
        for _ in range(5):
            place = np.empty((64, V41.block_bytes), np.uint8)
            under_way = client.begin_load(ticket, place, hedge="eager", deadline_seconds=paced(5), blocks=range(64))
            kept = weakref.ref(place.base if place.base is not None else place)
            del place
            under_way._rows = None  # Python's side goes in any order: the native one keeps the memory until its end
            assert kept() is not None
            del under_way  # ends it: nothing writes into what numpy frees
            gc.collect()
            assert kept() is None


def test_a_forked_child_is_refused_and_ends_cleanly(world: World) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            world.client.lookup(world.keys)
        except MisuseError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    result, _ = load(world.client, world.ticket)
    assert result.blocks == 10


def test_a_load_under_way_is_refused_to_a_forked_child_and_goes_on_in_its_parent(world: World) -> None:
    place = np.zeros((10, SMALL.block_bytes), np.uint8)
    whole = world.client.begin_load(world.ticket, place, hedge="lazy", deadline_seconds=paced(30), blocks=range(10))
    planes = world.client.begin_load(
        world.ticket, np.zeros_like(place), hedge="lazy", deadline_seconds=paced(30), blocks=range(10)
    ).planes()
    next(planes)
    pid = os.fork()
    if pid == 0:
        code = 0
        for call in (whole.finish, whole.cancel, lambda: next(planes)):
            try:
                call()
                code = 1
            except MisuseError:
                pass
        try:
            del whole, planes
            gc.collect()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert whole.finish().blocks == 10 and np.array_equal(place, bytes_of(world.keys, SMALL))
    assert list(planes) == []


def test_a_store_that_is_not_done_in_time_says_so_and_goes_on(world: World) -> None:
    big = chain(640, SMALL)
    future = world.client.store(big, bytes_of(big, SMALL), first_block=0)
    with contextlib.suppress(DeadlineExceeded):  # unless it was very quick
        future.result(0)
    assert not future.cancel()
    assert future.result(WAIT_SECONDS).blocks == 640


def test_an_expired_ticket_loads_nothing(cluster: Cluster) -> None:
    with Client(cluster.map, layout=SMALL, config=ClientConfig(ticket_seconds=0.001)) as client:
        keys = chain(5, SMALL)
        store(client, keys)
        ticket = client.lookup(keys)
        threading.Event().wait(0.005)
        result, place = load(client, ticket)
        assert result.outcome.value == "expired" and result.blocks == 0 and (place == 0xEE).all()


@pytest.mark.parametrize("flip", [0, 4, 30, 75, 76, 200, -33, -1])
def test_no_changed_byte_of_a_ticket_passes(world: World, flip: int) -> None:
    data = bytearray(world.ticket.to_bytes())
    assert world.client.ticket(bytes(data)).hit_blocks == 10
    data[flip] ^= 1
    with pytest.raises(ProtocolError):
        world.client.ticket(bytes(data))


def test_an_async_client_of_a_closed_client_says_so(world: World) -> None:
    import asyncio

    async def use() -> None:
        client = AsyncClient(Client(world.client.map, layout=SMALL))
        await client.close()
        with pytest.raises((Closed, RuntimeError)):
            await client.lookup(world.keys)

    asyncio.run(use())
