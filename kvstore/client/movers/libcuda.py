"""What is asked of NVIDIA's driver library beyond torch.cuda: what a GPU can do for an RDMA device, a dma-buf of its memory, and the flush.

libcuda.so.1 by ctypes: it comes with the driver, so there is nothing to build against. Numbers are those of NVIDIA's cuda.h; they are ABI.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvstore.errors import Unreachable

LIBRARY: Final = "libcuda.so.1"
NO_DEVICE: Final = 100  # CUDA_ERROR_NO_DEVICE
# CU_DEVICE_ATTRIBUTE_...
GPU_DIRECT_RDMA_SUPPORTED: Final = 116
GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: Final = 117
GPU_DIRECT_RDMA_WRITES_ORDERING: Final = 118
DMA_BUF_SUPPORTED: Final = 124
FLUSH_BY_HOST: Final = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
ORDERED_FOR_OWNER: Final = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER; what orders for more devices is greater
HANDLE_TYPE_DMA_BUF_FD: Final = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
FLUSH_TARGET_CURRENT_CTX: Final = 0
FLUSH_TO_OWNER: Final = 100
NAME_BYTES: Final = 256
PCI_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Gpu:
    ordinal: int
    name: str
    pci: str  # "0000:1b:00.0", as sysfs spells it
    memory_bytes: int
    rdma: bool  # another device may read and write its memory by address (nvidia-peermem)
    dma_buf: bool  # ... through a dma-buf
    writes_ordered: bool  # what an RDMA device wrote is seen by kernels begun later, without a flush
    flushes: bool  # the driver flushes such writes when it is told


class LibCuda:
    """The driver, initialised. Raises Unreachable E221 for what it refuses; OSError where the library is not there."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(LIBRARY)
        self.devices_count = 0
        code = self._lib.cuInit(0)
        if code == NO_DEVICE:
            return
        self._check("cuInit", code)
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        self.devices_count = count.value

    def gpu(self, ordinal: int) -> Gpu:
        device, size = self._device(ordinal), ctypes.c_size_t()
        name, pci = ctypes.create_string_buffer(NAME_BYTES), ctypes.create_string_buffer(PCI_BYTES)
        self._call("cuDeviceGetName", name, ctypes.c_int(NAME_BYTES), device)
        self._call("cuDeviceGetPCIBusId", pci, ctypes.c_int(PCI_BYTES), device)
        self._call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        return Gpu(
            ordinal, name.value.decode(errors="replace"), pci.value.decode(errors="replace").lower(), size.value,
            rdma=self._attribute(device, GPU_DIRECT_RDMA_SUPPORTED) > 0, dma_buf=self._attribute(device, DMA_BUF_SUPPORTED) > 0,
            writes_ordered=self._attribute(device, GPU_DIRECT_RDMA_WRITES_ORDERING) >= ORDERED_FOR_OWNER,
            flushes=bool(self._attribute(device, GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS) & FLUSH_BY_HOST),
        )  # fmt: skip

    @contextlib.contextmanager
    def context(self, ordinal: int) -> Iterator[None]:
        """Within, the current context of this thread is this GPU's, the one that torch uses; then what it was before.

        Not torch.cuda.device: where that finds its device chosen already it does nothing, and a new thread has no context at all."""
        device, context = self._device(ordinal), ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._lib.cuCtxPopCurrent_v2(ctypes.byref(context))  # what was pushed: it cannot fail
        finally:
            self._lib.cuDevicePrimaryCtxRelease_v2(device)

    def dma_buf(self, address: int, size_bytes: int) -> tuple[int, int]:
        """Of the host's pages that hold these bytes, which is what the driver exports: a descriptor (to be closed), and how far into it the
        bytes begin. In context()."""
        begin, end = address - address % mmap.PAGESIZE, address + size_bytes
        end += -end % mmap.PAGESIZE
        call, descriptor = "cuMemGetHandleForAddressRange", ctypes.c_int(-1)
        where = ctypes.c_uint64(begin), ctypes.c_size_t(end - begin)
        self._call(call, ctypes.byref(descriptor), *where, ctypes.c_int(HANDLE_TYPE_DMA_BUF_FD), ctypes.c_uint64(0))
        try:
            exported = os.lseek(descriptor.value, 0, os.SEEK_END)  # a dma-buf tells its size so
        except OSError as error:
            exported, why = 0, f"{call}: gave no dma-buf ({error.strerror})"
        else:
            why = f"{call}: exported {exported} of {end - begin} bytes"
        if exported < end - begin:
            if descriptor.value >= 0:
                os.close(descriptor.value)
            raise Unreachable("E221", "gpu", why, "update the NVIDIA driver")
        return descriptor.value, address - begin

    def flush_rdma_writes(self) -> None:
        """What an RDMA device wrote into the current context's GPU before is seen by kernels begun after. In context()."""
        self._call("cuFlushGPUDirectRDMAWrites", ctypes.c_int(FLUSH_TARGET_CURRENT_CTX), ctypes.c_int(FLUSH_TO_OWNER))

    def _device(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        return device

    def _attribute(self, device: ctypes.c_int, attribute: int) -> int:
        """0 for one that this driver does not know."""
        value = ctypes.c_int()
        code = self._lib.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(attribute), device)
        return value.value if code == 0 else 0

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._lib, name)
        except AttributeError:
            raise Unreachable("E221", "gpu", f"this driver has no {name}", "update the NVIDIA driver") from None
        self._check(name, function(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            known = self._lib.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text)) == 0 and text.value
            cause = text.value.decode(errors="replace") if known and text.value else f"error {code}"
            raise Unreachable("E221", "gpu", f"{name}: {cause}", "look at nvidia-smi and dmesg")
