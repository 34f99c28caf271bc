"""`kvstore engine serve` as a process on a real cluster, asked by the `openai` client and by hand; and its chat page in a real browser."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pyarrow.parquet
import pytest
import torch
import uvicorn
from browser import CONTRAST, Tab, browser
from cli_tool import Cli
from client_tools import until

from kvstore.cli.main import main
from kvstore.clustermap import ClusterMap, Node
from kvstore.engine_integration.engine import EngineConfig
from kvstore.engine_integration.model import TINY, hit_tokens_max
from kvstore.engine_integration.model.weights import save
from kvstore.engine_integration.server.connection import Connection
from kvstore.engine_integration.server.template import Template
from kvstore.kernels import _native
from kvstore.metrics import SERVER

TEMPLATE = Template(TINY)
QUESTION = "def resume(prompt, blocks_found, entries):\n" * 4
SERVE = ("engine", "serve", "--model", "tiny", "--listen", "127.0.0.1:0", "--queue", "2")


class Served:
    """A server of this module: its address, its client, its counters."""

    def __init__(self, started: dict[str, Any]) -> None:
        self.url, self.node_pids, self.map = started["url"], started["node_pids"], started["map"]
        self.streams: list[Any] = []  # still open at the end
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def values(self) -> dict[str, float]:
        text = self.get("/metrics")[2].decode()
        return {name: float(value) for name, value in re.findall(r"^(kvstore_\S+) (\S+)$", text, re.MULTILINE)}

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        return self.ask("GET", path, None, **headers)

    def ask(self, method: str, path: str, body: bytes | None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        with closing(http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)) as connection:
            connection.request(method, path, body, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def refused(self, body: dict[str, Any] | bytes, path: str = "/v1/chat/completions") -> tuple[int, dict[str, Any]]:
        status, _, answer = self.ask("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())
        error = json.loads(answer)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return status, error

    def until_stored(self) -> None:
        until(lambda: self.values()['kvstore_agent_queued_requests{op="save"}'] == 0, "stores to end")


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "temperature": 0, "extra_body": {"ignore_eos": True}, **more}


@pytest.fixture(scope="module")
def window_directory() -> Iterator[str]:
    tag = ClusterMap.local([Node("node-00", "node-00", "127.0.0.1:1")], cluster_id="engine", k=1, m=0).tag
    server = _native.DirectoryServer("127.0.0.1", 0, cluster16=tag, memory_bytes=16 << 20)
    yield f"127.0.0.1:{server.port}"
    server.stop()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, window_directory: str) -> Iterator[Served]:
    """It ends in order on SIGTERM, with its nodes and what it still answers."""
    home = tmp_path_factory.mktemp("home")
    with server(home, window_directory, "--nodes", "4", "--directory", str(home / "cluster")) as running:
        yield running
        running.streams.append(running.client.chat.completions.create(**ask("to the end", max_tokens=30_000), stream=True))
        next(iter(running.streams[0]))
    assert not [pid for pid in running.node_pids if Path(f"/proc/{pid}").exists()]


@contextmanager
def server(home: Path, window_directory: str, *words: str) -> Iterator[Served]:
    process = Cli(home).start(*SERVE, "--window-directory", window_directory, *words, "--json")
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.kill()
        raise AssertionError(process.communicate(timeout=20))
    running = Served(json.loads(line)["data"])
    try:
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        with closing(running.client):
            for stream in running.streams:  # what runs when the server is told to end is told so
                with pytest.raises(openai.APIError, match="shutting down"):
                    list(stream)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert "Traceback" not in said


def test_the_second_turn_takes_all_that_the_first_left_from_the_cache(served: Served) -> None:
    first = served.client.chat.completions.create(**ask(QUESTION, max_tokens=40))
    assert first.object == "chat.completion" and first.model == "tiny" and first.choices[0].finish_reason == "length"
    usage = first.usage
    assert usage is not None and usage.prompt_tokens == len(QUESTION) + 4 and usage.completion_tokens == 40
    assert usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens == 0
    said = first.choices[0].message.content
    assert said is not None
    messages: list[Any] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "and then?"},
    ]
    served.until_stored()
    second = served.client.chat.completions.create(**{**ask(""), "messages": messages, "max_tokens": 4})
    prompt = TEMPLATE.chat([(message["role"], message["content"]) for message in messages])
    assert second.usage is not None and second.usage.prompt_tokens == len(prompt)
    assert second.usage.prompt_tokens_details is not None
    cache = (second.model_extra or {})["kvstore"]
    found = cache["cached_tokens"] + cache["replayed_tokens"]
    # All whole blocks of the first turn, as far as the hit rule goes. The last answered token was never read by the model.
    whole = (len(TEMPLATE.chat([("user", QUESTION)])) + 39) // TINY.block * TINY.block
    assert found == min(hit_tokens_max(TINY, len(prompt)), whole) > len(QUESTION) // 2
    assert second.usage.prompt_tokens_details.cached_tokens == cache["cached_tokens"] > 0
    assert cache["hit"] and cache["window"] in ("hit", "older", "exact", "bounded") and cache["ttft_seconds"] > 0
    again = served.client.chat.completions.create(
        **{**ask(""), "messages": messages, "max_tokens": 4, "extra_body": {"ignore_eos": True, "kvstore": {"resume": "off"}}}
    )
    off = (again.model_extra or {})["kvstore"]
    assert off["window"] == "none" and not off["hit"], "resume: off computes it all"
    if cache["depth"] == 0:
        assert again.choices[0].message.content == second.choices[0].message.content


def test_a_turn_that_goes_to_another_server_hits_there_too(served: Served, window_directory: str, tmp_path: Path) -> None:
    """Its blocks always; its window where it comes in time: on a busy machine that may be some conversations later."""
    exact = {"ignore_eos": True, "kvstore": {"resume": "exact"}}
    with server(tmp_path, window_directory, "--map", served.map, "--access-log", str(tmp_path / "log")) as other:
        for number in range(24):  # a holder that was late once is not asked for 5 s
            asked = f"{QUESTION}elsewhere {number}"
            said = served.client.chat.completions.create(**ask(asked, max_tokens=40)).choices[0].message.content
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}, {"role": "user", "content": "?" * 20}]
            served.until_stored()
            turn = {**ask(""), "messages": messages, "max_tokens": 4, "extra_body": exact}
            second = other.client.chat.completions.create(**turn)
            cache = (second.model_extra or {})["kvstore"]
            assert cache["cached_tokens"] + cache["replayed_tokens"] > 150 and cache["depth"] == 0
            again = served.client.chat.completions.create(**turn)
            assert again.choices[0].message.content == second.choices[0].message.content
            if cache["window"] == "hit":
                break
        assert cache["window"] == "hit" and other.values()['kvstore_window_takes_total{where="peer"}'] >= 1
    (log,) = (tmp_path / "log").glob("*.parquet")
    rows = pyarrow.parquet.read_table(log).to_pylist()
    assert len(rows) == number + 1 and all(row["model"] == "tiny" and row["hit_tokens"] > 100 for row in rows)


def test_a_stream_says_what_the_whole_says_and_ends_with_usage(served: Served) -> None:
    whole = served.client.chat.completions.create(**ask("stream", max_tokens=24))
    chunks = list(
        served.client.chat.completions.create(**ask("stream", max_tokens=24), stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length" and (chunks[-2].model_extra or {})["kvstore"]["prompt_tokens"] == 10
    usage = chunks[-1].usage
    assert chunks[-1].choices == [] and usage is not None and usage.completion_tokens == 24 and usage.total_tokens == 34
    plain = list(served.client.chat.completions.create(**ask("stream", max_tokens=24), stream=True))
    assert plain[-1].choices[0].finish_reason == "length" and all(chunk.usage is None for chunk in plain)


def test_completions_take_text_or_tokens_and_stop_where_told(served: Served) -> None:
    more = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    of_text = served.client.completions.create(model="tiny", prompt="import ", **more)
    of_tokens = served.client.completions.create(model="tiny", prompt=TEMPLATE.document("import "), **more)
    text = of_text.choices[0].text
    assert of_text.object == "text_completion" and text == of_tokens.choices[0].text and of_text.choices[0].finish_reason == "length"
    stop = text[4:6]
    stopped = served.client.completions.create(model="tiny", prompt="import ", stop=stop, **more)
    assert stopped.choices[0].text == text[: text.find(stop)] and stopped.choices[0].finish_reason == "stop"
    assert stopped.usage is not None and stopped.usage.completion_tokens <= 24
    parts = served.client.completions.create(model="tiny", prompt="import ", stop=stop, stream=True, **more)
    assert "".join(part.choices[0].text for part in parts) == text[: text.find(stop)]
    seeded = [served.client.completions.create(model="tiny", prompt="x", seed=seed, temperature=1).choices[0].text for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]


def test_models_are_listed(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == ["tiny"] and served.client.models.retrieve("tiny").owned_by == "kvstore"
    assert served.get("/health")[:1] == (200,) and served.get("/livez")[2] == b"ok\n"


def test_what_is_wrong_comes_back_in_openais_form(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match='this server has "tiny"') as missing:
        served.client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": "a"}])
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="only 1 is") as refused:
        served.client.chat.completions.create(**ask("a", n=2))
    assert refused.value.param == "n" and refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        served.client.chat.completions.create(**ask("a", logprobs=True))
    with pytest.raises(openai.BadRequestError, match="context is 32768") as long:
        served.client.chat.completions.create(**ask("a" * 40_000))
    assert long.value.code == "context_length_exceeded"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    for wrong, param in (
        ({**body, "temperature": 3}, "temperature"),
        ({**body, "max_tokens": 0}, "max_tokens"),
        ({**body, "stop": ["a"] * 5}, "stop"),
        ({**body, "messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({**body, "messages": []}, "messages"),
        ({**body, "kvstore": {"resume": "maybe"}}, "kvstore.resume"),
        ({**body, "kvstore": {"resumé": "off"}}, "kvstore.resumé"),
        ({**body, "model": "\ud800"}, "model"),
        ({**body, "n": "\ud800"}, "n"),
        ({**body, "max_tokens": 10**4200}, "max_tokens"),
        ({**body, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ):
        status, error = served.refused(wrong)
        assert status == (404 if param == "model" else 400) and error["param"] == param and len(error["message"]) < 600, error
    assert served.refused({"model": "tiny", "prompt": [1, "a"]}, "/v1/completions")[1]["param"] == "prompt"
    assert '[0].content: a text, or a list of {"type": "text", ' in error["message"]
    assert served.refused({"model": "tiny", "prompt": [1, 999]}, "/v1/completions")[0] == 400
    assert served.refused({"model": "tiny", "prompt": []}, "/v1/completions")[0] == 400
    assert served.refused({**body, "kvstore": {"retention_class": "no-such"}})[0] == 400
    for raw in (b"", b"{", b"[]", b"[" * 100_000, b'{"model": "\xff"}'):
        assert served.refused(raw)[0] == 400
    assert served.refused(b" " * (9 << 20))[0] == 413
    assert served.refused(b"", "/v1/nothing")[0] == 404
    assert served.ask("GET", "/v1/completions", None)[0] == 405


def test_who_sends_nothing_shuts_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.engine_integration.server.connection.CONNECTIONS_MAX", 4)
    monkeypatch.setattr("kvstore.engine_integration.server.connection.HEAD_SECONDS", 0.3)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    server = uvicorn.Server(uvicorn.Config(answer, http=Connection, ws="none", lifespan="off", log_config=None, log_level="critical"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()

        def status(connection: socket.socket) -> bytes:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            return connection.recv(4096)[9:12]

        until(lambda: server.started, "the server to start")
        silent = [socket.create_connection(listening.getsockname(), 10) for _ in range(4)]
        for connection in silent[::2]:
            connection.sendall(b"GET / HTTP/1.1\r\nHo")
        with socket.create_connection(listening.getsockname(), 10) as more:
            assert status(more) == b"503"
        assert all(connection.recv(1) == b"" for connection in silent), "cut"
        with socket.create_connection(listening.getsockname(), 10) as more:
            assert status(more) == b"204"
            more.sendall(b"GET")  # the next, and never its end
            assert more.recv(1) == b""
        server.should_exit = True
        thread.join(10)
        for connection in silent:
            connection.close()


def test_another_sites_name_for_this_address_gets_nothing(served: Served) -> None:
    for host, status in (("localhost:1", 200), ("evil.example", 421), ("", 421)):
        assert served.get("/v1/models", Host=host)[0] == status


def test_a_client_that_goes_away_ends_its_request_and_a_full_queue_is_told(served: Served) -> None:
    def cancelled() -> float:
        return served.values()['kvstore_engine_requests_total{result="cancelled"}']

    before, long = cancelled(), ask("on and on", max_tokens=30_000)
    with served.client.chat.completions.create(**long, stream=True) as stream:
        next(iter(stream))
    until(lambda: cancelled() == before + 1, "the stream's request to end")
    begun, told = threading.Semaphore(0), []

    def one(_: int) -> None:
        try:
            with served.client.chat.completions.create(**long, stream=True) as stream:
                begun.release()
                next(iter(stream))
                full.wait(60)
        except openai.RateLimitError as error:
            told.append((error.code, error.response.headers["retry-after"]))
            full.set()

    full, count = threading.Event(), EngineConfig().running_max + 4
    with ThreadPoolExecutor(count) as pool:
        waits = [pool.submit(one, i) for i in range(count)]
        assert full.wait(60), "no request was refused"
        served.client.close()  # those that wait for their first token, too
        for wait in waits:
            wait.exception(60)
    served.client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)
    assert set(told) == {("queue_full", "1")}
    assert served.client.chat.completions.create(**ask("still here", max_tokens=2)).choices[0].finish_reason == "length"


def test_wrong_words_and_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*words: str) -> str:
        assert main(["engine", "serve", *words]) == 2
        return capsys.readouterr().err

    assert refused("--listen", "8000").startswith('error[E131] --listen "8000"')
    assert 'error[E190] no model "large"' in refused("--model", "large")
    assert "error[E131] --threads 0" in refused("--threads", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "error[E107]" in refused("--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    (tmp_path / "noise").write_bytes(b"no weights")
    serve = ("--model", "tiny", "--listen", "127.0.0.1:0", "--weights")
    assert "error[E171]" in refused(*serve, str(tmp_path / "noise"))
    assert "error[E170]" in refused(*serve, str(tmp_path / "nothing"))
    save(tmp_path / "other", {"embedding.weight": torch.zeros(8, 8)}, {})
    assert "error[E174]" in refused(*serve, str(tmp_path / "other"))
    assert "error[E156] mover cuda: pages are in host RAM" in refused(*serve[:4], "--mover", "cuda")
    assert "error[E132]" in refused(*serve[:4], "--mover", "teleport")
    assert "error[E140]" in refused(*serve[:4], "--map", "map.toml", "--directory", str(tmp_path))
    assert "error[E136]" in refused(*serve[:4], "--directory", str(tmp_path), "--fresh")
    ClusterMap.local([Node("node-00", "node-00", "127.0.0.1:1", "127.0.0.1:2")], k=1, m=0).save(tmp_path / "map.toml")
    assert main(["engine", "serve", *serve[:4], "--map", str(tmp_path / "map.toml")]) == 3 and "error[E202]" in capsys.readouterr().err
    monkeypatch.setattr("kvstore.cli.engine.NEEDED", ("torch", "no_such_package"))
    assert "pip install 'kvstore[engine]'" in refused() and "E160" in refused()


def test_the_server_exports_its_metrics_and_its_clients(served: Served) -> None:
    found = {name.partition("{")[0] for name in served.values()}
    assert {metric.name + ("_count" if metric.kind == "histogram" else "") for metric in SERVER} <= found
    assert "kvstore_lookup_tokens_total" in found and "kvstore_build_info" in found


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    with browser() as running:
        yield running


def test_a_person_sees_the_second_turn_get_faster_and_why(served: Served, chromium: object) -> None:
    with Tab(chromium, served.url) as tab:
        page = tab.page
        page.wait_for_selector("#facts:has-text('model tiny, weights random')")
        page.select_option("#heat", "0")
        page.select_option("#length", "32")
        page.click("#long")
        until(lambda: len(page.input_value("#ask")) > 5000, "the long text is there")
        page.fill("#ask", page.input_value("#ask")[:1500])  # tiny computes 16 tokens at a time
        page.click("#send")
        page.wait_for_selector(".turn:nth-of-type(2) .facts", timeout=60_000)
        first = tab.text(".turn:nth-of-type(2)")
        assert "window none" in first and re.search(r"0 cached\s+[\d,]+ computed", first) and "faster" not in first
        served.until_stored()
        page.fill("#ask", "and the second time? <img src=x onerror=alert(1)>")
        page.keyboard.press("Enter")
        page.wait_for_selector(".turn:nth-of-type(3) .facts", timeout=60_000)
        second = tab.text(".turn:nth-of-type(3)")
        assert re.search(r"window (hit|older|exact|bounded)", second) and re.search(r"[\d.]+ . faster", second)
        cached, computed = (int(found.replace(",", "")) for found in re.findall(r"([\d,]+) (?:cached|computed)", second))
        assert cached > 1200 > 200 > computed
        assert page.locator("img").count() == 0 and page.locator(".said").nth(1).inner_text().endswith("onerror=alert(1)>")
        page.click("#fresh")
        assert page.locator(".turn").count() == 0 and page.is_visible("#hint")
        assert tab.complaints == [] and tab.hosts == {urlsplit(served.url).netloc}


# By the page itself, and watching before it asks: a click or a look from here may come when the answer has ended.
ASK_AND_STOP = """() => new Promise((stopped, failed) => {
  const word = byId("word");
  new MutationObserver(() => {
    if (word.textContent === "answering") stopped(byId("stop").click());
    if (word.textContent === "ready") failed(new Error("ended by itself: " + [...document.querySelectorAll(".turn")].pop().textContent));
  }).observe(word, {childList: true, characterData: true, subtree: true});
  byId("send").click();
})"""


# The answer as it is when all of it lies in the page's memory.
COME_AT_ONCE = """() => {
  const ask = window.fetch;
  window.fetch = async (...words) => new Response(await (await ask(...words)).text());
}"""


def test_an_answer_can_be_stopped_and_a_refusal_is_told(served: Served, chromium: object) -> None:
    with Tab(chromium, served.url) as tab:
        page = tab.page
        page.wait_for_selector("#facts:has-text('model tiny')")
        page.fill("#ask", "a" * 40_000)
        page.click("#send")
        page.wait_for_selector(".fault:has-text('context is 32768 tokens')")
        assert len(page.input_value("#ask")) == 40_000, "what was not sent is not lost"
        page.fill("#ask", "go on")
        page.select_option("#length", "256")
        page.select_option("#heat", "0")  # by chance, an answer may be nothing
        page.evaluate(ASK_AND_STOP)
        page.wait_for_selector("#word:has-text('stopped')")
        assert page.is_enabled("#send")


def test_stop_is_heard_also_where_the_rest_of_the_answer_has_come_already(served: Served, chromium: object) -> None:
    """A page without a processor for a while gets all of it at once: nothing is left to abort."""
    with Tab(chromium, served.url) as tab:
        page = tab.page
        page.wait_for_selector("#facts:has-text('model tiny')")
        page.evaluate(COME_AT_ONCE)
        page.fill("#ask", "go on")
        page.select_option("#heat", "0")
        page.evaluate(ASK_AND_STOP)
        page.wait_for_selector("#word:has-text('stopped')")
        assert page.is_enabled("#send") and page.locator(".facts").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone_and_its_words_stand_out_in_light_and_dark(served: Served, chromium: object, scheme: Any) -> None:
    with Tab(chromium, served.url, width=390, height=844, scheme=scheme) as tab:
        tab.page.fill("#ask", "import os")
        tab.page.click("#send")
        tab.page.wait_for_selector(".facts", timeout=60_000)
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no scrolling sideways"
        assert tab.page.evaluate(CONTRAST) == [], f"contrast below 4.5 in {scheme}"
        tab.page.click("#theme")
        other = {"light": "dark", "dark": "light"}[scheme]
        assert tab.page.evaluate("document.documentElement.dataset.theme") == other and tab.complaints == []


def test_the_page_may_load_nothing_from_elsewhere_and_runs_no_script_but_its_own(served: Served) -> None:
    status, headers, body = served.get("/")
    policy = headers["content-security-policy"]
    assert status == 200 and "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    assert not re.search(rb"https?://", body) and b"innerHTML" not in body and b"eval(" not in body
