"""`kvstore up`: a cluster with one command; what it says, how it ends, that data is kept, and every refusal in one line."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli_tool import Cli

SMALL = ("--port", "0", "--capacity", "200MB")


@contextmanager
def up(cli: Cli, *arguments: str | Path) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """A cluster that is ready, and its process; ended by Ctrl-C unless the test did."""
    process = cli.start("up", "--json", *SMALL, *arguments)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        ready = json.loads(line)
        assert ready["ok"], ready["error"]
        yield ready, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def test_up_starts_tests_itself_and_stops_with_data_kept(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    (tmp_path / "file").write_bytes(os.urandom(300_000))
    with up(cli) as (ready, process):
        data = ready["data"]
        assert ready["schema"] == "kvstore.up/1" and ready["cluster"] == "dev"
        assert data["self_test"]["nodes_stopped"] == 2 and data["self_test"]["bytes"] > 10_000_000
        assert data["ready_seconds"] < 15 and len(data["nodes"]) == 12
        pids = [node["pid"] for node in data["nodes"]]
        assert cli.run("status").stdout.splitlines()[1] == "health   OK", "status finds it without a word"
        assert cli.run("put", "file").code == 0
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 0 and "data kept in ~/.local/share/kvstore/dev" in stderr
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with up(cli, "--no-self-test", "--dashboard", "0") as (ready, process):
        assert ready["data"]["self_test"] is None
        with urllib.request.urlopen(ready["data"]["dashboard_url"], timeout=20) as page:
            assert b"<title>kvstore</title>" in page.read()
        assert cli.run("get", "file", "-o", "copy").code == 0
        assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    with up(cli, "--no-self-test", "--fresh"):
        gone = cli.run("get", "file", "-o", "copy2")
        gone.refused(1, "E403", "only the first 0 of 3 blocks are there", "evicted")


def test_up_in_words(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    process = cli.start("up", *SMALL, "--nodes", "2")
    assert process.stdout is not None
    lines = []
    while not lines or "stop   Ctrl-C" not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
    text = "".join(lines)
    assert text.startswith("kvstore 0.") and "local cluster in ~/.local/share/kvstore/dev" in text
    assert "  ok  nodes      2 of 2, 10+2, 200.0 MB each" in text
    assert "  ok  windows    directory on 127.0.0.1:" in text
    assert "WARN  losses     reads survive NO host lost" in text
    assert "  ok  self-test  wrote 14.6 MB, read back equal" in text and "Ready in " in text
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_cluster_of_one_node_works_and_says_what_it_is(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    (tmp_path / "file").write_bytes(os.urandom(200_000))
    with up(cli, "--nodes", "1"):
        assert cli.run("put", "file").code == 0 and cli.run("get", "file", "-o", "copy").code == 0
        assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()
        assert "LOSSES_NOT_SURVIVED" in cli.run("status").stdout


def test_a_second_up_names_the_first(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    with up(cli, "--nodes", "1", "--no-self-test") as (ready, _):
        assert [Path(f"/proc/{each['pid']}").exists() for each in ready["data"]["directories"]] == [True]
        assert "windows  1 of 1 directory up" in cli.run("status").stdout
        second = cli.run("up", *SMALL, "--nodes", "1")
        second.refused(2, "E120", f"in use by pid {ready['data']['pid']}")
        assert " ok " not in second.stdout
        cli.run("up", *SMALL, "--nodes", "1", "--fresh").refused(2, "E120", f"in use by pid {ready['data']['pid']}")
        assert cli.run("status").code == 0, "and does it no harm"
    cli.run("up", *SMALL, "--nodes", "2").refused(2, "E136", "of 1 nodes", "--fresh")


def test_a_port_in_use_names_its_owner(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        ran = Cli(tmp_path).run("up", "--nodes", "1", "--port", str(port))
        ran.refused(2, "E107", f"port {port} is taken by pid {os.getpid()}", "--port")
        assert " ok " not in ran.stdout, "what was not tried is not said to be well"


def test_up_refuses_places_it_cannot_use(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    (tmp_path / "file").write_text("")
    cli.run("up", "--dir", "file", *SMALL).refused(2, "file")
    cli.run("up", "--dir", "/proc/kvstore", *SMALL).refused(2, "/proc")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("miau")
    cli.run("up", "--dir", "photos", "--fresh", *SMALL).refused(2, "E136", "photos")
    assert (tmp_path / "photos" / "cat.jpg").exists()
    cli.run("up", "--nodes", "0").refused(2, '--nodes "0" not understood', "1 to 128")
    cli.run("up", "--capacity", "lots").refused(2, '--capacity "lots" not understood')
    cli.run("up", "--capacity", "1MB").refused(2, "E131", "--capacity")
    cli.run("up", "--io", "fast").refused(2, "auto, buffered, direct")


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0,
    reason="needs a mount namespace for a small file system",
)
def test_a_full_disk_is_told_before_anything_starts(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    (tmp_path / "small").mkdir()
    inside = 'mount -t tmpfs -o size=64m none small && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", inside, "sh", *cli.command("up", "--dir", "small", *SMALL)]
    done = subprocess.run(command, cwd=tmp_path, env=dict(cli.environ), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error[E143] ") and "67.1 MB free: a cluster needs 1.1 GB" in done.stderr


def test_a_daemon_that_dies_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    with up(cli, "--no-self-test") as (ready, process):
        os.kill(ready["data"]["nodes"][3]["pid"], signal.SIGKILL)
        assert process.stderr is not None
        assert "node-03 ended" in process.stderr.readline()
        assert "11 of 12 up" in cli.run("status").stdout


def test_no_daemon_outlives_a_killed_up_and_each_stops_in_order(tmp_path: Path) -> None:
    with up(Cli(tmp_path), "--no-self-test", "--nodes", "3") as (ready, process):
        handles = [os.pidfd_open(node["pid"]) for node in ready["data"]["nodes"]]
        os.kill(ready["data"]["nodes"][1]["pid"], signal.SIGSTOP)
        process.kill()
        for handle in handles:
            assert select.select([handle], [], [], 30)[0], "it ends"
            os.close(handle)
        assert all("\nrunning 0\n" in (Path(node["data"]) / "state").read_text() for node in ready["data"]["nodes"])
