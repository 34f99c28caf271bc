"""How memory of a GPU is registered with an RDMA device: as a dma-buf where all take it, else by its address (nvidia-peermem)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.client.movers.interface import torch_cuda
from kvstore.client.movers.libcuda import LibCuda
from kvstore.errors import ConfigError, KvstoreError

Region = TypeVar("Region")


@dataclass(frozen=True)
class Registered(Generic[Region]):
    region: Region
    way: str  # dma-buf or nvidia-peermem
    flushes: bool  # kernels see what a NIC wrote after a flush only
    cuda: LibCuda

    def flush(self, device: str) -> None:
        """After the NIC is done, where the GPU needs it before kernels see what was written."""
        if self.flushes:
            torch_cuda().mem_get_info(device)  # makes the GPU's context this thread's
            self.cuda.flush_rdma_writes()


def register_gpu(
    what: str,
    device: str,
    address: int,
    extent_bytes: int,
    add_dma_buf: Callable[[int, int, int], Region],
    add: Callable[[int, int], Region],
) -> Registered[Region]:
    """`device` as torch names it; `add_dma_buf` takes descriptor, bytes and address, `add` address and bytes. ConfigError E156 with both
    reasons where neither way works; `what` begins its line."""
    try:
        torch_cuda().mem_get_info(device)  # makes the GPU's context this thread's
        cuda = LibCuda()
        gpu = cuda.gpu(int(device.partition(":")[2] or 0))
    except OSError as error:
        raise ConfigError("E156", what, str(error), "install NVIDIA's driver") from None
    why = "the GPU exports no dma-buf"
    if gpu.dma_buf:
        try:
            descriptor, base, size = cuda.dma_buf(address)
            try:
                return Registered(add_dma_buf(descriptor, size, base), "dma-buf", not gpu.writes_ordered, cuda)
            finally:
                os.close(descriptor)  # the registration holds what it needs
        except KvstoreError as error:
            why = f"dma-buf: {error.cause}"
    try:
        return Registered(add(address, extent_bytes), "nvidia-peermem", not gpu.writes_ordered, cuda)
    except KvstoreError as error:
        fix = "kvstore doctor shows what is missing; or go through host memory"
        raise ConfigError("E156", what, f"{why}; by address: {error.cause}", fix) from None
