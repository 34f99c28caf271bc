"""`kvstore agent` goes on when the cluster map gets a new epoch: new stores by the new one, what was stored and what runs by the old."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
from agent_tools import agent_of
from client_tools import V41, bytes_of, chain, cluster_of, until
from test_agent_process import LIMITS

from kvstore.client import LoadOutcome, StoreOutcome
from kvstore.client.agent.worker import WorkerAgent

BLOCKS = 8


def test_an_agent_takes_a_new_epoch_while_it_runs_and_refuses_a_map_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "map.toml"

    def write(text: str) -> None:
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)

    with cluster_of(tmp_path / "cluster", 4, k=2, m=1) as cluster:
        first = cluster.map
        second = first.with_epoch([], [node.id for node in first.nodes[:3]])
        third = second.with_epoch([], [node.id for node in first.nodes])
        write(first.to_toml())
        with agent_of(path, tmp_path / "agent.sock", *LIMITS) as agent, WorkerAgent(tmp_path / "agent.sock", layout=V41) as worker:
            keys, data = {}, {}

            def store(epoch: int) -> None:
                keys[epoch] = chain(BLOCKS, V41)
                data[epoch] = bytes_of(keys[epoch], V41)
                assert worker.store(keys[epoch], data[epoch], first_block=0).result(20).outcome is StoreOutcome.STORED
                until(lambda: worker.lookup(keys[epoch]).hit_blocks == BLOCKS, "the last shards")
                assert set(worker.lookup(keys[epoch]).extents["write_epoch"].tolist()) == {epoch}

            def take(text: str, want: int) -> None:
                write(text)
                until(lambda: agent.status()["epoch"] == want, "the new epoch")

            store(1)
            ticket = worker.lookup(keys[1])
            with worker.stage(ticket, by_plane=True) as staged:
                planes = staged.planes()
                assert next(planes).blocks == BLOCKS
                take(second.to_toml(), 2)
                assert [ready.blocks for ready in planes] == [BLOCKS] * (len(V41.planes(2)) - 1)
                assert staged.finish().outcome is LoadOutcome.COMPLETE and np.array_equal(staged.rows, data[1])
            assert worker.load(ticket).outcome is LoadOutcome.COMPLETE, "a ticket of before"
            store(2)
            for bad in ("cluster = [", third.to_toml().replace('cluster = "dev"', 'cluster = "other"')):
                write(bad)
                agent.kill(signal.SIGHUP)
                until(lambda: "map not taken, epoch 2 stays" in agent.log.read_text(), "its word of the bad map")
                agent.log.write_text("")
            take(third.to_toml(), 3)
            store(3)
            for epoch, blocks in data.items():
                place = np.empty_like(blocks)
                assert worker.load(worker.lookup(keys[epoch]), place).blocks == BLOCKS and np.array_equal(place, blocks)
            agent.kill(signal.SIGTERM)
            assert agent.end() == 0
