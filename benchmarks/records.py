"""Where the records of a prompt lie on the daemons' disks, read from the segment files themselves."""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator
from pathlib import Path

from benchmarks.prompts import Blocks
from benchmarks.rig import NODES
from kvstore.server.local import LocalCluster

ALIGN = 4096
MAGIC = 0x313043455253564B  # kernels/record.hpp: RECORD_MAGIC
# magic, version, head_bytes, head_sum, record_bytes, owner, extent key, write id, shard
HEAD = struct.Struct("<QIIQQ16s32sQB")


def records_in(segment: Path) -> Iterator[tuple[bytes, int, int, int]]:
    """Extent key, shard, offset and padded bytes of each record of a segment file."""
    size = segment.stat().st_size
    with segment.open("rb") as file:
        offset = 0
        while offset + HEAD.size <= size:
            file.seek(offset)
            magic, _, _, _, record_bytes, _, key, _, shard = HEAD.unpack(file.read(HEAD.size))
            if magic != MAGIC:
                offset += ALIGN  # the file's own head, a footer, a punched hole
                continue
            padded = -(-record_bytes // ALIGN) * ALIGN
            yield key, shard, offset, padded
            offset += padded


def record_places(cluster: LocalCluster, keys: Blocks, shards: Container[int]) -> list[tuple[Path, int, int]]:
    """(file, offset, bytes) of the records of these shards of the extents that begin at one of `keys`, chain order within a node."""
    wanted = {key.tobytes(): ordinal for ordinal, key in enumerate(keys)}
    places = [
        (wanted[key], node, segment, offset, size)
        for node in range(NODES)
        for segment in segments_of(cluster, node)
        for key, shard, offset, size in records_in(segment)
        if key in wanted and shard in shards
    ]
    return [(path, offset, size) for _, _, path, offset, size in sorted(places)]


def segments_of(cluster: LocalCluster, node: int) -> list[Path]:
    """Files of a node that may hold records: all but its index."""
    return [path for path in cluster.node_directory(node).rglob("*") if path.is_file() and path.suffix not in (".mdb", ".lock")]


def need_whole(cluster: LocalCluster, extents: int) -> None:
    """Raises where a node lacks its record of an extent: a store is done with eleven of twelve, and degraded with ten."""
    for node in range(NODES):
        held = len({(key, shard) for segment in segments_of(cluster, node) for key, shard, _, _ in records_in(segment)})
        if held < extents:
            raise RuntimeError(f"node {node} holds {held} of {extents} records")
