"""overlap_hidden_share: how much of a load layers' compute hides (benchmarks/overlap.py). overlap_engine_ttft: what the engine gains."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any

from benchmarks.bench_engine import WARM, rounds_of
from benchmarks.engine_rig import ask, big, cluster_beside, model_of, one_thread, settled, text
from benchmarks.harness import Bench, Figure, at_least, interleaved, measures, ratio_of_medians, spread
from benchmarks.overlap import KINDS, PREFILL, Overlap, allowed
from kvstore.client import PlaneReady
from kvstore.client.agent.agent import Agent
from kvstore.client.load import Load
from kvstore.client.ticket import Ticket
from kvstore.engine_integration.engine import Engine, agent_config

BAR = 0.80
BARRED_RATIOS = (1.0, 2.0, 4.0)  # compute of a layer / load of a layer
ENGINE_TOKENS = 16_384


@measures("overlap_hidden_share")
def hidden_share(bench: Bench) -> dict[str, Figure]:
    smoke, figures = bench.scale.name == "smoke", {}
    rounds, warm_up = (bench.scale.rounds, 2) if not smoke else (1, 0)
    for kind, means in KINDS.items():
        with ExitStack() as stack:
            overlap = Overlap(bench, stack, kind)
            for ratio in BARRED_RATIOS if not smoke else BARRED_RATIOS[:1]:
                times = overlap.times(PREFILL, ratio, rounds, warm_up)
                note = f"{times.note(PREFILL)}; the planes allow {allowed(PREFILL, ratio):.2f}; {means}"
                note += "" if kind == "gpu" or overlap.apart else ", which the load shares"
                name = f"overlap_hidden_share.{kind}.{ratio:g}"
                figures[name] = Figure(times.hidden(), at_least(BAR if not smoke else -99), note)
    return figures


class Switched(Agent):
    """A host that can hold planes back until the last has come, and gives the first layers' last: they wait for all to be decoded."""

    whole_first = False

    def planes_with(
        self, began: Callable[[Load], None] | None, ticket: Ticket, destination: Any, **rest: Any
    ) -> Generator[PlaneReady, None, None]:
        planes = super().planes_with(began, ticket, destination, **rest)
        yield from list(planes)[::-1] if self.whole_first else planes


@measures("overlap_engine_ttft")
def engine_ttft(bench: Bench) -> dict[str, Figure]:
    """Time to the first token of a warm prompt, loaded and decoded before layers begin / plane by plane; f32, whose blocks have four."""
    smoke = bench.scale.name == "smoke"
    model, tokens = model_of(big(bench), "f32"), ENGINE_TOKENS if not smoke else 100
    with one_thread(), cluster_beside(bench.directory / "overlap-engine", model) as (_, beside):
        host = Switched(beside.client, config=agent_config(model.config, serve=False))
        with host, Engine(model, host) as engine:
            prompt = text(tokens, 3)
            ask(engine, prompt, 1)
            settled(host)
            loads: dict[bool, list[float]] = {True: [], False: []}

            def ttft(whole_first: bool) -> float:
                host.whole_first = whole_first
                response = ask(engine, prompt, 1, WARM)
                if response.window != "hit":
                    raise RuntimeError(f"window {response.window}")
                loads[whole_first].append(response.load_seconds)
                return response.ttft_seconds

            rounds, warm_up = (rounds_of(bench, tokens), 1) if not smoke else (1, 0)
            whole, streamed = interleaved(rounds, lambda: ttft(True), lambda: ttft(False), warm_up=warm_up)
    note = f"{1e3 * statistics.median(whole):.0f} / {1e3 * statistics.median(streamed):.0f} ms, of these loading and decoding "
    note += f"{1e3 * statistics.median(loads[True]):.0f} / {1e3 * statistics.median(loads[False]):.0f}; {spread(streamed)}"
    return {"overlap_engine_ttft": Figure(ratio_of_medians(whole, streamed), at_least(0), note)}
