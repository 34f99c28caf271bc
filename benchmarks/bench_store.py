"""store_vs_loopback: time of the raw transfer of the twelve shards of 600 blocks, over the time of the store (coded, written, indexed)."""

from __future__ import annotations

import os
from contextlib import ExitStack

import numpy as np

from benchmarks.bench_load import raw_like, shapes
from benchmarks.harness import Bench, Figure, at_least, interleaved, measures, ratio_of_medians, seconds, spread
from benchmarks.prompts import bytes_of, chains, pretouched
from benchmarks.rig import NODES, rig
from kvstore.client import StoreOutcome


@measures("store_vs_loopback")
def store(bench: Bench) -> dict[str, Figure]:
    figures = {}
    degraded = 0
    with ExitStack() as stack, raw_like(bench, NODES) as (plain, alike):
        made = rig(bench, stack, "store", capacity_bytes=8 << 30)
        data = pretouched(bench.scale.chain_blocks)
        prompts = chains(1_000, bench.scale.chain_blocks)

        def store_seconds(lengths: list[int]) -> float:
            keys = next(prompts)
            bytes_of(keys, out=data)
            os.sync()  # what the rounds before wrote is no part of this one

            def store_all() -> None:
                nonlocal degraded
                futures, first = [], 0
                for length in lengths:
                    futures.append(made.client.store(keys[: first + length], data[first : first + length], first_block=first))
                    first += length
                for future in futures:
                    if not (outcome := future.result(60).outcome).readable:
                        raise RuntimeError(f"a store gave {outcome}")
                    degraded += outcome is StoreOutcome.DEGRADED  # its time tells: half a second of patience

            return seconds(store_all)

        cases = shapes(bench)
        takes = [lambda lengths=lengths: store_seconds(lengths) for lengths in cases.values()]
        *ours, theirs, alike_times = interleaved(bench.scale.rounds, *takes, plain.round_seconds, alike.round_seconds)
    for shape, times in zip(cases, ours, strict=True):
        note = f"{np.median(times) * 1e3:.0f} ms, raw {np.median(theirs) * 1e3:.0f} ms; {ratio_of_medians(alike_times, times):.2f} of "
        note += f"{np.median(alike_times) * 1e3:.0f} ms with our congestion control; {spread(times)}"
        note += f"; {degraded} stores of all were degraded" if degraded else ""
        figures[f"store_vs_loopback.{shape}"] = Figure(ratio_of_medians(theirs, times), at_least(0.30), note)
    return figures
