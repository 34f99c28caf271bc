"""Real daemons killed and stopped: any two may go, in any state of a load or store; three are a clean miss; nothing arrives late."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from client_tools import NO_REUSE, SMALL, V41, WAIT_SECONDS, Blocks, bytes_of, chain, load, paced, processes_of, store, until
from leaks import at_rest, until_no_more

from kvstore.client import Client, ClientConfig, LoadOutcome, StoreOutcome, Ticket
from kvstore.keys import Keys
from kvstore.placement import Placement
from kvstore.server.local import LocalCluster

FULL = os.environ.get("SIZE", "") == "full"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with processes_of(tmp_path_factory.mktemp("cluster"), capacity_bytes=1 << 30) as running:
        yield running


@contextmanager
def stopped(cluster: LocalCluster, *nodes: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end."""
    for node in nodes:
        cluster.kill(node, signal.SIGSTOP)
    until(lambda: all(map(stands_still, (cluster.pid(node) for node in nodes))), "the stops to take effect")
    try:
        yield
    finally:
        for node in nodes:
            cluster.kill(node, signal.SIGCONT)


def stands_still(pid: int | None) -> bool:
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def pairs() -> list[tuple[int, int]]:
    every = list(itertools.combinations(range(12), 2))
    return every if FULL else every[::7]


@pytest.mark.parametrize("pair", pairs(), ids=str)
def test_any_two_nodes_lost_lose_nothing_and_stores_go_on(cluster: LocalCluster, pair: tuple[int, int]) -> None:
    with Client(cluster.map, layout=SMALL, config=NO_REUSE) as client:
        keys = chain(150, SMALL)
        data = store(client, keys, lengths=[20, 70, 60])
        until_whole(client, 4)
        for node in pair:
            cluster.kill(node, signal.SIGKILL)
        try:
            ticket = client.lookup(keys)
            assert ticket.hit_blocks == 150
            result, place = load(client, ticket)
            assert result.blocks == 150 and np.array_equal(place, data)
            more = chain(30, SMALL)
            bytes_stored = bytes_of(more, SMALL)
            assert client.store(more, bytes_stored, first_block=0).result(WAIT_SECONDS).outcome is StoreOutcome.DEGRADED
            result, place = load(client, client.lookup(more))
            assert result.blocks == 30 and np.array_equal(place, bytes_stored)
        finally:
            for node in pair:
                cluster.restart(node)


def until_whole(client: Client, extents: int) -> None:
    """Waits for the twelfth acknowledgements: eleven are enough for a store, but promise only that one node may be lost."""
    until(lambda: client.stats()["shards_acknowledged"] == 12 * extents, "every shard")


@pytest.mark.parametrize("triple", [(0, 1, 2), (3, 7, 11), (5, 6, 10)], ids=str)
def test_three_nodes_lost_are_a_clean_miss_inside_the_deadline(cluster: LocalCluster, triple: tuple[int, ...]) -> None:
    with Client(cluster.map, layout=SMALL, config=NO_REUSE) as client:
        keys = chain(100, SMALL)
        data = store(client, keys)
        held = client.lookup(keys)
        with stopped(cluster, *triple):
            began = time.monotonic()
            assert client.lookup(keys, deadline_seconds=paced(1.5)).hit_blocks == 0
            assert time.monotonic() - began < paced(2.0)
            result, place = load(client, held, deadline_seconds=paced(1.0))
            assert result.blocks == 0 and result.outcome is not LoadOutcome.COMPLETE and result.seconds < paced(1.5)
            future = client.store(keys, data, first_block=0)
            assert future.result(WAIT_SECONDS).outcome is StoreOutcome.FAILED
            place[:] = 0x5A
        until(lambda: client.lookup(keys).hit_blocks == 100, "the nodes to be back")
        assert (place == 0x5A).all()
        result, again = load(client, client.lookup(keys))
        assert result.blocks == 100 and np.array_equal(again, data)


def holder(cluster: LocalCluster, keys: Keys, shard: int) -> int:
    placement = Placement(cluster.map)
    return placement.nodes_of(int(placement.pg_of(keys[:1])[0]))[shard]


@pytest.mark.parametrize("hedge", ["lazy", "eager"])
def test_a_stopped_nodes_late_reply_never_reaches_memory_that_was_handed_on(cluster: LocalCluster, hedge: str) -> None:
    """SIGSTOP before or in the middle of the load, canary, SIGCONT."""
    keys = chain(300, V41)
    rng = random.Random(hedge)
    with Client(cluster.map, layout=V41, config=NO_REUSE) as client:
        data = store(client, keys)
        place = np.zeros_like(data)
        load_into(client, client.lookup(keys), place, hedge)
        for round_number in range(40 if FULL else 8):
            ticket = client.lookup(keys)
            node = rng.randrange(12)
            with stopped(cluster) if round_number % 2 else stopped(cluster, node):
                if round_number % 2:
                    timer = threading.Timer(rng.uniform(0, 0.02), cluster.kill, (node, signal.SIGSTOP))
                    timer.start()
                place[:] = 0
                result = client.load(ticket, place, hedge=hedge, deadline_seconds=paced(5.0))
                assert result.blocks == 300 and np.array_equal(place, data)
                place[:] = 0x5A
                if round_number % 2:
                    timer.join()
            cluster.kill(node, signal.SIGCONT)
            until(lambda: client.stats()["nodes_late"] == 0 and client.stats()["nodes_down"] == 0, "the late reply")
            assert (place == 0x5A).all(), "the canary is dead"


def load_into(client: Client, ticket: Ticket, place: Blocks, hedge: str = "lazy") -> None:
    assert client.load(ticket, place, hedge=hedge).blocks == len(place)


def test_nodes_killed_in_mid_read_cost_nothing_but_time(tmp_path: Path) -> None:
    keys = chain(300, V41)
    with processes_of(tmp_path, capacity_bytes=1 << 30) as own, Client(own.map, layout=V41, config=NO_REUSE) as client:
        data = store(client, keys)
        until_whole(client, 5)
        place = np.zeros_like(data)
        rng = random.Random(7)
        for _ in range(12 if FULL else 4):
            ticket = client.lookup(keys)
            nodes = rng.sample(range(12), 2)
            timer = threading.Timer(rng.uniform(0, 0.02), lambda nodes=nodes: [own.kill(node, signal.SIGKILL) for node in nodes])
            timer.start()
            place[:] = 0
            result = client.load(ticket, place, deadline_seconds=paced(5.0))
            timer.join()
            assert np.array_equal(place[: result.blocks], data[: result.blocks]) and result.blocks == 300
            for node in nodes:
                own.restart(node)


def test_a_store_does_not_wait_for_a_stopped_node_and_frees_its_memory(cluster: LocalCluster) -> None:
    keys = chain(600, V41)
    with Client(cluster.map, layout=V41, config=NO_REUSE) as client:
        store(client, chain(1, V41))  # connections
        data = bytes_of(keys, V41)
        node = 4
        with stopped(cluster, node):
            result = client.store(keys, data, first_block=0).result(WAIT_SECONDS)
            assert result.outcome is StoreOutcome.STORED and result.extents_stored == 10
            data[:] = 0xEE  # the caller's again
        until(lambda: client.stats()["flight_bytes"] == 0, "the late shards")
        # What the stopped node was sent is used: two others are gone.
        others = [n for n in range(12) if n != node][:2]
        with stopped(cluster, *others):
            ticket = client.lookup(keys)
            result, place = load(client, ticket, deadline_seconds=paced(5.0))
            assert np.array_equal(place[: result.blocks], bytes_of(keys, V41)[: result.blocks])


def test_every_read_of_a_key_with_many_writers_is_one_writers(cluster: LocalCluster) -> None:
    rounds = 200 if FULL else 12
    clients = [Client(cluster.map, layout=SMALL, config=NO_REUSE) for _ in range(4)]
    try:
        for number in range(rounds):
            keys = chain(30, SMALL)
            rng = random.Random(number)
            versions = [bytes_of(keys, SMALL, salt) for salt in range(rng.randint(2, 4))]

            def write(client: Client, data: Blocks, keys: Keys = keys) -> None:
                client.store(keys, data, first_block=0).result(WAIT_SECONDS)

            threads = [threading.Thread(target=write, args=pair) for pair in zip(clients, versions, strict=False)]
            for thread in threads:
                thread.start()
            for _ in range(4):
                result, place = load(clients[-1], clients[-1].lookup(keys))
                assert not result.blocks or any(np.array_equal(place, version) for version in versions)
            for thread in threads:
                thread.join()
            result, place = load(clients[0], clients[0].lookup(keys))
            assert result.blocks == 30 and any(np.array_equal(place, version) for version in versions)
    finally:
        for client in clients:
            client.close()


def test_descriptors_and_threads_stay_flat(cluster: LocalCluster) -> None:
    keys = chain(64, SMALL)
    with Client(cluster.map, layout=SMALL) as client:
        data = store(client, keys)
        place = np.zeros_like(data)
    before = at_rest()
    for _ in range(50):  # whole lives
        with Client(cluster.map, layout=SMALL, config=ClientConfig(threads=1)) as client:
            load_into(client, client.lookup(keys), place)
    until_no_more(before)
    with Client(cluster.map, layout=SMALL, config=NO_REUSE) as client:
        for _ in range(10):
            store(client, chain(3, SMALL))
            load_into(client, client.lookup(keys), place)
        opened = at_rest()
        for _ in range(200):
            load_into(client, client.lookup(keys), place)
        client.flush()
        until_no_more(opened, spare=12)  # one more parity connection a node, if two loads overlap in it
    until_no_more(before)


def test_what_another_agent_found_can_be_loaded(cluster: LocalCluster) -> None:
    keys = chain(70, SMALL)
    config = ClientConfig(ticket_key=b"k" * 32)
    with Client(cluster.map, layout=SMALL, config=config) as finder, Client(cluster.map, layout=SMALL, config=config) as agent:
        data = store(finder, keys)
        ticket = agent.ticket(finder.lookup(keys).to_bytes())
        result, place = load(agent, ticket)
        assert result.blocks == 70 and np.array_equal(place, data)
