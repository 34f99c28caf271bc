"""index_share and disk_overhead: what the store takes beside the shards themselves, in the shape that the weka trace leaves behind.

Both replay real requests, so that extents, their earlier starts and the order of index writes are those of agents. The index is measured
after the whole trace with small blocks (an entry's size does not depend on its block's), against the records that true blocks would take.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from itertools import islice

from kvstore.replay.capacity import shape_of

from benchmarks.bench_replay import LAYOUT as SMALL_LAYOUT
from benchmarks.bench_replay import SHARDS, K
from benchmarks.harness import ROOT, Bench, Figure, at_most, measures
from benchmarks.prompts import LAYOUT
from benchmarks.rig import NODES, bytes_on_disk
from kvstore.layout import Layout
from kvstore.replay import ReplayOptions, ReplayReport, run_replay
from kvstore.replay.requests import Request
from kvstore.replay.trace import open_trace
from kvstore.server.local import LocalCluster

TRACE = ROOT / "traces" / "weka_v6_dev.b128.jsonl.zst"
TRUE_SIZE_BLOCKS = 8_000  # of true size, for bytes on disk: 1.1 GB with parity


def weka(bench: Bench) -> list[Request]:
    return list(islice(open_trace(TRACE), bench.scale.trace_requests or None))


def conversations(requests: list[Request], blocks_max: int) -> list[Request]:
    """Whole conversations drawn at random until their blocks are enough; the order of the trace is kept."""
    sessions = sorted({request.session for request in requests})
    random.Random(7).shuffle(sessions)
    chosen: set[int | None] = set()
    blocks = 0
    for session in sessions:
        longest = max(request.block_count for request in requests if request.session == session)
        if blocks + longest <= blocks_max:
            chosen.add(session)
            blocks += longest
    return [request for request in requests if request.session in chosen]


def stored(cluster: LocalCluster, requests: list[Request], layout: Layout) -> ReplayReport:
    """Stores what an infinite cache would. Raises where anything was refused or wrong."""
    report = run_replay(requests, cluster.map, ReplayOptions(layout=layout, concurrency=4))
    refused = {name: count for name, count in report.store_outcomes.items() if name != "STORED"}
    if report.wrong_bytes or refused:
        raise RuntimeError(f"{report.wrong_bytes} wrong bytes, store outcomes {report.store_outcomes}")
    return report


@measures("index_share")
def index_share(bench: Bench) -> dict[str, Figure]:
    requests = weka(bench)
    true_shape = shape_of(requests, LAYOUT, K)
    cluster = LocalCluster(bench.directory / "index-share", NODES, capacity_bytes=8 << 30, extra_arguments=["--virtual-clock"])
    with cluster:
        stored(cluster, requests, SMALL_LAYOUT)
    # Every node holds one shard of every extent: twelve nodes, groups of twelve.
    index_bytes = max(sum(bytes_on_disk(path.parent) for path in cluster.node_directory(n).rglob("data.mdb")) for n in range(NODES))
    note = f"{index_bytes / true_shape.extents:.0f} B an extent of {true_shape.unique_blocks / true_shape.extents:.1f} blocks"
    return {"index_share": Figure(index_bytes / true_shape.record_bytes, at_most(0.004), note)}


@measures("disk_overhead")
def disk_overhead(bench: Bench) -> dict[str, Figure]:
    requests = conversations(weka(bench), TRUE_SIZE_BLOCKS if bench.scale.name != "smoke" else 300)
    shape = shape_of(requests, LAYOUT, K)
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(bench.directory / "overhead", NODES, capacity_bytes=4 << 30))
        stored(cluster, requests, LAYOUT)
    shard_bytes = SHARDS * shape.unique_blocks * sum(plane.shard_bytes for plane in LAYOUT.planes(K))
    on_disk = sum(bytes_on_disk(cluster.node_directory(node)) for node in range(NODES))
    note = f"{on_disk / 1e9:.2f} GB, {shape.extents} extents of {shape.unique_blocks / shape.extents:.1f} blocks; index, logs and all"
    return {"disk_overhead": Figure(on_disk / shard_bytes, at_most(1.03), note)}
