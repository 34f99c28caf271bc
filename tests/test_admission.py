"""Admission: what nodes vote, that the majority decides for all twelve before a byte is sent, and that no engine sees an error of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from client_tools import NO_REUSE, SMALL, WAIT_SECONDS, bytes_of, chain, load
from store_tools import OWNER, Store, key_of, record_of

from kvstore.cli.selftest import self_test
from kvstore.client import Client, ClientConfig, StoreOutcome, StoreResult
from kvstore.clustermap import ClusterMap, Node, Rules
from kvstore.errors import ConfigError
from kvstore.keys import Keys
from kvstore.record import build
from kvstore.server.local import LocalCluster
from kvstore.wire import Vote

HALF_DAY_BUCKETS = 12 * 60
PAGE = 4096


def keys(*numbers: int) -> Keys:
    return np.frombuffer(b"".join(key_of(n) for n in numbers), np.uint8).reshape(-1, 32)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Store]:
    store = Store(str(tmp_path / "data"), virtual_clock=True)
    assert store.wait_started(10)
    yield store
    store.close()


def test_a_node_without_rules_votes_for_everything(node: Store) -> None:
    assert node.admit(OWNER, keys(1, 2, 3), 100) == [Vote.YES] * 3


def test_under_second_touch_a_node_votes_for_what_it_was_asked_for_before(node: Store) -> None:
    node.set_admission(True, 0)
    assert node.admit(OWNER, keys(1, 2), 100) == [Vote.UNSEEN] * 2
    assert node.admit(OWNER, keys(2, 3, 1), 100) == [Vote.YES, Vote.UNSEEN, Vote.YES]
    assert node.admit(bytes(15) + b"\7", keys(1), 100) == [Vote.UNSEEN], "another owner's is another key"
    assert node.stats()["votes_yes_total"] == 2 and node.stats()["votes_unseen_total"] == 4


def test_what_was_asked_for_is_known_for_half_a_day_and_forgotten_after_a_day(node: Store) -> None:
    node.set_admission(True, 0)
    start = 10 * HALF_DAY_BUCKETS
    node.admit(OWNER, keys(1, 2), start + HALF_DAY_BUCKETS - 1)
    assert node.admit(OWNER, keys(1), start + 2 * HALF_DAY_BUCKETS - 2) == [Vote.YES]
    assert node.admit(OWNER, keys(2), start + 3 * HALF_DAY_BUCKETS) == [Vote.UNSEEN]
    assert node.admit(OWNER, keys(1), start + 30 * HALF_DAY_BUCKETS) == [Vote.UNSEEN]


def test_past_its_budget_a_node_votes_for_second_touches_and_overdrawn_for_nothing(node: Store) -> None:
    node.set_admission(False, 24 * 10 * PAGE)  # ten pages an hour
    number = iter(range(100, 1000))

    def write(pages: int, bucket: int) -> None:
        for _ in range(pages):
            assert node.put(build(record_of(next(number), blocks=1, plane_bytes=(320,), bucket=bucket))) == 0

    assert node.admit(OWNER, keys(1), 1000) == [Vote.YES]
    write(10, 1000)
    assert node.admit(OWNER, keys(1, 2), 1000) == [Vote.YES, Vote.BUDGET]
    write(10, 1000)
    assert node.admit(OWNER, keys(1), 1000) == [Vote.BUDGET]
    assert node.admit(OWNER, keys(1, 3), 1000 + 30) == [Vote.YES, Vote.BUDGET], "half an hour gives five pages back"
    assert node.admit(OWNER, keys(4), 1000 + 90) == [Vote.YES]
    write(1, 1000 + 600)  # saved up: an hour's worth at most
    write(10, 1000 + 600)
    assert node.admit(OWNER, keys(5), 1000 + 600) == [Vote.BUDGET]


@pytest.fixture(scope="module")
def picky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("picky"), capacity_bytes=256 << 20, rules=Rules(admit="second-touch")) as cluster:
        yield cluster


@pytest.fixture
def client(picky: LocalCluster) -> Iterator[Client]:
    with Client(picky.map, layout=SMALL, config=NO_REUSE) as made:
        yield made


def put(client: Client, prompt: Keys, first: int = 0) -> StoreResult:
    return client.store(prompt, bytes_of(prompt[first:], SMALL), first_block=first).result(WAIT_SECONDS)


def test_the_second_asking_is_written_whole_and_the_first_leaves_nothing_anywhere(picky: LocalCluster, client: Client) -> None:
    prompt = chain(100, SMALL)
    sent = client.stats()["shards_acknowledged"] + client.stats()["shards_refused"]
    first = put(client, prompt)
    assert (first.outcome, first.blocks, first.extents_declined, first.acks) == (StoreOutcome.DECLINED, 0, 2, ())
    assert client.stats()["shards_acknowledged"] + client.stats()["shards_refused"] == sent, "no byte was sent"
    assert client.stats()["bytes_declined"] >= 100 * SMALL.block_bytes
    assert client.lookup(prompt).hit_blocks == 0
    with Client(picky.map, layout=SMALL, config=NO_REUSE) as another:  # the second touch comes through another host
        again = put(another, prompt)
        assert again.outcome is StoreOutcome.STORED and again.blocks == 100 and again.extents_declined == 0
        ticket = another.lookup(prompt)
        result, place = load(another, ticket)
    assert result.blocks == 100 and np.array_equal(place, bytes_of(prompt, SMALL))


def test_of_a_run_the_leading_extents_that_were_asked_for_are_written(client: Client) -> None:
    prompt = chain(200, SMALL)
    put(client, prompt[:100])
    result = put(client, prompt)
    assert (result.outcome, result.blocks, result.extents_declined) == (StoreOutcome.STORED, 128, 2)
    assert client.lookup(prompt).hit_blocks == 128
    assert put(client, prompt, first=128).blocks == 72


def test_flush_waits_for_stores_that_wait_for_votes(client: Client) -> None:
    prompts = [chain(10, SMALL) for _ in range(20)]
    futures = [client.store(p, bytes_of(p, SMALL), first_block=0) for p in prompts]
    assert client.flush(WAIT_SECONDS) and all(future.done() for future in futures)
    assert {future.result(0).outcome for future in futures} == {StoreOutcome.DECLINED}


def test_a_client_that_closes_leaves_no_store_undone(picky: LocalCluster) -> None:
    made = Client(picky.map, layout=SMALL, config=NO_REUSE)
    prompt = chain(10, SMALL)
    futures = [made.store(prompt, bytes_of(prompt, SMALL), first_block=0) for _ in range(30)]
    made.close()
    assert all(future.done() for future in futures)


def test_the_majority_decides_for_all_twelve_when_some_have_forgotten(picky: LocalCluster, client: Client) -> None:
    few, most = chain(10, SMALL), chain(10, SMALL)
    put(client, few)
    for index in range(4):
        picky.restart(index)
    client.lookup(few)
    result = put(client, few)
    assert result.outcome is StoreOutcome.STORED and result.acks[0] >= 11
    put(client, most)
    for index in range(8):
        picky.restart(index)
    client.lookup(most)
    assert put(client, most).outcome is StoreOutcome.DECLINED
    assert client.stats()["withdrawals"] == 0, "nothing was half stored"
    assert put(client, most).outcome is StoreOutcome.STORED


def test_who_was_told_to_store_stores_without_asking(picky: LocalCluster) -> None:
    with Client(picky.map, layout=SMALL, config=ClientConfig(ask_first=False)) as made:
        assert put(made, chain(3, SMALL)).outcome is StoreOutcome.STORED
    assert self_test(picky).nodes_stopped == 2, "so does kvstore up, when it tries itself out"


def test_where_no_node_answers_a_store_fails_as_ever(tmp_path: Path) -> None:
    nodes = [Node(f"node-{i:02}", f"host-{i}", f"127.0.0.1:{10_001 + i}") for i in range(12)]
    nowhere = ClusterMap.local(nodes, rules=Rules(admit="second-touch"))
    with Client(nowhere, layout=SMALL, config=NO_REUSE) as made:
        assert put(made, chain(3, SMALL)).outcome is StoreOutcome.FAILED


def test_the_rules_stand_in_the_map_and_mistakes_are_told() -> None:
    nodes = [Node("node-00", "host", "127.0.0.1:7400")]
    rules = Rules("s3fifo", "second-touch", 500_000_000_000)
    made = ClusterMap.local(nodes, rules=rules)
    assert made.rules == rules and ClusterMap.parse(made.to_toml()) == made
    assert 'policy = "s3fifo"' in made.to_toml() and "admit" not in ClusterMap.local(nodes).to_toml()
    text = ClusterMap.local(nodes).to_toml()
    for line, says in (
        ('policy = "fifo"', "write lru, s3fifo, sieve"),
        ('admit = "some"', "write all, second-touch"),
        ('write_budget = "9 lots"', ""),
    ):
        with pytest.raises(ConfigError, match=says or "not a size"):
            ClusterMap.parse(f"{line}\n{text}")
