"""Pages of an engine that has a tensor for each layer: (pages, page rows, row bytes), as vLLM and its like. One mover fills them all.

    block   | ... | part: row 0 | row 1 | ... | ...     of each tensor one Part (kernels/gpu/paging.py): offset, rows, row bytes
    pages   of each part, uint8 (pages, page rows, row bytes): row r of a request lies in page table[r // page rows], at r % page rows

One block table serves all tensors, so part.rows / page rows is the same for all. Any page size goes, smaller or larger than a block. What a
block and a page have in common, gcd(part.rows, page rows) rows, is a *unit*, and moved in one piece:

    unit u = block x units of a block + i     lies in page table[u // units of a page], at slot u % units of a page

A tensor's rows move with the columns in which its part ends. What comes plane by plane is moved tensor by tensor, each with its event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.client.movers.choose import AUTO, chosen, make_mover, measure
from kvstore.client.movers.cuda import DEVICE_TO_HOST, HOST_TO_DEVICE, CudaMover, CudaWay
from kvstore.client.movers.interface import DoneEvent, Event, Mover, Way, held_in
from kvstore.client.movers.kernel import KernelMover, tensor_of
from kvstore.client.native import U8
from kvstore.errors import ConfigError, LayoutError
from kvstore.kernels.gpu import PageTable, Part, gather, scatter

if TYPE_CHECKING:
    from torch import Tensor

Places = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class LayerPages:
    """`pages`: uint8 (pages, page rows, row bytes) of one layer and kind of row, a torch tensor or in host RAM also a numpy array."""

    part: Part
    pages: Tensor | U8

    @property
    def columns(self) -> slice:
        """Of a block."""
        return slice(self.part.offset_bytes, self.part.offset_bytes + self.part.rows * self.part.row_bytes)

    def flat(self) -> Any:
        """(pages, page bytes). Raises LayoutError E513."""
        shape, part = tuple(self.pages.shape), self.part
        sound = len(shape) == 3 and shape[2] == part.row_bytes and str(self.pages.dtype).removeprefix("torch.") == "uint8"
        together = sound and self._strides()[2] == 1 and (shape[1] == 1 or self._strides()[1] == part.row_bytes)
        if not together or min(shape) < 1:
            cause = f"{self.pages.dtype} {shape}, strides {self._strides()}, for rows of {part.row_bytes} bytes"
            raise LayoutError(
                "E513", "pages of a layer", cause, "give (pages, page rows, row bytes) of uint8, the rows of a page back to back"
            )
        return self.pages.reshape(shape[0], -1)

    def _strides(self) -> tuple[int, ...]:
        return tuple(self.pages.strides if isinstance(self.pages, np.ndarray) else self.pages.stride())


class PagedMover(Mover):
    """As every Mover, but `table` names `pages_for(n)` pages for n rows of blocks, the first of which begins a page.

    `layers`: the columns of each tensor, to be moved one by one."""

    name = "paged"

    def __init__(self, mover: str, tensors: Sequence[LayerPages], block_bytes: int) -> None:
        """`mover`: cpu, cuda, cuda-kernel or auto. Raises LayoutError E513 for tensors that do not fit, ConfigError E156, E157."""
        if not tensors:
            raise LayoutError("E513", "pages", "are of no layer", "give a tensor for each layer")
        flat = [each.flat() for each in tensors]
        super().__init__(flat[0])
        rows, page_rows = tensors[0].part.rows, int(tensors[0].pages.shape[1])
        unit = gcd(rows, page_rows)
        self.units_of_block, self.units_of_page = rows // unit, page_rows // unit
        for each, pages in zip(tensors, flat, strict=True):
            alike = each.part.rows * page_rows == rows * int(each.pages.shape[1])
            device = "cpu" if isinstance(pages, np.ndarray) else str(pages.device)
            if not alike or len(pages) != self.pages_count or device != self.device or each.columns.stop > block_bytes:
                cause = (
                    f"{tuple(each.pages.shape)} on {device} for {each.part}; the first: {tuple(tensors[0].pages.shape)} on {self.device}"
                )
                raise LayoutError("E513", "pages of a layer", cause, "give tensors on one device that one block table serves")
        if mover == "loopback":
            raise ConfigError("E156", "mover loopback", "fills one tensor of whole blocks", "use cpu, cuda or cuda-kernel")
        self.inner = make_mover(_name(mover, self.device), flat[0])  # its memory and streams
        self.pages, self.row_bytes, self.tensors = flat, block_bytes, tuple(tensors)
        self.layers = [each.columns for each in tensors]

    def pages_for(self, blocks: int) -> int:
        return -(-blocks * self.units_of_block // self.units_of_page)

    def adopt(self, memory: U8) -> None:
        self.inner.adopt(memory)

    def close(self) -> None:
        super().close()
        self.inner.close()

    def _way(self, rows: U8, places: Places, to_device: bool) -> Way:
        if isinstance(self.inner, CudaMover):
            held_in(self.inner._pinned, rows, self.row_bytes)
            return (_Kernel if isinstance(self.inner, KernelMover) else _Copies)(self, self.inner, rows, places, to_device)
        return _Copy(self, rows, places, to_device)

    def ends_in(self, columns: slice) -> list[int]:
        """Tensors whose last byte of a block lies there."""
        return [number for number, each in enumerate(self.layers) if columns.start < each.stop <= columns.stop]

    def begins_page(self, block: int) -> bool:
        return block * self.units_of_block % self.units_of_page == 0

    def layers_in(self, columns: slice) -> list[slice]:
        ends = sorted({self.layers[number].stop for number in self.ends_in(columns)} | {columns.stop})
        return [slice(first, end) for first, end in pairwise([columns.start, *ends])]

    def units(self, blocks: int, places: Places) -> tuple[Places, Places]:
        """Page and slot of each unit: (blocks, units of a block)."""
        unit = np.arange(blocks * self.units_of_block).reshape(blocks, self.units_of_block)
        return places[unit // self.units_of_page], unit % self.units_of_page


def _name(mover: str, device: str) -> str:
    if mover != AUTO:
        return mover
    if device == "cpu":
        return "cpu"
    return chosen([each for each in measure(device, blocks=64, rounds=3) if each.name != "loopback"]) or "cuda"


class _Copy:
    """In host RAM."""

    def __init__(self, mover: PagedMover, rows: U8, places: Places, to_device: bool) -> None:
        self._mover, self._rows, self._to_device = mover, rows, to_device
        self._units = mover.units(len(rows), places)

    def start(self, columns: slice, end: float) -> Event:
        mover, count = self._mover, len(self._rows)
        for number in mover.ends_in(columns) if count else ():
            pages = mover.pages[number]
            theirs = (pages if isinstance(pages, np.ndarray) else pages.numpy()).reshape(mover.pages_count, mover.units_of_page, -1)
            mine = self._rows[:, mover.layers[number]].reshape(count, mover.units_of_block, -1)
            if self._to_device:
                theirs[self._units] = mine
            else:
                mine[:] = theirs[self._units]
        return DoneEvent()

    def settle(self, seconds: float) -> bool:
        return True


class _Copies(CudaWay):
    """By the copy engine: a batch for each tensor."""

    def __init__(self, paged: PagedMover, inner: CudaMover, rows: U8, places: Places, to_device: bool) -> None:
        super().__init__(inner, rows, to_device)
        self._paged = paged
        self._pages, self._slots = (each.astype(np.uint64) for each in paged.units(len(rows), places))
        self._mine = np.uint64(rows.ctypes.data) + np.arange(len(rows), dtype=np.uint64)[:, None] * np.uint64(rows.strides[0])

    def put(self, columns: slice) -> None:
        paged, runtime, stream = self._paged, self.mover.runtime, self.stream.cuda_stream
        for number in paged.ends_in(columns):
            pages, layer = paged.pages[number], paged.layers[number]
            width = (layer.stop - layer.start) // paged.units_of_block
            units = np.arange(paged.units_of_block, dtype=np.uint64) * np.uint64(width)
            mine = (self._mine + np.uint64(layer.start) + units).ravel()
            theirs = np.uint64(pages.data_ptr()) + self._pages * np.uint64(pages.stride(0)) + self._slots * np.uint64(width)
            to, source = (theirs.ravel(), mine) if self.to_device else (mine, theirs.ravel())
            if runtime.batches:
                runtime.copy_batch(to, source, width, stream)
                continue
            kind = HOST_TO_DEVICE if self.to_device else DEVICE_TO_HOST
            for at, origin in zip(to.tolist(), source.tolist(), strict=True):
                runtime.copy_2d(at, width, origin, width, width, 1, kind, stream)


class _Kernel(CudaWay):
    """A launch for each tensor."""

    def __init__(self, paged: PagedMover, inner: CudaMover, rows: U8, places: Places, to_device: bool) -> None:
        super().__init__(inner, rows, to_device)
        self._paged, self._tensor = paged, tensor_of(rows)
        self._table = PageTable(places.tolist(), paged.pages_count, paged.device)

    def put(self, columns: slice) -> None:
        for number in self._paged.ends_in(columns):
            move_layer(self._tensor, self._paged.tensors[number], self._table, self.to_device)


def move_layer(rows: Tensor, layer: LayerPages, table: PageTable, to_device: bool) -> None:
    """One tensor's part of blocks (n, block bytes) to or from its pages, by Triton."""
    pages: Any = layer.pages
    (scatter if to_device else gather)(rows, layer.part, pages, table)
