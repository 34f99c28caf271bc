"""What `top` and `dashboard` know: looks at real daemons and a real client; restarts and silence are told, nothing unknown is made up."""

from __future__ import annotations

import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_tool import ROOT, Cli
from client_tools import SMALL, WAIT_SECONDS, chain, load, store, until
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client import Client
from kvstore.client.agent.agent import Agent
from kvstore.client.agent.config import AgentConfig
from kvstore.client.agent.frames import PeerConfig
from kvstore.client.agent.metrics import serve_metrics as serve_agent
from kvstore.client.agent.process import AgentProcess
from kvstore.client.agent.process_config import ProcessConfig
from kvstore.client.agent.process_metrics import AGENT
from kvstore.client.agent.worker import WorkerAgent
from kvstore.client.metrics import serve_metrics
from kvstore.cluster_view import merged, quantile
from kvstore.errors import UsageError
from kvstore.layout import Layout
from kvstore.live.collector import Collector, kept_seconds
from kvstore.live.counts import Counts, added, joined, split
from kvstore.live.frame import Data
from kvstore.live.scrape import ask_clients, client_url, parse
from kvstore.live.view import plain_lines
from kvstore.metrics import CLIENT, COMMON, NODE, WINDOW
from kvstore.replay import ReplayOptions, open_trace, run_replay
from kvstore.server.local import LocalCluster, free_ports


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("live"), 4, k=2, m=2, capacity_bytes=128 << 20, directories=1) as running:
        yield running


def collector_of(cluster: LocalCluster, *clients: str) -> Collector:
    return Collector(cluster.map_path, clients, timeout_seconds=5.0)


def test_a_client_and_the_nodes_are_seen_at_work(cluster: LocalCluster) -> None:
    with Client(cluster.map, layout=SMALL) as client, serve_metrics(client, 0) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=10) as answer:
            assert answer.read() == b"ok\n"
        watched = collector_of(cluster, client_url(f"127.0.0.1:{port}"))
        first = watched.poll()
        assert first["interval_seconds"] is None and first["traffic"]["load_bytes_per_second"] is None, "one look knows no rate"
        assert first["status"] == "OK" and first["nodes_up"] == 4 and first["hits"]["hit_ratio"] is None
        idle = watched.poll()
        assert idle["traffic"]["load_bytes_per_second"] is not None and idle["hits"]["hit_ratio"] is None, "no traffic is no 0 %"
        assert idle["traffic"]["read_p99_seconds"] is None and idle["hits"]["load_p99_seconds"] is None
        keys = chain(64, SMALL)
        store(client, keys)
        loaded, _ = load(client, client.lookup(keys))
        client.lookup(chain(64, SMALL))
        assert loaded.blocks == 64
        busy = watched.poll()
        hits, traffic = busy["hits"], busy["traffic"]
        assert (hits["clients_up"], hits["lookup_tokens"], hits["hit_tokens"]) == (1, 128 * 128, 64 * 128)
        assert hits["hit_ratio"] == hits["hit_ratio_now"] == 0.5 and hits["loads"] == 1 and 0 < hits["load_p99_seconds"] < 10
        assert hits["fallbacks"] == dict.fromkeys(("timeout", "missing", "corrupt", "unreachable"), 0.0)
        moved = traffic["load_bytes_per_second"] * busy["interval_seconds"]
        assert 64 * SMALL.block_bytes < moved < 3 * 64 * SMALL.block_bytes and 0 < traffic["read_p99_seconds"] < 10
        assert traffic["errors_per_second"] == 0 and traffic["errors"] == 0
        chat = next(row for row in busy["classes"] if row["retention_class"] == "chat")
        assert chat["hit_ratio"] == 0.5 and chat["contract_seconds"] == 7 * 86400
        assert busy["owners"][0]["owner"] == "default" and busy["owners"][0]["hit_ratio"] == 0.5 and busy["owners"][0]["used_bytes"] > 0
        assert {row["state"] for row in busy["nodes"]} == {"ready"} and busy["clients"][0]["state"] == "up"
        history = watched.history()
        assert {len(column) for column in history.values()} == {3} and history["hit_ratio"] == [None, None, 0.5]
        one = watched.node_history("node-00")
        assert one is not None and len(one["unix_seconds"]) == 3 and watched.node_history("node-99") is None
        assert all(event["kind"] != "client" for event in watched.events())
        url = busy["clients"][0]["url"]
    gone = watched.poll()
    assert gone["hits"]["clients_up"] == 0 and gone["clients"][0]["error"] == "connection refused" and gone["clients"][0]["age_seconds"] > 0
    assert watched.events()[0]["subject"] == url and "does not answer" in watched.events()[0]["text"]


def test_a_killed_node_is_told_with_its_time_and_told_again_when_it_is_back(cluster: LocalCluster) -> None:
    watched = collector_of(cluster)
    watched.poll()
    cluster.kill(2)
    try:
        for _ in range(2):
            frame = watched.poll()
        assert frame["status"] == "WARN" and frame["nodes_up"] == 3
        down = next(check for check in frame["health"] if check["code"] == "NODE_DOWN")
        assert down["subject"] == "node-02" and down["since"] <= frame["time"]
        row = next(row for row in frame["nodes"] if row["id"] == "node-02")
        assert row["state"] == "down" and row["age_seconds"] > 0 and row["load_bytes_per_second"] is None and row["used_bytes"] is None
        assert frame["hosts_losable"] == 1 and frame["readable"]
        assert watched.losses(["node-00", "node-01"]).readable is False and watched.losses(["node-00"]).readable is True
        told = [(event["subject"], event["severity"]) for event in watched.events() if event["code"] == "NODE_DOWN"]
        assert told == [("node-02", "WARN")], "once, not at each look"
    finally:
        cluster.restart(2)
    back = watched.poll()
    assert back["status"] == "OK" and back["status_since"] >= frame["status_since"]
    assert any(event["text"] == "NODE_DOWN is over" for event in watched.events())
    assert watched.poll()["traffic"]["load_bytes_per_second"] is not None


def test_a_node_that_was_only_out_of_sight_does_not_count_its_whole_life_as_one_interval(cluster: LocalCluster) -> None:
    with Client(cluster.map, layout=SMALL) as client:
        store(client, chain(256, SMALL))
    watched = collector_of(cluster)
    watched.poll()
    report = watched._reports[1]
    watched._reports[1] = type(report)(report.node, "down", "no answer")  # as a look that the node did not answer leaves it
    frame = watched.poll()
    assert frame["nodes"][1]["save_bytes_per_second"] is None
    assert frame["traffic"]["save_bytes_per_second"] * frame["interval_seconds"] < 1_000_000


def test_agents_and_window_directories_are_seen_at_work(cluster: LocalCluster, tmp_path: Path) -> None:
    """An agent in this process keeps three entries; a worker of an agent process asks for two of them and one that nobody has."""
    process = AgentProcess(
        ProcessConfig(map_path=cluster.map_path, socket_path=tmp_path / "a.sock", memory_bytes=1 << 20, worker_bytes=1 << 20)
    )
    process.start()
    patient = AgentConfig(directory_seconds=5.0, fetch_seconds=5.0, peer=PeerConfig(silence_seconds=5.0))
    try:
        with (
            Client(cluster.map, layout=SMALL) as client, Agent(client, config=patient) as own, serve_agent(own, 0) as port,
            WorkerAgent(tmp_path / "a.sock", layout=SMALL) as worker,
        ):  # fmt: skip
            assert process.http is not None
            urls = [client_url(f"127.0.0.1:{port}") for port in (port, process.http.port)]
            watched = collector_of(cluster, *urls)
            first = watched.poll()
            assert [(row["url"], row["state"], row["workers"]) for row in first["agents"]] == [(urls[0], "up", None), (urls[1], "up", 1)]
            assert first["agents"][1]["memory_bytes"] == 1 << 20 and first["agents"][1]["window_hit_ratio"] is None, "nothing was asked for"
            [directory] = first["directories"]
            assert (directory["address"], directory["state"]) == (cluster.map.directories[0], "up") and directory["found_ratio"] is None
            assert directory["located_per_second"] is None, "one look knows no rate"
            keys = chain(4, SMALL)
            for tokens in (128, 256, 384):
                assert own.keep_window(keys, tokens, bytes(500))
            assert own.flush(WAIT_SECONDS)
            for tokens in (128, 256):  # late on a busy machine: a miss
                until(lambda tokens=tokens: worker.window(keys, tokens) is not None, "the entry of the other agent")  # type: ignore[misc]  # bound now
            asked = 2 + (worker.window(keys, 512) is None)
            busy = watched.poll()
            mine, others = busy["agents"]
            assert (mine["window_entries"], mine["window_bytes"]) == (3, 3 * (500 + 32)) and mine["window_hit_ratio"] is None
            assert others["windows_asked"] >= asked == 3 and 0 < others["window_hit_ratio"] == others["window_peer_ratio"] < 1
            [directory] = busy["directories"]
            assert directory["entries"] >= 3 and directory["agents"] >= 1 and 0 < directory["found_ratio"] <= 1
            assert directory["located_per_second"] > 0 and directory["lost_per_second"] == 0 and directory["memory_bytes"] > 0
            said = Cli(tmp_path).run("status", "--map", cluster.map_path, "--client", urls[0], "--client", urls[1])
            assert re.search(r"agents   2 agents   1 worker   \d+ window entries, .* found", said.stdout), said.stdout
            shown = "\n".join(text for text, _ in plain_lines(busy, "dev", 1.0))
            assert re.search(rf"{directory['address']}\s+up\s+\d", shown) and re.search(rf"{urls[1]}\s+up\s+1 ", shown)
            cluster.kill(cluster.nodes_count)
            try:
                gone = watched.poll()
                assert gone["status"] == "WARN" and gone["directories"][0]["state"] == "down" and gone["directories"][0]["entries"] is None
                assert ("DIRECTORY_DOWN", directory["address"]) in [(event["code"], event["subject"]) for event in watched.events()]
            finally:
                cluster.restart(cluster.nodes_count)
            back = watched.poll()
            assert back["status"] == "OK" and back["directories"][0]["state"] == "up", "and counts from 0"
            assert back["directories"][0]["located_per_second"] >= 0
    finally:
        process.close()
    assert {row["state"] for row in watched.poll()["agents"]} == {"down"}


def test_a_client_that_starts_again_counts_from_zero() -> None:
    before = {"kvstore_lookup_tokens_total": 1000.0, 'kvstore_hit_tokens_total{tier="ssd"}': 10.0, "kvstore_agent_pinned_bytes": 5.0}
    after = {"kvstore_lookup_tokens_total": 300.0, 'kvstore_hit_tokens_total{tier="ssd"}': 20.0, "kvstore_agent_pinned_bytes": 0.0}
    assert added(before, after) == {"kvstore_lookup_tokens_total": 300.0, 'kvstore_hit_tokens_total{tier="ssd"}': 20.0}


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=50))
def test_what_is_added_adds_up_to_the_last_number_where_nothing_restarts(steps: list[int]) -> None:
    total, before, summed = 0.0, {"kvstore_x_total": 0.0}, 0.0
    for step in steps:
        total += step
        after = {"kvstore_x_total": total}
        summed += added(before, after)["kvstore_x_total"]
        before = after
    assert summed == total


@given(st.dictionaries(st.sampled_from(["owner", "reason", "le", "model_name"]), st.text(max_size=20)))
def test_labels_survive_being_written_and_read(labels: dict[str, str]) -> None:
    assert split(joined("kvstore_x_total", labels)) == ("kvstore_x_total", labels)


def test_quantiles_come_from_the_histograms_of_all_processes_together() -> None:
    def histogram(*counts: float) -> dict[str, float]:
        return {joined("h_seconds_bucket", {"le": bound}): count for bound, count in zip(("0.1", "1.0", "+Inf"), counts, strict=True)}

    both = Counts(merged([histogram(98, 98, 98), histogram(0, 2, 2)])).buckets("h_seconds")
    assert both == [(0.1, 98), (1.0, 100), (float("inf"), 100)]
    assert quantile(both, 0.5) == pytest.approx(0.1 * 50 / 98) and quantile(both, 0.99) == pytest.approx(0.1 + 0.9 * 1 / 2)
    assert quantile(Counts({}).buckets("h_seconds"), 0.99) is None


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.0 500 no\r\n\r\n", "HTTP 500"),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>hello</html>", "not a metrics page"),
        (b"HTTP/1.0 200 OK\r\n\r\n\xff\xfe{}", "not a metrics page"),
        (b"HTTP/1.0 200 OK\r\n\r\n# HELP other x\nother 1\n", "not a metrics page"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\nshort", "not a metrics page"),
        (b"nonsense\r\n\r\n", "nonsense"),
        (b"", "remote end closed connection without response"),
    ],
)  # fmt: skip
def test_a_page_that_is_none_is_told_and_harms_nothing(answer: bytes, error: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        report = ask_clients([f"http://127.0.0.1:{port}/metrics"], 5.0)[0]
        thread.join()
    assert not report.up and report.error.startswith(error), report


def test_a_page_that_never_ends_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        report = ask_clients([f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"], 0.2)[0]
    assert report.error == "no answer in 0.2 s"


def test_addresses_of_clients_are_written_with_or_without_their_path() -> None:
    assert client_url("10.0.0.1:9100") == client_url("http://10.0.0.1:9100/") == "http://10.0.0.1:9100/metrics"
    assert client_url("http://host:1/other") == "http://host:1/other"
    for bad in ("host", "https://host:1", "http://:1", "http://host:x", "http://host:99999", "file:///etc/passwd", "http://h:1/\n"):
        with pytest.raises(UsageError, match="E140"):
            client_url(bad)
    assert parse('kvstore_x_total{owner="a\\"b"} 2.0\nother 1\n') == {'kvstore_x_total{owner="a\\"b"}': 2.0}


def test_history_is_bounded(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.live.collector.FRAMES_MAX", 3)
    watched = collector_of(cluster)
    for _ in range(5):
        watched.poll()
    assert {len(column) for column in watched.history().values()} == {3}
    one = watched.node_history("node-01")
    assert one is not None and len(one["unix_seconds"]) == 3


def test_every_metric_that_is_read_here_is_one_that_is_exported() -> None:
    exported = {metric.name for metric in (*COMMON, *NODE, *CLIENT, *WINDOW, *AGENT)}
    sources = [path.read_text() for path in (ROOT / "kvstore/live").iterdir() if path.is_file()]
    read = {name for text in sources for name in re.findall(r"\bkvstore_[a-z_]+[a-z]\b", text)}
    words = {f"kvstore_{word}_tokens_total" for word in ("hit", "lookup")}  # f-strings
    assert len(read) > 15 and {re.sub(r"_(count|bucket|sum)$", "", name) for name in read | words} - exported == set()


def test_a_replay_can_be_watched_while_it_plays(cluster: LocalCluster, tmp_path: Path) -> None:
    port = free_ports(1)[0]
    watched = collector_of(cluster, client_url(f"127.0.0.1:{port}"))
    frames: list[Data] = []
    trace = open_trace(ROOT / "kvstore/replay/conversation_300.jsonl.gz", request_limit=4)
    options = ReplayOptions(layout=Layout.single(320), metrics_port=port, before_request=lambda _: frames.append(watched.poll()))
    run_replay(trace, cluster.map, options)
    assert len(frames) == 4 and all(frame["hits"]["clients_up"] == 1 for frame in frames)
    assert frames[-1]["hits"]["lookup_tokens"] > 0, "seen before it ends"
    words = ("--requests", "3", "--block-bytes", "320", "--map", cluster.map_path, "--serve-metrics", str(port))
    said = Cli(tmp_path).run("replay", ROOT / "kvstore/replay/conversation_300.jsonl.gz", *words)
    assert said.code == 0 and f"kvstore dashboard --map {cluster.map_path} --client http://127.0.0.1:{port}" in said.stderr
    Cli(tmp_path).run("replay", "x.jsonl", "--serve-metrics", "0").refused(2, "E131")


def test_a_class_that_cannot_be_read_is_not_shown_as_kept_for_as_long_as_its_oldest() -> None:
    assert kept_seconds({"attained_seconds": 0.0, "oldest_seconds": 86400.0}) == 0.0
    assert kept_seconds({"attained_seconds": None, "oldest_seconds": 86400.0}) == 86400.0
