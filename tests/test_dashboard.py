"""`kvstore dashboard` in a real browser on a real cluster: what is wrong shows, drills down, fits a phone; and its answers over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from browser import CONTRAST, Tab, browser
from cli_tool import Cli
from client_tools import SMALL, chain, load, store
from server_tools import until

from kvstore import http as kvstore_http
from kvstore.client import Client, ClientConfig
from kvstore.client.agent.agent import Agent
from kvstore.client.agent.metrics import serve_metrics
from kvstore.http import HttpServer, Page, Request
from kvstore.live.recent_log import RecentLog
from kvstore.live.web import page
from kvstore.server.local import LocalCluster

pytestmark = pytest.mark.timeout(240)
EVIL = "<img src=x onerror=console.error(1)><script>console.error(2)</script>"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("dashboard"), 4, k=2, m=2, capacity_bytes=128 << 20, directories=1) as running:
        yield running


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory, cluster: LocalCluster) -> Cli:
    return Cli(tmp_path_factory.mktemp("home"), KVSTORE_MAP=str(cluster.map_path))


@contextmanager
def dashboard(cli: Cli, *arguments: str) -> Iterator[str]:
    """Its address; it ends in order, with exit code 0."""
    process: subprocess.Popen[str] = cli.start("dashboard", "--port", "0", "--interval", "300ms", *arguments)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), process.communicate(timeout=20)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.fixture(scope="module")
def url(cli: Cli, cluster: LocalCluster) -> Iterator[str]:
    """Of a dashboard that watches a client which has looked up, loaded and missed, and a page whose labels are markup."""
    evil = f'kvstore_lookup_tokens_total{{owner="{EVIL}",retention_class="chat"}} '
    asked = 0

    def strange(_: object) -> Page:
        nonlocal asked
        asked += 128
        return Page(f"{evil}{asked}\n".encode())

    other = HttpServer("127.0.0.1", 0, strange)
    with (
        Client(cluster.map, layout=SMALL) as client,
        Agent(client) as agent,
        serve_metrics(agent, 0) as port,
        dashboard(cli, "--client", f"127.0.0.1:{port}", "--client", f"127.0.0.1:{other.port}") as address,
    ):
        until_first_look(address)
        keys = chain(64, SMALL)
        store(client, keys)
        load(client, client.lookup(keys))
        client.lookup(chain(64, SMALL))
        assert agent.keep_window(keys, 128, bytes(500)) and agent.window(keys, 128)
        yield address
    other.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    with browser() as running:
        yield running


def get(url: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def state(url: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(url, "/api/state")[2])
    return found


def until_first_look(url: str) -> None:
    for _ in range(2000):
        if state(url)["data"] is not None:
            return
    raise AssertionError("no look at the cluster")


def test_a_killed_node_turns_the_page_to_warn_and_is_named_until_it_is_back(url: str, chromium: object, cluster: LocalCluster) -> None:
    with Tab(chromium, url) as tab:
        tab.page.wait_for_selector("#word:has-text('OK')")
        cluster.kill(2)
        try:
            tab.page.wait_for_selector("#word:has-text('WARN')")
            checks = tab.text("#checks")
            assert "NODE_DOWN" in checks and "node-02" in checks and "kvstore explain NODE_DOWN" in checks
            assert tab.text("#strip button >> nth=0").splitlines()[:2] == ["node-02", "✕ down"], "worst first"
            assert "1 more" in tab.text("#tiles") and tab.page.title().startswith("WARN")
            assert "NODE_DOWN" in tab.text("#events")
            tab.page.click("#checks .check:has-text('NODE_DOWN') button:has-text('copy')")
            tab.page.wait_for_selector("#checks button:has-text('copied')")
            assert tab.page.evaluate("navigator.clipboard.readText()") == "kvstore explain NODE_DOWN"
        finally:
            cluster.restart(2)
        tab.page.wait_for_selector("#word:has-text('OK')")
        assert "NODE_DOWN is over" in tab.text("#events")
        assert tab.complaints == [] and tab.hosts == {urlsplit(url).netloc}


def test_agents_and_window_directories_are_on_the_page_and_missed_there(url: str, chromium: object, cluster: LocalCluster) -> None:
    [address] = cluster.map.directories
    with Tab(chromium, url) as tab:
        tab.page.wait_for_selector("#agents:has-text('100.0 %')")
        assert re.search(r"● up\s+in an engine\s.*\s1, 532 B\s+100\.0 %", tab.text("#agents"))
        tab.page.wait_for_selector("#directories:has-text('● up')")
        assert re.search(rf"{address}\s+● up\s+.* ago\s+\d\s+1\s", tab.text("#directories"))
        cluster.kill(cluster.nodes_count)
        try:
            tab.page.wait_for_selector("#directories:has-text('✕')")
            tab.page.wait_for_selector("#checks:has-text('DIRECTORY_DOWN')")
        finally:
            cluster.restart(cluster.nodes_count)
        tab.page.wait_for_selector("#word:has-text('OK')")
        assert tab.complaints == []


def test_what_is_muted_stays_in_sight_and_does_not_change_the_word(url: str, chromium: object, cluster: LocalCluster, cli: Cli) -> None:
    codes = ("NODE_DOWN", "HOSTS_BELOW_STRIPE")
    cluster.kill(1)
    try:
        with Tab(chromium, url) as tab:
            tab.page.wait_for_selector("#word:has-text('WARN')")
            for code in codes:
                assert cli.run("mute", code, "1h").code == 0
            tab.page.wait_for_selector("#word:has-text('OK')")
            assert re.search(r"Muted: 2\s.*NODE_DOWN", tab.text("#checks"), re.DOTALL) and "muted until" in tab.text("#checks")
            assert "down" in tab.text("#strip button >> nth=0") and tab.complaints == []
    finally:
        for code in codes:
            cli.run("unmute", code)
        cluster.restart(1)


def test_what_clients_count_is_on_the_page_in_words_and_units(url: str, chromium: object) -> None:
    with Tab(chromium, url) as tab:
        tab.page.wait_for_selector("#tiles:has-text('%')")
        tiles = tab.text("#tiles")
        assert re.search(r"Hit rate\s+\d+\.\d %\s+of [\d,]+ tokens in", tiles) and re.search(r"Load p99\s+[\d.]+ (ms|µs|s)\s+p50", tiles)
        assert "unknown" in tab.text("#misses") and "% of tokens" in tab.text("#misses")
        assert re.search(r"chat\s.*7\.0 d", tab.text("#classes")) and "default" in tab.text("#owners")
        assert tab.page.locator("#plots svg").count() == 6 and tab.page.locator("#plots path").count() >= 5
        moves = itertools.cycle([90, 120, 150])

        def crossed() -> bool:  # a picture may be drawn anew just as the pointer comes: who looks at it moves on
            tab.page.locator("#plots svg").first.hover(position={"x": next(moves), "y": 60})
            return bool(tab.page.locator("#plots .cross").count())

        until(crossed, "the crosshair")
        assert EVIL in tab.text("#owners"), "markup in a label is text"
        assert tab.page.locator("img").count() == 0 and tab.complaints == []


def test_a_click_on_a_node_shows_its_numbers_and_escape_leads_back(url: str, chromium: object) -> None:
    with Tab(chromium, url) as tab:
        tab.page.click("#strip button[data-node='node-01']")
        tab.page.wait_for_selector("#panel[open] #without")
        shown = tab.text("#panel")
        assert "node-01" in shown and "everything can still be read" in shown and re.search(r"used\s+[\d.]+ [kM]?B of 134\.2 MB", shown)
        assert tab.page.locator("#panel svg").count() == 3 and tab.page.url.endswith("#node=node-01")
        tab.page.keyboard.press("Escape")
        tab.page.wait_for_selector("#panel:not([open])", state="attached")
        tab.page.wait_for_function("!location.hash")  # by an event that comes after the panel has closed
        assert tab.complaints == []
    with Tab(chromium, f"{url}/#node=node-03") as tab:
        tab.page.wait_for_selector("#panel[open] #without")
        assert "node-03" in tab.text("#panel header")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone_and_its_words_stand_out_in_light_and_dark(url: str, chromium: object, scheme: Any) -> None:
    with Tab(chromium, url, width=390, height=844, scheme=scheme) as tab:
        tab.page.wait_for_selector("#plots path")
        for hash in ("", "#node=node-00"):
            tab.page.evaluate("hash => { location.hash = hash; }", hash)
            if hash:
                tab.page.wait_for_selector("#panel[open] svg")
            assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no scrolling sideways"
            weak = tab.page.evaluate(CONTRAST)
            assert weak == [], f"contrast below 4.5 in {scheme}"
        tab.page.keyboard.press("Escape")
        tab.page.click("#theme")
        other = {"light": "dark", "dark": "light"}[scheme]
        assert tab.page.evaluate("document.documentElement.dataset.theme") == other
        tab.page.reload()
        tab.page.wait_for_selector("#word")
        assert tab.page.evaluate("document.documentElement.dataset.theme") == other, "the choice is kept"
        assert tab.complaints == []


def test_a_dashboard_that_ended_is_told_on_the_page(cli: Cli, chromium: object) -> None:
    with dashboard(cli) as url:
        tab = Tab(chromium, url)
        assert "no client is watched" in tab.text("#tiles") and "0 %" not in tab.text("#tiles .card >> nth=0")
    with tab:
        tab.page.wait_for_selector("body.old")
        assert "the dashboard does not answer" in tab.text("#head")


def test_answers_are_json_with_the_envelope_of_all_commands(url: str) -> None:
    status, headers, body = get(url, "/api/state")
    answer = json.loads(body)
    assert status == 200 and headers["Content-Type"] == "application/json" and headers["Cache-Control"] == "no-store"
    assert set(answer) == {"schema", "time", "version", "cluster", "epoch", "ok", "health", "data", "error"}
    assert answer["schema"] == "kvstore.dashboard/1" and answer["cluster"] == "dev" and answer["data"]["age_seconds"] < 30

    def history() -> dict[str, list[float]]:
        columns: dict[str, list[float]] = json.loads(get(url, "/api/history")[2])
        return columns

    until(lambda: len(history()["unix_seconds"]) >= 2, "the nodes were asked twice")
    whole = history()
    assert len({len(column) for column in whole.values()}) == 1
    later = json.loads(get(url, f"/api/history?since={whole['unix_seconds'][-2]}")[2])
    assert 1 <= len(later["unix_seconds"]) < len(whole["unix_seconds"]) + 1 and later["unix_seconds"][0] == whole["unix_seconds"][-1]
    one = json.loads(get(url, "/api/node?id=node-00")[2])
    assert one["without_host"]["readable"] and one["node"]["id"] == "node-00"
    for path, code in (
        ("/api/node?id=node-99", 404),
        ("/api/node", 404),
        ("/api/history?since=x", 400),
        ("/../etc/passwd", 404),
        ("/api", 404),
    ):
        assert get(url, path)[0] == code, path
    assert get(url, "/livez")[0] == 200


def test_the_page_may_load_nothing_from_elsewhere_and_runs_no_script_but_its_own(url: str) -> None:
    status, headers, body = get(url, "/")
    policy = headers["Content-Security-Policy"]
    assert status == 200 and body == page()[0] and "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "unsafe" not in policy and "http" not in policy and headers["X-Content-Type-Options"] == "nosniff"
    addresses = set(re.findall(rb"https?://[^\s\"'`)]+", body)) - {b"http://www.w3.org/2000/svg", b"http://HOST:PORT"}
    assert addresses == set(), "no other host in the page"
    assert b"innerHTML" not in body and b"eval(" not in body


def test_another_sites_name_for_this_address_gets_nothing(url: str) -> None:
    port = urlsplit(url).port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost:9", f"[::1]:{port}"):
        assert get(url, "/api/state", Host=host)[0] == 200, host
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "10.0.0.1"):
        assert get(url, "/api/state", Host=host)[0] == 421, host


def test_only_reading_is_answered(url: str) -> None:
    for method in ("POST", "PUT", "DELETE"):
        request = urllib.request.Request(f"{url}/api/state", data=b"x", method=method)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=20)
        assert refused.value.code == 501
        refused.value.close()


def test_a_dashboard_starts_and_says_err_while_no_node_answers(tmp_path: Path, cluster: LocalCluster) -> None:
    from kvstore.clustermap import ClusterMap, Node

    closed = ClusterMap.local([Node(f"node-{i:02}", f"host-{i}", f"127.0.0.1:{i + 1}", f"127.0.0.1:{i + 11}") for i in range(4)], k=2, m=2)
    closed.save(tmp_path / "closed.toml")
    with dashboard(Cli(tmp_path, KVSTORE_MAP=str(tmp_path / "closed.toml"))) as url:
        until_first_look(url)
        found = state(url)
    assert (
        found["data"]["status"] == "ERR"
        and found["data"]["readable"] is False
        and found["data"]["traffic"]["load_bytes_per_second"] is None
    )


def test_a_taken_port_and_wrong_words_are_refused(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cli.run("dashboard", "--port", str(taken.getsockname()[1])).refused(2, "E107", "--port N")
    cli.run("dashboard", "--port", "x").refused(2, "E131")
    cli.run("dashboard", "--client", "ftp://x:1").refused(2, "E140")
    cli.run("dashboard", KVSTORE_MAP="").refused(2, "E141")


def test_tenants_and_models_of_the_last_hour_come_from_the_access_log(
    cli: Cli, cluster: LocalCluster, chromium: object, tmp_path: Path
) -> None:
    for tenant, prompts in (("acme", 3), ("umbrella", 1)):
        config = ClientConfig(access_log=tmp_path / "log", tenant=tenant, model_name="v41")
        with Client(cluster.map, layout=SMALL, config=config) as client:
            for _ in range(prompts):
                client.lookup(chain(32, SMALL))
    (tmp_path / "log" / "access-damaged.parquet").write_bytes(b"PAR1 and no more")
    found = RecentLog(tmp_path / "log").data()
    assert [(row["tenant"], row["requests"], row["input_tokens"]) for row in found["tenants"]] == [
        ("acme", 3, 3 * 32 * 128),
        ("umbrella", 1, 32 * 128),
    ]
    assert [(row["model"], row["hit_ratio"]) for row in found["models"]] == [("v41", 0.0)] and found["files"] == 2 and found["rows"] == 4
    assert RecentLog(tmp_path / "log", clock=lambda: time.time() + 4000).data()["rows"] == 0, "an hour, no more"
    assert "no such file" in RecentLog(tmp_path / "nowhere").data()["error"]
    with dashboard(cli, "--log", str(tmp_path / "log")) as url, Tab(chromium, url) as tab:
        shown = tab.text("#log")
        assert "last 1.0 h: 4 requests in 2 files" in shown and re.search(r"acme\s+12,288\s+0\.0 %", shown) and tab.complaints == []


def test_what_grafana_needs_is_written_with_and_without_a_map(cli: Cli, tmp_path: Path) -> None:
    ran = cli.run("dashboard", "--export", "grafana", tmp_path / "out", "--json")
    assert ran.code == 0 and {Path(path).name for path in ran.json["data"]["files"]} >= {
        "kvstore-dashboard.json",
        "kvstore-rules.yml",
        "kvstore-nodes.json",
    }
    assert cli.run("dashboard", "--export", "grafana", tmp_path / "bare", KVSTORE_MAP="").stdout.count("\n") == 2
    cli.run("dashboard", "--export", "datadog", tmp_path / "x").refused(2, "--export grafana DIR")
    cli.run("dashboard", "--log", "nowhere").refused(2, "E100")


def test_a_burst_of_connections_is_taken_without_a_second_try() -> None:
    server = HttpServer("127.0.0.1", 0, lambda request: Page(b"ok"))
    try:
        with contextlib.ExitStack() as held:
            for _ in range(100):
                held.enter_context(socket.create_connection(("127.0.0.1", server.port), 0.9))
    finally:
        server.close()


def test_one_request_too_many_is_told_so() -> None:
    asked, go = threading.Event(), threading.Event()

    def page(request: Request) -> Page:
        asked.set()
        return Page(b"ok" if go.wait(20) else b"late")

    server = HttpServer("127.0.0.1", 0, page, requests_max=1)
    try:
        with socket.create_connection(("127.0.0.1", server.port), 20) as first:
            first.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert asked.wait(20)
            with socket.create_connection(("127.0.0.1", server.port), 20) as second:
                assert second.recv(4096).startswith(b"HTTP/1.0 503 ")
            go.set()
            assert first.recv(4096).startswith(b"HTTP/1.0 200 ")
    finally:
        go.set()
        server.close()


def test_a_client_that_sends_a_byte_now_and_then_holds_no_slot_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore_http, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(kvstore_http, "REQUESTS_MAX", 1)
    server = HttpServer("127.0.0.1", 0, lambda request: Page(b"ok"))
    try:
        with socket.create_connection(("127.0.0.1", server.port), 20) as slow:
            slow.sendall(b"GET / HTTP/1.0\r\nX: ")
            slow.settimeout(0.1)
            began = time.monotonic()
            with contextlib.suppress(ConnectionError):
                while time.monotonic() < began + 20:
                    slow.sendall(b"x")
                    with contextlib.suppress(TimeoutError):
                        if not slow.recv(1):
                            break
            assert time.monotonic() < began + 5
    finally:
        server.close()
