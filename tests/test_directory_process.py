"""`kvstore directory` as a process: ready line, probes, health, metrics, its end, its refusals; beside a cluster; in `kvstore status`."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cli_tool import Cli
from directory_tools import keys_of, names
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from server_tools import until

from kvstore.cli.directories import ask_directories
from kvstore.cli.health import evaluate
from kvstore.client.agent.directory import DirectoryClient
from kvstore.clustermap import ClusterMap
from kvstore.errors import ConfigError
from kvstore.server.directory_config import DirectoryConfig, add_directory_arguments, directory_config
from kvstore.server.local import LocalCluster

A, B = "10.0.0.1:7600", "10.0.0.2:7600"
DEADLINE_SECONDS = 20.0


@contextmanager
def running(cli: Cli, *arguments: str | Path) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    process = cli.start("directory", "--listen", "127.0.0.1:0", *arguments)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("ready {"), process.stderr.read()
        yield json.loads(line[6:]), process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=DEADLINE_SECONDS)


def page(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=DEADLINE_SECONDS) as answer:
        return str(answer.read().decode())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with LocalCluster(directory, 1, capacity_bytes=128 << 20, k=1, m=0, directories=2) as started:
        yield started


def client(cluster: LocalCluster) -> DirectoryClient:
    return DirectoryClient(cluster.map.directories, cluster=cluster.map.tag, deadline_seconds=2.0)


def test_a_directory_serves_tells_of_itself_and_ends_in_order(tmp_path: Path) -> None:
    with running(Cli(tmp_path), "--memory", "8MB", "--lifetime", "10m") as (ready, process):
        assert ready["cluster"] == "dev" and ready["memory_bytes"] == 8_000_000 and ready["lifetime_seconds"] == 600
        assert page(ready["http"], "/livez") == "ok\n" and page(ready["http"], "/readyz") == "ok\n"
        tag = ClusterMap.parse(MAP).tag
        with DirectoryClient([ready["address"]], cluster=tag, deadline_seconds=2.0) as agent:
            assert agent.register(A, keys_of(1, 30)) == 30
            assert len(agent.locate(keys_of(1, 40))[0]) == 1
        families = {f.name: f for f in text_string_to_metric_families(page(ready["http"], "/metrics"))}
        assert families["kvstore_directory_entries"].samples[0].value == 30
        keys = {s.labels["what"]: s.value for s in families["kvstore_directory_keys"].samples}
        assert keys == {"registered": 30, "refused": 0, "located": 40, "found": 30, "touched": 0, "forgotten": 0}
        with grpc.insecure_channel(ready["admin"]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for service in ("", "kvstore.v1.Directory"):
                answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_SECONDS)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == 0 and '"msg": "stopped in' in log


MAP = """\
cluster = "dev"
k = 1
m = 0
[[node]]
id = "node-00"
address = "127.0.0.1:1"
[[epoch]]
number = 1
nodes = ["node-00"]
"""


def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    with running(cli) as (ready, process):
        taken = cli.run("directory", "--listen", ready["address"])
        port = ready["address"].rpartition(":")[2]
        assert taken.code == 2 and f"port {port} is in use by pid {process.pid}" in taken.stderr.splitlines()[-1]
        assert "--listen HOST:PORT" in taken.stderr.splitlines()[-1]
    cli.run("directory", "--listen", "7399").refused(2, "E180", "10.0.0.1:7399")
    other = cli.run("directory", "--listen", "203.0.113.7:7399")
    assert other.code == 2 and "E124" in other.stderr.splitlines()[-1]
    assert "kvstore status --directory" in cli.run("directory", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *((("--listen", listen), "10.0.0.1:7399") for listen in ("nowhere", "::1:7399", "127.0.0.1:port", "127.0.0.1:123456", ":7399")),
        (("--listen", "127.0.0.1:70000"), "give 0 to 65535"),
        (("--memory", "4T8"), '--memory "4T8" not understood.*4.8TB'),
        (("--memory", "1kB"), "memory_bytes is 1000"),
        (("--lifetime", "100d"), "lifetime_seconds"),
        (("--connections", "0"), "connections_max"),
        (("--congestion-control", "BBR!"), "congestion_control"),
    ],
)
def test_a_setting_out_of_range_names_the_range(arguments: tuple[str, str], words: str) -> None:
    parser = argparse.ArgumentParser()
    add_directory_arguments(parser)
    with pytest.raises(ConfigError, match=words):
        directory_config(parser.parse_args(arguments))


def test_every_flag_reaches_its_setting() -> None:
    parser = argparse.ArgumentParser()
    add_directory_arguments(parser)
    given = "--listen [::1]:7 --memory 2GiB --lifetime 90s --map m.toml --admin-port 8 --http-port 9 --virtual-clock --connections 5"
    given += " --idle-timeout 1m --progress-timeout 2s --congestion-control host"
    found = directory_config(parser.parse_args(given.split()))
    assert found == DirectoryConfig("::1", 7, 8, 9, 2 << 30, 90.0, Path("m.toml"), True, 5, 60.0, 2.0, "host")
    assert directory_config(parser.parse_args([])) == DirectoryConfig()


def test_a_cluster_has_directories_that_its_map_names(cluster: LocalCluster) -> None:
    assert len(cluster.map.directories) == 2 and ClusterMap.load(cluster.map_path).directories == cluster.map.directories
    assert [ready["address"] for ready in cluster.ready[1:]] == list(cluster.map.directories)
    keys = keys_of(2, 200)
    with client(cluster) as a, client(cluster) as b:
        assert a.register(A, keys) == 200
        assert names(b.locate(keys)) == [[A]] * 200
        reports = ask_directories(cluster.map, cluster.map.directories, DEADLINE_SECONDS)
        assert [each.up for each in reports] == [True, True]
        assert sum(each.status.entries for each in reports if each.status) == 200


def test_a_directory_that_is_killed_costs_misses_and_comes_back_empty(cluster: LocalCluster) -> None:
    keys = keys_of(3, 300)
    with client(cluster) as a, client(cluster) as b:
        assert a.register(A, keys) == 300
        cluster.kill(1)
        left = names(b.locate(keys))
        assert 0 < left.count([A]) < 300 and left.count([]) == 300 - left.count([A])
        cluster.restart(1)
        until(lambda: b.stats()["instances_out"] == 0 and a.stats()["instances_out"] == 0, "both know that it is back")
        assert names(b.locate(keys)) == left, "it has forgotten all"
        until(lambda: a.touch(A, keys) == 300, "what is used is registered again")
        assert names(b.locate(keys)) == [[A]] * 300


def test_directories_end_with_their_parent_and_leave_no_pid(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, 1, capacity_bytes=128 << 20, k=1, m=0, directories=1) as cluster:
        pid = cluster.pid(1)
        assert (tmp_path / "directory-00.pid").read_text() == f"{pid}\n"
        first = cluster.map.directories
    assert not (tmp_path / "directory-00.pid").exists() and not Path(f"/proc/{pid}").exists()
    assert "stopped in" in (tmp_path / "directory-00.log").read_text()
    with LocalCluster(tmp_path, 1, capacity_bytes=128 << 20, k=1, m=0, directories=1) as again:
        assert again.map.directories == first, "a map that clients have read stays true"
    with LocalCluster(tmp_path, 1, capacity_bytes=128 << 20, k=1, m=0) as without:
        assert without.map.directories == ()


def test_status_shows_directories_and_warns_of_those_that_are_down(tmp_path: Path, cluster: LocalCluster) -> None:
    cli = Cli(tmp_path, KVSTORE_MAP=str(cluster.map_path))
    ran = cli.run("status")
    assert "windows  2 of 2 directories up   " in ran.stdout and "DIRECTORY_DOWN" not in ran.stdout
    data = cli.run("status", "--json").json["data"]["directories"]
    assert [each["address"] for each in data] == list(cluster.map.directories) and data[0]["memory_max_bytes"] == 1_000_000_000
    with running(cli, "--map", cluster.map_path) as (ready, _):
        assert "windows  3 of 3 directories up   " in cli.run("status", "--directory", ready["address"]).stdout
    gone = cli.run("status", "--directory", ready["address"])
    assert gone.code == 0 and "windows  2 of 3 directories up" in gone.stdout and "DIRECTORY_DOWN" in gone.stdout
    assert "connection refused" in gone.stdout
    cli.run("status", "--directory", "nowhere").refused(2, "E140", "HOST:PORT")
    assert "2 in the map" in cli.run("explain", "DIRECTORY_DOWN").stdout
    node = cluster.map.nodes[0].address
    [report] = ask_directories(cluster.map, [node], DEADLINE_SECONDS)
    assert not report.up and "BAD_REQUEST" in report.error, "a node is no directory"
    [check] = [each for each in evaluate(cluster.map, [], directories=[report]) if each.code == "DIRECTORY_DOWN"]
    assert check.severity == "WARN" and check.subject == node


def test_another_cluster_is_turned_away(tmp_path: Path, cluster: LocalCluster) -> None:
    other = ClusterMap.parse(MAP.replace('"dev"', '"other"'))
    [report] = ask_directories(other, cluster.map.directories[:1], DEADLINE_SECONDS)
    assert not report.up and "WRONG_CLUSTER" in report.error
    with DirectoryClient(cluster.map.directories, cluster=other.tag, deadline_seconds=0.5) as stranger:
        assert stranger.register(B, keys_of(4, 10)) == 0
