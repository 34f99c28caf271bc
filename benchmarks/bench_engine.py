"""What the cache is worth to the engine: time to the first token, and prompt tokens a second, cold against warm."""

from __future__ import annotations

import statistics
import time

from benchmarks.engine_rig import EngineConfig, ask, big, cluster_beside, model_of, one_thread, settled, submit, text
from benchmarks.harness import Bench, Figure, at_least, interleaved, measures, ratio_of_medians, spread
from kvstore.engine_integration.engine import Engine, RequestOptions
from kvstore.engine_integration.model import hit_tokens_max

AT_ONCE = 8
COLD = RequestOptions(resume="off", store=False)
WARM = RequestOptions(resume="exact", store=False)
TTFT_CASES = ((8_192, 7_936, 6.0), (16_384, 16_128, 10.0))  # tokens, of which cached, bar
SUSTAINED_TOKENS = 8_192  # of each of the eight prompts; 96.9% of them can hit


def rounds_of(bench: Bench, tokens: int) -> int:
    """A cold prompt of 16,384 tokens takes a minute where two cores have other work."""
    return 1 if bench.scale.name == "smoke" else max(3, min(bench.scale.rounds, 40_000 // tokens))


@measures("ttft_cold_over_warm")
def ttft(bench: Bench) -> dict[str, Figure]:
    """From submit to the first token of one prompt, the engine idle: looked up, loaded, resumed by window hit / computed."""
    model, figures = model_of(big(bench)), {}
    with one_thread(), cluster_beside(bench.directory / "ttft", model) as (_, host), Engine(model, host) as engine:
        for tokens, cached, bar in TTFT_CASES if bench.scale.name != "smoke" else ((300, 272, 0.0),):
            prompt = text(tokens, tokens)
            ask(engine, prompt, 1)
            settled(host)
            assert hit_tokens_max(model.config, tokens) == cached

            def warm(prompt: list[int] = prompt, cached: int = cached) -> float:
                response = ask(engine, prompt, 1, WARM)
                if (response.window, response.cached_tokens) != ("hit", cached):
                    raise RuntimeError(f"{response.window} of {response.cached_tokens} tokens")
                return response.ttft_seconds

            def cold(prompt: list[int] = prompt) -> float:
                return ask(engine, prompt, 1, COLD).ttft_seconds

            cold_seconds, warm_seconds = interleaved(rounds_of(bench, tokens), cold, warm, warm_up=0 if bench.scale.name == "smoke" else 1)
            note = f"{statistics.median(cold_seconds):.3f} s / {statistics.median(warm_seconds):.3f} s; warm {spread(warm_seconds)}"
            figures[f"ttft_cold_over_warm.{tokens}"] = Figure(ratio_of_medians(cold_seconds, warm_seconds), at_least(bar), note)
    return figures


@measures("prefill_tps_ratio")
def prefill(bench: Bench) -> dict[str, Figure]:
    """Prompt tokens a second with eight requests at once, each another prompt, from the first submit to the last first token."""
    smoke = bench.scale.name == "smoke"
    model, tokens = model_of(big(bench)), SUSTAINED_TOKENS if not smoke else 100
    prompts = [text(tokens, seed) for seed in range(AT_ONCE)]
    with (
        one_thread(),
        cluster_beside(bench.directory / "prefill", model) as (_, host),
        Engine(model, host, EngineConfig(running_max=AT_ONCE)) as engine,
    ):
        cached: list[int] = []

        def tokens_per_second(options: RequestOptions) -> float:
            begin = time.perf_counter()
            responses = [request.result() for request in [submit(engine, prompt, 1, options) for prompt in prompts]]
            cached.append(sum(response.cached_tokens for response in responses))
            return AT_ONCE * tokens / (time.perf_counter() - begin)

        tokens_per_second(RequestOptions(resume="exact"))
        settled(host)
        rounds = 1 if smoke else max(3, bench.scale.rounds // 4)
        warm, cold = interleaved(rounds, lambda: tokens_per_second(WARM), lambda: tokens_per_second(COLD), warm_up=0 if smoke else 1)
    share = max(cached) / (AT_ONCE * tokens)
    note = f"{statistics.median(warm):,.0f} / {statistics.median(cold):,.0f} tokens/s, {share:.1%} cached; warm {spread(warm)}"
    return {"prefill_tps_ratio": Figure(ratio_of_medians(warm, cold), at_least(8.0 if not smoke else 0.0), note)}
