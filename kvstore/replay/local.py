"""A local cluster sized for a trace: logical capacity turned into what each daemon counts, time taken from the trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstore.clustermap import DEFAULT_CLASSES, NO_RULES, RetentionClass, Rules
from kvstore.layout import Layout
from kvstore.replay.capacity import TraceShape, node_capacity_bytes
from kvstore.server.local import LocalCluster

BUCKET_SECONDS = 1  # LRU is exact but for ties inside a bucket; a second of the conversation trace holds 3 requests
SHARDS = 12
UNLIMITED_HEADROOM = 1.5


def local_cluster(
    directory: Path,
    shape: TraceShape,
    capacity_blocks: int | None,
    *,
    layout: Layout,
    nodes: int = 12,
    io: str | None = None,
    bucket_seconds: int = BUCKET_SECONDS,
    virtual_clock: bool = True,
    classes: Sequence[RetentionClass] = DEFAULT_CLASSES,
    rules: Rules = NO_RULES,
) -> LocalCluster:
    """A cluster, not started yet, that keeps `capacity_blocks` logical blocks (None: all of the trace's)."""
    blocks = shape.unique_blocks if capacity_blocks is None else capacity_blocks
    per_node = node_capacity_bytes(blocks, shape, shards=SHARDS, nodes=nodes)
    return LocalCluster(
        directory,
        nodes,
        capacity_bytes=int(per_node * UNLIMITED_HEADROOM) + (64 << 20) if capacity_blocks is None else per_node,
        io=io,
        cluster_id="replay",
        bucket_seconds=bucket_seconds,
        classes=classes,
        rules=rules,
        extra_arguments=("--virtual-clock",) if virtual_clock else (),
    )
