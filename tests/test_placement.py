"""Placement: golden vectors, even shares, weights, little movement, and what may be lost with too few hosts."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.clustermap import ClusterMap, Node
from kvstore.placement import Placement, _ln, xxh3_64_u64


def cluster(hosts: int, disks: int = 1, *, weights: dict[int, float] | None = None, k: int = 10, m: int = 2) -> ClusterMap:
    return ClusterMap.local(
        [
            Node(f"node-{h:03}-{d:02}", f"host-{h:03}", f"10.{h >> 8}.{h & 255}.1:{7000 + d}", weight=(weights or {}).get(h, 1.0))
            for h in range(hosts)
            for d in range(disks)
        ],
        k=k,
        m=m,
    )


def digest(placement: Placement) -> str:
    return hashlib.blake2b(placement.table().astype("<i4").tobytes(), digest_size=8).hexdigest()


def test_the_vectorised_hash_is_xxh3() -> None:
    draw = np.random.default_rng(1)
    values = draw.integers(0, 2**64, 2000, dtype=np.uint64)
    seeds = draw.integers(0, 2**64, 2000, dtype=np.uint64)
    want = [xxhash.xxh3_64_intdigest(int(v).to_bytes(8, "little"), seed=int(s)) for v, s in zip(values, seeds, strict=True)]
    assert xxh3_64_u64(values, seeds).tolist() == want


def test_the_logarithm_is_right_to_the_last_digits() -> None:
    u = np.concatenate([np.random.default_rng(2).random(10000) + 2.0**-54, [2.0**-54, 0.5, 1 - 2.0**-53]])
    assert np.allclose(_ln(u), np.log(u), rtol=1e-14, atol=0)


def test_lists_never_change() -> None:
    twelve, many, three = Placement(cluster(12)), Placement(cluster(20, 4)), Placement(cluster(3, 2))
    weighted = Placement(cluster(14, weights={0: 3.84, 1: 7.68, 2: 0.5}))
    assert twelve.nodes_of(0) == GOLDEN_FIRST
    assert [digest(p) for p in (twelve, many, three, weighted)] == GOLDEN_DIGESTS


def test_a_list_is_the_same_alone_and_in_the_table_and_in_any_map_order() -> None:
    for shape in ((12, 1), (30, 2), (60, 16), (5, 3), (1, 1)):
        whole, lazy = Placement(cluster(*shape)), Placement(cluster(*shape))
        some = [pg for pg in (0, 1, 77, whole.pg_count - 1) if pg < whole.pg_count]
        assert [tuple(whole.table()[pg]) for pg in some] == [lazy.nodes_of(pg) for pg in some]
    nodes = cluster(30, 2).nodes
    a, b = ClusterMap.local(nodes), ClusterMap.local(nodes[::-1])
    for pg in range(50):
        assert [a.nodes[o].id for o in Placement(a).nodes_of(pg)] == [b.nodes[o].id for o in Placement(b).nodes_of(pg)]


@pytest.mark.parametrize("shape", [(12, 1), (13, 1), (14, 1), (24, 1), (24, 4), (100, 1), (40, 8)])
def test_the_fullest_node_is_within_12_percent_of_the_mean(shape: tuple[int, int]) -> None:
    shares = Placement(cluster(*shape)).shares()
    assert len(shares) == shape[0] * shape[1]
    assert max(shares.values()) <= 1.12


def test_every_shard_has_its_own_host_where_there_are_enough() -> None:
    where = cluster(16, 3)
    for row in Placement(where).table():
        assert len({where.nodes[o].host for o in row}) == 12


def test_weights_are_respected() -> None:
    where = cluster(150, weights=dict.fromkeys(range(75), 2.0))
    counts = np.bincount(Placement(where).table().ravel(), minlength=150)
    ratio = counts[:75].mean() / counts[75:].mean()
    assert 1.85 <= ratio <= 2.05  # drawing without replacement pulls a little towards even
    disks = ClusterMap.local(
        [Node(f"n-{h}-{d}", f"h-{h}", f"10.0.0.{h}:{7000 + d}", weight=1.0 + 2 * d) for h in range(14) for d in range(2)]
    )
    counts = np.bincount(Placement(disks).table().ravel(), minlength=28)
    assert counts[1::2].sum() / counts[::2].sum() == pytest.approx(3.0, rel=0.05)


def test_adding_a_node_moves_only_its_share() -> None:
    old = cluster(40)
    new = old.with_epoch([Node("node-new", "host-new", "10.9.9.9:7000")], [n.id for n in old.nodes] + ["node-new"])
    assert new.pg_bits == old.pg_bits
    before, after = Placement(new, 1), Placement(new, 2)
    gone = sum(len(set(a) - set(b)) for a, b in zip(before.table().tolist(), after.table().tolist(), strict=True))
    assert gone / before.table().size == pytest.approx(1 / 41, rel=0.1)
    arrived = {o for a, b in zip(before.table().tolist(), after.table().tolist(), strict=True) for o in set(b) - set(a)}
    assert arrived == {40}


def test_removing_a_node_moves_only_what_it_held() -> None:
    old = cluster(20)
    new = old.with_epoch([], [n.id for n in old.nodes[1:]])
    for a, b in zip(Placement(new, 1).table().tolist(), Placement(new, 2).table().tolist(), strict=True):
        assert set(a) - {0} <= set(b)


@pytest.mark.parametrize(
    ("shape", "hosts", "nodes"),
    [((12, 1), 2, 2), ((30, 4), 2, 2), ((1, 1), 0, 0), ((1, 12), 0, 2), ((3, 4), 0, 2), ((6, 2), 1, 2), ((11, 1), 1, 1), ((4, 1), 0, 0)],
)
def test_losses_survived_is_what_an_exhaustive_search_finds(shape: tuple[int, int], hosts: int, nodes: int) -> None:
    losses = Placement(cluster(*shape)).losses_survived()
    assert (losses.hosts, losses.nodes) == (hosts, nodes)
    assert losses.full == (hosts == 2)
    assert ("NO host" in str(losses)) == (hosts == 0)


def test_losses_survived_counts_what_is_lost_already() -> None:
    twelve, thirty, three = Placement(cluster(12)), Placement(cluster(30)), Placement(cluster(3, 4))
    assert [twelve.losses_survived(range(n)).nodes for n in range(4)] == [2, 1, 0, 0]
    assert [twelve.losses_survived(range(n)).readable for n in range(4)] == [True, True, True, False]
    assert thirty.losses_survived([3, 4]).nodes == 0, "some group has both"
    assert not thirty.losses_survived([3, 4, 5]).readable
    assert three.losses_survived([0]).nodes == 1 and three.losses_survived([0, 1]).readable
    many = Placement(cluster(500, 1))
    assert many.pg_count == 1 << 16 and many.losses_survived([1]).nodes == 1
    assert Placement(cluster(500, 3)).losses_survived([1, 2]).nodes == 0, "the worst case, without the table"
    assert not three.losses_survived([0, 5, 9]).readable and "cannot be read" in str(three.losses_survived([0, 5, 9]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=16), st.integers(1, 12), st.integers(0, 4))
def test_any_shape_is_as_even_as_it_can_be(disks: list[int], k: int, m: int) -> None:
    where = ClusterMap.local(
        [Node(f"n-{h}-{d}", f"h-{h}", f"10.0.{h}.1:{7000 + d}") for h, n in enumerate(disks) for d in range(n)], k=k, m=m
    )
    placement = Placement(where)
    for pg in range(min(8, placement.pg_count)):
        row = placement.nodes_of(pg)
        assert len(row) == k + m
        per_node = Counter(row)
        counts = [per_node[node.ordinal] for node in where.nodes]
        assert max(counts) - min(counts) <= 1, "no disk carries a second shard before every disk carries one"
        if sum(disks) >= k + m:
            per_host = Counter(where.nodes[o].host for o in row)
            for h, n in enumerate(disks):
                held = per_host[f"h-{h}"]
                assert held == n or held >= max(per_host.values()) - 1, "hosts are even, except those whose disks are all used"


def test_a_keys_group_is_its_top_bits() -> None:
    placement = Placement(cluster(12))
    keys = np.zeros((3, 32), np.uint8)
    keys[1, :2] = (0x80, 0x40)
    keys[2, :] = 0xFF
    assert placement.pg_bits == 10 and placement.pg_of(keys).tolist() == [0, 0x201, 1023]
    with pytest.raises(ValueError, match="1024"):
        placement.nodes_of(1024)


GOLDEN_FIRST = (10, 1, 4, 6, 11, 5, 2, 0, 7, 3, 8, 9)
GOLDEN_DIGESTS = ["ba1d6bf0c40ae044", "863d65c3e7d7a93b", "24d8f8fb29606a0b", "5f634d401c9aa088"]
