"""The process that forks daemons: what they were asked to be is what they are, and none outlives it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import Unreachable
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

    counts = []
    for _ in range(6):
        refused, output, errors = start(forks, "--data", tmp_path, "--capacity", "nonsense")
        assert refused.wait(WAIT_SECONDS) == 2
        text_of(output), text_of(errors)
        counts.append(held())
        deadline = time.monotonic() + WAIT_SECONDS
        while counts[-1] != counts[0] and time.monotonic() < deadline:  # it tells first, and then lets go
            counts[-1] = held()
    assert len(set(counts)) == 1, counts


def test_variables_that_only_a_start_reads_get_a_nursery_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first = nursery()
    monkeypatch.setenv("KVSTORE_LOG_LEVEL", "error")
    assert nursery() is first
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    assert nursery() is not first
    monkeypatch.delenv("PYTHONNOUSERSITE")
    assert nursery() is first
