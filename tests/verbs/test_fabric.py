"""What is said of the way: traffic class and GID at both ends; and registered memory: when it is registered, and on which pages."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from client_tools import SMALL, chain, load, store, until_whole
from server_tools import InProcess, serving, until

from kvstore.client import Client, ClientConfig, LoadOutcome
from kvstore.client.direct import DirectMemory
from kvstore.client.movers.loopback import LoopbackMover
from kvstore.clustermap import ClusterMap, Node
from kvstore.doctor import rdma
from kvstore.doctor.finding import Word
from kvstore.errors import ConfigError
from kvstore.kernels._native import Loopback, pinned_pages

ROCE_PORT = 4791
EVERY_PACKET = 3  # ETH_P_ALL: sent ones, too
ZONE_BYTES = 4 << 20
SLAB_BYTES = 8 * ZONE_BYTES
POOL = Path("/proc/sys/vm/nr_hugepages")
NOBODYS_GID = 200


def map_of(node: InProcess) -> ClusterMap:
    return ClusterMap.local([Node("node-00", "host-00", f"127.0.0.1:{node.server.port}")], k=1, m=0)


def address_of(device: str) -> tuple[str, str]:
    """The interface of a device and its IPv4 address."""
    port = Path("/sys/class/infiniband", device, "ports/1")
    gid = socket.inet_pton(socket.AF_INET6, (port / "gids/1").read_text().strip())
    return (port / "gid_attrs/ndevs/1").read_text().strip(), socket.inet_ntoa(gid[12:])


@contextmanager
def listening(interface: str) -> Iterator[set[tuple[str, int]]]:
    """(sender, traffic class) of the RoCE v2 packets on an interface, those that leave it and those that come, until the block's end."""
    seen: set[tuple[str, int]] = set()
    ended = threading.Event()
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(EVERY_PACKET)) as packets:
        packets.bind((interface, EVERY_PACKET))
        packets.settimeout(0.1)

        def look() -> None:
            while not ended.is_set():
                try:
                    head = packets.recv(64)
                except TimeoutError:
                    continue
                if head[0] == 0x45 and head[9] == socket.IPPROTO_UDP and int.from_bytes(head[22:24], "big") == ROCE_PORT:
                    seen.add((socket.inet_ntoa(head[12:16]), head[1]))

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield seen
        finally:
            ended.set()
            thread.join()


def test_packets_of_each_end_have_the_traffic_class_that_it_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wire, daemon = address_of("rxe0")
    host = address_of("rxe1")[1]
    with ExitStack() as stack:
        node = stack.enter_context(serving(tmp_path, rdma_device="rxe0", rdma_traffic_class=104, progress_timeout_seconds=20.0))
        config = ClientConfig(promise_reuse_seconds=0, transport="rdma", rdma_device="rxe1", rdma_traffic_class=184)
        client = stack.enter_context(Client(map_of(node), layout=SMALL, config=config))
        keys = chain(4, SMALL)
        data = store(client, keys)
        until_whole(client, keys)
        with listening(wire) as seen:
            result, place = load(client, client.lookup(keys))
            assert result.outcome is LoadOutcome.COMPLETE and np.array_equal(place, data)
            until(lambda: len({sender for sender, _ in seen}) == 2, "writes, and what acknowledges them")
        assert seen == {(daemon, 104), (host, 184)}
        monkeypatch.setenv("KVSTORE_RDMA_TRAFFIC_CLASS", "32")  # what a zone of the caller's goes by
        with listening(wire) as seen, DirectMemory(np.zeros(1 << 20, np.uint8), "rxe1") as memory:
            with memory.read(client, client.lookup(keys), deadline_seconds=60.0) as arrived:
                assert arrived.outcome is LoadOutcome.COMPLETE
            until(lambda: len({sender for sender, _ in seen}) == 2, "writes, and what acknowledges them")
        assert seen == {(daemon, 104), (host, 32)}


def test_the_gid_is_the_one_of_the_setting_and_doctor_says_which() -> None:
    for index, chosen in ((-1, 1), (1, 1), (0, 0)):
        assert Loopback("rxe0", index).gid_index == chosen
        told, tried = rdma.rdma(gid_index=index)[:2]
        assert (told.word, tried.word) == (Word.OK, Word.OK), (told, tried)
        assert f"RoCE v2 GID {chosen} " in told.found and " in use" in told.found
        assert told.measured["ports"][0]["gid_in_use"] == chosen
        assert f"opened with GID {chosen}," in tried.found and tried.measured["gid_index"] == chosen
    missing = rdma.rdma(gid_index=NOBODYS_GID)[0]
    assert missing.word is Word.WARN and f"no GID {NOBODYS_GID}" in missing.found and "rdma_gid_index" in missing.fix


@pytest.mark.parametrize("device", ["auto", "rxe0"])
@pytest.mark.parametrize("who", ["client", "daemon", "mover's device"])
def test_a_gid_that_no_device_has_is_one_error_also_where_tcp_would_do(who: str, device: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"E149.*GID index {NOBODYS_GID}.*rxe0 has no GID {NOBODYS_GID} on an active port.*kvstore doctor"
    ):
        if who == "client":
            node = Node("node-00", "host-00", "127.0.0.1:1")
            config = ClientConfig(transport="auto", rdma_device=device, rdma_gid_index=NOBODYS_GID)
            Client(ClusterMap.local([node], k=1, m=0), layout=SMALL, config=config)
        elif who == "daemon":
            InProcess(tmp_path / "node", rdma_device=device, rdma_gid_index=NOBODYS_GID)
        else:
            Loopback(device, NOBODYS_GID)


# --- when ---


def nowhere() -> ClusterMap:
    return ClusterMap.local([Node("node-00", "host-00", "127.0.0.1:1")], k=1, m=0)


def test_auto_registers_its_first_slab_at_the_start() -> None:
    for windows, kept in ((True, SLAB_BYTES), (False, 0)):  # without them: tried, and let go, since each connection registers its own zone
        config = ClientConfig(transport="auto", rdma_device="rxe1", rdma_zone_bytes=ZONE_BYTES, rdma_windows=windows)
        with Client(nowhere(), layout=SMALL, config=config) as client:
            assert client.stats()["rdma_registered_bytes"] == kept


LOCKED = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
from kvstore.client import Client, ClientConfig
from kvstore.clustermap import ClusterMap, Node
from kvstore.errors import ConfigError
from kvstore.layout import Layout
nowhere = ClusterMap.local([Node("node-00", "host-00", "127.0.0.1:1")], k=1, m=0)
for windows in (True, False):
    for transport in ("auto", "rdma"):
        config = ClientConfig(transport=transport, rdma_device="auto", rdma_windows=windows)
        try:
            with Client(nowhere, layout=Layout.single(4096), config=config) as client:
                print("registered", client.stats()["rdma_registered_bytes"], flush=True)
        except ConfigError as error:
            print("refused", error.code, flush=True)
"""


def test_too_little_lockable_memory_is_told_at_the_start_and_not_in_mid_load() -> None:
    """As a user has it: root may lock all it likes unless that right is taken away."""
    without_right = ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"]
    ended = subprocess.run(
        [*without_right, sys.executable, "-c", LOCKED],
        capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10)),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    told = "WARNING reads go over TCP: registering 32768 KiB with rxe0: may lock 64 KiB of memory"
    starts = [told, "registered 0", "refused E147"] * 2
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), lines


# --- on which pages ---


def huge_bytes() -> int:
    """What this process has of the host's pool of huge pages."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("HugetlbPages:"))
    return int(line.split()[1]) << 10


@pytest.fixture
def pool() -> Iterator[None]:
    """96 huge pages of 2 MiB, which take memory of the whole host: put back at the end."""
    before = POOL.read_text()
    POOL.write_text("96")
    if int(POOL.read_text()) < 96:
        POOL.write_text(before)
        pytest.skip("this host has no 192 MiB in huge pages")
    yield
    POOL.write_text(before)


@pytest.mark.usefixtures("pool")
def test_registered_memory_comes_from_the_pool_of_huge_pages_where_there_is_one(tmp_path: Path) -> None:
    assert huge_bytes() == 0
    with Client(nowhere(), layout=SMALL, config=ClientConfig(transport="auto", rdma_device="rxe1", rdma_zone_bytes=ZONE_BYTES)):
        assert huge_bytes() == SLAB_BYTES
    assert huge_bytes() == 0
    limits = {"io": "direct", "read_arena_bytes": 8 << 20, "read_cache_bytes": 8 << 20, "rdma_pool_bytes": 4 << 20, "bulk_threads": 2}
    with serving(tmp_path / "node", rdma_device="rxe0", **limits) as node:
        assert huge_bytes() == node.stats["verbs_registered_bytes"] >= 20 << 20
    with serving(tmp_path / "plain", rdma_device="off", **limits):
        assert huge_bytes() == 0  # resident as it is used: a daemon that nobody asks stays small
    pages = np.zeros((8, 4096), np.uint8)
    with LoopbackMover(pages, "rxe0") as mover:
        rows = mover.host_rows(600)
        assert huge_bytes() == 4 << 20
        assert rows.ctypes.data % (2 << 20) == 0 and not rows.any()
    del rows, mover
    assert huge_bytes() == 0


@pytest.mark.usefixtures("pool")
def test_a_pool_that_is_too_small_is_passed_over() -> None:
    whole = pinned_pages(256 << 20)
    assert huge_bytes() == 0
    assert whole.ctypes.data % (2 << 20) == 0


def test_a_forked_child_has_nothing_of_what_a_device_writes_to() -> None:
    memory = pinned_pages(4096)
    memory[:] = 7
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os._exit(int(memory[0]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_without_a_setting_the_first_device_is_taken_and_the_variable_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = np.zeros((8, 4096), np.uint8)
    for said, taken in (("", "rxe0"), ("rxe1", "rxe1")):
        monkeypatch.setenv("KVSTORE_RDMA_DEVICE", said)
        with LoopbackMover(pages) as mover, DirectMemory(np.zeros(4096, np.uint8)) as memory:
            assert (mover._core.device_name, memory._core.device_name) == (taken, taken)
