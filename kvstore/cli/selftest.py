"""The self-test of a local cluster: store, take nodes away, read back equal, bring them back."""

from __future__ import annotations

import secrets
import signal
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.client import Client, ClientConfig, StoreOutcome
from kvstore.client.native import U8
from kvstore.errors import StorageError
from kvstore.keys import KeyChain, Namespace
from kvstore.layout import PRESETS
from kvstore.placement import Placement
from kvstore.server.local import LocalCluster

BLOCKS: Final = 128  # 14.6 MB: two full extents
DEADLINE_SECONDS: Final = 20.0  # of the store, and again of the read
AGAIN_SECONDS: Final = 0.1  # and twice as long each time: where nodes are late, what came short is tried again until the deadline


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
    patient = ClientConfig(
        ask_first=False,
        connect_timeout_seconds=DEADLINE_SECONDS,
        stall_timeout_seconds=DEADLINE_SECONDS,
        store_deadline_seconds=DEADLINE_SECONDS,
    )
    with Client(cluster.map, layout=layout, config=patient) as client:
        _store_whole(client, keys, written)
        try:
            for node in stopped:
                cluster.kill(node, signal.SIGKILL)
            read = _read_whole(client, keys, layout.block_bytes)
        finally:
            for node in stopped:
                if not cluster.alive(node):
                    cluster.restart(node)
    if not np.array_equal(read, written):
        raise StorageError("E402", "self-test", "what came back is not what was stored", "keep the directory and report it")
    return SelfTest(written.nbytes, len(stopped), time.monotonic() - started)


def _store_whole(client: Client, keys: U8, written: U8) -> None:
    until, pause = time.monotonic() + DEADLINE_SECONDS, AGAIN_SECONDS
    while True:
        stored = client.store(keys, written, first_block=0, retention_class="batch").result(2 * DEADLINE_SECONDS)
        if stored.outcome is StoreOutcome.STORED:
            return
        if time.monotonic() > until:
            fix = "kvstore status tells which node is not well; read its log"
            raise StorageError("E402", "self-test", f"the store stayed {stored.outcome.value} for {DEADLINE_SECONDS:.0f} s", fix)
        time.sleep(pause)
        pause *= 2


def _read_whole(client: Client, keys: U8, block_bytes: int) -> U8:
    """A store is done with k+1 shards: with m nodes gone, the last one may still be on its way."""
    until, pause = time.monotonic() + DEADLINE_SECONDS, AGAIN_SECONDS
    read = np.zeros((len(keys), block_bytes), np.uint8)
    while True:
        ticket = client.lookup(keys, retention_class="batch", deadline_seconds=max(AGAIN_SECONDS, until - time.monotonic()))
        loaded = client.load(ticket, read[: ticket.hit_blocks], deadline_seconds=max(AGAIN_SECONDS, until - time.monotonic()))
        if loaded.blocks == len(keys):
            return read
        if time.monotonic() > until:
            raise StorageError("E402", "self-test", f"{loaded.blocks} of {len(keys)} blocks came back", "read the logs; kvstore up --fresh")
        time.sleep(pause)
        pause *= 2
