"""The engine's promise of equal bits, counted: cases that are as without a cache / cases."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from benchmarks import equal_parts
from benchmarks.engine_rig import (
    DRAFTING,
    MINI,
    NODES,
    EngineConfig,
    Tally,
    alone,
    ask,
    cluster_beside,
    model_of,
    one_thread,
    settled,
    text,
)
from benchmarks.harness import ROOT, Bench, Figure, equal_to, measures
from kvstore.client.agent.agent import Agent
from kvstore.client.load import Load
from kvstore.client.ticket import Ticket
from kvstore.client.values import PlaneReady
from kvstore.engine_integration.engine import Engine, RequestOptions, agent_config, host_of
from kvstore.engine_integration.model import hit_tokens_max
from kvstore.errors import Unreachable

PROCESSES = 2  # of resume_equal
CASE_TESTS = ("tests/test_model_resume.py", "tests/test_model_speculate.py", "tests/test_model_cluster.py", "tests/test_engine_cluster.py",
              "tests/test_engine_faults.py")  # fmt: skip
PASSED = re.compile(r"(\d+) (passed|failed|error)")


@measures("resume_bit_equal", "bounded_short_equal", "rollback_equal")
def resume_equal(bench: Bench) -> dict[str, Figure]:
    """Seven minutes of processor time at full size: two processes share it, and say how far they are."""
    if bench.scale.name == "smoke":
        found = equal_parts.run(equal_parts.Share(bench.directory, of=3))
    else:
        found = in_processes(bench.directory)
    return {name: Figure(tally.share, equal_to(1), tally.note) for name, tally in found.items()}


def in_processes(directory: Path) -> dict[str, Tally]:
    """All parts, every share in a process of its own."""
    command = [sys.executable, "-m", equal_parts.__name__, str(directory)]
    running = [
        subprocess.Popen([*command, str(first), str(PROCESSES)], cwd=ROOT, stdout=subprocess.PIPE, text=True) for first in range(PROCESSES)
    ]
    found: dict[str, Tally] = {}
    try:
        for process in running:
            answer, _ = process.communicate()
            if process.returncode:
                raise RuntimeError(f"a share of the comparison ended with {process.returncode}")
            for name, (cases, right, wrong) in json.loads(answer).items():
                found.setdefault(name, Tally()).take(cases, right, wrong)
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
            process.wait()
    return found


@measures("hit_rule")
def hit_rule(bench: Bench) -> dict[str, Figure]:
    """Everything stored: cached tokens a request reports; the window entry gone and replay bounded: one block less."""
    model, tally = model_of(DRAFTING), Tally()
    config = model.config
    lengths = range(1, 180, 120 if bench.scale.name == "smoke" else 3)
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
        prompts = [text(550 + 40 * n, n) for n in range(4)] if not smoke else [text(300)]
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
    files = CASE_TESTS if bench.scale.name != "smoke" else ("tests/test_errors.py",)  # that it starts and is understood
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    counts = {word: int(number) for number, word in PASSED.findall(done.stdout.splitlines()[-1] if done.stdout else "")}
    run = sum(counts.values())
    note = f"{counts.get('passed', 0)} passed of {run}"
    return {"model_cases": Figure(counts.get("passed", 0) / run if run else 0.0, equal_to(1), note)}
