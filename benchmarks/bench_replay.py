"""replay_vs_lru_points and replay_infinite: `kvstore.replay` of the conversation trace against a real cluster, beside exact figures.

Blocks are small here (all counts are of blocks, and the trace at true size is 80 GB); capacity is counted in what a node counts.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import islice

from kvstore.replay.capacity import node_capacity_bytes, shape_of

from benchmarks.harness import ROOT, Bench, Figure, at_most, equal_to, measures
from benchmarks.rig import NODES
from kvstore.layout import Layout
from kvstore.replay import ReplayOptions, ReplayReport, run_replay
from kvstore.replay.exact import InfiniteCache, totals
from kvstore.replay.requests import Request
from kvstore.replay.trace import open_trace
from kvstore.server.local import LocalCluster

TRACE = ROOT / "traces" / "mooncake_conversation_trace.jsonl.gz"
LAYOUT = Layout.single(320)  # one 32-byte shard unit a block and node
K, SHARDS = 10, 12
SHARES = (0.10, 0.25, 0.50)  # of the unique blocks
INFINITE_HIT_TOKENS = 54_089_728  # traces/README.md: conversation, 128
BUCKET_SECONDS = 1  # the trace is an hour long
""" Recency is kept per bucket, so a bucket has to be short beside the time an extent lives in so small a cache. """


def requests_of(bench: Bench) -> list[Request]:
    trace = open_trace(TRACE)
    return list(islice(trace, bench.scale.trace_requests or None))


def replayed(bench: Bench, requests: list[Request], name: str, node_bytes: int, lru_blocks: int | None) -> ReplayReport:
    with ExitStack() as stack:
        cluster = LocalCluster(
            bench.directory / name,
            NODES,
            capacity_bytes=node_bytes,
            bucket_seconds=BUCKET_SECONDS,
            extra_arguments=["--virtual-clock"],
        )
        stack.enter_context(cluster)
        return run_replay(requests, cluster.map, ReplayOptions(layout=LAYOUT, lru_capacity_blocks=lru_blocks))


@measures("replay_infinite")
def replay_infinite(bench: Bench) -> dict[str, Figure]:
    requests = requests_of(bench)
    whole = not bench.scale.trace_requests
    expected = INFINITE_HIT_TOKENS if whole else totals(requests, InfiniteCache(), 128).hit_tokens
    shape = shape_of(requests, LAYOUT, K)
    node_bytes = 2 * node_capacity_bytes(shape.unique_blocks, shape, shards=SHARDS, nodes=NODES) + (64 << 20)
    report = replayed(bench, requests, "replay-infinite", node_bytes, None)
    if report.wrong_bytes:
        raise RuntimeError(f"{report.wrong_bytes} wrong bytes")
    return {"replay_infinite": Figure(report.hit_tokens, equal_to(expected), f"{report.requests} requests in {report.seconds:.0f} s")}


@measures("replay_vs_lru_points")
def replay_vs_lru_points(bench: Bench) -> dict[str, Figure]:
    requests = requests_of(bench)
    shape = shape_of(requests, LAYOUT, K)
    figures = {}
    for share in SHARES:
        blocks = int(shape.unique_blocks * share)
        node_bytes = node_capacity_bytes(blocks, shape, shards=SHARDS, nodes=NODES)
        report = replayed(bench, requests, f"replay-{share:.0%}", node_bytes, blocks)
        if report.wrong_bytes:
            raise RuntimeError(f"{report.wrong_bytes} wrong bytes")
        points = report.points_from_lru
        assert points is not None and report.hit_ratio is not None and report.lru_hit_ratio is not None
        note = f"{report.hit_ratio:.2%}, exact LRU {report.lru_hit_ratio:.2%}; {report.seconds:.0f} s"
        figures[f"replay_vs_lru_points.{share * 100:.0f}"] = Figure(abs(points), at_most(1.0), note)
    return figures
