"""status, stats and node against real daemons: words, exit codes and JSON, well and unwell."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_tool import Cli

from kvstore.cli import stats, status
from kvstore.cli.cluster import NodeReport, ask_nodes
from kvstore.cli.codes import HEALTH
from kvstore.cli.health import evaluate, overall
from kvstore.cluster_view import retention
from kvstore.clustermap import ClusterMap, Node
from kvstore.server.activity import Moved, Traffic
from kvstore.server.local import LocalCluster, free_ports, port_is_free


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), 12, capacity_bytes=128 << 20) as running:
        yield running


@pytest.fixture
def cli(tmp_path: Path, cluster: LocalCluster) -> Cli:
    return Cli(tmp_path, KVSTORE_MAP=str(cluster.map_path))


def test_a_well_cluster_is_ok(cli: Cli) -> None:
    ran = cli.run("status")
    assert ran.code == 0 and ran.stderr == ""
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("cluster  dev   epoch 1   0.") and lines[1] == "health   OK"
    assert lines[2] == "nodes    12 of 12 up   10+2   reads survive any 2 hosts lost"
    assert "node-11" in cli.run("status", "--nodes").stdout
    envelope = cli.run("status", "--json").json
    assert envelope["ok"] and envelope["cluster"] == "dev" and envelope["epoch"] == 1 and envelope["health"] == []
    assert envelope["data"]["nodes_up"] == 12 and all(abs(n["clock_offset_seconds"]) < 0.25 for n in envelope["data"]["nodes"])


def test_lost_nodes_are_told_worst_first_with_the_next_command(cli: Cli, cluster: LocalCluster) -> None:
    cluster.kill(7)
    try:
        ran = cli.run("status")
        assert ran.code == 0 and "health   WARN  2 checks" in ran.stdout
        assert "NODE_DOWN           node-07 does not answer: connection refused     kvstore explain NODE_DOWN" in ran.stdout
        assert "11 of 12 up   10+2   reads survive any 1 more host lost" in ran.stdout
        assert cli.run("status", "--fail-on", "warn").code == 1
        nagios = cli.run("status", "--nagios")
        assert nagios.code == 1 and nagios.stdout.startswith("KVSTORE WARN - 11 of 12 nodes up") and nagios.stdout.count("\n") == 1
        spare = cli.run("status", "--without", "node-03")
        assert spare.code == 0 and "without  node-03: everything can still be read" in spare.stdout
        refused = cli.run("status", "--without", "node-03", "--without", "node-04")
        refused.refused(4, "E302", "some extents cannot be read", "1 down already")
        assert cli.run("status", "--without", "node-03", "--without", "node-04", "--json").json["error"]["code"] == "E302"
        cluster.kill(8)
        cluster.kill(9)
        bad = cli.run("status")
        assert bad.code == 1 and "health   ERR" in bad.stdout and "cannot be read" in bad.stdout
    finally:
        for node in (7, 8, 9):
            cluster.restart(node)
    assert cli.run("status").code == 0


def test_a_node_that_stands_still_is_down_within_the_timeout(cli: Cli, cluster: LocalCluster) -> None:
    cluster.kill(2, signal.SIGSTOP)
    try:
        ran = cli.run("status", "--timeout", "500ms")
        assert "node-02 does not answer: no answer in 0.5 s" in ran.stdout
    finally:
        cluster.kill(2, signal.SIGCONT)


def test_no_cluster_and_no_answer_have_their_own_exit_codes(cli: Cli, tmp_path: Path, cluster: LocalCluster) -> None:
    cli.run("status", KVSTORE_MAP="").refused(2, "E141", "kvstore up")
    cli.run("status", "--map", "nowhere.toml").refused(2, "nowhere.toml")
    cli.run("status", "--without", "node-99").refused(2, 'node "node-99" is not in the map')
    closed = ClusterMap.local([Node("node-00", "host-a", "127.0.0.1:1", "127.0.0.1:2")])
    closed.save(tmp_path / "closed.toml")
    for command in ("status", "stats"):
        cli.run(command, "--map", "closed.toml").refused(3, "E202", "connection refused")
    assert cli.run("status", "--map", "closed.toml", "--json").json["error"]["code"] == "E202"


def test_stats_prints_rows_and_dashes_where_there_is_no_traffic(cli: Cli) -> None:
    ran = cli.run("stats", "--interval", "200ms", "-n", "2")
    assert ran.code == 0 and ran.stderr == "0.4 s: no traffic\n"
    header, units, *rows = ran.stdout.splitlines()
    assert header.split()[:3] == ["time", "read", "write"] and units.split()[0] == "UTC" and len(rows) == 2
    assert rows[0].split()[1:10] == ["-"] * 9 and rows[0].split()[-1] == "12"
    frames = [json.loads(line) for line in cli.run("stats", "--interval", "200ms", "-n", "2", "--json").stdout.splitlines()]
    assert len(frames) == 2 and all(f["schema"] == "kvstore.stats/1" and f["data"]["read_bytes_per_second"] is None for f in frames)
    table = cli.run("stats", "--interval", "200ms", "-n", "2", "--csv").stdout.splitlines()
    assert table[0].startswith("time,read_bytes_per_second,") and len(table) == 3
    cli.run("stats", "--interval", "0").refused(2, "0.1s to 1d")


def test_stats_ends_with_130_on_ctrl_c_and_sums_up(cli: Cli) -> None:
    process = cli.start("stats", "--interval", "200ms")
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130 and "no traffic" in stderr and "error[E701] interrupted" in stderr


def test_a_node_serves_alone_and_drains_on_sigterm(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    process = cli.start("node", "--data", "data", "--capacity", "100MB", KVSTORE_MAP="")
    assert process.stdout is not None
    ready = process.stdout.readline()
    assert ready.startswith("ready {") and json.loads(ready[6:])["id"] == "node-00"
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0 and '"msg": "stopped in' in log


@pytest.mark.parametrize("words", ["node --data data --capacity 100MB", "directory --listen 127.0.0.1:0"])
def test_the_log_level_is_read_again_on_sighup(cli: Cli, tmp_path: Path, words: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "c.toml").write_text('log_level = "error"\n')
    process = cli.start(*words.split(), "--config", "c.toml", KVSTORE_MAP="")
    assert process.stdout is not None and process.stdout.readline().startswith("ready {") and process.stderr is not None
    try:
        for level, before in (("info", "error"), ("warn", "info")):
            (tmp_path / "c.toml").write_text(f'log_level = "{level}"\n')
            process.send_signal(signal.SIGHUP)
            assert f"log level {level}, was {before}" in process.stderr.readline(), "and nothing before it: that was below the level"
        (tmp_path / "c.toml").write_text('log_level = "loud"\n')
        process.send_signal(signal.SIGHUP)
        assert "log level warn stays: error[E132]" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30)[1] == "" and process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def test_a_node_that_cannot_start_says_why_in_one_line(cli: Cli, tmp_path: Path, cluster: LocalCluster) -> None:
    cli.run("node").refused(2, "--data")
    cli.run("node", "--data", "absent", KVSTORE_MAP="").refused(2, "E122", "absent", "does not exist", "mkdir -p")
    (tmp_path / "file").write_text("")
    cli.run("node", "--data", "file", KVSTORE_MAP="").refused(2, "is not a directory")
    (tmp_path / "data").mkdir()
    cli.run("node", "--data", "data", "--capacity", "4T8", KVSTORE_MAP="").refused(2, '--capacity "4T8" not understood', "4.8TB")
    cli.run("node", "--data", "data", "--id", "node-77").refused(2, 'node "node-77" is not in the map')
    used = cli.run("node", "--data", cluster.node_directory(0), KVSTORE_MAP="")
    assert used.code == 2 and f"in use by pid {cluster.pid(0)}" in used.stderr.splitlines()[-1]
    port = cluster.map.nodes[0].address.rpartition(":")[2]
    taken = cli.run("node", "--data", "data", "--port", port, KVSTORE_MAP="")
    assert taken.code == 2 and f"port {port} is in use by pid {cluster.pid(0)}" in taken.stderr.splitlines()[-1]


def report(cluster_map: ClusterMap, at: int, **changes: object) -> NodeReport:
    node = cluster_map.nodes[at]
    base = NodeReport(node, "ready", epoch=1, version="0.1.0", pid=100 + at, capacity_bytes=1000, used_bytes=10, clock_offset_seconds=0.0)
    return replace(base, **changes)  # type: ignore[arg-type] # the tests name real fields


@pytest.mark.parametrize(
    ("changes", "code", "severity"),
    [
        ({"state": "down", "error": "connection refused"}, "NODE_DOWN", "WARN"),
        ({"epoch": 0}, "NODE_EPOCH_BEHIND", "WARN"),
        ({"epoch": 2}, "MAP_BEHIND", "WARN"),
        ({"clock_offset_seconds": -0.4, "answer_seconds": 0.1}, "CLOCK_SKEW", "WARN"),
        ({"values": {'kvstore_disk_errors_total{kind="checksum"}': 3.0}}, "CHECKSUM_ERRORS", "WARN"),
        ({"values": {'kvstore_disk_errors_total{kind="checksum"}': 300.0}}, "CHECKSUM_ERRORS", "ERR"),
        ({"values": {'kvstore_index_starts_total{mode="rebuild"}': 1.0}}, "INDEX_REBUILT", "INFO"),
        ({"values": {"kvstore_disk_wear_ratio": 0.81}}, "DISK_WEAR", "WARN"),
        ({"values": {"kvstore_disk_wear_ratio": 0.96}}, "DISK_WEAR", "ERR"),
        ({"values": {'kvstore_disk_used_bytes{kind="zombie"}': 21.0}}, "ZOMBIE_BYTES", "WARN"),
        ({"version": "0.2.0"}, "VERSION_MIXED", "WARN"),
        ({"values": {"kvstore_disk_free_bytes": 50e6}}, "DISK_FULL", "WARN"),
        ({"values": {"kvstore_disk_free_bytes": 20e6}}, "DISK_FULL", "ERR"),
        (
            {
                "values": {
                    'kvstore_evicted_bytes_total{retention_class="chat",reason="lru"}': 5.0,
                    'kvstore_retention_seconds{retention_class="chat"}': 69_120.0,
                    'kvstore_retention_contract_seconds{retention_class="chat"}': 604_800.0,
                }
            },
            "RETENTION_SHORT",
            "WARN",
        ),
        ({"used_bytes": 995, "values": {'kvstore_node_requests_total{op="write",result="no_space"}': 5.0}}, "EVICTION_STALLED", "ERR"),
    ],
)
def test_each_check_fires_on_its_fault_and_not_without(changes: dict[str, object], code: str, severity: str) -> None:
    where = ClusterMap.local([Node(f"node-{i:02}", f"host-{i:02}", f"127.0.0.1:{7000 + i}") for i in range(13)])
    well = [report(where, i) for i in range(13)]
    assert evaluate(where, well) == []
    unwell = 3 if code == "RETENTION_SHORT" else 1  # an extent survives two nodes that keep it too short
    found = evaluate(where, [*(report(where, i, **changes) for i in range(unwell)), *well[unwell:]])
    assert code in {check.code for check in found}
    assert next(check for check in found if check.code == code).severity == severity
    assert all(check.code in HEALTH and check.fix for check in found)
    assert overall(found) == (severity if severity != "INFO" else "OK")


def test_a_clock_is_not_blamed_for_a_slow_path_nor_a_full_node_that_evicts() -> None:
    where = ClusterMap.local([Node(f"node-{i:02}", f"host-{i:02}", f"127.0.0.1:{7000 + i}") for i in range(12)])
    values = {'kvstore_node_requests_total{op="write",result="no_space"}': 5.0, 'kvstore_evicted_bytes_total{reason="lru"}': 9.0}
    slow = report(where, 0, clock_offset_seconds=0.4, answer_seconds=0.5)
    busy = report(where, 1, used_bytes=999, values=values)
    assert evaluate(where, [slow, busy, *(report(where, i) for i in range(2, 12))]) == []


def kept(seconds: float, **evicted: float) -> dict[str, float]:
    return {
        'kvstore_retention_seconds{retention_class="chat"}': seconds,
        'kvstore_retention_contract_seconds{retention_class="chat"}': 604_800.0,
        'kvstore_retention_seconds{retention_class="agent"}': 0.0,
        **{f'kvstore_evicted_bytes_total{{retention_class="chat",reason="{reason}"}}': size for reason, size in evicted.items()},
        'kvstore_evicted_contract_bytes_total{retention_class="chat",reason="expired",contract="kept"}': evicted.get("expired", 0.0),
    }


def test_a_class_is_short_only_where_it_was_evicted_for_room_before_its_time() -> None:
    where = ClusterMap.local([Node(f"node-{i:02}", f"host-{i:02}", f"127.0.0.1:{7000 + i}") for i in range(12)])
    well = [report(where, i, values=kept(700_000.0, lru=3.0)) for i in range(12)]
    young, own = report(where, 0, values=kept(60.0)), report(where, 1, values=kept(60.0, expired=5.0, quota=5.0))
    assert evaluate(where, [young, own, *well[2:]]) == []
    short, shorter, shortest = (report(where, i, values=kept(hours * 3600.0, lru=1.0)) for i, hours in enumerate((19.2, 2.0, 1.0)))
    assert evaluate(where, [well[0], shorter, shortest, *well[3:]]) == [], "an extent survives two nodes that lost it"
    [found] = evaluate(where, [short, shorter, shortest, *well[3:]])
    assert (found.code, found.subject, found.summary) == ("RETENTION_SHORT", "chat", "keeps 19.2 h, contract 7.0 d")


def test_traffic_and_what_is_kept_are_shown_and_no_traffic_is_said_in_words(cli: Cli, cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(3_000_000))
    assert cli.run("put", "f").code == 0
    ran = cli.run("status")
    assert re.search(r"^traffic  load \d.* [kM]?B/s   save \d.* [kM]?B/s   read p99 .*   \(.*, with parity\)$", ran.stdout, re.MULTILINE), (
        ran.stdout
    )
    data = cli.run("status", "--json").json["data"]
    assert data["traffic"]["requests"] > 12 and data["traffic"]["hit_ratio"] is None
    written = data["traffic"]["save_bytes_per_second"] * data["traffic"]["seconds"]
    assert 3_600_000 <= written < 12_000_000  # with parity; each node has its own span
    space = data["space"]
    assert space["by_class"]["chat"] == space["by_owner"]["default"] == space["used_bytes"] >= 3_600_000
    assert space["written_bytes_per_second"] > 0 and space["growth_bytes_per_second"] > 0
    assert space["seconds_until_full"] is None and "at this pace" not in ran.stdout, "of some seconds no pace follows"
    with LocalCluster(tmp_path / "idle", 1, capacity_bytes=128 << 20, k=1, m=0) as idle:
        quiet = cli.run("status", "--map", idle.map_path)
        assert re.search(r"^traffic  none   \(", quiet.stdout, re.MULTILINE) and "\nkept" not in quiet.stdout


def test_the_kept_line_says_whether_anything_went_before_its_time() -> None:
    where = ClusterMap.local([Node(f"node-{i:02}", f"host-{i:02}", f"127.0.0.1:{7000 + i}") for i in range(2)], k=1, m=1)
    everything = [report(where, 0, values=kept(7200.0)), report(where, 1, values=kept(3600.0))]
    assert [status._kept_words(each) for each in retention(where, everything)] == ["chat all, oldest 1.0 h of 7.0 d"]
    some = [report(where, 0, values=kept(7200.0, lru=1.0)), report(where, 1, values=kept(3600.0))]
    assert [status._kept_words(each) for each in retention(where, some)] == ["chat all, oldest 1.0 h of 7.0 d"], "the other has it all"
    both = [report(where, i, values=kept(hours * 3600.0, lru=1.0, expired=3.0)) for i, hours in enumerate((2.0, 1.0))]
    assert [status._kept_words(each) for each in retention(where, both)] == ["chat 2.0 h of 7.0 d"]
    assert status._reached(retention(where, both)) == "   (75.0 % of dropped bytes had reached their time)"


def test_the_window_of_traffic_is_five_minutes_or_since_the_start() -> None:
    now, done = 0.0, 0

    def stats() -> dict[str, Any]:
        return {
            "requests": {"read": {0: done}},
            "bytes_in": done,
            "bytes_out": 2 * done,
            "request_seconds": {"read": {"counts": [done, 0]}},
        }

    traffic = Traffic(stats, clock=lambda: now)
    assert traffic.window() == Moved(0.0, 0, 0, 0, (0, 0))
    for _ in range(1000):
        now, done = now + 1.0, done + 5
        traffic.sample()
        moved = traffic.window()
        assert moved.seconds == now if now <= 300 else 300 <= moved.seconds < 310
        assert (moved.requests, moved.bytes_out, moved.read_counts) == (5 * moved.seconds, 10 * moved.seconds, (5 * moved.seconds, 0))


def test_too_few_hosts_are_told() -> None:
    three = ClusterMap.local([Node(f"node-{i:02}", "host-a", f"127.0.0.1:{7000 + i}") for i in range(12)])
    found = evaluate(three, [report(three, i) for i in range(12)])
    assert [check.code for check in found] == ["LOSSES_NOT_SURVIVED"] and "NO host" in found[0].summary
    thirteen = ClusterMap.local([Node(f"node-{i:02}", f"host-{i:02}", f"127.0.0.1:{7000 + i}") for i in range(13)])
    found = evaluate(thirteen, [report(thirteen, 0, state="down", error="x"), *(report(thirteen, i) for i in range(1, 13))])
    assert [check.code for check in found] == ["HOSTS_NO_MARGIN", "NODE_DOWN", "STRIPE_DEGRADED"]


def test_another_daemon_on_a_nodes_port_is_not_taken_for_the_node(cluster: LocalCluster) -> None:
    """A killed node's port may be another's by now; and a map may name a wrong one."""
    nodes = list(cluster.map.newest.nodes)
    nodes[5] = replace(nodes[5], admin_address=nodes[6].admin_address)
    mixed = replace(cluster.map, epochs={1: replace(cluster.map.newest, nodes=tuple(nodes))})
    states = [report.state for report in ask_nodes(mixed, 5.0)]
    assert states == ["down" if at == 5 else "ready" for at in range(12)]
    other = replace(cluster.map, cluster_id="other")
    assert all(report.error.endswith('of cluster "dev"') for report in ask_nodes(other, 5.0))


def test_a_dead_nodes_ports_stay_with_its_cluster(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = cluster.map.nodes[3]
    kept = {int(address.rpartition(":")[2]) for address in (dead.address, dead.admin_address, dead.metrics_address)}
    monkeypatch.setattr("random.SystemRandom.shuffle", lambda _, ports: ports.sort(key=lambda port: port not in kept))
    cluster.kill(3)
    try:
        assert all(port_is_free(port) for port in kept)
        assert not kept & set(free_ports(3)), "another cluster would be given these"
    finally:
        cluster.restart(3)


def test_a_node_that_was_out_of_sight_does_not_count_its_whole_life_as_one_interval() -> None:
    where = ClusterMap.local([Node(f"node-{i:02}", f"host-{i:02}", f"127.0.0.1:{7000 + i}") for i in range(3)], k=1, m=1)
    life = {'kvstore_node_transfer_bytes_total{direction="out"}': 5e9, 'kvstore_node_requests_total{op="read",result="ok"}': 100.0}
    hidden = [report(where, 0, values=life), report(where, 1, state="down", error="no answer"), report(where, 2, state="down", error="x")]
    seen = [report(where, 0, values=life), report(where, 1, values=life), replace(report(where, 2, values=life), uptime_seconds=1.0)]
    seen = [replace(each, uptime_seconds=each.uptime_seconds or 1000.0) for each in seen]
    assert stats._Frame.between(hidden, seen, 10.0).numbers["read"] == 5e8, "only of the one that began a second ago"


def test_of_many_faults_alike_three_are_told_and_the_others_counted(cli: Cli, cluster: LocalCluster, tmp_path: Path) -> None:
    """Nodes of a map that has ten more than run: the last line counts those that are not named."""
    ghosts = [Node(f"ghost-{i}", f"ghost-{i}", f"127.0.0.1:{10 + 2 * i}", f"127.0.0.1:{11 + 2 * i}") for i in range(10)]
    ClusterMap.local([*cluster.map.nodes, *ghosts]).save(tmp_path / "more.toml")
    ran = cli.run("status", "--map", "more.toml")
    lines = [line for line in ran.stdout.splitlines() if " NODE_DOWN " in line]
    assert len(lines) == 4 and lines[-1].endswith("and 7 more, all in --json"), ran.stdout
    found = cli.run("status", "--map", "more.toml", "--json").json["health"]
    assert sum(check["code"] == "NODE_DOWN" for check in found) == 10


def test_a_class_that_keeps_nothing_whole_is_said_in_words() -> None:
    where = ClusterMap.local([Node(f"node-{i:02}", f"host-{i:02}", f"127.0.0.1:{7000 + i}") for i in range(12)])
    reports = [report(where, i, values=kept(0.0, lru=3.0)) for i in range(12)]
    assert [status._kept_words(each) for each in retention(where, reports)] == ["chat less than a minute of 7.0 d"]
    assert [check.summary for check in evaluate(where, reports)] == ["keeps less than a minute, contract 7.0 d"]
