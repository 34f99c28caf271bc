"""A node that came back is asked again as soon as it decides, also while it is still held for down."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
from client_tools import WAIT_SECONDS, processes_of
from server_tools import until

from kvstore.client import Client, ClientConfig
from kvstore.keys import Namespace, external_keys
from kvstore.layout import Layout

BLOCK_BYTES = 640


def test_two_other_nodes_may_stop_right_after_two_came_back(tmp_path: Path) -> None:
    layout = Layout.single(BLOCK_BYTES)
    keys = external_keys(Namespace(weights=b"w", kv_dtype="f32", layout_digest=layout.digest()), b"", [b"%d" % i for i in range(20)])
    blocks = np.random.default_rng(7).integers(0, 256, (20, BLOCK_BYTES), np.uint8)
    with processes_of(tmp_path) as cluster:
        config = ClientConfig(promise_reuse_seconds=0)
        with Client(cluster.map, layout=layout, config=config) as client:
            assert client.store(keys, blocks, first_block=0).result(WAIT_SECONDS).extents_degraded == 0
            client.flush(WAIT_SECONDS)
            for node in (0, 1):
                cluster.kill(node, signal.SIGKILL)
            for _ in range(5):  # the client learns that both are gone, and holds them for down longer and longer
                until(lambda: client.lookup(keys).hit_blocks == 20, "a whole hit")  # at first a starved third may seem silent
            for node in (0, 1):
                cluster.restart(node)
            for node in (2, 3):
                cluster.kill(node, signal.SIGSTOP)
            assert client.lookup(keys).hit_blocks == 20
            for node in (2, 3):
                cluster.kill(node, signal.SIGCONT)
