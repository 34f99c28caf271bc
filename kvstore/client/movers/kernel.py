"""GPU memory by a kernel that reads pinned host memory: every layer is one launch, whatever the table looks like.

Threads of the GPU fetch over PCIe what they store into the pages, so that small pieces cost no more than large ones. The kernel is the
scatter of kvstore/kernels/gpu, given rows in host memory; the way back is its gather.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.client.movers.cuda import CudaMover, CudaWay
from kvstore.client.movers.interface import held_in
from kvstore.client.native import U8
from kvstore.errors import ConfigError
from kvstore.kernels.gpu import PageTable, Part, gather, scatter

if TYPE_CHECKING:
    from torch import Tensor


class KernelMover(CudaMover):
    name = "cuda-kernel"

    def __init__(self, pages: Tensor) -> None:
        super().__init__(pages)
        if find_spec("triton") is None:
            raise ConfigError("E156", f"mover {self.name}", "triton is not installed", "pip install 'kvstore[gpu]'")

    def _way(self, rows: U8, places: np.ndarray[Any, np.dtype[np.int64]], to_device: bool) -> CudaWay:
        held_in(self._pinned, rows, self.row_bytes)  # a kernel reads no other memory
        return _Kernel(self, rows, PageTable(places.tolist(), self.pages_count, self.device), to_device)


class _Kernel(CudaWay):
    def __init__(self, mover: CudaMover, rows: U8, table: PageTable, to_device: bool) -> None:
        super().__init__(mover, rows, to_device)
        self._table, self._tensor = table, tensor_of(rows)

    def put(self, columns: slice) -> None:
        move_columns(self._tensor, self.mover.pages, self._table, columns, self.to_device)


def move_columns(rows: Tensor, pages: Any, table: PageTable, columns: slice, to_device: bool) -> None:
    """Columns of rows (n, row bytes) to or from those of pages (pages, row bytes), by Triton."""
    part = Part(columns.start, 1, columns.stop - columns.start)
    (scatter if to_device else gather)(rows, part, pages[:, columns].unsqueeze(1), table)


def tensor_of(rows: U8) -> Tensor:
    """The same memory, also of rows that may only be read: torch has no such thing, so nobody may write to it then."""
    import torch

    if rows.flags.writeable:
        return torch.from_numpy(rows)
    extent = (len(rows) - 1) * rows.strides[0] + rows.shape[1] if len(rows) else 0
    flat: U8 = np.ctypeslib.as_array((ctypes.c_uint8 * extent).from_address(rows.ctypes.data))
    return torch.from_numpy(np.lib.stride_tricks.as_strided(flat, rows.shape, rows.strides))
