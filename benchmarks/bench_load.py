"""load_warm_vs_loopback and load_cold_vs_uring: 600 blocks from 12 daemons, beside what the machine moves at all.

Warm: user bytes/s over the wire bytes/s of 11 senders (benchmarks/raw/loopback), each load checked against the stored bytes, 0 disk reads.
Cold: the records' pages dropped before every take; time of the bare O_DIRECT loop over the same records at its best depth, over ours.
The note gives what the machine allows: the bare loop's time over that of the loop beside a raw transfer of as many bytes, begun together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Literal

import numpy as np

from benchmarks.harness import Bench, Figure, at_least, interleaved, measures, ratio_of_medians, seconds, spread
from benchmarks.prompts import (
    AGENT_EXTENTS_OF_600,
    BLOCK_BYTES,
    LAYOUT,
    Blocks,
    are_bytes_of,
    chain_keys,
    full_extents,
    pretouched,
    short_extents,
    store_in_turns,
)
from benchmarks.raw import DEPTHS, Loopback, Uring
from benchmarks.records import record_places
from benchmarks.rig import Rig, forget_pages, rig
from kvstore.client import ClientConfig

PAGED_IN_BYTES_MAX = 4 << 20  # of a daemon's own code, under memory pressure by others; far below one load
SENDERS = 11  # of the raw transfer (an eager load asks as many shards)
READ = 10  # shards of every extent that a lazy load reads
BARS: dict[Literal["lazy", "eager"], float] = {"lazy": 0.60, "eager": 0.48}


class Chain:
    """A stored prompt, a place to load it to, and one timed and checked load."""

    def __init__(self, rig: Rig, seed: int, lengths: list[int], place: Blocks) -> None:
        self.rig = rig
        self.keys = chain_keys(seed, sum(lengths))
        self.place = place
        store_in_turns(rig.client, self.keys, lengths)

    def load_seconds(self, hedge: Literal["lazy", "eager"] = "lazy") -> float:
        self.place[:, ::4096] = 0  # a block that is not loaded shows
        ticket = self.rig.client.lookup(self.keys)
        took = seconds(lambda: self.check(self.rig.client.load(ticket, self.place, hedge=hedge).blocks))
        if not are_bytes_of(self.keys, self.place):
            raise RuntimeError("wrong bytes")
        return took

    def check(self, blocks: int) -> None:
        if blocks != len(self.keys):
            raise RuntimeError(f"loaded {blocks} of {len(self.keys)} blocks")

    @property
    def user_bytes(self) -> int:
        return len(self.keys) * BLOCK_BYTES


def shapes(bench: Bench) -> dict[str, list[int]]:
    """Extent lengths by name: as a chat leaves them, and as an agent does."""
    blocks = bench.scale.chain_blocks
    return {"64": full_extents(blocks), "36": short_extents(blocks, AGENT_EXTENTS_OF_600)}


def stored_chains(bench: Bench, stack: ExitStack) -> dict[str, Chain]:
    """One cluster with a chain of each shape in it."""
    made = rig(bench, stack, "load")
    place = pretouched(bench.scale.chain_blocks)
    return {shape: Chain(made, seed, lengths, place) for seed, (shape, lengths) in enumerate(shapes(bench).items())}


@contextmanager
def raw_like(bench: Bench, senders: int) -> Iterator[tuple[Loopback, Loopback]]:
    """Raw transfers of what `senders` nodes send of one chain: as any program gets them on this host, and with our congestion control."""
    shard_bytes = sum(plane.shard_bytes for plane in LAYOUT.planes())
    sender_bytes = shard_bytes * bench.scale.chain_blocks
    with Loopback(senders, sender_bytes) as plain, Loopback(senders, sender_bytes, ClientConfig().congestion_control) as alike:
        yield plain, alike


@measures("load_warm_vs_loopback")
def load_warm(bench: Bench) -> dict[str, Figure]:
    chains = bench.shared(stored_chains)
    cases = [(shape, hedge) for shape in chains for hedge in BARS]
    read_before = -1

    def user_rate(shape: str, hedge: Literal["lazy", "eager"]) -> float:
        chain = chains[shape]
        return chain.user_bytes / chain.load_seconds(hedge)

    with raw_like(bench, SENDERS) as (plain, alike):
        for shape, hedge in cases:  # into the page cache, and the client's first connections
            user_rate(shape, hedge)
        read_before = chains["64"].rig.disk_read_bytes()
        takes = [lambda s=shape, h=hedge: user_rate(s, h) for shape, hedge in cases]
        *ours, wire, alike_wire = interleaved(bench.scale.rounds, *takes, plain.round_bytes_per_second, alike.round_bytes_per_second)
        read_bytes = chains["64"].rig.disk_read_bytes() - read_before
    if read_bytes > PAGED_IN_BYTES_MAX:
        raise RuntimeError(f"the warm load read {read_bytes} bytes from disk")
    figures = {}
    for (shape, hedge), rates in zip(cases, ours, strict=True):
        note = f"{np.median(rates) / 1e9:.2f} of {np.median(wire) / 1e9:.2f} GB/s; {ratio_of_medians(rates, alike_wire):.2f} of "
        note += f"{np.median(alike_wire) / 1e9:.2f} with our congestion control; {spread(rates)}"
        figures[f"load_warm_vs_loopback.{hedge}.{shape}"] = Figure(ratio_of_medians(rates, wire), at_least(BARS[hedge]), note)
    return figures


@measures("load_cold_vs_uring")
def load_cold(bench: Bench) -> dict[str, Figure]:
    """Every round reads a prompt that was never read before: what a node does for bytes that are read again is no part of this."""
    figures = {}
    with ExitStack() as stack:
        made = rig(bench, stack, "cold", capacity_bytes=8 << 30)
        place = pretouched(bench.scale.chain_blocks)
        wire, _ = stack.enter_context(raw_like(bench, READ))
        pool = stack.enter_context(ThreadPoolExecutor(2))
        for first_seed, (shape, lengths) in enumerate(shapes(bench).items(), 1):
            chains = [Chain(made, 1_000 * first_seed + number, lengths, place) for number in range(bench.scale.rounds + 1)]
            os.sync()
            ours: list[float] = []
            theirs: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
            together: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
            for number, chain in enumerate(chains):
                places = record_places(made.cluster, chain.keys, shards=range(READ))
                with Uring(places, bench.directory / "places") as bare:

                    def bare_rounds(bare: Uring = bare, both: dict[int, list[float]] = together) -> dict[int, float]:
                        forget_pages(made.cluster.directory)
                        for depth in DEPTHS:
                            takes = pool.submit(bare.round_seconds, depth), pool.submit(wire.round_seconds)
                            both[depth].append(max(take.result() for take in takes))
                        return {depth: bare.round_seconds(depth) for depth in DEPTHS}

                    times = bare_rounds() if number % 2 else {}
                    cold = cold_load_seconds(chain)
                    times = times or bare_rounds()
                if number:  # the first one opens the connections
                    ours.append(cold)
                    for depth, took in times.items():
                        theirs[depth].append(took)
            best = min(DEPTHS, key=lambda depth: float(np.median(theirs[depth])))
            allowed = float(np.median(theirs[best])) / min(float(np.median(times)) for times in together.values())
            note = f"{np.median(ours) * 1e3:.0f} ms beside {np.median(theirs[best]) * 1e3:.0f} ms at depth {best}; "
            note += f"the machine allows {allowed:.2f}; {spread(ours)}"
            figures[f"load_cold_vs_uring.{shape}"] = Figure(ratio_of_medians(theirs[best], ours), at_least(0.80), note)
    return figures


def cold_load_seconds(chain: Chain) -> float:
    """One load whose records are on disk only."""
    forget_pages(chain.rig.cluster.directory)
    before = chain.rig.disk_read_bytes()
    took = chain.load_seconds()
    if chain.rig.disk_read_bytes() - before < chain.user_bytes:
        raise RuntimeError("a cold load found its bytes in RAM")
    return took
