"""Lookups: whom they ask, whom they believe, what they promise and touch, and what they take."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from client_tools import NO_REUSE, SMALL, WAIT_SECONDS, bytes_of, chain, load, paced, store
from faultpeer import Peer, PeerCluster, Raw

from kvstore import wire
from kvstore.client import Accept, Client, ClientConfig, Clock, Fidelity, promises
from kvstore.client.native import FOUND, PIECE
from kvstore.client.planner import Planner
from kvstore.client.promises import Promises
from kvstore.clustermap import ClusterMap, Node
from kvstore.keys import block_tags
from kvstore.layout import Layout
from kvstore.placement import Placement
from kvstore.wire import Status, Verb


class ManualClock(Clock):
    """Time that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def bucket_time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def cluster() -> Iterator[PeerCluster]:
    with PeerCluster() as running:
        yield running


def asked(cluster: PeerCluster, verb: Verb) -> int:
    return sum(peer.asked[verb] for peer in cluster.peers)


def forget(cluster: PeerCluster) -> None:
    for peer in cluster.peers:
        peer.asked.clear()
        peer.touches.clear()
        peer.discovered.clear()


def test_a_whole_hit_asks_few_nodes_and_promises_at_all_twelve(cluster: PeerCluster) -> None:
    with Client(cluster.map, layout=SMALL, config=NO_REUSE) as client:
        keys = chain(200, SMALL)
        store(client, keys, lengths=[64, 100, 36])
        forget(cluster)
        assert client.lookup(keys).hit_blocks == 200
        assert 200 <= sum(len(peer.discovered) for peer in cluster.peers) <= 600, "each key at one node, at most three where one is late"
        until_all_promised(cluster, 12)


def test_the_walk_takes_only_rows_that_its_caller_has_looked_at(cluster: PeerCluster) -> None:
    """An answer may come between the two: what it adds has passed none of the caller's checks."""
    with Client(cluster.map, layout=SMALL, config=NO_REUSE) as client, client._reaches.using() as reach:
        keys = chain(128, SMALL)
        store(client, keys, lengths=[64, 64])
        call = reach.core.discover(client.owner, reach.map.epoch, keys, client._readable)
        call.ask(*Planner(reach.placements, keys, reach.core.health()).first(), True)
        assert call.wait(WAIT_SECONDS)
        found = call.found().view(FOUND)
        assert sorted(found["start"].tolist()) == [0, 64]
        epochs, nothing = np.array([reach.map.epoch], np.uint64), np.empty(0, np.uint32)
        for seen in range(3):
            pieces, starts = call.walk(seen, epochs, nothing)
            assert starts.tolist() == found["start"][:seen].tolist()
            assert all(row < seen for row in pieces.view(PIECE)["row"])
        assert pieces.view(PIECE)["end"].tolist() == [64, 128]
        assert not call.walk(2, epochs + 1, nothing)[1].size, "an epoch that nobody has a map of"
        assert call.walk(2, epochs, np.array([0], np.uint32))[1].tolist() == found["start"][1:].tolist()


def until_all_promised(cluster: PeerCluster, count: int) -> None:
    from client_tools import until

    until(lambda: asked(cluster, Verb.PROMISE) >= count, f"{count} promises")
    assert asked(cluster, Verb.PROMISE) == count


def test_a_promise_is_used_again_and_an_extent_touched_once_in_a_bucket(cluster: PeerCluster) -> None:
    clock = ManualClock()
    with Client(cluster.map, layout=SMALL, clock=clock) as client:
        keys = chain(64, SMALL)
        store(client, keys)
        forget(cluster)
        for _ in range(5):
            assert client.lookup(keys).hit_blocks == 64
        until_all_promised(cluster, 12)
        clock.now += 31  # the promise may no longer be relied on
        assert client.lookup(keys).hit_blocks == 64
        until_all_promised(cluster, 24)
        clock.now += 29 + 60 - clock.now % 60 - 29  # a new bucket, the promise still young
        assert client.lookup(keys).hit_blocks == 64
        buckets = {bucket for peer in cluster.peers for _, bucket, _ in peer.touches}
        assert len(buckets) == 2 and max(buckets) == int(clock.now // 60)


def test_a_shard_that_was_not_there_is_asked_for_again_soon(cluster: PeerCluster) -> None:
    """It may have been on its way: else every load of the next half minute decodes."""
    clock = ManualClock()
    with Client(cluster.map, layout=SMALL, clock=clock) as client:
        keys = chain(20, SMALL)
        store(client, keys)
        client.flush()
        late = next(peer for peer in cluster.peers if any(min(shards) < 10 for shards in peer.records.values()))
        held, late.records = late.records, {}
        answered = cluster.gate()

        async def answer_first(_verb: Verb, _body: bytes, _right: bytes) -> None:
            answered.open()

        async def answer_later(_verb: Verb, _body: bytes, _right: bytes) -> None:
            if _verb == Verb.PROMISE:
                await answered.wait()

        for peer in cluster.peers:
            peer.reply_rule = answer_first if peer is late else answer_later
        ticket = client.lookup(keys)
        assert any(ticket.extents["absent"]) and load(client, ticket)[0].decoded
        late.records = held
        assert any(client.lookup(keys).extents["absent"])
        for _ in range(10):  # of the half minute; a node that is too slow for one lookup is absent in it, too
            clock.now += 1.1
            ticket = client.lookup(keys)
            if not any(ticket.extents["absent"]):
                break
        assert not any(ticket.extents["absent"]) and not load(client, ticket)[0].decoded


def test_another_class_is_touched_again(cluster: PeerCluster) -> None:
    with Client(cluster.map, layout=SMALL, clock=ManualClock()) as client:
        keys = chain(10, SMALL)
        store(client, keys)
        forget(cluster)
        for name in ("chat", "agent", "agent"):
            client.lookup(keys, retention_class=name)
        until_all_promised(cluster, 24)
        assert {retention for peer in cluster.peers for _, _, retention in peer.touches} == {2, 3}


def test_one_nodes_no_is_not_believed(cluster: PeerCluster) -> None:
    """A node that lost its shards says no for every key; whichever node is asked first, the lookup finds all."""
    with Client(cluster.map, layout=SMALL, config=NO_REUSE) as client:
        keys = chain(180, SMALL)
        data = store(client, keys, lengths=[60, 60, 60])
        client.flush()
        for empty in range(12):
            kept, cluster.peers[empty].records = cluster.peers[empty].records, {}
            for _ in range(3):
                ticket = client.lookup(keys)
                assert ticket.hit_blocks == 180
            result, place = load(client, ticket)
            assert result.blocks == 180 and np.array_equal(place, data)
            cluster.peers[empty].records = kept


def test_a_no_needs_three_nodes(cluster: PeerCluster) -> None:
    with Client(cluster.map, layout=SMALL, config=NO_REUSE) as client:
        keys = chain(1, SMALL)
        assert client.lookup(keys).hit_blocks == 0
        assert sum(bool(peer.asked[Verb.DISCOVER]) for peer in cluster.peers) >= 3 and asked(cluster, Verb.PROMISE) == 0


def answer(verdict: object) -> object:
    async def rule(verb: Verb, _: bytes, __: bytes) -> object:
        return verdict if verb == Verb.DISCOVER else None

    return rule


WRONG_ANSWERS = [
    Status.INTERNAL,
    Status.BUSY,
    b"",
    b"\xff" * 8,
    struct.pack("<II", 1, 0),
    struct.pack("<II", 1, 0) + bytes(64),
    struct.pack("<II", 0xFFFFFFFF, 0) + bytes(1000),
    wire.encode_discover_reply([], busy=True),
    Raw(b"nonsense" * 10),
    Raw(wire.encode_header(Verb.DISCOVER, 0xFFFFFFFF, kind=wire.Kind.REPLY)),
    Raw(b""),
]


@pytest.mark.parametrize("verdict", WRONG_ANSWERS, ids=lambda v: repr(v)[:30])
def test_wrong_answers_are_asked_elsewhere(cluster: PeerCluster, verdict: object) -> None:
    with Client(cluster.map, layout=SMALL, config=NO_REUSE) as client:
        keys = chain(100, SMALL)
        data = store(client, keys)
        client.flush()
        for pair in ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)):
            for peer in pair:
                cluster.peers[peer].reply_rule = answer(verdict)
            result, place = load(client, client.lookup(keys))
            assert result.blocks == 100 and np.array_equal(place, data)
            for peer in pair:
                cluster.peers[peer].reply_rule = None


def test_late_answers_are_asked_elsewhere_soon(cluster: PeerCluster) -> None:
    with Client(cluster.map, layout=SMALL, config=NO_REUSE) as client:
        keys = chain(100, SMALL)
        store(client, keys)
        client.flush()
        client.lookup(keys)
        gate = cluster.gate()

        async def wait(*_: object) -> None:
            await gate.wait()

        for peer in cluster.peers[:2]:
            peer.reply_rule = wait
        for _ in range(6):
            began = time.monotonic()
            assert client.lookup(keys).hit_blocks == 100
            assert time.monotonic() - began < paced(1.0)
        gate.open()


def test_gaps_are_filled_from_the_starts_that_later_extents_name(cluster: PeerCluster) -> None:
    """All but one node forgot the middle extent's place in the filter: only asking those keys again finds it."""
    with Client(cluster.map, layout=SMALL, config=NO_REUSE) as client:
        keys = chain(90, SMALL)
        store(client, keys, lengths=[30, 30, 30])
        client.flush()
        middle = keys[30].tobytes()
        first_asked: list[Peer] = []

        def forgetful(peer: Peer) -> object:
            async def rule(verb: Verb, body: bytes, right: bytes) -> bytes | None:
                if verb != Verb.DISCOVER or (first_asked and peer not in first_asked):
                    return None
                first_asked.append(peer)  # whoever is asked first does not know the middle one
                found, _ = wire.decode_discover_reply(right)
                known = [w for w in found if body[32 + 32 * w.key_ordinal : 64 + 32 * w.key_ordinal] != middle]
                return wire.encode_discover_reply(known)

            return rule

        for peer in cluster.peers:
            peer.reply_rule = forgetful(peer)
        assert client.lookup(keys).hit_blocks == 90


def test_extents_with_too_few_shards_are_walked_around(cluster: PeerCluster) -> None:
    """Two writings of the middle; the one with nine shards is dropped for the other, and without another the hit ends there."""
    with Client(cluster.map, layout=SMALL, config=NO_REUSE) as client:
        keys = chain(90, SMALL)
        store(client, keys, lengths=[30, 30, 30])
        client.flush()
        middle = keys[30].tobytes()

        def lose(write_ids: set[int], count: int) -> None:
            lost = 0
            for peer in cluster.peers:
                for name in [n for n in peer.records if n[0] == middle and n[1] in write_ids]:
                    if lost < count:
                        lost += len(peer.records.pop(name))

        first = {n[1] for peer in cluster.peers for n in peer.records if n[0] == middle}
        lose(first, 3)
        assert client.lookup(keys).hit_blocks == 30
        second = bytes_of(keys[30:60], SMALL)
        client.store(keys[:60], second, first_block=30).result(WAIT_SECONDS)
        client.flush()
        assert client.lookup(keys).hit_blocks == 90


def test_what_a_reader_does_not_accept_counts_as_not_found(cluster: PeerCluster) -> None:
    with Client(cluster.map, layout=SMALL, config=NO_REUSE) as client:
        keys = chain(60, SMALL)
        data = bytes_of(keys, SMALL)
        client.store(keys[:20], data[:20], first_block=0).result(WAIT_SECONDS)
        client.store(keys[:40], data[20:40], first_block=20, fidelity=Fidelity.DECODE).result(WAIT_SECONDS)
        client.store(keys, data[40:], first_block=40, fidelity=Fidelity.approx(3)).result(WAIT_SECONDS)
        assert client.lookup(keys).hit_blocks == 40 and client.lookup(keys).fidelity == Fidelity.DECODE
        assert client.lookup(keys, accept=Accept(decode=False)).hit_blocks == 20
        assert client.lookup(keys, accept=Accept(depth_max=2)).hit_blocks == 40
        ticket = client.lookup(keys, accept=Accept.ANY)
        assert ticket.hit_blocks == 60 and ticket.fidelity == Fidelity.approx(3)


def test_other_layouts_owners_and_groups_are_not_found(cluster: PeerCluster) -> None:
    keys = chain(10, SMALL)
    with Client(cluster.map, layout=SMALL) as client:
        store(client, keys)
        assert client.lookup(keys).hit_blocks == 10
    other_layout = Layout.single(SMALL.block_bytes)
    for client in (Client(cluster.map, layout=other_layout), Client(cluster.map, layout=SMALL, kv_group=1)):
        with client:
            assert client.lookup(keys).hit_blocks == 0


def test_a_cluster_that_does_not_answer_is_a_miss_not_a_hang() -> None:
    with PeerCluster() as gone:
        cluster_map = gone.map
    with Client(cluster_map, layout=SMALL) as client:
        keys = chain(10, SMALL)
        for _ in range(3):
            began = time.monotonic()
            assert client.lookup(keys).hit_blocks == 0
            assert time.monotonic() - began < paced(1.0)
        assert client.stats()["nodes_down"] >= 3


def test_an_empty_prompt_is_an_empty_ticket(cluster: PeerCluster) -> None:
    with Client(cluster.map, layout=SMALL) as client:
        ticket = client.lookup(np.empty((0, 32), np.uint8))
        assert ticket.hit_blocks == 0 and client.load(ticket, bytearray()).blocks == 0


def placements(nodes: int, epochs: int = 1) -> dict[int, Placement]:
    def listed(first: int, count: int) -> list[Node]:
        return [Node(f"node-{i:04}", f"host-{i:04}", f"127.0.0.1:{10000 + i}") for i in range(first, first + count)]

    cluster_map = ClusterMap.local(listed(0, nodes))
    for _ in range(1, epochs):
        members = [node.id for node in cluster_map.nodes]
        new = listed(len(members), 4)
        cluster_map = cluster_map.with_epoch(new, [*members, *(node.id for node in new)])
    return {number: Placement(cluster_map, number) for number in cluster_map.epochs}


@pytest.mark.parametrize("nodes", [1, 3, 12, 13, 40, 200])
def test_every_key_is_asked_at_a_node_of_its_list_and_elsewhere_at_others(nodes: int) -> None:
    lists = placements(nodes)[1]
    keys = chain(600, SMALL)
    plan = Planner({1: lists}, keys, np.zeros(nodes, np.uint8))
    indices, chosen = plan.first()
    rows = lists.table()[lists.pg_of(keys)]
    assert indices.tolist() == list(range(600)) and (rows == chosen[:, None]).any(axis=1).all()
    if nodes == 12:
        assert len(set(chosen.tolist())) <= 4, "few nodes are asked"
    again, others = plan.elsewhere(np.arange(600, dtype=np.int32), 2)
    assert len(again) == 600 * min(2, nodes - 1)
    for index, node in zip(again.tolist(), others.tolist(), strict=True):
        assert node in rows[index] and node != chosen[index]


def test_nodes_that_are_down_or_late_are_not_asked_first() -> None:
    lists = placements(12)[1]
    keys = chain(300, SMALL)
    health = np.array([3, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0], np.uint8)
    for _ in range(20):
        _, chosen = Planner({1: lists}, keys, health).first()
        assert not set(chosen.tolist()) & {0, 2, 3, 4}
    _, chosen = Planner({1: lists}, keys, np.full(12, 3, np.uint8)).first()
    assert len(chosen) == 300, "when all are down somebody is asked"


def test_each_live_epochs_list_is_asked() -> None:
    """A key whose lists of two epochs share a node is asked there; otherwise at one node of each."""
    lists = placements(14, epochs=3)
    keys = chain(200, SMALL)
    indices, chosen = Planner(lists, keys, np.zeros(22, np.uint8)).first()
    for index in range(200):
        nodes = {n for i, n in zip(indices.tolist(), chosen.tolist(), strict=True) if i == index}
        for placement in lists.values():
            assert nodes & set(placement.nodes_of(int(placement.pg_of(keys[index : index + 1])[0])))


def test_what_was_written_in_an_older_epoch_is_found_and_read() -> None:
    with PeerCluster(16) as cluster:
        old = ClusterMap.local(cluster.map.nodes[:12])
        new = old.with_epoch(cluster.map.nodes[12:], [node.id for node in cluster.map.nodes])
        keys = chain(100, SMALL)
        with Client(old, layout=SMALL, config=NO_REUSE) as writer:
            data = store(writer, keys[:60])
        with Client(new, layout=SMALL, config=ClientConfig(promise_reuse_seconds=0)) as reader:
            assert reader.lookup(keys).hit_blocks == 60
            more = store(reader, keys, first=60)
            result, place = load(reader, reader.lookup(keys))
            assert result.blocks == 100 and np.array_equal(place, np.concatenate([data, more]))


def test_nodes_that_name_writings_without_end_do_not_hold_a_lookup_past_its_deadline() -> None:
    """Each of them ends in one more walk, and one more promise that nobody keeps."""
    keys = chain(40, SMALL)
    tags = tuple(int(tag) for tag in block_tags(keys))
    layout_tag = int.from_bytes(SMALL.digest()[:8], "little")

    async def invent(verb: Verb, body: bytes, right: bytes) -> bytes | None:
        if verb is not Verb.DISCOVER:
            return None
        asked = [body[at : at + 32] for at in range(32, len(body), 32)]
        if keys[0].tobytes() not in asked:
            return None
        first = wire.Writing(
            0, 1, 1, asked.index(keys[0].tobytes()), 0, 0, 2, 0, 0, 0, SMALL.block_bytes, 10, 2, 0, 1, layout_tag, (), tags
        )
        return wire.encode_discover_reply([replace(first, write_id=number) for number in range(1, 2400)])

    with PeerCluster() as cluster, Client(cluster.map, layout=SMALL, config=NO_REUSE) as client:
        store(client, keys)
        for peer in cluster.peers:
            peer.reply_rule = invent
        began = time.monotonic()
        client.lookup(keys, deadline_seconds=0.3)
        assert time.monotonic() - began < paced(3)
        for peer in cluster.peers:
            peer.reply_rule = None
        assert client.lookup(keys).hit_blocks == 40


def test_kept_promises_are_bounded_and_renewing_them_drops_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "KEPT_MAX", 100)
    kept = Promises(30.0)
    names = [bytes([number]) * 40 for number in range(100)]
    kept.put(dict.fromkeys(names, 0), 1, 2, now=0.0)
    kept.put(dict.fromkeys(names[:50], 4), 1, 2, now=0.5)
    assert kept.get(names, 1, 2, now=0.6) == {name: 4 if at < 50 else 0 for at, name in enumerate(names)}
    assert not kept.get(names, 2, 2, now=0.6) and not kept.get(names, 1, 3, now=0.6) and len(kept.get(names, 1, 2, now=2.0)) == 50
    kept.put({b"new": 0}, 1, 2, now=2.0)
    assert set(kept.get([*names, b"new"], 1, 2, now=2.1)) == {*names[50:], b"new"}, "what was over made room"
    kept.put({number.to_bytes(40, "big"): 0 for number in range(1, 300)}, 1, 2, now=3.0)
    assert len(kept.get([number.to_bytes(40, "big") for number in range(1, 300)], 1, 2, now=3.1)) == 100
    kept.forget(names[50])
    assert not kept.get(names[50:51], 1, 2, now=3.1)
