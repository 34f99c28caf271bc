"""Stores to peers that refuse, lag or die: stored with 11, degraded with 10, withdrawn below; the caller's memory is free when told so."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import numpy as np
import pytest
from client_tools import NO_REUSE, SMALL, V41, WAIT_SECONDS, bytes_of, chain, load, paced, store, until
from faultpeer import Peer, PeerCluster

from kvstore import record
from kvstore.client import Client, ClientConfig, StoreOutcome
from kvstore.client.metrics import client_registry
from kvstore.layout import Layout
from kvstore.wire import Status, Verb


def refuse(status: Status) -> object:
    async def rule(verb: Verb, _: bytes, __: bytes) -> Status | None:
        return status if verb == Verb.WRITE else None

    return rule


def all_records(cluster: PeerCluster) -> list[record.Record]:
    return [r for peer in cluster.peers for shards in peer.records.values() for r in shards.values()]


@pytest.mark.parametrize("status", [Status.NO_SPACE, Status.IO_ERROR, Status.STALE_MAP, Status.TOO_MANY_WRITINGS])
@pytest.mark.parametrize(
    ("failing", "outcome"),
    [(0, StoreOutcome.STORED), (1, StoreOutcome.STORED), (2, StoreOutcome.DEGRADED), (3, StoreOutcome.FAILED), (12, StoreOutcome.FAILED)],
)
def test_the_outcome_counts_acknowledgements(failing: int, outcome: StoreOutcome, status: Status) -> None:
    with PeerCluster() as cluster, Client(cluster.map, layout=SMALL, config=NO_REUSE) as client:
        for peer in cluster.peers[:failing]:
            peer.reply_rule = refuse(status)
        keys = chain(20, SMALL)
        data = bytes_of(keys, SMALL)
        result = client.store(keys, data, first_block=0).result(WAIT_SECONDS)
        assert result.outcome is outcome
        assert result.blocks == (0 if outcome is StoreOutcome.FAILED else 20)
        assert client.stats()["extents_degraded"] == (outcome is StoreOutcome.DEGRADED)
        if outcome is StoreOutcome.FAILED:
            until(lambda: all(peer.asked[Verb.WITHDRAW] == 1 for peer in cluster.peers), "the withdrawal")
            until(lambda: not all_records(cluster), "its effect")
            assert client.stats()["withdrawals"] == 1
            assert client.lookup(keys).hit_blocks == 0
        else:
            loaded, place = load(client, client.lookup(keys))
            assert loaded.blocks == 20 and np.array_equal(place, data)


def test_what_stays_of_a_failed_store_is_never_a_hit() -> None:
    """The withdrawal is lost, too: nine shards stay."""
    with PeerCluster() as cluster, Client(cluster.map, layout=SMALL, config=NO_REUSE) as client:

        async def deaf(verb: Verb, _: bytes, __: bytes) -> Status | None:
            return Status.INTERNAL if verb == Verb.WITHDRAW else None

        for peer in cluster.peers:
            peer.reply_rule = deaf
        for peer in cluster.peers[:3]:
            peer.reply_rule = refuse(Status.IO_ERROR)
        keys = chain(20, SMALL)
        assert client.store(keys, bytes_of(keys, SMALL), first_block=0).result(WAIT_SECONDS).outcome is StoreOutcome.FAILED
        until(lambda: all(peer.asked[Verb.WITHDRAW] for peer in cluster.peers), "the withdrawal")
        assert client.lookup(keys).hit_blocks == 0


def test_a_busy_node_is_asked_again() -> None:
    with PeerCluster() as cluster, Client(cluster.map, layout=SMALL) as client:
        refused: list[Peer] = []

        def busy_once(peer: Peer) -> object:
            async def rule(verb: Verb, _: bytes, __: bytes) -> Status | None:
                if verb != Verb.WRITE or peer in refused:
                    return None
                refused.append(peer)
                return Status.BUSY

            return rule

        for peer in cluster.peers[:4]:
            peer.reply_rule = busy_once(peer)
        keys = chain(5, SMALL)
        assert client.store(keys, bytes_of(keys, SMALL), first_block=0).result(WAIT_SECONDS).outcome is StoreOutcome.STORED
        assert len(refused) == 4


def test_what_busy_nodes_refused_is_told_apart_from_what_failed_otherwise() -> None:
    with PeerCluster() as cluster, Client(cluster.map, layout=SMALL) as client:

        def dropped(reason: str) -> float:
            return client_registry(client).get_sample_value("kvstore_save_dropped_bytes_total", {"reason": reason}) or 0.0

        def failed() -> int:
            keys = chain(5, SMALL)
            assert client.store(keys, bytes_of(keys, SMALL), first_block=0).result(WAIT_SECONDS).outcome is StoreOutcome.FAILED
            return 5 * SMALL.block_bytes

        for peer in cluster.peers[:3]:
            peer.reply_rule = refuse(Status.BUSY)
        busy = failed()
        assert (dropped("busy"), dropped("error")) == (busy, 0)
        for peer in cluster.peers[:3]:
            peer.reply_rule = refuse(Status.NO_SPACE)
        lost = failed()
        assert (dropped("busy"), dropped("error")) == (busy, lost)


def test_a_node_that_takes_nothing_holds_up_neither_store_nor_memory() -> None:
    """Its shard is copied aside: the caller's memory is free with 11 acknowledgements, and the shard is right when it arrives at last."""
    with ExitStack() as stack:
        cluster = stack.enter_context(PeerCluster())
        gate = cluster.gate()
        stuck = cluster.peers[5]
        serve = stuck.serve

        async def late(pipe: object) -> None:
            await gate.wait()
            await serve(pipe)

        stuck.serve = late
        layout = Layout.single(8 << 20)  # one block an extent, 840 kB a shard: more than a socket takes unread
        client = stack.enter_context(Client(cluster.map, layout=layout))
        keys = chain(8, layout)
        data = bytes_of(keys, layout)
        result = client.store(keys, data, first_block=0).result(WAIT_SECONDS)
        assert result.outcome is StoreOutcome.STORED and result.extents_stored == 8
        data[:] = 0xEE  # the caller's again
        assert client.stats()["shards_aside"] >= 1
        gate.open()
        until(lambda: sum(len(shards) for shards in stuck.records.values()) == 8 - client.stats()["shards_given_up"], "the late shards")
        data = bytes_of(keys, layout)
        for (key, _), shards in stuck.records.items():
            block = next(i for i in range(8) if keys[i].tobytes() == key)
            for shard, found in shards.items():
                if shard < 10:
                    piece = found.pieces[0][0]
                    assert piece == data[block, shard * len(piece) : (shard + 1) * len(piece)].tobytes().ljust(len(piece), b"\0")


def test_two_nodes_that_take_nothing_make_a_degraded_store_soon() -> None:
    with PeerCluster() as cluster, Client(cluster.map, layout=SMALL) as client:
        gate = cluster.gate()

        async def wait(verb: Verb, _: bytes, __: bytes) -> None:
            if verb == Verb.WRITE:
                await gate.wait()

        for peer in cluster.peers[:2]:
            peer.reply_rule = wait
        keys = chain(20, SMALL)
        data = bytes_of(keys, SMALL)
        assert client.store(keys, data, first_block=0).result(paced(3.0)).outcome is StoreOutcome.DEGRADED
        data[:] = 0
        gate.open()
        until(lambda: len(all_records(cluster)) == 12, "the late shards")
        loaded, place = load(client, client.lookup(keys))
        assert loaded.blocks == 20 and np.array_equal(place, bytes_of(keys, SMALL))


def test_a_full_queue_drops_the_oldest_and_counts_them() -> None:
    config = ClientConfig(queue_bytes_max=8 << 20)
    with PeerCluster() as cluster, Client(cluster.map, layout=V41, config=config) as client:
        gate = cluster.gate()

        async def wait(verb: Verb, _: bytes, __: bytes) -> None:
            if verb == Verb.WRITE:
                await gate.wait()

        for peer in cluster.peers:
            peer.reply_rule = wait
        keys = chain(64, V41)
        data = bytes_of(keys, V41)
        futures = [client.store(keys, data, first_block=0) for _ in range(20)]  # 146 MB, far more than queue and flight hold
        until(lambda: client.stats()["extents_dropped"] == sum(future.done() for future in futures) > 0, "the dropped to be told")
        dropped = [future for future in futures if future.done()]
        assert all(future.result().outcome is StoreOutcome.DROPPED for future in dropped)
        assert client.stats()["bytes_dropped"] == len(dropped) * data.nbytes
        assert not futures[-1].done(), "the newest are kept"
        gate.open()
        outcomes = [future.result(WAIT_SECONDS).outcome for future in futures]
        assert outcomes[-1] is StoreOutcome.STORED and outcomes.count(StoreOutcome.DROPPED) == len(dropped)


def test_a_store_outlives_its_callers_reference() -> None:
    with PeerCluster() as cluster, Client(cluster.map, layout=V41) as client:
        keys = chain(100, V41)
        future = client.store(keys, bytes_of(keys, V41), first_block=0)  # nobody else holds these bytes
        assert future.result(WAIT_SECONDS).outcome is StoreOutcome.STORED
        loaded, place = load(client, client.lookup(keys))
        assert loaded.blocks == 100 and np.array_equal(place, bytes_of(keys, V41))


def test_closing_ends_every_store() -> None:
    with PeerCluster() as cluster:
        gate = cluster.gate()

        async def wait(verb: Verb, _: bytes, __: bytes) -> None:
            if verb == Verb.WRITE:
                await gate.wait()

        for peer in cluster.peers:
            peer.reply_rule = wait
        client = Client(cluster.map, layout=V41, config=ClientConfig(close_seconds=0.2))
        keys = chain(640, V41)
        futures = [client.store(keys, bytes_of(keys, V41), first_block=0) for _ in range(2)]
        client.close()
        assert all(future.result(0).outcome in (StoreOutcome.FAILED, StoreOutcome.DROPPED) for future in futures)
        gate.open()


def test_a_callback_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with PeerCluster() as cluster, Client(cluster.map, layout=SMALL) as client:
        keys = chain(5, SMALL)
        told = threading.Event()

        def callback(_: object) -> None:
            told.set()
            raise RuntimeError("mine")

        client.store(keys, bytes_of(keys, SMALL), first_block=0).add_done_callback(callback)
        assert told.wait(WAIT_SECONDS)
        store(client, chain(5, SMALL))
        assert "mine" in caplog.text


def test_records_hold_what_the_format_says() -> None:
    """Parsed by the plain Python twin: identity, order, earlier starts, class, bucket, digests."""
    with PeerCluster() as cluster, Client(cluster.map, layout=V41) as client:
        keys = chain(100, V41)
        data = store(client, keys, lengths=[64, 36])
        records = [r for r in all_records(cluster) if r.extent_key == keys[64].tobytes()]
        assert len({r.shard for r in records}) == len(records) >= 11
        for r in records:
            assert (r.start_block, list(r.earlier), r.block_count, r.k, r.m, r.retention_class, r.fidelity) == (64, [0], 36, 10, 2, 2, 0)
            assert r.tags == tuple(int.from_bytes(key[8:16].tobytes(), "little") for key in keys[64:])
            if r.shard < 10:
                for plane, part in enumerate(V41.planes()):
                    at = part.offset_bytes + r.shard * part.shard_bytes
                    real = data[67, at : min(at + part.shard_bytes, part.offset_bytes + part.bytes)].tobytes()
                    assert r.pieces[plane][3] == real.ljust(part.shard_bytes, b"\0")
        by_shard = {r.shard: r for r in records}
        if all(s in by_shard for s in range(10)):
            data_records = [by_shard[s] for s in range(10)]
            sums = [record.piece_sum(bytes(16), r.extent_key, r.write_id, r.shard, 1, 7, r.pieces[1][7]) for r in data_records]
            assert record.plane_digest(keys[71].tobytes(), records[0].write_id, sums) == records[0].digests[1][7]
