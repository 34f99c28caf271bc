"""The self-test of `kvstore up`: a node that is late does not fail it, one that never comes does, in one line."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cli import selftest
from kvstore.errors import StorageError
from kvstore.server.local import LocalCluster

LATE = 7  # neither of the two that the self-test kills


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "c", 12, capacity_bytes=128 << 20) as made:
        made.kill(LATE, signal.SIGSTOP)
        try:
            yield made
        finally:
            made.kill(LATE, signal.SIGCONT)


def test_a_shard_that_comes_after_the_store_is_done_is_waited_for(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    killed, kill = threading.Event(), cluster.kill

    def killing(node: int, signum: int = signal.SIGKILL) -> None:
        kill(node, signum)
        if node == 1:  # the last of two: nine shards are left until the late node has its own
            threading.Timer(1.0, kill, (LATE, signal.SIGCONT)).start()
            killed.set()

    monkeypatch.setattr(cluster, "kill", killing)
    tested = selftest.self_test(cluster)
    assert tested.nodes_stopped == 2 and killed.is_set() and tested.seconds > 1


def test_what_stays_short_is_told_and_the_killed_nodes_are_back(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "DEADLINE_SECONDS", 2.0)
    with pytest.raises(StorageError, match=r"E402.*self-test.*0 of 128 blocks came back"):
        selftest.self_test(cluster)
    assert all(cluster.alive(node) for node in range(12))
