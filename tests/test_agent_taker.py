"""What waits at an agent: one that is slow to come, or never does, holds up no other; what is whole is lost with its agent alone."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from client_tools import until

from kvstore.client.agent import bodies, frames
from kvstore.client.agent.arena import Arena
from kvstore.client.agent.frames import Offer
from kvstore.client.agent.handoff import HandoffOutcome, HandoffSender, begin, send_handoff
from kvstore.client.agent.inbox import Arrival, ArrivalState, HandoffInbox
from kvstore.client.agent.link import Kind, Link, Message
from kvstore.client.agent.moving import NOTE
from kvstore.client.agent.peer_server import PeerServer
from kvstore.client.agent.peers import Peers
from kvstore.client.agent.session import Session
from kvstore.client.agent.taker import Taker
from kvstore.wire import Status

WAIT_SECONDS = 20.0
MIB = 1 << 20
KEY = "ab" * 32


class Adopter:
    """As much of an agent as takes in windows."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []

    def adopt_window(self, key: bytes, sealed: memoryview) -> bool:
        self.entries.append(bytes(sealed))
        return True


@contextmanager
def taker_of(handoff_bytes: int = 16 * MIB, one_bytes: int = 16 * MIB) -> Iterator[tuple[Taker, str, Peers]]:
    taker = Taker(bytes(16), handoff_bytes, one_bytes)
    server = PeerServer("127.0.0.1", 0, handoffs=taker.inbox)
    with Peers() as peers:
        yield taker, server.address, peers
    taker.close()
    server.close()


def begun(peers: Peers, address: str, size: int = 5, note: bytes = b"") -> HandoffSender:
    sender = begin(peers, address, [(KEY, size)], note=note, deadline_seconds=WAIT_SECONDS)
    assert isinstance(sender, HandoffSender), sender
    return sender


def give(peers: Peers, address: str, data: bytes, note: bytes = b"") -> None:
    assert send_handoff(peers, address, {KEY: data}, note=note, deadline_seconds=WAIT_SECONDS) is HandoffOutcome.DONE


def test_a_handoff_that_is_not_whole_holds_up_no_other() -> None:
    with taker_of() as (taker, address, peers):
        slow = begun(peers, address)
        give(peers, address, b"whole")
        arrival = taker.take(None, 0.0)
        assert arrival is not None and bytes(arrival.section(KEY) or b"") == b"whole"
        assert taker.take(None, 0.0) is None
        taker.inbox.put_back(arrival)
        again = taker.take(arrival.id, 0.0)
        assert again is arrival
        taker.inbox.release(arrival)
        slow.put(KEY, b"12345")
        assert slow.commit(WAIT_SECONDS) is HandoffOutcome.DONE
        assert taker.take(slow.id, WAIT_SECONDS) is not None


def test_windows_that_do_not_come_hold_up_no_other_and_refused_offers_cost_nothing() -> None:
    """An agent that gives its windows away asks again every 50 ms where there is no room: those offers are not waited for."""
    adopter = Adopter()
    with taker_of() as (taker, address, peers):
        taker.watch(adopter)  # type: ignore[arg-type]  # as much of an agent as is asked of it
        stuck = [begun(peers, address, 60 * MIB, NOTE) for _ in range(2)]
        for _ in range(200):
            assert begin(peers, address, [(KEY, 60 * MIB)], note=NOTE) is HandoffOutcome.BUSY
        give(peers, address, b"entry", NOTE)
        until(lambda: adopter.entries == [b"entry"], "the entry", 5.0)
        assert not taker.waiting, "windows are nobody's to take"
        for sender in stuck:
            sender.abort()


def test_what_no_worker_could_ever_take_is_refused() -> None:
    with taker_of(16 * MIB, 1 * MIB) as (_, address, peers):
        assert begin(peers, address, [("rows", MIB + 1)]) is HandoffOutcome.TOO_LARGE
        begun(peers, address, MIB).abort()


# --- a drain ---


def test_a_drain_gives_what_is_whole_past_a_dead_agent_and_one_that_never_ends() -> None:
    """Of two places the first accepts connections and says nothing; what is not whole goes on where it comes from."""
    with socket.create_server(("127.0.0.1", 0)) as deaf, taker_of() as (other, there, _), taker_of() as (taker, address, peers):
        stuck = begun(peers, address)
        for number in range(4):
            give(peers, address, b"%05d" % number)
        began = time.monotonic()
        moved = taker.forward(peers, [f"127.0.0.1:{deaf.getsockname()[1]}", there], began + 8.0)
        assert (moved.entries, moved.left) == (4, 0)
        assert time.monotonic() - began < 8.0
        found = [other.take(None, 0.0) for _ in range(4)]
        assert sorted(bytes(arrival.section(KEY) or b"") for arrival in found if arrival) == [b"%05d" % number for number in range(4)]
        stuck.put(KEY, b"12345")
        assert stuck.commit(WAIT_SECONDS) is HandoffOutcome.LOST, "whoever has it answers it"


def test_a_drain_with_nobody_to_give_to_lets_senders_go_on_at_once() -> None:
    with taker_of() as (taker, address, peers):
        stuck = begun(peers, address)
        began = time.monotonic()
        taker.forward(peers, [], began + 60.0)
        assert time.monotonic() - began < 30.0
        stuck.put(KEY, b"12345")
        assert stuck.commit(WAIT_SECONDS) is HandoffOutcome.LOST


def test_a_drain_asks_again_where_there_is_no_room_for_now() -> None:
    busy = [True]
    inbox = HandoffInbox(MIB, accept=lambda offer: Status.BUSY if busy.pop() else Status.OK)
    busy[:] = [False, True, True]
    server = PeerServer("127.0.0.1", 0, handoffs=inbox)
    with taker_of() as (taker, address, peers):
        give(peers, address, b"whole")
        moved = taker.forward(peers, [server.address], time.monotonic() + WAIT_SECONDS)
        assert (moved.entries, moved.left, inbox.stats()["committed"]) == (1, 0, 1)
    server.close()


def test_a_drain_waits_for_an_agent_that_is_just_starting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, taker_of() as (taker, address, peers), taker_of() as (other, _, _):
        place = ("127.0.0.1", taken.getsockname()[1])
        taken.close()
        give(peers, address, b"whole")
        started: list[PeerServer] = []

        def asked(outcome: str, sent_bytes: int) -> None:
            if outcome == "unreachable" and not started:
                started.append(PeerServer(*place, handoffs=other.inbox))

        peers.gave = asked  # type: ignore[method-assign]  # told of each that was not taken
        moved = taker.forward(peers, [f"{place[0]}:{place[1]}"], time.monotonic() + WAIT_SECONDS)
        assert (moved.entries, moved.left, other.waiting) == (1, 0, True)
        started[0].close()


# --- an inbox that somebody is just looking at ---


def whole(inbox: HandoffInbox, number: int) -> Arrival:
    offer = Offer(bytes([number]) * 16, bytes(16), (("none", 0),), 4096, 600)
    assert inbox.offer(offer, "link") is Status.OK
    return inbox._arrivals[offer.id]


def test_what_was_committed_or_taken_in_the_same_moment_is_not_lost() -> None:
    """A sweep, or the end of a connection, that listed it before."""
    inbox = HandoffInbox(MIB)
    one, two = whole(inbox, 1), whole(inbox, 2)
    assert one._commit(0.0) is Status.OK
    assert inbox._lose([one, two], "lost") == 1, "the one that is not whole"
    assert (one.state, two.state) == (ArrivalState.COMPLETE, ArrivalState.LOST)
    assert inbox.take(one.id) is one
    assert inbox._lose([one], "expired", ArrivalState.COMPLETE) == 0
    assert inbox.stats()["arrivals"] == 1


def test_what_is_not_agreed_to_is_forgotten_at_once_and_what_nobody_took_is_told(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    inbox = HandoffInbox(MIB, clock=lambda: now[0])
    digest = frames.handoff_digest(bytes([1]) * 16, [[]])
    refused, asked = whole(inbox, 1), list[Arrival]()

    def agree(arrival: Arrival) -> Status:
        asked.append(arrival)
        return Status.BAD_VERSION

    inbox.agree = agree
    assert [inbox.commit(refused.id, digest) for _ in range(3)] == [Status.BAD_VERSION, Status.NOT_FOUND, Status.NOT_FOUND]
    assert (asked, refused.state) == ([refused], ArrivalState.LOST), "a peer that asks again costs no second look"
    inbox.agree = None
    assert inbox.commit(whole(inbox, 1).id, digest) is Status.OK
    now[0] = 61.0
    inbox.sweep()
    assert [record.message for record in caplog.records] == ["handoffs are lost that nobody took within 60 s: 1"]


def test_a_sender_may_not_be_silent_for_as_long_as_it_likes() -> None:
    now = [0.0]
    inbox = HandoffInbox(MIB, silent_seconds=60, clock=lambda: now[0])
    arrival = whole(inbox, 1)
    now[0] = 61.0
    inbox.sweep()
    assert arrival.state is ArrivalState.LOST


# --- a worker that goes in the middle of it ---


class Host:
    """As much of an agent process as a session needs."""

    def __init__(self, taker: Taker, peers: Peers) -> None:
        self.memory = np.zeros(16 * MIB, np.uint8)
        self.arena = Arena(16 * MIB)
        self.pool = ThreadPoolExecutor(1)
        self.quota_bytes = 16 * MIB
        self.draining = False
        self.counts: list[tuple[str, str]] = []
        self.peers = peers
        self._taker = taker

    def taker_of(self, agent: Any) -> Taker:
        return self._taker

    def count(self, what: str, result: str) -> None:
        self.counts.append((what, result))


@contextmanager
def session_of(taker: Taker, peers: Peers) -> Iterator[tuple[Session, Link]]:
    ours, theirs = socket.socketpair()
    host = Host(taker, peers)
    session = Session(host, ours)  # type: ignore[arg-type]  # as much of a process as is asked of it
    session._agent = host  # type: ignore[assignment]  # likewise of an agent
    session._own = np.zeros(MIB, np.uint8)
    worker = Link(theirs)
    try:
        yield session, worker
    finally:
        session.end()
        session.link.dispose()
        worker.dispose()
        host.pool.shutdown()


TAKE = Message(Kind.TAKE, 7, bodies.TakeAsked(bytes(16), 0.0).encode())


def test_a_worker_that_goes_while_it_takes_a_handoff_leaves_it_to_another() -> None:
    with taker_of() as (taker, address, peers), session_of(taker, peers) as (session, worker):
        give(peers, address, b"whole")
        worker.close()
        session._take_handoff(TAKE)
        assert taker.inbox.offers(taken=False), "its worker is gone"
        session.end()
        assert session.host.arena.taken_bytes == 0
    with taker_of() as (taker, address, peers), session_of(taker, peers) as (session, worker):
        give(peers, address, b"whole")
        (arrival,) = taker.inbox._arrivals.values()
        section = arrival.section

        def released(name: str, deadline_seconds: float = 0.0) -> memoryview | None:
            session._release(TAKE.number)
            return section(name, deadline_seconds)

        arrival.section = released  # type: ignore[method-assign]  # the worker gives up while it is copied
        session._take_handoff(TAKE)
        assert taker.inbox.offers(taken=False)
        assert session.host.arena.taken_bytes == 0
        arrival.section = section  # type: ignore[method-assign]  # as it was
        session._take_handoff(TAKE)
        assert not taker.inbox.offers()
        assert session.host.arena.taken_bytes > 0
        worker.receive()
        assert worker.receive()[0].kind == Kind.ARRIVED


@pytest.mark.parametrize("why", ["called off", "worker gone"])
def test_a_handoff_whose_worker_has_gone_on_is_not_committed(why: str) -> None:
    """The agent stood still for longer than the worker waits: GIVE and CANCEL lie in its socket one behind the other."""
    asked = bodies.GiveAsked("", ((KEY, 0, 5),), b"", 10.0)
    with taker_of() as (taker, address, peers), session_of(taker, peers) as (session, _):
        message = Message(Kind.GIVE, 9, bodies.GiveAsked(address, asked.sections, b"", 10.0).encode())
        session._asked.add(9)
        if why == "called off":
            session._cancel(9)
        else:
            session.end()
        session._give(message)
        until(lambda: taker.inbox.stats()["arrivals"] == 0, "the other side to forget it")
        assert taker.inbox.stats().get("committed", 0) == 0
        assert not session._called_off
        session._asked.add(10)
        session._cancel(11)
        assert not session._called_off, "of a request that is none"
