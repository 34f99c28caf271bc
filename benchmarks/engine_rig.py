"""What the measurements of the bundled engine share: a model, a cluster of twelve daemons beside it, and an answer that knows no cache."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from benchmarks.harness import Bench
from kvstore.client import Client, ClientConfig
from kvstore.client.agent.agent import Agent
from kvstore.engine_integration.engine import Engine, EngineConfig, Request, RequestOptions, Response, host_of
from kvstore.engine_integration.model import MINI, TINY, ModelConfig
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.speculate import generate
from kvstore.server.local import LocalCluster

WAIT_SECONDS = 600.0
DRAFTING = replace(TINY, name="drafting", draft_tokens=5)  # `tiny` with a draft layer: all of the engine's ways, in milliseconds
NODES = 12


@contextmanager
def one_thread() -> Iterator[None]:
    """Bits hold for one number of threads; one is what a busy host gives a request."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def model_of(config: ModelConfig, codec: str = "v41") -> Model:
    """Random weights: neither bits nor times hang on what they say."""
    return Model.random(config, codec)


def big(bench: Bench) -> ModelConfig:
    """What times are measured with."""
    return DRAFTING if bench.scale.name == "smoke" else MINI


@cache
def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def alone(model: Model, prompt: list[int], count: int) -> list[int]:
    """The model's own most likely answer; no engine, no cache."""
    return generate(model, model.begin(len(prompt)), prompt, count).tokens


@contextmanager
def cluster_beside(directory: Path, model: Model, load_deadline_seconds: float = 10.0) -> Iterator[tuple[LocalCluster, Agent]]:
    config = ClientConfig(block_tokens=model.config.block, promise_reuse_seconds=0, load_deadline_seconds=load_deadline_seconds)
    with (
        LocalCluster(directory, NODES, capacity_bytes=1 << 30) as cluster,
        Client(cluster.map, layout=model.layout, config=config) as client,
    ):
        yield cluster, host_of(client, model.config)


def settled(host: Agent) -> None:
    """All stores are done."""
    if not host.client.flush(60.0):
        raise RuntimeError("stores are not done after a minute")


def submit(engine: Engine, prompt: list[int], count: int, options: RequestOptions | None = None) -> Request:
    return engine.submit(prompt, options=replace(options or RequestOptions(), max_tokens=count))


def ask(engine: Engine, prompt: list[int], count: int, options: RequestOptions | None = None) -> Response:
    return submit(engine, prompt, count, options).result(WAIT_SECONDS)


class Tally:
    """Cases, and how many of them were as they must be. The value of a figure whose bar is "all"."""

    def __init__(self) -> None:
        self.cases = self.right = 0
        self.wrong: list[str] = []

    def add(self, name: str, right: bool) -> None:
        self.take(1, int(right), [] if right else [name])

    def take(self, cases: int, right: int, wrong: Sequence[str]) -> None:
        """What another tally counted."""
        self.cases += cases
        self.right += right
        self.wrong += wrong

    @property
    def share(self) -> float:
        return self.right / self.cases if self.cases else 0.0

    @property
    def note(self) -> str:
        text = f"{self.right} equal of {self.cases}"
        return text + (f"; not: {', '.join(self.wrong[:5])}" if self.wrong else "")


__all__ = [
    "DRAFTING", "MINI", "NODES", "TINY", "WAIT_SECONDS", "EngineConfig", "Tally", "alone", "ask", "big", "cluster_beside", "model_of",
    "one_thread", "settled", "submit", "text",
]  # fmt: skip
