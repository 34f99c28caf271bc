"""The self-test of a local cluster: store, take nodes away, read back equal, bring them back."""

from __future__ import annotations

import secrets
import signal
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.client import Client, ClientConfig
from kvstore.errors import StorageError
from kvstore.keys import KeyChain, Namespace
from kvstore.layout import PRESETS
from kvstore.placement import Placement
from kvstore.server.local import LocalCluster

BLOCKS: Final = 128  # 14.6 MB: two full extents
DEADLINE_SECONDS: Final = 20.0


@dataclass(frozen=True)
class SelfTest:
    """What was done. It raised if anything was not as it must be."""

    bytes: int
    nodes_stopped: int
    seconds: float


def self_test(cluster: LocalCluster) -> SelfTest:
    """Stores blocks nobody else has (class batch: gone after an hour), stops as many nodes as may be lost, reads, compares, restarts them.

    Raises StorageError E402 where what comes back is short or not equal.
    """
    started = time.monotonic()
    layout = PRESETS["v41"]
    chain = KeyChain(Namespace(weights=secrets.token_bytes(32), kv_dtype="self-test", layout_digest=layout.digest()))
    keys = chain.extend(np.arange(BLOCKS * chain.block_tokens, dtype=np.uint32))
    written = np.frombuffer(secrets.token_bytes(BLOCKS * layout.block_bytes), np.uint8).reshape(BLOCKS, layout.block_bytes)
    stopped = list(range(Placement(cluster.map).losses_survived().nodes))
    with Client(cluster.map, layout=layout, config=ClientConfig(ask_first=False)) as client:
        client.store(keys, written, first_block=0, retention_class="batch").result(DEADLINE_SECONDS)
        try:
            for node in stopped:
                cluster.kill(node, signal.SIGKILL)
            ticket = client.lookup(keys, retention_class="batch", deadline_seconds=DEADLINE_SECONDS)
            read = np.zeros_like(written)
            loaded = client.load(ticket, read, deadline_seconds=DEADLINE_SECONDS)
        finally:
            for node in stopped:
                if not cluster.alive(node):
                    cluster.restart(node)
    if loaded.blocks != BLOCKS:
        raise StorageError("E402", "self-test", f"{loaded.blocks} of {BLOCKS} blocks came back", "read the logs; kvstore up --fresh")
    if not np.array_equal(read, written):
        raise StorageError("E402", "self-test", "what came back is not what was stored", "keep the directory and report it")
    return SelfTest(written.nbytes, len(stopped), time.monotonic() - started)
