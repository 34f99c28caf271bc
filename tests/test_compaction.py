"""Runs of short extents are stored again as one: same bytes, one extent, within the budget; and what is not such a run stays."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from client_tools import SMALL, bytes_of, chain, store
from hypothesis import given
from hypothesis import strategies as st
from server_tools import until

from kvstore.client import Accept, Client, ClientConfig, Fidelity, Ticket
from kvstore.client.compaction import QUEUE_MAX, RUN_EXTENTS_MIN, Compaction, short_runs
from kvstore.client.ticket import EXTENT
from kvstore.keys import Keys
from kvstore.server.local import LocalCluster

WAIT_SECONDS = 20.0
PLENTY = ClientConfig(compact_bytes_per_second=1e9, promise_reuse_seconds=0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("compaction"), 4, k=2, m=2, capacity_bytes=256 << 20) as running:
        yield running


def ticket_of(counts: list[int], kinds: list[tuple[int, int]] | None = None) -> Ticket:
    table = np.zeros(len(counts), EXTENT)
    table["count"] = counts
    if kinds:
        table["fidelity"], table["depth"] = zip(*kinds, strict=True)
    keys = np.random.default_rng(1).integers(0, 256, (sum(counts), 32), np.uint8)
    return Ticket(keys, table, 128, sum(counts), bytes(16), bytes(16), 0, 1, 0, bytes(32))


def turns(cluster: LocalCluster, count: int, blocks: int, fidelity: Fidelity = Fidelity.EXACT, keys: Keys | None = None) -> Keys:
    """A chain that was stored in so many turns of so many blocks."""
    keys = chain(count * blocks, SMALL) if keys is None else keys
    data = bytes_of(keys, SMALL)
    with Client(cluster.map, layout=SMALL) as client:
        for turn in range(count):
            end = (turn + 1) * blocks
            stored = client.store(keys[:end], data[end - blocks : end], first_block=end - blocks, fidelity=fidelity).result(WAIT_SECONDS)
            assert stored.blocks == blocks
    return keys


def extents_of(cluster: LocalCluster, keys: Keys, **accept: Any) -> int:
    """How many extents a reader who knows nothing yet finds the whole chain in; its bytes are checked."""
    with Client(cluster.map, layout=SMALL) as reader:
        ticket = reader.lookup(keys, **accept)
        assert ticket.hit_blocks == len(keys)
        place = np.empty((len(keys), SMALL.block_bytes), np.uint8)
        assert reader.load(ticket, place).blocks == len(keys)
        assert np.array_equal(place, bytes_of(keys, SMALL))
        return len(ticket.extents)


def test_a_chain_of_short_turns_is_one_extent_after_a_load(cluster: LocalCluster) -> None:
    keys = turns(cluster, 12, 2)
    assert extents_of(cluster, keys) == 12
    with Client(cluster.map, layout=SMALL, config=PLENTY) as client:
        place = np.empty((len(keys), SMALL.block_bytes), np.uint8)
        assert client.load(client.lookup(keys), place).blocks == len(keys)
        place[:] = 0xEE  # the caller's memory is the caller's again at once
        until(lambda: client.stats()["extents_compacted"], "it was stored again")
        stats = client.stats()
        assert (stats["extents_compacted"], stats["bytes_compacted"]) == (12, len(keys) * SMALL.block_bytes)
        assert stats["loads"] == 1, "what nobody asked for is no load"
    assert extents_of(cluster, keys) == 1


def test_a_load_by_plane_whose_planes_are_overwritten_at_once_is_stored_again_right(cluster: LocalCluster) -> None:
    keys = turns(cluster, 9, 1)
    with Client(cluster.map, layout=SMALL, config=PLENTY) as client:
        place = np.empty((len(keys), SMALL.block_bytes), np.uint8)
        for _ in client.planes(client.lookup(keys), place):
            place[:] = 0
        until(lambda: client.stats()["extents_compacted"] == 9, "it was stored again")
    assert extents_of(cluster, keys) == 1


def test_it_is_off_by_default_and_seven_are_no_run(cluster: LocalCluster) -> None:
    for count, config in ((12, ClientConfig()), (RUN_EXTENTS_MIN - 1, PLENTY)):
        keys = turns(cluster, count, 1)
        with Client(cluster.map, layout=SMALL, config=config) as client:
            assert client.load(client.lookup(keys)).blocks == len(keys)
            assert client._compaction is None or client._compaction.settle(WAIT_SECONDS)
            assert client.stats()["extents_compacted"] == 0
        assert extents_of(cluster, keys) == count


def test_the_longer_writing_has_the_fidelity_of_what_it_replaces(cluster: LocalCluster) -> None:
    keys = turns(cluster, 8, 1, Fidelity.approx(3))
    with Client(cluster.map, layout=SMALL, config=PLENTY) as client:
        assert client.lookup(keys).hit_blocks == 0
        assert client.load(client.lookup(keys, accept=Accept.ANY)).blocks == len(keys)
        until(lambda: client.stats()["extents_compacted"] == 8, "it was stored again")
        assert client.lookup(keys).hit_blocks == 0, "an approximation never becomes exact"
        assert client.lookup(keys, accept=Accept.ANY).fidelity == Fidelity.approx(3)
    assert extents_of(cluster, keys, accept=Accept.ANY) == 1


def test_the_same_run_is_stored_once_by_a_client_however_often_it_is_loaded(cluster: LocalCluster) -> None:
    keys = turns(cluster, 10, 1)
    with Client(cluster.map, layout=SMALL, config=PLENTY) as client:
        ticket = client.lookup(keys)
        for _ in range(5):
            assert client.load(ticket).blocks == len(keys)
        until(lambda: client.stats()["extents_compacted"], "it was stored again")
        assert client._compaction is not None and client._compaction.settle(WAIT_SECONDS)
        assert client.stats()["extents_compacted"] == 10 and client.stats()["stores"] == 1


def test_a_client_that_closes_leaves_what_waits_and_ends_soon(cluster: LocalCluster) -> None:
    chains = [turns(cluster, 8, 1) for _ in range(3)]
    client = Client(cluster.map, layout=SMALL, config=PLENTY)
    for keys in chains:
        assert client.load(client.lookup(keys)).blocks == len(keys)
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < WAIT_SECONDS / 2
    for keys in chains:
        assert extents_of(cluster, keys) in (1, 8)


def test_what_could_not_be_read_again_is_not_stored_and_tried_at_the_next_load(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = turns(cluster, 8, 1)
    with Client(cluster.map, layout=SMALL, config=PLENTY) as client:
        assert client._compaction is not None
        ticket = client.lookup(keys)
        with monkeypatch.context() as patched:
            patched.setattr(client.clock, "wall_time", lambda: time.time() + 3600)  # the ticket is over
            client._compaction.look(ticket)
            assert client._compaction.settle(WAIT_SECONDS)
        assert client.stats()["extents_compacted"] == 0 and client.stats()["stores"] == 0
        assert client.load(client.lookup(keys)).blocks == 8
        until(lambda: client.stats()["extents_compacted"] == 8, "it was stored again")
    assert extents_of(cluster, keys) == 1


def test_nothing_is_stored_again_from_a_ticket_of_another_owner_or_without_a_class(cluster: LocalCluster) -> None:
    keys = chain(8, SMALL)
    data = bytes_of(keys, SMALL)
    tenant = b"another tenant  "
    with (
        Client(cluster.map, layout=SMALL, owner=tenant, config=PLENTY) as theirs,
        Client(cluster.map, layout=SMALL, config=PLENTY) as ours,
    ):
        for turn in range(8):
            assert theirs.store(keys[: turn + 1], data[turn : turn + 1], first_block=turn).result(WAIT_SECONDS).blocks == 1
        assert ours.load(theirs.lookup(keys)).blocks == 8, "who has the ticket may read"
        ticket = Ticket.from_bytes(theirs.lookup(keys).to_bytes(), theirs.config.ticket_key)
        assert ticket.retention_class == "other" and theirs.load(ticket).blocks == 8
        for client in (theirs, ours):
            assert client._compaction is not None and client._compaction.settle(WAIT_SECONDS)
            assert client.stats()["extents_compacted"] == 0
        assert ours.lookup(keys).hit_blocks == 0 and len(theirs.lookup(keys).extents) == 8


def test_a_run_behind_long_extents_names_them_and_the_chain_keeps_its_starts(cluster: LocalCluster) -> None:
    largest = SMALL.blocks_per_extent_max
    keys = chain(2 * largest + 8, SMALL)
    with Client(cluster.map, layout=SMALL) as writer:
        store(writer, keys, lengths=[2 * largest, *[1] * 8])
    with Client(cluster.map, layout=SMALL, config=PLENTY) as client:
        assert client.load(client.lookup(keys)).blocks == len(keys)
        before = client._starts[keys[-1].tobytes()]
        assert before[:3] == (0, largest, 2 * largest) and len(before) == 10
        until(lambda: client.stats()["extents_compacted"] == 8, "it was stored again")
        assert client._starts[keys[-1].tobytes()] == before
    assert extents_of(cluster, keys) == 3


class _Client:
    """What Compaction asks of a client before any run is read."""

    layout = SMALL
    owner = bytes(16)


def test_the_budget_is_kept_and_at_most_so_many_runs_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compaction, "_work", lambda self: None)  # what is taken stays queued
    largest = SMALL.blocks_per_extent_max
    now = [0.0]
    owner: Any = _Client()
    tickets = (replace(ticket_of([largest]), keys=np.full((largest, 32), number, np.uint8)) for number in itertools.count())
    slow = Compaction(owner, float(SMALL.block_bytes), clock=lambda: now[0])
    assert slow._take(next(tickets), range(largest)) and not slow._take(next(tickets), range(2)), "a full extent at once, then nothing"
    now[0] = 2.0
    assert slow._take(next(tickets), range(2)) and not slow._take(next(tickets), range(1))
    slow.end()
    now[0] = 1e9
    assert not slow._take(next(tickets), range(1)), "it has ended"

    fast = Compaction(owner, 1e12, clock=lambda: now[0])
    taken = [fast._take(next(tickets), range(1)) for _ in range(QUEUE_MAX + 3)]
    assert taken == [True] * QUEUE_MAX + [False] * 3


def test_an_impossible_budget_is_refused() -> None:
    from kvstore.errors import ConfigError

    for bad in (-1.0, 1e13, float("nan")):
        with pytest.raises(ConfigError, match="compact_bytes_per_second"):
            ClientConfig(compact_bytes_per_second=bad)


@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from([(0, 0), (1, 2), (2, 0)])), max_size=60))
def test_runs_are_neighbours_short_of_one_fidelity_and_fit_into_one_extent(extents: list[tuple[int, tuple[int, int]]]) -> None:
    largest = 64
    counts, kinds = [count for count, _ in extents], [kind for _, kind in extents]
    ticket = ticket_of(counts, kinds)
    ends = [0, *itertools.accumulate(counts)]
    found = list(short_runs(ticket, largest))
    for run in found:
        first, last = ends.index(run.start), ends.index(run.stop)
        inside = range(first, last)
        assert len(inside) >= RUN_EXTENTS_MIN and len(run) <= largest
        assert all(counts[i] <= largest // RUN_EXTENTS_MIN for i in inside) and len({kinds[i] for i in inside}) == 1
    assert all(one.stop <= other.start for one, other in itertools.pairwise(found))
    # And none is missed: eight such neighbours in a row always give at least one.
    longest = max((len(list(group)) for key, group in itertools.groupby(extents, lambda e: (e[0] <= 8, e[1])) if key[0]), default=0)
    assert bool(found) == (longest >= RUN_EXTENTS_MIN)


def test_stores_of_a_longer_chain_go_on_after_it(cluster: LocalCluster) -> None:
    longer = chain(8 + 3, SMALL)
    keys = turns(cluster, 8, 1, keys=longer[:8])
    with Client(cluster.map, layout=SMALL, config=PLENTY) as client:
        assert client.load(client.lookup(keys)).blocks == 8
        until(lambda: client.stats()["extents_compacted"] == 8, "it was stored again")
        store(client, longer, first=8)
    assert extents_of(cluster, longer) == 2
