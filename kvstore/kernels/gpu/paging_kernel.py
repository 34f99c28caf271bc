"""Between the data shards of a plane and an engine's pages. One kernel, both ways; all sizes are in elements of 1, 2, 4 or 8 bytes."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first_row"])
def move_part(
    pages,
    planes,
    table,
    good,
    first_row,  # of the first block, counted through the table
    part_at,  # where the part begins in its plane; this and the strides are counted in UNIT elements
    slot_stride,  # from a shard to the next of the same block
    block_stride,
    page_stride,
    row_stride,
    UNIT: tl.constexpr,  # what the compiler may know of alignment
    ROWS: tl.constexpr,  # of the part, in one block
    ROW: tl.constexpr,  # elements of a row
    PAGE_ROWS: tl.constexpr,
    SHARD: tl.constexpr,  # elements of a shard
    TILES: tl.constexpr,  # programs for one block
    TILE: tl.constexpr,
    CHECKED: tl.constexpr,  # move only blocks that are good
    GATHER: tl.constexpr,
):
    block = (tl.program_id(0) // TILES).to(tl.int64)
    at = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    inside = at < ROWS * ROW
    if CHECKED:
        inside = inside & (tl.load(good + block) != 0)
    row = first_row + block * ROWS + at // ROW
    page = tl.load(table + row // PAGE_ROWS, mask=inside, other=0).to(tl.int64)
    there = pages + page * (page_stride * UNIT) + row % PAGE_ROWS * (row_stride * UNIT) + at % ROW
    in_plane = part_at * UNIT + at
    here = planes + (in_plane // SHARD).to(tl.int64) * (slot_stride * UNIT) + block * (block_stride * UNIT) + in_plane % SHARD
    if GATHER:
        tl.store(here, tl.load(there, mask=inside), mask=inside)
    else:
        tl.store(there, tl.load(here, mask=inside), mask=inside)


PROBE = move_part
