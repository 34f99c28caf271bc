"""Twelve daemons whose indexes hold as many extents as a full SSD's: entries without bytes, written before the daemons start."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np

from benchmarks.harness import Bench
from benchmarks.prompts import LAYOUT
from benchmarks.rig import NODES, Rig
from kvstore.client import Client, ClientConfig
from kvstore.kernels import _native
from kvstore.server.local import LocalCluster

BLOCKS_PER_EXTENT = 27  # the mean of agents' extents (docs/ARCHITECTURE.md)
BUCKET_SECONDS = 60
CAPACITY_BYTES = 1 << 40  # of a node: 10^6 such extents are 0.3 TB, so nothing is evicted
MAP_BYTES = 16 << 30
OWNER = bytes(16)
PIN_SECONDS = 1  # of the client: soon gone, so that lookups without a pin can be measured, too


def fill(directory: str, extents: int, seed: int) -> None:
    """One node's index, while no daemon runs on it."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 256, (extents, 32), dtype=np.uint8)
    write_ids = rng.integers(1, 1 << 63, extents, dtype=np.uint64)
    store = _native.Store(directory, capacity_bytes=CAPACITY_BYTES, index_map_bytes=MAP_BYTES, bucket_seconds=BUCKET_SECONDS)
    if not store.wait_started(60):
        raise RuntimeError(f"{directory} did not start")
    bucket = int(time.time()) // BUCKET_SECONDS
    stored = store.bulk_index(OWNER, keys, write_ids, block_count=BLOCKS_PER_EXTENT, block_bytes=LAYOUT.block_bytes, bucket=bucket)
    store.close(clean=True)
    if stored != extents:
        raise RuntimeError(f"{directory} took {stored} of {extents} extents")


def filled_rig(bench: Bench, stack: ExitStack) -> Rig:
    """Shared by the measurements that need full indexes. No promise is used again: each lookup asks the nodes."""
    cluster = LocalCluster(bench.directory / "full-index", NODES, capacity_bytes=CAPACITY_BYTES, bucket_seconds=BUCKET_SECONDS)
    with ThreadPoolExecutor(2) as pool:  # native, without the GIL
        for node in range(NODES):
            cluster.node_directory(node).mkdir(parents=True)
        list(pool.map(lambda node: fill(str(cluster.node_directory(node)), bench.scale.index_extents, node), range(NODES)))
    stack.enter_context(cluster)
    client = stack.enter_context(
        Client(cluster.map, layout=LAYOUT, config=ClientConfig(promise_reuse_seconds=0, promise_seconds=PIN_SECONDS))
    )
    return Rig(cluster, client)
