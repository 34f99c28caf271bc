"""Commands with an old copy of the cluster map say so, with both epochs and what to do; clients of real nodes read the file again."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_tool import Cli
from client_tools import SMALL, WAIT_SECONDS, bytes_of, chain, store, until

from kvstore.cli.cluster import ask_nodes
from kvstore.client import Client, StoreOutcome
from kvstore.clustermap import ClusterMap
from kvstore.replay import story
from kvstore.server.local import LocalCluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "cluster", 4, k=2, m=1, capacity_bytes=64 << 20) as running:
        yield running


def next_epoch(cluster: LocalCluster) -> ClusterMap:
    """All nodes read a map with one epoch more."""
    before = ClusterMap.load(cluster.map_path)
    after = before.with_epoch([], [node.id for node in before.nodes])
    after.save(cluster.map_path)
    for node in range(cluster.nodes_count):
        cluster.kill(node, signal.SIGHUP)
    until(lambda: all(each.epoch == after.epoch for each in ask_nodes(after, 2.0, values=False)), "the new epoch at all nodes")
    return after


def test_commands_with_an_old_copy_of_the_map_say_so(cluster: LocalCluster, tmp_path: Path) -> None:
    cli, old = Cli(tmp_path), tmp_path / "old.toml"
    shutil.copy(cluster.map_path, old)
    assert "MAP_BEHIND" not in cli.run("status", "--map", old).stdout
    next_epoch(cluster)
    (tmp_path / "in").write_bytes(os.urandom(200_000))
    told = "has epoch 1, nodes have epoch 2"
    cli.run("put", "in", "--map", old).refused(2, "E137", str(old), told, "copy the nodes' map file there")
    status = cli.run("status", "--map", old)
    assert status.code == 0 and "health   WARN" in status.stdout and f"MAP_BEHIND  this map {told}" in status.stdout
    assert told in cli.run("explain", "MAP_BEHIND", "--map", old).stdout
    assert cli.run("put", "in", "--map", cluster.map_path).code == 0
    trace = Path(story.__file__).with_name("conversation_300.jsonl.gz")
    replay = cli.run("replay", trace, "--map", old, "--requests", "20", "--block-bytes", "320")
    assert sum(told in line for line in replay.stderr.splitlines()) == 1, "one line, however many stores"
    assert "stale_map" in replay.stdout
    missing = cli.run("get", "in", "-o", "out", "--map", old)
    missing.refused(1, "E403", f"this map {told}")
    shutil.copy(cluster.map_path, old)
    assert cli.run("get", "in", "-o", "out", "--map", old).code == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()


def test_a_client_of_real_nodes_reads_the_file_again_when_they_refuse(cluster: LocalCluster) -> None:
    with Client(ClusterMap.load(cluster.map_path), layout=SMALL) as client:
        store(client, chain(20, SMALL))
        for epoch in (2, 3):
            next_epoch(cluster)
            keys = chain(100, SMALL)
            done = client.store(keys, bytes_of(keys, SMALL), first_block=0).result(WAIT_SECONDS)
            assert (done.outcome, done.map_epoch, client.map.epoch) == (StoreOutcome.STORED, epoch, epoch)
            until(lambda: client.lookup(keys).hit_blocks == 100, "the last shards")  # noqa: B023  it is called before the next round
