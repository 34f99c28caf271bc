"""Prefill on one engine, decode on another: the same text, no token computed twice, and an answer even where nobody takes the request."""

from __future__ import annotations

import json
import queue
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from client_tools import cluster_of, until
from engine_giver import DRAFTING, options_of

from kvstore.client import Client, ClientConfig
from kvstore.client.agent.handoff import HandoffOutcome, HandoffSender
from kvstore.client.agent.inbox import HandoffInbox
from kvstore.client.agent.peer_server import PeerServer
from kvstore.client.agent.peers import Peers
from kvstore.engine_integration.engine import Engine, EngineConfig, Request, RequestOptions
from kvstore.engine_integration.engine.handing import Takeovers, accepts, settings_of, to
from kvstore.engine_integration.model.handover import sizes
from kvstore.engine_integration.model.model import Model
from kvstore.errors import Closed, LayoutError
from kvstore.keys import KeyChain

pytestmark = pytest.mark.usefixtures("one_torch_thread")
WAIT_SECONDS = 60.0
WAYS: list[dict[str, Any]] = [
    {"max_tokens": 24},
    {"max_tokens": 24, "speculate": False},
    {"max_tokens": 24, "temperature": 0.9, "top_p": 0.9, "seed": 3, "banned_tokens": [5, 6]},
]


@cache
def model() -> Model:
    return Model.random(DRAFTING)


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(256), k=length)


def alone(prompt: list[int], words: dict[str, Any]) -> list[int]:
    with Engine(model(), None) as engine:
        return engine.submit(prompt, options=options_of(words)).result(WAIT_SECONDS).tokens


def test_an_engine_in_another_process_goes_on_to_the_same_text() -> None:
    began: queue.Queue[Request] = queue.Queue()
    with Engine(model(), None) as engine:
        inbox = HandoffInbox(64 << 20, accept=lambda offer: accepts(engine, offer))
        takeovers = Takeovers(engine, inbox, began=lambda handoff_id, request: began.put(request))
        server = PeerServer("127.0.0.1", 0, handoffs=inbox)
        giver = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("engine_giver.py")), server.address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert giver.stdin and giver.stdout and giver.stdout.readline() == "ready\n"
            for number, words in enumerate(WAYS):
                prompt = prompt_of(40 + 130 * number)
                giver.stdin.write(json.dumps({"prompt": prompt, "options": words}) + "\n")
                giver.stdin.flush()
                given = json.loads(giver.stdout.readline())
                want = alone(prompt, words)
                assert given == {"tokens": want[:1], "finish_reason": "handed_over"}
                request = began.get(timeout=WAIT_SECONDS)
                response = request.result(WAIT_SECONDS)
                assert (response.tokens, response.finish_reason, response.prompt_tokens) == (want, "length", len(prompt))
                assert [token for piece in request.stream() for token in piece.tokens] == want
            assert engine.counts["prefill_tokens"] == 0
            assert (takeovers.taken, takeovers.refused) == (3, 0)
            assert engine.pages.free == engine.pages.capacity
            until(lambda: inbox.stats()["used_bytes"] == 0, "the memory of the last one")
            # Killed while it reads its next prompt: what has come of it is forgotten.
            giver.stdin.write(json.dumps({"prompt": prompt_of(400), "options": {"max_tokens": 9}, "halt_at": "blocks.8"}) + "\n")
            giver.stdin.flush()
            assert giver.stdout.readline() == "halted\n"
            until(lambda: inbox.stats()["used_bytes"] > 0, "its rows so far")
            giver.kill()
            until(lambda: inbox.stats()["used_bytes"] == inbox.stats()["arrivals"] == 0, "the end of it")
            assert (inbox.stats()["lost"], takeovers.taken, engine.stats()["running"]) == (1, 3, 0)
        finally:
            giver.kill()
            giver.communicate()
            takeovers.close()
            server.close()


class Recorder:
    """Takes a handoff in this process."""

    def __init__(self, sections: Sequence[tuple[str, int]], done: Callable[[dict[str, bytes]], HandoffOutcome] | None = None) -> None:
        self.table, self.sections = dict(sections), dict[str, bytes]()
        self.outcome: HandoffOutcome | None = None
        self.sent_bytes = 0
        self._done = done or (lambda sections: HandoffOutcome.DONE)

    def put(self, name: str, data: memoryview) -> None:
        assert name not in self.sections
        assert len(data) == self.table[name]
        self.sections[name] = bytes(data)
        self.sent_bytes += len(data)

    def commit(self, deadline_seconds: float) -> HandoffOutcome:
        assert self.sections.keys() == self.table.keys()
        self.outcome = self._done(self.sections)
        return self.outcome

    def abort(self) -> None:
        self.outcome = self.outcome or HandoffOutcome.ABORTED


def fails(sections: object) -> HandoffOutcome:
    raise OSError("no network")


@pytest.mark.parametrize(
    ("give", "why"),
    [
        (lambda sections: HandoffOutcome.BUSY, "busy"),
        (fails, "unreachable"),
        (lambda sections: Recorder(sections, lambda all: HandoffOutcome.LATE), "late"),
        (lambda sections: Recorder(sections, fails), "lost"),
    ],
    ids=["refused", "not offered", "not committed", "broken"],
)
def test_where_nobody_takes_it_the_request_is_answered_here(give: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    prompt = prompt_of(50)
    with Engine(model(), None) as engine:
        response = engine.submit(prompt, options=options_of(WAYS[0]), give=give).result(WAIT_SECONDS)
        assert (response.tokens, response.finish_reason) == (alone(prompt, WAYS[0]), "length")
        assert (engine.counts[f"handoff_{why}"], engine.counts["handoff_done"], response.handoff_bytes) == (1, 0, 0)
    assert [record.message for record in caplog.records] == [f"request {caplog.records[0].args[0]} is answered here: its handoff was {why}"]  # type: ignore[index]  # of a tuple


def test_global_rows_are_sent_while_the_prompt_is_read_and_the_rest_after_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 tokens: two runs of 8 blocks of 16, and one of 2."""
    before: list[set[str]] = []
    found: list[Recorder] = []
    with Engine(model(), None) as engine:
        monkeypatch.setattr(engine._io, "submit", lambda work: work())  # so that the offer is answered before a token is read

        def give(sections: Sequence[tuple[str, int]]) -> Recorder:
            found.append(Recorder(sections))
            return found[0]

        request = engine.submit(prompt_of(300), options=RequestOptions(max_tokens=9), give=give)
        request.listen(lambda piece: before.append(set(found[0].sections)))  # the first piece: the first token
        response = request.result(WAIT_SECONDS)
    rows = {"blocks.0", "blocks.8", "blocks.16"}
    assert before[0] == rows
    assert set(found[0].sections) - rows == {
        "tail", "rings.encoder", "rings.decoder", "pending", "entries", "draft", "tokens", "sampler", "head"
    }  # fmt: skip
    size = model().layout.block_bytes
    assert [len(found[0].sections[name]) for name in sorted(rows)] == [8 * size, 2 * size, 8 * size]
    assert (response.handoff_bytes, response.handoff_early_bytes) == (sum(found[0].table.values()), 18 * size)
    assert engine.counts["handoff_early_bytes"] + engine.counts["handoff_late_bytes"] == response.handoff_bytes


def packed(prompt: list[int], options: RequestOptions) -> dict[str, bytes]:
    """A request as it is given away."""
    found: list[Recorder] = []

    def give(sections: Sequence[tuple[str, int]]) -> Recorder:
        found.append(Recorder(sections))
        return found[0]

    with Engine(model(), None) as engine:
        assert engine.submit(prompt, options=options, give=give).result(WAIT_SECONDS).finish_reason == "handed_over"
    return found[0].sections


def test_one_that_ends_with_its_first_token_is_not_given_away() -> None:
    with Engine(model(), None) as engine:
        response = engine.submit(prompt_of(20), options=RequestOptions(max_tokens=1), give=fails).result(60)
        assert (response.finish_reason, engine.counts["handoff_unreachable"]) == ("length", 0), "not even offered"
        stop = RequestOptions(max_tokens=9, stop_tokens=frozenset(response.tokens))
        taken: list[Recorder] = []
        response = engine.submit(prompt_of(20), options=stop, give=lambda sections: taken.append(Recorder(sections)) or taken[0]).result(60)
        assert response.finish_reason == "stop"
    assert taken[0].outcome is HandoffOutcome.ABORTED
    assert engine.counts["handoff_aborted"] == 1


def test_prompts_that_are_still_being_read_elsewhere_have_their_pages_promised() -> None:
    with Engine(model(), None) as big:
        page = big.config.cache_bytes // (big.pages.capacity or 1)
    with Engine(model(), None, EngineConfig(cache_bytes=30 * page)) as engine, Peers() as peers:
        inbox = HandoffInbox(1 << 20, accept=lambda offer: takeovers.accept(offer))
        takeovers = Takeovers(engine, inbox)
        server = PeerServer("127.0.0.1", 0, handoffs=inbox)
        table = sizes(model(), 16 * 16, 16 * 16 + 1, 100)
        first = to(peers, server.address)(table)
        assert isinstance(first, HandoffSender)
        assert to(peers, server.address)(table) is HandoffOutcome.BUSY
        assert to(peers, server.address)(sizes(model(), 40 * 16, 40 * 16 + 1, 100)) is HandoffOutcome.TOO_LARGE
        first.abort()
        until(lambda: not inbox.offers(), "the end of the first")
        second = to(peers, server.address)(table)
        assert isinstance(second, HandoffSender)
        second.abort()
        takeovers.close()
        server.close()


def test_taken_requests_wait_for_room_lose_it_and_go_on() -> None:
    """Three at once in memory for one and a half: two wait, or are computed again."""
    prompts = [prompt_of(length) for length in (60, 61, 62)]
    options = RequestOptions(max_tokens=24)
    sections = [packed(prompt, options) for prompt in prompts]
    with Engine(model(), None, EngineConfig(cache_bytes=1)) as engine:  # the least: for its own needs
        assert engine.pages.capacity == 2
        with pytest.raises(Exception, match="E594"):
            engine.take_over(sections[0])
    with Engine(model(), None) as big:
        page = big.config.cache_bytes // (big.pages.capacity or 1)
    with Engine(model(), None, EngineConfig(cache_bytes=9 * page)) as engine:
        requests = [engine.take_over(data) for data in sections]
        assert [r.result(WAIT_SECONDS).tokens for r in requests] == [alone(p, {"max_tokens": 24}) for p in prompts]
        assert engine.pages.free == engine.pages.capacity
    with pytest.raises(Closed):
        engine.take_over(sections[0])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    config = ClientConfig(block_tokens=DRAFTING.block, promise_reuse_seconds=0)
    with (
        cluster_of(tmp_path_factory.mktemp("handing"), 4, k=2, m=2) as cluster,
        Client(cluster.map, layout=model().layout, config=config) as client,
    ):
        yield client


def test_decode_stores_the_block_that_straddles_prompt_and_answer(client: Client) -> None:
    prompt, options = prompt_of(72), RequestOptions(max_tokens=40, resume="exact")
    with Engine(model(), client) as prefill, Engine(model(), client) as decode:
        taken: list[Request] = []

        def take(sections: Any) -> HandoffOutcome:
            taken.append(decode.take_over(sections))
            return HandoffOutcome.DONE

        first = prefill.submit(prompt, options=options, give=lambda sections: Recorder(sections, take)).result(WAIT_SECONDS)
        assert (first.finish_reason, first.stored_blocks) == ("handed_over", 72 // 16)
        whole = taken[0].result(WAIT_SECONDS)
        assert whole.stored_blocks == (72 + 39) // 16 - 72 // 16, "only what prefill did not"
    keys = KeyChain(model().namespace, block_tokens=16).extend(prompt + whole.tokens)
    until(lambda: client.lookup(keys).hit_blocks == (72 + 39) // 16, "the last shards")
    # A prompt that hits is given away, too, its loaded rows with those that it computes.
    with Engine(model(), client) as prefill, Engine(model(), client) as decode:
        first = prefill.submit(prompt, options=options, give=lambda sections: Recorder(sections, take)).result(WAIT_SECONDS)
        assert (first.finish_reason, first.tokens) == ("handed_over", whole.tokens[:1])
        assert first.cached_tokens + first.replayed_tokens == (72 - 22) // 16 * 16
        assert taken[1].result(WAIT_SECONDS).tokens == whole.tokens


def test_a_secret_stays_where_it_is() -> None:
    secret = b"the tenant's own secret"
    sections = packed(prompt_of(30), RequestOptions(max_tokens=9, secret=secret))
    assert not any(secret in data for data in sections.values())
    assert settings_of(sections["sampler"], b"")[0].store is False
    assert (settings_of(sections["sampler"], secret)[0].store, settings_of(sections["sampler"], secret)[0].secret) == (True, secret)
    assert settings_of(packed(prompt_of(30), RequestOptions(max_tokens=9))["sampler"], secret)[0].secret == b""


def test_settings_that_cannot_be_are_refused() -> None:
    """Seeded: each value of the settings replaced by others of every type."""
    good = json.loads(packed(prompt_of(30), RequestOptions(max_tokens=9))["sampler"])
    settings_of(json.dumps(good).encode(), b"")
    for wrong in (b"", b"{", b"[]", b"3", b"[" * 4000, json.dumps({**good, "worth": [1]}).encode()):
        with pytest.raises(LayoutError, match="E576"):
            settings_of(wrong, b"")
    values: list[Any] = [None, -1, 1.5, "x", [], {}, [[]], True, 2**40]
    for part in ("options", "resume"):
        for name in good[part]:
            for value in values:
                try:
                    options, resume, _, _ = settings_of(json.dumps({**good, part: {**good[part], name: value}}).encode(), b"")
                except LayoutError:
                    continue
                assert isinstance(resume.hit_tokens, int)
                assert isinstance(options.retention_class, str)
                assert isinstance(options.max_tokens, int)
    more = {**good, "options": {**good["options"], "other": 1}}
    with pytest.raises(LayoutError, match="E576"):
        settings_of(json.dumps(more).encode(), b"")
