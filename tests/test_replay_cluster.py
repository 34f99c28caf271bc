"""The replay against real daemons, at a size for every test run. The full sizes are benches: replay_infinite, replay_vs_lru_points."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from kvstore.cli import replay
from kvstore.cli.main import main
from kvstore.cli.output import Output
from kvstore.client import Client
from kvstore.clustermap import ClusterMap, Node
from kvstore.errors import Unreachable
from kvstore.kernels import _native
from kvstore.layout import Layout
from kvstore.replay import (
    ReplayOptions,
    ReplayReport,
    Request,
    RequestOutcome,
    capacity_blocks,
    local_cluster,
    open_trace,
    run_replay,
    shape_of,
)
from kvstore.replay.player import block_keys, wrong_bytes
from kvstore.server.local import LocalCluster

TRACES = Path(__file__).parent.parent / "traces"
CONVERSATION = TRACES / "mooncake_conversation_trace.jsonl.gz"
WEKA = TRACES / "weka_v6_dev.b128.jsonl.zst"
TINY = Layout.single(320)
REQUESTS = 250


@pytest.fixture(scope="module")
def conversation() -> list[Request]:
    return list(open_trace(CONVERSATION, request_limit=REQUESTS))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, conversation: list[Request]) -> Iterator[LocalCluster]:
    shape = shape_of(conversation, TINY, 10)
    with local_cluster(tmp_path_factory.mktemp("replay"), shape, 10 * shape.unique_blocks, layout=TINY) as started:
        yield started


@pytest.mark.parametrize("concurrency", [1, 3])
def test_infinite_capacity_hits_exactly_what_the_ideal_cache_hits(
    concurrency: int, conversation: list[Request], cluster: LocalCluster, tmp_path: Path
) -> None:
    log = tmp_path / "access.parquet"
    options = ReplayOptions(layout=TINY, namespace=f"ideal-{concurrency}", concurrency=concurrency, log=log)
    report = run_replay(conversation, cluster.map, options)
    assert (report.requests, report.hit_tokens, report.loaded_tokens) == (REQUESTS, report.ideal_hit_tokens, report.ideal_hit_tokens)
    assert report.hit_tokens > 0 and report.wrong_bytes == 0 and report.short_loads == 0
    assert report.checked_bytes == report.loaded_bytes == report.hit_tokens // 128 * 320
    assert report.stored_bytes == (report.block_accesses - report.hit_tokens // 128) * 320
    assert set(report.store_outcomes) == {"stored"}
    rows = pq.read_table(log).to_pylist()
    assert [row["request"] for row in rows] == list(range(REQUESTS))
    assert [row["trace_time_ms"] for row in rows] == [request.time_ms for request in conversation]
    assert all(row["hit_tokens"] == row["ideal_hit_tokens"] for row in rows)
    assert sum(row["loaded_bytes"] for row in rows) == report.loaded_bytes


def test_agents_of_a_busy_hour_hit_exactly_what_the_ideal_cache_hits(cluster: LocalCluster) -> None:
    trace = open_trace(WEKA, variant="busy1h", request_limit=60)
    report = run_replay(trace, cluster.map, ReplayOptions(layout=TINY, namespace="weka"))
    assert report.requests == 60 and report.hit_tokens == report.ideal_hit_tokens > 0 and report.wrong_bytes == 0


def test_a_second_replay_hits_all_and_another_namespace_nothing_of_it(conversation: list[Request], cluster: LocalCluster) -> None:
    part = conversation[:20]
    whole_tokens = 128 * sum(request.block_count for request in part)
    run_replay(part, cluster.map, ReplayOptions(layout=TINY, namespace="twice"))
    assert run_replay(part, cluster.map, ReplayOptions(layout=TINY, namespace="twice")).hit_tokens == whole_tokens
    fresh = run_replay(part, cluster.map, ReplayOptions(layout=TINY, namespace="other"))
    assert fresh.hit_tokens == fresh.ideal_hit_tokens < whole_tokens


def test_bytes_of_another_writer_are_counted_as_wrong(conversation: list[Request], cluster: LocalCluster) -> None:
    options = ReplayOptions(layout=TINY, namespace="wrong")
    keys = block_keys(options, conversation[0].ids())
    blocks = np.empty((len(keys), 320), np.uint8)
    _native.generate_blocks(keys, 320, blocks, 1)  # another salt: what the keys do not stand for
    with Client(cluster.map, layout=TINY) as client:
        client.store(keys, blocks, first_block=0).result(10)
    report = run_replay(conversation[:1], cluster.map, options)
    assert report.loaded_bytes == blocks.size
    assert 0.9 * blocks.size < report.wrong_bytes <= blocks.size


def test_each_wrong_byte_counts_once() -> None:
    keys = np.random.default_rng(1).integers(0, 256, (5, 32), np.uint8)
    blocks = np.empty((5, 1000), np.uint8)
    _native.generate_blocks(keys, 1000, blocks)
    assert wrong_bytes(keys, blocks) == 0
    blocks[4, 999] ^= 1
    blocks[0, :3] ^= 255
    assert wrong_bytes(keys, blocks) == 4


def test_wall_clock_starts_no_request_before_its_time(conversation: list[Request], cluster: LocalCluster) -> None:
    outcomes: list[RequestOutcome] = []
    speed = 40.0
    options = ReplayOptions(layout=TINY, namespace="wall", clock="wall", speed=speed, concurrency=2, after_request=outcomes.append)
    report = run_replay(conversation[:60], cluster.map, options)
    assert report.hit_tokens == report.ideal_hit_tokens
    assert all(one.started_seconds >= one.trace_time_ms / 1000 / speed for one in outcomes)
    assert report.seconds >= conversation[59].time_ms / 1000 / speed


def test_small_cluster_hits_about_what_exact_lru_hits(tmp_path: Path) -> None:
    trace = list(open_trace(CONVERSATION, request_limit=1200))
    shape = shape_of(trace, TINY, 10)
    blocks = capacity_blocks("25%", shape, TINY)
    with local_cluster(tmp_path, shape, blocks, layout=TINY) as small:
        report = run_replay(trace, small.map, ReplayOptions(layout=TINY, lru_capacity_blocks=blocks))
    assert report.wrong_bytes == 0 and set(report.store_outcomes) <= {"stored", "degraded"}
    assert report.points_from_lru is not None and abs(report.points_from_lru) < 1.0
    assert report.hit_tokens < report.ideal_hit_tokens  # something was evicted


def test_command_prints_one_envelope_and_its_exit_code_tells_wrong_bytes(
    conversation: list[Request], cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["replay", str(CONVERSATION), "--map", str(cluster.map_path), "--requests", "30", "--block-bytes", "320"]
    assert main([*arguments, "--namespace", "command", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert (data["requests"], data["wrong_bytes"], data["hit_tokens"]) == (30, 0, data["ideal_hit_tokens"])
    assert data["lookup"]["count"] == 30 and data["capacity_blocks"] is None
    assert main([*arguments, "--namespace", "wrong"]) == 1
    assert "wrong bytes" in capsys.readouterr().out


def test_a_cluster_that_is_away_is_exit_3_before_anything_is_played(
    conversation: list[Request], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To a client no node is no fault: all would be misses, and a hit rate of 0 % with exit code 0."""
    away = ClusterMap.local([Node(f"node-{i:02}", "host", f"127.0.0.1:{i + 1}", f"127.0.0.1:{i + 20}") for i in range(12)])
    away.save(tmp_path / "away.toml")
    with pytest.raises(Unreachable, match="E202"):
        run_replay(conversation[:3], away, ReplayOptions(layout=TINY))
    arguments = ["replay", str(CONVERSATION), "--map", str(tmp_path / "away.toml"), "--requests", "3", "--block-bytes", "320"]
    assert main(arguments) == 3
    said = capsys.readouterr()
    assert "hit  " not in said.out and said.err.startswith('error[E202] no node of cluster "dev" answers (12 asked)')


def test_stores_that_fail_and_loads_that_come_short_are_told_and_exit_1(
    conversation: list[Request], cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "replay",
        str(CONVERSATION),
        "--map",
        str(cluster.map_path),
        "--requests",
        "3",
        "--block-bytes",
        "320",
        "--namespace",
        "three",
    ]
    for node in (0, 1, 2):
        cluster.kill(node)
    try:
        assert main(arguments) == 1
        assert "not sound 3 of 3 stores failed  ->  kvstore status --map " in capsys.readouterr().out
        assert main([*arguments, "--json"]) == 1
        envelope = json.loads(capsys.readouterr().out)
        assert envelope["ok"] is False and envelope["data"]["failed_stores"] == 3
    finally:
        for node in (0, 1, 2):
            cluster.restart(node)
    one = RequestOutcome(
        number=0, trace_time_ms=0, input_tokens=256, blocks=2, ideal_hit_tokens=256, hit_blocks=2, loaded_blocks=1, load_seconds=0.1
    )
    assert not replay._is_sound(ReplayReport.of([one], seconds=1.0, lru_capacity_blocks=None), cluster.map_path, Output())
    assert "not sound 1 of 1 loads came back shorter than promised" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags", ["--capacity 25%", "--policy lru", "--admit all", "--write-budget 1GB", "--bucket-seconds 1", "--data here"]
)
def test_what_would_change_nothing_on_an_existing_cluster_is_refused(
    flags: str, cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["replay", str(CONVERSATION), "--map", str(cluster.map_path), "--requests", "3", "--block-bytes", "320", *flags.split()]
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error[E140] {flags.split()[0]} with --map: an existing cluster has ")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["none.jsonl"], "E111"),
        ([str(CONVERSATION), "--requests", "0"], "E131"),
        ([str(CONVERSATION), "--speed", "2"], "E140"),
        ([str(CONVERSATION), "--clock", "wall", "--speed", "0"], "E131"),
        ([str(CONVERSATION), "--capacity", "12 parsecs"], "E102"),
        ([str(CONVERSATION), "--variant", "busy1h"], "E111"),
        ([str(CONVERSATION), "--requests", "3", "--log", "no/such/folder/log.parquet"], "E100"),
        ([str(CONVERSATION), "--requests", "99", "--block-bytes", str(48 << 20), "--capacity", "1PB"], "E143"),
        ([str(CONVERSATION), "--block-bytes", "99999999999"], "E131"),
        ([str(CONVERSATION), "--log", "."], "E100"),
        ([str(CONVERSATION), "--requests", "1", "--block-bytes", "320", "--retention", "forever"], "E132"),
        ([str(CONVERSATION), "--namespace", "\udcff"], "E140"),
    ],
)
def test_bad_input_is_one_line_with_what_to_do(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error[{error}] ") and len(said.splitlines()) == 1 and "Fix: " in said
