"""The bundled engine over agents: window entries of one host serve the next turn on another, and the text is as without a cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
from client_tools import WAIT_SECONDS, cluster_of

from kvstore.client import Client, ClientConfig
from kvstore.client.agent.agent import Agent
from kvstore.client.agent.config import AgentConfig
from kvstore.client.agent.frames import PeerConfig
from kvstore.engine_integration.engine import Engine, RequestOptions, Response
from kvstore.engine_integration.model import TINY
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.speculate import generate
from kvstore.errors import MisuseError
from kvstore.kernels import _native
from kvstore.server.local import LocalCluster

pytestmark = pytest.mark.usefixtures("one_torch_thread")
B = TINY.block


@cache
def model() -> Model:
    return Model.random(TINY)


def alone(prompt: list[int], count: int) -> list[int]:
    """The model's own greedy answer, without a cache."""
    return generate(model(), model().begin(len(prompt)), prompt, count).tokens


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with cluster_of(tmp_path_factory.mktemp("cluster"), 3, k=2, m=1) as cluster:
        yield cluster


@pytest.fixture
def directory(cluster: LocalCluster) -> Iterator[str]:
    server = _native.DirectoryServer("127.0.0.1", 0, cluster16=cluster.map.tag, memory_bytes=16 << 20)
    yield f"127.0.0.1:{server.port}"
    server.stop()


@contextmanager
def host(cluster: LocalCluster, directory: str) -> Iterator[tuple[Engine, Agent]]:
    config = AgentConfig(
        directories=(directory,), slots=TINY.slots, older_blocks_max=TINY.encoder_layers, directory_seconds=5, fetch_seconds=5,
        peer=PeerConfig(silence_seconds=5),
    )  # fmt: skip
    with (
        Client(cluster.map, layout=model().layout, config=ClientConfig(block_tokens=B, promise_reuse_seconds=0)) as client,
        Agent(client, config=config) as agent,
        Engine(model(), agent) as engine,
    ):
        yield engine, agent


def ask(at: tuple[Engine, Agent], prompt: list[int], count: int = 20) -> Response:
    """Answered, stored, and known to the directory."""
    engine, agent = at
    response = engine.submit(prompt, options=RequestOptions(max_tokens=count, resume="exact")).result(WAIT_SECONDS)
    assert agent.flush(WAIT_SECONDS)
    return response


def test_turns_that_go_from_host_to_host_hit_the_windows_of_the_one_before(cluster: LocalCluster, directory: str) -> None:
    tokens = random.Random(1).choices(range(256), k=90)
    with host(cluster, directory) as one, host(cluster, directory) as two:
        for turn in range(3):
            response = ask((one, two)[turn % 2], tokens, 20)
            assert response.tokens == alone(tokens, 20)
            assert response.window == ("hit" if turn else "none"), turn
            assert turn == 0 or response.cached_tokens > response.prompt_tokens // 2
            tokens = tokens + response.tokens + random.Random(turn).choices(range(256), k=23)
        assert (one[1].counters.takes["peer"], two[1].counters.takes["peer"]) == (1, 1)


def test_where_prompts_part_the_second_pays_for_a_window_that_the_third_hits(cluster: LocalCluster, directory: str) -> None:
    head = random.Random(3).choices(range(256), k=3 * B + 5)
    with host(cluster, directory) as one, host(cluster, directory) as two:
        for at, how in ((one, "none"), (two, "exact"), (one, "hit")):
            tokens = head + random.Random(how).choices(range(256), k=3 * B)
            response = ask(at, tokens, 5)
            assert response.tokens == alone(tokens, 5) and response.window == how
            assert how == "none" or response.cached_tokens == (3 * B if how == "hit" else 0)


def test_the_windows_of_a_host_that_ended_are_missed_and_the_text_is_the_same(cluster: LocalCluster, directory: str) -> None:
    tokens = random.Random(2).choices(range(256), k=100)
    with host(cluster, directory) as one:
        ask(one, tokens)
    with host(cluster, directory) as two:
        response = ask(two, tokens)
        assert response.tokens == alone(tokens, 20)
        assert response.window == "exact" and two[1].counters.takes["peer"] == 0
        tokens = tokens + response.tokens + [7] * 23
        response = ask(two, tokens)
        assert response.tokens == alone(tokens, 20)
        assert response.window == "hit" and two[1].counters.takes["own"] == 1


def test_an_agent_for_windows_of_another_size_is_refused(cluster: LocalCluster) -> None:
    with (
        Client(cluster.map, layout=model().layout, config=ClientConfig(block_tokens=B)) as client,
        Agent(client) as agent,
        pytest.raises(MisuseError, match=r"E596.*134 tokens.*slots=22"),
    ):
        Engine(model(), agent)
