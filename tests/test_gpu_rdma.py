"""GPU memory as RDMA devices reach it, on the real thing: what the driver tells and exports, registrations, the mover `loopback`, path B.

Of tests marked `gpu` most need an RDMA device, too: KVSTORE_RDMA_DEVICE names it, KVSTORE_NODE_RDMA_DEVICE that of the nodes, by default
the same (docs/RDMA.md). Written where neither was to be had: what of it runs without is in tests/test_gpu_registering.py and tests/verbs.
The claims of tests/verbs/test_direct.py about host RAM are made of a GPU there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from client_tools import NO_REUSE, SMALL, bytes_of, chain, store, ticket_of_all, until_whole
from gpu_tools import kernels_run
from verbs.guest import has_devices
from verbs.nodes import cluster

from kvstore.client import Client, LoadOutcome
from kvstore.client.direct import DirectMemory
from kvstore.client.movers.interface import MoveOutcome
from kvstore.client.movers.libcuda import Gpu, LibCuda
from kvstore.client.movers.loopback import LoopbackMover
from kvstore.doctor.gpu import peer_module
from kvstore.kernels.gpu import Outcome, PageTable, Part
from kvstore.keys import Keys

__all__ = ["kernels_run"]
DEVICE = os.environ.get("KVSTORE_RDMA_DEVICE") or "auto"
NODE_DEVICE = os.environ.get("KVSTORE_NODE_RDMA_DEVICE") or DEVICE
pytestmark = pytest.mark.gpu
with_nic = pytest.mark.skipif(not has_devices(), reason="needs an RDMA device (KVSTORE_RDMA_DEVICE)")
BLOCKS, WIDTH = 20, 4001
LAYERS = [slice(0, 1), slice(1, 3000), slice(3000, WIDTH)]


def busy(stream: Any) -> None:
    """About a second of a GPU's time."""
    with torch.cuda.stream(stream):
        matrix = torch.full((8192, 8192), 1 / 8192, device="cuda")
        for _ in range(50):
            matrix = matrix @ matrix


# --- the driver ---


def test_the_driver_tells_of_the_gpu_what_torch_and_sysfs_do() -> None:
    cuda = LibCuda()
    assert cuda.devices_count == torch.cuda.device_count()
    gpu = cuda.gpu(0)
    assert gpu.name == torch.cuda.get_device_name(0)
    assert abs(gpu.memory_bytes - torch.cuda.get_device_properties(0).total_memory) < 1 << 30
    assert Path("/sys/bus/pci/devices", gpu.pci).exists()


@pytest.mark.parametrize(("begin", "size_bytes"), [(0, 4096), (70_003, 300_001), ((1 << 20) - 1, 1), (5, (8 << 20) - 5)])
def test_a_part_of_a_tensor_is_exported(begin: int, size_bytes: int) -> None:
    """Also from a thread that never used the GPU, as a dma-buf that tells its size."""
    cuda, tensor, found = LibCuda(), torch.zeros(8 << 20, dtype=torch.uint8, device="cuda"), []
    if not cuda.gpu(0).dma_buf:
        pytest.skip("this GPU's driver exports no dma-buf")

    def export() -> None:
        with cuda.context(0):
            found.append(cuda.dma_buf(tensor.data_ptr() + begin, size_bytes))

    thread = threading.Thread(target=export)
    thread.start()
    thread.join(30)
    ((descriptor, offset),) = found
    assert os.lseek(descriptor, 0, os.SEEK_END) >= offset + size_bytes
    os.close(descriptor)


def test_a_flush_is_one_where_the_driver_says_that_it_has_it() -> None:
    cuda, done = LibCuda(), []
    if not cuda.gpu(0).flushes:
        pytest.skip("this driver has no flush from the host")

    def flush() -> None:
        with cuda.context(0):
            cuda.flush_rdma_writes()
        done.append(True)

    thread = threading.Thread(target=flush)
    thread.start()
    thread.join(30)
    assert done and torch.cuda.current_device() == 0


# --- with a NIC ---


@pytest.fixture(params=["dma-buf", "nvidia-peermem"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each that this host has; by address no dma-buf is asked for."""
    gpu = LibCuda().gpu(0)
    if request.param == "dma-buf":
        if not gpu.dma_buf:
            pytest.skip("this GPU's driver exports no dma-buf")
    else:
        if not peer_module():
            pytest.skip("nvidia-peermem is not loaded")
        ask = LibCuda.gpu

        def without(self: LibCuda, ordinal: int) -> Gpu:
            return replace(ask(self, ordinal), dma_buf=False)

        monkeypatch.setattr(LibCuda, "gpu", without)
    return str(request.param)


@with_nic
def test_exactly_the_zone_is_registered(way: str) -> None:
    segment = torch.full((8 << 20,), 0xEE, dtype=torch.uint8, device="cuda")
    zone = segment[70_003:370_004]
    with DirectMemory(zone, DEVICE) as memory:
        assert memory.registration == way
        assert memory._core.registered_bytes == len(zone) + 1  # and what is read back to
    assert bool((segment == 0xEE).all())


@with_nic
def test_layers_come_into_a_gpu_and_kernels_begun_after_their_event_see_them(way: str) -> None:
    wide = torch.full((50, WIDTH + 31), 0xAB, dtype=torch.uint8, device="cuda")
    pages = wide[:, :WIDTH]
    with LoopbackMover(pages, DEVICE) as mover:
        assert mover.registration == way
        rows = mover.host_rows(BLOCKS)
        for seed in range(20):
            rows[:] = np.random.default_rng(seed).integers(0, 256, rows.shape, dtype=np.uint8)
            table, seen = np.random.default_rng(seed).permutation(50)[:BLOCKS], []
            with mover.move(rows, table, LAYERS) as move:
                for moved in move:
                    moved.event.before(torch.cuda.current_stream())
                    seen.append(pages[:, moved.columns].clone())
            assert move.outcome is MoveOutcome.COMPLETE
            for columns, layer in zip(LAYERS, seen, strict=True):
                assert np.array_equal(layer.cpu().numpy()[table], rows[:, columns]), (seed, columns)
        back = mover.host_rows(BLOCKS)
        with mover.move(back, table, LAYERS, to_device=False) as move:
            list(move)
        assert move.outcome is MoveOutcome.COMPLETE and np.array_equal(back, rows)
    assert bool((wide[:, WIDTH:] == 0xAB).all())


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[Client, Keys]]:
    with ExitStack() as stack:
        _, map_, _ = stack.enter_context(cluster(tmp_path, device=NODE_DEVICE))
        client = stack.enter_context(Client(map_, layout=SMALL, config=NO_REUSE))
        keys = chain(BLOCKS, SMALL)
        store(client, keys)
        until_whole(client, keys)
        yield client, keys


def zone_bytes() -> int:
    return 2 * BLOCKS * SMALL.block_bytes + (1 << 20)


@with_nic
@pytest.mark.usefixtures("kernels_run")
def test_what_nodes_wrote_is_checked_and_scattered_on_any_stream(stored: tuple[Client, Keys], way: str) -> None:
    """The zone is of a block that kernels were still queued for; the scatters' stream is busy when the read is closed."""
    client, keys = stored
    side = torch.cuda.Stream()
    used = torch.zeros(zone_bytes(), dtype=torch.uint8, device="cuda")
    busy(torch.cuda.current_stream())
    used.fill_(0x11)  # queued behind; torch gives its memory out again at once
    address = used.data_ptr()
    del used
    zone = torch.empty(zone_bytes(), dtype=torch.uint8, device="cuda")
    assert zone.data_ptr() == address, "not what this test is about"
    part = Part(0, 1, SMALL.block_bytes)
    with DirectMemory(zone, DEVICE) as memory:
        assert memory.registration == way
        for seed in range(5):
            pages = torch.zeros((24, 1, SMALL.block_bytes), dtype=torch.uint8, device="cuda")
            table = np.random.default_rng(seed).permutation(24)[:BLOCKS]
            places = PageTable(table.tolist(), 24, "cuda")
            with memory.read(client, ticket_of_all(client, keys), deadline_seconds=10) as arrived:
                assert arrived.outcome is LoadOutcome.COMPLETE
                for row, landed in arrived.land(0):
                    assert set(landed.outcomes) <= {Outcome.RIGHT, Outcome.REBUILT}
                    side.wait_stream(torch.cuda.current_stream())
                    busy(side)
                    with torch.cuda.stream(side):
                        landed.scatter(part, pages, places, first_row=row)
            assert side.query()  # waited for, though it is not this thread's current stream
            assert np.array_equal(pages.cpu().numpy()[table, 0], bytes_of(keys, SMALL)), seed


@with_nic
@pytest.mark.usefixtures("kernels_run")
def test_the_second_gpus_zone_is_flushed_and_the_current_device_stays(stored: tuple[Client, Keys]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    client, keys = stored
    assert torch.cuda.current_device() == 0
    zone = torch.empty(zone_bytes(), dtype=torch.uint8, device="cuda:1")
    with (
        DirectMemory(zone, DEVICE) as memory,
        memory.read(client, ticket_of_all(client, keys), deadline_seconds=10) as arrived,
    ):
        assert arrived.outcome is LoadOutcome.COMPLETE
        assert all(set(landed.outcomes) <= {Outcome.RIGHT, Outcome.REBUILT} for _, landed in arrived.land(0))
    assert torch.cuda.current_device() == 0


EXPANDABLE = """
import sys
import numpy as np, torch
from kvstore.client.movers.loopback import LoopbackMover
rows, page = 200, 1 << 20
pages = torch.zeros((rows, page), dtype=torch.uint8, device="cuda")  # more than one chunk of a segment
with LoopbackMover(pages, sys.argv[1]) as mover:
    host = mover.host_rows(2)
    host[:] = np.random.default_rng(1).integers(0, 256, host.shape, dtype=np.uint8)
    with mover.move(host, [0, rows - 1], [slice(0, page)]) as move:
        list(move)
    assert np.array_equal(pages[[0, rows - 1]].cpu().numpy(), host) and not pages[1:-1].any()
    print(mover.registration)
"""


@with_nic
def test_memory_of_expandable_segments_is_registered_to_its_end() -> None:
    """The driver names one chunk of such an allocation only; pieces past it were an IndexError in mid-move."""
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    ran = subprocess.run([sys.executable, "-c", EXPANDABLE, DEVICE], env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() in ("dma-buf", "nvidia-peermem")
