"""Lookups of 600 blocks against full indexes, what a daemon with such an index keeps in memory, and lookups by a map with several epochs.

Every lookup hashes its prompt's tokens anew and asks the nodes anew. The absent keys come last: for them the daemons are started again
inside a control group whose memory is their own plus a quarter of the indexes.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from benchmarks.full_index import PIN_SECONDS, filled_rig
from benchmarks.harness import Bench, Figure, at_most, measures, percentile
from benchmarks.memory import MemoryGroup, can_limit
from benchmarks.prompts import (
    AGENT_EXTENTS_OF_600,
    AGENT_EXTENTS_P99_OF_600,
    LAYOUT,
    chain_keys,
    namespace,
    short_extents,
    store_in_turns,
    tokens_of,
)
from benchmarks.rig import NODES, Rig, anonymous_bytes, bytes_on_disk, forget_pages, resident_bytes_without, rig
from kvstore.client import Client, ClientConfig
from kvstore.keys import KeyChain
from kvstore.server.local import LocalCluster

PROMPTS = 12  # of each shape, looked up in turn
UNPINNED_TURNS = 15  # all prompts, each time after their pins have run out: nodes ask their indexes again
INDEX_OVER_MEMORY = 4
WARM_UP = 50
EPOCHS = 4


def lookup_seconds(rig: Rig, tokens: np.ndarray, expected_blocks: int) -> float:
    begin = time.perf_counter()
    ticket = rig.client.lookup(KeyChain(namespace("bench")).extend(tokens))
    took = time.perf_counter() - begin
    if ticket.hit_blocks != expected_blocks:
        raise RuntimeError(f"found {ticket.hit_blocks} of {expected_blocks} blocks")
    return took


def lookups(bench: Bench, rig: Rig, extents_of_600: int, first_seed: int) -> tuple[list[float], list[float]]:
    """Stores a few prompts in this shape; times of looking them up, again and again, and each time after its promise had run out."""
    blocks = bench.scale.chain_blocks
    prompts = []
    for seed in range(first_seed, first_seed + PROMPTS):
        store_in_turns(rig.client, chain_keys(seed, blocks), short_extents(blocks, extents_of_600))
        prompts.append(tokens_of(seed, blocks))
    rig.settle()
    for prompt in prompts:
        lookup_seconds(rig, prompt, blocks)
    again = [lookup_seconds(rig, prompts[number % PROMPTS], blocks) for number in range(bench.scale.samples)]
    unpinned = []
    for _ in range(UNPINNED_TURNS if bench.scale.name != "smoke" else 1):
        time.sleep(PIN_SECONDS + 1.1)
        unpinned += [lookup_seconds(rig, prompt, blocks) for prompt in prompts]
    return again, unpinned


def note_of(times: Sequence[float]) -> str:
    shown = (f"p{percent} {percentile(times, percent) * 1e3:.2f}" for percent in (50, 90, 99))
    return f"{', '.join(shown)} ms; n={len(times)}"


def absent_lookups(bench: Bench, cluster: LocalCluster, index_bytes: list[int]) -> tuple[list[float], str]:
    """Times of looking up keys that are nowhere, after a restart with memory for a part of the index; and how memory was limited."""
    own_bytes = sum(anonymous_bytes(pid) for node in range(NODES) if (pid := cluster.pid(node)) is not None)
    cluster.stop()
    os.sync()
    forget_pages(cluster.directory)
    with ExitStack() as stack:
        if can_limit():
            group = MemoryGroup(f"kvstore-bench-{os.getpid()}", int(own_bytes * 1.2) + sum(index_bytes) // INDEX_OVER_MEMORY)
            stack.callback(group.close)
            with group.joined():
                stack.enter_context(cluster)
            how = f"memory for 1/{INDEX_OVER_MEMORY} of the index"
        else:
            stack.enter_context(cluster)
            how = "no memory limit to be had here: page cache dropped instead"
        client = stack.enter_context(Client(cluster.map, layout=LAYOUT))
        rig = Rig(cluster, client)
        seeds = itertools.count(30_000)

        def absent_seconds() -> float:
            return lookup_seconds(rig, tokens_of(next(seeds), bench.scale.chain_blocks), 0)

        # A daemon that has just started goes through its index once.
        begin = time.monotonic()
        rig.settle()
        for _ in range(WARM_UP):
            absent_seconds()
        settled = time.monotonic() - begin
        times = [absent_seconds() for _ in range(bench.scale.samples)]
    return times, f"{how}, at rest {settled:.1f} s after the start"


@measures("lookup_600_ms", "lookup_600_116_extents_ms", "daemon_rss_mb", "lookup_absent_p99_ms")
def lookup(bench: Bench) -> dict[str, Figure]:
    rig = bench.shared(filled_rig)
    agents, unpinned = lookups(bench, rig, AGENT_EXTENTS_OF_600, 10_000)
    long_chains, unpinned_long = lookups(bench, rig, AGENT_EXTENTS_P99_OF_600, 20_000)
    resident = [resident_bytes_without(pid, rig.cluster.directory) for pid in rig.pids]
    index_bytes = [sum(bytes_on_disk(path.parent) for path in rig.cluster.node_directory(n).rglob("data.mdb")) for n in range(NODES)]

    absent, how = absent_lookups(bench, rig.cluster, index_bytes)
    size = f"{bench.scale.index_extents} extents, index {max(index_bytes) / 1e6:.0f} MB"
    return {
        "lookup_600_ms.p50": Figure(percentile(agents, 50) * 1e3, at_most(2), f"{note_of(agents)}; no pin: {note_of(unpinned)}"),
        "lookup_600_ms.p99": Figure(percentile(agents, 99) * 1e3, at_most(5), note_of(agents)),
        "lookup_600_116_extents_ms": Figure(
            percentile(long_chains, 50) * 1e3, at_most(10), f"{note_of(long_chains)}; no pin: {note_of(unpinned_long)}"
        ),
        "daemon_rss_mb": Figure(max(resident) / 1e6, at_most(200), size),
        "lookup_absent_p99_ms": Figure(percentile(absent, 99) * 1e3, at_most(5), f"{note_of(absent)}; {how}"),
    }


@measures("lookup_epochs_ms")
def lookup_by_several_epochs(bench: Bench) -> dict[str, Figure]:
    """The cluster has had four epochs, of the same nodes; its prompts are from all of them."""
    blocks = bench.scale.chain_blocks
    with ExitStack() as stack:
        small = rig(bench, stack, "lookup-epochs")
        maps = [small.cluster.map]
        while len(maps) < EPOCHS:
            maps.append(maps[-1].with_epoch([], [node.id for node in maps[-1].nodes]))
        clients = [stack.enter_context(Client(each, layout=LAYOUT, config=ClientConfig(promise_reuse_seconds=0))) for each in maps]
        seeds = range(40_000, 40_000 + PROMPTS)
        for seed in seeds:
            store_in_turns(clients[seed % EPOCHS], chain_keys(seed, blocks), short_extents(blocks, AGENT_EXTENTS_OF_600))
        found = Rig(small.cluster, clients[-1])
        found.settle()
        prompts = [tokens_of(seed, blocks) for seed in seeds]
        for prompt in prompts:
            lookup_seconds(found, prompt, blocks)
        hits = [lookup_seconds(found, prompts[number % PROMPTS], blocks) for number in range(bench.scale.samples)]
        nowhere = itertools.count(50_000)
        absent = [lookup_seconds(found, tokens_of(next(nowhere), blocks), 0) for _ in range(bench.scale.samples)]
    return {
        "lookup_epochs_ms.p50": Figure(percentile(hits, 50) * 1e3, at_most(2), note_of(hits)),
        "lookup_epochs_ms.p99": Figure(percentile(hits, 99) * 1e3, at_most(5), note_of(hits)),
        "lookup_epochs_ms.absent_p99": Figure(percentile(absent, 99) * 1e3, at_most(5), note_of(absent)),
    }
