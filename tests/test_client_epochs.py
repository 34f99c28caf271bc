"""A client with an older map than the nodes: it reads the map's file again and places anew, or says which epochs, and what to do."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from client_tools import NO_REUSE, SMALL, V41, WAIT_SECONDS, bytes_of, chain, load, store, until
from faultpeer import PeerCluster

from kvstore import record
from kvstore.client import Client, ClientConfig, LoadOutcome, StoreOutcome
from kvstore.clustermap import ClusterMap
from kvstore.errors import Closed, ConfigError
from kvstore.wire import Status, Verb


@pytest.fixture
def cluster() -> Iterator[PeerCluster]:
    with PeerCluster(14) as running:
        yield running


@pytest.fixture
def old(cluster: PeerCluster) -> ClusterMap:
    return ClusterMap.local(cluster.map.nodes[:12])


def grown(cluster: PeerCluster, before: ClusterMap) -> ClusterMap:
    """Two nodes more, and all nodes know it."""
    after = before.with_epoch(cluster.map.nodes[len(before.nodes) :], [node.id for node in cluster.map.nodes])
    know(cluster, after.epoch)
    return after


def know(cluster: PeerCluster, epoch: int) -> None:
    for peer in cluster.peers:
        peer.epoch = epoch


def test_a_map_knows_the_file_that_it_came_from(old: ClusterMap, tmp_path: Path) -> None:
    old.save(tmp_path / "map.toml")
    loaded = ClusterMap.load(tmp_path / "map.toml")
    assert loaded.path == tmp_path / "map.toml" and old.path is None and loaded == old
    assert loaded.with_epoch([], [node.id for node in old.nodes]).path is None


def test_what_was_refused_for_a_newer_map_is_placed_by_the_one_in_the_file(cluster: PeerCluster, old: ClusterMap, tmp_path: Path) -> None:
    path = tmp_path / "map.toml"
    old.save(path)
    with Client(ClusterMap.load(path), layout=SMALL, config=NO_REUSE) as client:
        first = chain(100, SMALL)
        data = store(client, first)
        new = grown(cluster, old)
        new.save(path)
        keys = chain(150, SMALL)
        result = client.store(keys, bytes_of(keys, SMALL), first_block=0).result(WAIT_SECONDS)
        assert (result.outcome, result.blocks, result.map_epoch, result.node_epoch) == (StoreOutcome.STORED, 150, 2, 0)
        assert client.map == new
        ticket = client.lookup(keys)
        assert ticket.hit_blocks == 150 and set(ticket.extents["write_epoch"].tolist()) == {2}
        loaded, place = load(client, client.lookup(first))
        assert loaded.blocks == 100 and np.array_equal(place, data), "of the older epoch"
        assert any(peer.records for peer in cluster.peers[12:]), "the new nodes have their share"
        until(lambda: len(client._reaches._older) == 0, "the older connections to be closed")
        assert client.stats()["extents_stored"] == 2 + 3, "counters go on"
    names = {name for peer in cluster.peers for name in peer.records}
    assert len(names) == 2 + 3, "what was refused is nowhere"


def test_only_extents_that_failed_are_placed_anew(cluster: PeerCluster, old: ClusterMap, tmp_path: Path) -> None:
    """Nodes learn of the epoch while a store is on its way: its first and third extent were taken by then."""
    path = tmp_path / "map.toml"
    old.save(path)
    keys = chain(64 * 5, SMALL)
    taken = {keys[0].tobytes(), keys[128].tobytes()}

    async def midway(verb: Verb, body: bytes, _: bytes) -> Status | None:
        if verb is not Verb.WRITE:
            return None
        made = record.parse(body)
        assert not isinstance(made, record.Check)
        return Status.STALE_MAP if made.write_epoch < 2 and made.extent_key not in taken else None

    with Client(ClusterMap.load(path), layout=SMALL, config=NO_REUSE) as client:
        old.with_epoch(cluster.map.nodes[12:], [node.id for node in cluster.map.nodes]).save(path)
        for peer in cluster.peers:
            peer.reply_rule = midway
            peer.stale_aux = 2
        data = bytes_of(keys, SMALL)
        result = client.store(keys, data, first_block=0).result(WAIT_SECONDS)
        assert (result.outcome, result.blocks, len(result.acks), result.extents_failed) == (StoreOutcome.STORED, 320, 5, 0)
        assert min(result.acks) >= 11
        ticket = client.lookup(keys)
        assert ticket.extents["write_epoch"].tolist() == [1, 2, 1, 2, 2]
        loaded, place = load(client, ticket)
        assert loaded.blocks == 320 and np.array_equal(place, data)
        found = [r for peer in cluster.peers for (key, _), shards in peer.records.items() for r in shards.values() if r.start_block == 256]
        assert {tuple(r.earlier) for r in found} == {(0, 64, 128, 192)}


def test_a_store_is_placed_anew_once(cluster: PeerCluster, old: ClusterMap, tmp_path: Path) -> None:
    """The file has a newer epoch, and nodes a newer one still."""
    path = tmp_path / "map.toml"
    old.save(path)
    keys = chain(20, SMALL)
    with Client(ClusterMap.load(path), layout=SMALL) as client:
        grown(cluster, old).save(path)
        know(cluster, 3)
        result = client.store(keys, bytes_of(keys, SMALL), first_block=0).result(WAIT_SECONDS)
        assert (result.outcome, result.blocks, result.map_epoch, result.node_epoch) == (StoreOutcome.STALE_MAP, 0, 2, 3)
        assert sum(peer.asked[Verb.WRITE] for peer in cluster.peers) <= 24
        assert client.flush(WAIT_SECONDS) and client.stats()["stores_open"] == 0


@pytest.mark.parametrize("file", [True, False])
def test_a_map_that_cannot_be_had_is_an_outcome_that_names_both_epochs(
    cluster: PeerCluster, old: ClusterMap, tmp_path: Path, caplog: pytest.LogCaptureFixture, file: bool
) -> None:
    path = tmp_path / "map.toml"
    old.save(path)
    with Client(ClusterMap.load(path) if file else old, layout=SMALL) as client:
        know(cluster, 2)
        for _ in range(3):
            keys = chain(20, SMALL)
            result = client.store(keys, bytes_of(keys, SMALL), first_block=0).result(WAIT_SECONDS)
            assert (result.outcome, result.map_epoch, result.node_epoch) == (StoreOutcome.STALE_MAP, 1, 2)
    told = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert len(told) == 1, "once for each epoch"
    what, fix = (str(path), "copy the nodes' map file there") if file else ("the cluster map that this client was given", "Client.take_map")
    assert told[0].startswith(f"error[E137] {what}: has epoch 1, nodes have epoch 2") and fix in told[0]


def test_a_file_is_read_once_for_each_time_that_it_changed(
    cluster: PeerCluster, old: ClusterMap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "map.toml"
    old.save(path)
    with Client(ClusterMap.load(path), layout=SMALL) as client:
        reads, load_map = [], ClusterMap.load

        def counted(named: str | Path) -> ClusterMap:
            reads.append(named)
            return load_map(named)

        monkeypatch.setattr(ClusterMap, "load", counted)

        def outcome() -> StoreOutcome:
            keys = chain(5, SMALL)
            return client.store(keys, bytes_of(keys, SMALL), first_block=0).result(WAIT_SECONDS).outcome

        new = grown(cluster, old)
        assert [outcome() for _ in range(5)] == [StoreOutcome.STALE_MAP] * 5 and len(reads) == 1
        new.save(path)
        assert [outcome() for _ in range(5)] == [StoreOutcome.STORED] * 5 and len(reads) == 2
        assert client.map == new
        client.lookup(chain(5, SMALL))
        assert len(reads) == 2


OTHERS = """\
cluster = "other"
[[node]]
id = "a"
address = "1.2.3.4:1"
[[epoch]]
number = 9
nodes = ["a"]
"""


@pytest.mark.parametrize("text", ["cluster = [", OTHERS])
def test_a_file_that_is_no_map_of_this_cluster_is_not_taken_and_said_so(
    cluster: PeerCluster, old: ClusterMap, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = tmp_path / "map.toml"
    old.save(path)
    with Client(ClusterMap.load(path), layout=SMALL) as client:
        path.write_text(text)
        know(cluster, 2)
        keys = chain(5, SMALL)
        assert client.store(keys, bytes_of(keys, SMALL), first_block=0).result(WAIT_SECONDS).outcome is StoreOutcome.STALE_MAP
        assert client.map == old
    assert "map not taken, epoch 1 stays: error[E1" in caplog.text


def test_a_client_that_only_reads_hears_of_the_new_epoch_when_it_connects(cluster: PeerCluster, old: ClusterMap, tmp_path: Path) -> None:
    path = tmp_path / "map.toml"
    old.save(path)
    new = grown(cluster, old)
    keys = chain(100, SMALL)
    with Client(new, layout=SMALL) as writer:
        store(writer, keys)
    with Client(ClusterMap.load(path), layout=SMALL, config=NO_REUSE) as reader:
        new.save(path)
        until(lambda: reader.lookup(keys).hit_blocks == 100, "the new map")
        assert reader.map == new


def test_loads_go_on_by_the_map_they_began_with(cluster: PeerCluster, old: ClusterMap) -> None:
    with Client(old, layout=V41, config=NO_REUSE) as client:
        keys = chain(64, V41)
        data = store(client, keys)
        gate = cluster.gate()

        async def wait(_: object) -> None:
            await gate.wait()

        for peer in cluster.peers:
            peer.item_rule = wait
        ticket, place = client.lookup(keys), np.empty_like(data)
        under_way = client.begin_load(ticket, place, hedge="lazy", deadline_seconds=WAIT_SECONDS, blocks=range(64))
        client.take_map(grown(cluster, old))
        more = chain(64, V41)
        assert client.store(more, bytes_of(more, V41), first_block=0).result(WAIT_SECONDS).map_epoch == 2
        gate.open()
        result = client.counted(under_way, ticket, 64)
        assert result.outcome is LoadOutcome.COMPLETE and np.array_equal(place, data)
        until(lambda: not client._reaches._older, "the older connections to be closed")
        assert client.stats()["load_bytes"] == data.nbytes and client.stats()["shards_asked"] >= 10


def test_a_load_that_nobody_ended_lets_go_of_the_older_map_when_it_is_collected(cluster: PeerCluster, old: ClusterMap) -> None:
    with Client(old, layout=SMALL) as client:
        keys = chain(5, SMALL)
        store(client, keys)
        ticket = client.lookup(keys)
        under_way = client.begin_load(ticket, None, hedge="lazy", deadline_seconds=1.0, blocks=range(5))
        client.take_map(grown(cluster, old))
        assert client._reaches._older
        del under_way
        gc.collect()
        until(lambda: not client._reaches._older, "the older connections to be closed")


def test_maps_that_are_older_or_anothers_are_not_taken(cluster: PeerCluster, old: ClusterMap) -> None:
    client = Client(old, layout=SMALL)
    new = grown(cluster, old)
    with client:
        client.take_map(new)
        core = client._core
        client.take_map(old)
        client.take_map(new)
        assert client.map == new and client._core is core
        with pytest.raises(ConfigError, match="E133"):
            client.take_map(ClusterMap.local(cluster.map.nodes[:12], cluster_id="other"))
    with pytest.raises(Closed):
        client.take_map(new)


def test_closing_finishes_stores_that_wait_for_a_map(cluster: PeerCluster, old: ClusterMap, tmp_path: Path) -> None:
    path = tmp_path / "map.toml"
    old.save(path)
    client = Client(ClusterMap.load(path), layout=SMALL, config=ClientConfig(close_seconds=0.1))
    grown(cluster, old).save(path)
    entered, go_on = threading.Event(), threading.Event()
    take = client._reaches.take

    def slow(cluster_map: ClusterMap) -> None:
        entered.set()
        assert go_on.wait(WAIT_SECONDS)
        take(cluster_map)

    client._reaches.take = slow  # type: ignore[method-assign]  # a file of megabytes, as it were
    keys = chain(5, SMALL)
    future = client.store(keys, bytes_of(keys, SMALL), first_block=0)
    assert entered.wait(WAIT_SECONDS)
    closing = threading.Thread(target=client.close)
    closing.start()
    until(lambda: client._reaches._ended, "the close")
    go_on.set()
    closing.join(WAIT_SECONDS)
    assert not closing.is_alive() and future.result(0).outcome is StoreOutcome.STALE_MAP


def test_a_client_that_took_a_map_is_collected_like_any_other(cluster: PeerCluster, old: ClusterMap) -> None:
    client = Client(old, layout=SMALL)
    store(client, chain(5, SMALL))
    client.take_map(grown(cluster, old))
    store(client, chain(5, SMALL))
    core, gone = weakref.ref(client._reaches), weakref.ref(client)
    del client
    gc.collect()
    until(lambda: gone() is None, "the client to go")
    until(lambda: core() is None or core()._ended, "its end")  # type: ignore[union-attr]  # as the line says
