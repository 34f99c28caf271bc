"""Loads from peers that lag, lie, refuse, cut: right bytes or none, within the deadline, and nothing is written late."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from client_tools import EMULATED, NO_REUSE, SMALL, V41, Blocks, bytes_of, chain, load, paced, store, ticket_of_all, whole_ticket
from faultpeer import Gate, Item, ItemRule, PeerCluster, Raw, item_body, with_lie

from kvstore import wire
from kvstore.client import Client, LoadOutcome, Ticket
from kvstore.keys import Keys
from kvstore.layout import Layout
from kvstore.wire import Status, Verb


class Stored:
    """A chain stored on twelve peers, and who holds which of its shards."""

    def __init__(self, cluster: PeerCluster, layout: Layout = SMALL, blocks: int = 20) -> None:
        self.cluster = cluster
        self.client = Client(cluster.map, layout=layout, config=NO_REUSE)
        self.keys: Keys = chain(blocks, layout)
        self.data: Blocks = store(self.client, self.keys)
        self.client.flush()
        self.ticket: Ticket = ticket_of_all(self.client, self.keys)

    def holder(self, shard: int) -> int:
        """Number of the peer with this shard of the first extent."""
        key, write_id = self.keys[0].tobytes(), int(self.ticket.write_ids[0])
        for number, peer in enumerate(self.cluster.peers):
            if shard in peer.records.get((key, write_id), {}):
                return number
        raise AssertionError(f"nobody has shard {shard}")

    def rule(self, shard: int, rule: object) -> None:
        self.cluster.peers[self.holder(shard)].item_rule = rule


@pytest.fixture
def stored() -> Iterator[Stored]:
    with PeerCluster() as cluster:
        made = Stored(cluster)
        with made.client:
            yield made


async def flip(item: Item) -> bytes:
    body = bytearray(item.body)
    body[-1] ^= 1
    return bytes(body)


async def lie(item: Item) -> bytes:
    return with_lie(item)


async def wrong_digests(item: Item) -> bytes:
    right = wire.decode_item(item.body, item.block_count)
    size = len(right.pieces) // item.block_count
    pieces = [right.pieces[i * size : (i + 1) * size] for i in range(item.block_count)]
    return item_body(list(right.sums), [bytes(16)] * item.block_count, pieces)


async def not_found(_: Item) -> Status:
    return Status.NOT_FOUND


async def busy(_: Item) -> Status:
    return Status.BUSY


async def cut(item: Item) -> Raw:
    frame = wire.encode_header(Verb.READ, len(item.body), request_id=1, kind=wire.Kind.ITEM)
    return Raw(frame + item.body[: len(item.body) // 2])


async def hang_up(_: Item) -> Raw:
    return Raw(b"")


async def foreign(_: Item) -> Raw:
    return Raw(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))


async def huge(_: Item) -> Raw:
    return Raw(wire.encode_header(Verb.READ, 0xFFFFFFFF, request_id=1, kind=wire.Kind.ITEM) + bytes(1 << 16))


async def short_body(item: Item) -> bytes:
    return item.body[:-1]


BAD: list[ItemRule] = [flip, lie, wrong_digests, not_found, busy, cut, hang_up, foreign, huge, short_body]


@pytest.mark.parametrize("hedge", ["lazy", "eager"])
@pytest.mark.parametrize("shards", [(0,), (9,), (3, 7), (0, 10), (5, 11)], ids=str)
@pytest.mark.parametrize("rule", BAD, ids=lambda rule: rule.__name__)
def test_up_to_two_bad_shards_are_read_around(stored: Stored, rule: object, shards: tuple[int, ...], hedge: str) -> None:
    for shard in shards:
        stored.rule(shard, rule)
    result, place = load(stored.client, stored.ticket, hedge=hedge, deadline_seconds=paced(5.0))
    if rule is lie and len(shards) == 2 and hedge == "eager":
        assert result.blocks in (0, 20)  # an honest shard may have come too late to tell two liars: a miss is allowed
    else:
        assert (result.blocks, result.outcome) == (20, LoadOutcome.COMPLETE)
    assert np.array_equal(place[: result.blocks], stored.data[: result.blocks])
    if rule in (flip, lie, wrong_digests) and hedge == "lazy":
        assert result.bad_shards >= 1


@pytest.mark.parametrize("rule", BAD, ids=lambda rule: rule.__name__)
def test_three_bad_shards_are_a_shorter_hit_and_never_wrong_bytes(rule: object) -> None:
    with PeerCluster() as cluster:
        made = Stored(cluster, blocks=100)  # two extents on lists of their own
        with made.client:
            second = made.keys[64].tobytes()
            for peer in cluster.peers:

                async def only_second(item: Item) -> object:
                    return await rule(item) if item.extent_key == second and item.shard in (1, 4, 8) else None

                peer.item_rule = only_second
            result, place = load(made.client, made.ticket, deadline_seconds=paced(5.0))
            assert result.blocks in ((64, 0) if rule in (cut, hang_up, foreign, huge, short_body) else (64,))
            assert result.outcome is not LoadOutcome.COMPLETE
            assert np.array_equal(place[: result.blocks], made.data[: result.blocks])


def hold(gate: Gate) -> object:
    async def rule(_: Item) -> None:
        await gate.wait()

    return rule


@pytest.mark.parametrize("hedge", ["lazy", "eager"])
@pytest.mark.parametrize("shards", [(0,), (2, 6), (4, 10), (4, 11)], ids=str)
def test_late_shards_are_not_waited_for_and_never_land_late(stored: Stored, shards: tuple[int, ...], hedge: str) -> None:
    gate = stored.cluster.gate()
    for shard in shards:
        stored.rule(shard, hold(gate))
    result, place = load(stored.client, stored.ticket, hedge=hedge, deadline_seconds=paced(5.0))
    assert result.blocks == 20 and result.seconds < paced(2.0) and np.array_equal(place, stored.data)
    place[:] = 0x5A  # the caller's again
    gate.open()
    for shard in shards:
        stored.rule(shard, None)
    again, other = load(stored.client, ticket_of_all(stored.client, stored.keys), deadline_seconds=paced(5.0))
    assert again.blocks == 20 and np.array_equal(other, stored.data)
    assert (place == 0x5A).all(), "a late reply wrote into memory that was handed on"


def test_a_shard_that_stops_in_its_middle_is_decoded_over_and_its_rest_goes_nowhere() -> None:
    with PeerCluster() as cluster:
        made = Stored(cluster, V41, 64)
        with made.client:
            gate = cluster.gate()
            halves: list[Item] = []

            async def half(item: Item) -> Raw | None:
                if item.plane != 1:
                    return None
                halves.append(item)
                frame = item.frame(item.body)
                await item.pipe.send(frame[: len(frame) // 2])
                await gate.wait()
                return Raw(frame[len(frame) // 2 :])

            peer = cluster.peers[made.holder(3)]
            peer.item_rule = half
            result, place = load(made.client, made.ticket, deadline_seconds=paced(5.0))
            assert halves and result.blocks == 64 and result.decoded >= 1 and np.array_equal(place, made.data)
            place[:] = 0x5A
            gate.open()
            peer.item_rule = None
            again, other = load(made.client, whole_ticket(made.client, made.keys), deadline_seconds=paced(5.0))
            assert again.blocks == 64 and np.array_equal(other, made.data) and (place == 0x5A).all()


def test_a_load_that_nobody_answers_ends_at_its_deadline(stored: Stored) -> None:
    gate = stored.cluster.gate()
    for peer in stored.cluster.peers:
        peer.item_rule = hold(gate)
    result, place = load(stored.client, stored.ticket, deadline_seconds=0.3)
    assert (result.blocks, result.outcome) == (0, LoadOutcome.TIMEOUT) and 0.25 < result.seconds < paced(1.0)
    place[:] = 0x5A
    gate.open()
    for peer in stored.cluster.peers:
        peer.item_rule = None
    again, other = load(stored.client, ticket_of_all(stored.client, stored.keys), deadline_seconds=paced(5.0))
    assert again.blocks == 20 and np.array_equal(other, stored.data) and (place == 0x5A).all()


def test_a_cancelled_load_returns_at_once_and_leaves_the_memory_alone(stored: Stored) -> None:
    gate = stored.cluster.gate()
    for peer in stored.cluster.peers:
        peer.item_rule = hold(gate)
    place = np.zeros_like(stored.data)
    results = []

    def cancel_when_asked(under_way: object) -> None:
        def run() -> None:
            gate.reached.wait(paced(5))
            under_way.cancel()

        threading.Thread(target=run).start()

    results.append(stored.client.load_with(cancel_when_asked, stored.ticket, place, deadline_seconds=paced(10.0)))
    assert results[0].outcome is LoadOutcome.CANCELLED and results[0].seconds < paced(5.0)
    place[:] = 0x5A
    gate.open()
    stored.client.close()
    assert (place == 0x5A).all()


@pytest.mark.skipif(EMULATED, reason="a shard of an emulated device is late by itself, and the parity asked for")
def test_the_left_out_parity_is_asked_only_when_needed(stored: Stored) -> None:
    result, _ = load(stored.client, stored.ticket)
    assert (result.late12, result.shards_asked, result.decoded) == (0, 10, 0)
    stored.rule(0, not_found)
    stored.rule(1, not_found)
    result, place = load(stored.client, stored.ticket)
    assert (result.late12, result.shards_asked) == (1, 11) and result.decoded >= 1 and np.array_equal(place, stored.data)


def test_two_writings_are_never_mixed(stored: Stored) -> None:
    other = store(stored.client, stored.keys, salt=9)
    assert not np.array_equal(other, stored.data)
    for _ in range(8):
        result, place = load(stored.client, whole_ticket(stored.client, stored.keys))
        assert result.blocks == 20
        assert np.array_equal(place, stored.data) or np.array_equal(place, other)


def test_bytes_of_another_block_never_pass(stored: Stored) -> None:
    """A peer that answers with another extent's shard, checksums and all: the seed of every sum names its place."""
    other_keys = chain(20, SMALL)
    store(stored.client, other_keys)
    stored.client.flush()  # the twelfth shard, too
    holder = stored.cluster.peers[stored.holder(2)]
    swapped = next(r for (key, _), shards in holder.records.items() if key == other_keys[0].tobytes() for r in shards.values())

    async def misdirected(item: Item) -> bytes:
        extent = wire.ReadExtent(swapped.extent_key, swapped.write_id, swapped.shard, 0, 20)
        return holder._item(extent, item.plane, item.pipe, 0, 0).body

    holder.item_rule = misdirected
    result, place = load(stored.client, stored.ticket)
    assert result.blocks == 20 and result.bad_shards == 1 and np.array_equal(place, stored.data)
    assert np.array_equal(place, bytes_of(stored.keys, SMALL))


@pytest.mark.parametrize("held", [(4,), (4, 10), (4, 11), (10, 11)], ids=str)
@pytest.mark.parametrize("owing", [(2,), (2, 6), (2, 10), (10, 11)], ids=str)
def test_nodes_that_owe_other_answers_are_asked_when_nothing_else_helps(
    stored: Stored, owing: tuple[int, ...], held: tuple[int, ...]
) -> None:
    gate = stored.cluster.gate()
    load(stored.client, stored.ticket)
    for shard in held:
        stored.rule(shard, hold(gate))
    stored.client._core.mark_late(np.array([stored.holder(shard) for shard in owing], np.uint32))
    result, place = load(stored.client, stored.ticket, deadline_seconds=paced(5.0))
    assert result.blocks == 20 and result.seconds < paced(2.0) and np.array_equal(place, stored.data)
    gate.open()
