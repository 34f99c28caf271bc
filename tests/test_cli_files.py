"""put and get: what goes in comes out, whatever its length, with nodes lost; and nothing that is not whole gets a name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_tool import Cli
from server_tools import until

from kvstore.cli.blocks import scan, windows
from kvstore.cli.put import _why_failed
from kvstore.clustermap import ClusterMap, Node
from kvstore.errors import InputError
from kvstore.server.local import LocalCluster

BLOCK = 113_920


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), 12, capacity_bytes=256 << 20) as running:
        yield running


@pytest.fixture
def cli(tmp_path: Path, cluster: LocalCluster) -> Cli:
    return Cli(tmp_path, KVSTORE_MAP=str(cluster.map_path))


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 65 * BLOCK + 7])
def test_a_file_comes_back_equal(cli: Cli, tmp_path: Path, size: int) -> None:
    (tmp_path / "in").write_bytes(os.urandom(size))
    put = cli.run("put", "in", "--json").json
    assert put["epoch"] == 1
    assert put["data"]["blocks_stored"] == put["data"]["blocks"] == -(-size // BLOCK) and put["data"]["blocks_degraded"] == 0
    got = cli.run("get", "in", "-o", "out", "--json")
    assert got.code == 0 and got.json["data"]["file_bytes"] == size
    assert got.json["data"]["read_bytes_tcp"] >= size and got.json["data"]["read_bytes_rdma"] == 0 and "/s by TCP," in got.stderr
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()
    again = cli.run("put", "in", "--json").json
    assert again["data"]["blocks_stored"] == 0, "what is there is not stored twice"


def test_any_block_size_and_a_pipe_and_a_handle_file_do(cli: Cli, tmp_path: Path) -> None:
    content = os.urandom(100_003)
    put = cli.run("put", "-", "--name", "piped data.tar", "--block-bytes", "1KiB", "--handle", "h.json", stdin=content)
    assert put.code == 0 and "98 blocks" in put.stdout and "kvstore get 'piped data.tar' -o" in put.stderr
    assert cli.run("get", "--list").stdout.splitlines()[1].split()[:2] == ["piped", "data.tar"]
    elsewhere = Cli(tmp_path / "other", **{k: v for k, v in cli.environ.items() if k == "KVSTORE_MAP"})
    elsewhere.home.mkdir()
    elsewhere.run("get", "piped data.tar").refused(2, "E144", "nothing was put")
    assert elsewhere.run("get", "--handle", tmp_path / "h.json", "-o", "copy").code == 0
    assert (elsewhere.home / "copy").read_bytes() == content
    ran = elsewhere.run("get", "--handle", tmp_path / "h.json")
    assert ran.code == 0 and (elsewhere.home / "piped data.tar").read_bytes() == content


def test_standard_output_carries_the_bytes_alone(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"just this\n")
    cli.run("put", "in")
    ran = cli.run("get", "in", "-o", "-")
    assert ran.stdout == "just this\n" and "bytes equal" in ran.stderr


def test_two_lost_nodes_change_nothing_and_three_are_a_clear_miss(cli: Cli, cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(os.urandom(70 * BLOCK))
    cli.run("put", "in")
    for node in (0, 5):
        cluster.kill(node)
    try:
        assert cli.run("get", "in", "-o", "two").code == 0
        assert (tmp_path / "two").read_bytes() == (tmp_path / "in").read_bytes()
        (tmp_path / "more").write_bytes(os.urandom(3 * BLOCK))
        degraded = cli.run("put", "more")
        assert degraded.code == 0 and "3 blocks were stored with a shard or two missing" in degraded.stderr
        cluster.kill(9)
        cli.run("get", "in", "-o", "three").refused(1, "E403", "down: node-00, node-05, node-09")
        assert sorted(path.name for path in tmp_path.glob("three*")) == [], "nothing half-written stays"
        cli.run("put", "more", "--name", "again").refused(1, "E404", "down: node-00, node-05, node-09")
    finally:
        for node in (0, 5, 9):
            cluster.restart(node)
    assert cli.run("get", "in", "-o", "three").code == 0


def test_nothing_is_written_over_unless_told(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"new")
    cli.run("put", "in")
    (tmp_path / "out").write_bytes(b"old")
    cli.run("get", "in", "-o", "out").refused(4, "E301", "out is there already", "--force")
    assert (tmp_path / "out").read_bytes() == b"old"
    assert cli.run("get", "in", "-o", "out", "--force").code == 0
    assert (tmp_path / "out").read_bytes() == b"new"


def test_only_a_file_is_written_over(cli: Cli, tmp_path: Path) -> None:
    """`-o /dev/null --force` as root must not put a file in the place of the device."""
    (tmp_path / "in").write_bytes(b"new")
    cli.run("put", "in")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "folder"):
        cli.run("get", "in", "-o", name, "--force").refused(4, "E301", f"{name} is no file")
        cli.run("put", "in", "--handle", name).refused(4, "E301", f"{name} is no file")
    assert (tmp_path / "fifo").is_fifo()
    (tmp_path / "elsewhere").write_bytes(b"old")
    (tmp_path / "link").symlink_to("elsewhere")
    assert cli.run("get", "in", "-o", "link", "--force").code == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "elsewhere").read_bytes() == b"new"


def test_a_handle_from_elsewhere_names_no_place_outside_this_folder(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"data")
    cli.run("put", "in", "--handle", "h.json")
    good = json.loads((tmp_path / "h.json").read_text())
    for field, value in (("name", "../out"), ("name", str(tmp_path / "out")), ("name", 7), ("file_bytes", 3.5), ("digest", None)):
        (tmp_path / "h.json").write_text(json.dumps({**good, field: value}))
        cli.run("get", "--handle", "h.json").refused(2)
    assert not (tmp_path / "out").exists() and not (tmp_path.parent / "out").exists()
    (tmp_path / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    cli.run("get", "--handle", "deep.json").refused(2, "deep.json is not a handle")


def test_a_damaged_handle_hides_no_other(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"data")
    handle = Path(cli.run("put", "in", "--json").json["data"]["handle"])
    (handle.parent / "bad.json").write_text("x")
    listed = cli.run("get", "--list")
    assert listed.code == 0 and "in " in listed.stdout and "bad.json is not a handle" in listed.stderr


def test_a_pipe_is_a_file_too(cli: Cli, tmp_path: Path) -> None:
    content = os.urandom(100_000)
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(content,))
    writer.start()
    assert cli.run("put", "pipe").code == 0
    writer.join()
    assert cli.run("get", "pipe", "-o", "copy").code == 0 and (tmp_path / "copy").read_bytes() == content


def test_a_file_that_changes_while_it_is_put_is_not_stored_under_keys_of_other_bytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    content = os.urandom(5000)
    path.write_bytes(content)
    with path.open("rb", buffering=0) as file:
        handle = scan(file, "log", "dev", 1000)
        path.write_bytes(content + b"appended")
        assert [(at, blocks.tobytes()) for at, blocks in windows(file, handle, 2)] == [(2, content[2000:])], "what was there is there"
        for changed in (content[:4000], content[:2999] + b"?" + content[3000:]):
            path.write_bytes(changed)
            with pytest.raises(InputError, match="changed while it was read"):
                list(windows(file, handle, 2))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_get_that_is_ended_leaves_nothing_half_written(cli: Cli, cluster: LocalCluster, tmp_path: Path, signum: int) -> None:
    (tmp_path / "in").write_bytes(os.urandom(3 * BLOCK))
    cli.run("put", "in")
    pids = [cluster.pid(node) for node in range(12)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        process = cli.start("get", "in", "-o", "out", "--timeout", "60s")
        until(lambda: list(tmp_path.glob("out.part-*")), "it has begun")
        process.send_signal(signum)
        _, told = process.communicate(timeout=60)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert process.returncode == 130, told
    assert told.startswith("error[E701] interrupted")
    assert list(tmp_path.glob("out*")) == []


IMPORTER = """
import signal, sys, threading
from kvstore.cli.signals import interrupt
signal.signal(signal.SIGTERM, interrupt)
sys.path.insert(0, sys.argv[1])
try:
    import half
    threading.Event().wait(30)
except KeyboardInterrupt:
    threading.Event().wait(0.1)  # nothing more comes
    print(half.whole)
"""


def test_a_signal_that_comes_in_the_middle_of_an_import_waits_for_its_end(tmp_path: Path) -> None:
    twice = "signal.raise_signal(signal.SIGTERM)\n" * 2
    (tmp_path / "half.py").write_text(f"import signal\n{twice}import fractions, decimal\nwhole = True\n")
    ended = subprocess.run([sys.executable, "-c", IMPORTER, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")


def test_wrong_input_is_one_line(cli: Cli, tmp_path: Path) -> None:
    cli.run("put", "absent").refused(2, "cannot read absent", "no such file")
    cli.run("put", ".").refused(2, "is a directory")
    (tmp_path / "in").write_bytes(b"x")
    cli.run("put", "in", "--name", "../../etc/passwd").refused(2, "E106", "use letters")
    cli.run("put", "in", "--block-bytes", "0").refused(2, "--block-bytes 0")
    cli.run("put", "in", "--block-bytes", "1GB").refused(2, "--block-bytes")
    cli.run("put", "in", "--class", "forever").refused(2, 'no retention class "forever"', "chat")
    cli.run("put", "in", KVSTORE_MAP="").refused(2, "E141")
    cli.run("get").refused(2, "no name given")
    (tmp_path / "h.json").write_text(json.dumps({"schema": "kvstore.file/1", "hashes": ["00"]}))
    cli.run("get", "--handle", "h.json").refused(2, "h.json is not a handle")
    cli.run("get", "--handle", "in").refused(2, "in is not a handle")
    cli.run("put", "in")
    for place in ("no/such/place", str(tmp_path / "absent" / "x")):
        cli.run("get", "in", "-o", place).refused(2, f"error[E100] {place}: no such file")
    cli.run("get", "in", "-o", "x" * 256).refused(2, "file name too long")
    assert cli.run("get", "in", "-o", "x" * 250).code == 0, "room for the name of a draft is ours to find"


def test_a_cluster_that_is_away_is_exit_3(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"x" * 1000)
    assert cli.run("put", "in").code == 0
    ClusterMap.local([Node(f"node-{i:02}", "host", f"127.0.0.1:{i + 1}", f"127.0.0.1:{i + 20}") for i in range(12)]).save(
        tmp_path / "away.toml"
    )
    cli.run("get", "in", "-o", "out", "--map", "away.toml", "--timeout", "1s").refused(3, "E202", "connection refused")
    cli.run("put", "in", "--map", "away.toml", "--timeout", "1s").refused(3, "E202")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root, and a machine that allows it")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_something_else_filled_is_told_by_put_status_and_the_nodes_log(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(os.urandom(3 * BLOCK))
    with LocalCluster(small_disk / "dev", 1, capacity_bytes=1 << 30) as cluster:
        cli = Cli(tmp_path, KVSTORE_MAP=str(cluster.map_path))
        assert cli.run("put", "in", "--name", "before").code == 0 and "DISK_FULL" not in cli.run("status").stdout
        with (small_disk / "dump").open("wb") as dump, pytest.raises(OSError, match="No space"):
            while True:
                dump.write(bytes(1 << 20))
        until(lambda: "DISK_FULL" in cli.run("status").stdout, "the node has looked at its disk")
        (tmp_path / "in").write_bytes(os.urandom(300 * BLOCK))
        cli.run("put", "in").refused(1, "E404", "could not be stored: their nodes have no room", "where it says DISK_FULL, free space")
        told = cli.run("status")
        assert told.code == 1 and " ERR  DISK_FULL " in told.stdout and "free on its file system: writes are refused" in told.stdout
        assert cli.run("status", "--json").json["data"]["nodes"][0]["disk_free_bytes"] < 35e6
        explained = cli.run("explain", "DISK_FULL").stdout
        assert "something else fills the disk" in explained and "now       ERR node-00 " in explained
        until(lambda: "DISK_FULL" in cluster.log_path(0).read_text(), "its log tells", 30)
        (small_disk / "dump").unlink()
        until(lambda: cli.run("put", "in").code == 0, "writes go on")


def test_put_names_what_most_nodes_said(cluster: LocalCluster) -> None:
    counts = dict.fromkeys(("shards_no_space", "shards_draining", "shards_stale_map", "shards_busy", "shards_unreachable"), 0)
    assert _why_failed({**counts, "shards_stale_map": 3}, cluster.map, 10)[1] == "give --map the newest one"
    assert _why_failed({**counts, "shards_draining": 3, "shards_busy": 1}, cluster.map, 10)[0] == "their nodes are being stopped"
    assert _why_failed({**counts, "shards_no_space": 1, "shards_unreachable": 2}, cluster.map, 10)[1] == "kvstore status"


def test_a_full_standard_output_is_one_line(cli: Cli) -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123  a device, opened as a shell would
        done = subprocess.run(cli.command("explain", "E107"), stdout=full, stderr=subprocess.PIPE, env=dict(cli.environ), text=True)
    assert (
        done.returncode == 2
        and done.stderr.strip() == "error[E143] a write: no space left on device. Fix: free some space, or name another place"
    )
