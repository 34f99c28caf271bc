"""Whom a lookup asks: in every epoch a node of each key's list, a common one where there is one, and few nodes in all."""

from __future__ import annotations

import time
from collections import Counter, defaultdict

import numpy as np
import numpy.typing as npt
import pytest
from client_tools import NO_REUSE, SMALL, WAIT_SECONDS, chain
from faultpeer import PeerCluster

from kvstore.client import Client
from kvstore.client.native import DOWN, HEALTHY
from kvstore.client.planner import KEYS_PER_NODE, Planner
from kvstore.clustermap import ClusterMap, Node
from kvstore.kernels._native import Asking
from kvstore.kernels.asking_reference import candidates
from kvstore.placement import Placement, lists_by_epoch, nodes_of_writings
from kvstore.wire import Verb

SEEDS = range(40)
TRIES = 8  # of what a late answer disturbs


def asked_of(indices: npt.NDArray[np.int32], nodes: npt.NDArray[np.int32]) -> dict[int, list[int]]:
    """By key, in the order in which they were chosen."""
    found: dict[int, list[int]] = defaultdict(list)
    for index, node in zip(indices.tolist(), nodes.tolist(), strict=True):
        found[index].append(node)
    return found


def drawn(rng: np.random.Generator) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Lists (epochs, keys, shards) over few or many nodes, epochs alike or apart, a node twice where there are few; and health."""
    epochs, keys, shards = (int(rng.integers(1, most)) for most in (9, 60, 14))
    nodes = int(rng.choice([1, 3, 12, 14, 40, 3000]))
    draw = [[rng.choice(nodes, shards, replace=nodes < shards) for _ in range(keys)] for _ in range(epochs)]
    lists = np.array(draw, np.int32)
    alike = rng.random((epochs, keys)) < rng.choice([0, 0.5, 1])
    lists[alike] = np.broadcast_to(lists[:1], lists.shape)[alike]
    health = rng.choice(4, nodes, p=rng.choice([[1, 0, 0, 0], [0.7, 0.1, 0.1, 0.1], [0, 0, 0.5, 0.5]])).astype(np.uint8)
    return lists, health


@pytest.mark.parametrize("seed", SEEDS)
def test_each_key_is_asked_as_the_plain_rule_says(seed: int) -> None:
    """Every node that is chosen for a key is one that the rule allows next, until a node of each list is asked."""
    lists, health = drawn(np.random.default_rng(seed))
    found = asked_of(*Asking(lists, health, seed).first())
    assert set(found) == set(range(lists.shape[1]))
    for key, nodes in found.items():
        missing = [set(one) for one in lists[:, key].tolist()]
        for node in nodes:
            assert node in candidates(missing, health.tolist()), (key, node)
            missing = [one for one in missing if node not in one]
        assert not missing, "each list has a node that is asked"


@pytest.mark.parametrize("seed", SEEDS)
def test_elsewhere_is_so_many_new_nodes_of_each_list_that_are_up(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    lists, health = drawn(rng)
    asking = Asking(lists, health, seed)
    before = asked_of(*asking.first())
    for times in (1, 2):
        some = np.flatnonzero(rng.random(lists.shape[1]) < 0.5).astype(np.int32)
        again = asked_of(*asking.elsewhere(some, times))
        assert set(again) <= set(some.tolist())
        for key in some.tolist():
            new = again[key]
            assert not set(new) & set(before[key]) and len(set(new)) == len(new), "nobody is asked twice"
            assert all(health[node] != DOWN for node in new)
            left = [{node for node in one if node not in before[key] and health[node] != DOWN} for one in lists[:, key].tolist()]
            for one in left:
                assert len(one & set(new)) >= min(times, len(one)), "each list is asked again"
            assert len(new) <= times * lists.shape[0]
            for node in new[:1]:
                assert any(node in one and health[node] == min(health[other] for other in one) for one in left)
        for key, new in again.items():
            before[key] += new


def placements(epochs: int, nodes: int = 12, more: int = 0) -> dict[int, Placement]:
    """Each epoch with `more` members than the one before."""

    def listed(first: int, count: int) -> list[Node]:
        return [Node(f"node-{i:04}", f"host-{i:04}", f"127.0.0.1:{10000 + i}") for i in range(first, first + count)]

    cluster_map = ClusterMap.local(listed(0, nodes))
    for _ in range(1, epochs):
        new = listed(len(cluster_map.nodes), more)
        cluster_map = cluster_map.with_epoch(new, [node.id for node in (*cluster_map.nodes, *new)])
    return {number: Placement(cluster_map, number) for number in cluster_map.epochs}


@pytest.mark.parametrize("epochs", [1, 2, 8])
def test_many_keys_are_spread_over_few_nodes_others_each_time(epochs: int) -> None:
    """With the same nodes in all epochs as many are asked as with one epoch, each about no more than its share."""
    lists = placements(epochs)
    used = set()
    for number in range(20):
        keys = chain(600, SMALL, seed=number)
        indices, nodes = Planner(lists, keys, np.zeros(12, np.uint8)).first()
        assert len(indices) == 600, "one node speaks for all epochs"
        held = Counter(nodes.tolist())
        assert len(held) == 3 and max(held.values()) <= KEYS_PER_NODE
        used |= set(held)
    assert len(used) > 6, "not the same nodes each time"


@pytest.mark.parametrize(("epochs", "more"), [(1, 0), (3, 0), (4, 2)])
def test_tables_read_where_they_lie_are_the_lists_of_the_keys(epochs: int, more: int) -> None:
    lists, keys, seed = placements(epochs, more=more), chain(300, SMALL), 7
    health = np.zeros(12 + more * (epochs - 1), np.uint8)
    of_tables = Asking([lists[epoch].table() for epoch in sorted(lists, reverse=True)], keys, health, seed)
    of_lists = Asking(lists_by_epoch(lists, keys), health, seed)
    for one, other in zip(of_tables.first(), of_lists.first(), strict=True):
        assert np.array_equal(one, other)
    rng = np.random.default_rng(seed)
    some, written = rng.integers(0, 300, 50).astype(np.uint32), rng.choice(list(lists), 50).astype(np.uint64)
    found = Planner(lists, keys, health).nodes_of(some, written.tolist())
    assert np.array_equal(found, nodes_of_writings(lists, keys[some], written))


def test_keys_beyond_what_all_nodes_together_take_at_once_are_spread_evenly() -> None:
    held = Counter(Planner(placements(2), chain(8000, SMALL), np.zeros(12, np.uint8)).first()[1].tolist())
    assert len(held) == 12 and max(held.values()) < 4 * KEYS_PER_NODE


def test_what_is_late_is_asked_last_from_then_on() -> None:
    planner = Planner(placements(2), chain(100, SMALL), np.full(12, HEALTHY, np.uint8))
    first = set(planner.first()[1].tolist())
    late = np.array([node for node in range(12) if node not in first][:5], np.uint32)
    planner.avoid(late)
    again = planner.elsewhere(np.arange(100, dtype=np.int32), 2)[1]
    assert len(again) == 200 and not set(again.tolist()) & set(late.tolist())


@pytest.mark.parametrize("more", [0, 4])
def test_eight_epochs_cost_no_more_than_a_few_times_one(more: int) -> None:
    """Of the best of many tries: what a loop over keys in Python costs (a hundred times) is far beyond, a busy machine is not."""
    keys = chain(600, SMALL)

    def seconds(epochs: int) -> float:
        lists = placements(epochs, more=more)
        health = np.zeros(12 + more * epochs, np.uint8)
        took = []
        for _ in range(30):
            began = time.perf_counter()
            Planner(lists, keys, health).first()
            took.append(time.perf_counter() - began)
        return min(took)

    assert seconds(8) < 10 * max(seconds(1), 100e-6)


def asked_by_a_lookup(epochs: int) -> tuple[dict[Verb, int], int]:
    """Messages of a lookup of 200 absent keys by a map of so many epochs of the same nodes, and keys in them."""
    with PeerCluster() as cluster:
        cluster_map = cluster.map
        for _ in range(1, epochs):
            cluster_map = cluster_map.with_epoch([], [node.id for node in cluster_map.nodes])
        with Client(cluster_map, layout=SMALL, config=NO_REUSE) as client:
            assert client.lookup(chain(200, SMALL)).hit_blocks == 0
            assert client.accounts.flush(WAIT_SECONDS)
        asked = {verb: sum(peer.asked[verb] for peer in cluster.peers) for verb in (Verb.DISCOVER, Verb.WHY)}
        return asked, sum(len(peer.discovered) for peer in cluster.peers)


@pytest.mark.parametrize("epochs", [1, 4])
def test_a_lookup_asks_as_few_nodes_with_four_epochs_of_the_same_nodes_as_with_one(epochs: int) -> None:
    """At discovery, in doubt (the first key's "no" is checked with two others), and about the reasons of its misses."""
    for _ in range(TRIES):
        asked, keys_asked = asked_by_a_lookup(epochs)
        assert asked[Verb.DISCOVER] >= 3
        if asked[Verb.DISCOVER] == 3:  # else a peer was late, and others were asked in its place
            break
    assert (asked, keys_asked) == ({Verb.DISCOVER: 3, Verb.WHY: 2}, 202)


def test_arrays_that_do_not_fit_are_refused() -> None:
    lists = np.zeros((1, 4, 12), np.int32)
    with pytest.raises(ValueError, match="lists"):
        Asking(lists, np.zeros(0, np.uint8), 0)
    with pytest.raises(ValueError, match="lists"):
        Asking(np.zeros((0, 4, 12), np.int32), np.zeros(1, np.uint8), 0)
    for node in (-1, 1):
        with pytest.raises(ValueError, match="lists"):
            Asking(lists + np.int32(node), np.zeros(1, np.uint8), 0)
    asking = Asking(lists, np.zeros(1, np.uint8), 0)
    asking.first()
    with pytest.raises(ValueError, match="indices"):
        asking.elsewhere(np.array([4], np.int32), 1)
    with pytest.raises(ValueError, match="late"):
        asking.avoid(np.array([1], np.uint32))
    keys, table, health = np.zeros((4, 32), np.uint8), np.zeros((8, 12), np.int32), np.zeros(1, np.uint8)
    for tables in ([], [table[:6]], [table, np.zeros((8, 11), np.int32)], [table + np.int32(1)]):
        with pytest.raises(ValueError, match=r"lists|tables"):
            Asking(tables, keys, health, 0)
    by_tables = Asking([table, table[:1]], keys, health, 0)
    with pytest.raises(ValueError, match="keys"):
        by_tables.lists_of(np.array([4], np.uint32), np.array([0], np.uint32))
    with pytest.raises(ValueError, match="lists_of"):
        by_tables.lists_of(np.array([3], np.uint32), np.array([0, 1], np.uint32))
    with pytest.raises(IndexError):
        by_tables.lists_of(np.array([3], np.uint32), np.array([2], np.uint32))
