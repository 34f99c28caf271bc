"""The engine's promise of equal bits, counted: cases that are as without a cache / cases."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch

from benchmarks.engine_rig import (
    DRAFTING,
    MINI,
    NODES,
    TINY,
    WAIT_SECONDS,
    EngineConfig,
    Tally,
    alone,
    ask,
    cluster_beside,
    model_of,
    one_thread,
    settled,
    submit,
    text,
)
from benchmarks.harness import ROOT, Bench, Figure, equal_to, measures
from kvstore.client.agent.agent import Agent
from kvstore.client.load import Load
from kvstore.client.ticket import Ticket
from kvstore.client.values import PlaneReady
from kvstore.engine_integration.engine import Engine, RequestOptions, agent_config, host_of
from kvstore.engine_integration.model import ModelConfig, Resume, WindowUse, hit_tokens_max, plan_resume
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.state import Bytes
from kvstore.errors import Unreachable

CASE_TESTS = ("tests/test_model_resume.py", "tests/test_model_speculate.py", "tests/test_model_cluster.py", "tests/test_engine_cluster.py",
              "tests/test_engine_faults.py")  # fmt: skip
PASSED = re.compile(r"(\d+) (passed|failed|error)")


def stored(model: Model, tokens: list[int]) -> tuple[Bytes, dict[int, bytes]]:
    """Blocks, and entries at all multiples, of another request that had this text."""
    state, entries = model.begin(len(tokens)), {}
    for at in range(0, len(tokens), model.config.block):
        model.feed(state, tokens[at : at + model.config.block])
        entries.update(state.entries)
    return state.export_blocks(0, len(tokens) // model.config.block), entries


def logits_of(model: Model, tokens: list[int], plan: Resume | None = None, blocks: Bytes | None = None, entry: bytes | None = None) -> Any:
    """Logits of the prompt's last rows, and the blocks of the whole prompt."""
    state = model.begin(len(tokens), plan, blocks, entry)
    logits = model.feed(state, tokens[plan.start_tokens if plan else 0 :])
    return logits, state.export_blocks(0, len(tokens) // model.config.block)


def same(one: Any, other: Any) -> bool:
    return torch.equal(one[0], other[0]) and np.array_equal(one[1], other[1])


def ways(config: ModelConfig, length: int, blocks: int, entries: dict[int, bytes]) -> dict[WindowUse, Resume]:
    """A window hit; from an older window; by exact replay. Fewer where the prompt is short."""
    end = hit_tokens_max(config, length)
    found = {}
    for newest in (end, end - 2 * config.block, 0):
        plan = plan_resume(config, length, blocks, {at for at in entries if at <= newest})
        found[plan.window] = plan
    return found


def logits_equal(model: Model, lengths: list[int]) -> Tally:
    tally = Tally()
    whole = text(max(lengths) // model.config.block * model.config.block + model.config.block)
    blocks, entries = stored(model, whole)
    for length in lengths:
        cold = logits_of(model, whole[:length])
        for window, plan in ways(model.config, length, len(blocks), entries).items():
            resumed = logits_of(model, whole[:length], plan, blocks, entries.get(plan.start_tokens))
            tally.add(f"{length} tokens by {window.value}", same(resumed, cold))
    return tally


def texts_equal(bench: Bench, batches: tuple[int, ...], turns: int) -> Tally:
    """Conversations, so many at once as `batches` says, with and without guesses, arriving at random; each turn hits what prefill and
    decode stored in the one before. Then each last prompt anew without window entries, exact."""
    tally, model = Tally(), model_of(DRAFTING)
    chosen = random.Random(11)
    with cluster_beside(bench.directory / "texts", model) as (_, host):
        for batch in batches:
            for speculate in (False, True):
                conversations = [text(chosen.randrange(1, 120), chosen.randrange(1 << 30)) for _ in range(batch)]
                with Engine(model, host) as engine:
                    for turn in range(turns):
                        requests = []
                        for prompt in conversations:
                            threading.Event().wait(chosen.random() * 0.02)  # of a few steps
                            requests.append(submit(engine, prompt, 20 + turn, RequestOptions(speculate=speculate, resume="exact")))
                        for number, request in enumerate(requests):
                            answer, prompt = request.result(WAIT_SECONDS).tokens, conversations[number]
                            tally.add(f"{batch} at once, turn {turn}, guesses {speculate}", answer == alone(model, prompt, 20 + turn))
                            conversations[number] = prompt + answer + text(9, turn)
                        settled(host)
                with Engine(model, host_of(host.client, model.config)) as engine:
                    requests = [submit(engine, prompt, 12, RequestOptions(resume="exact", store=False)) for prompt in conversations]
                    for request, prompt in zip(requests, conversations, strict=True):
                        response = request.result(WAIT_SECONDS)
                        tally.add(f"{batch} at once, no window: {response.window}", response.tokens == alone(model, prompt, 12))
    return tally


@measures("resume_bit_equal", "bounded_short_equal", "rollback_equal")
def resume_equal(bench: Bench) -> dict[str, Figure]:
    smoke = bench.scale.name == "smoke"
    with one_thread():
        tiny, mini = model_of(TINY), model_of(MINI)
        chosen = random.Random(3)
        every = logits_equal(tiny, list(range(1, 386)) if not smoke else list(range(1, 386, 96)))
        edges = [127, 128, 129, 133, 134, 135, 262, 263, 385]
        small = logits_equal(mini, edges if not smoke else [263])
        long = logits_equal(mini, sorted(chosen.randrange(400, 2_500) for _ in range(20))) if not smoke else Tally()
        texts = texts_equal(bench, (3,), 2) if smoke else texts_equal(bench, (1, 3, 8) * 4, 3)
        figures = {
            "resume_bit_equal.1_to_385": Figure(every.share, equal_to(1), every.note),
            "resume_bit_equal.mini": Figure(small.share, equal_to(1), small.note),
            "resume_bit_equal.text": Figure(texts.share, equal_to(1), texts.note),
        }
        if not smoke:
            figures["resume_bit_equal.20_long"] = Figure(long.share, equal_to(1), long.note)
        bounded, back = bounded_equal(tiny, smoke), rollback_equal(tiny, smoke)
        figures["bounded_short_equal"] = Figure(bounded.share, equal_to(1), bounded.note)
        figures["rollback_equal"] = Figure(back.share, equal_to(1), back.note)
    return figures


def bounded_equal(tiny: Model, smoke: bool) -> Tally:
    """Bounded replay where the hit is one window at most begins at the prompt's start."""
    tally = Tally()
    for model in (tiny,) if smoke else (tiny, model_of(MINI)):
        config = model.config
        blocks, _ = stored(model, text(3 * config.block))
        first = config.slots + config.block
        for length in range(first, first + config.block, 1 if config.block < 100 else 16):
            plan = plan_resume(config, length, len(blocks), mode="bounded")
            prompt = text(3 * config.block)[:length]
            equal = plan.window is WindowUse.BOUNDED and same(logits_of(model, prompt, plan, blocks), logits_of(model, prompt))
            tally.add(f"{config.name}, {length} tokens", equal)
    return tally


def rollback_equal(model: Model, smoke: bool) -> Tally:
    """1 to 6 tokens taken back that end at, cross, or begin at a stored boundary: logits, blocks and the next entry as without them."""
    tally, size = Tally(), model.config.block
    tokens, wrong = text(7 * size), text(size, 9)
    want = logits_of(model, tokens[: 6 * size + 3])
    _, entries = stored(model, tokens)
    for back in range(1, model.config.spare + 1):
        for kept in range(3 * size - back, 3 * size + 2, 3 if smoke else 1):
            state = model.begin(6 * size + 3)
            model.feed(state, tokens[:kept])
            model.feed(state, wrong[:back])
            state.rollback(back)
            logits = model.feed(state, tokens[kept : 6 * size + 3])[-model.config.slots :]
            equal = same((logits, state.export_blocks(0, 6)), want) and state.entries[6 * size] == entries[6 * size]
            tally.add(f"{back} tokens back to {kept}", equal)
    return tally


@measures("hit_rule")
def hit_rule(bench: Bench) -> dict[str, Figure]:
    """Everything stored: cached tokens a request reports; the window entry gone and replay bounded: one block less."""
    model, tally = model_of(DRAFTING), Tally()
    config = model.config
    lengths = range(1, 180, 60 if bench.scale.name == "smoke" else 3)
    with one_thread(), cluster_beside(bench.directory / "hits", model) as (_, host):
        whole = text(192, 77)
        for length in lengths:
            with Engine(model, host) as engine:
                ask(engine, whole[:length], 1, RequestOptions(resume="exact"))
                settled(host)
                want = hit_tokens_max(config, length)
                assert want == config.block * max(0, (length - config.slots) // config.block)
                tally.add(f"{length} tokens", ask(engine, whole[:length], 1, RequestOptions(store=False)).cached_tokens == want)
            with Engine(model, host_of(host.client, config)) as engine:
                got = ask(engine, whole[:length], 1, RequestOptions(store=False, resume="bounded")).cached_tokens
                tally.add(f"{length} tokens without a window", got == max(0, want - config.block))
    return {"hit_rule": Figure(tally.share, equal_to(1), tally.note)}


Planes = Generator[PlaneReady, None, None]


class Faulty(Agent):
    """A host whose loads go through `fault`."""

    fault: Callable[[Planes], Planes] | None = None

    def planes_with(self, began: Callable[[Load], None] | None, ticket: Ticket, destination: Any, **rest: Any) -> Planes:
        planes = super().planes_with(began, ticket, destination, **rest)
        return planes if self.fault is None else self.fault(planes)


def failing_at(plane: int, how: str) -> Callable[[Planes], Planes]:
    def fault(planes: Planes) -> Planes:
        for ready in planes:
            if ready.plane == plane:
                if how == "fewer":
                    yield PlaneReady(plane, ready.blocks - 1)
                planes.close()
                if how == "raises":
                    raise Unreachable("E202", "load", "a fault of this measurement")
                return
            yield ready

    return fault


@measures("failed_load_text_equal")
def failed_loads(bench: Bench) -> dict[str, Figure]:
    """Loads of three planes that end, raise or give fewer blocks at each of them; two and three nodes stopped when the load begins."""
    tally, model, count = Tally(), model_of(MINI, "bf16"), 4
    smoke = bench.scale.name == "smoke"
    with one_thread(), cluster_beside(bench.directory / "failing", model) as (cluster, plain):
        host = Faulty(plain.client, config=agent_config(model.config, serve=False))
        prompts = [text(550 + 40 * n, n) for n in range(1 if smoke else 4)]
        want = [alone(model, prompt, count) for prompt in prompts]
        with Engine(model, host, EngineConfig(load_deadline_seconds=1.5, resume="exact")) as engine:
            for prompt in prompts:
                ask(engine, prompt, count)
            settled(host)

            def check(name: str) -> None:
                for prompt, tokens in zip(prompts, want, strict=True):
                    response = ask(engine, prompt, count, RequestOptions(store=False))
                    tally.add(f"{name}, {len(prompt)} tokens", response.tokens == tokens and response.finish_reason == "length")

            for how in ("ends", "raises", "fewer")[: 1 if smoke else 3]:
                for plane in range(len(model.layout.planes())):
                    host.fault = failing_at(plane, how)
                    check(f"{how} at plane {plane}")
            for nodes in (2, 3)[: 1 if smoke else 2]:

                def stops(planes: Planes, nodes: int = nodes) -> Planes:
                    for node in range(nodes):
                        cluster.kill(node, signal.SIGSTOP)
                    yield from planes

                host.fault = stops
                check(f"{nodes} nodes stop")
                for node in range(NODES):
                    cluster.kill(node, signal.SIGCONT)
    return {"failed_load_text_equal": Figure(tally.share, equal_to(1), tally.note)}


@measures("model_cases")
def model_cases(bench: Bench) -> dict[str, Figure]:
    """The cases that were a bug somewhere, as tests: passed / run."""
    files = CASE_TESTS if bench.scale.name != "smoke" else (CASE_TESTS[0], "-k", "hits_all_but")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    counts = {word: int(number) for number, word in PASSED.findall(done.stdout.splitlines()[-1] if done.stdout else "")}
    run = sum(counts.values())
    note = f"{counts.get('passed', 0)} passed of {run}"
    return {"model_cases": Figure(counts.get("passed", 0) / run if run else 0.0, equal_to(1), note)}
