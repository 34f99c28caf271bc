"""Plain references of the kernels in numpy, one row, one block at a time: the oracles of their tests. Sums: kernels/hash_reference.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.kernels.gpu.paging import Part

U8 = npt.NDArray[np.uint8]


def scatter_reference(
    planes: U8, part: Part, pages: U8, table: Sequence[int], first_row: int = 0, plane_offset_bytes: int = 0, good: U8 | None = None
) -> None:
    """planes (shards, n, shard_bytes) into pages (pages, page_rows, row_bytes), in place."""
    for b in range(planes.shape[1]):
        if good is not None and not good[b]:
            continue
        block = planes[:, b].reshape(-1)
        for r in range(part.rows):
            at = part.offset_bytes - plane_offset_bytes + r * part.row_bytes
            page, slot = divmod(first_row + b * part.rows + r, pages.shape[1])
            pages[table[page], slot] = block[at : at + part.row_bytes]


def gather_reference(planes: U8, part: Part, pages: U8, table: Sequence[int], first_row: int = 0, plane_offset_bytes: int = 0) -> None:
    """pages into planes, in place."""
    shards, blocks, shard_bytes = planes.shape
    for b in range(blocks):
        block = planes[:, b].reshape(-1)  # a copy
        for r in range(part.rows):
            at = part.offset_bytes - plane_offset_bytes + r * part.row_bytes
            page, slot = divmod(first_row + b * part.rows + r, pages.shape[1])
            block[at : at + part.row_bytes] = pages[table[page], slot]
        planes[:, b] = block.reshape(shards, shard_bytes)


def product(a: int, b: int) -> int:
    """a x b in GF(2^8) modulo 0x11D, by the school's method."""
    result = 0
    while b:
        result ^= a if b & 1 else 0
        a = a << 1 ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return result


PRODUCTS = np.array([[product(a, b) for b in range(256)] for a in range(256)], np.uint8)


def rebuild_reference(shards: U8, have: Sequence[int], lost: Sequence[int], coefficients: U8) -> None:
    """shards (k + m, bytes): writes rows `lost` from rows `have`, in place."""
    for j, number in enumerate(lost):
        shards[number] = 0
        for i, survivor in enumerate(have):
            shards[number] ^= PRODUCTS[coefficients[j, i]][shards[survivor]]
