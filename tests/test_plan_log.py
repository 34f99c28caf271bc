"""Access logs give what the trace behind them gives."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report_tools import FIELDS, row, write

from kvstore.errors import InputError
from kvstore.layout import Layout
from kvstore.plan.accesses import of_requests
from kvstore.plan.curve import exact_curve
from kvstore.plan.log import read_log
from kvstore.replay import ReplayOptions, local_cluster, open_trace, run_replay, shape_of
from tests.plan_tools import CONVERSATION, conversation, weka, write_log


def test_a_log_gives_the_curve_of_its_trace(tmp_path: Path) -> None:
    trace = conversation(128)
    write_log(tmp_path, trace)
    log = read_log(tmp_path)
    assert (log.requests, log.unique, len(log.ids)) == (trace.requests, trace.unique, len(trace.ids))
    exact, found = exact_curve(trace), exact_curve(log)
    for share in (0.05, 0.25, 1.0):
        assert found.hit_tokens(int(share * trace.unique)) == exact.hit_tokens(int(share * trace.unique))


def test_a_sampled_log_gives_nearly_the_curve_of_its_trace(tmp_path: Path) -> None:
    trace = weka("busy1h")
    write_log(tmp_path, trace, sample=0.1)
    exact = exact_curve(trace)
    for log in (read_log(tmp_path), read_log(tmp_path, rate=0.05)):
        found = exact_curve(log)
        assert found.parts
        assert found.unique == pytest.approx(trace.unique, rel=0.05)
        for share in (0.08, 0.25, 1.0):
            assert found.hit_ratio(share * trace.unique) == pytest.approx(exact.hit_ratio(share * trace.unique), abs=0.02)


def test_the_log_of_a_replay_on_real_nodes_gives_the_curve_of_its_trace(tmp_path: Path) -> None:
    requests, layout = list(open_trace(CONVERSATION, request_limit=150)), Layout.single(320)
    shape = shape_of(requests, layout, 10)
    with local_cluster(tmp_path / "cluster", shape, 10 * shape.unique_blocks, layout=layout) as cluster:
        report = run_replay(requests, cluster.map, ReplayOptions(layout=layout, access_log=tmp_path / "log"))
    trace, log = of_requests(requests, 128), read_log(tmp_path / "log")
    assert (log.requests, log.unique, len(log.ids)) == (trace.requests, trace.unique, len(trace.ids))
    assert log.counts.tolist() == trace.counts.tolist()
    exact, found = exact_curve(trace), exact_curve(log)
    for share in (0.1, 0.5, 1.0):
        assert found.hit_blocks(int(share * trace.unique)) == exact.hit_blocks(int(share * trace.unique))
    assert found.hit_tokens(trace.unique) == report.hit_tokens


def test_a_directory_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no access"):
        read_log(tmp_path)
    (tmp_path / "access-1.parquet").write_bytes(b"no parquet")
    with pytest.raises(InputError, match="not a Parquet file"):
        read_log(tmp_path)


def test_a_log_of_another_schema_is_refused(tmp_path: Path) -> None:
    write_log(tmp_path, conversation(512), files=1, schema="kvstore.access/2")
    with pytest.raises(InputError, match="access/2"):
        read_log(tmp_path)


def test_an_empty_log_is_refused(tmp_path: Path) -> None:
    head = {"kvstore": json.dumps({"schema": "kvstore.access/1", "block_tokens": 128, "sample": 1.0})}
    columns = [("time", pa.timestamp("ms", "UTC")), ("input_tokens", pa.uint32()), ("blocks", pa.list_(pa.uint64()))]
    pq.write_table(pa.schema(columns).empty_table().replace_schema_metadata(head), tmp_path / "access-1.parquet")
    with pytest.raises(InputError, match="no request"):
        read_log(tmp_path)


def test_logs_that_lie_about_themselves_are_one_clear_line_and_rows_without_values_are_left_out(tmp_path: Path) -> None:
    sound = row(hit=256)
    path = write(tmp_path / "access-1.parquet", [sound, dict.fromkeys(sound, None), sound | {"time": None}, row(-30_000, hit=1)])
    assert read_log(tmp_path).requests == 1
    strange = [pa.field("blocks", pa.list_(pa.int64())) if each.name == "blocks" else each for each in FIELDS]
    write(path, [sound | {"blocks": [1]}], fields=strange)
    with pytest.raises(InputError, match="column blocks is"):
        read_log(tmp_path)
    write(path, [sound])
    table = pq.read_table(path)
    for told in ("[]", "null", "{", '{"schema": "kvstore.access/1"}', '{"schema": "kvstore.access/1", "block_tokens": 0, "sample": 1}',
                 '{"schema": "kvstore.access/1", "block_tokens": 128, "sample": NaN}'):  # fmt: skip
        pq.write_table(table.replace_schema_metadata({"kvstore": told}), path)
        with pytest.raises(InputError, match="E142"):
            read_log(tmp_path)
    write(path, [sound | {"blocks": list(range(5000))}])
    data = bytearray(path.read_bytes())
    data[4:400] = bytes(396)
    path.write_bytes(data)
    with pytest.raises(InputError, match="cannot be read"):
        read_log(tmp_path)
