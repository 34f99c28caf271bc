"""A worker process for tests/test_agent_process.py: SOCKET VERB SEED BLOCKS. Says a line when it is where the test wants it."""

from __future__ import annotations

import sys

import numpy as np
from client_tools import V41, bytes_of, chain

from kvstore.client.agent.worker import WorkerAgent


def main() -> None:
    path, verb, seed, blocks = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    keys = chain(blocks, V41, seed)
    data = bytes_of(keys, V41)
    with WorkerAgent(path, layout=V41, name=verb) as agent:
        ticket = agent.lookup(keys)
        print(f"hit {ticket.hit_blocks}", flush=True)
        sys.stdin.readline()
        if verb == "stage":  # holds a load, and all that it has asked for, until it is killed
            staged = agent.stage(ticket)
            print(f"staged {len(staged.rows)}", flush=True)
            sys.stdin.readline()
        elif verb == "load":
            while True:
                with agent.stage(ticket) as staged:
                    result = staged.finish()
                    assert np.array_equal(staged.rows[: result.blocks], data[: result.blocks])
                print(f"{result.outcome.value} {result.blocks}", flush=True)
                if sys.stdin.readline().strip() != "again":
                    break
        elif verb == "store":
            rows = agent.buffer(blocks)
            rows[:] = data
            agent.store(keys, rows, first_block=0)
            print("asked", flush=True)
            sys.stdin.readline()


if __name__ == "__main__":
    main()
