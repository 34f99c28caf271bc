"""`kvstore explain KEY` against a real cluster: who holds what, what went and why, and what nobody knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_tool import Cli
from client_tools import NO_REUSE, SMALL, WAIT_SECONDS, chain, store, until_whole

from kvstore.client import Client
from kvstore.kernels import _native
from kvstore.server.local import LocalCluster
from kvstore.wire import Verb, encode_withdraw


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), capacity_bytes=128 << 20) as running:
        yield running


@pytest.fixture
def cli(tmp_path: Path, cluster: LocalCluster) -> Cli:
    return Cli(tmp_path, KVSTORE_MAP=str(cluster.map_path))


def test_a_stored_block_is_shown_shard_by_shard(cli: Cli, cluster: LocalCluster) -> None:
    with Client(cluster.map, layout=SMALL, config=NO_REUSE) as client:
        keys = chain(5, SMALL)
        store(client, keys)
        until_whole(client, keys)
    ran = cli.run("explain", keys[0].tobytes().hex())
    assert ran.code == 0 and "so       readable: 12 of 12 shards" in ran.stdout
    told = cli.run("explain", keys[0].tobytes().hex(), "--json").json["data"]
    assert sorted(node["held"][0]["shards"] for node in told["nodes"]) == [[shard] for shard in range(12)]
    assert told["readable"] is True and all(node["held"][0]["blocks"] == 5 for node in told["nodes"])
    for node in (1, 4, 9):
        cluster.kill(node)
    try:
        ran = cli.run("explain", keys[0].tobytes().hex())
        assert ran.code == 1 and "not readable: 9 of 12 shards are left, 10 are needed, 3 nodes do not answer" in ran.stdout
        assert ran.stdout.count("no answer: down, or too slow") == 3
    finally:
        for node in (1, 4, 9):
            cluster.restart(node)


def test_a_block_that_went_says_why_and_one_that_never_was_says_so(cli: Cli, cluster: LocalCluster) -> None:
    with Client(cluster.map, layout=SMALL, config=NO_REUSE) as client:
        keys = chain(3, SMALL)
        store(client, keys)
        until_whole(client, keys)
        write_id = int(client.lookup(keys).write_ids[0])
        assert isinstance(client._core, _native.ClientCore)
        everyone = [(node, int(Verb.WITHDRAW), encode_withdraw([(keys[0].tobytes(), write_id)])) for node in range(12)]
        assert all(status == 0 for status, _ in client._core.call_many(everyone, WAIT_SECONDS))
    ran = cli.run("explain", keys[0].tobytes().hex())
    assert (
        ran.code == 1 and "so       not there: withdrawn on 12 of 12 nodes" in ran.stdout and "withdrawn: 3 blocks, last used" in ran.stdout
    )
    ran = cli.run("explain", "ab" * 32)
    assert ran.code == 0 and "no extent begins with this block" in ran.stdout and ran.stdout.count("knows nothing of it") == 12
    cli.run("explain", "ab" * 20).refused(2, "E140", "a key of 40 hexadecimal digits", "64")
