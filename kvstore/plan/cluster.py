"""From disks to blocks, and back: what a record takes, what coding costs, what uneven disks and lost nodes do to the hit rate.

Every node evicts alone. An extent can be read while k of its k+m shards are there, so the (m+1)-th node of its group to let go decides:
a group's room is that of its (m+1)-th tightest node. The groups are those of the real placement.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from kvstore.clustermap import ClusterMap, Node
from kvstore.errors import UsageError
from kvstore.extents import cut
from kvstore.gc.policy import EvictionPolicy
from kvstore.layout import Layout
from kvstore.placement import Placement
from kvstore.plan.accesses import F64, I64
from kvstore.plan.reuse import Reuse
from kvstore.record import EARLIER_MAX
from kvstore.replay.capacity import record_bytes
from kvstore.units import parse_bytes

SPREAD_NODES: Final = 24  # enough to see how evenly groups fall: the spread does not depend on the number of nodes
NODES_MAX: Final = 512  # of a cluster that is described node by node
TYPICAL_EXTENT_BLOCKS: Final = 32  # where a log holds a sample and extents cannot be cut


@dataclass(frozen=True)
class Extents:
    """How an infinite cache would cut the prompts. `ordinal`: of the extent of each unique block in its chain, from 0."""

    count: int
    bytes_per_block: float  # of one shard's records
    ordinal: I64


def extents_of(reuse: Reuse, layout: Layout, k: int) -> Extents:
    accesses = reuse.accesses
    if accesses.sample < 1:
        each = record_bytes(TYPICAL_EXTENT_BLOCKS, 1, layout, k) / TYPICAL_EXTENT_BLOCKS
        return Extents(0, each, np.zeros(accesses.unique, np.int64))
    ordinal = np.zeros(accesses.unique, np.int64)
    spans: Counter[tuple[int, int]] = Counter()
    per_extent = layout.blocks_per_extent_max
    for start, count, hits in zip(accesses.starts.tolist(), accesses.counts.tolist(), reuse.hit_blocks().tolist(), strict=True):
        before = int(ordinal[accesses.ids[start + hits - 1]]) + 1 if hits else 0
        fresh = accesses.ids[start + hits : start + count]
        ordinal[fresh] = before + np.arange(len(fresh)) // per_extent
        for span in cut(hits, count - hits, layout):
            spans[span.count, min(EARLIER_MAX, -(-span.start // per_extent))] += 1
    total = sum(times * record_bytes(count, earlier, layout, k) for (count, earlier), times in spans.items())
    return Extents(sum(spans.values()), total / max(1, accesses.unique), ordinal)


def usable_bytes(size_bytes: int) -> float:
    """What of a disk holds records, as eviction goes up and down between its marks."""
    policy = EvictionPolicy.of_classes()
    return (policy.high_bytes(size_bytes) + policy.low_bytes(size_bytes)) / 2


def rooms(sizes: Sequence[float], weights: Sequence[float], k: int, m: int) -> F64:
    """Each placement group's room over its even share of all disks, ascending. One host a node."""
    mean = sum(weights) / len(weights)
    nodes = [
        Node(f"node-{at:03}", f"host-{at:03}", f"10.0.{at >> 8}.{at & 255}:7400", weight=float(weight) / mean)
        for at, weight in enumerate(weights)
    ]
    table = Placement(ClusterMap.local(nodes, k=k, m=m)).table()
    load = np.bincount(table.ravel(), minlength=len(nodes))
    with np.errstate(divide="ignore"):
        room = np.asarray(sizes, float) / load / (sum(sizes) / table.size)
    return np.sort(np.partition(room[table], m, axis=1)[:, m])


@lru_cache(maxsize=8)
def even_rooms(k: int, m: int) -> F64:
    """Of equal nodes: only how evenly groups fall counts."""
    count = max(SPREAD_NODES, k + m)
    return rooms([1.0] * count, [1.0] * count, k, m)


def hit_ratio_in(hit_ratio: Callable[[float], float], blocks: float, factors: F64) -> float:
    """Mean over the groups, each with its own room."""
    few = np.quantile(factors, np.linspace(0.025, 0.975, 20))
    return float(np.mean([hit_ratio(blocks * factor) for factor in few]))


def short_share(nodes: int, lost: int, k: int, m: int) -> float:
    """Extents that lose more than m of their k+m shards when `lost` of `nodes` go at once."""
    width, ways = k + m, math.comb(nodes, k + m)
    return sum(math.comb(lost, gone) * math.comb(nodes - lost, width - gone) for gone in range(m + 1, min(lost, width) + 1)) / ways


def loss_points(reuse: Reuse, extents: Extents, nodes: int, lost: int, k: int, m: int) -> float:
    """Points of hit rate gone at once: a prompt's hit ends at its first extent that cannot be read."""
    short = short_share(nodes, lost, k, m)
    hits = reuse.hits()
    by_ordinal = np.bincount(extents.ordinal[reuse.accesses.ids[hits]], reuse.tokens[hits])
    kept = float((by_ordinal * (1 - short) ** (np.arange(len(by_ordinal)) + 1)).sum())
    total = reuse.accesses.total_input_tokens
    return 100 * (float(by_ordinal.sum()) - kept) / total if total else 0.0


def parse_nodes(text: str) -> list[int]:
    """Bytes of each disk of "14x3.84TB" or "10x4TB+4x8TB". Raises UsageError."""
    sizes: list[int] = []
    for part in text.split("+"):
        match = re.fullmatch(r"\s*(\d{1,6})\s*x\s*(\S+)\s*", part)
        if not match:
            raise UsageError("E132", f'--nodes "{text}"', f'"{part.strip()}" is not understood', "write it as 14x3.84TB or 10x4TB+4x8TB")
        size = parse_bytes(match[2], "--nodes")
        if not size or not 0 < int(match[1]) <= NODES_MAX - len(sizes):
            raise UsageError("E131", f'--nodes "{text}"', "out of range", f"give 1 to {NODES_MAX} nodes with room on each")
        sizes += [size] * int(match[1])
    return sizes
