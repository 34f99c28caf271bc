"""The table of a large cluster: its arithmetic by hand, its placement by brute force, and one small run that really measures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scale import derive, placed
from benchmarks.scale.__main__ import main
from benchmarks.scale.costs import Costs, Message, record_bytes_of
from benchmarks.scale.derive import SHARD_BYTES
from benchmarks.scale.parameters import SHARDS, K, Parameters
from benchmarks.scale.placed import Messages
from benchmarks.scale.show import shares
from kvstore.errors import UsageError
from kvstore.placement import Placement

GIVEN = Parameters()
# 4 + 8 nodes, a token a block of 128: 12 blocks a second, 2 prompts of 6 blocks, half of them hit.
TINY = Parameters(servers=12, ssds=1, stored_bytes=12e9, day_tokens=12 * 128 * 86_400, hit_rate=0.5, prompt_blocks=6, hosts=4)
SENT = Messages(discover=300, checked_keys=120, checks=60, promise=216, read=350, read_by_plane=1400, write=12)
COSTS = Costs(
    discover=Message(20.0, 0.5), promise=Message(60.0, 1.0), read_us_per_mb=300.0, read_warm_us_per_mb=200.0, write_us_per_mb=500.0,
    index_bytes_per_extent=600.0, filter_bytes_per_extent=2.0, record_bytes=300_000.0, rebuild_seconds_per_gb=0.1, rebuilt_bytes=1e9,
    directory_operations_per_core=1e5, io="auto",
)  # fmt: skip


def test_mean_column_is_that_of_the_design() -> None:
    rates = derive.mean(GIVEN)
    assert rates.prompts == pytest.approx(155e12 / 86_400 / 128 / 600)
    assert rates.prompts == pytest.approx(23_300, rel=0.005)
    assert rates.read_bytes == pytest.approx(0.2e9, rel=0.06)
    assert rates.discovery_keys == pytest.approx(1_900, rel=0.005)
    assert rates.promises == pytest.approx(1_400, rel=0.025)


def test_peak_column_is_that_of_the_design() -> None:
    rates = derive.peak(GIVEN)
    assert rates.read_bytes == pytest.approx(1.5e9, rel=0.01)
    assert rates.block_reads == pytest.approx(131_000, rel=0.01)
    assert rates.extent_reads == pytest.approx(8_000, rel=0.03)
    assert rates.write_bytes == pytest.approx(124e6, rel=0.01)
    assert rates.discovery_keys == pytest.approx(12_400, rel=0.01)
    assert rates.promises == pytest.approx(8_900, rel=0.01)


def test_writes_are_those_of_the_design_once_decode_servers_write_a_block_in_a_hundred() -> None:
    assert derive.mean(GIVEN).write_bytes == pytest.approx(10.5e6, rel=0.01)
    assert derive.mean(replace(GIVEN, generated=0.01)).write_bytes == pytest.approx(13e6, rel=0.015)


def test_rates_of_a_tiny_cluster_are_those_done_by_hand() -> None:
    assert SHARD_BYTES == 3 * 2304 + 4576
    rates = derive.mean(TINY)
    assert rates.prompts == pytest.approx(2)
    assert rates.read_bytes == pytest.approx(6 * 10 * SHARD_BYTES / 12)
    assert rates.block_reads == pytest.approx(5)
    assert rates.write_bytes == pytest.approx(6 * SHARD_BYTES)  # 6 blocks a second, a shard of each on all 12
    assert rates.discovery_keys == pytest.approx(1)
    assert TINY.extent_lengths == [3, 3]
    assert rates.extent_reads == pytest.approx(5 / 3)
    assert rates.extent_writes == pytest.approx(2)
    assert rates.promises == pytest.approx(4)  # 2 prompts of 2 extents at every node


def test_chats_are_read_in_full_extents() -> None:
    lengths = replace(GIVEN, shape="chat").extent_lengths
    assert (len(lengths), max(lengths), sum(lengths)) == (10, 64, 600)
    assert len(GIVEN.extent_lengths) == 36


def test_what_is_stored_windows_and_directory_are_those_done_by_hand() -> None:
    kept = derive.stored(TINY, record_bytes=1e6, index_bytes_per_extent=500, filter_bytes_per_extent=2)
    assert (kept.bytes, kept.extents, kept.index_bytes, kept.index_share, kept.filter_bytes) == (1e9, 1e3, 5e5, 5e-4, 2e3)
    windows = derive.windows(GIVEN, 21)
    assert windows.ram_bytes_per_kept == pytest.approx(5.9e12, rel=0.01)
    assert windows.entries_per_kept == pytest.approx(4.2e6, rel=0.01)
    assert windows.messages == pytest.approx(90_000, rel=0.05)
    assert windows.operations == pytest.approx(23_359 * 27, rel=0.001)


def test_a_mean_record_is_as_large_as_a_store_takes_it() -> None:
    assert record_bytes_of(27) == 315_392  # head 256 + 32 + 216, checks 27 x 4 x 24, shards 27 x 11,488, to whole pages


def test_shares_are_rates_times_unit_costs() -> None:
    rates = replace(
        derive.mean(GIVEN), read_bytes=1e9, write_bytes=100e6, discovery_keys=3_000.0, promises=1_000.0
    )  # fmt: skip
    found = shares(GIVEN, rates, SENT, COSTS)
    assert found.read_core == pytest.approx(1_000 * 300e-6)
    assert found.write_core == pytest.approx(100 * 500e-6)
    # 3,000 keys, two a message of 20 us; and of 600 keys 120 again, two a message
    assert found.discovery_core == pytest.approx(3_000 * 10.5e-6 + 600 * 10.5e-6)
    assert found.promise_core == pytest.approx(1_000 * 31e-6)  # 36 extents at 12 nodes, two names a message of 60 us
    assert found.core == pytest.approx(found.read_core + found.write_core + found.discovery_core + found.promise_core)
    assert (found.read_ssd, found.write_ssd) == (pytest.approx(1 / 7), pytest.approx(0.05))
    assert found.nic == pytest.approx(16 * 8e9 / 400e9)


def test_a_hot_extent_adds_what_a_hand_computes() -> None:
    added = derive.hot(replace(TINY, hot_share=0.5), derive.mean(TINY), extent_blocks=3, promise_reuse_seconds=30, bucket_seconds=60)
    assert added.discovery == pytest.approx(1 / 12)  # one prompt a second, one of 12 nodes, beside one key a second each
    assert added.promises == pytest.approx(4 * (1 / 30 + 1 / 60) / 4)  # 4 hosts, beside 4 promises a second
    assert added.reads_no_tier == pytest.approx(10 / 12 * 3 / 5)
    assert added.reads_tier == pytest.approx(8 / 3600 * 10 / 12 * 3 / 5)


def test_the_busiest_daemon_is_that_of_a_count_node_by_node() -> None:
    given = replace(GIVEN, servers=15, ssds=2)
    placement = Placement(placed.cluster_map(15, 2))
    lists = placed.table(given, placement, placement.pg_count, lambda _: None)
    counts = [0] * 30
    for group in range(placement.pg_count):
        for node in placement.nodes_of(group):
            counts[node] += 1
    mean = placement.pg_count * SHARDS / 30
    loads = []
    for group in range(placement.pg_count):
        hot = set(placement.nodes_of(group))
        loads.append(max(count / mean + (0.7 if node in hot else 0.0) for node, count in enumerate(counts)))
    found = placed.busiest(lists, 30, 0.7)
    assert found.plain == pytest.approx(max(counts) / mean)
    assert found.worst == pytest.approx(max(loads))
    assert found.median == pytest.approx(float(np.median(loads)))
    assert found.plain < found.median


def test_table_by_several_processes_is_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given = replace(GIVEN, servers=13, ssds=1)
    placement = Placement(placed.cluster_map(13, 1))
    monkeypatch.setattr(placed, "ALONE_GROUPS_MAX", 0)
    told: list[float] = []
    assert np.array_equal(placed.table(given, placement, 100, told.append), placement.table()[:100])
    assert told == [1.0]


def test_messages_on_twelve_nodes_are_one_for_each_that_is_needed() -> None:
    """Each of 12 nodes is in every list: few are asked about keys, all promise, 10 are read and all are written to."""
    given = replace(GIVEN, servers=12, ssds=1)
    sent = placed.messages(Placement(placed.cluster_map(12, 1)), given, 3)
    assert (sent.promise, sent.write) == (12, 12)
    assert K <= sent.read <= SHARDS
    assert math.ceil(600 / 256) <= sent.discover <= 12
    assert sent.read_by_plane == 4 * sent.read
    assert 2 * 48 <= sent.checked_keys <= 2 * 64  # two nodes more about the last 64 keys, but for those that begin an extent


def test_more_daemons_need_more_messages_and_no_more_than_one_a_key() -> None:
    few, many = (
        placed.messages(Placement(placed.cluster_map(servers, 1)), replace(GIVEN, servers=servers, ssds=1), 2) for servers in (24, 240)
    )
    assert few.discover < many.discover <= 600
    assert few.promise == 24 < many.promise <= 36 * SHARDS
    assert few.total < many.total


def test_nothing_is_checked_or_written_where_all_is_hit() -> None:
    given = replace(GIVEN, servers=24, ssds=1, hit_rate=1.0)
    sent = placed.messages(Placement(placed.cluster_map(24, 1)), given, 1)
    assert (sent.checks, sent.checked_keys, sent.write) == (0, 0, 0)


def test_connections_are_bounded_by_daemons_and_the_clients_limit() -> None:
    found = placed.connections(GIVEN, SENT, idle_seconds=60, bulk_max=2048)
    assert found.client_small == pytest.approx(7_360, rel=1e-3)
    assert found.client_bulk == 2048
    idle = placed.connections(replace(GIVEN, hosts=10_000_000), SENT, idle_seconds=60, bulk_max=2048)
    prompts = GIVEN.prompts_per_second / 10_000_000 * 60
    assert idle.client_small == pytest.approx(prompts * (300 + 60 + 216), rel=0.01)
    assert idle.daemon == pytest.approx((idle.client_small + idle.client_bulk) * 10_000_000 / 7_360)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--servers", "0"], "error[E131] --servers 0: out of range"),
        (["--servers", "3", "--ssds", "2"], "error[E131] 3 servers of 2 SSDs: out of range"),
        (["--hit-rate", "96"], "error[E131] --hit-rate 96: out of range"),
        (["--hit-rate", "nan"], "error[E131] --hit-rate nan: out of range"),
        (["--capacity", "much"], 'error[E102] --capacity "much" is not a size'),
        (["--tokens-a-day", "many"], 'error[E132] --tokens-a-day "many": not understood'),
        (["--shape", "poem"], "error[E140] argument --shape: invalid choice"),
        (["--groups", "0"], "error[E131] --groups 0: out of range"),
        (["--directory", "nowhere/at/all"], "error[E100] --directory nowhere/at/all: is no directory"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(says)
    assert err.count("\n") == 1


def test_a_shape_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match="E131"):
        Parameters(shape="poem")


def test_a_small_run_measures_and_gives_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--small", "--json", "--servers", "16", "--ssds", "2", "--capacity", "400TB", "--directory", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "done" in err
    assert found["daemons"] == 32
    costs = found["costs"]
    measured = {name: value for name, value in costs.items() if isinstance(value, float | int)}
    assert {name for name, value in measured.items() if not (math.isfinite(value) and value > 0)} == set()
    for kind in ("discover", "promise"):
        assert costs[kind]["message_us"] + costs[kind]["key_us"] > 0
    assert 250 <= costs["index_bytes_per_extent"] <= 2_000  # 27 tags of 8 bytes alone are 216
    assert 1.6 <= costs["filter_bytes_per_extent"] <= 3  # 12 bits, and the room it grows into
    assert found["shares"]["peak"]["read_core"] == pytest.approx(found["rates"]["peak"]["read_bytes"] * costs["read_us_per_mb"] / 1e12)
    assert found["groups"] == found["groups_in_all"] == 4_096
    assert 1 < found["busiest"]["discovery"]["plain"] < 1.15
    assert list(tmp_path.iterdir()) == []
