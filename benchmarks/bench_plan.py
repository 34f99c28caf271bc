"""plan_lru_equal, shards_error_points, plan_all_policies_seconds, plan_vs_replay_points: `kvstore plan` beside what is known and a cluster.

Smoke sizes cut the traces, so the published figures give way to the plain LRU of kvstore.replay.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from benchmarks.bench_replay import TRACE as CONVERSATION
from benchmarks.bench_replay import replays, requests_of
from benchmarks.harness import ROOT, Bench, Figure, at_least, at_most, equal_to, interleaved, measures, seconds
from kvstore.plan.accesses import Accesses, of_requests
from kvstore.plan.curve import exact_curve, sampled_curve
from kvstore.plan.policies import POLICIES, compare
from kvstore.replay import LruCache, Request, open_trace, totals
from kvstore.replay.trace import Variant

WEKA = ROOT / "traces" / "weka_v6_dev.b128.jsonl.zst"
SHARES = (0.01, 0.05, 0.10, 0.25, 0.50)
PUBLISHED = {  # traces/README.md: exact LRU, hit blocks
    "conversation_512": (15_080, 56_382, 80_323, 101_978, 104_759),
    "conversation_128": (59_639, 224_846, 319_298, 407_650, 418_772),
    "weka": (8_937_866, 9_062_310, 9_063_857, 9_065_793, 9_070_131),
    "weka_busy1h": (2_263_647, 8_082_012, 8_893_086, 9_052_811, 9_068_776),
}
SEEDS = 5


def trace_of(bench: Bench, name: str) -> tuple[list[Request], int]:
    variant: Variant = "busy1h" if name == "weka_busy1h" else "plain"
    block_tokens = 512 if name == "conversation_512" else 128
    path = WEKA if name.startswith("weka") else CONVERSATION
    limit = bench.scale.trace_requests or None
    return list(open_trace(path, block_tokens=block_tokens, variant=variant, request_limit=limit)), block_tokens


def busy_hour(bench: Bench, _: ExitStack) -> Accesses:
    requests, block_tokens = trace_of(bench, "weka_busy1h")
    return of_requests(requests, block_tokens)


@measures("plan_lru_equal")
def plan_lru_equal(bench: Bench) -> dict[str, Figure]:
    figures = {}
    for name, published in PUBLISHED.items():
        requests, block_tokens = trace_of(bench, name)
        accesses = of_requests(requests, block_tokens)
        curve = exact_curve(accesses)
        for share, known in zip(SHARES, published, strict=True):
            blocks = max(1, int(share * accesses.unique))
            expected = known
            if bench.scale.trace_requests:
                cache = LruCache(blocks)
                totals(requests, cache, block_tokens)
                expected = cache.hit_blocks
            figures[f"plan_lru_equal.{name}.{share * 100:.0f}"] = Figure(curve.hit_blocks(blocks), equal_to(expected))
    return figures


@measures("shards_error_points")
def shards_error_points(bench: Bench) -> dict[str, Figure]:
    accesses = bench.shared(busy_hour)
    exact = exact_curve(accesses)
    capacities = [int(share * accesses.unique) for share in np.arange(0.05, 1.0, 0.01)]

    def worst(rate: float) -> tuple[float, float]:
        """Points off at the worst capacity and seed; and the widest half of a band."""
        curves = [sampled_curve(accesses, rate, seed) for seed in range(SEEDS)]
        errors = [abs(curve.hit_ratio(c) - exact.hit_ratio(c)) for curve in curves for c in capacities]
        return 100 * max(errors), 100 * max(curve.band(c) for curve in curves for c in capacities)

    error, band = worst(0.1)
    few_error, few_band = worst(0.01) if not bench.scale.trace_requests else (error, band)
    taken = interleaved(
        bench.scale.rounds,
        lambda: processor_seconds(lambda: exact_curve(accesses)),
        lambda: processor_seconds(lambda: sampled_curve(accesses, 0.1, with_band=False)),
        lambda: processor_seconds(lambda: sampled_curve(accesses, 0.1)),
    )
    of_exact, of_sample, of_band = (statistics.median(values) for values in taken)
    speed = of_exact / of_sample
    told = f"processor time: exact {1000 * of_exact:.0f} ms, sampled {1000 * of_sample:.0f} ms, with its band {1000 * of_band:.0f} ms"
    note = f"10%, {SEEDS} seeds, band up to {band:.2f}; at 1% {few_error:.2f}, band up to {few_band:.2f}"
    return {
        "shards_error_points.error": Figure(error, at_most(1.0), note),
        "shards_error_points.times_faster": Figure(speed, at_least(5.0), told),
    }


def processor_seconds(action: Callable[[], object]) -> float:
    """Of this thread: neighbours do not count."""
    begin = time.thread_time()
    action()
    return time.thread_time() - begin


@measures("plan_all_policies_seconds")
def plan_all_policies_seconds(bench: Bench) -> dict[str, Figure]:
    def everything() -> None:
        requests, block_tokens = trace_of(bench, "weka")
        accesses = of_requests(requests, block_tokens)
        compare(accesses, list(POLICIES.values()), [max(1, int(share * accesses.unique)) for share in SHARES])

    note = f"{len(POLICIES)} policies, {len(SHARES)} capacities, reading included"
    return {"plan_all_policies_seconds": Figure(seconds(everything), at_most(60.0), note)}


@measures("plan_vs_replay_points")
def plan_vs_replay_points(bench: Bench) -> dict[str, Figure]:
    accesses = of_requests(requests_of(bench), 128)
    curve = exact_curve(accesses)
    figures = {}
    for share, report in bench.shared(replays).items():
        planned, measured = curve.hit_ratio(int(accesses.unique * share)), report.hit_ratio
        assert measured is not None
        note = f"plan {planned:.2%}, cluster {measured:.2%}"
        figures[f"plan_vs_replay_points.{share * 100:.0f}"] = Figure(100 * abs(planned - measured), at_most(1.0), note)
    return figures
