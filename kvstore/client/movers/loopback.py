"""The NIC copies: RDMA from this host to itself, by kernels/loopback.cpp. Pages may lie in host RAM (soft-RoCE does as well) or in a GPU.

Instead of the GPU's copy engine, which is slow at small pieces, the NIC writes them over PCIe into GPU memory. That memory is registered as
a dma-buf where the GPU exports one and libibverbs, kernel and NIC take it, else by its address, which works where nvidia-peermem is loaded.

A layer is there when the queue pair that its writes go to was told so, by an immediate behind them, and a flush is over where the GPU wants
one. That an acknowledgement came back would not do: it says that the writes were taken, not that they are in place.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.client.movers.cuda import told_so_far
from kvstore.client.movers.devices import device_for
from kvstore.client.movers.interface import DoneEvent, Event, Mover, held_in, poll_until
from kvstore.client.movers.registering import Registered, register_gpu
from kvstore.client.native import U8
from kvstore.errors import DeadlineExceeded
from kvstore.kernels._native import Loopback

if TYPE_CHECKING:
    from torch import Tensor

BEFORE_SECONDS: Final = 5.0  # what before() waits at most for a layer that the NIC has begun


class LoopbackMover(Mover):
    """`device`: an RDMA device, or "auto": device_for() says which. `registration`: of the pages: host, dma-buf or nvidia-peermem."""

    name = "loopback"
    pins = True

    def __init__(self, pages: Tensor | U8, device: str = "auto") -> None:
        super().__init__(pages)
        self._core = Loopback(device_for(device, self.device))
        self._memories: list[U8] = []
        self._regions: list[int] = []  # of each
        extent = (self.pages_count - 1) * self.page_stride + self.row_bytes
        self._gpu: Registered[int] | None = None
        if self.device == "cpu":
            self.registration = "host"
            self._pages_region = self._core.add(self.address, extent, True)
        else:
            add = partial(self._core.add, writable=True)
            self._gpu = register_gpu("mover loopback", self.device, self.address, extent, self._core.add_dma_buf, add)
            self._pages_region, self.registration = self._gpu.region, self._gpu.way

    def adopt(self, memory: U8) -> None:
        self._regions.append(self._core.add(int(memory.ctypes.data), memory.nbytes, bool(memory.flags.writeable)))
        self._memories.append(memory)

    def _way(self, rows: U8, places: np.ndarray[Any, np.dtype[np.int64]], to_device: bool) -> _Writes:
        before = None if self._gpu is None else told_so_far(self.device)  # a NIC does not know of streams
        return _Writes(self, rows, places, to_device, before)

    def flush(self) -> None:
        """After the NIC is done, where the GPU needs it before kernels see what was written."""
        if self._gpu is not None:
            self._gpu.flush()

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._core.settle(0.0)
            for region in (*self._regions, self._pages_region):
                self._core.remove(region)
            self._memories, self._regions = [], []


class _Writes:
    def __init__(
        self, mover: LoopbackMover, rows: U8, places: np.ndarray[Any, np.dtype[np.int64]], to_device: bool, before: Event | None
    ) -> None:
        self._mover, self._to_device, self._before = mover, to_device, before
        host, pages = mover._regions[held_in(mover._memories, rows, mover.row_bytes)], mover._pages_region
        self._source, self._target = (host, pages) if to_device else (pages, host)
        mine = np.uint64(rows.ctypes.data) + np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.strides[0])
        theirs = np.uint64(mover.address) + places.astype(np.uint64) * np.uint64(mover.page_stride)
        self._pieces = np.zeros((len(rows), 3), np.uint64)
        self._pieces[:, 0], self._pieces[:, 1] = (mine, theirs) if to_device else (theirs, mine)

    def start(self, columns: slice, end: float) -> Event:
        core = self._mover._core
        if self._before is not None:
            if not poll_until(self._before.done, end):
                raise DeadlineExceeded("E220", "move", "what the GPU was doing before took longer than the deadline", "give it more time")
            self._before = None
        pieces = self._pieces + np.array([columns.start, columns.start, 0], np.uint64)
        pieces[:, 2] = columns.stop - columns.start
        if not len(pieces):
            return DoneEvent()
        number = core.copy(self._source, self._target, pieces, end - time.monotonic())
        if not number:
            raise DeadlineExceeded("E220", "move", "the NIC did not take all of a layer in time", "give it more time")
        return _Written(self._mover, number, self._to_device)

    def settle(self, seconds: float) -> bool:
        return self._mover._core.settle(seconds)


class _Written:
    def __init__(self, mover: LoopbackMover, number: int, to_device: bool) -> None:
        self._mover, self._number, self._to_device, self._done = mover, number, to_device, False

    def done(self) -> bool:
        return self.wait(0.0)

    def wait(self, seconds: float) -> bool:
        if not self._done and self._mover._core.wait(self._number, seconds):
            if self._to_device:
                self._mover.flush()
            self._done = True
        return self._done

    def before(self, stream: Any) -> None:
        if not self.wait(BEFORE_SECONDS):
            raise DeadlineExceeded("E220", "move", f"a layer did not come in {BEFORE_SECONDS:g} s", "look at the NIC: kvstore doctor")
