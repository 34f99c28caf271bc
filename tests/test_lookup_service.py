"""The lookup service as a process: what it says of a prompt over both faces, what it refuses, and that three processes can work from one
ticket."""

from __future__ import annotations

import base64
import json
import random
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from client_tools import WAIT_SECONDS, cluster_of, until

from kvstore.client import Client, ClientConfig
from kvstore.client.agent.agent import Agent
from kvstore.client.agent.config import AgentConfig
from kvstore.client.ticket import Ticket
from kvstore.client.values import Fidelity
from kvstore.engine_integration.model import TINY
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.speculate import generate
from kvstore.errors import ConfigError, ProtocolError
from kvstore.keys import KeyChain, Keys
from kvstore.modelcard import ModelCard
from kvstore.server.directory import Directory
from kvstore.server.directory_config import DirectoryConfig
from kvstore.server.local import LocalCluster
from kvstore.server.lookup import Lookups, Question, Tenant, load_tenants
from kvstore.server.lookup_service import LookupService, LookupServiceConfig
from kvstore.server.proto import lookup_pb2, lookup_pb2_grpc

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TICKET_KEY = b"a key that all agents share: 32B"
ACME = Tenant(b"\x01" * 16, b"acme's secret")
B = TINY.block
PROMPT = random.Random(11).choices(range(256), k=200)
STORED = 10  # blocks of it
COUNT = 20


def card(model: Model) -> ModelCard:
    return ModelCard(name="tiny", layout=model.layout, namespace=model.namespace, block_tokens=B, recompute_tokens=TINY.slots)


@dataclass
class Rig:
    """A cluster with the first blocks of PROMPT, a directory, an agent that holds the window at block 10, and the service's addresses."""

    model: Model
    cluster: LocalCluster
    directory: str
    agent: Agent
    service: dict[str, Any]
    files: Path

    def keys_of(self, tokens: list[int] = PROMPT, secret: bytes = b"") -> Keys:
        return KeyChain(self.model.namespace, secret, block_tokens=B).extend(tokens)

    def http(self, body: Any, kind: str = "application/json", query: str = "", path: str = "/v1/lookup") -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{self.service['http']}{path}{query}", data, {"Content-Type": kind})
        try:
            with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read()
            return error.code, json.loads(text) if text.startswith(b"{") else {}


@contextmanager
def child(*words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline()


def say(process: subprocess.Popen[str], words: dict[str, Any]) -> None:
    assert process.stdin
    process.stdin.write(json.dumps(words) + "\n")
    process.stdin.flush()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    files = tmp_path_factory.mktemp("lookup")
    model = Model.random(TINY)
    (files / "key").write_bytes(TICKET_KEY)
    (files / "tiny.toml").write_text(card(model).to_toml())
    (files / "tenants.toml").write_text(
        f'[tenants.default]\n[tenants.acme]\nowner = "{ACME.owner.hex()}"\nsecret = "{ACME.secret.hex()}"\n'
    )
    directory = Directory(DirectoryConfig(port=0))
    with ExitStack() as stack:
        cluster = stack.enter_context(cluster_of(files / "cluster", 6, k=4, m=2))
        directory.map = cluster.map
        directory.start()
        stack.callback(directory.serve_until_stopped)
        stack.callback(directory.request_stop)
        address = str(directory.facts()["address"])
        config = ClientConfig(block_tokens=B, ticket_key=TICKET_KEY, promise_reuse_seconds=0)
        client = stack.enter_context(Client(cluster.map, layout=model.layout, config=config))
        agent = stack.enter_context(Agent(client, config=AgentConfig(directories=(address,), slots=TINY.slots)))
        state = model.begin(len(PROMPT))
        model.feed(state, PROMPT[: STORED * B])
        keys = KeyChain(model.namespace, block_tokens=B).extend(PROMPT)
        agent.store(keys[:STORED], state.export_blocks(0, STORED), first_block=0).result(WAIT_SECONDS)
        assert agent.keep_window(keys, STORED * B, state.entries[STORED * B], fidelity=Fidelity.EXACT)
        map_path = str(files / "cluster" / "map.toml")
        process = stack.enter_context(
            child(
                "-m", "kvstore", "lookup-service", "--map", map_path, "--model", str(files / "tiny.toml"),
                "--ticket-key", str(files / "key"), "--tenants", str(files / "tenants.toml"), "--directory", address,
                "--listen", "127.0.0.1:0", "--deadline", "5s", "--directory-deadline", "3s", "--max-tokens", "100000", "--max-running", "4",
            )
        )  # fmt: skip
        word, _, facts = line_of(process).partition(" ")
        assert word == "ready"
        made = Rig(model, cluster, address, agent, json.loads(facts), files)
        until(lambda: made.http({"tokens": PROMPT})[1]["window"] == "hit", "the directory's word of the window, and the last shards")
        yield made
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0


# --- what it says ---


def expected(rig: Rig) -> dict[str, Any]:
    return {
        "input_tokens": 200, "prefix_tokens": STORED * B, "cached_tokens": STORED * B, "uncached_tokens": 200 - STORED * B, "window": "hit",
        "windows": [{"tokens": STORED * B, "holders": [rig.agent.address], "approximate": False}],
        "fidelity": "exact", "depth": 0, "block_tokens": B,
    }  # fmt: skip


def test_both_faces_say_the_same_of_tokens_and_of_keys(rig: Rig) -> None:
    hexes = [key.tobytes().hex() for key in rig.keys_of()]
    asked = [
        rig.http({"tokens": PROMPT}),
        rig.http({"tokens": PROMPT, "tenant": "default", "retention_class": "agent", "deadline_seconds": 3}),
        rig.http({"keys": hexes, "input_tokens": 200}),
        rig.http({"keys": "".join(hexes), "input_tokens": 200}),
        rig.http(np.array(PROMPT, "<u4").tobytes(), "application/octet-stream", "?retention_class=agent&depth_max=3&deadline_seconds=3"),
    ]
    for status, found in asked:
        ticket = Ticket.from_bytes(base64.b64decode(found.pop("ticket")), TICKET_KEY)
        assert (ticket.hit_blocks, ticket.usable_blocks) == (STORED, STORED)
        assert found.pop("expires_unix_ms") == ticket.expires_unix_ms
        assert (status, found) == (200, expected(rig))
    with grpc.insecure_channel(rig.service["address"]) as channel:
        stub = lookup_pb2_grpc.LookupStub(channel)
        for request in (
            lookup_pb2.LookupRequest(tokens=PROMPT),
            lookup_pb2.LookupRequest(keys=rig.keys_of().tobytes(), input_tokens=200, retention_class="agent", tenant="default"),
        ):
            reply = stub.Lookup(request, timeout=WAIT_SECONDS)
            assert Ticket.from_bytes(reply.ticket, TICKET_KEY).hit_blocks == STORED
            want = expected(rig)
            windows = [{"tokens": w.tokens, "holders": list(w.holders), "approximate": w.approximate} for w in reply.windows]
            assert {name: getattr(reply, name) for name in want if name != "windows"} | {"windows": windows} == want


@pytest.mark.parametrize(
    ("length", "prefix", "cached", "window"),
    [(0, 0, 0, "none"), (10, 0, 0, "none"), (37, 32, 0, "none"), (38, 32, 0, "missing"), (100, 96, 48, "missing"), (182, 160, 160, "hit")],
)
def test_cached_are_the_tokens_an_engine_need_not_compute(rig: Rig, length: int, prefix: int, cached: int, window: str) -> None:
    """22 tokens are always computed; where the window entry is missing, one block more."""
    _, found = rig.http({"tokens": PROMPT[:length]})
    assert [found[name] for name in ("prefix_tokens", "cached_tokens", "uncached_tokens", "window")] == [
        prefix, cached, length - cached, window
    ]  # fmt: skip


def test_tenants_do_not_see_each_other(rig: Rig) -> None:
    config = ClientConfig(block_tokens=B, ticket_key=TICKET_KEY)
    with Client(rig.cluster.map, layout=rig.model.layout, config=config, owner=ACME.owner) as client:
        blocks = np.full((12, rig.model.layout.block_bytes), 7, np.uint8)
        client.store(rig.keys_of(secret=ACME.secret)[:12], blocks, first_block=0).result(WAIT_SECONDS)
    assert rig.http({"tokens": PROMPT})[1]["prefix_tokens"] == STORED * B
    until(lambda: rig.http({"tokens": PROMPT, "tenant": "acme"})[1]["prefix_tokens"] == 12 * B, "the last shards")
    assert rig.http({"tokens": PROMPT, "tenant": "acme"})[1]["window"] == "missing", "windows are tenants' own, too"


# --- what it refuses ---


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b"3", 400, "not a JSON object"),
        ({}, 400, "give tokens, or keys"),
        ({"tokens": [1], "keys": []}, 400, "give tokens, or keys"),
        ({"tokens": [-1]}, 400, "tokens"),
        ({"tokens": [1 << 32]}, 400, "tokens"),
        ({"tokens": [1.5]}, 400, "tokens"),
        ({"tokens": [True]}, 400, "tokens"),
        ({"tokens": "abc"}, 400, "tokens"),
        ({"tokens": [1] * 100_001}, 400, "at most 100000"),
        ({"keys": ["zz"]}, 400, "hex"),
        ({"keys": [5]}, 400, "hex"),
        ({"keys": "00"}, 400, "multiple of 32"),
        ({"keys": "00" * 32, "input_tokens": 200}, 400, "1 keys for 200 tokens"),
        ({"tokens": [1], "tenant": "nobody"}, 400, "no tenant"),
        ({"tokens": [1], "retention_class": "x"}, 400, "no retention class"),
        ({"tokens": [1], "depth_max": 1 << 16}, 400, "depth_max"),
        ({"tokens": [1], "depth_max": "1"}, 400, "depth_max"),
        ({"tokens": [1], "deadline_seconds": -1}, 400, "deadline_seconds"),
        ({"tokens": [1], "deadline_seconds": 10**400}, 400, "deadline_seconds"),
        ({"tokens": [1], "other": 1}, 400, "no field"),
    ],
)
def test_what_cannot_be_asked_is_told_why(rig: Rig, body: Any, status: int, words: str) -> None:
    found, answer = rig.http(body)
    assert (found, answer["error"]["code"]) == (status, "E629")
    assert words in answer["error"]["message"]


def test_bodies_and_messages_are_bounded(rig: Rig) -> None:
    assert rig.http(bytes(6), "application/octet-stream")[0] == 400
    assert rig.http(b"", "application/octet-stream", "?depth_max=x")[0] == 400
    assert rig.http(b"x", path="/metrics")[0] == 405
    with pytest.raises((urllib.error.URLError, ConnectionError, AssertionError)):
        assert rig.http(bytes(17 << 20), "application/octet-stream")[0] == 200
    with grpc.insecure_channel(rig.service["address"]) as channel:
        stub = lookup_pb2_grpc.LookupStub(channel)
        for request, code in (
            (lookup_pb2.LookupRequest(keys=bytes(33)), grpc.StatusCode.INVALID_ARGUMENT),
            (lookup_pb2.LookupRequest(tokens=[1], keys=bytes(32)), grpc.StatusCode.INVALID_ARGUMENT),
            (lookup_pb2.LookupRequest(tokens=[1], tenant="nobody"), grpc.StatusCode.INVALID_ARGUMENT),
            (lookup_pb2.LookupRequest(keys=bytes(17 << 20)), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.RpcError) as fault:
                stub.Lookup(request, timeout=WAIT_SECONDS)
            assert fault.value.code() is code  # type: ignore[attr-defined]  # the stubs leave it out


def test_it_counts_and_says_that_it_is_alive(rig: Rig) -> None:
    with urllib.request.urlopen(f"http://{rig.service['http']}/readyz", timeout=WAIT_SECONDS) as answer:
        assert answer.read() == b"ok\n"

    def number(name: str) -> float:
        with urllib.request.urlopen(f"http://{rig.service['http']}/metrics", timeout=WAIT_SECONDS) as answer:
            rows = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#"))
        return float(rows[name])

    names = ['requests_total{face="http",result="ok"}', 'requests_total{face="http",result="refused"}']
    names += [f'tokens_total{{kind="{kind}"}}' for kind in ("input", "prefix", "cached")]
    before = [number(f"kvstore_lookup_service_{name}") for name in names]
    rig.http({"tokens": PROMPT[:182]})
    rig.http({})
    after = [number(f"kvstore_lookup_service_{name}") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 182, 160, 160]
    assert number("kvstore_lookup_service_running_requests") == 0


def test_files_that_are_wrong_are_told_by_line(rig: Rig, tmp_path: Path) -> None:
    text = card(rig.model).to_toml()
    read = ModelCard.load(rig.files / "tiny.toml")
    assert (read.to_toml(), read.layout, read.namespace.digest()) == (text, rig.model.layout, rig.model.namespace.digest())
    path = tmp_path / "card.toml"
    for wrong, code in (
        (text.replace("block_tokens = 16", "block_tokens = 0"), "E131"),
        (text.replace('kv_dtype = "tiny.v41"', 'kv_dtype = ""'), "E197"),
        (text.replace("weights", "weight"), "E101"),
        (text.partition("[[")[0], "E197"),
        (text + "more = 1\n", "E101"),
    ):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=code):
            ModelCard.load(path)
    for wrong in ("", "[tenants.a]\nowner = 'x'\n", "[tenants.a]\nsecrets = ''\n"):
        path.write_text(wrong)
        with pytest.raises(ConfigError):
            load_tenants(path)
    (tmp_path / "key").write_bytes(b"short")
    words = ["lookup-service", "--map", str(rig.files / "cluster" / "map.toml"), "--model", str(rig.files / "tiny.toml")]
    for more, code in ((["--ticket-key", str(tmp_path / "key")], "E198"), (["--ticket-key", str(tmp_path / "none")], "E100")):
        done = subprocess.run([sys.executable, "-m", "kvstore", *words, *more], capture_output=True, text=True, timeout=60)
        assert (done.returncode, f"error[{code}]" in done.stderr) == (2, True), done.stderr


def test_without_nodes_and_without_a_directory_it_still_answers(rig: Rig, tmp_path: Path) -> None:
    with Lookups(rig.cluster.map, card(rig.model), ticket_key=TICKET_KEY) as lookups:
        found = lookups.ask(Question(tokens=np.array(PROMPT, np.uint32)))
        assert (found.cached_tokens, found.window, list(found.windows)) == (STORED * B, "unknown", [])
        with pytest.raises(ProtocolError, match="E629"):
            lookups.ask(Question())
    with cluster_of(tmp_path, 3, k=2, m=1) as cluster:
        gone = cluster.map
    with Lookups(gone, card(rig.model), ticket_key=TICKET_KEY, deadline_seconds=1.0) as lookups:
        found = lookups.ask(Question(tokens=np.array(PROMPT, np.uint32)))
        assert (found.prefix_tokens, found.cached_tokens, found.uncached_tokens) == (0, 0, 200)


# --- one ticket, three processes ---


def test_router_prefill_and_decode_work_from_one_ticket(rig: Rig) -> None:
    """The router (here) asks once; prefill loads by the ticket, takes the window from the agent it names, and hands over; decode reads the
    ticket's blocks itself and goes on. Nobody looks up again, and the text is that of a run in one process."""
    map_path, key_path = str(rig.files / "cluster" / "map.toml"), str(rig.files / "key")
    here = str(Path(__file__).with_name("ticket_children.py"))
    prompt = PROMPT[: STORED * B + TINY.slots + 3]
    want = generate(rig.model, rig.model.begin(len(prompt)), prompt, COUNT).tokens
    with child(here, "decode", map_path, key_path) as decode, child(here, "prefill", map_path, key_path, rig.directory) as prefill:
        decode_address = json.loads(line_of(decode))
        line_of(prefill)
        status, found = rig.http({"tokens": prompt})
        assert (status, found["cached_tokens"], found["uncached_tokens"]) == (200, STORED * B, TINY.slots + 3)
        asked = rig.agent.client.stats()["lookups"]
        say(prefill, {"ticket": found["ticket"], "prompt": prompt, "decode": decode_address})
        say(decode, {"ticket": found["ticket"], "prompt_tokens": len(prompt), "count": COUNT})
        done = json.loads(line_of(prefill))
        assert done == {"outcome": "done", "window": "hit", "computed": found["uncached_tokens"], "blocks": STORED}
        answer = json.loads(line_of(decode))
        assert answer == {"tokens": prompt + want, "handed_over": len(prompt), "same_blocks": True, "blocks": STORED}
        assert rig.agent.client.stats()["lookups"] == asked


def test_a_new_epoch_is_taken_while_it_serves_and_a_bad_map_is_not(rig: Rig, tmp_path: Path) -> None:
    path, new = tmp_path / "map.toml", rig.cluster.map.with_epoch([], [node.id for node in rig.cluster.map.nodes])
    path.write_text(rig.cluster.map.to_toml())
    service = LookupService(
        LookupServiceConfig(
            map_path=path, model_path=rig.files / "tiny.toml", ticket_key_path=rig.files / "key", port=0, deadline_seconds=5
        )
    )  # fmt: skip
    service.start()
    try:

        def epoch() -> tuple[int, int]:
            assert service._lookups is not None
            answer = service._lookups.ask(Question(tokens=np.array(PROMPT, np.uint32)))
            return answer.ticket.epoch, answer.prefix_tokens

        assert epoch() == (1, STORED * B)
        for text, want in (("cluster = [", 1), (new.to_toml(), 2), (rig.cluster.map.to_toml(), 2)):
            path.write_text(text)
            service.request_reload()
            service.look_at_map()
            assert epoch() == (want, STORED * B)
        assert service._lookups is not None and len(service._lookups._retired) == 1
        service._lookups.tick(float("inf"))
        assert epoch() == (2, STORED * B) and not service._lookups._retired
    finally:
        service.request_stop()
        service.serve_until_stopped()


def test_what_many_large_questions_took_is_bounded_and_given_back(rig: Rig) -> None:
    """Twelve at once of 0.4 million tokens: 3 MB of JSON each, 20 as numbers. Those for which there is no room are told so."""
    path = str(rig.files / "cluster" / "map.toml")
    words = (
        "-m",
        "kvstore",
        "lookup-service",
        "--map",
        path,
        "--model",
        str(rig.files / "tiny.toml"),
        "--ticket-key",
        str(rig.files / "key"),
    )
    with child(*words, "--listen", "127.0.0.1:0", "--deadline", "5s") as process:
        facts = json.loads(line_of(process).partition(" ")[2])
        body = json.dumps({"tokens": random.Random(1).choices(range(1 << 17), k=400_000)}).encode()

        def memory(name: str) -> int:
            lines = Path(f"/proc/{facts['pid']}/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10

        def ask(_: int) -> int:
            request = urllib.request.Request(f"http://{facts['http']}/v1/lookup", body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                error.close()
                return error.code
            except OSError:  # a busy machine, which did not take the body in 5 s
                return 0

        until(lambda: ask(0) == 200, "the first answer")
        before = memory("VmRSS")
        with ThreadPoolExecutor(12) as pool:
            told = list(pool.map(ask, range(12)))
        assert set(told) <= {200, 503, 0}
        assert memory("VmHWM") < before + (250 << 20)
        until(lambda: memory("VmRSS") < before + (64 << 20), "the memory")
