"""How a run of consecutive blocks is cut into extents, the unit of placement, index, I/O, recency and eviction."""

from dataclasses import dataclass

from kvstore.errors import LayoutError
from kvstore.layout import K_DEFAULT, Layout


@dataclass(frozen=True)
class ExtentSpan:
    """Blocks [start, start + count) of a chain; `start` is an ordinal in the chain and names the extent by that block's key."""

    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count

    def shard_bytes(self, layout: Layout, k: int = K_DEFAULT) -> int:
        """Bytes of one shard of this extent over all planes, without the record's head and checks."""
        return self.count * sum(plane.shard_bytes for plane in layout.planes(k))


def cut(start_block: int, block_count: int, layout: Layout) -> list[ExtentSpan]:
    """Cuts blocks [start_block, start_block + block_count) into full extents and one rest, in order. No blocks: no extents.

    Cuts count from start_block, not from block 0: extents of several writers overlap, and any block range inside one can be read.
    """
    if start_block < 0 or block_count < 0:
        raise LayoutError("E511", f"blocks {start_block} + {block_count}", "negative")
    step = layout.blocks_per_extent_max
    stop = start_block + block_count
    return [ExtentSpan(at, min(step, stop - at)) for at in range(start_block, stop, step)]
