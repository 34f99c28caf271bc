"""two_writers: 2 to 8 writers of one key with different bytes and random delays. Reads that mix two writers' bytes; keys readable after."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import Bench, Figure, at_least, at_most, measures
from benchmarks.prompts import BLOCK_BYTES, LAYOUT, Blocks, chain_keys, pretouched
from benchmarks.rig import Rig, rig
from kvstore.client import Client

WRITERS_MAX = 8
BLOCKS = 3
DELAY_SECONDS_MAX = 0.004
READS_WHILE_WRITING = 3


@dataclass
class Tally:
    rounds: int = 0
    reads: int = 0
    mixed: int = 0
    readable: int = 0


def version(pattern: int, writer: int) -> Blocks:
    """What this writer stores: every block differs from every other writer's in every 8 bytes."""
    rng = np.random.default_rng((pattern, writer))
    return rng.integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)


def race(made: Rig, clients: list[Client], number: int, rng: random.Random, place: Blocks, tally: Tally) -> None:
    """One round: all writers at once, reads meanwhile, one read after."""
    keys = chain_keys(number, BLOCKS, "race")
    versions = [version(number, writer) for writer in range(2 + number % (WRITERS_MAX - 1))]
    delays = [rng.uniform(0, DELAY_SECONDS_MAX) for _ in versions]
    never = threading.Event()

    def write(client: Client, data: Blocks, delay: float) -> None:
        never.wait(delay)
        client.store(keys, data, first_block=0).result(60)

    def read() -> int:
        loaded = int(made.client.load(made.client.lookup(keys), place).blocks)
        tally.reads += loaded > 0
        if loaded and not any(np.array_equal(place[:loaded], data[:loaded]) for data in versions):
            tally.mixed += 1
        return loaded

    threads = [threading.Thread(target=write, args=words) for words in zip(clients, versions, delays, strict=False)]
    for thread in threads:
        thread.start()
    for _ in range(READS_WHILE_WRITING):
        read()
    for thread in threads:
        thread.join()
    tally.rounds += 1
    tally.readable += read() == BLOCKS


def run_races(bench: Bench, rounds: int, seed: int = 2) -> Tally:
    rng = random.Random(seed)
    tally = Tally()
    with ExitStack() as stack:
        made = rig(bench, stack, "writers")
        clients = [stack.enter_context(Client(made.cluster.map, layout=LAYOUT)) for _ in range(WRITERS_MAX)]
        place = pretouched(BLOCKS)
        for number in range(rounds):
            race(made, clients, number, rng, place, tally)
    return tally


@measures("two_writers")
def two_writers(bench: Bench) -> dict[str, Figure]:
    tally = run_races(bench, bench.scale.writer_rounds)
    return {
        "two_writers.mixed": Figure(tally.mixed, at_most(0), f"of {tally.reads} reads in {tally.rounds} rounds"),
        "two_writers.readable": Figure(tally.readable / tally.rounds, at_least(0.999), f"{tally.readable} of {tally.rounds} rounds"),
    }
