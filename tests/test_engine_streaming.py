"""Layers start when their plane is there: planes that no node has sent yet hold up nothing that does not need them. No times are measured:
peers hold each plane back until what must come before it has happened."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from client_tools import NO_REUSE, V41, WAIT_SECONDS, chain, store, until
from faultpeer import Gate, Item, PeerCluster

from kvstore.client import Client, ClientConfig
from kvstore.engine_integration.engine import Engine, EngineConfig, RequestOptions, Response
from kvstore.engine_integration.model import TINY, hit_tokens_max
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.speculate import generate
from kvstore.engine_integration.model.state import RequestState

pytestmark = pytest.mark.usefixtures("one_torch_thread")
THREE = replace(TINY, name="three", latent=64, sources=((1, 2), (2, 2), (4, 1)))  # in f32 its blocks have three planes, one a source
K, NODES = 2, 3
COUNT = 4
LENGTH = 200
HIT = hit_tokens_max(THREE, LENGTH)
WARM = RequestOptions(max_tokens=COUNT, store=False)


@cache
def model() -> Model:
    return Model.random(THREE, "f32")


@cache
def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def alone(prompt: list[int]) -> list[int]:
    return generate(model(), model().begin(len(prompt)), prompt, COUNT).tokens


class Held:
    """Peers that send no byte of a plane before its gate is open, and a log of what happened."""

    def __init__(self, peers: PeerCluster, planes: int) -> None:
        self.gates: list[Gate] = [peers.gate() for _ in range(planes)]
        self.log: list[tuple[str, int]] = []
        for peer in peers.peers:
            peer.item_rule = self._rule

    async def _rule(self, item: Item) -> None:
        await self.gates[item.plane].wait()
        self.log.append(("sent", item.plane))


@pytest.fixture
def peers() -> Iterator[PeerCluster]:
    with PeerCluster(NODES, k=K, m=NODES - K) as made:
        yield made


@contextmanager
def engine_on(peers: PeerCluster, prompts: list[list[int]], config: EngineConfig | None = None) -> Iterator[Engine]:
    """With the prompts stored, their window entries kept, and nothing computed since."""
    assert len(model().layout.planes(K)) == len(THREE.sources)
    own = ClientConfig(block_tokens=THREE.block, promise_reuse_seconds=0)
    with Client(peers.map, layout=model().layout, config=own) as client, Engine(model(), client, config) as engine:
        for prompt in prompts:
            engine.submit(prompt, options=RequestOptions(max_tokens=COUNT)).result(WAIT_SECONDS)
        assert client.flush(WAIT_SECONDS)
        yield engine


def stops_of(monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    """`told(state, source)` whenever a request stops in front of the layers of `source`, all before them computed."""
    steps = model().steps

    def watched(state: RequestState, tokens: Any) -> Generator[int, None, Any]:
        inner = steps(state, tokens)
        while True:
            try:
                source = next(inner)
            except StopIteration as done:
                return done.value
            told(state, source)
            yield source

    monkeypatch.setattr(model(), "steps", watched)


def is_warm(response: Response, prompt: list[int]) -> bool:
    return (response.tokens, response.window, response.cached_tokens) == (alone(prompt), "hit", HIT)


def test_the_client_hands_a_plane_on_before_the_next_is_sent() -> None:
    with PeerCluster() as peers, Client(peers.map, layout=V41, config=NO_REUSE) as client:
        keys = chain(70, V41)  # two extents
        data = store(client, keys)
        planes = V41.planes()
        held, place = Held(peers, len(planes)), np.zeros_like(data)
        held.gates[0].open()
        for at, ready in enumerate(client.planes(client.lookup(keys), place)):
            assert (ready.plane, ready.blocks) == (at, len(keys))
            assert max(plane for _, plane in held.log) == at, "nothing of later planes has left a node"
            columns = slice(planes[at].offset_bytes, planes[at].offset_bytes + planes[at].bytes)
            assert np.array_equal(place[:, columns], data[:, columns])
            if at + 1 < len(planes):
                held.gates[at + 1].open()
        assert ready.plane == len(planes) - 1 and np.array_equal(place, data)


def test_layers_start_when_their_plane_is_there(peers: PeerCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plane leaves the nodes when every request has computed all layers before it. Were a layer to wait for a later plane, or for another
    request's load, none would ever come."""
    prompts = [text(LENGTH, seed) for seed in range(3)]
    with engine_on(peers, prompts) as engine:
        held, stopped = Held(peers, len(THREE.sources)), defaultdict(set)

        def told(state: RequestState, source: int) -> None:
            stopped[source].add(id(state))
            if len(stopped[source]) == len(prompts):
                held.log.append(("computed", source))
                held.gates[source].open()

        stops_of(monkeypatch, told)
        asked = [engine.submit(prompt, options=WARM) for prompt in prompts]
        responses = [request.result(WAIT_SECONDS) for request in asked]
    assert all(is_warm(response, prompt) for response, prompt in zip(responses, prompts, strict=True))
    order = list(dict.fromkeys(held.log))
    assert order == [(what, source) for source in range(len(THREE.sources)) for what in ("computed", "sent")]


def test_a_load_that_stands_still_holds_up_no_other_request(peers: PeerCluster) -> None:
    """Not even where one thread does all lookups."""
    warm, cold = text(LENGTH, 1), text(90, 2)
    with engine_on(peers, [warm], EngineConfig(io_threads=1)) as engine:
        held = Held(peers, len(THREE.sources))
        first = engine.submit(warm, options=WARM)
        assert held.gates[0].reached.wait(WAIT_SECONDS)
        assert engine.submit(cold, options=WARM).result(WAIT_SECONDS).tokens == alone(cold)
        assert not first.done and held.log == []
        for gate in held.gates:
            gate.open()
        assert is_warm(first.result(WAIT_SECONDS), warm)


def test_a_plane_that_comes_in_mid_turn_is_used_by_the_next_piece(peers: PeerCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both prompts in one turn of the engine, whose budget is without end: the warm one waits for no end of the long one."""
    warm, long = text(LENGTH, 1), text(40 * THREE.block, 2)
    waits, said = threading.Event(), []
    with engine_on(peers, [warm], EngineConfig(prefill_tokens=1 << 20)) as engine:
        held = Held(peers, len(THREE.sources))
        held.gates[0].open()
        stops_of(monkeypatch, lambda _, source: waits.set() if source == 1 else None)
        first = engine.submit(warm, options=WARM)
        assert waits.wait(WAIT_SECONDS)
        watched = model().steps

        def opens(state: RequestState, tokens: Any) -> Generator[int, None, Any]:
            if state.prompt_tokens == len(long) and state.length == THREE.block:  # in mid-turn, on the engine's thread
                for gate in held.gates:
                    gate.open()
                until(lambda: len(engine._mail) == len(THREE.sources), "two planes and the end of the load")
            return (yield from watched(state, tokens))

        monkeypatch.setattr(model(), "steps", opens)
        second = engine.submit(long, options=WARM)
        for name, request in (("warm", first), ("long", second)):
            request.listen(lambda piece, name=name: said.append(name))  # type: ignore[misc]  # bound now
        assert is_warm(first.result(WAIT_SECONDS), warm) and second.result(WAIT_SECONDS).tokens == alone(long)
    assert said[0] == "warm"
