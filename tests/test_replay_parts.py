"""Parts of the replay that need no cluster: capacity, access log, report."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from server_tools import make_record

from kvstore import record
from kvstore.errors import ConfigError, UsageError
from kvstore.gc.policy import EvictionPolicy
from kvstore.layout import PRESETS, Layout
from kvstore.replay.access_log import SCHEMA, AccessLog
from kvstore.replay.capacity import TraceShape, capacity_blocks, node_capacity_bytes, record_bytes, shape_of
from kvstore.replay.report import Latency, ReplayReport, RequestOutcome
from kvstore.replay.requests import Request

TINY = Layout.single(320)
SHAPE = TraceShape(requests=2, unique_blocks=1000, extents=20, record_bytes=20 * 8192)


def request(first: int, count: int) -> Request:
    return Request(0, 128 * count, 1, ((first, count),))


@pytest.mark.parametrize(
    ("text", "blocks"), [("unlimited", None), ("25%", 250), ("0.1%", 1), ("100 %", 1000), ("320", 1), ("3200B", 10), ("32kB", 100)]
)
def test_capacity_is_a_share_of_the_trace_or_logical_bytes(text: str, blocks: int | None) -> None:
    assert capacity_blocks(text, SHAPE, TINY) == blocks


@pytest.mark.parametrize("text", ["", "25", "-1GB", "x%", "319B", "0%"])
def test_capacity_that_holds_nothing_or_is_no_size_is_refused(text: str) -> None:
    with pytest.raises((UsageError, ConfigError)):
        capacity_blocks(text, SHAPE, TINY)


def test_shape_counts_what_an_infinite_cache_stores() -> None:
    shape = shape_of([request(0, 70), request(0, 70), request(0, 71), request(500, 1)], TINY, 10)
    assert (shape.requests, shape.unique_blocks, shape.extents) == (4, 72, 4)
    spans = [(64, 0), (6, 1), (1, 2), (1, 0)]
    assert shape.record_bytes == sum(record_bytes(count, earlier, TINY, 10) for count, earlier in spans)


@pytest.mark.parametrize(("blocks", "earlier"), [(1, 0), (37, 1), (59, 2), (60, 0), (64, 128)])
@pytest.mark.parametrize("layout", [TINY, PRESETS["v41"]])
def test_record_bytes_are_those_of_a_real_record(blocks: int, earlier: int, layout: Layout) -> None:
    planes = [plane.bytes for plane in layout.planes()]
    made = record.build(make_record(1, blocks=blocks, planes=planes, earlier=tuple(range(earlier)), start_block=999))
    assert record_bytes(blocks, earlier, layout, 10) == record.padded_bytes(len(made))


def test_true_blocks_cost_about_their_shards_and_tiny_ones_their_heads() -> None:
    trace = [request(1000 * i, 37) for i in range(50)]
    true, tiny = shape_of(trace, PRESETS["v41"], 10), shape_of(trace, TINY, 10)
    assert 1.0 < true.record_bytes_per_block / 11_392 < 1.03
    assert tiny.record_bytes_per_block / 32 > 3


@pytest.mark.parametrize("blocks", [1, 500, 100_000, 10**7, 10**9])
@pytest.mark.parametrize("nodes", [12, 24])
def test_a_node_holds_its_share_of_the_blocks_between_its_eviction_marks(blocks: int, nodes: int) -> None:
    capacity = node_capacity_bytes(blocks, SHAPE, shards=12, nodes=nodes)
    policy = EvictionPolicy.of_classes()
    middle = (policy.high_bytes(capacity) + policy.low_bytes(capacity)) / 2
    assert middle == pytest.approx(blocks * SHAPE.record_bytes_per_block * 12 / nodes, rel=1e-4, abs=4)


def outcome(number: int, **fields: object) -> RequestOutcome:
    return RequestOutcome(number=number, trace_time_ms=number, input_tokens=1000, blocks=7, ideal_hit_tokens=512, **fields)  # type: ignore[arg-type]  # any of its fields


def test_access_log_has_one_row_a_request_and_no_keys(tmp_path: Path) -> None:
    path = tmp_path / "access.parquet"
    with AccessLog(path) as log:
        for number in range(10_000):
            log.append(outcome(number, load_seconds=0.5 if number % 2 else None).log_row())
        assert not path.exists()
    table = pq.read_table(path)
    assert table.schema.equals(SCHEMA) and table.num_rows == 10_000
    assert table["request"].to_pylist() == list(range(10_000))
    assert table["load_seconds"].null_count == 5000
    assert not [name for name in SCHEMA.names if "key" in name or name.endswith("_id")]
    assert list(tmp_path.iterdir()) == [path]


def test_access_log_left_by_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), AccessLog(tmp_path / "access.parquet") as log:
        log.append(outcome(0).log_row())
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="E100"):
        AccessLog(tmp_path / "missing" / "access.parquet")


def test_report_sums_requests_and_compares_token_rates() -> None:
    outcomes = [
        outcome(0, store_seconds=2.0, store_outcome="stored", stored_bytes=70),
        outcome(1, hit_blocks=3, hit_tokens=384, loaded_blocks=2, loaded_tokens=256, loaded_bytes=20, lru_hit_tokens=512, load_seconds=1.0),
    ]
    report = ReplayReport.of(outcomes, seconds=10.0, lru_capacity_blocks=5)
    assert (report.requests, report.input_tokens, report.hit_tokens, report.loaded_tokens, report.short_loads) == (2, 2000, 384, 256, 1)
    assert (report.hit_ratio, report.ideal_hit_ratio, report.lru_hit_ratio) == (384 / 2000, 1024 / 2000, 512 / 2000)
    assert report.points_from_lru == pytest.approx(-6.4)
    assert (report.load_bytes_per_second, report.store_bytes_per_second) == (2.0, 7.0)
    assert report.store_outcomes == {"stored": 1} and report.load.count == report.store.count == 1
    assert report.to_dict()["hit_ratio"] == report.hit_ratio


def test_empty_report_says_unknown_not_zero() -> None:
    report = ReplayReport.of([], seconds=0.0, lru_capacity_blocks=None)
    assert report.hit_ratio is report.lru_hit_ratio is report.points_from_lru is report.load_bytes_per_second is None
    assert Latency.of([]) == Latency(count=0) and Latency.of([3.0]).p99_seconds == 3.0
