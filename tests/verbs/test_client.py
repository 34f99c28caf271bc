"""The client's end of RDMA against peers in Python (rdmapeer.py): right bytes or none, whatever the peer does; nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
from collections.abc import Iterator

import numpy as np
import pytest
import pyverbs.enums as e
from client_tools import NO_REUSE, SMALL, chain, load, store, until, until_whole
from faultpeer import Item, PeerCluster
from verbs.rdmapeer import RdmaPeer

from kvstore import wire
from kvstore.client import Client, ClientConfig, LoadOutcome, Ticket
from kvstore.wire import Status

pytestmark = [
    pytest.mark.long,  # each sets up a dozen connections, which takes an emulated guest seconds
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.environ.get("KVSTORE_TRANSPORT") != "rdma", reason="the suite's run over TCP"),
]
BLOCKS = 20


class Stored:
    """A chain stored on twelve peers, read by a client of `config`."""

    def __init__(self, cluster: PeerCluster, config: ClientConfig = NO_REUSE) -> None:
        self.cluster = cluster
        self.client = Client(cluster.map, layout=SMALL, config=config)
        self.keys = chain(BLOCKS, SMALL)
        self.data = store(self.client, self.keys)
        self.client.flush()
        until_whole(self.client, self.keys)

    @property
    def peers(self) -> list[RdmaPeer]:
        return [peer for peer in self.cluster.peers if isinstance(peer, RdmaPeer)]

    def holder(self, shard: int) -> RdmaPeer:
        for peer in self.peers:
            if any(shard in shards for shards in peer.records.values()):
                return peer
        raise AssertionError(f"nobody has shard {shard}")

    def ticket(self) -> Ticket:
        """Of all blocks: in an emulated guest a lookup may find its nodes silent for too long, and tries again."""
        found: list[Ticket] = []

        def whole() -> bool:
            found.append(self.client.lookup(self.keys))
            return found[-1].hit_blocks == BLOCKS

        until(whole, "a whole hit")
        return found[-1]

    def loads_right(self, *, by_rdma: bool = True) -> dict[str, int | float]:
        ticket = self.ticket()
        before = self.client.stats()
        result, place = load(self.client, ticket)
        assert (result.outcome, result.blocks) == (LoadOutcome.COMPLETE, BLOCKS)
        assert np.array_equal(place, self.data)
        after = self.client.stats()
        if by_rdma:
            assert after["read_bytes_rdma"] - before["read_bytes_rdma"] > self.data.nbytes
        return after


@pytest.fixture
def stored() -> Iterator[Stored]:
    with PeerCluster() as cluster:
        made = Stored(cluster)
        with made.client:
            yield made


def test_loads_come_by_rdma_and_credits_are_told_again(stored: Stored) -> None:
    for _ in range(3):
        stats = stored.loads_right()
    assert (stats["read_bytes_tcp"], stats["rdma_fallbacks"], stats["rdma_faults"], stats["protocol_errors"]) == (0, 0, 0, 0)
    assert 10 <= stats["rdma_queue_pairs"] <= 12
    used = [peer for peer in stored.peers if len(peer.rounds) > 1]
    assert used
    for peer in used:
        assert peer.rounds[0][1] == 0
        assert all(told == before[0] for before, (_, told) in zip(peer.rounds, peer.rounds[1:], strict=False))


def test_without_windows_each_connection_has_a_registration() -> None:
    config = ClientConfig(promise_reuse_seconds=0, rdma_windows=False)
    with PeerCluster() as cluster:
        made = Stored(cluster, config)
        with made.client:
            made.loads_right()

            def one_each() -> bool:  # a connection more may be on its way
                stats = made.client.stats()
                return stats["rdma_registered_bytes"] == stats["rdma_queue_pairs"] * made.client.config.rdma_zone_bytes > 0

            until(one_each, "a registration for each queue pair")


@pytest.mark.parametrize("status", [Status.NOT_FOUND, Status.BUSY, Status.INTERNAL, Status.BAD_REQUEST])
def test_a_node_that_refuses_is_read_over_tcp_and_said_so_once(status: Status, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvstore.client")
    config = ClientConfig(promise_reuse_seconds=0, transport="auto")
    with PeerCluster() as cluster:
        made = Stored(cluster, config)
        for peer in made.peers:
            peer.open_rule = status
        with made.client:
            made.loads_right(by_rdma=False)
            stats = made.loads_right(by_rdma=False)
    assert stats["read_bytes_rdma"] == 0
    assert stats["rdma_fallbacks"] >= 10
    assert len([record for record in caplog.records if "TCP" in record.message]) == 1


def test_with_rdma_alone_a_node_that_refuses_is_not_read_from(stored: Stored) -> None:
    for peer in stored.peers:
        peer.open_rule = Status.NOT_FOUND
    result, _ = load(stored.client, stored.ticket())
    assert (result.outcome, result.blocks) == (LoadOutcome.UNREACHABLE, 0)
    assert stored.client.stats()["read_bytes_tcp"] == 0


GID = bytes(10) + b"\xff\xff" + bytes([10, 77, 0, 1])
BAD_ANSWERS = {
    "short": b"\0" * 8,
    "qpn": wire.VerbsOpen(GID, 1 << 24, 0, 5).encode(),
    "psn": wire.VerbsOpen(GID, 1, 1 << 24, 5).encode(),
    "mtu": wire.VerbsOpen(GID, 1, 1, 9).encode(),
    "gid": wire.VerbsOpen(bytes(16), 1, 1, 5).encode(),
    "multicast": wire.VerbsOpen(b"\xff" * 16, 1, 1, 5).encode(),
    "a zone": wire.VerbsOpen(GID, 1, 1, 5, zone_addr=4096).encode(),
    "no such host": wire.VerbsOpen(bytes(10) + b"\xff\xff" + bytes([10, 99, 0, 1]), 1, 1, 5).encode(),
}


@pytest.mark.parametrize("answer", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_an_answer_to_verbs_open_that_is_wrong_costs_that_node(stored: Stored, answer: bytes) -> None:
    for shard in (0, 3):
        stored.holder(shard).open_rule = answer
    stored.loads_right()


async def flipped(item: Item) -> bytes:
    return item.body[:-1] + bytes([item.body[-1] ^ 1])


async def short(item: Item) -> bytes:
    return item.body[: len(item.body) // 2]


async def no_bytes(_: Item) -> bytes:
    return b""


async def gone(_: Item) -> Status:
    return Status.CORRUPT


@pytest.mark.parametrize("rule", [flipped, short, no_bytes, gone], ids=lambda rule: rule.__name__)
def test_wrong_bodies_are_found_where_they_were_copied_to(stored: Stored, rule: object) -> None:
    for shard in (0, 11):
        stored.holder(shard).item_rule = rule  # type: ignore[assignment]  # a coroutine of an Item
    stored.loads_right()


@pytest.mark.parametrize("bits", [1, 1 << 16, 99 << 24], ids=["ordinal", "round", "status"])
def test_an_immediate_that_is_not_due_ends_the_connection(stored: Stored, bits: int) -> None:
    stored.holder(2).immediate_xor = bits
    stored.loads_right()
    until(lambda: stored.client.stats()["protocol_errors"] >= 1, "the wrong immediate")  # others may have been faster


def test_late_writes_land_in_the_zone_and_nowhere_else(stored: Stored) -> None:
    result, place = load(stored.client, stored.ticket())
    assert result.blocks == BLOCKS
    for peer in stored.peers:
        for zone in list(peer.zones.values()):
            done = asyncio.run_coroutine_threadsafe(peer.write(zone, 0, b"\xee" * 4096), stored.cluster.loop).result(60)
            assert done == e.IBV_WC_SUCCESS  # it is that node's to write to
    assert np.array_equal(place, stored.data)
    stored.loads_right()


def test_a_closed_connection_lets_nobody_write(stored: Stored) -> None:
    stored.loads_right()
    peer = next(peer for peer in stored.peers if peer.zones)
    pipe, zone = next(iter(peer.zones.items()))
    pairs = stored.client.stats()["rdma_queue_pairs"]
    peer.zones = {}  # keeps this end's queue pair beyond its TCP connection
    stored.cluster.loop.call_soon_threadsafe(pipe.close)
    until(lambda: stored.client.stats()["rdma_queue_pairs"] < pairs, "the fence")
    before = ctypes.string_at(zone.opened.zone_addr, 4096)  # still the pool's, of this very process
    late = asyncio.run_coroutine_threadsafe(peer.write(zone, 0, bytes(b ^ 0xFF for b in before)), stored.cluster.loop)
    with contextlib.suppress(TimeoutError):  # soft-RoCE of Linux 6.1 tells nothing of a peer that is gone
        assert late.result(5) in (e.IBV_WC_REM_ACCESS_ERR, e.IBV_WC_RETRY_EXC_ERR)
    late.cancel()
    assert ctypes.string_at(zone.opened.zone_addr, 4096) == before
    zone.end.close()


def test_a_silent_fabric_is_left_for_tcp(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvstore.client")
    config = ClientConfig(promise_reuse_seconds=0, transport="auto", stall_timeout_seconds=3.0)
    with PeerCluster() as cluster:
        made = Stored(cluster, config)
        for peer in made.peers:
            peer.no_more = True
        with made.client:
            load(made.client, made.ticket(), deadline_seconds=8.0)  # a miss is allowed, once

            def whole() -> bool:  # nodes that stood still are held for down for a while
                result, place = load(made.client, made.ticket(), deadline_seconds=8.0)
                return result.blocks == BLOCKS and np.array_equal(place, made.data)

            until(whole, "a load over TCP")
            stats = made.client.stats()
    assert stats["read_bytes_rdma"] == 0
    assert sum("4791" in record.message for record in caplog.records) == 1
