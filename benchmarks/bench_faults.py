"""Lookups and loads while daemons are stopped: lookup_false_short and p99_one_stopped."""

from __future__ import annotations

import random
import signal
import time
from contextlib import ExitStack

import numpy as np

from benchmarks.harness import Bench, Figure, at_most, measures, percentile
from benchmarks.prompts import chain_keys, pretouched, short_extents, store_in_turns
from benchmarks.rig import NODES, Rig, rig
from kvstore.client import ClientConfig

CHAINS = 24
STATES = (0, 1, 2)  # daemons stopped at once


def look_up_all(rig: Rig, chains: list[np.ndarray], count: int, rng: random.Random) -> int:
    """`count` lookups of prompts that begin like a stored one and go on differently; how many found less than is stored."""
    short = 0
    for _ in range(count):
        stored = chains[rng.randrange(len(chains))]
        shared = rng.randint(1, len(stored))
        tail = chain_keys(rng.getrandbits(40), rng.randint(0, 16), "tail")
        ticket = rig.client.lookup(np.concatenate([stored[:shared], tail]))
        short += ticket.hit_blocks < shared
    return short


@measures("lookup_false_short")
def lookup_false_short(bench: Bench) -> dict[str, Figure]:
    rng = random.Random(5)
    figures = {}
    per_state = max(20, bench.scale.samples * 10 + 1) if bench.scale.name != "smoke" else 20  # one in 10,000 must show in each state
    rounds = 10 if bench.scale.name != "smoke" else 2
    with ExitStack() as stack:
        made = rig(bench, stack, "false-short", config=ClientConfig(promise_reuse_seconds=0))
        chains = []
        for seed in range(CHAINS):
            blocks = rng.randint(4, 100)
            keys = chain_keys(seed, blocks)
            store_in_turns(made.client, keys, short_extents(blocks, AGENT_SHAPE))
            chains.append(keys)
        for stopped in STATES:
            short = asked = 0
            for number in range(rounds):
                nodes = rng.sample(range(NODES), stopped)
                count = per_state // rounds + 1
                if number % 2:  # gone: connections are refused
                    for node in nodes:
                        made.cluster.kill(node, signal.SIGKILL)
                    short += look_up_all(made, chains, count, rng)
                    for node in nodes:
                        made.cluster.restart(node)
                else:  # silent: nothing is answered
                    with made.stopped(*nodes):
                        short += look_up_all(made, chains, count, rng)
                asked += count
            figures[f"lookup_false_short.{stopped}"] = Figure(short / asked, at_most(1e-4), f"{short} of {asked}")
    return figures


AGENT_SHAPE = 36


@measures("p99_one_stopped")
def p99_one_stopped(bench: Bench) -> dict[str, Figure]:
    """Lookup and load of prompts of 128 blocks in the extents of agents; rounds with one daemon stopped and with all well."""
    blocks = 128
    rounds = bench.scale.rounds
    per_round = max(10, bench.scale.samples // rounds)
    well: list[float] = []
    stopped: list[float] = []
    with ExitStack() as stack:
        made = rig(bench, stack, "one-stopped", config=ClientConfig(promise_reuse_seconds=0))
        chains = [chain_keys(seed, blocks) for seed in range(8)]
        for keys in chains:
            store_in_turns(made.client, keys, short_extents(blocks, AGENT_SHAPE))
        place = pretouched(blocks)

        def take(times: list[float]) -> None:
            for number in range(per_round):
                begin = time.perf_counter()
                ticket = made.client.lookup(chains[number % len(chains)])
                loaded = made.client.load(ticket, place).blocks
                times.append(time.perf_counter() - begin)
                if loaded != blocks:
                    raise RuntimeError(f"loaded {loaded} of {blocks} blocks")

        take([])
        for number in range(rounds):
            take(well)
            with made.stopped(number % NODES):
                take(stopped)
    ratio = percentile(stopped, 99) / percentile(well, 99)
    note = f"{percentile(stopped, 99) * 1e3:.1f} beside {percentile(well, 99) * 1e3:.1f} ms, p50 {percentile(well, 50) * 1e3:.1f}"
    return {"p99_one_stopped": Figure(ratio, at_most(1.7), f"{note}; n={len(well)}")}
