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
from kvstore.client.agent.agent import Agent
from kvstore.engine_integration.engine import Engine, EngineConfig, RequestOptions, Response
from kvstore.engine_integration.model import TINY, hit_tokens_max
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.speculate import generate
from kvstore.keys import KeyChain
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
            response = ask(engine, tokens, 21)
            assert response.tokens == alone(tokens, 21)
            if turn:
                assert response.window == "hit" and response.replayed_tokens == response.depth == 0
                assert response.cached_tokens == (had - 1) // B * B
            tokens = tokens + response.tokens
        repeated = ask(engine, tokens[:150], 5)
        assert repeated.cached_tokens == hit_tokens_max(TINY, 150) and repeated.tokens == alone(tokens[:150], 5)


@pytest.mark.parametrize("mode", ["exact", "auto", "bounded"])
def test_a_missing_window_is_made_up_for_as_asked(cluster: LocalCluster, mode: str) -> None:
    prompt = text(200, seed=len(mode))
    with engine_of(cluster) as engine:
        assert ask(engine, prompt).tokens == alone(prompt, 20)
    with engine_of(cluster) as engine:
        response = ask(engine, prompt, resume=mode, store=False)
        assert response.window == ("exact" if mode == "exact" else "bounded")
        assert response.replayed_tokens == (72 if mode == "exact" else 16)
        assert response.cached_tokens == 176 - response.replayed_tokens
        if mode == "exact":
            assert response.tokens == alone(prompt, 20) and response.depth == response.approximate_tokens == 0
        else:
            assert (response.depth, response.approximate_tokens) == (1, 24)


def test_an_older_window_is_taken_when_it_is_near_and_a_bounded_replay_when_not(cluster: LocalCluster) -> None:
    """`auto` with four encoder layers: an entry at most two blocks older."""
    prompt = text(250, seed=21)
    for had, window, replayed in ((197, "older", 32), (181, "bounded", 16)):
        with engine_of(cluster) as engine:
            ask(engine, prompt, 1, resume="off")  # all blocks; a repeat of the prompt needs the entry at 224
            host = engine.cache.host
            assert isinstance(host, Agent)
            host.windows.clear()
            ask(engine, prompt[:had], 1, resume="off")  # entries at 192 and 160, or at 176 and 144
            response = ask(engine, prompt, resume="auto", store=False)
            assert (response.window, response.replayed_tokens) == (window, replayed)
            assert (response.tokens == alone(prompt, 20)) or window == "bounded"


def test_a_prompt_whose_window_is_gone_has_it_again_after_one_exact_replay(cluster: LocalCluster) -> None:
    """Also where the replay does not begin at the prompt's start: 72 tokens before the end of the hit."""
    prompt = text(200, seed=25)
    keys = KeyChain(model().namespace, block_tokens=B).extend(prompt)
    with engine_of(cluster) as engine:
        cold = ask(engine, prompt, 12, resume="exact")
        host = engine.cache.host
        assert isinstance(host, Agent)
        entry = host.window(keys, 176)
        host.windows.clear()
        seen = [ask(engine, prompt, 12, resume="exact") for _ in range(2)]
        again = host.window(keys, 176)
    assert [(response.window, response.cached_tokens, response.replayed_tokens) for response in seen] == [
        ("exact", 104, 72),
        ("hit", 176, 0),
    ]
    assert cold.tokens == seen[0].tokens == seen[1].tokens == alone(prompt, 12)
    assert entry is not None and again is not None and bytes(entry.entry) == bytes(again.entry), "the very bytes of the cold run's"


def test_approximations_are_read_by_those_who_accept_them_and_grow_no_deeper_than_they_may(cluster: LocalCluster) -> None:
    """A conversation whose windows are lost after each turn: each turn replays bounded, one deeper, until `depth_max`; then exact. One who
    wants exact blocks reads none of what they wrote."""
    tokens = text(90, seed=31)
    with engine_of(cluster) as engine:
        tokens += ask(engine, tokens, 20).tokens
    seen = []
    for turn in range(4):
        tokens = tokens + text(30, seed=32 + turn)
        with engine_of(cluster, EngineConfig(depth_max=2)) as engine:
            response = ask(engine, tokens, 20)
        seen.append((response.window, response.depth))
        assert response.cached_tokens > 0 and (response.approximate_tokens > 0) == (response.depth > 0)
        tokens = tokens + response.tokens
    assert seen == [("bounded", 1), ("bounded", 2), ("exact", 2), ("exact", 2)]
    with engine_of(cluster) as engine:
        strict = ask(engine, tokens, 9, resume="exact", store=False)
        assert strict.depth == 0 and strict.tokens == alone(tokens, 9)
        assert 0 < strict.cached_tokens + strict.replayed_tokens <= 112, "blocks of the first turn alone are exact"


def test_a_tenants_secret_keeps_its_prompts_to_itself(cluster: LocalCluster) -> None:
    prompt = text(120, seed=41)
    with engine_of(cluster) as engine:
        ask(engine, prompt, 1, secret=b"one tenant's secret")
        assert ask(engine, prompt, 1, secret=b"another one's secret", store=False).cached_tokens == 0
        assert ask(engine, prompt, 1, secret=b"one tenant's secret", store=False).cached_tokens == 96


def test_requests_arriving_at_random_share_the_engine_and_the_cache(cluster: LocalCluster) -> None:
    chosen = random.Random(7)
    for batch in (3, 8):
        prompts = [text(chosen.randrange(30, 150), seed=50 + number % 3) for number in range(batch)]
        with engine_of(cluster) as engine:
            requests = []
            for number, prompt in enumerate(prompts):
                if requests:
                    next(requests[-1].stream())  # some are in mid-answer, others not begun
                requests.append(engine.submit(prompt, options=RequestOptions(max_tokens=12, speculate=number % 2 == 0, resume="exact")))
            for request, prompt in zip(requests, prompts, strict=True):
                assert request.result(WAIT_SECONDS).tokens == alone(prompt, 12)


@pytest.mark.parametrize("length", [15, 16, 17, 21, 22, 23, 37, 38, 39, 49, 54])
def test_every_edge_of_the_hit_rule_answers_as_without_a_cache(cluster: LocalCluster, length: int) -> None:
    prompt = text(64, seed=61)[:length]
    with engine_of(cluster) as engine:
        ask(engine, prompt, 3, resume="exact")
        response = ask(engine, prompt, 3, resume="exact", store=False)
        assert response.cached_tokens == hit_tokens_max(TINY, length) and response.tokens == alone(prompt, 3)
