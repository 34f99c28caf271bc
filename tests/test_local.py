"""LocalCluster: real daemons start, die, come back, stop; nothing is left behind, data is kept, refusals are one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from cli_tool import ROOT

from kvstore.clustermap import ClusterMap
from kvstore.errors import ConfigError, DirectoryInUse, Unreachable
from kvstore.server.fsck import fsck
from kvstore.server.local import HOST, PORTS_PER_NODE, LocalCluster, free_ports, port_is_free

CAPACITY = 128 << 20


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Waits until a process that is not ours to reap has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(handle) as watched:
        import select

        return bool(select.select([watched], [], [], seconds)[0])


def test_a_node_that_is_told_to_stand_still_does(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "c", 3, capacity_bytes=CAPACITY) as cluster:
        for turn in range(30):
            cluster.kill(turn % 3, signal.SIGSTOP)
            tasks = list(Path(f"/proc/{cluster.pid(turn % 3)}/task").glob("*/stat"))
            assert len(tasks) > 3 and {task.read_text().rpartition(")")[2].split()[0] for task in tasks} == {"T"}
            cluster.kill(turn % 3, signal.SIGCONT)


def test_daemons_serve_and_end_and_keep_their_directories(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "c", 3, capacity_bytes=CAPACITY) as cluster:
        assert ClusterMap.load(cluster.map_path) == cluster.map and cluster.map.epoch == 1
        pids = [cluster.pid(i) for i in range(3)]
        for i, node in enumerate(cluster.map.nodes):
            assert cluster.ready[i]["address"] == node.address and cluster.ready[i]["pid"] == pids[i]
            with urllib.request.urlopen(f"http://{node.metrics_address}/readyz", timeout=10) as answer:
                assert answer.status == 200
            assert int((cluster.directory / f"node-{i:02}.pid").read_text()) == pids[i]
        addresses = [node.address for node in cluster.map.nodes]
    assert all(pid is not None and gone(pid) for pid in pids)
    assert not list(cluster.directory.glob("*.pid")), "no pid file outlives its process"
    with LocalCluster(tmp_path / "c", 3, capacity_bytes=CAPACITY) as again:
        assert [node.address for node in again.map.nodes] == addresses, "ports stay where they are free"
        assert again.ready[0]["index"].startswith(("loaded", "clean"))


def test_a_folder_named_kvstore_here_does_not_take_the_place_of_the_daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvstore").mkdir()
    (tmp_path / "kvstore" / "__init__.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with LocalCluster(tmp_path / "c", 1, capacity_bytes=CAPACITY) as cluster:
        cluster.kill(0)
        assert fsck(cluster.node_directory(0)).ok


def test_a_killed_daemon_comes_back_on_its_port(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, 2, capacity_bytes=CAPACITY) as cluster:
        first = cluster.pid(1)
        cluster.kill(1)
        assert not cluster.alive(1) and cluster.pid(1) is None and cluster.alive(0)
        cluster.restart(1)
        assert cluster.alive(1) and cluster.pid(1) != first
        assert cluster.ready[1]["address"] == cluster.map.nodes[1].address
        cluster.kill(0, signal.SIGSTOP)
        assert cluster.alive(0)
        cluster.restart(0)  # also one that stands still
        assert cluster.alive(0)
        cluster.kill(0, signal.SIGSTOP)
    assert not cluster.alive(0) and not cluster.alive(1), "a stopped process ends, too"


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "standing still"])
def test_daemons_die_with_their_parent(tmp_path: Path, stopped: bool) -> None:
    script = (
        "import sys, signal\nfrom kvstore.server.local import LocalCluster\n"
        f"c = LocalCluster({str(tmp_path / 'c')!r}, 2, capacity_bytes={CAPACITY}).start()\n"
        "print(c.pid(0), c.pid(1), flush=True)\nsignal.pause()\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        for pid in pids if stopped else ():
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    assert all(gone(pid) for pid in pids)
    state = (tmp_path / "c" / "node-00" / "state").read_text()
    assert "\nrunning 0\n" in state, "it was drained"


def test_a_second_cluster_in_one_directory_is_refused_with_the_pid(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, 1, capacity_bytes=CAPACITY), pytest.raises(DirectoryInUse) as caught:
        LocalCluster(tmp_path, 1, capacity_bytes=CAPACITY).start()
    assert caught.value.pid == os.getpid()


def test_another_shape_is_refused(tmp_path: Path) -> None:
    LocalCluster(tmp_path, 1, capacity_bytes=CAPACITY).start().stop()
    with pytest.raises(ConfigError, match="of 1 nodes") as caught:
        LocalCluster(tmp_path, 2)
    assert "--fresh" in caught.value.fix
    with pytest.raises(ConfigError, match="4\\+1"):
        LocalCluster(tmp_path, 1, k=4, m=1)


def test_a_taken_port_is_told_with_its_owner(tmp_path: Path) -> None:
    import socket

    with socket.socket() as holder:
        holder.bind((HOST, 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert not port_is_free(port)
        cluster = LocalCluster(tmp_path, 1, base_port=port)
        with pytest.raises(ConfigError, match=f"port {port} is taken by pid {os.getpid()}"):
            cluster.start()
    assert port_is_free(port)


def test_a_daemon_that_cannot_start_is_told_in_its_own_words_and_nothing_runs_on(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path, 3, capacity_bytes=CAPACITY, extra_arguments=["--bulk-threads", "999"])
    with pytest.raises(Unreachable, match=r"node-00 ended at its start with exit code 2: error\[E121\]"):
        cluster.start()
    assert not any(cluster.alive(i) for i in range(3)) and not list(tmp_path.glob("*.pid"))


def test_fresh_forgets_what_is_there_even_of_another_shape_but_never_under_a_running_cluster(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, 2, capacity_bytes=CAPACITY) as running:
        with pytest.raises(DirectoryInUse):
            LocalCluster(tmp_path, 1, capacity_bytes=CAPACITY, fresh=True).start()
        assert running.map_path.exists()
    with LocalCluster(tmp_path, 1, capacity_bytes=CAPACITY, fresh=True) as cluster:
        assert cluster.ready[0]["index"].startswith("fresh") and not (tmp_path / "node-01").exists()
        cluster.restart(0)
        assert not cluster.ready[0]["index"].startswith("fresh"), "only the first start forgets"


def test_twelve_daemons_serve_within_seconds(tmp_path: Path) -> None:
    started = time.monotonic()
    with LocalCluster(tmp_path, capacity_bytes=CAPACITY) as cluster:
        assert time.monotonic() - started < 15
        assert len(set(free_ports(10))) == 10 and len(cluster.map.nodes) * PORTS_PER_NODE == 36
