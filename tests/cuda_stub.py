"""A driver without a GPU (tests/native/libcuda_stub.cpp), and torch.cuda's streams without either: GPU memory that lies in host RAM."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client.movers import cuda, libcuda

HEADER = {  # the numbers of libcuda.py by their names in cuda.h
    "CUDA_ERROR_NO_DEVICE": libcuda.NO_DEVICE,
    "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED": libcuda.GPU_DIRECT_RDMA_SUPPORTED,
    "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS": libcuda.GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
    "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING": libcuda.GPU_DIRECT_RDMA_WRITES_ORDERING,
    "CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED": libcuda.DMA_BUF_SUPPORTED,
    "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST": libcuda.FLUSH_BY_HOST,
    "CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER": libcuda.ORDERED_FOR_OWNER,
    "CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD": libcuda.HANDLE_TYPE_DMA_BUF_FD,
    "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX": libcuda.FLUSH_TARGET_CURRENT_CTX,
    "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER": libcuda.FLUSH_TO_OWNER,
}
NO_FLUSH, FLUSH, PIPE = 0, 1, -2


class Driver:
    """The stub, at its start: two GPUs of that kind. `flush`: attribute 117, `ordering`: 118."""

    def __init__(self, path: Path, *, rdma: int = 1, dma_buf: int = 1, flush: int = FLUSH, ordering: int = 0) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.stub_record.restype = ctypes.c_char_p
        self.library.stub_reset()
        names = (libcuda.GPU_DIRECT_RDMA_SUPPORTED, libcuda.DMA_BUF_SUPPORTED)
        others = (libcuda.GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, libcuda.GPU_DIRECT_RDMA_WRITES_ORDERING)
        for attribute, value in zip((*names, *others), (rdma, dma_buf, flush, ordering), strict=True):
            self.library.stub_attribute(attribute, value)

    def allocate(self, address: int, size_bytes: int) -> None:
        self.library.stub_allocate(ctypes.c_uint64(address), ctypes.c_uint64(size_bytes))

    def fail(self, call: str, code: int) -> None:
        self.library.stub_fail(call.encode(), code)

    def export(self, size_bytes: int) -> None:
        self.library.stub_export(ctypes.c_long(size_bytes))

    def calls(self) -> list[str]:
        """Since they were last asked for, in order: name(arguments) in the GPU whose context was current, -1 for none."""
        return list(self.library.stub_record().decode().splitlines())

    def flushes(self) -> list[str]:
        return [call for call in self.calls() if call.startswith("cuFlush")]

    @property
    def current(self) -> int:
        return int(self.library.stub_current())

    @property
    def retained(self) -> int:
        return int(self.library.stub_retained())

    def number(self, name: str) -> int:
        return int(self.library.stub_number(name.encode()))


class Stream:
    """What it is told is over when it was looked at so often, or never."""

    def __init__(self, looks: float = 0) -> None:
        self.looks = looks


class FakeCuda:
    """torch.cuda as far as movers and zones ask it."""

    def __init__(self) -> None:
        self.stream = Stream()  # this thread's
        self.synchronized: list[str] = []

    class Event:
        def record(self, stream: Stream) -> None:
            self._stream = stream

        def query(self) -> bool:
            self._stream.looks -= 1
            return self._stream.looks < 0

    def current_stream(self, device: str) -> Stream:
        assert device == "cuda:1"
        return self.stream

    def synchronize(self, device: str) -> None:
        self.synchronized.append(device)


class HostTensor:
    """A tensor that says it lies on GPU 1, and does not."""

    device = "cuda:1"
    dtype = "torch.uint8"

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.ndim = array, array.shape, array.ndim

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, part: Any) -> np.ndarray:
        return self.array[part]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def host_as_gpu(monkeypatch: pytest.MonkeyPatch, path: Path, **kind: int) -> tuple[Driver, FakeCuda]:
    driver, fake = Driver(path, **kind), FakeCuda()
    monkeypatch.setattr(libcuda, "LIBRARY", str(path))
    monkeypatch.setattr(cuda, "torch_cuda", lambda: fake)
    return driver, fake
