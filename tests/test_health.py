"""Health: how long a fault lasts, mutes that end, what a daemon finds out about itself; and the commands mute, unmute, explain."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_tool import Cli
from prometheus_client.parser import text_string_to_metric_families
from test_cli_status import report

from kvstore.cli.cluster import ask_nodes
from kvstore.cli.codes import HEALTH
from kvstore.cli.health import evaluate, overall
from kvstore.cli.health_memory import HealthMemory
from kvstore.cli.health_values import values_now
from kvstore.cli.output import Health
from kvstore.clustermap import ClusterMap, Node
from kvstore.errors import UsageError
from kvstore.live.scrape import ClientReport
from kvstore.metrics import LATENCY_BOUNDS_SECONDS, SELF_CHECKS
from kvstore.server.activity import Moved
from kvstore.server.local import LocalCluster
from kvstore.server.selfcheck import FOR_SECONDS, STARTS_KEPT, SelfCheck, judge, note_start

HOUR, DAY = 3600.0, 86400.0


class Clock:
    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def check(code: str, subject: str = "node-00", severity: str | None = None, **fields: Any) -> Health:
    return Health(code, severity or HEALTH[code].severity, subject, "summary", "fix", **fields)


def settled(tmp_path: Path, clock: Clock, *found: Health) -> tuple[list[Health], HealthMemory]:
    """One look of a process of its own."""
    memory = HealthMemory(tmp_path / "map.toml", clock)
    shown = memory.settle(found)
    memory.save()
    return shown, memory


def test_a_fault_is_dated_from_the_first_look_that_saw_it_and_anew_after_it_was_gone(tmp_path: Path, clock: Clock) -> None:
    [first], _ = settled(tmp_path, clock, check("NODE_DOWN"))
    clock.now += 500
    [again], _ = settled(tmp_path, clock, check("NODE_DOWN"))
    assert first.since == again.since and again.lasted_seconds == 500
    settled(tmp_path, clock)
    clock.now += 10
    [anew], _ = settled(tmp_path, clock, check("NODE_DOWN"))
    assert anew.since != first.since and anew.lasted_seconds == 0


def test_what_may_pass_by_itself_is_info_until_it_has_lasted(tmp_path: Path, clock: Clock) -> None:
    [young], _ = settled(tmp_path, clock, check("NODE_EPOCH_BEHIND"))
    assert young.severity == "INFO" and "(WARN if it lasts until " in young.summary and overall([young]) == "OK"
    clock.now += 59
    assert settled(tmp_path, clock, check("NODE_EPOCH_BEHIND"))[0][0].severity == "INFO"
    clock.now += 1
    [old], _ = settled(tmp_path, clock, check("NODE_EPOCH_BEHIND"))
    assert old.severity == "WARN" and overall([old]) == "WARN"
    [told], _ = settled(tmp_path / "other", clock, check("VERSION_MIXED", "cluster", lasted_seconds=2 * DAY))
    assert told.severity == "WARN", "where the nodes tell how long it lasts, the first look knows"
    assert all(each.for_seconds == 0 for code, each in HEALTH.items() if each.severity == "ERR"), "an ERR never waits"


def test_a_mute_hides_one_fault_from_word_and_count_until_it_ends(tmp_path: Path, clock: Clock) -> None:
    memory = HealthMemory(tmp_path / "map.toml", clock)
    memory.mute("NODE_DOWN", 4 * HOUR, "node-00")
    memory.save(must=True)
    shown, after = settled(tmp_path, clock, check("NODE_DOWN"))
    assert shown[0].muted_until is not None and overall(shown) == "OK" and after.remaining_seconds(after.live_mutes()[0]) == 4 * HOUR
    other, _ = settled(tmp_path, clock, check("NODE_DOWN"), check("NODE_DOWN", "node-01"))
    assert [each.muted_until is not None for each in other] == [True, False] and overall(other) == "WARN"
    clock.now += 4 * HOUR
    over, after = settled(tmp_path, clock, check("NODE_DOWN"))
    assert over[0].muted_until is None and overall(over) == "WARN" and after.live_mutes() == []


@pytest.mark.parametrize(
    "grown",
    [
        [check("CHECKSUM_ERRORS", severity="ERR", count=3)],
        [check("CHECKSUM_ERRORS", count=4)],
        [check("CHECKSUM_ERRORS", count=3), check("CHECKSUM_ERRORS", "node-01")],
    ],
    ids=["severity", "count", "subjects"],
)
def test_a_mute_ends_where_the_fault_grows_and_says_so(tmp_path: Path, clock: Clock, grown: list[Health]) -> None:
    memory = HealthMemory(tmp_path / "map.toml", clock)
    memory.mute("CHECKSUM_ERRORS", DAY)
    memory.save()
    for count in (3, 2, 3):  # no more than at the first look that saw it
        shown, after = settled(tmp_path, clock, check("CHECKSUM_ERRORS", count=count))
        assert overall(shown) == "OK" and not after.ended
    shown, after = settled(tmp_path, clock, *grown)
    assert overall(shown) == grown[0].severity and [mute.code for mute in after.ended] == ["CHECKSUM_ERRORS"]


def test_a_mute_of_what_is_still_young_outlives_its_coming_of_age(tmp_path: Path, clock: Clock) -> None:
    memory = HealthMemory(tmp_path / "map.toml", clock)
    memory.mute("NODE_EPOCH_BEHIND", DAY)
    memory.save()
    settled(tmp_path, clock, check("NODE_EPOCH_BEHIND"))
    clock.now += HOUR
    shown, _ = settled(tmp_path, clock, check("NODE_EPOCH_BEHIND"))
    assert shown[0].severity == "WARN" and overall(shown) == "OK"


FOREVER = '{"seen": {}, "mutes": [{"code": "NODE_DOWN", "subject": "*", "until": %s, "severity": "", "count": 0}]}'


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        '{"seen": {"a": 1}, "mutes": []}',
        '{"seen": {"NODE_DOWN node-03": [-1e308, 1e308]}, "mutes": []}',
        '{"seen": {}, "mutes": [{"code": "NO"}]}',
        FOREVER % "1e308",
        FOREVER % ("1" + "0" * 400),
        FOREVER % "NaN",
        FOREVER % "1e10",
    ],
)
def test_a_damaged_memory_costs_no_more_than_what_it_said(tmp_path: Path, clock: Clock, damage: str) -> None:
    (tmp_path / "map.toml.health.json").write_text(damage)
    shown, memory = settled(tmp_path, clock, check("NODE_DOWN"))
    assert shown[0].lasted_seconds == 0 and json.loads(memory.path.read_text())["seen"] and not shown[0].muted_until


def test_no_mute_is_for_ever(tmp_path: Path, clock: Clock) -> None:
    for seconds in (0.0, 31 * DAY):
        with pytest.raises(UsageError, match="a mute must end"):
            HealthMemory(tmp_path / "map.toml", clock).mute("NODE_DOWN", seconds)


# --- checks over reports ---


@pytest.fixture(scope="module")
def where() -> ClusterMap:
    return ClusterMap.local([Node(f"node-{i:02}", f"host-{i:02}", f"127.0.0.1:{7000 + i}") for i in range(14)])


def moved(*, slow: bool, reads: int = 1000) -> Moved:
    counts = [0] * (len(LATENCY_BOUNDS_SECONDS) + 1)
    counts[LATENCY_BOUNDS_SECONDS.index(0.25 if slow else 0.025)] = reads
    return Moved(300.0, reads, 0, 0, tuple(counts))


def test_a_node_four_times_slower_than_its_peers_is_told_and_few_reads_tell_nothing(where: ClusterMap) -> None:
    well = [report(where, i, traffic=moved(slow=False)) for i in range(14)]
    slow = replace(well[3], traffic=moved(slow=True))
    [found] = evaluate(where, [*well[:3], slow, *well[4:]])
    assert (found.code, found.subject) == ("DISK_SLOW", "node-03") and "the others" in found.summary
    few = replace(slow, traffic=moved(slow=True, reads=99))
    assert evaluate(where, [*well[:3], few, *well[4:]]) == []
    assert evaluate(where, [replace(each, traffic=moved(slow=True)) for each in well]) == [], "all alike: no disk is to blame"
    alone = [replace(each, traffic=None) for each in well]
    assert evaluate(where, [*alone[:3], slow, *alone[4:]]) == []


def test_stripes_are_judged_by_the_placement_groups_that_miss_nodes(where: ClusterMap) -> None:
    well = [report(where, i) for i in range(14)]

    def with_down(count: int) -> dict[str, Health]:
        down = [replace(each, state="down", error="x") for each in well[:count]]
        return {each.code: each for each in evaluate(where, [*down, *well[count:]])}

    two, three = with_down(2), with_down(3)
    assert "STRIPE_LOST" not in two and "placement groups miss shards" in two["STRIPE_DEGRADED"].summary
    assert three["STRIPE_LOST"].severity == "ERR" and "more than 2 nodes down" in three["STRIPE_LOST"].summary
    assert "STRIPE_DEGRADED" not in with_down(0)


def test_mixed_versions_are_as_old_as_the_newest_of_them(where: ClusterMap) -> None:
    reports = [
        report(where, i, version="0.2.0" if i < 2 else "0.1.0", uptime_seconds=[50.0, 90.0][i == 1] if i < 2 else 1e6) for i in range(14)
    ]
    [found] = evaluate(where, reports)
    assert found.code == "VERSION_MIXED" and found.lasted_seconds == 90.0


def test_a_client_without_one_hit_is_told_for_each_owner(where: ClusterMap) -> None:
    values = {
        'kvstore_lookup_tokens_total{owner="default",retention_class="chat"}': 1280.0,
        'kvstore_hit_tokens_total{owner="default",retention_class="chat",tier="ssd"}': 128.0,
        'kvstore_lookup_tokens_total{owner="other",retention_class="chat"}': 1280.0,
        'kvstore_hit_tokens_total{owner="other",retention_class="chat",tier="ssd"}': 0.0,
    }
    well = [report(where, i) for i in range(14)]
    [found] = evaluate(
        where, well, clients=[ClientReport("http://a:1/metrics", values=values), ClientReport("http://b:1/metrics", error="x")]
    )
    assert (found.code, found.subject) == ("NAMESPACE_ZERO_HIT", "http://a:1/metrics other")


def test_every_code_says_what_it_sees_when_it_does_not_fire(where: ClusterMap) -> None:
    well = [report(where, i) for i in range(14)]
    for code in HEALTH:
        [line] = values_now(code, where, well)
        assert line.startswith("does not fire") and (code == "NAMESPACE_ZERO_HIT" or ": " in line), line
        assert HEALTH[code].commands and HEALTH[code].causes and HEALTH[code].fix and HEALTH[code].measured
    down = [replace(each, state="down", error="refused") for each in well]
    assert len(values_now("NODE_DOWN", where, down)) == 13 and "and 2 more" in values_now("NODE_DOWN", where, down)[-1]


# --- what a daemon finds out about itself ---


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("health"), 3, capacity_bytes=128 << 20, k=2, m=1) as running:
        yield running


def page(cluster: LocalCluster, node: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{cluster.map.nodes[node].metrics_address}/metrics", timeout=10) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def values_of(cluster: LocalCluster, node: int) -> dict[str, float]:
    return ask_nodes(cluster.map, 10)[node].values


FAULTS = {
    "CHECKSUM_ERRORS": {'kvstore_disk_errors_total{kind="checksum"}': 1.0},
    "DISK_FULL": {"kvstore_disk_free_bytes": 50e6},
    "DISK_WEAR": {"kvstore_disk_wear_ratio": 0.9},  # not on the page of a disk that does not tell
    "INDEX_REBUILT": {'kvstore_index_starts_total{mode="rebuild"}': 1.0},
    "NODE_EPOCH_BEHIND": {"kvstore_epoch_seen": 2.0},
    "ZOMBIE_BYTES": {'kvstore_disk_used_bytes{kind="freeing"}': 2e6, 'kvstore_disk_used_bytes{kind="zombie"}': 2e6},
    "EVICTION_STALLED": {
        'kvstore_disk_used_bytes{kind="shards"}': 134e6,
        'kvstore_node_requests_total{op="write",result="no_space"}': 1.0,
    },
    "RETENTION_SHORT": {
        'kvstore_evicted_bytes_total{retention_class="chat",reason="lru"}': 1.0,
        'kvstore_retention_seconds{retention_class="chat"}': 60.0,
    },
    "NODE_FLAPPING": {},
}


@pytest.mark.parametrize("code", SELF_CHECKS)
def test_a_daemon_finds_each_of_its_own_faults_and_only_that(cluster: LocalCluster, code: str) -> None:
    """On the values of a real daemon: a name that it does not export would not be found."""
    values, now = values_of(cluster, 0), 1e9
    assert judge(values, values, [now], now) == {}
    assert FAULTS[code].keys() <= values.keys() | {"kvstore_disk_wear_ratio"}
    starts = [now - 500, now - 20, now] if code == "NODE_FLAPPING" else [now - 700, now - 20, now]
    found = judge({**values, **FAULTS[code]}, values, starts, now)
    assert found.keys() == {code} and all(HEALTH[each].severity == severity for each, severity in found.items())


def test_a_daemons_check_waits_before_it_fires_and_before_it_stops(cluster: LocalCluster) -> None:
    well, clock = values_of(cluster, 0), Clock(0.0)
    values = dict(well)
    looks = SelfCheck(lambda: values, [], clock, clock)
    fired = []
    for step in range(40):
        behind = 5 <= step < 20 or step == 30
        values["kvstore_epoch_seen"] = 2.0 if behind else 1.0
        looks.look()
        fired.append("NODE_EPOCH_BEHIND" in looks.firing)
        clock.now += 10.0
    wait = int(FOR_SECONDS["NODE_EPOCH_BEHIND"] / 10)
    first, last = fired.index(True), len(fired) - 1 - fired[::-1].index(True)
    assert first == 5 + wait and last == 19 + wait - 1, "one blip at 30 fires nothing"


def test_a_daemons_log_tells_a_fault_when_it_begins_or_grows_and_each_ten_minutes(cluster: LocalCluster) -> None:
    values, clock, said = dict(values_of(cluster, 0)), Clock(0.0), list[tuple[float, str, str]]()
    looks = SelfCheck(lambda: values, [], clock, clock, lambda severity, line: said.append((clock.now, severity, line)))
    for free_bytes, until_seconds in ((1e12, 60.0), (50e6, 100.0), (20e6, 1000.0)):
        values["kvstore_disk_free_bytes"] = free_bytes
        while clock.now < until_seconds:
            looks.look()
            clock.now += 5.0
    warned, refused = (
        "DISK_FULL 50.0 MB free on its file system: drops",
        "DISK_FULL 20.0 MB free on its file system: writes are refused; kvstore",
    )
    assert [(when, severity) for when, severity, _ in said] == [(60.0, "WARN"), (100.0, "ERR"), (700.0, "ERR")]
    assert said[0][2].startswith(warned) and said[1][2].startswith(refused)


def test_every_check_is_exported_at_zero_from_the_first_second(cluster: LocalCluster) -> None:
    samples = page(cluster, 1)["kvstore_health_check"].samples
    assert {(s.labels["code"], s.labels["severity"]) for s in samples} == {(c, s) for c in SELF_CHECKS for s in ("INFO", "WARN", "ERR")}
    assert all(sample.value == 0 for sample in samples) and set(SELF_CHECKS) <= set(HEALTH)


def test_a_node_that_starts_three_times_in_ten_minutes_flaps(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "flaps", 1, capacity_bytes=128 << 20, k=1, m=0) as cluster:
        cluster.restart(0)
        assert values_of(cluster, 0)['kvstore_health_check{code="NODE_FLAPPING",severity="WARN"}'] == 0
        cluster.restart(0)
        assert values_of(cluster, 0)['kvstore_health_check{code="NODE_FLAPPING",severity="WARN"}'] == 1
        assert values_of(cluster, 0)["kvstore_node_starts_total"] == 3
        ran = Cli(tmp_path, KVSTORE_MAP=str(cluster.map_path)).run("status")
        assert "NODE_FLAPPING  node-00 up for " in ran.stdout and "start number 3" in ran.stdout


def test_starts_are_counted_and_a_damaged_file_starts_over(tmp_path: Path) -> None:
    for number in range(1, 2 * STARTS_KEPT):
        assert note_start(tmp_path, float(number)).total == number
    kept = note_start(tmp_path, 100.0)
    assert len(kept.recent) == STARTS_KEPT and kept.recent[-1] == 100.0
    for damage in ("", "x 1 2", "1 two"):
        (tmp_path / "starts").write_text(damage)
        assert note_start(tmp_path, 5.0).total == 1
    assert note_start(tmp_path / "absent", 5.0).total == 1


# --- commands ---


def test_mute_and_unmute_change_the_word_and_stay_visible(cluster: LocalCluster, tmp_path: Path) -> None:
    cli = Cli(tmp_path, KVSTORE_MAP=str(cluster.map_path))
    cluster.kill(1)
    try:
        assert "health   WARN" in cli.run("status").stdout
        assert cli.run("mute", "node_down", "4h", "--subject", "node-01").stdout.startswith("NODE_DOWN of node-01 is muted for 4.0 h")
        assert cli.run("mute", "HOSTS_BELOW_STRIPE", "1d").code == 0
        ran = cli.run("status", "--fail-on", "warn")
        assert ran.code == 0 and "health   OK  (muted: NODE_DOWN node-01, 4.0 h left; HOSTS_BELOW_STRIPE, 1.0 d left)" in ran.stdout
        assert "NODE_DOWN  " not in ran.stdout
        envelope = cli.run("status", "--json").json
        down = next(each for each in envelope["health"] if each["code"] == "NODE_DOWN")
        assert down["muted_until"] and down["since"] and len(envelope["data"]["mutes"]) == 2 and envelope["data"]["status"] == "OK"
        assert cli.run("status", "--nagios").stdout.startswith("KVSTORE OK - 2 of 3 nodes up |")
        assert cli.run("mute").stdout.splitlines()[0].startswith("NODE_DOWN node-01  4.0 h left")
        assert cli.run("unmute", "NODE_DOWN").stdout == "NODE_DOWN counts again\n"
        assert "health   WARN  1 check  (muted: HOSTS_BELOW_STRIPE" in cli.run("status").stdout
        cluster.kill(0)
        worse = cli.run("status")
        assert (
            worse.code == 1 and "the mute of HOSTS_BELOW_STRIPE has ended" in worse.stderr and "HOSTS_BELOW_STRIPE  2" not in worse.stdout
        )
        assert "muted" not in cli.run("status").stdout
    finally:
        cluster.restart(0)
        cluster.restart(1)


def test_mute_complains_in_one_line(cluster: LocalCluster, tmp_path: Path) -> None:
    cli = Cli(tmp_path, KVSTORE_MAP=str(cluster.map_path))
    cli.run("mute", "NODE_DWON", "4h").refused(2, "E140", 'did you mean "NODE_DOWN"?')
    cli.run("mute", "NODE_DOWN").refused(2, "E140", "for how long")
    cli.run("mute", "NODE_DOWN", "4").refused(2, "E102", "no unit")  # hours were meant, not seconds
    cli.run("mute", "NODE_DOWN", "soon").refused(2, "E102", "soon")
    cli.run("mute", "NODE_DOWN", "31d").refused(2, "E131", "a mute must end")
    cli.run("mute", "NODE_DOWN", "1h", "--subject", "node-1").refused(2, "E140", "no node, class or client")
    assert cli.run("unmute", "NODE_DOWN").stdout == "NODE_DOWN was not muted\n"


def test_explain_tells_the_value_now_the_causes_and_the_commands(cluster: LocalCluster, tmp_path: Path) -> None:
    cli = Cli(tmp_path, KVSTORE_MAP=str(cluster.map_path))
    well = cli.run("explain", "NODE_DOWN").stdout
    assert "now       does not fire: 3 of 3 nodes answer" in well and "commands  kvstore status --nodes" in well and "1. " in well
    cluster.kill(1)
    try:
        assert "now       WARN node-01 does not answer: connection refused" in cli.run("explain", "NODE_DOWN").stdout
        assert cli.run("explain", "NODE_DOWN", "--json").json["data"]["now"] == ["WARN node-01 does not answer: connection refused"]
    finally:
        cluster.restart(1)
    nowhere = cli.run("explain", "STRIPE_DEGRADED", KVSTORE_MAP="")
    assert nowhere.code == 0 and "now       unknown: no cluster that answers" in nowhere.stdout and "lasted 10.0 min" in nowhere.stdout


def test_status_without_a_host_takes_all_its_nodes_away(tmp_path: Path, cluster: LocalCluster) -> None:
    """Six nodes on three hosts, 2+1: any one host may go, and not two; with one node of another host down, not even one."""
    with LocalCluster(tmp_path / "hosts", 6, capacity_bytes=128 << 20, k=2, m=1) as running:
        hosts = tuple(replace(node, host=f"host-{node.ordinal // 2}") for node in running.map.nodes)
        path = tmp_path / "hosts.toml"
        ClusterMap.local(hosts, k=2, m=1).save(path)
        cli = Cli(tmp_path, KVSTORE_MAP=str(path))
        spare = cli.run("status", "--without", "host-1")
        assert spare.code == 0 and "without  host-1: everything can still be read" in spare.stdout, spare.stdout
        assert "2 hosts left, whole writes need 3" in spare.stdout
        cli.run("status", "--without", "host-1", "--without", "host-2").refused(4, "E302", "without host-1, host-2")
        cli.run("status", "--without", "host-9").refused(2, "E135")
        running.kill(0)
        cli.run("status", "--without", "host-1").refused(4, "E302", "1 down already")
        assert cli.run("status", "--without", "node-00").code == 0, "what is down already costs nothing more"
