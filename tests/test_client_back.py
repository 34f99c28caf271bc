"""A node that came back is asked again as soon as it decides, also while it is still held for down."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
from client_tools import WAIT_SECONDS, processes_of, until_whole
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
            assert client.store(keys, blocks, first_block=0).result(WAIT_SECONDS).blocks == 20
            until_whole(client, keys)

            def hit_when_two_came_back_and_others_stopped() -> bool:
                for node in (0, 1):
                    cluster.kill(node, signal.SIGKILL)
                for _ in range(5):  # the client learns that both are gone, and holds them for down longer and longer
                    until(lambda: client.lookup(keys).hit_blocks == 20, "a whole hit")
                for node in (0, 1):
                    cluster.restart(node)
                for node in (2, 3):
                    cluster.kill(node, signal.SIGSTOP)
                hit = client.lookup(keys).hit_blocks
                for node in (2, 3):
                    cluster.kill(node, signal.SIGCONT)
                until(lambda: client.lookup(keys).hit_blocks == 20, "a whole hit")
                return hit == 20

            # To a lookup a third node that has no processor for half a second is one that stopped: then all of it is done again.
            assert any(hit_when_two_came_back_and_others_stopped() for _ in range(3))
