"""replay_vs_lru_points and replay_infinite: `kvstore.replay` of the conversation trace against a real cluster, beside exact figures.

Blocks are small here (all counts are of blocks, and the trace at true size is 80 GB); capacity is counted in what a node counts.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import islice

from benchmarks.harness import ROOT, Bench, Figure, at_most, equal_to, measures
from kvstore.layout import Layout
from kvstore.replay import (
    InfiniteCache,
    ReplayOptions,
    ReplayReport,
    Request,
    TraceShape,
    local_cluster,
    open_trace,
    run_replay,
    shape_of,
    totals,
)
from kvstore.replay.requests import BLOCK_TOKENS

TRACE = ROOT / "traces" / "mooncake_conversation_trace.jsonl.gz"
LAYOUT = Layout.single(320)  # one 32-byte shard unit a block and node
K = 10
SHARES = (0.10, 0.25, 0.50)  # of the unique blocks
INFINITE_HIT_TOKENS = 54_089_728  # traces/README.md: conversation, 128


def requests_of(bench: Bench) -> list[Request]:
    trace = open_trace(TRACE)
    return list(islice(trace, bench.scale.trace_requests or None))


def replayed(bench: Bench, requests: list[Request], shape: TraceShape, name: str, blocks: int | None) -> ReplayReport:
    """The trace against a cluster with room for so many logical blocks (None: for all). Raises on a wrong byte."""
    with local_cluster(bench.directory / name, shape, blocks, layout=LAYOUT) as cluster:
        report = run_replay(requests, cluster.map, ReplayOptions(layout=LAYOUT, lru_capacity_blocks=blocks))
    if report.wrong_bytes:
        raise RuntimeError(f"{report.wrong_bytes} wrong bytes")
    return report


@measures("replay_infinite")
def replay_infinite(bench: Bench) -> dict[str, Figure]:
    requests = requests_of(bench)
    shape = shape_of(requests, LAYOUT, K)
    expected = totals(requests, InfiniteCache(), BLOCK_TOKENS).hit_tokens if bench.scale.trace_requests else INFINITE_HIT_TOKENS
    report = replayed(bench, requests, shape, "replay-infinite", None)
    return {"replay_infinite": Figure(report.hit_tokens, equal_to(expected), f"{report.requests} requests in {report.seconds:.0f} s")}


def replays(bench: Bench, _: ExitStack) -> dict[float, ReplayReport]:
    """A replay for each share of the unique blocks; two figures are read off them."""
    requests = requests_of(bench)
    shape = shape_of(requests, LAYOUT, K)
    shares = SHARES if bench.scale.name != "smoke" else SHARES[1:2]
    return {share: replayed(bench, requests, shape, f"replay-{share:.0%}", int(shape.unique_blocks * share)) for share in shares}


@measures("replay_vs_lru_points")
def replay_vs_lru_points(bench: Bench) -> dict[str, Figure]:
    figures = {}
    for share, report in bench.shared(replays).items():
        points = report.points_from_lru
        assert points is not None and report.hit_ratio is not None and report.lru_hit_ratio is not None
        note = f"{report.hit_ratio:.2%}, exact LRU {report.lru_hit_ratio:.2%}; {report.seconds:.0f} s"
        figures[f"replay_vs_lru_points.{share * 100:.0f}"] = Figure(abs(points), at_most(1.0), note)
    return figures
