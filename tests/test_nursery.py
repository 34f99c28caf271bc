"""The process that forks daemons: what they were asked to be is what they are, and none outlives it."""

from __future__ import annotations

import json
import os
import resource
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_tool import ROOT
from server_tools import until

from kvstore.errors import Unreachable
from kvstore.server import nursery as module
from kvstore.server.local import LocalCluster
from kvstore.server.nursery import UNKNOWN, Forked, Nursery, nursery

CAPACITY = 128 << 20
WAIT_SECONDS = 20.0


@pytest.fixture
def forks() -> Iterator[Nursery]:
    own = Nursery()
    yield own
    own.close()


def start(forks: Nursery, *arguments: str | Path) -> tuple[Forked, int, int]:
    """A daemon, and where its standard output and error are read."""
    (output, stdout), (errors, stderr) = os.pipe(), os.pipe()
    try:
        return forks.start([*map(str, arguments)], stdout, stderr), output, errors
    finally:
        os.close(stdout)
        os.close(stderr)


def text_of(descriptor: int) -> str:
    """All that comes until the last writer is gone; fails where that takes too long."""
    found = b""
    while select.select([descriptor], [], [], WAIT_SECONDS)[0]:
        more = os.read(descriptor, 65536)
        if not more:
            os.close(descriptor)
            return found.decode()
        found += more
    raise AssertionError(f"somebody holds on to it after {found!r}")


def until_ready(descriptor: int) -> dict[str, object]:
    found = b""
    while not found.endswith(b"\n"):
        assert select.select([descriptor], [], [], WAIT_SECONDS)[0], found
        more = os.read(descriptor, 65536)
        assert more, found
        found += more
    ready: dict[str, object] = json.loads(found.removeprefix(b"ready "))
    return ready


def test_exit_codes_and_signals_come_back_as_from_a_program_of_its_own(forks: Nursery, tmp_path: Path) -> None:
    refused, output, errors = start(forks, "--data", tmp_path, "--capacity", "nonsense")
    assert refused.wait(WAIT_SECONDS) == 2 and refused.poll() == 2
    assert text_of(errors).startswith("error[E") and text_of(output) == ""

    for signum, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
        served, output, errors = start(forks, "--data", tmp_path, "--capacity", "64MB")
        assert until_ready(output)["pid"] == served.pid
        assert served.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            served.wait(0.01)
        served.send_signal(signum)
        assert served.wait(WAIT_SECONDS) == code
        served.send_signal(signum)  # nobody is meant any more
        assert text_of(output) == "" and "Traceback" not in text_of(errors)


def test_a_second_signal_ends_a_daemon_at_once_with_128_and_its_number(forks: Nursery, tmp_path: Path) -> None:
    served, output, _ = start(forks, "--data", tmp_path, "--capacity", "64MB")
    until_ready(output)
    served.send_signal(signal.SIGSTOP)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        served.send_signal(signum)
    assert served.wait(WAIT_SECONDS) in (128 + signal.SIGTERM, 128 + signal.SIGINT)  # more than a signed byte holds


def test_a_daemon_has_the_environment_and_the_folder_of_this_moment(
    forks: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = []
    for columns in ("60", "120"):
        monkeypatch.setenv("COLUMNS", columns)  # what argparse goes by
        helped, output, _ = start(forks, "--help")
        assert helped.wait(WAIT_SECONDS) == 0
        widths.append(max(map(len, text_of(output).splitlines())))
    assert widths[0] <= 60 < widths[1] <= 120

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    served, output, _ = start(forks, "--data", "here", "--capacity", "64MB")
    until_ready(output)
    served.send_signal(signal.SIGTERM)
    assert served.wait(WAIT_SECONDS) == 0
    assert (tmp_path / "here" / "state").exists()


def test_a_daemon_holds_nothing_of_another_and_has_a_group_and_a_name_of_its_own(forks: Nursery, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    first, first_output, first_errors = start(forks, "--data", tmp_path / "a", "--capacity", "64MB", "--id", "node-00")
    until_ready(first_output)
    second, output, _ = start(forks, "--data", tmp_path / "b", "--capacity", "64MB", "--id", "node-01")
    until_ready(output)
    assert os.getpgid(first.pid) == first.pid and os.getpgid(second.pid) == second.pid
    assert Path(f"/proc/{second.pid}/comm").read_text() == "kvstore/node-01\n"
    first.kill()
    assert first.wait(WAIT_SECONDS) == -signal.SIGKILL
    assert text_of(first_output) == ""
    assert "serving on" in text_of(first_errors)  # and its end came: nobody else had them
    assert second.poll() is None


def test_daemons_drain_when_the_nursery_is_killed_and_the_next_one_starts_them_again(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, 2, capacity_bytes=CAPACITY) as cluster:
        pids = [cluster.pid(0), cluster.pid(1)]
        cluster.kill(1, signal.SIGSTOP)
        handles = [os.pidfd_open(pid) for pid in pids if pid]
        nursery()._process.kill()
        for handle in handles:
            assert select.select([handle], [], [], WAIT_SECONDS)[0], "it runs on"
            os.close(handle)
        assert not cluster.alive(0) and not cluster.alive(1)
        for node in range(2):
            assert "\nrunning 0\n" in (cluster.node_directory(node) / "state").read_text(), "it was drained"
            cluster.restart(node)
            assert cluster.alive(node) and cluster.pid(node) not in pids


def test_a_nursery_that_has_gone_is_told_in_one_line(forks: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, output, _ = start(forks, "--data", tmp_path, "--capacity", "64MB")
    until_ready(output)
    forks._process.kill()
    forks._process.wait()
    assert served.wait(WAIT_SECONDS) == UNKNOWN
    monkeypatch.setattr("kvstore.server.local.nursery", lambda: forks)
    cluster = LocalCluster(tmp_path / "c", 1, capacity_bytes=CAPACITY)
    with pytest.raises(Unreachable, match="node-00 could not be started"):
        cluster.start()
    assert not list((tmp_path / "c").glob("*.pid"))


def test_descriptors_stay_flat_over_many_starts(forks: Nursery, tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        ours, theirs = (len(list(Path(f"/proc/{who}/fd").iterdir())) for who in ("self", forks._process.pid))
        return ours, theirs

    def refused() -> None:
        ended, output, errors = start(forks, "--data", tmp_path, "--capacity", "nonsense")
        assert ended.wait(WAIT_SECONDS) == 2
        text_of(output), text_of(errors)

    refused()
    before = held()  # it may hold what it had for that one still: it tells first, and then lets go
    for _ in range(5):
        refused()
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), "all to be closed")


def test_a_start_that_is_broken_off_leaves_no_daemon_and_the_next_ones_are_right(
    forks: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def children() -> list[str]:
        return Path(f"/proc/{forks._process.pid}/task/{forks._process.pid}/children").read_text().split()

    real = module._receive
    with monkeypatch.context() as patched:

        def interrupted(wire: socket.socket) -> object:
            real(wire)
            raise KeyboardInterrupt

        patched.setattr(module, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start(forks, "--data", tmp_path, "--capacity", "64MB")
    until(lambda: not children(), "the daemon that nobody knows to end")
    for _ in range(2):
        served, output, _errors = start(forks, "--data", tmp_path, "--capacity", "64MB")
        assert until_ready(output)["pid"] == served.pid
        served.send_signal(signal.SIGTERM)
        assert served.wait(WAIT_SECONDS) == 0


def test_a_daemon_that_nobody_has_any_more_ends_also_where_it_stands_still(forks: Nursery, tmp_path: Path) -> None:
    served, output, errors = start(forks, "--data", tmp_path, "--capacity", "64MB")
    until_ready(output)
    served.send_signal(signal.SIGSTOP)
    del served
    assert "stopped in" in text_of(errors)


def test_it_works_above_a_thousand_descriptors_and_from_a_folder_that_was_removed(
    forks: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        served, output, _ = start(forks, "--data", tmp_path / "data", "--capacity", "64MB")
        assert served.poll() is None
        served.kill()
        assert served.wait(WAIT_SECONDS) == -signal.SIGKILL
        os.close(output)
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "before", ["trap '' CHLD;", "exec 2>&-;", "exec 1>&- 2>&- <&-;"], ids=["ignored SIGCHLD", "no stderr", "no streams"]
)
def test_a_cluster_starts_whatever_its_process_was_started_with(tmp_path: Path, before: str) -> None:
    code = (
        "import signal\nfrom kvstore.server.local import LocalCluster\n"
        f"with LocalCluster({str(tmp_path / 'c')!r}, 2, capacity_bytes={CAPACITY}) as c:\n"
        "    c.kill(0)\n    c.restart(0)\n    assert c.alive(0) and c.alive(1)\n"
    )
    command = f"{before} exec {shlex.join([sys.executable, '-c', code])}"
    ran = subprocess.run(["sh", "-c", command], env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
    assert ran.returncode == 0
    assert "serving on" in (tmp_path / "c" / "node-01.log").read_text()


def test_daemons_end_with_their_process_though_a_child_of_it_lives_on(tmp_path: Path) -> None:
    code = (
        "import os, signal\nfrom kvstore.server.local import LocalCluster\n"
        f"c = LocalCluster({str(tmp_path / 'c')!r}, 1, capacity_bytes={CAPACITY}).start()\n"
        "child = os.fork()\n"  # it holds copies of all sockets
        "print(c.pid(0), child, flush=True) if child else None\nsignal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as parent:
        assert parent.stdout is not None
        served, child = map(int, parent.stdout.readline().split())
        handle = os.pidfd_open(served)
        parent.kill()
        ended = select.select([handle], [], [], WAIT_SECONDS)[0]
        os.kill(child, signal.SIGKILL)
        os.close(handle)
    assert ended


def test_variables_that_only_a_start_reads_get_a_nursery_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first = nursery()
    monkeypatch.setenv("KVSTORE_LOG_LEVEL", "error")
    assert nursery() is first
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    assert nursery() is not first
    monkeypatch.delenv("PYTHONNOUSERSITE")
    assert nursery() is first
