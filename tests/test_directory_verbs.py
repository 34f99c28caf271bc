"""The window directory's verbs, in frames: who holds what, for how long, and who may say so."""

from __future__ import annotations

import pytest
from directory_tools import LIFETIME_SECONDS, Peer, keys_of, names, served
from server_tools import until

from kvstore import wire_directory
from kvstore.wire import Status, Verb

TICK_SECONDS = LIFETIME_SECONDS / 8192


def test_locate_answers_h_and_older_candidates_in_one_trip() -> None:
    with served() as directory:
        a, b = Peer(directory, "10.0.0.1:7600"), Peer(directory, "10.0.0.2:7600")
        keys = keys_of(1, 6)
        assert a.register(keys[[0, 2, 4]]) == 3 and b.register(keys[[2, 5]]) == 2
        found = names(Peer(directory, "10.0.0.3:7600").locate(keys))
        assert [sorted(each) for each in found] == [
            ["10.0.0.1:7600"], [], ["10.0.0.1:7600", "10.0.0.2:7600"], [], ["10.0.0.1:7600"], ["10.0.0.2:7600"],
        ]  # fmt: skip
        assert directory.stats["requests"]["locate"] == {Status.OK: 1}
        assert directory.stats["keys_located"] == 6 and directory.stats["keys_found"] == 4


def test_an_entry_lives_one_lifetime_after_its_last_use() -> None:
    with served() as directory:
        a = Peer(directory, "a:1")
        key = keys_of(2, 1)
        a.register(key)
        left = a.locate(key)[0][0].left_seconds
        assert LIFETIME_SECONDS <= left <= LIFETIME_SECONDS + TICK_SECONDS
        directory.now += 179.9
        assert names(a.locate(key)) == [["a:1"]], "asking is no use: only its holder knows of that"
        assert a.ask(Verb.TOUCH, key) == (Status.OK, 1)
        directory.now += 179.9
        assert names(a.locate(key)) == [["a:1"]]
        directory.now += 0.2 + TICK_SECONDS
        assert names(a.locate(key)) == [[]]
        assert a.ask(Verb.TOUCH, key) == (Status.OK, 0), "what is over stays over"


@pytest.mark.parametrize("jump_seconds", [181.0, 500.0, 720.0, 1500.0, 1e6, 1e9])
def test_no_entry_comes_back_after_a_long_silence(jump_seconds: float) -> None:
    """Expiries are kept in 16 bits: a clock that runs on without a word must not make them look young again."""
    with served() as directory:
        a = Peer(directory, "a:1")
        keys = keys_of(3, 500)
        a.register(keys)
        directory.now += 100.0
        a.register(keys[250:])
        directory.now += jump_seconds - 100.0
        alive = names(a.locate(keys[:250])) + names(a.locate(keys[250:]))
        assert alive == [[]] * 250 + ([["a:1"]] * 250 if jump_seconds < 280 else [[]] * 250)


def test_a_clock_that_goes_back_is_not_followed() -> None:
    with served() as directory:
        a = Peer(directory, "a:1")
        a.register(keys_of(4, 1))
        directory.now += 200.0
        assert names(a.locate(keys_of(4, 1))) == [[]]
        directory.now -= 200.0
        assert names(a.locate(keys_of(4, 1))) == [[]]


def test_owners_see_their_own() -> None:
    with served() as directory:
        a = Peer(directory, "a:1")
        key, mine = keys_of(5, 1), b"o" * 16
        a.register(key, owner=mine)
        assert names(a.locate(key)) == [[]] and names(a.locate(key, owner=mine)) == [["a:1"]]
        assert a.ask(Verb.FORGET, key) == (Status.OK, 0) and a.ask(Verb.FORGET, key, owner=mine) == (Status.OK, 1)


def test_four_holders_of_a_key_and_a_fifth_takes_the_place_of_the_one_that_expires_first() -> None:
    with served() as directory:
        peers = [Peer(directory, f"10.0.0.{n}:7600") for n in range(5)]
        key = keys_of(6, 1)
        for peer in peers[:4]:
            peer.register(key)
            directory.now += 1.0
        assert names(peers[4].locate(key)) == [[f"10.0.0.{n}:7600" for n in (3, 2, 1, 0)]], "the longest to live first"
        peers[0].ask(Verb.TOUCH, key)
        peers[4].register(key)
        assert sorted(names(peers[4].locate(key))[0]) == [f"10.0.0.{n}:7600" for n in (0, 2, 3, 4)]
        assert directory.stats["displaced"] == 1


def test_forget_by_key_and_all() -> None:
    with served() as directory:
        a, b = Peer(directory, "a:1"), Peer(directory, "b:1")
        keys = keys_of(7, 100)
        a.register(keys)
        b.register(keys)
        assert a.ask(Verb.FORGET, keys[:10]) == (Status.OK, 10)
        assert names(b.locate(keys[:10])) == [["b:1"]] * 10
        assert a.ask(Verb.FORGET, flags=wire_directory.FORGET_ALL) == (Status.OK, 90)
        assert names(b.locate(keys)) == [["b:1"]] * 100
        assert a.register(keys[:5]) == 5
        assert [sorted(each) for each in names(b.locate(keys[:6]))] == [["a:1", "b:1"]] * 5 + [["b:1"]], "at once after it"
        directory.now += 179.0
        assert [sorted(each) for each in names(b.locate(keys[:6]))] == [["a:1", "b:1"]] * 5 + [["b:1"]]


def test_forgetting_all_over_and_over_is_told_to_wait() -> None:
    with served() as directory:
        a = Peer(directory, "a:1")
        outcomes = []
        for _ in range(200):
            a.register(keys_of(8, 1))
            outcomes.append(a.ask(Verb.FORGET, flags=wire_directory.FORGET_ALL)[0])
        assert outcomes[0] == Status.OK and outcomes[-1] == Status.BUSY, "more than 64 times within one tick"
        directory.now += 100 * TICK_SECONDS
        a.register(keys_of(8, 1))
        assert a.ask(Verb.FORGET, flags=wire_directory.FORGET_ALL)[0] == Status.OK
        assert names(a.locate(keys_of(8, 1))) == [[]]


def test_what_an_earlier_start_of_an_agent_registered_counts_no_more() -> None:
    with served() as directory:
        old = Peer(directory, "a:1", incarnation=1)
        keys = keys_of(9, 20)
        old.register(keys)
        old.connection.close()
        until(lambda: directory.stats["agents_connected"] == 0, "its end is seen")
        assert names(Peer(directory, "b:1").locate(keys)) == [["a:1"]] * 20, "it may come back"
        new = Peer(directory, "a:1", incarnation=2)
        assert new.ask(Verb.TOUCH, keys[:3]) == (Status.OK, 0)
        assert names(new.locate(keys)) == [[]] * 20
        new.register(keys[:2])
        assert [(h.address, h.incarnation) for h in new.locate(keys[:1])[0]] == [("a:1", 2)]
        assert Peer(directory, "a:1", incarnation=1).ask(Verb.REGISTER, keys) == (Status.SUPERSEDED, 0)
        assert Peer(directory, "a:1", incarnation=2, token=5).ask(Verb.REGISTER, keys) == (Status.SUPERSEDED, 0), "and not its secret"


def test_an_agent_that_lost_its_connection_goes_on_with_another() -> None:
    with served() as directory:
        first = Peer(directory, "a:1")
        first.register(keys_of(10, 3))
        again = Peer(directory, "a:1")
        assert again.ask(Verb.TOUCH, keys_of(10, 3)) == (Status.OK, 3), "the first may be half open still"
        first.connection.close()
        assert again.ask(Verb.TOUCH, keys_of(10, 3)) == (Status.OK, 3)


def test_nobody_takes_over_the_name_of_an_agent_that_is_heard() -> None:
    with served() as directory:
        a = Peer(directory, "a:1")
        keys = keys_of(11, 10)
        a.register(keys)
        liar = Peer(directory, "a:1", incarnation=2**64 - 1)
        for verb, flags in ((Verb.REGISTER, 0), (Verb.TOUCH, 0), (Verb.FORGET, 0), (Verb.FORGET, wire_directory.FORGET_ALL)):
            assert liar.ask(verb, None if flags else keys, flags=flags) == (Status.SUPERSEDED, 0)
        assert names(a.locate(keys)) == [["a:1"]] * 10
        assert directory.stats["superseded"] == 4


def test_a_report_hides_an_agent_only_while_the_directory_does_not_hear_it_either() -> None:
    with served() as directory:
        a, b = Peer(directory, "a:1"), Peer(directory, "b:1")
        keys = keys_of(12, 4)
        a.register(keys)
        assert not b.report("a:1", 1), "one word against another"
        assert names(b.locate(keys)) == [["a:1"]] * 4
        a.connection.close()
        until(lambda: directory.stats["agents_connected"] == 0, "its end is seen")
        assert not b.report("a:1", 2) and not b.report("c:1", 1), "of another start, of nobody"
        assert b.report("a:1", 1)
        assert names(b.locate(keys)) == [[]] * 4 and directory.stats["agents_hidden"] == 1
        back = Peer(directory, "a:1")
        assert back.ask(Verb.TOUCH, keys[:1]) == (Status.OK, 1)
        assert names(b.locate(keys)) == [["a:1"]] * 4, "nothing was wiped"
        assert directory.stats["agents_hidden"] == 0


def test_agents_that_are_heard_come_first() -> None:
    with served() as directory:
        a, b = Peer(directory, "a:1"), Peer(directory, "b:1")
        key = keys_of(13, 1)
        a.register(key)
        directory.now += 1
        b.register(key)
        assert names(a.locate(key)) == [["b:1", "a:1"]]
        b.connection.close()
        until(lambda: directory.stats["agents_connected"] == 1, "its end is seen")
        assert names(a.locate(key)) == [["a:1", "b:1"]]


def test_silent_agents_are_forgotten_and_their_numbers_used_again() -> None:
    with served() as directory:
        for n in range(50):
            peer = Peer(directory, f"10.0.0.{n}:1")
            peer.register(keys_of(n, 10))
            peer.connection.close()
        watcher = Peer(directory, "w:1")
        watcher.register(keys_of(99, 1))
        until(lambda: directory.stats["agents_connected"] == 1, "their end is seen")
        assert directory.stats["agents"] == 51
        directory.now += 3 * LIFETIME_SECONDS
        watcher.locate(keys_of(1, 1))
        until(lambda: directory.stats["agents"] == 1, "those without a connection are forgotten")
        until(lambda: directory.stats["entries"] == 0, "all is swept")
        others = [Peer(directory, f"10.1.0.{n}:1") for n in range(50)]
        for n, peer in enumerate(others):
            peer.register(keys_of(200 + n, 5))
        for n in range(50):
            assert names(watcher.locate(keys_of(n, 10))) == [[]] * 10
            assert names(watcher.locate(keys_of(200 + n, 5))) == [[f"10.1.0.{n}:1"]] * 5


def test_a_connection_speaks_for_one_agent() -> None:
    with served() as directory:
        a = Peer(directory, "a:1")
        a.register(keys_of(14, 1))
        body = wire_directory.encode_agent(wire_directory.Speaker("b:1", 1, 1), keys_of(14, 1).tobytes())
        assert a.connection.ask(Verb.REGISTER, body).status == Status.BAD_REQUEST


def test_status_tells_what_there_is() -> None:
    with served(memory_bytes=8 << 20) as directory:
        Peer(directory, "a:1").register(keys_of(15, 7))
        status = directory.status()
        assert (status.entries, status.agents, status.memory_max_bytes, status.lifetime_ms) == (7, 1, 8 << 20, 180_000)
        assert status.keys_registered == 7 and 0 < status.memory_bytes <= status.memory_max_bytes
