"""From logical block bytes, which is how people and the oracle count, to what a node counts: records with head, checks and padding.

A cache of n blocks keeps (its share of) n blocks' records. How many bytes that is depends on how the trace's prompts fall into extents, so
the trace is cut once as an infinite cache would store it, and the mean is taken. On the conversation trace a record takes 1.01 times its
shards at true size (113,920 B a block) and 4.9 times at 320 B a block, where head and padding rule: without this, tiny blocks would be
compared with the LRU of a far larger cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.errors import UsageError
from kvstore.extents import cut
from kvstore.gc.policy import EvictionPolicy
from kvstore.layout import Layout
from kvstore.record import EARLIER_MAX, head_bytes_of, padded_bytes
from kvstore.replay.exact import InfiniteCache
from kvstore.replay.requests import Request
from kvstore.units import parse_bytes

CHECK_BYTES = 24  # of each (plane, block): sum and digest


@dataclass(frozen=True)
class TraceShape:
    """What a trace stores in an infinite cache, and how large that is on the nodes."""

    requests: int
    unique_blocks: int
    extents: int
    record_bytes: int  # of one shard each, padded as on disk

    @property
    def record_bytes_per_block(self) -> float:
        return self.record_bytes / self.unique_blocks if self.unique_blocks else 0.0


def record_bytes(block_count: int, earlier_count: int, layout: Layout, k: int) -> int:
    """Bytes on disk of one shard of an extent: head, checks, shards, padding."""
    planes = layout.planes(k)
    shards = block_count * sum(plane.shard_bytes for plane in planes)
    return padded_bytes(head_bytes_of(len(planes), earlier_count, block_count) + CHECK_BYTES * len(planes) * block_count + shards)


def shape_of(requests: Iterable[Request], layout: Layout, k: int) -> TraceShape:
    cache = InfiniteCache()
    count = extents = total = 0
    for request in requests:
        count += 1
        blocks = request.block_count
        hits = cache.leading_hits(request.ids())
        for span in cut(hits, blocks - hits, layout):
            extents += 1
            # A chain's earlier extents are known to the writer; how long they are is not known here: full ones are the common case.
            earlier = min(EARLIER_MAX, -(-span.start // layout.blocks_per_extent_max))
            total += record_bytes(span.count, earlier, layout, k)
    return TraceShape(count, cache.block_count, extents, total)


def capacity_blocks(text: str, shape: TraceShape, layout: Layout) -> int | None:
    """Blocks that "25%" (of the trace's unique blocks), "8GB" (logical block bytes) or "unlimited" (None) stand for. Raises UsageError."""
    if text == "unlimited":
        return None
    if percent := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip()):
        blocks = int(shape.unique_blocks * float(percent[1]) / 100)
    else:
        blocks = parse_bytes(text, "--capacity") // layout.block_bytes
    if blocks < 1:
        raise UsageError("E131", f'--capacity "{text}"', f"holds no block of {layout.block_bytes} bytes", "give more, or a share as in 25%")
    return blocks


def node_capacity_bytes(blocks: int, shape: TraceShape, *, shards: int, nodes: int) -> int:
    """The capacity with which each node, as eviction goes up and down between its marks, holds its share of `blocks` logical blocks."""
    held = blocks * shape.record_bytes_per_block * shards / nodes
    policy = EvictionPolicy.of_classes()
    capacity = held
    for _ in range(60):  # the marks are within 8% of the capacity, so each round leaves less than a tenth of the error
        capacity += held - (policy.high_bytes(int(capacity)) + policy.low_bytes(int(capacity))) / 2
    return int(capacity)
