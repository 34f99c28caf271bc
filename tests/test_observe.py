"""Prometheus rules and the Grafana dashboard: checked by promtool, by name against what is exported, and by a real Prometheus over a
real cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from client_tools import SMALL, chain, load, store, until
from prometheus_client.parser import text_string_to_metric_families

from kvstore.cli.codes import HEALTH
from kvstore.client import Client
from kvstore.client.agent.process import AgentProcess
from kvstore.client.agent.process_config import ProcessConfig
from kvstore.client.agent.worker import WorkerAgent
from kvstore.client.metrics import serve_metrics
from kvstore.clustermap import ClusterMap, Node
from kvstore.observe import export
from kvstore.observe.export import rules_text
from kvstore.observe.grafana import NUMBERS, dashboard
from kvstore.server.local import LocalCluster, free_ports

RULES_TEST = Path(__file__).resolve().parent / "data" / "rules_test.yml"
SUFFIXES = re.compile(r"_(bucket|count|sum)$")
SCRAPE_SECONDS = 60.0


def tool(name: str) -> str:
    found = shutil.which(name)
    assert found, f"{name} is missing: it is in Debian's package prometheus, which scripts/setup installs"
    return found


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run([tool("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def expressions() -> list[tuple[str, str]]:
    """(panel, PromQL) of the whole dashboard, with what Grafana fills in filled in."""
    made = dashboard()
    found = [(panel["title"], target["expr"]) for panel in made["panels"] for target in panel["targets"]]
    found += [(mark["name"], mark["expr"]) for mark in made["annotations"]["list"]]
    fill = (("$__rate_interval", "5m"), ("$cluster", ".*"), ("$limit_GBps", "10"))
    for before, after in fill:
        found = [(title, expr.replace(before, after)) for title, expr in found]
    assert not any("$" in expr for _, expr in found) and len(found) > 25
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with LocalCluster(directory, 3, k=2, m=1, capacity_bytes=64 << 20, directories=1) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.map, layout=SMALL) as opened:
        yield opened


@pytest.fixture(scope="module")
def agent(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """`kvstore agent`, in this process."""
    socket = tmp_path_factory.mktemp("agent") / "agent.sock"
    process = AgentProcess(ProcessConfig(map_path=cluster.map_path, socket_path=socket, memory_bytes=1 << 20, worker_bytes=1 << 20))
    process.start()
    try:
        yield process
    finally:
        process.close()


@contextmanager
def client_page(client: Client) -> Iterator[str]:
    with serve_metrics(client, 0) as port:
        yield f"127.0.0.1:{port}"


def others(cluster: LocalCluster, agent: AgentProcess) -> tuple[str, str]:
    """Pages of the window directory and of the agent process."""
    assert agent.http is not None
    return cluster.ready[cluster.nodes_count]["http"], f"127.0.0.1:{agent.http.port}"


def exported(cluster: LocalCluster, client: Client, agent: AgentProcess) -> set[str]:
    """Names of families on the pages of a real daemon, a real client, a directory and an agent process."""
    names = set()
    with client_page(client) as address:
        for page in (cluster.map.nodes[0].metrics_address, address, *others(cluster, agent)):
            with urllib.request.urlopen(f"http://{page}/metrics", timeout=10) as answer:
                for family in text_string_to_metric_families(answer.read().decode()):
                    names.add(family.name + ("_total" if family.type == "counter" else ""))
    assert {"kvstore_node_ready", "kvstore_lookup_tokens_total"} <= names and len(names) > 60
    return names


def used_names(text: str) -> set[str]:
    """Metrics that a text of PromQL names: ours, and recorded ones with their colon."""
    return set(re.findall(r"\bkvstore[_:][a-zA-Z0-9_:]+", text))


def test_promtool_finds_the_rules_well_formed(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(rules_text())
    promtool("check", "rules", tmp_path / "rules.yml")


def test_every_alert_fires_on_its_fault_and_not_before() -> None:
    """promtool plays series through the rules; an alert nobody plays would be an alert nobody has seen."""
    promtool("test", "rules", RULES_TEST)
    alerts = set(re.findall(r"- alert: (\w+)", rules_text()))
    played = RULES_TEST.read_text()
    for alert in alerts:
        silent = re.search(rf"alertname: {alert}, exp_alerts: \[\]", played)
        loud = re.search(rf"alertname: {alert}\n\s+exp_alerts:\n\s+- exp_labels", played)
        assert loud and (silent or alert == "KvstoreNodeDown"), alert
    assert len(alerts) >= 12


def test_every_alert_says_what_to_do_and_names_codes_that_explain_knows() -> None:
    alerts = rules_text().split("- alert: ")[1:]
    assert all("summary:" in alert and "fix:" in alert and re.search(r"severity: (warning|critical)", alert) for alert in alerts)
    assert set(re.findall(r"code: ([A-Z_]+)", rules_text())) <= set(HEALTH)


def test_rules_and_dashboard_name_only_what_is_exported_or_recorded(cluster: LocalCluster, client: Client, agent: AgentProcess) -> None:
    names, recorded = exported(cluster, client, agent), set(re.findall(r"- record: (\S+)", rules_text()))
    rules = "\n".join(
        line for line in rules_text().splitlines() if not line.lstrip().startswith(("#", "- record:", "fix:", "summary:", "- name:"))
    )
    panels = "\n".join(expr for _, expr in expressions())
    for where, text in (("rules.yml", rules), ("dashboard", panels)):
        used = used_names(text)
        assert len(used) > 15, where
        for name in used:
            assert name in recorded if ":" in name else SUFFIXES.sub("", name) in names or name in names, (where, name)
    query = dashboard()["templating"]["list"][1]["query"]["query"]
    assert used_names(query) <= names
    assert recorded & used_names(panels), "the dashboard uses recording rules"


def test_labels_in_rules_and_dashboard_are_labels_of_those_metrics(cluster: LocalCluster, client: Client, agent: AgentProcess) -> None:
    """A selector on a label that a metric does not have would match nothing, for ever, in silence."""
    known: dict[str, dict[str, set[str]]] = {}
    with client_page(client) as address:
        for page in (cluster.map.nodes[0].metrics_address, address, *others(cluster, agent)):
            with urllib.request.urlopen(f"http://{page}/metrics", timeout=10) as answer:
                for family in text_string_to_metric_families(answer.read().decode()):
                    for sample in family.samples:
                        for label, value in sample.labels.items():
                            known.setdefault(SUFFIXES.sub("", sample.name), {}).setdefault(label, set()).add(value)
    texts = rules_text() + "\n".join(expr for _, expr in expressions())
    selectors = re.findall(r"\b(kvstore_[a-z0-9_]+)\{([^}]*)\}", texts)
    assert len(selectors) > 20
    checked = 0
    for name, inner in selectors:
        for label, operator, wanted in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', inner):
            if label == "cluster":
                continue  # of the scrape
            values = known[SUFFIXES.sub("", name)][label]
            alternatives = wanted.split("|") if operator == "=~" else [wanted]
            assert all(each in values for each in alternatives), (name, label, wanted)
            checked += 1
    assert checked >= 10


def test_promtool_parses_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{at}", "expr": expr} for at, (_, expr) in enumerate(expressions())]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))  # JSON is YAML
    promtool("check", "rules", "--lint=none", tmp_path / "panels.yml")


def test_the_dashboard_has_the_form_that_grafana_10_imports() -> None:
    made = dashboard()
    assert json.loads(json.dumps(made)) == made and made["schemaVersion"] >= 36 and made["uid"] == "kvstore" and "id" not in made
    panels = made["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1)) and len({panel["title"] for panel in panels}) == len(panels)
    cells = set()
    for panel in panels:
        place = panel["gridPos"]
        mine = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not mine & cells and place["x"] + place["w"] <= 24, panel["title"]
        cells |= mine
        assert panel["type"] in ("stat", "timeseries") and panel["fieldConfig"]["defaults"]["unit"] and panel["description"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs)
        assert all(part["datasource"] == {"type": "prometheus", "uid": "${datasource}"} for part in (panel, *panel["targets"]))
    assert len(cells) == 24 * (max(y for _, y in cells) + 1), "no holes"
    assert {each["name"]: each["type"] for each in made["templating"]["list"]} == {
        "datasource": "datasource", "cluster": "query", "limit_GBps": "textbox",
    }  # fmt: skip
    first = [panel for panel in panels if panel["gridPos"]["y"] == 0]
    assert len(first) == len(NUMBERS) == 8 and all(panel["type"] == "stat" for panel in first)
    assert sum(panel["fieldConfig"]["defaults"]["noValue"] == "no traffic" for panel in first) == 4, "no traffic is said in words"
    assert "Unreachable targets" in {panel["title"] for panel in first}


def test_an_export_writes_all_files_and_again_over_an_older_one(tmp_path: Path) -> None:
    nodes = [Node(f"node-{i:02}", f"host-{i:02}", f"10.0.0.{i}:1", metrics_address=f"10.0.0.{i}:3") for i in range(12)]
    for _ in range(2):
        written = export(tmp_path / "new" / "folder", ClusterMap.local(nodes))
        assert [path.name for path in written] == ["kvstore-dashboard.json", "kvstore-rules.yml", "kvstore-nodes.json"]
        assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == sorted(path.name for path in written)
    assert json.loads(written[0].read_text()) == dashboard() and written[1].read_text() == rules_text()
    assert json.loads(written[2].read_text())[3] == {
        "targets": ["10.0.0.3:3"],
        "labels": {"cluster": "dev", "node": "node-03", "host": "host-03"},
    }
    assert [path.suffix for path in export(tmp_path)] == [".json", ".yml"]


# --- a real Prometheus ---

# Panels that rightly show nothing where nothing was dropped for room, nothing fills up, and few READ requests were made.
QUIET = {
    "Kept, of contract": 1,
    "READ requests p99, by node": 1,
    "Dropped bytes that had reached their class's time": 1,
    "Age of hits and near misses, p50 and p90": 2,
    "Kept, against contract": 1,
    "Full in": 1,
    "Node started": 1,
    "New epoch": 1,
}


@pytest.fixture(scope="module")
def prometheus(cluster: LocalCluster, client: Client, agent: AgentProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Scrapes all of them each 0.5 s and evaluates the rules as often; its address, once it has seen some traffic."""
    directory = tmp_path_factory.mktemp("prometheus")
    export(directory, cluster.map)
    rules = directory / "kvstore-rules.yml"
    rules.write_text(rules.read_text().replace("interval: 30s", "interval: 500ms"))
    with client_page(client) as address, WorkerAgent(agent.config.socket_path, layout=SMALL) as worker:
        pages = zip(("client", "directory", "agent"), (address, *others(cluster, agent)), strict=True)
        labels = {"cluster": cluster.map.cluster_id}
        scrapes: list[dict[str, Any]] = [
            {"job_name": f"kvstore-{job}", "static_configs": [{"targets": [page], "labels": labels}]} for job, page in pages
        ]
        scrapes.append({"job_name": "kvstore-node", "file_sd_configs": [{"files": ["kvstore-nodes.json"]}]})
        settings = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
            "rule_files": ["kvstore-rules.yml"],
            "scrape_configs": scrapes,
        }
        (directory / "prometheus.yml").write_text(json.dumps(settings))
        [port] = free_ports(1)
        options = [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
        options.append(f"--web.listen-address=127.0.0.1:{port}")
        with (directory / "log").open("w") as log:
            process = subprocess.Popen([tool("prometheus"), *options], stdout=log, stderr=log)
        try:
            base = f"http://127.0.0.1:{port}"

            def samples(expr: str) -> int:
                assert process.poll() is None, (directory / "log").read_text()[-2000:]
                return len(query(base, expr)) if reachable(base) else 0

            until(lambda: samples('up{job="kvstore-node"} == 1') == 3, "the first scrapes", SCRAPE_SECONDS)
            for _ in range(4):
                keys = chain(4, SMALL)
                client.lookup(keys)
                store(client, keys)
                result, _ = load(client, client.lookup(keys))
                assert result.blocks == 4
                assert worker.keep_window(keys, 512, bytes(1000)) and worker.window(keys, 512) and not worker.window(keys, 256)
                seen = client.counters.hit_tokens.total()
                wanted = f"sum(kvstore_hit_tokens_total) == {seen}"
                until(lambda wanted=wanted: samples(wanted) == 1, "the counters to be scraped", SCRAPE_SECONDS)
            until(lambda: samples("kvstore:hit_ratio:rate5m > 0") == 1, "the rules", SCRAPE_SECONDS)
            until(lambda: samples("kvstore:load_duration_seconds:p99_5m > 0") == 1, "the rules", SCRAPE_SECONDS)
            until(lambda: samples("kvstore:window_hit_ratio:rate5m == 0.5") == 1, "the rules", SCRAPE_SECONDS)
            until(lambda: samples('rate(kvstore_directory_keys_total{what="located"}[5m]) > 0') == 1, "the directory", SCRAPE_SECONDS)
            yield base
        finally:
            process.terminate()
            process.wait(30)


def reachable(base: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def query(base: str, expr: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{base}/api/v1/query?{urllib.parse.urlencode({'query': expr})}", timeout=10) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def test_a_real_prometheus_fills_every_panel(prometheus: str) -> None:
    empty: dict[str, int] = {}
    for title, expr in expressions():
        found = query(prometheus, expr)
        values = [float(each["value"][1]) for each in found]
        if not found or any(value != value for value in values):  # NaN: a quantile of nothing
            empty[title] = empty.get(title, 0) + 1
    assert {title: count for title, count in empty.items() if count > QUIET.get(title, 0)} == {}
    [unreachable] = [expr for title, expr in expressions() if title == "Unreachable targets"]
    assert query(prometheus, unreachable)[0]["value"][1] == "0"
    [hit] = [expr for title, expr in expressions() if title == "Hit, 5 min"]
    assert 0 < float(query(prometheus, hit)[0]["value"][1]) <= 1


def test_no_rule_fails_and_no_alert_fires_in_a_well_cluster(prometheus: str) -> None:
    with urllib.request.urlopen(f"{prometheus}/api/v1/rules", timeout=10) as answer:
        groups = json.load(answer)["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) >= 28 and [(rule["name"], rule["lastError"]) for rule in rules if rule.get("lastError")] == []
    alerts = [(rule["name"], alert["state"]) for rule in rules if rule["type"] == "alerting" for alert in rule["alerts"]]
    firing = [name for name, state in alerts if state == "firing"]
    assert firing == []
