"""How GPU memory is registered and flushed, against a driver that is none (tests/native/libcuda_stub.cpp): arguments, contexts, faults.

What the GPU's own driver makes of it: tests/test_gpu_rdma.py, on a host that has one.
"""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cuda_stub import HEADER, NO_FLUSH, PIPE, Driver, descriptors
from native_tools import build_stub

from kvstore.client.movers import libcuda
from kvstore.client.movers.libcuda import LibCuda
from kvstore.client.movers.registering import Registered, register_gpu
from kvstore.errors import ConfigError, Unreachable

PAGE = mmap.PAGESIZE
BASE = 0x7F00_0000_0000  # of an allocation of 8 pages, and nothing around it
INVALID, NOT_SUPPORTED = 1, 801


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stub("libcuda_stub", tmp_path_factory.mktemp("stub"), "libcuda.so.1")


@pytest.fixture
def driver(library: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """GPUs that need a flush and can: both ways in are open."""
    monkeypatch.setattr(libcuda, "LIBRARY", str(library))
    return started(library)


def started(library: Path, **kind: int) -> Driver:
    driver = Driver(library, **kind)
    driver.allocate(BASE, 8 * PAGE)
    return driver


class Nic:
    """A device that takes what it is given, or refuses one way of it."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.asked = refuses, []

    def add_dma_buf(self, descriptor: int, offset_bytes: int, size_bytes: int, address: int) -> str:
        assert descriptor > 2
        return self._take("dma-buf", offset_bytes, size_bytes, address)

    def add(self, address: int, size_bytes: int) -> str:
        return self._take("address", address, size_bytes)

    def _take(self, way: str, *numbers: int) -> str:
        self.asked.append((way, *numbers))
        if way in self.refuses:
            raise Unreachable("E148", "registering", f"{way} refused")
        return way


def register(nic: Nic, *, device: str = "cuda:1", address: int = BASE + 100, size_bytes: int = PAGE) -> Registered[str]:
    return register_gpu("landing zone", device, address, size_bytes, nic.add_dma_buf, nic.add)


def test_numbers_are_those_of_nvidias_header(driver: Driver) -> None:
    """The compiler has held the stub's functions against the header's, too."""
    assert {name: driver.number(name) for name in HEADER} == HEADER


def test_a_gpu_tells_what_it_can(library: Path, driver: Driver) -> None:
    gpu = LibCuda().gpu(1)
    assert (gpu.ordinal, gpu.name, gpu.pci, gpu.memory_bytes) == (1, "Stub 1", "0000:2b:00.0", 141 << 30)
    assert (gpu.rdma, gpu.dma_buf, gpu.writes_ordered, gpu.flushes) == (True, True, False, True)
    started(library, rdma=0, dma_buf=0, flush=2, ordering=200)  # 2: by streams alone
    gpu = LibCuda().gpu(0)
    assert (gpu.rdma, gpu.dma_buf, gpu.writes_ordered, gpu.flushes) == (False, False, True, False)
    assert LibCuda().devices_count == 2
    driver.library.stub_reset()  # an older driver knows none of these attributes
    assert (LibCuda().gpu(0).rdma, LibCuda().gpu(0).writes_ordered, LibCuda().gpu(0).flushes) == (False, False, False)
    driver.fail("cuInit", libcuda.NO_DEVICE)
    assert LibCuda().devices_count == 0


@pytest.mark.parametrize(
    ("address", "size_bytes", "begin", "pages"),
    [
        (BASE, PAGE, BASE, 1),
        (BASE + 100, 1, BASE, 1),
        (BASE + PAGE - 1, 2, BASE, 2),
        (BASE + PAGE + 512, 3 * PAGE, BASE + PAGE, 4),
        (BASE, 8 * PAGE, BASE, 8),
    ],
)
def test_whole_pages_are_exported_and_exactly_the_bytes_registered(
    driver: Driver, address: int, size_bytes: int, begin: int, pages: int
) -> None:
    """It was the whole allocation, with other tensors in it."""
    open_before, nic = descriptors(), Nic()
    made = register(nic, address=address, size_bytes=size_bytes)
    assert (made.way, made.region) == ("dma-buf", "dma-buf")
    assert nic.asked == [("dma-buf", address - begin, size_bytes, address)]
    (export,) = (call for call in driver.calls() if call.startswith("cuMemGetHandle"))
    assert export == f"cuMemGetHandleForAddressRange({begin:x}, {pages * PAGE}, 1, 0) in 1"
    assert descriptors() == open_before


def test_the_context_is_that_gpus_for_a_call_and_then_what_it_was(driver: Driver) -> None:
    cuda, seen = LibCuda(), []

    def flush() -> None:
        with cuda.context(1):
            cuda.flush_rdma_writes()
            with cuda.context(0):
                seen.append(driver.current)
            seen.append(driver.current)
        seen.append(driver.current)

    flush()
    thread = threading.Thread(target=flush)  # a new thread has no context: nothing made one current there
    thread.start()
    thread.join(10)
    assert seen == [0, 1, -1] * 2 and driver.retained == 0
    assert driver.flushes() == ["cuFlushGPUDirectRDMAWrites(0, 100) in 1"] * 2
    with pytest.raises(Unreachable, match=r"E221.*cuFlushGPUDirectRDMAWrites: invalid device context"):
        cuda.flush_rdma_writes()


@pytest.mark.parametrize(
    ("ordering", "flush", "flushed", "always"),
    [(0, 1, 1, 1), (100, 1, 0, 1), (200, 1, 0, 1), (100, 0, 0, 0), (200, 2, 0, 0)],
)
def test_a_flush_is_done_where_the_gpu_wants_one_and_always_where_told_if_it_can_be(
    library: Path, driver: Driver, ordering: int, flush: int, flushed: int, always: int
) -> None:
    started(library, ordering=ordering, flush=flush)
    made = register(Nic())
    driver.calls()
    made.flush()
    assert len(driver.flushes()) == flushed
    made.flush(always=True)
    assert driver.flushes() == ["cuFlushGPUDirectRDMAWrites(0, 100) in 1"] * always


def test_a_gpu_that_needs_a_flush_and_has_none_is_refused_at_the_start(library: Path, driver: Driver) -> None:
    started(library, flush=NO_FLUSH)
    nic = Nic()
    with pytest.raises(ConfigError, match=r"E156.*landing zone: the GPU needs a flush.*its driver has none"):
        register(nic)
    assert nic.asked == []


def test_the_address_is_tried_where_the_dma_buf_cannot_be_had(library: Path, driver: Driver) -> None:
    def by_address(nic: Nic, address: int = BASE + 100, size_bytes: int = PAGE) -> None:
        open_before = descriptors()
        assert register(nic, address=address, size_bytes=size_bytes).way == "nvidia-peermem"
        assert nic.asked[-1] == ("address", address, size_bytes)
        assert descriptors() == open_before and driver.retained == 0 and driver.current == -1

    by_address(Nic("dma-buf"))
    by_address(Nic(), address=BASE + 7 * PAGE, size_bytes=PAGE + 1)  # past what is mapped: the driver refuses
    driver.export(PAGE)
    by_address(Nic())  # fewer bytes than asked for: as of one chunk of an expandable segment
    driver.export(PIPE)
    by_address(Nic())
    for call in ("cuMemGetHandleForAddressRange", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"):
        started(library).fail(call, NOT_SUPPORTED)
        by_address(Nic())
    started(library, dma_buf=0)
    by_address(Nic())
    assert not any(call.startswith("cuMemGetHandle") for call in driver.calls())


@pytest.mark.parametrize(
    ("kind", "refuses", "export", "told"),
    [
        ({}, "dma-buf address", -1, "dma-buf: dma-buf refused; by address: address refused"),
        ({"dma_buf": 0}, "address", -1, "the GPU exports no dma-buf; by address: address refused"),
        ({"dma_buf": 0, "rdma": 0}, "", -1, "the GPU exports no dma-buf; by address: the GPU lets no other device in"),
        ({"rdma": 0}, "dma-buf", -1, "dma-buf: dma-buf refused; by address: the GPU lets no other device in"),
        ({}, "address", PAGE, f"exported {PAGE} of {2 * PAGE} bytes; by address: address refused"),
        ({}, "address", PIPE, "gave no dma-buf (Illegal seek); by address: address refused"),
    ],
)
def test_where_neither_way_works_one_line_says_why(
    library: Path, driver: Driver, kind: dict[str, int], refuses: str, export: int, told: str
) -> None:
    started(library, **kind).export(export)
    open_before = descriptors()
    with pytest.raises(ConfigError) as refused:
        register(Nic(refuses))
    assert refused.value.code == "E156" and refused.value.what == "landing zone" and told in refused.value.cause
    assert refused.value.fix and "\n" not in str(refused.value)
    assert descriptors() == open_before


@pytest.mark.parametrize(
    "call", ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetPCIBusId", "cuDeviceTotalMem_v2"]
)
def test_a_driver_that_fails_is_told_with_the_call_that_did(driver: Driver, call: str) -> None:
    driver.fail(call, INVALID)
    with pytest.raises(ConfigError, match=f"E156.*landing zone: {call}: invalid argument"):
        register(Nic())
    driver.fail(call, 999)
    with pytest.raises(Unreachable, match=f"E221.*{call}: error 999"):
        LibCuda().gpu(0)


def test_a_host_without_the_driver_or_that_gpu_says_so(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"E156.*cuDeviceGet: error 101"):
        register(Nic(), device="cuda:7")
    with pytest.raises(Unreachable, match=r"E221.*this driver has no cuMadeUp\. Fix: update"):
        LibCuda()._call("cuMadeUp")
    monkeypatch.setattr(libcuda, "LIBRARY", "libcuda-none.so.1")
    with pytest.raises(ConfigError, match=r"E156.*libcuda-none.*install NVIDIA's driver"):
        register(Nic())


CHILD = """
import ctypes, sys
from kvstore.client.movers import libcuda
from kvstore.client.movers.registering import register_gpu
from kvstore.kernels._native import DirectZone
libcuda.LIBRARY, address, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
driver, verbs = ctypes.CDLL(sys.argv[1]), ctypes.CDLL("libibverbs.so.1")
verbs.stub_record.restype = ctypes.c_char_p
for attribute in (116, 117, 124):
    driver.stub_attribute(attribute, 1)
driver.stub_allocate(ctypes.c_uint64(address - address % 4096), ctypes.c_uint64(1 << 20))
for refused in (0, 95):
    verbs.stub_refuse(refused)
    zone = DirectZone("fake0")
    made = register_gpu("landing zone", "cuda:0", address, size, zone.add_dma_buf, zone.add)
    assert zone.registered_bytes == size and zone.close()
    print(made.way)
print(verbs.stub_record().decode())
"""


@pytest.mark.skipif(mmap.PAGESIZE != 4096, reason="its numbers are of pages of 4 KiB")
def test_the_memory_region_begins_and_ends_with_the_zone(library: Path, tmp_path: Path) -> None:
    """libibverbs is told offset, length and address; it was the allocation from its start on, whose key any node had."""
    build_stub("libibverbs_stub", tmp_path, "libibverbs.so.1")
    address, size = BASE + 2 * PAGE + 520, 3 * PAGE + 7
    command = [sys.executable, "-c", CHILD, str(library), str(address), str(size)]
    ran = subprocess.run(command, env={"LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    dma_buf = f"ibv_reg_dmabuf_mr 520 {size} {address:#x} access 3"
    expected = ["dma-buf", "nvidia-peermem", dma_buf, "ibv_dereg_mr", dma_buf, f"ibv_reg_mr {address:#x} {size} access 3", "ibv_dereg_mr"]
    assert ran.stdout.split("\n")[: len(expected)] == expected
