"""A request that is given away is answered by one process only: what the other side cannot take, or gets too late, stays here."""

from __future__ import annotations

import json
import os
import queue
import signal
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from client_tools import cluster_of, until
from engine_giver import DRAFTING, Watched, watched
from test_engine_handing import WAIT_SECONDS, Recorder, alone, model, packed, prompt_of
from test_engine_handing_faults import assert_set, taker_of

from kvstore.client import Client, ClientConfig
from kvstore.client.agent import handoff
from kvstore.client.agent.frames import Offer
from kvstore.client.agent.handoff import HandoffOutcome, HandoffSender, begin, send_handoff
from kvstore.client.agent.inbox import HandoffInbox
from kvstore.client.agent.moving import NOTE
from kvstore.client.agent.peer_server import PeerServer
from kvstore.client.agent.peers import Peers
from kvstore.engine_integration.engine import Engine, EngineConfig, Request, RequestOptions
from kvstore.engine_integration.engine.handing import Takeovers, settings_of, to
from kvstore.engine_integration.model.model import Model
from kvstore.errors import LayoutError, MisuseError
from kvstore.wire import Status

pytestmark = pytest.mark.usefixtures("one_torch_thread")
PROMPT = 40
WORDS: dict[str, Any] = {"max_tokens": 60}


@cache
def text() -> list[int]:
    return alone(prompt_of(PROMPT), WORDS)


@cache
def page() -> int:
    with Engine(model(), None) as engine:
        return engine.config.cache_bytes // (engine.pages.capacity or 1)


@contextmanager
def pair(decode: Engine, cache: Client | None = None, **options: Any) -> Iterator[tuple[Engine, Takeovers, str, Peers]]:
    """A prefill engine, and who takes over for `decode`, at an address."""
    inbox = HandoffInbox(64 << 20)
    takeovers = Takeovers(decode, inbox, **options)
    server = PeerServer("127.0.0.1", 0, handoffs=inbox)
    with Engine(model(), cache) as prefill, Peers() as peers:
        yield prefill, takeovers, server.address, peers
    takeovers.close()
    server.close()
    assert inbox.stats()["arrivals"] == 0


@pytest.mark.parametrize(
    ("why", "outcome"),
    [
        ("its answer does not fit", "too_large"), ("other weights", "refused"), ("takeovers closed", "busy"), ("engine closed", "busy"),
        ("queue full", "busy"),
    ],
)  # fmt: skip
def test_what_the_other_engine_cannot_take_is_answered_here(why: str, outcome: str, caplog: pytest.LogCaptureFixture) -> None:
    other = Model.random(DRAFTING, seed=1) if why == "other weights" else model()
    config = EngineConfig(cache_bytes=5 * page()) if why == "its answer does not fit" else EngineConfig(running_max=1, queue_max=0)
    with Engine(other, None, config) as decode, pair(decode) as (prefill, takeovers, address, peers):
        if why == "takeovers closed":
            takeovers.close()
        elif why == "engine closed":
            decode.close()
        elif why == "queue full":
            running = decode.submit(prompt_of(9), options=RequestOptions(max_tokens=5000))
            next(running.stream())
        response = prefill.submit(prompt_of(PROMPT), options=RequestOptions(**WORDS), give=to(peers, address)).result(WAIT_SECONDS)
        assert (response.finish_reason, response.tokens) == ("length", text())
        assert (prefill.counts[f"handoff_{outcome}"], takeovers.taken) == (1, 0)
        assert decode.pages.free == decode.pages.capacity or why == "queue full"
    here = [record.message for record in caplog.records if "is answered here" in record.message]
    assert len(here) == 1
    there = [record.message for record in caplog.records if "is not taken" in record.message]
    assert len(there) == (outcome in ("too_large", "refused"))
    assert all("E594" in line or "E576" in line for line in there)


def test_a_taken_request_is_begun_though_the_caller_s_own_code_fails() -> None:
    """`began` and `secret_of` are not ours: what they raise costs no request."""
    began: queue.Queue[Request] = queue.Queue()

    def fails(handoff_id: bytes, request: Request) -> None:
        began.put(request)
        raise RuntimeError("not ours")

    def unknown(note: bytes) -> bytes:
        raise KeyError(note)

    with Engine(model(), None) as decode, pair(decode, began=fails, secret_of=unknown) as (prefill, takeovers, address, peers):
        for _ in range(2):
            request = prefill.submit(prompt_of(PROMPT), options=RequestOptions(**WORDS, secret=b"s"), give=to(peers, address))
            assert request.result(WAIT_SECONDS).finish_reason == "handed_over"
            assert began.get(timeout=WAIT_SECONDS).result(WAIT_SECONDS).tokens == text()
        assert takeovers.taken == 2


def test_windows_of_an_agent_that_ends_are_no_request() -> None:
    """It asks another agent then, and does not take them for moved."""
    with Engine(model(), None) as decode, pair(decode) as (_, takeovers, address, peers):
        assert send_handoff(peers, address, {"ab" * 32: b"entry"}, note=NOTE, deadline_seconds=WAIT_SECONDS) is HandoffOutcome.TOO_LARGE
        assert takeovers.accept(Offer(bytes(16), bytes(16), (("ab" * 32, 5),), 4096, 10, NOTE)) is Status.NO_SPACE
        assert takeovers.refused == 0


def test_what_was_agreed_to_is_begun_before_the_takeovers_close() -> None:
    """Closed between the commit and the taking: the request that was promised is begun first."""
    began: queue.Queue[Request] = queue.Queue()
    with (
        Engine(model(), None) as decode,
        pair(decode, began=lambda _, request: began.put(request)) as (prefill, takeovers, address, peers),
    ):
        give = watched(peers, address, lambda name: None)
        response = prefill.submit(prompt_of(PROMPT), options=RequestOptions(**WORDS), give=give).result(WAIT_SECONDS)
        takeovers.close()
        assert (response.finish_reason, takeovers.taken) == ("handed_over", 1)
        assert began.get_nowait().result(WAIT_SECONDS).tokens == text()


def test_a_request_without_its_last_output_is_refused_and_costs_no_pages() -> None:
    sections = packed(prompt_of(PROMPT), RequestOptions(**WORDS))
    head = bytearray(sections["head"])
    head[6] &= ~2
    with Engine(model(), None) as engine:
        with pytest.raises(LayoutError, match="E576"):
            engine.take_over({**sections, "head": bytes(head)})
        assert engine.pages.free == engine.pages.capacity


@pytest.mark.parametrize("why", ["max_tokens", "stop_tokens"])
def test_one_that_has_ended_already_says_no_more(why: str) -> None:
    sections = packed(prompt_of(PROMPT), RequestOptions(**WORDS))
    settings = json.loads(sections["sampler"])
    settings["options"][why] = {"max_tokens": 1, "stop_tokens": text()[:1]}[why]
    changed = json.dumps(settings).encode()
    head = bytearray(sections["head"])
    struct.pack_into("<I", head, 8 + 4 * 7, len(changed))
    with Engine(model(), None) as engine:
        response = engine.take_over({**sections, "sampler": changed, "head": bytes(head)}).result(WAIT_SECONDS)
        assert response.tokens == text()[:1]
        assert engine.pages.free == engine.pages.capacity


@pytest.mark.parametrize("why", ["cancelled", "deadline", "closed"])
@pytest.mark.parametrize("taken", [False, True])
def test_what_is_called_off_while_it_is_committed_ends_here_or_there(why: str, taken: bool) -> None:
    """`taken`: the other side has said yes before it hears of it; then the request has not ended here, whatever was asked."""
    request: list[Request] = []

    class Sender(Recorder):
        def __init__(self, sections: Any) -> None:
            super().__init__(sections)
            self.called_off = threading.Event()

        def commit(self, deadline_seconds: float) -> HandoffOutcome:
            if why == "cancelled":
                request[0].cancel()
            elif why == "closed":
                engine._closing = True
            else:
                request[0].submitted_seconds -= 1000
            engine._post(lambda: None)
            assert self.called_off.wait(WAIT_SECONDS)
            self.outcome = HandoffOutcome.DONE if taken else HandoffOutcome.ABORTED
            return self.outcome

        def abort(self) -> None:
            self.called_off.set()

    with Engine(model(), None) as engine:
        gate = threading.Event()
        engine._post(lambda: assert_set(gate))
        request.append(engine.submit(prompt_of(PROMPT), options=RequestOptions(**WORDS), give=Sender))
        gate.set()
        response = request[0].result(WAIT_SECONDS)
        assert response.finish_reason == ("handed_over" if taken else why)
        assert response.tokens == text()[: len(response.tokens)]
        assert (engine.counts["handoff_done"], engine.counts["handoff_aborted"]) == (int(taken), int(not taken))
        assert engine.pages.free == engine.pages.capacity


def test_a_commit_that_was_given_up_does_not_count_when_the_other_side_wakes() -> None:
    """The decode process stands still from the commit on, until its request has been answered here."""
    with taker_of() as (taker, address), Peers() as peers, Engine(model(), None, EngineConfig(handoff_deadline_seconds=1.0)) as engine:
        assert taker.stdin and taker.stdout

        def look(name: str) -> None:
            if name == "commit":
                until(lambda: sent[0].outcome is not None or not sent[0]._jobs, "its parts to be sent")
                taker.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, taker.pid, os.WSTOPPED)

        sent: list[HandoffSender] = []

        def give(sections: Any) -> Any:
            found = watched(peers, address, look)(sections)
            assert isinstance(found, Watched)
            sent.append(found.sender)
            return found

        response = engine.submit(prompt_of(PROMPT), options=RequestOptions(**WORDS), give=give).result(WAIT_SECONDS)
        assert (response.finish_reason, response.tokens) == ("length", text())
        until(lambda: peers.stats()["connections"] == 0, "the end of its connections")
        taker.send_signal(signal.SIGCONT)

        def stats() -> dict[str, int]:
            assert taker.stdin and taker.stdout
            taker.stdin.write("stats\n")
            taker.stdin.flush()
            found: dict[str, int] = json.loads(taker.stdout.readline())
            return found

        until(lambda: stats()["arrivals"] == 0, "the other side to forget it")
        assert stats().get("committed", 0) == 0


def test_an_answer_that_is_there_counts_though_this_process_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    late = [0.0]

    class Clock:
        def monotonic(self) -> float:
            return time.monotonic() + late[0]

    class Control:
        """Stands still for an hour as soon as the commit is sent."""

        def __init__(self, connection: Any) -> None:
            self._connection = connection

        def sendall(self, data: bytes) -> None:
            self._connection.sendall(data)
            late[0] = 3600.0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connection, name)

    inbox = HandoffInbox(1 << 20)
    server = PeerServer("127.0.0.1", 0, handoffs=inbox)
    with Peers() as peers:
        sender = begin(peers, server.address, [("a", 5)], deadline_seconds=WAIT_SECONDS)
        assert isinstance(sender, HandoffSender)
        sender.put("a", b"hello")
        until(lambda: sender.sent_bytes == 5, "its part")
        sender._control = Control(sender._control)  # type: ignore[assignment]  # as much of a socket as is asked of it
        monkeypatch.setattr(handoff, "time", Clock())
        assert sender.commit(WAIT_SECONDS) is HandoffOutcome.DONE
        assert inbox.stats()["committed"] == 1
    server.close()


def test_deadlines_count_from_the_submission_and_addresses_are_looked_at_at_once() -> None:
    found = settings_of(packed(prompt_of(PROMPT), RequestOptions(max_tokens=9, deadline_seconds=100))["sampler"], b"")[0]
    assert found.deadline_seconds is not None and 0 < found.deadline_seconds < 100
    with Peers() as peers, pytest.raises(MisuseError, match="E575"):
        to(peers, "nowhere")


def test_the_decode_side_keeps_the_windows_of_the_answer_and_knows_what_it_rests_on(tmp_path: Any) -> None:
    """So that the next turn hits them; and blocks of an answer over a bounded replay are stored as no more than they are."""
    config = ClientConfig(block_tokens=DRAFTING.block, promise_reuse_seconds=0)
    began: queue.Queue[Request] = queue.Queue()
    with (
        cluster_of(tmp_path, 4, k=2, m=2) as cluster,
        Client(cluster.map, layout=model().layout, config=config) as client,
        Engine(model(), client) as decode,
        pair(decode, client, began=lambda name, request: began.put(request)) as (prefill, _, address, peers),
    ):
        prompt = prompt_of(PROMPT)
        prefill.submit(prompt, options=RequestOptions(**WORDS), give=to(peers, address)).result(WAIT_SECONDS)
        answer = began.get(timeout=WAIT_SECONDS).result(WAIT_SECONDS).tokens
        assert answer == text()
        assert client.flush(WAIT_SECONDS)
        turn = [*prompt, *answer, *prompt_of(20)]
        response = decode.submit(turn, options=RequestOptions(max_tokens=9)).result(WAIT_SECONDS)
        assert (response.window, response.cached_tokens) == ("hit", 96)
        assert response.tokens == alone(turn, {"max_tokens": 9})
        # Where there are no windows: prefill's own agent has none.
        options = RequestOptions(max_tokens=9, resume="bounded")
        given = prefill.submit(turn, options=options, give=to(peers, address)).result(WAIT_SECONDS)
        assert (given.finish_reason, given.window, given.depth) == ("handed_over", "bounded", 1)
        taken = began.get(timeout=WAIT_SECONDS).result(WAIT_SECONDS)
        assert (taken.window, taken.depth, taken.approximate_tokens) == (given.window, given.depth, given.approximate_tokens)
