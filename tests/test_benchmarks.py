"""Every measurement runs at smoke size: says that it runs and gives its ids, nothing about speed."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from client_tools import NO_REUSE, until
from faultpeer import Gate, PeerCluster

from benchmarks import prompts
from benchmarks.__main__ import load_registry
from benchmarks.harness import (
    REGISTRY,
    SCALES,
    Bench,
    Figure,
    Measure,
    NotMeasurable,
    at_least,
    at_most,
    equal_to,
    interleaved,
    merge_results,
    percentile,
    with_worst,
)
from benchmarks.overlap import ALIKE, PREFILL, allowed
from benchmarks.prompts import LAYOUT, chain_keys, store_in_turns
from kvstore.client import Client

load_registry()
IDS_OF_THE_TABLE = {
    *("codec_vs_isal", "codec_vs_zfec", "load_warm_vs_loopback", "load_cold_vs_uring", "store_vs_loopback", "lookup_600_ms"),
    *("lookup_600_116_extents_ms", "lookup_absent_p99_ms", "lookup_epochs_ms", "lookup_false_short", "promise_broken"),
    *("p99_one_stopped", "p99_while_evicting"),
    *("report_50m_seconds", "report_50m_memory_gb", "miss_labels", "tokens_add_up", "accounting_cost", "scan_resistance_points"),
    *("replay_vs_lru_points", "replay_infinite", "two_writers", "index_share", "disk_overhead", "daemon_rss_mb", "up_seconds", "kill9"),
    *("resume_bit_equal", "bounded_short_equal", "hit_rule", "rollback_equal", "ttft_cold_over_warm", "prefill_tps_ratio"),
    *("failed_load_text_equal", "model_cases"),
    *("plan_lru_equal", "shards_error_points", "plan_vs_replay_points", "plan_all_policies_seconds", "handoff_vs_loopback"),
    *("gpu_scatter_vs_copy", "gpu_decode_vs_copy"),
    *("overlap_hidden_share", "overlap_engine_ttft"),
    *("heldout_bpb", "window_hit_rate_trace", "directory_ops_per_core", "directory_ram_gb"),
}
LONG = {"scan_resistance_points"}  # five clusters; what classes keep is claimed in tests/test_gc.py and tests/test_owners.py
MEASUREMENTS: dict[Measure, list[str]] = {}
for _id, _measure in REGISTRY.items():
    MEASUREMENTS.setdefault(_measure, []).append(_id)


def test_all_figures_of_the_table_are_measured() -> None:
    assert IDS_OF_THE_TABLE - REGISTRY.keys() == set()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "measure", [pytest.param(each, id=each.__name__, marks=[pytest.mark.long] if each.__name__ in LONG else []) for each in MEASUREMENTS]
)
def test_measurement_runs_at_smoke_size_and_gives_its_ids(measure: Measure, tmp_path: Path) -> None:
    bench = Bench(SCALES["smoke"], tmp_path)
    try:
        figures = with_worst(measure(bench))
    except NotMeasurable as missing:
        pytest.skip(str(missing))
    finally:
        bench.close()
    assert set(MEASUREMENTS[measure]) <= figures.keys()
    assert all(math.isfinite(figure.value) for figure in figures.values())


@contextmanager
def two_late_nodes() -> Iterator[tuple[Client, Gate]]:
    """Their acknowledgements come when the gate opens; until then a store is degraded."""
    with PeerCluster() as cluster, Client(cluster.map, layout=LAYOUT, config=NO_REUSE) as client:
        gate = cluster.gate()

        def held(serve: Callable[[object], Awaitable[None]]) -> Callable[[object], Awaitable[None]]:
            async def late(pipe: object) -> None:
                await gate.wait()
                await serve(pipe)

            return late

        for peer in cluster.peers[:2]:
            peer.serve = held(peer.serve)
        yield client, gate


def test_a_prompt_for_a_measurement_is_whole_also_where_nodes_are_late() -> None:
    with two_late_nodes() as (client, gate):
        storing = threading.Thread(target=lambda: store_in_turns(client, chain_keys(1, 2), [2]))
        storing.start()
        until(lambda: client.stats()["extents_degraded"] == 1, "a degraded store")
        gate.open()
        storing.join()
        assert client.stats()["shards_acknowledged"] == 12


def test_a_prompt_that_stays_degraded_is_none_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "LATE_SHARDS_SECONDS", 0.2)
    with two_late_nodes() as (client, _), pytest.raises(RuntimeError, match="1 of 1 extents are degraded: 10 of 12 shards"):
        store_in_turns(client, chain_keys(1, 2), [2])


def test_what_planes_allow_to_hide_follows_from_their_bytes() -> None:
    assert [round(allowed(PREFILL, ratio), 2) for ratio in (0.25, 1.0, 2.0, 4.0)] == [0.25, 0.9, 1.0, 1.0]
    assert [round(allowed(ALIKE, ratio), 2) for ratio in (1.0, 1.6, 2.0)] == [0.5, 0.8, 0.9]


def test_bars_hold_at_their_limit() -> None:
    assert at_least(0.6).met_by(0.6)
    assert not at_least(0.6).met_by(0.5999)
    assert at_most(2).met_by(2)
    assert not at_most(2).met_by(2.001)
    assert equal_to(7).met_by(7)
    assert not equal_to(7).met_by(8)


def test_plain_id_is_the_worst_of_its_parts() -> None:
    parts = {"a.x": Figure(0.9, at_least(0.6)), "a.y": Figure(0.5, at_least(0.48)), "b": Figure(1, at_most(2))}
    assert with_worst(parts)["a"] == Figure(0.5, at_least(0.48))
    missed = {"a.x": Figure(0.59, at_least(0.6)), "a.y": Figure(0.3, at_least(0.48)), "a.z": Figure(9, at_least(0.1))}
    assert with_worst(missed)["a"].value == 0.3


def test_results_file_keeps_ids_that_this_run_did_not_measure(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    merge_results(path, {"later_work": Figure(1, at_least(0))})
    merge_results(path, {"kill9": Figure(0, at_most(0))})
    merge_results(path, {"kill9": Figure(2, at_most(0))})
    rows = {row["id"]: row for row in json.loads(path.read_text())}
    assert list(rows) == ["later_work", "kill9"]
    assert set(rows["kill9"]) == {"id", "value", "bar", "ok", "machine", "commit"}
    assert (rows["kill9"]["value"], rows["kill9"]["bar"], rows["kill9"]["ok"]) == (2, 0, False)


def test_rounds_are_interleaved_and_warm_up_is_dropped() -> None:
    calls: list[str] = []
    counts = {"a": 0.0, "b": 0.0}

    def take(name: str) -> float:
        calls.append(name)
        counts[name] += 1
        return counts[name]

    kept = interleaved(4, lambda: take("a"), lambda: take("b"), warm_up=2)
    assert kept == [[3, 4, 5, 6], [3, 4, 5, 6]]
    assert all({first, second} == {"a", "b"} for first, second in zip(calls[::2], calls[1::2], strict=True))


def test_percentile_is_a_value_that_was_seen() -> None:
    assert percentile([3, 1, 2], 50) == 2
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile([5], 99) == 5
