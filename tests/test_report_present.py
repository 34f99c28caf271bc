"""`kvstore report` beside a log: a real cluster, a real client's metrics, an engine's page, prices, and the datasheet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from client_tools import SMALL, chain, load, store
from report_tools import Here, row, write

from kvstore.client import Client, ClientConfig
from kvstore.client.metrics import serve_metrics
from kvstore.http import HttpServer, Page, Request
from kvstore.plan.prices import Prices
from kvstore.report.present import cluster_facts
from kvstore.report.value import value_of
from kvstore.server.local import LocalCluster, free_ports

ENGINE = """\
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{model_name="m",le="0.1"} 50
vllm:time_to_first_token_seconds_bucket{model_name="m",le="0.5"} 90
vllm:time_to_first_token_seconds_bucket{model_name="m",le="1.0"} 100
vllm:time_to_first_token_seconds_bucket{model_name="m",le="+Inf"} 100
vllm:time_to_first_token_seconds_sum{model_name="m"} 20
vllm:time_to_first_token_seconds_count{model_name="m"} 100
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), 12, capacity_bytes=128 << 20) as running:
        yield running


@pytest.fixture
def cli(tmp_path: Path) -> Here:
    write(tmp_path / "log" / "a.parquet", [row(hit=7_200_000, tail=2_800_000, age_1d=7_200_000), row(1, hit=0)])
    return Here(tmp_path)


@contextmanager
def page_of(text: str) -> Iterator[str]:
    def answer(request: Request) -> Page:
        return Page(text.encode())

    server = HttpServer("127.0.0.1", 0, answer)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.close()


def test_a_report_tells_what_cluster_and_clients_say_now(cli: Here, cluster: LocalCluster) -> None:
    with Client(cluster.map, layout=SMALL) as client, serve_metrics(client, 0) as port:
        keys = chain(20, SMALL)
        store(client, keys)
        load(client, client.lookup(keys))
        url = f"http://127.0.0.1:{port}"
        ran = cli.run("report", "--log", "log", "--map", cluster.map_path, "--client", url)
        assert ran.code == 0, ran.stderr
        assert "cluster   dev, epoch 1, 10+2: 12 of 12 nodes up, reads survive any 2 hosts lost" in ran.stdout
        assert "clients   1 of 1 answer; hit 100.0 % of 2,560 tokens" in ran.stdout
        envelope = cli.run("report", "--map", cluster.map_path, "--metrics", url, "--json").json
        measured = envelope["data"]["measured"]
        assert envelope["cluster"] == "dev" and "log" not in measured
        assert measured["clients"]["loads"] == 1 and measured["clients"]["load_p99_seconds"] > 0
        assert measured["cluster"]["space"]["used_bytes"] > 0
        assert measured["cluster"]["space"]["by_class"]["chat"] > 0


def test_promises_that_were_not_kept_are_told_beside_those_that_were() -> None:
    def kept(name: str, contract: float | None, attained: float | None, evicted: int, reached: float | None) -> dict[str, object]:
        bytes_ = {"evicted_bytes": evicted, "evicted_reached_contract_ratio": reached}
        met = None if contract is None else attained is None or attained >= contract
        ages = {"contract_seconds": contract, "attained_seconds": attained, "oldest_seconds": 3 * 86400.0}
        return {"retention_class": name, **ages, **bytes_, "contract_met": met}

    rows = [
        kept("chat", 7 * 86400, 5 * 86400.0, 3_000_000, 0.5),
        kept("agent", 86400, 2.5 * 86400, 0, None),
        kept("none", None, None, 0, None),
    ]
    space = {"used_bytes": 5, "capacity_bytes": 10, "seconds_until_full": None}
    cluster = {"id": "a", "epoch": 1, "k": 10, "m": 2, "answers": True, "nodes_up": 12, "nodes_total": 12, "losses": "well"}
    facts = dict(cluster_facts({**cluster, "space": space, "retention": rows}, ""))
    assert facts["promise"] == "chat 7.0 d: 5.0 d kept, NOT MET   agent 1.0 d: 2.5 d kept, met   none: all kept, oldest 3.0 d"
    assert facts["dropped"] == "3.0 MB since the nodes started, 50.0 % of it had reached its class's time"
    assert facts["space"] == "5 B of 10 B raw (50.0 %)"


def test_what_a_real_client_logged_is_what_the_report_says(cli: Here, cluster: LocalCluster, tmp_path: Path) -> None:
    config = ClientConfig(access_log=tmp_path / "own", tenant="acme", model_name="m/7b")
    with Client(cluster.map, layout=SMALL, config=config) as client:
        keys = chain(12, SMALL)
        client.lookup(keys, input_tokens=1540)
        store(client, keys)
        client.lookup(keys, input_tokens=1540)
        client.lookup(keys[:3], input_tokens=400, retention_class="agent")
    data = cli.run("report", "--log", "own", "--offline", "--json").json["data"]["measured"]
    assert (data["log"]["requests"], data["log"]["skipped"], data["log"]["rows_that_do_not_add_up"]) == (3, [], 0)
    assert (data["input_tokens"], data["hit_tokens"]) == (3480, 1536 + 384)
    assert {reason: tokens for reason, tokens in data["miss_tokens"].items() if tokens} == {"unknown": 1536, "tail": 24}
    assert [(each["class"], each["hit_tokens"]) for each in data["by"]["class"]] == [("chat", 1536), ("agent", 384)]
    assert [(each["tenant"], each["requests"]) for each in data["by"]["tenant"]] == [("acme", 3)]
    assert data["what_if"][0]["hit_tokens_at_least"] == 1920 and data["age_unknown_tokens"] == 0
    assert cli.run("report", "--log", "own", "--sql", "select max(len(blocks)) from access", "--csv").stdout.split() == [
        "max(len(blocks))",
        "12",
    ]


def test_without_a_cluster_the_report_says_so_and_goes_on(cli: Here, tmp_path: Path) -> None:
    ran = cli.run("report", "--log", "log")
    assert ran.code == 0 and "not asked: no cluster is known (--map)" in ran.stdout and "hit       72.0 %" in ran.stdout
    assert "not asked: --offline" in cli.run("report", "--log", "log", "--offline").stdout
    cli.run("report").refused(2, "E140", "no --log, and no cluster is known")
    cli.run("report", "--log", "log", "--map", "nowhere.toml").refused(2, "E100", "nowhere.toml")


def test_a_cluster_that_does_not_answer_is_said_and_nothing_of_it_is_invented(cli: Here, cluster: LocalCluster, tmp_path: Path) -> None:
    text = cluster.map_path.read_text()
    for node in cluster.map.nodes:
        text = text.replace(f'"{node.admin_address}"', f'"127.0.0.1:{free_ports(1)[0]}"')
    (tmp_path / "dead.toml").write_text(text)
    ran = cli.run("report", "--log", "log", "--map", "dead.toml")
    assert ran.code == 0 and "no node answers (connection refused)" in ran.stdout
    found = cli.run("report", "--log", "log", "--map", "dead.toml", "--json").json["data"]["measured"]["cluster"]
    assert [found[name] for name in ("space", "retention", "hosts_losable")] == [None, None, None]
    sheet = cli.run("report", "--log", "log", "--map", "dead.toml", "--datasheet", "--json").json["data"]["datasheet"]
    assert sheet["where"]["nodes"] == 12 and sheet["where"]["capacity_bytes"] is None
    assert {each["met"] for each in sheet["retention"]} == {None}
    assert sheet["nodes_losable_now"] is None


def test_clients_and_engines_that_do_not_answer_are_named_and_left_out(cli: Here) -> None:
    with page_of("hello") as url:
        gone = f"http://127.0.0.1:{free_ports(1)[0]}"
        ran = cli.run("report", "--log", "log", "--client", gone, "--engine", url, "--engine", gone)
        assert ran.code == 0 and "clients   0 of 1 answer (connection refused)" in ran.stdout
        assert ran.stderr.count("left out") == 3
    cli.run("report", "--log", "log", "--client", "ftp://x").refused(2, "E140", "ftp://x")
    cli.run("report", "--log", "log", "--engine", "nowhere").refused(2, "E140", "nowhere")


def test_values_come_from_given_prices_alone_and_stand_apart(cli: Here, cluster: LocalCluster, tmp_path: Path) -> None:
    data = cli.run("report", "--log", "log", "--json").json["data"]
    assert set(data["assumed"].values()) == set(data["computed"].values()) == {None}
    (tmp_path / "prices.toml").write_text("gpu_hour = 3.0\ntb_month = 6\n")
    priced = ("--prices", "prices.toml", "--prefill-rate", "1000", "--price", "cached_million_tokens=0.5")
    ran = cli.run("report", "--log", "log", *priced)
    assert "benefit    7.2 M prompt tokens not recomputed = 2.0 GPU-hours at 1,000 tokens/s (your figure)" in ran.stdout
    assert "money      worth 6.00 (your prices; kvstore knows none)" in ran.stdout  # no cluster: no space, no cost
    assert "hits sold  as cached 3.60 (your prices)" in ran.stdout
    data = cli.run("report", "--log", "log", "--map", cluster.map_path, *priced, "--json").json["data"]
    capacity_tb = data["measured"]["cluster"]["space"]["capacity_bytes"] / 1e12
    assert data["computed"]["cost"] == pytest.approx(capacity_tb * 6 / 30)  # of the day that the log spans
    assert data["computed"]["net"] == pytest.approx(6 - capacity_tb * 6 / 30)
    (tmp_path / "prices.toml").write_text("gpu_hour = 3.0\ngpu_hours = 4\n")
    cli.run("report", "--log", "log", "--prices", "prices.toml").refused(2, "E101", "prices.toml:2", "gpu_hour")
    cli.run("report", "--log", "log", "--prefill-rate", "fast").refused(2, "E131", "fast")


def test_a_value_is_null_where_a_part_of_it_is_not_known() -> None:
    prices = Prices(prefill_tokens_per_second=1000, gpu_hour=2, tb_month=6)
    assert value_of(prices, 3_600_000, None, 10**12, 12)["worth"] == 2
    assert value_of(prices, 3_600_000, None, 10**12, 12)["cost"] is None
    assert value_of(prices, None, 86400, None, None)["net"] is None
    assert value_of(Prices(node_month=30, tb_month=60), None, 86400, 10**12, 12)["cost"] == 14
    assert value_of(Prices(node_month=30, tb_month=60), None, 86400, None, 12)["cost"] is None
    assert set(value_of(Prices(), 5, 86400, 10**12, 12).values()) == {None}


def test_a_datasheet_answers_a_buyer_and_invents_no_first_token(cli: Here, cluster: LocalCluster) -> None:
    plain = cli.run("report", "--datasheet", "--log", "log", "--map", cluster.map_path)
    assert plain.code == 0, plain.stderr
    for words in ("12 storage nodes on 12 hosts, 10+2 coded", "first token", "not known: no engine reports it", "survive any 2 hosts"):
        assert words in plain.stdout
    with page_of(ENGINE) as url:
        arguments = ("report", "--datasheet", "--log", "log", "--map", cluster.map_path, "--engine", url)
        sheet = cli.run(*arguments, "--json").json["data"]["datasheet"]
        assert sheet["ttft_p50_seconds"] == pytest.approx(0.1) and sheet["ttft_p99_seconds"] == pytest.approx(0.95)
        assert sheet["hosts_losable_now"] == 2 and sheet["exact"] is True
        assert sheet["hit_ratio"] == 0.72 and sheet["hit_ratio_from"] == "access log"
        promised = {each["retention_class"]: each["promised_seconds"] for each in sheet["retention"]}
        assert promised == {"batch": 3600, "chat": 7 * 86400, "agent": 3 * 86400}
        html = cli.run(*arguments, "--format", "html").stdout
        assert html.startswith("<!doctype html>") and "p50 100.0 ms" in html
    alone = cli.run("report", "--datasheet", "--log", "log", "--json").json["data"]["datasheet"]
    assert [alone[name] for name in ("where", "ttft_p50_seconds", "load_p99_seconds", "nodes_losable_now")] == [None] * 4
