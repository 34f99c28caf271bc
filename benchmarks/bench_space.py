"""index_share and disk_overhead: what the store takes beside the shards themselves, in the shape that the weka trace leaves behind.

Both replay real requests, so that extents, their earlier starts and the order of index writes are those of agents. The index is measured
after the whole trace with small blocks (an entry's size does not depend on its block's), against the records that true blocks would take.
"""

from __future__ import annotations

import random
from itertools import islice

from benchmarks.bench_replay import LAYOUT as SMALL_LAYOUT
from benchmarks.bench_replay import K
from benchmarks.harness import ROOT, Bench, Figure, at_most, measures
from benchmarks.prompts import LAYOUT
from benchmarks.records import need_whole
from benchmarks.rig import NODES, bytes_on_disk
from kvstore.client import StoreOutcome
from kvstore.layout import Layout
from kvstore.replay import InfiniteCache, ReplayOptions, ReplayReport, Request, local_cluster, open_trace, run_replay, shape_of
from kvstore.server.local import LocalCluster

TRACE = ROOT / "traces" / "weka_v6_dev.b128.jsonl.zst"
TRUE_SIZE_BLOCKS = 8_000  # of true size, for bytes on disk: 1.1 GB with parity


def weka(bench: Bench) -> list[Request]:
    return list(islice(open_trace(TRACE), bench.scale.trace_requests or None))


def conversations(requests: list[Request], blocks_max: int) -> list[Request]:
    """Conversations drawn at random, one after the other, until their unique blocks are enough; the last one may be cut short."""
    sessions = sorted({request.session for request in requests})
    random.Random(7).shuffle(sessions)
    cache = InfiniteCache()
    chosen: list[Request] = []
    for session in sessions:
        for request in (one for one in requests if one.session == session):
            if cache.block_count >= blocks_max:
                return chosen
            cache.leading_hits(request.ids())
            chosen.append(request)
    return chosen


def stored(cluster: LocalCluster, requests: list[Request], layout: Layout) -> ReplayReport:
    """Stores what an infinite cache would. Raises where anything was refused or wrong. (What is late is on its nodes when it returns.)"""
    report = run_replay(requests, cluster.map, ReplayOptions(layout=layout, concurrency=4))
    if report.wrong_bytes or not all(StoreOutcome(name).readable for name in report.store_outcomes):
        raise RuntimeError(f"{report.wrong_bytes} wrong bytes, store outcomes {report.store_outcomes}")
    return report


@measures("index_share")
def index_share(bench: Bench) -> dict[str, Figure]:
    requests = weka(bench)
    true_shape = shape_of(requests, LAYOUT, K)
    small_shape = shape_of(requests, SMALL_LAYOUT, K)
    with local_cluster(bench.directory / "index-share", small_shape, None, layout=SMALL_LAYOUT) as cluster:
        stored(cluster, requests, SMALL_LAYOUT)
    need_whole(cluster, small_shape.extents)
    # Every node holds one shard of every extent: twelve nodes, groups of twelve.
    index_bytes = max(sum(bytes_on_disk(path.parent) for path in cluster.node_directory(n).rglob("data.mdb")) for n in range(NODES))
    note = f"{index_bytes / true_shape.extents:.0f} B an extent of {true_shape.unique_blocks / true_shape.extents:.1f} blocks"
    return {"index_share": Figure(index_bytes / true_shape.record_bytes, at_most(0.004), note)}


@measures("disk_overhead")
def disk_overhead(bench: Bench) -> dict[str, Figure]:
    requests = conversations(weka(bench), TRUE_SIZE_BLOCKS if bench.scale.name != "smoke" else 500)
    shape = shape_of(requests, LAYOUT, K)
    with LocalCluster(bench.directory / "overhead", NODES, capacity_bytes=4 << 30) as cluster:
        stored(cluster, requests, LAYOUT)
    need_whole(cluster, shape.extents)
    shard_bytes = NODES * shape.unique_blocks * sum(plane.shard_bytes for plane in LAYOUT.planes(K))
    on_disk = sum(bytes_on_disk(cluster.node_directory(node)) for node in range(NODES))
    note = f"{on_disk / 1e9:.2f} GB, {shape.extents} extents of {shape.unique_blocks / shape.extents:.1f} blocks; index, logs and all"
    return {"disk_overhead": Figure(on_disk / shard_bytes, at_most(1.03), note)}
