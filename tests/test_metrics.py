"""Metrics: every series at 0 from the first second, house naming rules, exact numbers from native counters, and a document that is true."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_tools import SMALL
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvstore import metrics
from kvstore.client import Client, client_registry
from kvstore.client.agent.agent import Agent
from kvstore.client.agent.metrics import serve_metrics
from kvstore.client.agent.process import AgentProcess
from kvstore.client.agent.process_config import ProcessConfig
from kvstore.client.agent.process_metrics import AGENT
from kvstore.kernels import _native
from kvstore.keys import Namespace
from kvstore.metrics import (
    AGE_BOUNDS_SECONDS,
    AUDIT,
    CLIENT,
    COMMON,
    ENGINE,
    LATENCY_BOUNDS_SECONDS,
    NODE,
    OPS,
    PEER,
    SERVER,
    WINDOW,
    EvictionMetrics,
    Holding,
    NodeFacts,
)
from kvstore.metrics_directory import DIRECTORY
from kvstore.metrics_lookup import LOOKUP
from kvstore.modelcard import ModelCard
from kvstore.server.directory import Directory
from kvstore.server.directory_config import DirectoryConfig
from kvstore.server.local import LocalCluster
from kvstore.server.lookup_service import LookupService, LookupServiceConfig

EVERYTHING = (*COMMON, *NODE, *DIRECTORY, *LOOKUP, *CLIENT, *WINDOW, *PEER, *AUDIT, *ENGINE, *SERVER, *AGENT)
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "METRICS.md"


def server_stats() -> dict[str, Any]:
    """What Server.stats() gives before any traffic (tests/test_server*.py hold the real one against the same reader)."""
    zero = {"counts": [0] * (len(LATENCY_BOUNDS_SECONDS) + 1), "sum_seconds": 0.0}
    singles = (
        "bytes_in bytes_out connections connections_opened connections_refused connections_idle_closed connections_cut frames_malformed "
        "read_head_bytes write_arena_used_bytes reads_direct reads_cached reads_fell_back epoch_seen "
        "verbs_opened verbs_refused verbs_failed verbs_bytes verbs_queue_pairs verbs_registered_bytes"
    )
    return {
        "bounds_seconds": list(LATENCY_BOUNDS_SECONDS),
        "requests": {op: {} for op in OPS},
        "request_seconds": {op: dict(zero) for op in OPS},
        "queued": dict.fromkeys(OPS, 0),
        "read_items": {},
        "disk_read_seconds": dict(zero),
        **dict.fromkeys(singles.split(), 0),
    }


@pytest.fixture(scope="module")
def store_stats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], dict[str, Any]]]:
    """Of a real store, new and empty."""
    store = _native.Store(str(tmp_path_factory.mktemp("store")), capacity_bytes=1 << 30)
    assert store.wait_started(30)
    yield store.stats
    store.close()


def test_every_series_is_there_at_zero_before_any_traffic(store_stats: Callable[[], dict[str, Any]]) -> None:
    flat = metrics.flat_values(metrics.node_registry(server_stats, store_stats, NodeFacts()))
    for metric in NODE:
        for series in metric.series() if not metric.optional else ():
            labels = ",".join(f'{name}="{value}"' for name, value in zip(metric.labels, series, strict=True))
            name = metric.name + ("_count" if metric.kind == "histogram" else "")
            key = f"{name}{{{labels}}}" if labels else name
            if key not in ('kvstore_disk_used_bytes{kind="index"}', "kvstore_disk_free_bytes"):  # an empty LMDB has pages, a disk has room
                assert flat[key] == (1.0 if key.endswith(('{mode="fresh"}', '{result="built"}')) else 0.0), key


def test_native_counters_come_out_exactly(store_stats: Callable[[], dict[str, Any]]) -> None:
    server, store = server_stats(), store_stats()
    server["requests"]["read"] = {0: 7, 1: 2, 20: 3, 21: 4, 42: 5, 4: 1}
    server["request_seconds"]["write"] = {"counts": [1, 2] + [0] * (len(LATENCY_BOUNDS_SECONDS) - 1), "sum_seconds": 0.5}
    store |= {
        "used_bytes": 4096,
        "discover_keys_total": 10,
        "discover_filtered_total": 4,
        "corrupt_found_total": 2,
        "corrupt_reported_total": 1,
    }
    store["start_mode"] = "rebuild"
    evictions = EvictionMetrics({"chat": 7 * 86400.0})
    evictions.evicted("chat", "lru", [40, 2], [7 * 86400.0, 7 * 86400 - 1])
    evictions.evicted("chat", "expired", [100, 200], [7 * 86400 + 1, 30.0])
    flat = metrics.flat_values(metrics.node_registry(lambda: server, lambda: store, NodeFacts(epoch=3), evictions))
    expected = {
        'kvstore_node_requests_total{op="read",result="ok"}': 8,  # EXISTS counts as done
        'kvstore_node_requests_total{op="read",result="refused"}': 7,
        'kvstore_node_requests_total{op="read",result="error"}': 5,
        'kvstore_node_request_duration_seconds_bucket{op="write",le="5e-05"}': 1,
        'kvstore_node_request_duration_seconds_bucket{op="write",le="0.0001"}': 3,
        'kvstore_node_request_duration_seconds_sum{op="write"}': 0.5,
        'kvstore_disk_used_bytes{kind="shards"}': 4096,
        'kvstore_node_discover_keys_total{by="index"}': 6,
        'kvstore_disk_errors_total{kind="checksum"}': 3,
        'kvstore_index_starts_total{mode="rebuild"}': 1,
        'kvstore_evicted_bytes_total{retention_class="chat",reason="expired"}': 300,
        'kvstore_evicted_contract_bytes_total{retention_class="chat",reason="lru",contract="kept"}': 40,
        'kvstore_evicted_contract_bytes_total{retention_class="chat",reason="lru",contract="broken"}': 2,
        'kvstore_evicted_contract_bytes_total{retention_class="chat",reason="expired",contract="kept"}': 100,
        'kvstore_eviction_age_seconds_bucket{retention_class="chat",le="604800"}': 3,
        'kvstore_eviction_age_seconds_count{retention_class="chat"}': 4,
        "kvstore_epoch": 3,
    }
    assert {name: flat[name] for name in expected} == expected


def test_the_oldest_of_a_class_over_all_owners_is_what_it_keeps(store_stats: Callable[[], dict[str, Any]]) -> None:
    facts = NodeFacts(class_names={2: "chat", 9: "mine"})
    held = [Holding(2, bytes(16), 100, 60.0), Holding(2, b"o" * 16, 20, 7200.0), Holding(9, bytes(16), 3, 5.0)]
    flat = metrics.flat_values(metrics.node_registry(server_stats, store_stats, facts, holdings=lambda: held))
    assert {name: flat[f'kvstore_retention_seconds{{retention_class="{name}"}}'] for name in metrics.CLASSES} == {
        "none": 0, "batch": 0, "chat": 7200, "agent": 0, "other": 5,
    }  # fmt: skip
    assert flat['kvstore_owner_used_bytes{owner="default"}'] == 103 and flat['kvstore_owner_used_bytes{owner="other"}'] == 20


def test_wear_is_exported_where_it_is_known_and_absent_elsewhere(store_stats: Callable[[], dict[str, Any]]) -> None:
    facts = NodeFacts()
    registry = metrics.node_registry(server_stats, store_stats, facts)
    assert not any(name.startswith("kvstore_disk_wear") for name in metrics.flat_values(registry))
    facts.wear_ratio = 0.0
    assert metrics.flat_values(registry)["kvstore_disk_wear_ratio"] == 0.0, "a new disk is known to be new"


def test_a_server_with_other_bounds_is_noticed(store_stats: Callable[[], dict[str, Any]]) -> None:
    server = server_stats()
    server["bounds_seconds"] = [1.0]
    with pytest.raises(ValueError, match="bounds"):
        metrics.flat_values(metrics.node_registry(lambda: server, store_stats, NodeFacts()))


def test_names_follow_the_rules() -> None:
    assert len({m.name for m in EVERYTHING}) == len(EVERYTHING), "one name per fact"
    for m in EVERYTHING:
        assert re.fullmatch(r"kvstore_[a-z0-9_]+", m.name)
        assert m.name.endswith("_total") == (m.kind == "counter"), m.name
        assert not re.search(r"_(ms|us|kb|mb|gb|percent|rate)(_|$)", m.name), m.name
        assert (m.kind == "histogram") <= m.name.endswith(("_seconds", "_nats")), m.name
        assert m.help.endswith(".") and "\n" not in m.help
        for name, closed in m.labels.items():
            assert len(closed) <= 10 and not {"key", "request", "user", "prompt", "ip", "node"} & {name}, m.name
    assert list(AGE_BOUNDS_SECONDS) == sorted(AGE_BOUNDS_SECONDS) and list(LATENCY_BOUNDS_SECONDS) == sorted(LATENCY_BOUNDS_SECONDS)


def test_the_text_is_what_prometheus_reads(store_stats: Callable[[], dict[str, Any]]) -> None:
    text = generate_latest(metrics.node_registry(server_stats, store_stats, NodeFacts())).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for m in (*COMMON, *(m for m in NODE if not m.optional)):
        family = families[m.name.removesuffix("_total")]
        assert family.documentation == m.help and family.type == m.kind
    info = families["kvstore_build_info"].samples[0]
    assert info.value == 1 and info.labels["version"]


def document_rows() -> dict[str, tuple[str, dict[str, set[str]], str]]:
    """Name -> type, labels with the values that are written ({}: a list told in the text above the tables), help."""
    rows = re.findall(r"^\| `(kvstore_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert len(rows) == len({name for name, *_ in rows}) > 60, "the tables were found, and no row twice"
    return {
        name: (
            kind,
            {part.partition("=")[0]: set(filter(None, part.partition("=")[2].split("/"))) for part in labels.split()},
            text.strip(),
        )
        for name, kind, labels, text in rows
    }


def test_the_document_lists_exactly_what_is_exported() -> None:
    written = document_rows()
    assert set(written) == {m.name for m in EVERYTHING}
    for m in EVERYTHING:
        kind, labels, text = written[m.name]
        assert kind == m.kind and text == m.help, m.name
        assert set(labels) == set(m.labels), m.name


@contextmanager
def directory() -> Iterator[str]:
    """The HTTP address of a window directory in this process."""
    running = Directory(DirectoryConfig(port=0))
    running.start()
    yield str(running.facts()["http"])
    running.request_stop()
    running.serve_until_stopped()


@contextmanager
def agent_process(map_path: Path, folder: Path) -> Iterator[str]:
    """The HTTP address of an agent process, here."""
    running = AgentProcess(ProcessConfig(map_path=map_path, socket_path=folder / "agent.sock", memory_bytes=1 << 20))
    running.start()
    yield str(running.facts()["http"])
    running.close()


@contextmanager
def lookup_service(map_path: Path, files: Path) -> Iterator[str]:
    """The HTTP address of a lookup service in this process."""
    space = Namespace(weights="w", kv_dtype="test", layout_digest=SMALL.digest())
    (files / "card.toml").write_text(ModelCard(name="small", layout=SMALL, namespace=space).to_toml())
    (files / "key").write_bytes(bytes(range(65, 97)))
    running = LookupService(LookupServiceConfig(map_path=map_path, model_path=files / "card.toml", ticket_key_path=files / "key", port=0))
    running.start()
    yield str(running.facts()["http"])
    running.request_stop()
    running.serve_until_stopped()


def test_the_document_tells_the_pages_of_a_real_daemon_and_a_real_client_apart_from_the_table(tmp_path: Path) -> None:
    """Name, type, help, labels and their closed lists: straight from the document to what is scraped."""
    found: dict[str, tuple[str, dict[str, set[str]], str]] = {}
    with (
        LocalCluster(tmp_path, 1, capacity_bytes=128 << 20, k=1, m=0) as cluster,
        Client(cluster.map, layout=SMALL) as client,
        Agent(client) as agent,
        serve_metrics(agent, 0) as port,
        directory() as third,
        agent_process(cluster.map_path, tmp_path) as fourth,
        lookup_service(cluster.map_path, tmp_path) as fifth,
    ):
        # Of an engine and its server: tests/test_shadow_audit.py and test_engine_server.py ask real ones.
        texts = [generate_latest(metrics.registry_of((*AUDIT, *ENGINE, *SERVER), lambda values: None)).decode()]
        for page in (cluster.map.nodes[0].metrics_address, f"127.0.0.1:{port}", third, fourth, fifth):
            with urllib.request.urlopen(f"http://{page}/metrics", timeout=10) as answer:
                texts.append(answer.read().decode())
        for text in texts:
            for family in text_string_to_metric_families(text):
                labels: dict[str, set[str]] = {}
                for sample in family.samples:
                    for name, value in sample.labels.items():
                        if name != "le":
                            labels.setdefault(name, set()).add(value)
                name = family.name + ("_total" if family.type == "counter" else "")
                assert found.get(name, (family.type, labels, family.documentation))[2] == family.documentation
                found[name] = family.type, labels, family.documentation
    written = document_rows()
    optional = {m.name for m in NODE if m.optional}  # there only where the disk tells
    assert found.keys() | optional == written.keys() and len(optional) == 1
    told = dict(re.findall(r"(?:- |\. )`(op|retention_class|code)` is (?:one of )?([\w, ]+)", DOCUMENT.read_text().replace("\n  ", " ")))
    told_above = {label: set(re.findall(r"\w+", words)) - {"or"} for label, words in told.items()}
    of_process = {"version", "revision", "owner", "model_name"}  # this process's own, or as configured
    checked = 0
    for name, (kind, labels, text) in found.items():
        assert (kind, set(labels), text) == (written[name][0], set(written[name][1]), written[name][2]), name
        for label, values in labels.items():
            if label not in of_process:
                assert values == (written[name][1][label] or told_above[label]), (name, label)
                checked += 1
    assert checked > 40


def test_a_client_counts_the_nodes_as_it_finds_them(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, 3, capacity_bytes=128 << 20, k=2, m=1) as cluster, Client(cluster.map, layout=SMALL) as client:
        registry = client_registry(client)

        def nodes() -> list[float]:
            flat = metrics.flat_values(registry)
            return [flat[f'kvstore_cluster_nodes{{state="{state}"}}'] for state in ("up", "late", "down")]

        assert nodes() == [3, 0, 0]
        cluster.kill(1)
        client.lookup(np.zeros((4, 32), np.uint8))
        assert nodes() == [2, 0, 1]


def test_a_daemon_exports_this_table_from_its_first_second(tmp_path: Path) -> None:
    with (
        LocalCluster(tmp_path, 1, capacity_bytes=128 << 20) as cluster,
        urllib.request.urlopen(f"http://{cluster.map.nodes[0].metrics_address}/metrics", timeout=10) as answer,
    ):
        text = answer.read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    always = [m for m in NODE if not m.optional]
    assert set(families) - {"kvstore_disk_wear_ratio"} == {m.name.removesuffix("_total") for m in (*COMMON, *always)}
    assert {m.name: len(families[m.name.removesuffix("_total")].samples) for m in always if m.kind != "histogram"} == {
        m.name: len(list(m.series())) for m in always if m.kind != "histogram"
    }
    one = {name: family.samples[0].value for name, family in families.items() if len(family.samples) == 1}
    assert one["kvstore_node_ready"] == 1 and one["kvstore_epoch"] == 1 and one["kvstore_disk_capacity_bytes"] == 128 << 20
    assert one["kvstore_node_start_timestamp_seconds"] > 1.7e9
    contract = {sample.labels["retention_class"]: sample.value for sample in families["kvstore_retention_contract_seconds"].samples}
    assert contract["chat"] == 7 * 86400 and contract["agent"] == 3 * 86400
