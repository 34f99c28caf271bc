"""Reads while nodes evict to make room for writes: p99_while_evicting and promise_broken.

A writer process stores new prompts without pause into full daemons, so that every stored byte evicts one.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack

import numpy as np

from benchmarks.harness import Bench, Figure, at_most, measures, percentile
from benchmarks.pressure import Pressure
from benchmarks.prompts import BLOCK_BYTES, are_bytes_of, chain_keys, pretouched, short_extents, store_in_turns
from benchmarks.rig import NODES, Rig, rig
from kvstore.client import ClientConfig, Ticket

PROMPT_BLOCKS = 4  # of the writer: short, so that many promises can be tested
READ_BLOCKS = 128
HOLD_SECONDS = {"smoke": 1.0, "ci": 4.0, "full": 4.0}  # between promise and load: the store is written over about once meanwhile


def node_capacity_bytes(bench: Bench) -> int:
    """Small, so that a second or three of writing replaces everything."""
    return (16 if bench.scale.name == "smoke" else 96) << 20


def blocks_that_fit(node_capacity_bytes: int) -> int:
    return int(NODES * node_capacity_bytes / 1.2 / BLOCK_BYTES)


@measures("promise_broken")
def promise_broken(bench: Bench) -> dict[str, Figure]:
    """Promises of prompts near the end of the eviction order, held for a while, then loaded."""
    wanted = bench.scale.samples * 10 + 1 if bench.scale.name != "smoke" else bench.scale.samples
    broken = loaded_short = asked = missed = 0
    with ExitStack() as stack:
        made = rig(bench, stack, "promise", capacity_bytes=node_capacity_bytes(bench), config=ClientConfig(promise_reuse_seconds=0))
        pressure = stack.enter_context(Pressure(made.cluster, blocks=PROMPT_BLOCKS))
        prompts_kept = blocks_that_fit(node_capacity_bytes(bench)) // PROMPT_BLOCKS
        pressure.wait_for_more(int(prompts_kept * 1.2), timeout_seconds=120)
        place = pretouched(PROMPT_BLOCKS)
        held: deque[tuple[float, int, Ticket]] = deque()
        rng = np.random.default_rng(3)
        while asked < wanted:
            newest = pressure.newest()
            seed = max(0, newest - int(prompts_kept * rng.uniform(0.0, 1.0)))
            ticket = made.client.lookup(chain_keys(seed, PROMPT_BLOCKS, "writer"))
            if ticket.hit_blocks:
                held.append((time.monotonic() + HOLD_SECONDS[bench.scale.name] * rng.uniform(0, 1), seed, ticket))
            else:
                missed += 1
            while held and held[0][0] <= time.monotonic():
                _, seed, ticket = held.popleft()
                loaded = made.client.load(ticket, place).blocks
                asked += 1
                loaded_short += loaded < ticket.hit_blocks
                broken += not are_bytes_of(chain_keys(seed, PROMPT_BLOCKS, "writer")[:loaded], place[:loaded])
    if broken:
        raise RuntimeError(f"{broken} loads gave wrong bytes")
    return {"promise_broken": Figure(loaded_short / asked, at_most(1e-4), f"{loaded_short} of {asked}; {missed} evicted before the lookup")}


@measures("p99_while_evicting")
def p99_while_evicting(bench: Bench) -> dict[str, Figure]:
    """`.idle`: beside no writer. `.writing`: beside the same writer at work on a cluster that is not full, so that nothing is evicted.

    The writer stores without pause. It stands for another host, but shares two processors with reader and daemons: so it runs at low
    priority, as the daemons' own writing threads do. The note tells what was written meanwhile.
    """
    smoke = bench.scale.name == "smoke"
    rounds = bench.scale.rounds if not smoke else 1
    per_round = max(10, bench.scale.samples // rounds)
    full_bytes = 2 * node_capacity_bytes(bench) if not smoke else 40 << 20  # less, and a slow reader's prompt would go
    with ExitStack() as stack:
        evicting = Read(rig(bench, stack, "evicting", capacity_bytes=full_bytes))
        roomy = Read(rig(bench, stack, "roomy", capacity_bytes=8 << 30))
        with Pressure(evicting.rig.cluster, blocks=PROMPT_BLOCKS) as filling:
            filling.wait_for_more(blocks_that_fit(full_bytes) // PROMPT_BLOCKS, timeout_seconds=120)
        times: dict[str, list[float]] = {"idle": [], "evicting": [], "writing": []}
        stored_bytes = 0
        for number in range(rounds):
            times["idle"] += evicting.seconds(per_round)
            for name, read in (("evicting", evicting), ("writing", roomy)):
                with Pressure(read.rig.cluster, blocks=PROMPT_BLOCKS, first_seed=(number + 1) * 1_000_000) as writing:
                    writing.wait_for_more(100 if not smoke else 5)
                    before = writing.newest()
                    times[name] += read.seconds(per_round)
                    if name == "evicting":
                        stored_bytes += (writing.newest() - before) * PROMPT_BLOCKS * BLOCK_BYTES
    p99 = {name: percentile(some, 99) * 1e3 for name, some in times.items()}
    p50 = {name: percentile(some, 50) * 1e3 for name, some in times.items()}
    rate = stored_bytes / sum(times["evicting"]) / 1e6

    def figure(beside: str) -> Figure:
        note = f"{p99['evicting']:.1f} ms beside {p99[beside]:.1f}, p50 {p50['evicting']:.1f} beside {p50[beside]:.1f}; "
        note += f"n={len(times[beside])}; {rate:.0f} MB/s written"
        return Figure(p99["evicting"] / p99[beside], at_most(1.5), note)

    return {"p99_while_evicting.idle": figure("idle"), "p99_while_evicting.writing": figure("writing")}


class Read:
    """One prompt of short extents on a cluster, looked up and loaded again and again."""

    def __init__(self, made: Rig) -> None:
        self.rig = made
        self._keys = chain_keys(1, READ_BLOCKS)
        self._place = pretouched(READ_BLOCKS)
        store_in_turns(made.client, self._keys, short_extents(READ_BLOCKS, 36))
        self.seconds(10)

    def seconds(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            loaded = self.rig.client.load(self.rig.client.lookup(self._keys), self._place).blocks
            times.append(time.perf_counter() - begin)
            if loaded != READ_BLOCKS:
                raise RuntimeError(f"loaded {loaded} of {READ_BLOCKS} blocks")
        return times
