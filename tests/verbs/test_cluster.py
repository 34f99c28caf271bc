"""Both native ends: what was stored comes back by RDMA, also past nodes that fail, and nothing late reaches memory that was handed on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
from client_tools import NO_REUSE, SMALL, V41, chain, load, store, until, until_whole
from server_tools import InProcess
from verbs.nodes import cluster

from kvstore.client import Client, LoadOutcome
from kvstore.layout import Layout

BLOCKS = 40


def read_back(client: Client, keys: object, data: np.ndarray) -> None:
    result, place = load(client, client.lookup(keys))  # type: ignore[arg-type]  # as chain() gave them
    assert (result.outcome, result.blocks) == (LoadOutcome.COMPLETE, len(data))
    assert np.array_equal(place, data)


def until_written(nodes: list[InProcess], count: int) -> None:
    until(lambda: sum(node.stats["verbs_bytes"] for node in nodes) >= count, "all is acknowledged")


def test_loads_move_by_rdma_between_native_ends(tmp_path: Path) -> None:
    layouts: tuple[Layout, ...] = (SMALL, V41)
    with cluster(tmp_path) as (nodes, map_, _):
        for layout in layouts:
            with Client(map_, layout=layout, config=NO_REUSE) as client:
                keys = chain(BLOCKS, layout)
                data = store(client, keys)
                until_whole(client, keys)
                for _ in range(2):
                    read_back(client, keys, data)
                stats = client.stats()
                assert stats["read_bytes_tcp"] == 0
                assert stats["read_bytes_rdma"] >= 2 * data.nbytes
                until_written(nodes, 2 * data.nbytes)  # before the client goes: what is acknowledged after that is counted by nobody
        until(lambda: all(node.stats["verbs_queue_pairs"] == 0 for node in nodes), "all queue pairs are gone")
        assert all(node.stats["verbs_failed"] == 0 for node in nodes)


def test_a_late_answer_never_lands_in_memory_that_was_handed_on(tmp_path: Path) -> None:
    """RELIABILITY row 23: a daemon stands still, its shards are decoded from others', the memory gets a new owner, the daemon goes on."""
    with cluster(tmp_path, child=5) as (nodes, map_, pid):
        with Client(map_, layout=SMALL, config=NO_REUSE) as client:
            keys = chain(BLOCKS, SMALL)
            data = store(client, keys)
            until_whole(client, keys)
            read_back(client, keys, data)  # queue pairs to all nodes are open now
            ticket = client.lookup(keys)
            os.kill(pid, signal.SIGSTOP)
            try:
                result, place = load(client, ticket)
                assert (result.outcome, result.blocks) == (LoadOutcome.COMPLETE, BLOCKS)
                assert np.array_equal(place, data)
                place[:] = 0x5A
            finally:
                os.kill(pid, signal.SIGCONT)
            for _ in range(3):
                read_back(client, keys, data)  # the same zones, beside what comes late and after it
            assert (place == 0x5A).all()
            assert client.stats()["read_bytes_tcp"] == 0
        assert (place == 0x5A).all()
        assert all(node.stats["verbs_failed"] == 0 for node in nodes)
