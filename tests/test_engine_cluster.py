"""The engine on a cluster of real daemons: what it resumes from the cache it answers as without one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
from client_tools import WAIT_SECONDS, cluster_of

from kvstore.client import Client, ClientConfig
from kvstore.engine_integration.engine import Engine, EngineConfig, RequestOptions, Response
from kvstore.engine_integration.model import TINY, hit_tokens_max
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.speculate import generate
from kvstore.server.local import LocalCluster

pytestmark = pytest.mark.usefixtures("one_torch_thread")
DRAFTING = replace(TINY, name="drafting", draft_tokens=5)
CONFIG = ClientConfig(block_tokens=TINY.block, promise_reuse_seconds=0)
B = TINY.block


@cache
def model() -> Model:
    return Model.random(DRAFTING)


@cache
def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def alone(prompt: list[int], count: int) -> list[int]:
    """The model's own greedy answer, without a cache."""
    return _alone(tuple(prompt), count)


@cache
def _alone(prompt: tuple[int, ...], count: int) -> list[int]:
    return generate(model(), model().begin(len(prompt)), list(prompt), count).tokens


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with cluster_of(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@contextmanager
def engine_of(cluster: LocalCluster, config: EngineConfig | None = None) -> Iterator[Engine]:
    """A new process's engine: no window entry is at hand."""
    with Client(cluster.map, layout=model().layout, config=CONFIG) as client, Engine(model(), client, config) as engine:
        yield engine


def ask(engine: Engine, prompt: list[int], count: int = 20, **options: object) -> Response:
    """Answered, and stored."""
    response = engine.submit(prompt, options=RequestOptions(max_tokens=count, **options)).result(WAIT_SECONDS)  # type: ignore[arg-type]  # passed through
    assert engine.cache.host is not None
    assert engine.cache.host.client.flush(WAIT_SECONDS)
    return response


def test_turns_over_what_prefill_and_decode_stored_equal_turns_without_a_cache(cluster: LocalCluster) -> None:
    """Each turn hits all but its last 22 tokens by the window entry the turn before kept, generated text included."""
    tokens: list[int] = []
    with engine_of(cluster) as engine:
        for turn in range(3):
            had = len(tokens)
            tokens = tokens + text(40 + turn, seed=100 + turn)
            response = ask(engine, tokens, 37)
            assert response.tokens == alone(tokens, 37)
            if turn:
                assert response.window == "hit" and response.replayed_tokens == response.depth == 0
                assert response.cached_tokens == (had - 1) // B * B
            tokens = tokens + response.tokens
        repeated = ask(engine, tokens[:190], 5)
        assert repeated.cached_tokens == hit_tokens_max(TINY, 190) and repeated.tokens == alone(tokens[:190], 5)


@pytest.mark.parametrize("mode", ["exact", "auto", "bounded"])
def test_a_missing_window_is_made_up_for_as_asked(cluster: LocalCluster, mode: str) -> None:
    prompt = text(200, seed=len(mode))
    with engine_of(cluster) as engine:
        assert ask(engine, prompt).tokens == alone(prompt, 20)
    with engine_of(cluster) as engine:
        response = ask(engine, prompt, resume=mode, store=False)
        assert response.window == ("exact" if mode == "exact" else "bounded")
        assert response.replayed_tokens == (64 if mode == "exact" else 16)
        assert response.cached_tokens == 176 - response.replayed_tokens
        if mode == "exact":
            assert response.tokens == alone(prompt, 20) and response.depth == response.approximate_tokens == 0
        else:
            assert (response.depth, response.approximate_tokens) == (1, 24)
