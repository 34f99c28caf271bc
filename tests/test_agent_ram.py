"""The RAM tier: what enters, what goes, that its bytes are those of the nodes, and that a load over it behaves as one without it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from client_tools import NO_REUSE, SMALL, V41, bytes_of, chain, cluster_of, store, until_whole

from kvstore.client import Client, Load, LoadOutcome, LoadResult, PlaneReady, Ticket
from kvstore.client.agent.ram import RamTier
from kvstore.client.ticket import EXTENT
from kvstore.errors import MisuseError
from kvstore.keys import Keys
from kvstore.layout import Layout
from kvstore.server.local import LocalCluster

MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with cluster_of(tmp_path_factory.mktemp("ram"), 3, k=2, m=1) as cluster:
        yield cluster


def load(client: Client, keys: Keys, data: np.ndarray, *, by_plane: bool = False, blocks: range | None = None) -> LoadResult | int:
    """Loads, checks every byte, and spoils the memory afterwards, as an engine that uses it again would."""
    ticket = client.lookup(keys)
    wanted = blocks or range(ticket.hit_blocks)
    place = np.full((len(wanted), client.layout.block_bytes), 0xEE, np.uint8)
    if by_plane:
        planes = client.layout.planes(client.map.k)
        seen = []
        for ready in client.planes(ticket, place, blocks=blocks):
            columns = slice(planes[ready.plane].offset_bytes, planes[ready.plane].offset_bytes + planes[ready.plane].bytes)
            assert np.array_equal(place[: ready.blocks, columns], data[wanted.start :][: ready.blocks, columns])
            place[: ready.blocks, columns] = 0x11  # already: what was kept must not see it
            seen.append(ready)
        assert [ready.plane for ready in seen] == list(range(len(planes)))
        return seen[-1].blocks
    result = client.load(ticket, place, blocks=blocks)
    assert np.array_equal(place[: result.blocks], data[wanted.start :][: result.blocks])
    place[:] = 0x11
    return result


@pytest.mark.parametrize("by_plane", [False, True])
def test_the_third_load_asks_no_node(cluster: LocalCluster, by_plane: bool) -> None:
    with Client(cluster.map, layout=V41, ram=(tier := RamTier(64 * MIB))) as client:
        keys = chain(20, V41)
        data = store(client, keys, lengths=[7, 13])
        for turn in range(4):
            before = client.stats()["shards_asked"]
            load(client, keys, data, by_plane=by_plane)
            asked = client.stats()["shards_asked"] > before
            assert asked == (turn < 2), "loaded once: a name; twice: held"
            tier.check_integrity()
        stats = tier.stats()
        assert (stats.hit_tokens, stats.asked_tokens) == (2 * 20 * 128, 4 * 20 * 128)
        assert (stats.extents, stats.used_bytes) == (2, 20 * V41.block_bytes)
        assert client.stats()["delivered_tokens"] == stats.asked_tokens, "the same, wherever it came from"
        assert client.stats()["load_bytes"] == 2 * 20 * V41.block_bytes, "bytes of nodes only"


@pytest.mark.parametrize("by_plane", [False, True])
def test_the_head_comes_from_ram_and_the_rest_from_nodes(cluster: LocalCluster, by_plane: bool) -> None:
    with Client(cluster.map, layout=V41, ram=(tier := RamTier(64 * MIB))) as client:
        keys = chain(24, V41)
        data = store(client, keys, lengths=[8, 8, 8])
        for _ in range(2):
            load(client, keys[:12], data, by_plane=by_plane)  # ends in the middle of the second extent
        load(client, keys, data, by_plane=by_plane)
        assert tier.stats().hit_tokens == 12 * 128
        load(client, keys, data, by_plane=by_plane)
        assert tier.stats().hit_tokens == (12 + 16) * 128, "the second extent is held whole now, the third for its second touch"
        load(client, keys, data, by_plane=by_plane, blocks=range(3, 23))
        assert tier.stats().hit_tokens == (12 + 16 + 20) * 128, "any range of what is held"
        tier.check_integrity()


def test_what_nodes_lost_is_still_in_ram_and_the_rest_ends_the_load(tmp_path: Path) -> None:
    with cluster_of(tmp_path, 3, k=2, m=1) as cluster, Client(cluster.map, layout=V41, config=NO_REUSE, ram=RamTier(64 * MIB)) as client:
        keys = chain(16, V41)
        data = store(client, keys, lengths=[8, 8])
        until_whole(client, keys)
        for _ in range(2):
            load(client, keys[:8], data)
        ticket = client.lookup(keys)
        for node in (0, 1):
            cluster.kill(node)
        place = np.zeros((16, V41.block_bytes), np.uint8)
        result = client.load(ticket, place)
        assert result.blocks == 8 and result.outcome is LoadOutcome.UNREACHABLE
        assert result.bytes == 8 * V41.block_bytes and np.array_equal(place[:8], data[:8])
        place[:] = 0
        assert list(client.planes(ticket, place)) == [PlaneReady(plane, 8) for plane in range(len(V41.planes(2)))]
        assert np.array_equal(place[:8], data[:8])
        assert client.load(ticket, place, blocks=range(8)).outcome is LoadOutcome.COMPLETE
        assert client.ram is not None
        client.ram.check_integrity()


def test_a_load_let_go_of_keeps_nothing(cluster: LocalCluster) -> None:
    with Client(cluster.map, layout=V41, ram=(tier := RamTier(64 * MIB))) as client:
        keys = chain(8, V41)
        data = store(client, keys)
        load(client, keys, data)
        place = np.empty((8, V41.block_bytes), np.uint8)
        for _ in client.planes(client.lookup(keys), place):
            break  # the iterator is closed after one plane
        assert tier.stats().extents == 0
        tier.check_integrity()
        load(client, keys, data)
        begun: list[Load] = []
        place[:] = 0
        coming = client.planes_with(begun.append, client.lookup(keys), place)
        next(coming)
        assert begun[0].finish().blocks == 8 and np.array_equal(place, data), "who began it may end it in mid-way"
        coming.close()
        assert begun[0].finish().blocks == 8
        tier.check_integrity()
        expired = replace(client.lookup(keys), expires_unix_ms=0)
        assert client.load(expired, place).outcome is LoadOutcome.EXPIRED
        with pytest.raises(MisuseError, match="E566"):
            client.load(replace(client.lookup(keys), layout_tag=1), place)


# --- the books alone, over tickets made by hand ---


def ticket_of(extents: list[tuple[int, int, int]], layout: Layout = SMALL) -> Ticket:
    """Extents (number, first block, blocks); an extent's bytes follow from its number."""
    table = np.zeros(len(extents), EXTENT)
    for row, (number, first, count) in zip(table, extents, strict=True):
        row["extent_key"] = np.frombuffer(number.to_bytes(32, "little"), np.uint8)
        row["write_id"], row["first_block"], row["count"] = number, first, count
    blocks = sum(count for _, _, count in extents)
    tag = int.from_bytes(layout.digest()[:8], "little")
    return Ticket(np.zeros((blocks, 32), np.uint8), table, 128, blocks, bytes(16), bytes(16), tag, 1, 1 << 60, b"k" * 32)


def truth(extents: list[tuple[int, int, int]], layout: Layout = SMALL) -> np.ndarray:
    """The bytes of such a ticket: block b of extent e."""
    names = [(number << 16) + block for number, first, count in extents for block in range(first, first + count)]
    keys = np.zeros((len(names), 32), np.uint8)
    keys[:, :8] = np.array(names, "<u8").view(np.uint8).reshape(-1, 8)
    return bytes_of(keys, layout)


def play(tier: RamTier, extents: list[tuple[int, int, int]], *, whole: int | None = None) -> int:
    """One load over the tier, the nodes' part written by hand; how many leading blocks came from RAM."""
    expected = truth(extents)
    rows = np.full_like(expected, 0xEE)
    planes = SMALL.planes(2)
    with tier.begin(ticket_of(extents), range(len(rows)), rows, planes) as load:
        whole = len(rows) if whole is None else max(whole, load.blocks)
        rows[load.blocks : whole] = expected[load.blocks : whole]
        for plane in range(len(planes)):
            load.copy(plane)
            load.keep(whole, plane)
        load.whole = whole
        assert np.array_equal(rows[:whole], expected[:whole])
        rows[:] = 0x11
    return load.blocks


def test_a_long_cold_prompt_washes_nothing_out() -> None:
    tier = RamTier(MIB)  # 249 blocks
    hot = [(1, 0, 50), (2, 0, 50)]
    assert [play(tier, hot) for _ in range(3)] == [0, 0, 100]
    play(tier, [(number, 0, 64) for number in range(10, 40)])
    assert play(tier, hot) == 100
    tier.check_integrity()


def test_of_a_prompt_longer_than_the_tier_the_head_stays() -> None:
    tier = RamTier(MIB)
    long = [(number, 0, 60) for number in range(10)]
    assert [play(tier, long) for _ in range(4)] == [0, 0, 240, 240]
    assert tier.stats().evicted_extents == 0, "it pushed out nothing of its own"
    other = [(20, 0, 100)]
    assert [play(tier, other) for _ in range(3)] == [0, 0, 100]
    assert play(tier, long) == 120, "two of the tail went"
    tier.check_integrity()


def test_what_went_comes_back_at_its_next_load() -> None:
    tier = RamTier(MIB)
    one, two = [(1, 0, 200)], [(2, 0, 200)]
    assert [play(tier, p) for p in (one, one, one, two, two, two)] == [0, 0, 200, 0, 0, 200]
    assert [play(tier, p) for p in (one, one)] == [0, 200]


def test_an_entry_that_goes_while_it_is_read_stays_readable() -> None:
    tier = RamTier(MIB)
    extents = [(1, 0, 100)]
    play(tier, extents), play(tier, extents)
    rows = np.zeros((100, SMALL.block_bytes), np.uint8)
    with tier.begin(ticket_of(extents), range(100), rows, SMALL.planes(2)) as load:
        tier.clear()
        assert tier.stats().used_bytes == 0
        load.copy()
        load.whole = load.blocks
    assert np.array_equal(rows, truth(extents))
    tier.check_integrity()


def test_what_was_not_whole_does_not_enter() -> None:
    tier = RamTier(MIB)
    extents = [(1, 0, 10), (2, 0, 10)]
    play(tier, extents)
    play(tier, extents, whole=15)
    assert play(tier, extents, whole=15) == 10
    assert tier.stats().extents == 1
    tier.check_integrity()


def test_a_tier_too_small_for_anything_is_refused() -> None:
    with pytest.raises(MisuseError, match="E546"):
        RamTier(1000)


@pytest.mark.parametrize("seed", range(4))
def test_random_loads_from_many_threads_never_see_other_bytes(seed: int) -> None:
    """Ranges of a few extents, tiers of a few extents, loads that fall short. Not covered: clients, planes that come late."""
    tier = RamTier(MIB)
    faults: list[BaseException] = []

    def run(number: int) -> None:
        dice = random.Random(1000 * seed + number)
        try:
            for _ in range(60):
                picked = dice.sample(range(12), dice.randint(1, 5))
                extents = [(extent, dice.choice((0, 0, 0, 5)), dice.randint(1, 40)) for extent in sorted(picked)]
                play(tier, extents, whole=dice.choice((None, None, 0, 20)))
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults
    tier.check_integrity()
    assert tier.stats().hit_tokens > 0 and tier.stats().evicted_extents > 0
