"""The directory's table against a dict, its memory cap, and its growth: over the wire, with a clock that the test turns."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from directory_tools import DEADLINE_SECONDS, LIFETIME_SECONDS, Peer, Served, keys_of, names, served

from kvstore import wire, wire_directory
from kvstore.client.agent.directory import Keys
from kvstore.wire import Status, Verb

TICK_SECONDS = LIFETIME_SECONDS / 8192
SEGMENT_BYTES = 64 << 10
BOOK_BYTES = 16 * 65536  # of agents, there from the start


class Oracle:
    """What the directory should answer: key -> agent -> when it expires, at the earliest."""

    def __init__(self) -> None:
        self.expiry: dict[bytes, dict[str, float]] = {}

    def put(self, keys: list[bytes], agent: str, now: float) -> None:
        for key in keys:
            self.expiry.setdefault(key, {})[agent] = now + LIFETIME_SECONDS

    def touch(self, keys: list[bytes], agent: str, now: float) -> int:
        found = [key for key in keys if agent in self.holders(key, now)]
        self.put(found, agent, now)
        return len(found)

    def forget(self, keys: list[bytes], agent: str, now: float) -> int:
        return sum(self.expiry.get(key, {}).pop(agent, 0.0) > now for key in keys)

    def holders(self, key: bytes, now: float) -> list[str]:
        return sorted(agent for agent, until in self.expiry.get(key, {}).items() if until > now)


@pytest.mark.parametrize("seed", range(4))
def test_the_table_answers_as_a_dict_does(seed: int) -> None:
    dice = random.Random(seed)
    with served() as directory:
        agents = [f"10.0.0.{n}:7600" for n in range(4)]
        peers = dict(zip(agents, (Peer(directory, agent) for agent in agents), strict=True))
        pool, oracle, step = keys_of(1000 + seed, 3000), Oracle(), 0
        for _ in range(300):
            step += dice.choice((1, 1, 10, 100, 1000, 9000))  # whole ticks and a half: no answer hangs on how one is rounded
            directory.now = 1000.0 + (step + 0.5) * TICK_SECONDS
            rows = dice.sample(range(len(pool)), dice.choice((1, 7, 200, 1024)))
            keys, agent = pool[rows], dice.choice(agents)
            raw, what = [key.tobytes() for key in keys], dice.random()
            if what < 0.35:
                assert peers[agent].register(keys) == len(rows)
                oracle.put(raw, agent, directory.now)
            elif what < 0.5:
                assert peers[agent].ask(Verb.TOUCH, keys) == (Status.OK, oracle.touch(raw, agent, directory.now))
            elif what < 0.6:
                assert peers[agent].ask(Verb.FORGET, keys) == (Status.OK, oracle.forget(raw, agent, directory.now))
            elif what < 0.62:
                peers[agent].ask(Verb.FORGET, flags=wire_directory.FORGET_ALL)
                oracle.forget(list(oracle.expiry), agent, directory.now)
            else:
                found = names(peers[agent].locate(keys))
                assert [sorted(held) for held in found] == [oracle.holders(key, directory.now) for key in raw]
        assert directory.stats["evicted"] == directory.stats["displaced"] == 0 and directory.stats["expired"] > 0


def fill(directory: Served, peers: list[Peer], count: int, seed: int = 7) -> Keys:
    keys = np.frombuffer(random.Random(seed).randbytes(32 * count), np.uint8).reshape(count, 32)
    for at, first in enumerate(range(0, count, wire.KEYS_MAX)):
        part = keys[first : first + wire.KEYS_MAX]
        assert peers[at % len(peers)].register(part) == len(part)
    return keys


def test_it_keeps_within_its_memory_and_loses_what_would_have_expired_first() -> None:
    segments = 16
    with served(memory_bytes=BOOK_BYTES + segments * (SEGMENT_BYTES + 64)) as directory:
        peers = [Peer(directory, f"10.0.0.{n}:1") for n in range(4)]
        old = fill(directory, peers, 3 * 8192, seed=1)
        directory.now += 60
        young = fill(directory, peers, 12 * 8192, seed=2)
        stats = directory.stats
        assert stats["entries"] <= segments * 4096 and stats["entries"] + stats["evicted"] == len(old) + len(young)
        assert stats["memory_bytes"] <= stats["memory_max_bytes"], "the cap is kept"
        assert stats["entries"] > 0.95 * segments * 4096, "and all of it is used"
        found_old = sum(bool(held) for part in np.array_split(old, 48) for held in peers[0].locate(part))
        assert found_old < 0.02 * len(old), "the old went first"
        found = sum(bool(held) for part in np.array_split(young, 192) for held in peers[0].locate(part))
        assert found == stats["entries"] - found_old


def test_a_segment_is_well_filled_before_it_is_cut() -> None:
    with served() as directory:
        fill(directory, [Peer(directory, "a:1")], 40 * 8192)
        stats = directory.stats
        assert stats["evicted"] == 0
        assert stats["memory_bytes"] / stats["entries"] < 32


def test_one_agent_cannot_fill_it_alone() -> None:
    with served() as directory:
        a, b = Peer(directory, "a:1"), Peer(directory, "b:1")
        keys = keys_of(3, wire.KEYS_MAX)
        done = 0
        for n in range(130):
            keys = keys.copy()
            keys[:, 0], keys[:, 1] = n & 255, n >> 8
            done += a.register(keys)
        assert done == 1 << 20, "what is past its limit is not taken"
        assert directory.stats["keys_refused"] == 130 * wire.KEYS_MAX - (1 << 20)
        assert b.register(keys) == len(keys)


def test_growing_never_holds_up_an_answer() -> None:
    """Ten doublings, and no answer to a batch takes long. Generous, for a machine that others use as well."""
    with served() as directory:
        peer = Peer(directory, "a:1")
        slowest, dice = [], random.Random(5)
        for _ in range(110):
            keys = np.frombuffer(dice.randbytes(32 * 8192), np.uint8).reshape(8192, 32)
            body = wire_directory.encode_agent(peer.speaker, keys.tobytes(), clock_ms=int(directory.now * 1000))
            began = time.perf_counter()
            assert peer.connection.ask(Verb.REGISTER, body).status == Status.OK
            slowest.append(time.perf_counter() - began)
        assert sorted(slowest)[-5] < 0.1 < DEADLINE_SECONDS
        assert directory.stats["entries"] == 110 * 8192


def test_keys_with_four_holders_each_lose_none_while_there_is_room() -> None:
    """Holders of a key share two buckets: these fill in steps of four."""
    with served(memory_bytes=64 << 20) as directory:
        peers = [Peer(directory, f"10.0.0.{n}:1") for n in range(4)]
        keys = keys_of(6, 40_000)
        for part in np.array_split(keys, 40):
            for peer in peers:
                peer.register(part)
        stats = directory.stats
        assert stats["entries"] == 160_000 and stats["evicted"] == stats["displaced"] == 0
        assert stats["memory_bytes"] / stats["entries"] < 80
