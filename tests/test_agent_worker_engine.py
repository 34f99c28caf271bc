"""The bundled engine as a worker of an agent process: the same text, whatever becomes of the agent."""

from __future__ import annotations

import logging
import random
import signal
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from agent_tools import AgentUnderTest, agent_of
from client_tools import WAIT_SECONDS, cluster_of, until

from kvstore.client.agent.worker import WorkerAgent
from kvstore.engine_integration.engine import Engine, EngineConfig, RequestOptions, Response
from kvstore.engine_integration.model import TINY
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.speculate import generate
from kvstore.server.local import LocalCluster

pytestmark = pytest.mark.usefixtures("one_torch_thread")
LIMITS = ("--memory", "4MiB", "--worker-memory", "4MiB", "--ram", "4MiB", "--windows", "4MiB")
PROMPT = random.Random(7).choices(range(256), k=400)


@cache
def model() -> Model:
    return Model.random(TINY)


@cache
def alone(count: int = 30) -> list[int]:
    """The model's own greedy answer to PROMPT, without a cache."""
    return generate(model(), model().begin(len(PROMPT)), PROMPT, count).tokens


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with cluster_of(tmp_path_factory.mktemp("cluster"), 3, k=2, m=1) as cluster:
        yield cluster


def worker(path: Path) -> WorkerAgent:
    return WorkerAgent(path, layout=model().layout, block_tokens=TINY.block, slots=TINY.slots, name="engine")


def ask(engine: Engine, agent: WorkerAgent) -> Response:
    response = engine.submit(PROMPT, options=RequestOptions(max_tokens=30, resume="exact")).result(WAIT_SECONDS)
    assert response.tokens == alone()
    assert agent.flush(WAIT_SECONDS)
    return response


def test_an_engine_over_an_agent_process_hits_blocks_and_windows_and_says_the_same(cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with agent_of(cluster.map_path, path, *LIMITS) as process:
        with worker(path) as one, Engine(model(), one) as engine:
            assert ask(engine, one).cached_tokens == 0
        with worker(path) as two, Engine(model(), two) as engine:
            hit = ask(engine, two)
            assert hit.cached_tokens == (len(PROMPT) - TINY.slots) // TINY.block * TINY.block and hit.window == "hit"
        status = process.status()
        assert status["counts"]["window_ok"] >= 1 and status["counts"]["load_ok"] >= 1
        process.until_free()


def test_an_agent_killed_in_mid_load_changes_no_text_and_is_used_again_when_it_is_back(
    cluster: LocalCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvstore")
    path = tmp_path / "a.sock"
    first = AgentUnderTest(cluster.map_path, path, *LIMITS, "--ram", "0B")
    try:
        with worker(path) as agent, Engine(model(), agent, EngineConfig(load_deadline_seconds=20)) as engine:
            ask(engine, agent)
            assert ask(engine, agent).cached_tokens > 0  # and promised: the next lookup asks no node
            for node in (0, 1):
                cluster.kill(node, signal.SIGSTOP)
            try:
                request = engine.submit(PROMPT, options=RequestOptions(max_tokens=30, resume="exact"))
                until(lambda: any(w["loads"] for w in first.status()["workers"]), "the load to be under way")
                first.kill()
                began = time.monotonic()
                assert request.result(WAIT_SECONDS).tokens == alone() and time.monotonic() - began < 10
                assert ask(engine, agent).cached_tokens == 0, "nothing hits without an agent"
            finally:
                for node in (0, 1):
                    cluster.kill(node, signal.SIGCONT)
            with agent_of(cluster.map_path, path, *LIMITS) as second:
                assert agent.wait_attached(WAIT_SECONDS)
                back = ask(engine, agent)
                assert back.cached_tokens > 0 and back.window in ("older", "exact"), "the windows died with the agent"
                second.until_free()
    finally:
        first.close()
