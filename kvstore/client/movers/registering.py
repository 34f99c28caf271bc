"""How memory of a GPU is registered with an RDMA device: as a dma-buf where all take it, else by its address (nvidia-peermem).

Either way exactly the bytes that were named: nobody can write what else lies in their pages, or in the allocation that torch cut them from.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.client.movers.libcuda import Gpu, LibCuda
from kvstore.errors import ConfigError, KvstoreError

Region = TypeVar("Region")


@dataclass(frozen=True)
class Registered(Generic[Region]):
    region: Region
    way: str  # dma-buf or nvidia-peermem
    gpu: Gpu
    cuda: LibCuda

    def flush(self, *, always: bool = False) -> None:
        """After the NIC is done: kernels begun later see what it wrote. `always`: also where the GPU is said to need no flush, if its
        driver has one. Raises Unreachable E221."""
        if self.gpu.flushes and (always or not self.gpu.writes_ordered):
            with self.cuda.context(self.gpu.ordinal):
                self.cuda.flush_rdma_writes()


def register_gpu(
    what: str,
    device: str,
    address: int,
    size_bytes: int,
    add_dma_buf: Callable[[int, int, int, int], Region],
    add: Callable[[int, int], Region],
) -> Registered[Region]:
    """`device` as torch names it; `add_dma_buf` takes descriptor, offset into it, bytes and address, `add` address and bytes.

    ConfigError E156, begun by `what`, with both reasons where neither way works, and where kernels would not see what was written."""
    fix = "kvstore doctor shows what is missing; or go through host memory"
    try:
        cuda = LibCuda()
        gpu = cuda.gpu(int(device.partition(":")[2] or 0))
    except OSError as error:
        raise ConfigError("E156", what, str(error), "install NVIDIA's driver") from None
    except KvstoreError as error:
        raise ConfigError("E156", what, error.cause, error.fix) from None
    if not gpu.writes_ordered and not gpu.flushes:
        raise ConfigError("E156", what, "the GPU needs a flush after an RDMA device's writes, and its driver has none", fix)
    why = "the GPU exports no dma-buf"
    if gpu.dma_buf:
        try:
            with cuda.context(gpu.ordinal):
                descriptor, offset = cuda.dma_buf(address, size_bytes)
            try:
                return Registered(add_dma_buf(descriptor, offset, size_bytes, address), "dma-buf", gpu, cuda)
            finally:
                os.close(descriptor)  # the registration holds what it needs
        except KvstoreError as error:
            why = f"dma-buf: {error.cause}"
    if not gpu.rdma:
        raise ConfigError("E156", what, f"{why}; by address: the GPU lets no other device in", fix)
    try:
        return Registered(add(address, size_bytes), "nvidia-peermem", gpu, cuda)
    except KvstoreError as error:
        raise ConfigError("E156", what, f"{why}; by address: {error.cause}", fix) from None
