"""Rot on the disks of real daemons, found by a load: right bytes, dropped where it lies, shown in `kvstore status`, asked for no more."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from cli_tool import Cli
from client_tools import EMULATED, NO_REUSE, V41, Blocks, chain, load, store, until, until_whole
from faultpeer import Item, PeerCluster, Raw, Verdict
from server_tools import pages_dropped

from kvstore import wire
from kvstore.cli.cluster import ask_nodes
from kvstore.client import Client, LoadOutcome, Ticket
from kvstore.client.metrics import client_registry
from kvstore.keys import Keys
from kvstore.metrics import flat_values
from kvstore.record import ALIGN, Head, parse_head
from kvstore.server.local import LocalCluster
from kvstore.wire import Kind, Status, Verb

pytestmark = pytest.mark.skipif(EMULATED, reason="bytes on the disk of a daemon, told over TCP either way")
FLIPS = 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("rot"), 12, capacity_bytes=128 << 20) as running:
        yield running


def rot(cluster: LocalCluster, keys: Keys, nodes_count: int, seed: int) -> list[int]:
    """Flips FLIPS bytes in the pieces of the record that starts with this key, at as many nodes with data shards; which nodes."""
    dice, hurt = random.Random(seed), []
    for node in range(len(cluster.map.nodes)):
        for path in sorted((cluster.directory / cluster.map.nodes[node].id / "segments").glob("*.seg")):
            with path.open("r+b", buffering=0) as file:
                raw = file.read()
                for at in range(0, len(raw), ALIGN):
                    head = parse_head(raw[at:])
                    wanted = isinstance(head, Head) and head.extent_key == keys[0].tobytes() and head.shard < head.k
                    if not wanted or len(hurt) == nodes_count:
                        continue
                    assert isinstance(head, Head)
                    first = head.head_bytes + 24 * len(head.plane_bytes) * len(head.tags)
                    for place in dice.sample(range(at + first, at + head.record_bytes), FLIPS):
                        os.pwrite(file.fileno(), bytes([raw[place] ^ 0x20]), place)
                    hurt.append(node)
                os.fsync(file.fileno())
                until(partial(pages_dropped, file.fileno()), f"{path} is out of the page cache")
    assert len(hurt) == nodes_count
    return hurt


def errors(cluster: LocalCluster) -> list[float]:
    return [report.values['kvstore_disk_errors_total{kind="checksum"}'] for report in ask_nodes(cluster.map, 10)]


def test_rot_at_two_nodes_is_read_around_then_dropped_there_and_shown(cluster: LocalCluster, tmp_path: Path) -> None:
    cli = Cli(tmp_path, KVSTORE_MAP=str(cluster.map_path))
    with Client(cluster.map, layout=V41, config=NO_REUSE) as client:
        keys = chain(12, V41)
        data = store(client, keys)
        until_whole(client, keys)
        hurt = rot(cluster, keys, 2, seed=1)
        expected = [float(node in hurt) for node in range(12)]

        def both_have_dropped_it() -> bool:
            result, place = load(client, client.lookup(keys))  # one that lags is not asked of at all, by this load
            assert result.outcome is LoadOutcome.COMPLETE and (place == data).all()
            return errors(cluster) == expected

        until(both_have_dropped_it, "both nodes have found and dropped it")
        assert client.stats()["bad_shards"] >= 2
        found: list[Ticket] = []

        def all_have_answered() -> bool:
            found[:] = [client.lookup(keys)]  # which does not wait for more than ten
            return found[0].hit_blocks == len(keys) and int(found[0].extents["absent"][0]).bit_count() == 2

        until(all_have_answered, "a ticket that knows of both")
        ticket = found[0]
        before = client.stats()
        result, place = load(client, ticket)
        assert result.outcome is LoadOutcome.COMPLETE and (place == data).all()
        after = client.stats()
        assert all(after[name] == before[name] for name in ("bad_shards", "late_asked", "failed_shards")), "asked of others from the start"
        assert errors(cluster) == expected and client.stats()["bad_shard_reports_taken"] == 2
        metrics = flat_values(client_registry(client))
        assert metrics['kvstore_bad_shard_reports_total{result="taken"}'] == 2
    told = cli.run("status").stdout
    assert told.count("CHECKSUM_ERRORS") == 4 and "1 bad shards since its start" in told
    for node in hurt:
        assert cluster.map.nodes[node].id in told


def test_a_get_that_ends_at_once_has_told_of_the_rot_it_found(cluster: LocalCluster) -> None:
    """A process that loads once and goes: close() waits a moment for what is to be told."""
    before = errors(cluster)
    with Client(cluster.map, layout=V41, config=NO_REUSE) as client:
        keys = chain(6, V41)
        data = store(client, keys)
        until_whole(client, keys)
    (node,) = rot(cluster, keys, 1, seed=2)

    def got_and_told() -> bool:
        with Client(cluster.map, layout=V41) as client:
            result, place = load(client, client.lookup(keys))
            assert (place == data).all() and result.outcome is LoadOutcome.COMPLETE
        return client.stats()["bad_shard_reports_taken"] == min(1, client.stats()["bad_shards"]) == 1

    until(got_and_told, "a get that met it, and had told of it at its end")
    before[node] += 1
    until(lambda: errors(cluster) == before, "it was found")


# --- what a client says, and to whom ---


class Rotten:
    """Twelve peers, a chain on them, and one whose answers have a flipped byte although its disk is fine."""

    def __init__(self, peers: PeerCluster) -> None:
        self.client = Client(peers.map, layout=V41, config=NO_REUSE)
        self.keys: Keys = chain(5, V41)
        self.data: Blocks = store(self.client, self.keys)
        until_whole(self.client, self.keys)
        holders = [(shard, peer) for peer in peers.peers for held in peer.records.values() for shard in held if shard < 10]
        self.shard, self.peer = holders[0]
        self.peer.item_rule = flip

    def load(self) -> None:
        result, place = load(self.client, self.client.lookup(self.keys))
        assert result.outcome is LoadOutcome.COMPLETE and (place == self.data).all()

    def load_until(self, result: str) -> None:
        """Again where the peer lagged: a shard that did not come was not found bad."""

        def told() -> bool:
            self.load()
            return self.reports(result) == 1

        until(told, f"a report that ended {result}")

    def reports(self, result: str) -> float:
        return self.client.stats()[f"bad_shard_reports_{result}"]


async def flip(item: Item) -> bytes:
    return item.body[:-1] + bytes([item.body[-1] ^ 1])


@pytest.fixture
def rotten() -> Iterator[Rotten]:
    with PeerCluster() as peers:
        made = Rotten(peers)
        with made.client:
            yield made


def test_a_shard_is_told_of_once_however_many_loads_find_it_bad(rotten: Rotten) -> None:
    rotten.load_until("taken")
    for _ in range(5):
        rotten.load()
    rotten.client.close()
    key, write_id = next(iter(rotten.peer.records))
    assert rotten.peer.suspected == [(key, write_id, rotten.shard)]
    assert rotten.client.stats()["bad_shards"] > 1


def test_a_node_that_does_not_know_the_verb_is_told_nothing_more(rotten: Rotten) -> None:
    """As a daemon of before answers: a bare BAD_REQUEST, and the end of the connection. Lookups go on over the next."""

    async def as_before(verb: Verb, body: bytes, answer: bytes) -> Verdict:
        if verb != Verb.SUSPECT:
            return None
        return Raw(wire.encode(verb, kind=Kind.REPLY, status=Status.BAD_REQUEST, request_id=rotten.peer.frame.request_id))

    rotten.peer.reply_rule = as_before
    rotten.load_until("unsent")
    more = chain(5, V41)
    data = store(rotten.client, more)
    until_whole(rotten.client, more)
    result, place = load(rotten.client, rotten.client.lookup(more))
    assert result.outcome is LoadOutcome.COMPLETE and (place == data).all()
    rotten.load()
    rotten.client.close()
    assert rotten.peer.asked[Verb.SUSPECT] == 1 and rotten.reports("taken") == 0


def test_it_does_not_matter_whether_a_report_arrives(rotten: Rotten) -> None:
    async def cut(verb: Verb, body: bytes, answer: bytes) -> Verdict:
        if verb == Verb.SUSPECT:
            raise ConnectionError
        return None

    rotten.peer.reply_rule = cut
    rotten.load_until("unsent")
    rotten.load()
    assert rotten.client.lookup(rotten.keys).hit_blocks == len(rotten.keys)
