"""What is stored comes back bit for bit: any layout, any destination, any split into extents, any part of a prompt."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from client_tools import SMALL, V41, WAIT_SECONDS, Cluster, bytes_of, chain, cluster_of, load, store

from kvstore.client import Client, LoadOutcome, StoreOutcome
from kvstore.layout import PRESETS, Layout, Section


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of(tmp_path_factory.mktemp("cluster"), capacity_bytes=1 << 30) as running:
        yield running


ODD = [
    Layout.single(1),
    Layout.single(31),
    Layout.single(321),
    Layout.single(4_097),
    Layout((Section("a", 65_537), Section("b", 1))),
    Layout(tuple(Section(str(i), 4_099 + i) for i in range(7))),
    SMALL,
    V41,
]


@pytest.mark.parametrize("layout", ODD, ids=lambda layout: f"{layout.block_bytes}B-{len(layout.planes())}planes")
@pytest.mark.parametrize("blocks", [1, 2, 63, 64, 65, 130])
def test_any_layout_and_length_comes_back(cluster: Cluster, layout: Layout, blocks: int) -> None:
    keys = chain(blocks, layout)
    with Client(cluster.map, layout=layout) as client:
        assert client.lookup(keys).hit_blocks == 0
        data = store(client, keys)
        for hedge in ("lazy", "eager"):
            ticket = client.lookup(keys)
            assert ticket.hit_blocks == blocks and ticket.hit_tokens == 128 * blocks
            result, place = load(client, ticket, hedge=hedge)
            assert (result.outcome, result.blocks, result.bytes) == (LoadOutcome.COMPLETE, blocks, data.nbytes)
            assert result.bad_shards == 0 and np.array_equal(place, data)


def test_large_blocks_come_back(cluster: Cluster) -> None:
    layout = PRESETS["llama-gqa-8b"]  # 16 MiB a block, 32 padded planes
    keys = chain(3, layout)
    with Client(cluster.map, layout=layout) as client:
        data = store(client, keys)
        result, place = load(client, client.lookup(keys))
        assert result.blocks == 3 and np.array_equal(place, data)


def test_short_extents_of_many_turns_are_one_prompt(cluster: Cluster) -> None:
    lengths = [3, 1, 64, 2, 17, 1, 1, 40, 71]
    keys = chain(sum(lengths), SMALL)
    with Client(cluster.map, layout=SMALL) as client:
        data = store(client, keys, lengths=lengths)
        ticket = client.lookup(keys)
        assert ticket.hit_blocks == sum(lengths) and len(ticket.extents) == len(lengths) + 1  # 71 = 64 + 7
        _, place = load(client, ticket)
        assert np.array_equal(place, data)


def test_a_part_of_a_prompt_lands_at_the_destinations_start(cluster: Cluster) -> None:
    keys = chain(150, SMALL)
    with Client(cluster.map, layout=SMALL) as client:
        data = store(client, keys, lengths=[100, 50])
        ticket = client.lookup(keys)
        for part in (range(1), range(63, 65), range(99, 101), range(17, 149), range(149, 150)):
            place = np.zeros((len(part), SMALL.block_bytes), np.uint8)
            assert client.load(ticket, place, blocks=part).blocks == len(part)
            assert np.array_equal(place, data[part.start : part.stop])
        assert client.load(ticket, np.zeros((0, SMALL.block_bytes), np.uint8), blocks=range(5, 5)).blocks == 0


def test_a_prompt_that_hits_as_a_whole_has_nothing_left_to_store(cluster: Cluster) -> None:
    keys = chain(70, SMALL)
    with Client(cluster.map, layout=SMALL) as client:
        data = store(client, keys)
        ticket = client.lookup(keys)
        done = client.store(keys, data[ticket.hit_blocks :], first_block=ticket.hit_blocks).result(0)
        assert (done.outcome, done.blocks, done.acks) == (StoreOutcome.STORED, 0, ())
        assert client.store(keys[:0], data[:0], first_block=0).result(0).blocks == 0


def test_planes_come_in_order_and_whole(cluster: Cluster) -> None:
    keys = chain(200, V41)
    with Client(cluster.map, layout=V41) as client:
        data = store(client, keys)
        place = np.zeros_like(data)
        seen = []
        for ready in client.planes(client.lookup(keys), place):
            plane = V41.planes()[ready.plane]
            part = slice(plane.offset_bytes, plane.offset_bytes + plane.bytes)
            assert ready.blocks == 200 and np.array_equal(place[:, part], data[:, part])
            seen.append(ready.plane)
        assert seen == [0, 1, 2, 3]


def test_an_iterator_of_planes_that_is_left_early_ends_its_load(cluster: Cluster) -> None:
    keys = chain(100, V41)
    with Client(cluster.map, layout=V41) as client:
        data = store(client, keys)
        place = np.zeros_like(data)
        planes = client.planes(client.lookup(keys), place)
        next(planes)
        planes.close()  # a generator
        place[:] = 7
        result, again = load(client, client.lookup(keys))
        assert result.blocks == 100 and np.array_equal(again, data)
        assert (place == 7).all(), "nothing is written once the iterator is closed"


def test_any_writable_memory_is_a_destination(cluster: Cluster) -> None:
    torch = pytest.importorskip("torch")
    keys = chain(20, SMALL)
    with Client(cluster.map, layout=SMALL) as client:
        data = store(client, keys)
        ticket = client.lookup(keys)
        wide = np.zeros((20, SMALL.block_bytes + 100), np.uint8)
        halves = np.zeros((20, SMALL.block_bytes // 2), np.uint16)
        cube = np.zeros((20, 2, SMALL.block_bytes // 2), np.uint8)
        flat = bytearray(20 * SMALL.block_bytes)
        tensor = torch.zeros((25, SMALL.block_bytes // 2), dtype=torch.bfloat16)
        for place in (wide[:, 50:-50], halves, cube, flat, memoryview(bytearray(20 * SMALL.block_bytes)), tensor):
            assert client.load(ticket, place).blocks == 20
            raw = place.view(torch.uint8).numpy()[:20] if place is tensor else np.asarray(place).reshape(20, -1).view(np.uint8)
            assert np.array_equal(raw, data)
        assert not wide[:, :50].any() and not wide[:, -50:].any() and not tensor[20:].any()


def test_strided_memory_is_stored_from_where_it_lies(cluster: Cluster) -> None:
    keys = chain(70, V41)
    with Client(cluster.map, layout=V41) as client:
        wide = np.zeros((70, V41.block_bytes + 64), np.uint8)
        wide[:, 32:-32] = bytes_of(keys, V41)
        assert client.store(keys, wide[:, 32:-32], first_block=0).result(WAIT_SECONDS).outcome is StoreOutcome.STORED
        _, place = load(client, client.lookup(keys))
        assert np.array_equal(place, wide[:, 32:-32])


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_fewer_nodes_than_shards_hold_several_each(tmp_path_factory: pytest.TempPathFactory, nodes: int) -> None:
    with cluster_of(tmp_path_factory.mktemp("few"), nodes) as few, Client(few.map, layout=V41) as client:
        keys = chain(100, V41)
        assert client.lookup(keys).hit_blocks == 0
        data = store(client, keys)
        for hedge in ("lazy", "eager"):
            result, place = load(client, client.lookup(keys), hedge=hedge)
            assert result.blocks == 100 and np.array_equal(place, data)
