"""Retention, space and histograms of the whole cluster, against plain counting over extents and nodes."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from client_tools import V41, chain, store, until

from kvstore import cluster_view
from kvstore.cli.cluster import ask_nodes
from kvstore.client import Client
from kvstore.cluster_view import ClassRetention, retention
from kvstore.clustermap import ClusterMap, Node
from kvstore.placement import Placement
from kvstore.server.activity import Grown, Growth
from kvstore.server.local import LocalCluster

DAY = 86400.0


@dataclass(frozen=True)
class Report:
    node: Node
    values: dict[str, float] = field(default_factory=dict)
    up: bool = True
    capacity_bytes: int = 1000
    used_bytes: int = 0
    growth: Grown | None = None


def nodes_of(count: int) -> ClusterMap:
    return ClusterMap.local([Node(f"node-{i:02}", f"host-{i:02}", f"127.0.0.1:{7000 + i}") for i in range(count)])


def kept(oldest_seconds: float, *, lru: float = 0.0, expired: float = 0.0, name: str = "chat") -> dict[str, float]:
    """What went for room was before its time, but for a tenth."""
    return {
        f'kvstore_evicted_contract_bytes_total{{retention_class="{name}",reason="lru",contract="kept"}}': lru / 10,
        f'kvstore_evicted_contract_bytes_total{{retention_class="{name}",reason="lru",contract="broken"}}': lru - lru / 10,
        f'kvstore_evicted_contract_bytes_total{{retention_class="{name}",reason="expired",contract="kept"}}': expired,
        f'kvstore_retention_seconds{{retention_class="{name}"}}': oldest_seconds,
        f'kvstore_retention_contract_seconds{{retention_class="{name}"}}': 7 * DAY,
        f'kvstore_evicted_bytes_total{{retention_class="{name}",reason="lru"}}': lru,
        f'kvstore_evicted_bytes_total{{retention_class="{name}",reason="expired"}}': expired,
    }


def only(found: list[ClassRetention]) -> ClassRetention:
    [one] = found
    return one


@pytest.mark.parametrize("nodes_count", [12, 13, 30, 60])
def test_what_is_attained_is_the_age_up_to_which_every_extent_can_be_read(nodes_count: int) -> None:
    where, dice = nodes_of(nodes_count), random.Random(nodes_count)
    ages = [dice.uniform(1, 10) * DAY for _ in range(nodes_count)]
    reports = [Report(node, kept(ages[node.ordinal], lru=1.0)) for node in where.nodes]
    found = only(retention(where, reports))

    def readable(age: float, group: int) -> bool:
        return sum(age <= ages[node] for node in placement.nodes_of(group)) >= where.k

    placement = Placement(where)
    assert found.attained_seconds is not None and found.groups == placement.pg_count
    assert all(readable(found.attained_seconds, group) for group in range(placement.pg_count))
    assert not all(readable(found.attained_seconds + 1, group) for group in range(placement.pg_count))
    assert found.attained_p10_seconds is not None
    share = sum(readable(found.attained_p10_seconds, group) for group in range(placement.pg_count)) / placement.pg_count
    assert share >= 0.9 and found.attained_p10_seconds >= found.attained_seconds


def test_two_tight_nodes_cost_nothing_and_the_third_decides() -> None:
    where = nodes_of(12)
    long = [Report(node, kept(9 * DAY, lru=1.0)) for node in where.nodes]
    tight = [replace(report, values=kept(hours * 3600.0, lru=1.0)) for report, hours in zip(long, (1, 2, 3), strict=False)]
    assert only(retention(where, [*tight[:2], *long[2:]])).attained_seconds == 9 * DAY
    three = only(retention(where, [*tight, *long[3:]]))
    assert three.attained_seconds == 3 * 3600.0 and three.short
    down = [replace(report, up=False, values={}) for report in tight[:2]]
    assert only(retention(where, [*down, tight[2], *long[3:]])).attained_seconds == 3 * 3600.0
    assert only(retention(where, [*down, replace(tight[2], up=False), *long[3:]])).attained_seconds == 0.0


def test_a_class_of_which_nothing_was_dropped_for_room_has_no_bound() -> None:
    where = nodes_of(12)
    young = only(retention(where, [Report(node, kept(60.0 + node.ordinal, expired=5.0)) for node in where.nodes]))
    assert young.attained_seconds is None and not young.short and young.oldest_seconds == 60.0 and young.reached_ratio == 1.0
    assert retention(where, [Report(node, kept(0.0)) for node in where.nodes]) == []


def test_a_node_that_tells_its_bound_is_believed_after_a_restart_and_where_it_spares_older_ones() -> None:
    where = nodes_of(12)
    told = {'kvstore_retention_bound_seconds{retention_class="chat"}': 3600.0}
    reports = [Report(node, kept(5 * DAY) | told) for node in where.nodes]
    assert only(retention(where, reports)).attained_seconds == 3600.0 and only(retention(where, reports)).short


def test_nodes_that_lost_their_disks_keep_nothing_from_before() -> None:
    where = nodes_of(12)
    age = "kvstore_data_age_seconds"
    old = [Report(node, kept(2 * DAY) | {age: 3 * DAY}) for node in where.nodes]
    assert only(retention(where, old)).attained_seconds is None
    for lost in (2, 3):
        emptied = [Report(node, kept(60.0) | {age: 3600.0 * (1 + node.ordinal)}) for node in where.nodes[:lost]]
        assert only(retention(where, [*emptied, *old[lost:]])).attained_seconds == (None if lost == 2 else 3600.0)
    fresh = [Node(f"new-{i}", f"new-{i}", f"127.0.0.1:{8000 + i}") for i in range(3)]
    grown = where.with_epoch(fresh, [node.id for node in (*where.nodes, *fresh)])
    young = [Report(node, kept(60.0) | {age: 3600.0}) for node in grown.nodes[12:]]
    assert only(retention(grown, [*old, *young])).attained_seconds is None, "they joined, and lost nothing"


def test_the_share_that_reached_its_days_is_of_bytes_and_none_where_nothing_went() -> None:
    where = nodes_of(12)
    assert only(retention(where, [Report(node, kept(DAY, lru=10.0, expired=30.0)) for node in where.nodes])).reached_ratio == 0.775
    assert only(retention(where, [Report(node, kept(DAY)) for node in where.nodes])).reached_ratio is None


def test_of_a_large_map_an_even_sample_of_groups_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    where = nodes_of(40)
    everything = cluster_view.group_lists(where)
    monkeypatch.setattr(cluster_view, "GROUPS_MAX", 64)
    sample = cluster_view.group_lists(where)
    assert len(sample) == 64 and sample.dtype == everything.dtype and np.array_equal(sample, everything[:: len(everything) // 64])


def test_space_is_summed_and_the_time_until_it_is_full_follows_from_what_stays() -> None:
    where = nodes_of(12)
    values = {
        'kvstore_disk_used_bytes{kind="freeing"}': 5.0,
        'kvstore_disk_used_bytes{kind="index"}': 1.0,
        'kvstore_disk_used_bytes{kind="zombie"}': 2.0,
        'kvstore_class_used_bytes{retention_class="chat"}': 300.0,
        'kvstore_class_used_bytes{retention_class="agent"}': 0.0,
        'kvstore_owner_used_bytes{owner="default"}': 300.0,
    }
    reports = [Report(node, values, used_bytes=400, growth=Grown(100.0, 50, 80)) for node in where.nodes]
    found = cluster_view.space(reports)
    assert (found.used_bytes, found.capacity_bytes, found.freeing_bytes, found.zombie_bytes, found.index_bytes) == (
        4800,
        12_000,
        60,
        24,
        12,
    )
    assert (found.by_class, found.by_owner) == ({"chat": 3600}, {"default": 3600})
    assert found.growth_bytes_per_second == 6.0 and found.written_bytes_per_second == 9.6 and found.seconds_until_full == 1200.0
    full = [replace(report, values={**values, **kept(DAY, lru=1.0)}) for report in reports]
    assert cluster_view.space(full).evicting and cluster_view.space(full).seconds_until_full is None
    shrinking = [replace(report, growth=Grown(100.0, -50, 80)) for report in reports]
    assert cluster_view.space(shrinking).seconds_until_full is None
    little = Grown(3599.0, 9, 9)  # of 1,000
    for growth, known in (
        (Grown(59.0, 500, 500), False),
        (little, False),
        (Grown(60.0, 10, 10), True),
        (replace(little, seconds=3600.0), True),
    ):
        assert (cluster_view.space([replace(report, growth=growth) for report in reports]).seconds_until_full is not None) == known, growth
    unknown = cluster_view.space([replace(report, growth=None) for report in reports])
    assert unknown.growth_bytes_per_second is None and unknown.seconds_until_full is None


def test_growth_is_of_six_hours_or_since_the_start() -> None:
    now = 0.0
    growth = Growth(lambda: (int(now) * 2, int(now) * 3), clock=lambda: now)
    for _ in range(1000):
        now += 60.0
        growth.sample()
        grown = growth.window()
        assert grown.seconds == now if now <= 21_600 else 21_600 <= grown.seconds < 21_720
        assert grown == Grown(grown.seconds, int(grown.seconds) * 2, int(grown.seconds) * 3)


def test_histograms_of_several_nodes_merge_into_that_of_all_observations() -> None:
    dice = random.Random(1)
    bounds = [0.1, 0.5, 1.0, math.inf]

    def values(observed: list[float]) -> dict[str, float]:
        edges = {bound: "+Inf" if bound == math.inf else f"{bound:g}" for bound in bounds}
        return {f'x_seconds_bucket{{op="read",le="{edges[b]}"}}': float(sum(o <= b for o in observed)) for b in bounds}

    parts = [[dice.random() * 1.2 for _ in range(dice.randrange(50))] for _ in range(7)]
    merged = cluster_view.merged(values(part) for part in parts)
    assert merged == values([o for part in parts for o in part])
    found = cluster_view.buckets(merged, "x_seconds", op="read")
    assert [bound for bound, _ in found] == bounds and cluster_view.buckets(merged, "x_seconds", op="write") == []
    p50 = cluster_view.quantile(found, 0.5)
    assert p50 is not None and 0.5 <= p50 <= 1.0 and cluster_view.quantile([], 0.5) is None


def test_labels_select_series_whatever_their_order_and_names_do_not_match_by_their_front() -> None:
    values = {'a_total{x="1",y="2"}': 1.0, 'a_total{y="2",x="3"}': 2.0, "a_total": 4.0, 'a_total_more{x="1"}': 8.0}
    assert cluster_view.total(values, "a_total") == 7.0 and cluster_view.total(values, "a_total", y="2") == 3.0
    assert cluster_view.by_label(values, "a_total", "x", y="2") == {"1": 1.0, "3": 2.0}
    assert cluster_view.difference(values, {"a_total": 1.0})["a_total"] == 3.0


def test_in_a_real_cluster_that_drops_for_room_everything_younger_than_attained_can_be_read(tmp_path: Path) -> None:
    """Fills three nodes over and over for some seconds; then every extent that was stored is looked up again."""
    with (
        LocalCluster(tmp_path, 3, capacity_bytes=64 << 20, k=2, m=1, bucket_seconds=1) as cluster,
        Client(cluster.map, layout=V41) as client,
    ):
        began, stored = time.time(), []
        while time.time() < began + 6 or not all(node_has_dropped(cluster)):
            assert time.time() < began + 60
            due = began + 0.1 * len(stored)  # so that a node keeps some seconds
            until(lambda due=due: time.time() >= due, "the next extent")
            keys = chain(32, V41)
            stored.append((keys, time.time()))
            store(client, keys)
        reports = ask_nodes(cluster.map, 10)
        found, asked = only(retention(cluster.map, reports)), time.time()
        assert found.attained_seconds is not None and found.short and found.contract_seconds == 7 * DAY
        assert 0 < found.attained_seconds < asked - began and found.reached_ratio == 0.0
        assert sum(node.dropped_early_bytes for node in found.nodes.values()) == found.early_bytes == found.evicted_bytes > 0
        young = [keys for keys, at in stored if asked - at < found.attained_seconds - 1]  # a bucket is a second long
        assert young and all(client.lookup(keys).hit_blocks == len(keys) for keys in young)
        assert client.lookup(stored[0][0]).hit_blocks == 0, "the oldest is gone"
        there = cluster_view.space(reports)
        assert there.evicting and there.seconds_until_full is None and there.by_class["chat"] == there.used_bytes == found.used_bytes


def node_has_dropped(cluster: LocalCluster) -> list[bool]:
    return [cluster_view.total(report.values, "kvstore_evicted_bytes_total", reason="lru") > 0 for report in ask_nodes(cluster.map, 10)]
