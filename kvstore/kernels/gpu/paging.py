"""Scatter of planes into an engine's paged KV, and gather from it.

An engine keeps, for each layer and kind of row, pages: uint8 (pages, page_rows, row_bytes), rows contiguous, else any strides. A block
table names the pages of a request in order: row r of the request lies in page table[r // page_rows], at r % page_rows. On our side, a
*part* is what one such cache takes from a block: rows back to back at some offset, usually a section of the layout, its keys or its values.

    block   | ... | part: row 0 | row 1 | ... | ...       offset_bytes counts from the block's first byte
    planes  uint8 (shards, n, shard_bytes) as they arrive; a row may cross from one shard into the next
            or (n, bytes): blocks, or planes of blocks, that lie whole
            on the GPU of the pages, or in pinned host memory, which the kernel then reads or writes across the bus
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import LayoutError
from kvstore.kernels.gpu.launch import kernels, on, power_of_two, require, whole_programs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TILE_BYTES = 4096  # one program of 128 threads: four moves of 8 bytes a thread in flight
TILE_ELEMENTS_MAX = 1 << 15  # where programs are interpreted


@dataclass(frozen=True)
class Part:
    """`rows` rows of `row_bytes` each, back to back from byte `offset_bytes` of a block."""

    offset_bytes: int
    rows: int
    row_bytes: int

    def __post_init__(self) -> None:
        require(self.offset_bytes >= 0 and self.rows > 0 and self.row_bytes > 0, f"{self}", "an offset is at least 0, sizes at least 1")


class PageTable:
    """The pages of one request, in order, out of `pages_count`: checked once, on the host, and kept where the kernels read it.

    LayoutError E509 for a page that is not there and for one that is named twice: two rows would want one place.
    """

    def __init__(self, pages: Sequence[int], pages_count: int, device: torch.device | str) -> None:
        import torch

        table = np.array(pages, np.int64)
        if table.ndim != 1 or ((table < 0) | (table >= pages_count)).any():
            raise LayoutError("E509", "block table", f"names a page that is not one of 0 to {pages_count - 1}")
        if len(np.unique(table)) != len(table):
            raise LayoutError("E509", "block table", "names a page twice")
        self.pages_count = pages_count
        self.pages = torch.from_numpy(table).to(device)

    def __len__(self) -> int:
        return len(self.pages)


def scatter(
    planes: Tensor,
    part: Part,
    pages: Tensor,
    table: PageTable,
    *,
    first_row: int = 0,
    plane_offset_bytes: int = 0,
    good: Tensor | None = None,
) -> None:
    """Writes the part of each of n blocks into `pages`; asynchronous on a GPU. Row 0 of the first block is row `first_row` of the table.

    `planes` begins at byte `plane_offset_bytes` of the blocks. `good` (n,) uint8: rows of blocks where it is 0 are left alone.
    LayoutError E508 for buffers that do not fit.
    """
    _move(planes, part, pages, table, first_row, plane_offset_bytes, good, gather=False)


def gather(planes: Tensor, part: Part, pages: Tensor, table: PageTable, *, first_row: int = 0, plane_offset_bytes: int = 0) -> None:
    """The inverse: fills the part of each of n blocks in `planes` from `pages`. Other bytes of `planes`, padding too, are left alone."""
    _move(planes, part, pages, table, first_row, plane_offset_bytes, None, gather=True)


def _move(
    planes: Tensor,
    part: Part,
    pages: Tensor,
    table: PageTable,
    first_row: int,
    plane_offset_bytes: int,
    good: Tensor | None,
    *,
    gather: bool,
) -> None:
    import torch

    if planes.ndim == 2:
        planes = planes.unsqueeze(0)
    _check(planes, part, pages, table, first_row, plane_offset_bytes, good)
    shards, blocks, shard_bytes = planes.shape
    if blocks == 0:
        return
    # Rows that lie back to back in the pages are moved as one long row.
    together = gcd(part.rows, pages.shape[1], first_row) if pages.stride(1) == part.row_bytes else 1
    row_bytes = part.row_bytes * together
    part_at = part.offset_bytes - plane_offset_bytes
    places = (planes.data_ptr(), planes.storage_offset(), pages.data_ptr(), pages.storage_offset())
    strides = (planes.stride(0) if shards > 1 else 0, planes.stride(1), pages.stride(0), pages.stride(1) * together)
    aligned = gcd(16, row_bytes, part_at, shard_bytes, *places, *strides)
    width = min(8, aligned)
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    elements = part.rows * part.row_bytes // width
    tile = min(TILE_ELEMENTS_MAX, power_of_two(elements)) if whole_programs(pages) else TILE_BYTES // 8
    tiles = -(-elements // tile)
    move_part = kernels("paging_kernel", pages).move_part
    with on(pages):
        move_part[(blocks * tiles,)](
            pages.flatten(1).view(dtype) if together > 1 else pages.view(dtype),
            planes.view(dtype) if shards > 1 else planes[0].view(dtype),
            table.pages,
            table.pages if good is None else good,
            first_row // together,
            part_at // aligned,
            *(stride // aligned for stride in strides),
            UNIT=aligned // width,
            ROWS=part.rows // together,
            ROW=row_bytes // width,
            PAGE_ROWS=pages.shape[1] // together,
            SHARD=shard_bytes // width,
            TILES=tiles,
            TILE=tile,
            CHECKED=good is not None,
            GATHER=gather,
        )


def _check(
    planes: Tensor, part: Part, pages: Tensor, table: PageTable, first_row: int, plane_offset_bytes: int, good: Tensor | None
) -> None:
    for name, tensor in (("planes", planes), ("pages", pages)):
        require(
            str(tensor.dtype) == "torch.uint8" and tensor.ndim == 3,
            name,
            f"{tensor.dtype} {tuple(tensor.shape)}, not uint8 of 3 dimensions",
        )
        require(tensor.stride(2) == 1, name, f"strides {tuple(tensor.stride())}: the last must be 1")
    shards, blocks, shard_bytes = planes.shape
    begin = part.offset_bytes - plane_offset_bytes
    end = begin + part.rows * part.row_bytes
    require(begin >= 0 and end <= shards * shard_bytes, f"{part}", f"does not lie inside a plane of {shards} x {shard_bytes} bytes")
    require(pages.shape[2] == part.row_bytes, "pages", f"rows of {pages.shape[2]} bytes for a part of {part.row_bytes}")
    require(len(pages) >= table.pages_count, "pages", f"{len(pages)} pages; the table was checked for {table.pages_count}")
    rows = first_row + blocks * part.rows
    require(
        first_row >= 0 and rows <= len(table) * pages.shape[1],
        "block table",
        f"{len(table)} pages of {pages.shape[1]} rows; {rows} are needed",
    )
    if good is not None:
        sound = str(good.dtype) == "torch.uint8" and good.shape == (blocks,) and good.is_contiguous()
        require(sound, "good", f"{good.dtype} {tuple(good.shape)}, not uint8 ({blocks},)")
    pinned = pages.is_cuda and not planes.is_cuda and planes.is_pinned()
    devices = {tensor.device for tensor in (pages, table.pages, *([] if pinned else [planes]), *([] if good is None else [good]))}
    require(len(devices) == 1, "tensors", f"lie on {sorted(map(str, devices))}")
