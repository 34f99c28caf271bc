"""Loads that fail at the first, a middle or the last plane, come late or not at all; stores that fail: the answer is that of no cache.

`mini` in bf16: its blocks are cut into three planes, one for each source layer."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from functools import cache
from typing import Any

import pytest
from client_tools import WAIT_SECONDS, cluster_of

from kvstore.client import Client, ClientConfig
from kvstore.client.agent.agent import Agent
from kvstore.client.load import Load
from kvstore.client.ticket import Ticket
from kvstore.client.values import PlaneReady
from kvstore.engine_integration.engine import Engine, EngineConfig, RequestOptions, Response, agent_config
from kvstore.engine_integration.model import MINI
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.speculate import generate
from kvstore.errors import Unreachable
from kvstore.server.local import LocalCluster

pytestmark = pytest.mark.usefixtures("one_torch_thread")
COUNT = 6
LENGTH = 700  # four blocks of it can hit
Planes = Generator[PlaneReady, None, None]


@cache
def model() -> Model:
    return Model.random(MINI, "bf16")


@cache
def prompt() -> list[int]:
    return random.Random(5).choices(range(256), k=LENGTH)


@cache
def answer() -> list[int]:
    return generate(model(), model().begin(LENGTH), prompt(), COUNT).tokens


class Faulty(Agent):
    """A host whose loads go through `fault`."""

    fault: Callable[[Planes], Planes] | None = None

    def planes_with(self, began: Callable[[Load], None] | None, ticket: Ticket, destination: Any, **rest: Any) -> Planes:
        planes = super().planes_with(began, ticket, destination, **rest)
        return planes if self.fault is None else self.fault(planes)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with cluster_of(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def host(cluster: LocalCluster) -> Iterator[Faulty]:
    """With the prompt's blocks stored, and its window entries in RAM."""
    config = ClientConfig(promise_reuse_seconds=0, load_deadline_seconds=2)
    with Client(cluster.map, layout=model().layout, config=config) as client:
        host = Faulty(client, config=agent_config(MINI, serve=False))
        with Engine(model(), host) as engine:
            assert ask(engine).tokens == answer()
            assert client.flush(WAIT_SECONDS)
        assert len(model().layout.planes(10)) == 3
        yield host


def ask(engine: Engine, **options: Any) -> Response:
    return engine.submit(prompt(), options=RequestOptions(max_tokens=COUNT, **options)).result(WAIT_SECONDS)


def ends_before(plane: int) -> Callable[[Planes], Planes]:
    def fault(planes: Planes) -> Planes:
        for ready in planes:
            if ready.plane == plane:
                planes.close()
                return
            yield ready

    return fault


def raises_at(plane: int) -> Callable[[Planes], Planes]:
    def fault(planes: Planes) -> Planes:
        for ready in planes:
            if ready.plane == plane:
                planes.close()
                raise Unreachable("E299", "a fault of this test")
            yield ready

    return fault


@pytest.mark.parametrize("plane", [0, 1, 2])
@pytest.mark.parametrize("how", [ends_before, raises_at])
def test_a_load_that_fails_at_any_plane_leaves_the_answer_as_it_is(host: Faulty, how: Callable[..., Any], plane: int) -> None:
    host.fault = how(plane)
    with Engine(model(), host) as engine:
        response = ask(engine, store=False)
        assert response.tokens == answer()
        assert engine.pages.free == engine.pages.capacity
    host.fault = None


@pytest.mark.parametrize("plane", [0, 2])
def test_fewer_blocks_than_promised_are_a_shorter_hit(host: Faulty, plane: int) -> None:
    """The load's own answer says how many are whole; here the blocks are, but not in time for the plan."""

    def fault(planes: Planes) -> Planes:
        for ready in planes:
            yield PlaneReady(ready.plane, ready.blocks - 1) if ready.plane == plane else ready

    host.fault = fault
    with Engine(model(), host) as engine:
        assert ask(engine, store=False).tokens == answer()
    host.fault = None


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_load_that_gives_some_blocks_is_a_hit_of_those(host: Faulty, monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """As when an extent in the middle is gone: the rest of the ticket is computed."""

    def short(began: Any, ticket: Ticket, destination: Any, **rest: Any) -> Planes:
        return Agent.planes_with(host, began, ticket, destination[:blocks], **{**rest, "blocks": range(blocks)})

    monkeypatch.setattr(host, "planes_with", short)
    with Engine(model(), host) as engine:
        response = ask(engine, store=False, resume="exact")
        assert response.tokens == answer() and engine.stats()["loads_short"] == 1
        assert response.cached_tokens + response.replayed_tokens == blocks * 128


def test_layers_are_computed_while_later_planes_are_on_their_way(host: Faulty) -> None:
    """The last plane is held back until the first source's layers were computed."""
    computed = threading.Event()
    held: list[bool] = []

    def fault(planes: Planes) -> Planes:
        for ready in planes:
            if ready.plane == 2:
                held.append(computed.wait(WAIT_SECONDS))
            yield ready

    host.fault = fault
    of = model()
    with Engine(of, host) as engine:
        steps = of.steps

        def told(state: Any, tokens: Any) -> Any:
            inner = steps(state, tokens)
            while True:
                try:
                    source = next(inner)
                except StopIteration as done:
                    return done.value
                if source == 2:
                    computed.set()
                yield source

        of.steps = told  # type: ignore[method-assign]  # to see where it stops
        try:
            response = ask(engine, store=False)
        finally:
            del of.steps  # type: ignore[method-assign]  # the class has it
    host.fault = None
    assert held == [True] and response.tokens == answer() and response.window == "hit" and response.cached_tokens == 512


def test_cancelling_in_mid_load_frees_everything(host: Faulty) -> None:
    began, go = threading.Event(), threading.Event()

    def fault(planes: Planes) -> Planes:
        for ready in planes:
            if ready.plane == 1:
                began.set()
                go.wait(WAIT_SECONDS)
            yield ready

    host.fault = fault
    with Engine(model(), host) as engine:
        request = engine.submit(prompt(), options=RequestOptions(max_tokens=COUNT))
        assert began.wait(WAIT_SECONDS)
        request.cancel()
        assert request.result(WAIT_SECONDS).finish_reason == "cancelled"
        go.set()
        host.fault = None
        assert ask(engine, store=False).tokens == answer()
    assert engine.pages.free == engine.pages.capacity


@pytest.mark.parametrize("nodes", [2, 3])
def test_nodes_that_stop_in_mid_load_cost_time_and_no_token(host: Faulty, cluster: LocalCluster, nodes: int) -> None:
    """Two: parity makes up for them. Three: the blocks are computed, once the load's deadline has passed."""

    def fault(planes: Planes) -> Planes:
        for node in range(nodes):
            cluster.kill(node, signal.SIGSTOP)
        yield from planes

    host.fault = fault
    try:
        with Engine(model(), host, EngineConfig(load_deadline_seconds=1.5)) as engine:
            response = ask(engine, store=False)
        assert response.tokens == answer() and response.finish_reason == "length"
        assert response.total_seconds < WAIT_SECONDS / 2
    finally:
        host.fault = None
        for node in range(nodes):
            cluster.kill(node, signal.SIGCONT)


def test_a_store_that_fails_is_counted_and_nothing_else(host: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise Unreachable("E299", "a fault of this test")

    monkeypatch.setattr(host, "store", broken)
    with Engine(model(), host) as engine:
        response = engine.submit(prompt()[:300], options=RequestOptions(max_tokens=COUNT, resume="off")).result(WAIT_SECONDS)
        assert response.finish_reason == "length" and response.stored_blocks == 0
        assert engine.stats()["store_errors"] == 1
