"""The daemon as a process: what it says, how it starts, refuses, answers on its control faces, and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from leaks import at_rest, until_no_more
from server_tools import (
    DEADLINE_SECONDS,
    Daemon,
    assert_item,
    daemon,
    drain_lines,
    extent_of,
    make_record,
    run_to_end,
    serving,
    spawn,
    until,
)

from kvstore import record, wire
from kvstore.clustermap import ClusterMap, Node
from kvstore.errors import ConfigError
from kvstore.http import Request, daemon_pages
from kvstore.server.config import NodeConfig
from kvstore.server.directory import Directory
from kvstore.server.directory_config import DirectoryConfig
from kvstore.server.node import Node as Serving
from kvstore.server.proto import node_pb2, node_pb2_grpc
from kvstore.wire import Status, Verb


def http(server: Daemon, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{server.ready['http']}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def assert_one_error(lines: list[str], *words: str) -> None:
    """One line in the house form, with every word, and nothing that looks like a trace."""
    (line,) = [line for line in lines if not line.startswith("{")]
    assert line.startswith("error[E") and ". Fix: " in line, lines
    for word in words:
        assert word in line


FIRST_PORT = 1 + 50 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])  # daemons listen there: workers must not share it


def save_map(path: Path, nodes: list[str], epochs: int = 1, **fields: object) -> ClusterMap:
    members = [Node(name, name, f"127.0.0.1:{FIRST_PORT + i}") for i, name in enumerate(nodes)]
    found = ClusterMap.local(members[:1], k=1, m=0, **fields)  # type: ignore[arg-type]  # fields vary by test
    for number in range(1, epochs):
        found = found.with_epoch([members[number]], [n.id for n in members[: number + 1]])
    found.save(path)
    return found


def test_it_says_one_fact_a_line_and_then_that_it_is_ready(tmp_path: Path) -> None:
    with daemon(tmp_path) as server:
        ready = server.ready
        assert set(ready) == {"id", "pid", "address", "admin", "http", "cluster", "epoch", "boot_id", "io", "rdma", "index"}
        assert (ready["id"], ready["pid"], ready["cluster"], ready["epoch"]) == ("node-00", server.process.pid, "dev", 1)
        server.wait_line("serving on")
        facts = [json.loads(line) for line in server.stderr]
        assert all(set(f) == {"time", "level", "node", "msg"} and f["level"] == "info" and f["node"] == "node-00" for f in facts)
        said = " ".join(f["msg"] for f in facts)
        for word in ("pid", str(tmp_path), "index fresh", "io auto", "RDMA", ready["address"], ready["admin"], ready["http"]):
            assert word in said


def test_it_is_small_and_quick_to_start(tmp_path: Path) -> None:
    with daemon(tmp_path) as server:
        assert server.rss_bytes() < 80 << 20
        assert server.threads() < 40


def test_sigterm_finishes_what_runs_and_exits_0(tmp_path: Path) -> None:
    """A READ in flight when the signal comes is delivered whole; new small work is refused; the index is clean at the next start."""
    r = make_record(1, blocks=64)
    with daemon(tmp_path) as server:
        assert server.write(r) == [Status.OK]
        small, bulk, writer = server.small(), server.bulk(), server.bulk()
        planes = [0, 1, 2, 3] * 20
        bulk.send(wire.encode(Verb.READ, wire.encode_read([extent_of(r)], [(0, p) for p in planes])))
        first = bulk.receive()
        server.signal(signal.SIGTERM)
        until(lambda: small.ask(Verb.DISCOVER, wire.encode_discover([r.extent_key])).status == Status.DRAINING, "it refuses new work")
        assert writer.ask(Verb.WRITE, record.build(make_record(2))).status == Status.DRAINING
        until(lambda: refuses_connections(server), "the port is closed")
        assert http(server, "/readyz") == (503, "drain draining\n")
        assert http(server, "/livez")[0] == 200
        assert_item(first.body, r, 0)
        for plane in planes[1:]:
            assert_item(bulk.receive().body, r, plane)
        assert server.wait().code == 0
    with daemon(tmp_path) as again:
        assert again.ready["index"].startswith("loaded")
        assert len(again.discover(r.extent_key)) == 1


def test_it_starts_with_the_filter_that_it_saved_and_says_so_in_one_line_if_it_cannot(tmp_path: Path) -> None:
    r = make_record(1)
    with daemon(tmp_path) as server:
        assert server.write(r) == [Status.OK]
        assert 'kvstore_filter_starts_total{result="built"} 1.0' in http(server, "/metrics")[1]
        server.signal(signal.SIGTERM)
        assert server.wait().code == 0
    with daemon(tmp_path) as again:
        assert len(again.discover(r.extent_key)) == 1
        assert json.loads(again.wait_line("index loaded"))["msg"].endswith("filter of 1 keys loaded")
        assert 'kvstore_filter_starts_total{result="loaded"} 1.0' in http(again, "/metrics")[1]
        again.signal(signal.SIGTERM)
        assert again.wait().code == 0
    saved = tmp_path / "filter"
    saved.write_bytes(saved.read_bytes()[:-1])
    with daemon(tmp_path) as third:
        assert len(third.discover(r.extent_key)) == 1
        said = json.loads(third.wait_line("saved filter ignored"))
        assert said["level"] == "warn" and "cut short, or longer than it says; the start scan builds another" in said["msg"]
        assert 'kvstore_filter_starts_total{result="ignored"} 1.0' in http(third, "/metrics")[1]


def refuses_connections(server: Daemon) -> bool:
    try:
        socket.create_connection(server.address, 1.0).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_drain_that_takes_too_long_is_cut_and_exits_1(tmp_path: Path) -> None:
    r = make_record(1, blocks=64)
    with daemon(tmp_path, "--drain-timeout", "500ms", "--progress-timeout", "60s") as server:
        assert server.write(r) == [Status.OK]
        server.bulk().send(wire.encode(Verb.READ, wire.encode_read([extent_of(r)], [(0, p) for p in range(4)] * 80)))
        until(lambda: server.status().requests_in_flight == 1, "it is being served")
        server.signal(signal.SIGINT)
        ended = server.wait()
        assert ended.code == 1
        assert any("cut off" in line for line in ended.stderr)


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    r = make_record(1, blocks=64)
    with daemon(tmp_path, "--drain-timeout", "60s", "--progress-timeout", "60s") as server:
        assert server.write(r) == [Status.OK]
        server.bulk().send(wire.encode(Verb.READ, wire.encode_read([extent_of(r)], [(0, p) for p in range(4)] * 80)))
        until(lambda: server.status().requests_in_flight == 1, "it is being served")
        server.signal(signal.SIGTERM)
        server.wait_line("draining")
        server.signal(signal.SIGTERM)
        assert server.wait().code == 128 + signal.SIGTERM
    with daemon(tmp_path) as again:
        assert len(again.discover(r.extent_key)) == 1


def test_a_second_daemon_on_a_directory_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with daemon(tmp_path) as first:
        ended = run_to_end(tmp_path)
        assert ended.code == 2
        assert_one_error(ended.stderr, "E120", str(tmp_path), f"pid {first.process.pid}")
        assert first.discover(bytes(32)) == []
        ports = [first.ready[name].rpartition(":")[2] for name in ("address", "admin", "http")]
        same = run_to_end(tmp_path, *(word for pair in zip(("--port", "--admin-port", "--http-port"), ports, strict=True) for word in pair))
        assert same.code == 2, "with the ports of the first, too, as the map names them"
        assert_one_error(same.stderr, "E120", f"pid {first.process.pid}")


@pytest.mark.parametrize("flag", ["--port", "--admin-port", "--http-port"])
def test_a_port_in_use_is_named_with_its_owner(tmp_path: Path, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_to_end(tmp_path, flag, str(port))
    assert ended.code == 2
    assert_one_error(ended.stderr, "E107", str(port), f"pid {os.getpid()}", flag)


def test_a_directory_that_cannot_be_used_is_one_line_with_its_fix(tmp_path: Path) -> None:
    missing = run_to_end(tmp_path / "nowhere")
    assert missing.code == 2
    assert_one_error(missing.stderr, "E122", "does not exist", "mkdir -p")
    (tmp_path / "file").touch()
    assert_one_error(run_to_end(tmp_path / "file").stderr, "E122", "not a directory")


def test_a_full_disk_at_the_start_is_one_line_with_its_fix(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine does not allow mounts")
    try:
        ended = run_to_end(disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert ended.code == 2
    assert_one_error(ended.stderr, "E123", "full")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--capacity", "4T8"], ["E102", "4T8", "4.8TB"]),
        (["--progress-timeout", "soon"], ["E102", "--progress-timeout"]),
        (["--bulk-threads", "0"], ["E121", "bulk_threads is 0"]),
        (["--port", "70000"], ["E121", "port is 70000"]),
        (["--rdma-memory", "1025KiB"], ["E121", "--rdma-memory", "is 1025KiB", "give 4MiB to 1TiB"]),
        (["--rdma-traffic-class", "256"], ["E131", '--rdma-traffic-class "256"', "0 to 255"]),
        (["--rdma-gid-index", "many"], ["E131", '--rdma-gid-index "many"', "auto, or a whole number from 0 to 255"]),
        (["--rdma-connections", "0"], ["E121", "--rdma-connections", "is 0", "give 1 to 1000000"]),
        (["--port", "4000", "--admin-port", "4000"], ["E121", "two are the same"]),
        (["--host", "no-such-address"], ["no-such-address"]),
        (["--host", "192.0.2.1"], ["E124", "192.0.2.1"]),
        (["--map", "nowhere.toml"], ["nowhere.toml"]),
    ],
)
def test_a_bad_argument_is_one_line_with_its_fix(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    ended = run_to_end(tmp_path, *arguments)
    assert ended.code == 2, ended.stderr
    assert_one_error(ended.stderr, *words)


def test_a_directory_is_served_by_its_own_node_only(tmp_path: Path) -> None:
    map_path, data = tmp_path / "map.toml", tmp_path / "data"
    save_map(map_path, ["n01", "n02"], epochs=2)
    ports = ["--port", "0", "--admin-port", "0", "--http-port", "0"]
    for _ in range(2):
        with daemon(data, *ports, id="n01", map_path=map_path):
            pass
    before = sorted(path.name for path in data.rglob("*"))
    for refused, whose in ((["--map", str(map_path), "--id", "n02", *ports], "n02 of dev"), ([], "node-00 of dev")):
        ended = run_to_end(data, *refused)
        assert ended.code == 2
        assert_one_error(ended.stderr, "E125", "belongs to n01 of cluster dev", whose, str(data / "node"))
    assert sorted(path.name for path in data.rglob("*")) == before
    (data / "node").unlink()
    with daemon(data, *ports, id="n02", map_path=map_path):
        pass


def test_a_config_out_of_range_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    for fields in (
        {"io": "fast"},
        {"read_depth": 0},
        {"write_arena_bytes": 1},
        {"progress_timeout_seconds": 0.0},
        {"port": -1},
        {"rdma_traffic_class": 256},
        {"rdma_gid_index": -2},
    ):
        with pytest.raises(ConfigError, match="E121"):
            NodeConfig(tmp_path, **fields)  # type: ignore[arg-type]  # fields vary by case


def test_help_needs_no_native_core(tmp_path: Path) -> None:
    process, lines = spawn(tmp_path, "--help")
    assert process.wait(20) == 0
    text = ""
    while (item := lines.get(timeout=20))[0] != "end":
        text += item[1]
    assert "--capacity" in text and "--read-cache-bytes" in text


def test_a_node_that_the_map_does_not_know_is_refused(tmp_path: Path) -> None:
    save_map(tmp_path / "map.toml", ["node-00"])
    ended = run_to_end(tmp_path, "--map", str(tmp_path / "map.toml"), "--id", "node-77")
    assert ended.code == 2
    assert_one_error(ended.stderr, "node-77")


def test_status_queues_and_stats_over_grpc(tmp_path: Path) -> None:
    r = make_record(1)
    with daemon(tmp_path) as server:
        server.write(r)
        status = server.status()
        assert (status.id, status.cluster, status.epoch, status.state) == ("node-00", "dev", 1, node_pb2.STATE_READY)
        assert (status.pid, status.data_address, status.extents) == (server.process.pid, server.ready["address"], 1)
        assert status.used_bytes >= len(record.build(r)) and status.capacity_bytes == 10**9 and status.index_start.startswith("fresh")
        with grpc.insecure_channel(server.ready["admin"]) as channel:
            node = node_pb2_grpc.NodeStub(channel)
            queues = node.ListQueues(node_pb2.ListQueuesRequest())
            assert {q.op: q.requests for q in queues.queues} == dict.fromkeys(
                ("hello", "discover", "promise", "withdraw", "why", "admit", "suspect", "read", "write"), 0
            )
            assert queues.write_bytes == 0 and queues.write_bytes_max == 96 << 20
            values = node.Stats(node_pb2.StatsRequest()).values
            assert values['kvstore_node_requests_total{op="write",result="ok"}'] == 1


def test_health_and_reflection_over_grpc(tmp_path: Path) -> None:
    with daemon(tmp_path) as server, grpc.insecure_channel(server.ready["admin"]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvstore.v1.Node"):
            assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == health_pb2.HealthCheckResponse.SERVING
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked)
        assert "kvstore.v1.Node" in {s.name for s in answer.list_services_response.service}


def test_the_drain_call_ends_the_daemon_as_a_signal_does(tmp_path: Path) -> None:
    with daemon(tmp_path) as server:
        with grpc.insecure_channel(server.ready["admin"]) as channel:
            answer = node_pb2_grpc.NodeStub(channel).Drain(node_pb2.DrainRequest(timeout_seconds=10), timeout=20)
        assert answer.finished
        assert server.wait().code == 0


def test_probes_and_metrics_over_http(tmp_path: Path) -> None:
    with daemon(tmp_path) as server:
        assert http(server, "/livez") == (200, "ok\n")
        assert http(server, "/readyz") == (200, "ok\n") == http(server, "/healthz")
        assert http(server, "/readyz?verbose") == (200, "store ok\nserver ok\ndrain ok\n")
        assert http(server, "/elsewhere")[0] == 404
        code, text = http(server, "/metrics")
        assert code == 200
        assert 'kvstore_node_requests_total{op="read",result="ok"} 0.0' in text
        assert "kvstore_node_ready 1.0" in text and "kvstore_epoch 1.0" in text
        server.discover(bytes(32))
        assert 'kvstore_node_requests_total{op="discover",result="ok"} 1.0' in http(server, "/metrics")[1]


def test_shards_are_counted_by_kind_and_disk_times_by_op(tmp_path: Path) -> None:
    """As the fixed part of an entry says, so an index that is loaded or counted anew tells the same."""
    data, parity = make_record(1, shard=9), make_record(2, shard=10)

    def metric(server: Daemon, series: str) -> float:
        lines = dict(line.rsplit(" ", 1) for line in http(server, "/metrics")[1].splitlines() if not line.startswith("#"))
        return float(lines[series])

    with daemon(tmp_path, "--io", "direct") as server:
        assert server.write(data) == [Status.OK] == server.write(parity)
        sizes = [metric(server, f'kvstore_disk_shard_bytes{{kind="{kind}"}}') for kind in ("data", "parity")]
        assert min(sizes) > 0 and sum(sizes) == metric(server, 'kvstore_disk_used_bytes{kind="shards"}')
        assert metric(server, 'kvstore_disk_io_duration_seconds_count{op="write"}') == 2
        reads = metric(server, 'kvstore_disk_reads_total{source="direct"}')
        assert metric(server, 'kvstore_disk_io_duration_seconds_count{op="read"}') == reads
        server.bulk().send(wire.encode(Verb.READ, wire.encode_read([extent_of(data)], [(0, 0)])))
        until(lambda: metric(server, 'kvstore_disk_io_duration_seconds_count{op="read"}') > reads, "it was read from the disk")
        assert metric(server, 'kvstore_disk_io_duration_seconds_sum{op="read"}') > 0
        server.signal(signal.SIGTERM)
        assert server.wait().code == 0
    with daemon(tmp_path) as again:
        until(
            lambda: [metric(again, f'kvstore_disk_shard_bytes{{kind="{kind}"}}') for kind in ("data", "parity")] == sizes,
            "they are counted",
        )


def test_metrics_before_there_are_any_are_no_empty_page(tmp_path: Path) -> None:
    """HTTP answers while the index loads: an empty page would be a good scrape without one series."""
    node = Serving(NodeConfig(data_dir=tmp_path))
    assert node.metrics_text() is None is Directory(DirectoryConfig(port=0)).metrics_text()
    page = daemon_pages(node.checks, node.metrics_text)(Request("/metrics", "", ""))
    assert page.status == 503 and page.headers["Retry-After"] == "1" and b"starting" in page.body


def test_a_silent_http_client_holds_up_no_probe(tmp_path: Path) -> None:
    with daemon(tmp_path) as server:
        host, _, port = server.ready["http"].rpartition(":")
        held = [socket.create_connection((host, int(port)), 20) for _ in range(8)]
        assert http(server, "/livez")[0] == 200
        for each in held:
            each.close()


def test_a_newer_map_is_read_on_sighup_on_the_call_and_when_a_client_names_it(tmp_path: Path) -> None:
    path, names = tmp_path / "map.toml", ["node-00", "node-01", "node-02", "node-03"]
    save_map(path, names)
    with daemon(tmp_path / "data", map_path=path) as server:
        assert server.small().peer.epoch == 1  # type: ignore[union-attr]  # a greeted connection has a peer
        save_map(path, names, epochs=2)
        server.signal(signal.SIGHUP)
        until(lambda: server.status().epoch == 2, "the second epoch is read on SIGHUP")
        save_map(path, names, epochs=3)
        with grpc.insecure_channel(server.ready["admin"]) as channel:
            assert node_pb2_grpc.NodeStub(channel).ReloadMap(node_pb2.ReloadMapRequest()).epoch == 3
        save_map(path, names, epochs=4)
        assert server.write(make_record(1, write_epoch=4)) == [Status.OK]
        until(lambda: server.status().epoch == 4, "the fourth epoch is read when a record names it")
        assert server.write(make_record(2, write_epoch=3)) == [Status.STALE_MAP]


def test_a_reload_leaves_nothing_that_goes_on_and_on(tmp_path: Path) -> None:
    """Twenty at once: a handler that waited for a lock of the main thread's would stop all."""
    with daemon(tmp_path) as server:
        for _ in range(20):
            server.signal(signal.SIGHUP)
        used = processor_seconds(server)
        threading.Event().wait(1)
        assert processor_seconds(server) - used < 0.3
        server.signal(signal.SIGTERM)
        assert server.wait().code == 0


def test_a_map_that_went_bad_is_reported_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "map.toml"
    save_map(path, ["node-00"])
    with daemon(tmp_path / "data", map_path=path) as server:
        path.write_text("cluster = ")
        with grpc.insecure_channel(server.ready["admin"]) as channel, pytest.raises(grpc.RpcError) as caught:
            node_pb2_grpc.NodeStub(channel).ReloadMap(node_pb2.ReloadMapRequest())
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        server.signal(signal.SIGHUP)
        server.wait_line("map not taken", "map.toml")
        assert server.status().epoch == 1


def test_a_map_whose_epoch_in_use_was_edited_is_reported_and_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "map.toml"
    save_map(path, ["node-00", "node-01"], epochs=2)
    with daemon(tmp_path / "data", map_path=path) as server:
        path.write_text(path.read_text().replace('  "node-01",\n', "") + '\n[[epoch]]\nnumber = 3\nnodes = ["node-00"]\n')
        server.signal(signal.SIGHUP)
        server.wait_line("map not taken", "changes epoch 2")
        assert server.status().epoch == 2


def test_it_evicts_in_the_background_so_that_writes_go_on(tmp_path: Path) -> None:
    """Twice its capacity is written and all of it taken in the end; the bytes that went are counted."""
    records = [make_record(i, blocks=64, planes=(4096,) * 4) for i in range(1000)]
    with daemon(tmp_path, "--capacity", "64MB") as server:
        bulk = server.bulk()
        for r in records:
            body = record.build(r)
            until(lambda body=body: bulk.ask(Verb.WRITE, body).status == Status.OK, "there is room again")  # type: ignore[misc]  # bound now
        kept = server.discover(*(r.extent_key for r in records))
        assert 300 < len(kept) < 600
        assert server.status().used_bytes <= 64_000_000
        assert 'kvstore_evicted_bytes_total{reason="lru",retention_class="chat"} 0.0' not in http(server, "/metrics")[1]


def test_it_takes_its_addresses_from_the_map(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ClusterMap.local([Node("node-00", "node-00", f"127.0.0.1:{port}")], k=1, m=0).save(tmp_path / "map.toml")
    with daemon(tmp_path / "data", map_path=tmp_path / "map.toml") as server:
        assert server.address == ("127.0.0.1", port)


def test_a_line_every_interval_while_something_happens_and_none_when_idle(tmp_path: Path) -> None:
    from kvstore.server.activity import Activity

    activity = Activity()
    ops = ("hello", "discover", "promise", "withdraw", "why", "admit", "suspect", "read", "write")
    idle = {"requests": {op: {} for op in ops}, "bytes_in": 0, "bytes_out": 0, "connections_cut": 0, "frames_malformed": 0, "faults": 0}
    idle |= {"inflight": 0, "connections": 3}
    assert activity.line(idle, 0, 100, 10.0) == ""
    busy = {**idle, "requests": {**idle["requests"], "read": {0: 20}, "write": {0: 5, 2: 5}}, "bytes_out": 10**9, "connections_cut": 2}  # type: ignore[dict-item]  # a dict of counters
    line = activity.line(busy, 50, 100, 10.0)
    for part in ("out 100.0 MB/s", "read 2/s", "write 1/s", "used 50 %", "busy 5", "cut 2"):
        assert part in line
    assert activity.line(busy, 50, 100, 10.0) == ""


def test_twenty_starts_and_stops_of_a_server_leave_no_thread_behind(tmp_path: Path) -> None:
    def use(io: str) -> None:
        with serving(tmp_path, io=io) as server:
            server.discover(bytes(32))

    use("buffered")
    before = at_rest()
    for i in range(20):
        use(("buffered", "direct")[i % 2])
    until_no_more(before)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_that_is_stopped_while_it_starts_stops_in_order(tmp_path: Path, signum: int) -> None:
    """Twice within a minute: as crashes, they would cost the index."""
    for _ in range(2):
        process, lines = spawn(tmp_path)
        until(lambda: (tmp_path / "state").exists() and "running 1" in (tmp_path / "state").read_text(), "the store is being opened")
        process.send_signal(signum)
        assert process.wait(DEADLINE_SECONDS) == 0
        assert not any("Traceback" in line for line in drain_lines(lines, []).stderr)
    with daemon(tmp_path) as running:
        assert "loaded" in running.ready["index"], running.ready["index"]


@pytest.mark.parametrize("nofile", [16, 20, 63])
def test_too_few_descriptors_are_one_line_with_the_fix(tmp_path: Path, nofile: int) -> None:
    """Below, gRPC ends the process in the middle of a line of its own."""
    process, lines = spawn(tmp_path, nofile=nofile)
    assert process.wait(DEADLINE_SECONDS) == 2
    assert_one_error(drain_lines(lines, []).stderr, "E143", f"only {nofile} files", "ulimit -n")


def processor_seconds(running: Daemon) -> float:
    return sum(map(int, running.proc("stat").rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")


def test_probes_that_cannot_be_accepted_cost_no_processor_time(tmp_path: Path) -> None:
    with daemon(tmp_path, "--progress-timeout", "60s", nofile=64) as running:
        held = [socket.create_connection(running.address) for _ in range(80)]
        until(lambda: running.descriptors() == 64, "it is out of descriptors")
        host, _, port = running.ready["http"].rpartition(":")
        with socket.create_connection((host, int(port))) as probe:
            probe.send(b"GET /readyz HTTP/1.0\r\n\r\n")
            used = processor_seconds(running)
            threading.Event().wait(1)
            assert processor_seconds(running) - used < 0.3
            for one in held:
                one.close()
            probe.settimeout(DEADLINE_SECONDS)
            assert b"200" in probe.recv(100), "its turn comes"
