"""The engine without a cluster: many requests at once answer as each would alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from kvstore.engine_integration.engine import Engine, EngineConfig, RequestOptions
from kvstore.engine_integration.model import TINY
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.pages import page_bytes
from kvstore.engine_integration.model.speculate import generate
from kvstore.errors import Closed, MisuseError

pytestmark = pytest.mark.usefixtures("one_torch_thread")
DRAFTING = replace(TINY, name="drafting", draft_tokens=5)
WAIT_SECONDS = 60.0


@cache
def model() -> Model:
    return Model.random(DRAFTING)


@cache
def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


@cache
def alone(length: int, seed: int, count: int) -> list[int]:
    """The model's own greedy answer."""
    return generate(model(), model().begin(length), text(length, seed), count).tokens


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(model(), None) as engine:
        yield engine


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_requests_in_one_batch_answer_as_alone(engine: Engine, batch: int, speculate: bool) -> None:
    chosen = random.Random(batch)
    asked = [(chosen.randrange(1, 120), seed, chosen.randrange(1, 30)) for seed in range(batch)]
    requests = [
        engine.submit(text(length, seed), options=RequestOptions(max_tokens=count, speculate=speculate)) for length, seed, count in asked
    ]
    for request, each in zip(requests, asked, strict=True):
        response = request.result(WAIT_SECONDS)
        assert response.tokens == alone(*each) and response.finish_reason == "length"
        assert [token for piece in request.stream() for token in piece.tokens] == response.tokens
        assert (response.guessed_tokens > 0) <= speculate
    assert engine.stats()["running"] == 0 and engine.pages.free == engine.pages.capacity


def test_a_sampled_answer_hangs_on_its_seed_alone(engine: Engine) -> None:
    def options(seed: int, speculate: bool) -> RequestOptions:
        return RequestOptions(max_tokens=24, temperature=0.8, top_p=0.9, seed=seed, speculate=speculate)

    requests = [engine.submit(text(50), options=options(seed, speculate)) for seed in (1, 2) for speculate in (False, True, True)]
    answers = [tuple(request.result(WAIT_SECONDS).tokens) for request in requests]
    assert answers[0] == answers[1] == answers[2] != answers[3] == answers[4] == answers[5]


def test_an_answer_ends_with_its_stop_token(engine: Engine) -> None:
    whole = alone(40, 0, 20)
    stop = whole[7]
    for speculate in (False, True):
        request = engine.submit(text(40), options=RequestOptions(max_tokens=20, stop_tokens=frozenset({stop}), speculate=speculate))
        response = request.result(WAIT_SECONDS)
        assert response.tokens == whole[: whole.index(stop) + 1] and response.finish_reason == "stop"


def test_memory_is_bounded_and_a_request_that_loses_its_room_goes_on_where_it_was() -> None:
    config = EngineConfig(cache_bytes=1, running_max=8)
    with Engine(model(), None, config) as engine:
        assert engine.pages.capacity == 2
        with pytest.raises(MisuseError, match=r"E594.*room for 2"):
            engine.submit(text(30))
    room = 8 * page_bytes(DRAFTING, model().codec)
    with Engine(model(), None, EngineConfig(cache_bytes=room, running_max=8)) as engine:
        requests = [engine.submit(text(20 + seed, seed), options=RequestOptions(max_tokens=30)) for seed in range(4)]
        responses = [request.result(WAIT_SECONDS) for request in requests]
        assert [response.tokens for response in responses] == [alone(20 + seed, seed, 30) for seed in range(4)]
        assert sum(response.preemptions for response in responses) > 0
        assert engine.pages.free == engine.pages.capacity == 8


def test_a_full_queue_is_an_outcome_and_cancelling_frees_everything() -> None:
    with Engine(model(), None, EngineConfig(queue_max=1, running_max=1)) as engine:
        long = RequestOptions(max_tokens=2000)
        requests = [engine.submit(text(30), options=long) for _ in range(6)]
        answering = threading.Event()
        for request in requests:  # whichever lookup was the quicker runs first
            request.listen(lambda piece: answering.set() if piece.tokens else None)
        assert answering.wait(WAIT_SECONDS)
        for request in requests:
            request.cancel()
        reasons = [request.result(WAIT_SECONDS).finish_reason for request in requests]
        assert set(reasons) == {"cancelled", "busy"} and reasons.count("busy") >= 1
        assert engine.pages.free == engine.pages.capacity
        assert engine.submit(text(30), options=RequestOptions(max_tokens=2)).result(WAIT_SECONDS).tokens == alone(30, 0, 2)


def test_a_request_past_its_deadline_ends_with_what_it_has(engine: Engine) -> None:
    response = engine.submit(text(30), options=RequestOptions(max_tokens=10_000, deadline_seconds=0.3)).result(WAIT_SECONDS)
    assert response.finish_reason == "deadline" and response.tokens == alone(30, 0, 200)[: len(response.tokens)]


def test_a_fault_ends_its_own_request_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = model().steps

    def broken(state: object, tokens: list[int]) -> object:
        if tokens[:2] == [7, 7]:
            raise ZeroDivisionError("a bug")
        return steps(state, tokens)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr(model(), "steps", broken)
    bad, good = engine.submit([7] * 40), engine.submit(text(40), options=RequestOptions(max_tokens=9))
    with pytest.raises(ZeroDivisionError):
        bad.result(WAIT_SECONDS)
    with pytest.raises(ZeroDivisionError):
        list(bad.stream())
    assert good.result(WAIT_SECONDS).tokens == alone(40, 0, 9)
    assert engine.pages.free == engine.pages.capacity


def test_prompts_that_are_none_are_refused(engine: Engine) -> None:
    for prompt in ([], [256], [-1, 3]):
        with pytest.raises(MisuseError, match="E590"):
            engine.submit(prompt)
    with pytest.raises(MisuseError, match=r"E593.*top_p"):
        RequestOptions(top_p=0)


def test_closing_ends_what_runs() -> None:
    engine = Engine(model(), None)
    request = engine.submit(text(30), options=RequestOptions(max_tokens=10_000))
    next(request.stream())
    engine.close()
    assert request.result(WAIT_SECONDS).finish_reason == "closed"
    with pytest.raises(Closed, match="E597"):
        engine.submit(text(3))
