"""A handoff that does not come to its end: the same text here, nothing left there, and never a wait for the dead."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from client_tools import until
from engine_giver import DRAFTING, options_of, watched
from handoff_child import digest
from leaks import Counts, at_rest, until_no_more
from test_engine_handing import WAIT_SECONDS, Recorder, alone, model, prompt_of

from kvstore.client.agent.frames import PeerConfig
from kvstore.client.agent.inbox import HandoffInbox
from kvstore.client.agent.peer_server import PeerServer
from kvstore.client.agent.peers import Peers
from kvstore.engine_integration.engine import Engine, EngineConfig, RequestOptions
from kvstore.engine_integration.engine.handing import Takeovers, to
from kvstore.engine_integration.model.model import Model
from kvstore.wire import Status

pytestmark = pytest.mark.usefixtures("one_torch_thread")
LENGTH = 300
WAYS: list[dict[str, Any]] = [{"max_tokens": 12}, {"max_tokens": 12, "temperature": 0.9, "seed": 3, "speculate": False}]


@contextmanager
def taker_of() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A decode process, or what of it matters here: its inbox and server."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("handoff_child.py")), "take", str(64 << 20)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout
        yield process, f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


@cache
def text(way: int) -> list[int]:
    return alone(prompt_of(LENGTH), WAYS[way])


@pytest.mark.parametrize("step", ["offer", "blocks.8", "tail", "commit"])
def test_a_decode_process_killed_at_any_step_costs_one_log_line(step: str, caplog: pytest.LogCaptureFixture) -> None:
    way = len(step) % 2
    with taker_of() as (taker, address), Peers() as peers, Engine(model(), None) as engine:

        def look(name: str) -> None:
            if name == step:
                taker.kill()
                taker.wait()

        give = watched(peers, address, look)
        response = engine.submit(prompt_of(LENGTH), options=options_of(WAYS[way]), give=give).result(WAIT_SECONDS)
        assert (response.tokens, response.finish_reason, response.handoff_bytes) == (text(way), "length", 0)
        assert engine.counts["handoff_unreachable" if step == "offer" else "handoff_lost"] == 1
        until(lambda: peers.stats()["connections"] == 0, "the end of its connections")
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_decode_process_that_stands_still_or_is_full_is_not_waited_for() -> None:
    with (
        taker_of() as (taker, address),
        Peers(config=PeerConfig(progress_seconds=0.5)) as peers,
        Engine(model(), None, EngineConfig(handoff_deadline_seconds=0.5)) as engine,
    ):

        def look(name: str) -> None:
            if name == "tail":
                taker.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, taker.pid, os.WSTOPPED)

        give = watched(peers, address, look)
        response = engine.submit(prompt_of(LENGTH), options=options_of(WAYS[0]), give=give).result(WAIT_SECONDS)
        assert (response.tokens, response.finish_reason) == (text(0), "length")
        assert engine.counts["handoff_late"] + engine.counts["handoff_lost"] == 1
    server = PeerServer("127.0.0.1", 0, handoffs=HandoffInbox(1 << 20, accept=lambda offer: Status.BUSY))
    with Peers() as peers, Engine(model(), None) as engine:
        response = engine.submit(prompt_of(LENGTH), options=options_of(WAYS[0]), give=to(peers, server.address)).result(WAIT_SECONDS)
        assert (response.tokens, engine.counts["handoff_busy"]) == (text(0), 1)
        options = RequestOptions(max_tokens=12, stop_tokens=frozenset(range(1000, 3000)))
        response = engine.submit(prompt_of(LENGTH), options=options, give=to(peers, server.address)).result(WAIT_SECONDS)
        assert (response.finish_reason, engine.counts["handoff_too_large"]) == ("length", 1), "settings that are too long to go along"
    server.close()


def test_a_prefill_process_killed_before_its_commit_leaves_nothing_at_the_other() -> None:
    with Engine(model(), None) as engine:
        inbox = HandoffInbox(64 << 20)
        takeovers = Takeovers(engine, inbox)
        server = PeerServer("127.0.0.1", 0, handoffs=inbox)
        giver = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("engine_giver.py")), server.address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert giver.stdin and giver.stdout and giver.stdout.readline() == "ready\n"
            giver.stdin.write(json.dumps({"prompt": prompt_of(LENGTH), "options": {"max_tokens": 9}, "halt_at": "commit"}) + "\n")
            giver.stdin.flush()
            assert giver.stdout.readline() == "halted\n"
            giver.kill()
            until(lambda: inbox.stats()["arrivals"] == inbox.stats()["used_bytes"] == 0, "the end of it")
            assert (inbox.stats()["lost"], takeovers.taken, engine.stats().get("requests", 0)) == (1, 0, 0)
        finally:
            giver.kill()
            giver.communicate()
            takeovers.close()
            server.close()


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(WAIT_SECONDS)


@pytest.mark.parametrize("end", ["cancelled", "fault", "closed"])
def test_a_prompt_that_is_not_read_to_its_end_withdraws_its_offer(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = HandoffInbox(64 << 20)
    server = PeerServer("127.0.0.1", 0, handoffs=inbox)
    own = Model.random(DRAFTING)
    with Peers() as peers:
        with Engine(own, None) as engine:

            def look(name: str) -> None:
                if name == "blocks.8":
                    if end == "cancelled":
                        request.cancel()
                    elif end == "closed":
                        engine._closing = True
                    else:
                        monkeypatch.setattr(own, "steps", None)

            began = engine._io.submit(lambda: None)
            began.result(WAIT_SECONDS)
            request = engine.submit(prompt_of(1000), options=RequestOptions(max_tokens=9), give=watched(peers, server.address, look))
            if end == "fault":
                with pytest.raises(TypeError):
                    request.result(WAIT_SECONDS)
            else:
                assert request.result(WAIT_SECONDS).finish_reason == end
            assert engine.counts["handoff_aborted"] == 1
            until(lambda: engine.pages.free == engine.pages.capacity, "its pages")
        until(lambda: gc.collect() >= 0 and inbox.stats()["arrivals"] == inbox.stats()["used_bytes"] == 0, "the end of the offer")
        assert inbox.stats()["lost"] == 1
        assert peers.stats()["connections"] == 0
    server.close()


def test_a_prompt_that_loses_its_room_is_offered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer needs the pages of the second prompt while that is read. Both start in one turn of the engine."""
    with Engine(model(), None) as big:
        page = big.config.cache_bytes // (big.pages.capacity or 1)
    taken: list[Recorder] = []

    def give(sections: Any) -> Recorder:
        taken.append(Recorder(sections))
        return taken[-1]

    config = EngineConfig(cache_bytes=24 * page, prefill_tokens=16, speculate=False)
    with Engine(model(), None, config) as engine, Engine(model(), None) as decode:
        monkeypatch.setattr(engine._io, "submit", lambda work: work())
        gate = threading.Event()
        engine._post(lambda: assert_set(gate))
        first = engine.submit(prompt_of(75), options=RequestOptions(max_tokens=40))
        second = engine.submit(prompt_of(LENGTH), options=RequestOptions(max_tokens=12, speculate=False), give=give)
        gate.set()
        assert first.result(WAIT_SECONDS).finish_reason == "length"
        response = second.result(WAIT_SECONDS)
        assert (response.finish_reason, response.preemptions) == ("handed_over", 1)
        assert [digest(taken[0].sections[name]) for name in ("blocks.0",)] == [digest(taken[1].sections["blocks.0"])]
        assert "head" not in taken[0].sections
        assert decode.take_over(taken[1].sections).result(WAIT_SECONDS).tokens == alone(prompt_of(LENGTH), {"max_tokens": 12})


def test_descriptors_and_threads_are_as_before_after_many_handoffs() -> None:
    inbox = HandoffInbox(64 << 20)
    server = PeerServer("127.0.0.1", 0, handoffs=inbox)
    with Peers() as peers, Engine(model(), None) as decode, Engine(model(), None) as prefill:
        takeovers = Takeovers(decode, inbox)
        before: Counts = ()
        for number in range(16):
            request = prefill.submit(prompt_of(40), options=RequestOptions(max_tokens=3), give=to(peers, server.address))
            if number % 3 == 2:
                request.cancel()
            assert request.result(WAIT_SECONDS).finish_reason in ("handed_over", "cancelled")
            if number == 4:
                before = at_rest()
        until_no_more(before, spare=3)
        until(lambda: inbox.stats()["used_bytes"] == 0, "their memory")
        takeovers.close()
    server.close()
