"""A process that stores prompts until its stdin closes: `python -m benchmarks.writer MAP [--blocks N] [--seed S] [--rate B]`.

Prompt i is chain_keys(seed + i); its bytes are made from its keys, so that whoever loads it can check them. Each stored prompt is one
output line `SEED OUTCOME MONOTONIC_SECONDS`, printed after its acknowledgement.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path

from benchmarks.prompts import BLOCK_BYTES, LAYOUT, bytes_of, chain_keys
from kvstore.client import Client, StoreFuture
from kvstore.clustermap import ClusterMap

DEPTH = 4  # prompts on their way at once


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("map", type=Path)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0, help="bytes per second; 0: as fast as it goes")
    options = parser.parse_args()
    ending = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ending.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    waiting: deque[tuple[int, StoreFuture]] = deque()

    def report_oldest() -> None:
        seed, future = waiting.popleft()
        print(f"{seed} {future.result(60).outcome.name} {time.monotonic():.3f}", flush=True)

    os.nice(10)  # it stands for another host, whose processors no reader shares
    begin = time.monotonic()
    with Client(ClusterMap.load(options.map), layout=LAYOUT) as client:
        seed = options.seed
        while not ending.is_set():
            keys = chain_keys(seed, options.blocks, "writer")
            waiting.append((seed, client.store(keys, bytes_of(keys), first_block=0)))
            seed += 1
            if len(waiting) >= DEPTH:
                report_oldest()
            if options.rate:
                due = begin + (seed - options.seed) * options.blocks * BLOCK_BYTES / options.rate
                ending.wait(max(0.0, due - time.monotonic()))
        while waiting:
            report_oldest()
    return 0


if __name__ == "__main__":
    sys.exit(main())
