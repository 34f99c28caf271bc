"""What one receive brings of several items: however the stream is cut, and whatever comes in the place of an item, right bytes or none."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from client_tools import NO_REUSE, SMALL, V41, chain, load, paced, store, whole_ticket
from faultpeer import Item, ItemRule, PeerCluster, Verdict
from server_tools import until
from test_client_faults import BAD, lie

from kvstore.client import Client
from kvstore.layout import Layout
from kvstore.placement import Placement
from kvstore.wire import Status

LENGTHS = [1, 2, 3, 1, 1, 5, 8, 1, 1, 1, 13, 2, 1, 20, 1]
CUT = Layout.single(321)  # 33 bytes a shard: the last one is cut short in its place


@pytest.fixture(params=[SMALL, CUT, V41], ids=lambda layout: f"{layout.block_bytes}B")
def cluster(request: pytest.FixtureRequest) -> Iterator[tuple[PeerCluster, Layout]]:
    with PeerCluster() as made:
        yield made, request.param


@pytest.mark.parametrize("hedge", ["lazy", "eager"])
def test_refused_items_do_not_shift_the_bytes_of_those_after_them(cluster: tuple[PeerCluster, Layout], hedge: str) -> None:
    peers, layout = cluster
    dice = random.Random(7)
    keys = chain(sum(LENGTHS), layout)
    with Client(peers.map, layout=layout, config=NO_REUSE) as client:
        data = store(client, keys, lengths=LENGTHS)

        async def refuse_some(_: Item) -> Status | None:
            return dice.choice((None, None, Status.NOT_FOUND, Status.BUSY))

        for _ in range(20):
            for number, peer in enumerate(peers.peers):
                peer.item_rule = refuse_some if number in (3, 8) else None
            result, place = load(client, whole_ticket(client, keys), hedge=hedge, deadline_seconds=paced(5.0))
            assert result.blocks == len(keys) and result.bad_shards == 0 and np.array_equal(place, data)


@pytest.mark.parametrize("hedge", ["lazy", "eager"])
def test_a_stream_that_comes_in_dribs_comes_out_whole(cluster: tuple[PeerCluster, Layout], hedge: str) -> None:
    peers, layout = cluster
    keys = chain(sum(LENGTHS), layout)
    with Client(peers.map, layout=layout, config=NO_REUSE) as client:
        data = store(client, keys, lengths=LENGTHS)
        for number, peer in enumerate(peers.peers):
            peer.chop = random.Random(number)
        for _ in range(3):
            result, place = load(client, whole_ticket(client, keys), hedge=hedge, deadline_seconds=paced(20.0))
            assert result.blocks == len(keys) and result.bad_shards == 0 and np.array_equal(place, data)


@pytest.mark.parametrize("chopped", [False, True])
def test_pieces_longer_than_a_receive_are_checked_whole(chopped: bool) -> None:
    layout = Layout.single(3_000_001)  # 300,032 bytes a shard
    keys = chain(2, layout)
    with PeerCluster() as peers, Client(peers.map, layout=layout, config=NO_REUSE) as client:
        data = store(client, keys)

        async def late_flip(item: Item) -> bytes:
            return item.body[:-70_000] + bytes([item.body[-70_000] ^ 1]) + item.body[-69_999:]

        for number, peer in enumerate(peers.peers):
            peer.chop = random.Random(number) if chopped else None
        holders = Placement(peers.map).nodes_of(int(Placement(peers.map).pg_of(keys[:1])[0]))
        for faulty in ((), holders[2:3], (holders[0], holders[9])):  # data: parity is not asked for while all is well
            for number, peer in enumerate(peers.peers):
                peer.item_rule = late_flip if number in faulty else None

            def found(faulty: tuple[int, ...] = faulty) -> bool:
                result, place = load(client, whole_ticket(client, keys), deadline_seconds=paced(20.0))
                assert result.blocks == len(keys) and np.array_equal(place, data)
                assert faulty or not result.bad_shards
                return bool(result.bad_shards) == bool(faulty)

            until(found, "a load that asks one of the faulty: two that are late are left out")


@pytest.mark.parametrize("seed", range(6))
def test_faults_in_a_chopped_stream_never_make_wrong_bytes(seed: int) -> None:
    dice = random.Random(seed)
    layout = dice.choice((SMALL, CUT, V41))
    keys = chain(sum(LENGTHS), layout)
    with PeerCluster() as peers, Client(peers.map, layout=layout, config=NO_REUSE) as client:
        data = store(client, keys, lengths=LENGTHS)
        for _ in range(15):
            faulty = dice.sample(range(12), dice.randrange(4))
            rules = {number: dice.choice(BAD) for number in faulty}

            def at_times(rule: ItemRule) -> ItemRule:
                async def ruled(item: Item) -> Verdict:
                    return await rule(item) if dice.random() < 0.3 else None

                return ruled

            for number, peer in enumerate(peers.peers):
                peer.chop = random.Random(number) if dice.random() < 0.2 else None
                peer.item_rule = at_times(rules[number]) if number in rules else None
            result, place = load(client, whole_ticket(client, keys), hedge=dice.choice(("lazy", "eager")), deadline_seconds=paced(20.0))
            assert np.array_equal(place[: result.blocks], data[: result.blocks])
            if len(faulty) <= 2 and lie not in rules.values():
                assert result.blocks == len(keys)
