"""What follows from where keys lie: messages of a prompt and the busiest daemon, by the real placement and the client's own planner.

Keys of prompts are drawn with a seed; nothing is sent. Nodes are all up, the map has one epoch, all SSDs are alike.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.prompts import LAYOUT
from benchmarks.scale.parameters import SHARDS, K, Parameters
from kvstore.client.lookup import EXTENT_BLOCKS_MAX, OTHERS_ASKED
from kvstore.clustermap import ClusterMap, Node
from kvstore.extents import cut
from kvstore.kernels import _native
from kvstore.placement import Placement

PLACED_AT_ONCE: Final = 1 << 14  # groups: a second of one core
ALONE_GROUPS_MAX: Final = 1 << 16  # fewer are placed sooner than other processes have started
M_TRIM_THRESHOLD: Final = -1  # of malloc.h
M_MMAP_THRESHOLD: Final = -3
Lists = npt.NDArray[np.int32]
Told = Callable[[float], None]  # the share that is done


def cluster_map(servers: int, ssds: int) -> ClusterMap:
    """A map of servers x ssds daemons of equal weight, each server a host."""
    return ClusterMap.local(
        [
            Node(f"s{server:05}-{ssd:03}", f"s{server:05}", f"10.{server >> 8 & 255}.{server & 255}.1:{7400 + ssd}")
            for server in range(servers)
            for ssd in range(ssds)
        ]
    )


@dataclass(frozen=True)
class Messages:
    """Requests of one prompt to storage daemons, means over some prompts; each has one answer."""

    discover: float
    checked_keys: float  # asked of two nodes more where the walk stops
    checks: float  # the messages for these
    promise: float
    read: float  # the load in the order of the disk; asked plane by plane it is `read_by_plane`
    read_by_plane: float
    write: float

    @property
    def total(self) -> float:
        return self.discover + self.checks + self.promise + self.read + self.write


def messages(placement: Placement, given: Parameters, prompts: int, seed: int = 1) -> Messages:
    """Of `prompts` prompts with random keys: all that a cold client sends, nothing promised before, nothing in its RAM."""
    rng = np.random.default_rng(seed)
    counted = [_messages(placement, given, rng) for _ in range(prompts)]
    return Messages(*(float(each) for each in np.mean(counted, axis=0)))


def _messages(placement: Placement, given: Parameters, rng: np.random.Generator) -> tuple[int, ...]:
    blocks, hit = given.prompt_blocks, round(given.prompt_blocks * given.hit_rate)
    lists = placement.lists_of(rng.integers(0, placement.pg_count, blocks, dtype=np.uint64))
    starts = np.concatenate([[0], np.cumsum(given.extent_lengths)[:-1]])
    walked = lists[starts[starts < hit]]
    asking = _native.Asking(np.ascontiguousarray(lists[None]), np.zeros(given.daemons, np.uint8), int(rng.integers(1 << 30)))
    _, asked = asking.first()
    doubt = np.arange(max(0, hit - EXTENT_BLOCKS_MAX + 1), min(hit + 1, blocks)) if hit < blocks else np.arange(0)
    again, others = asking.elsewhere(np.asarray(np.setdiff1d(doubt, starts[starts < hit]), np.int32), OTHERS_ASKED)
    reads = len(np.unique(walked[:, :K]))
    written = [lists[span.start] for span in cut(hit, blocks - hit, LAYOUT)]
    return (
        len(np.unique(asked)), len(again), len(np.unique(others)), len(np.unique(walked)), reads, reads * len(LAYOUT.planes(K)),
        len(written) * SHARDS,
    )  # fmt: skip


def table(given: Parameters, placement: Placement, groups: int, told: Told) -> Lists:
    """Lists of the first `groups` placement groups, (groups, k+m) ordinals; by as many processes as there are cores where they are many."""
    if groups <= ALONE_GROUPS_MAX:
        return placement.lists_of(np.arange(groups, dtype=np.uint64))
    parts: list[Lists] = []
    starts = range(0, groups, PLACED_AT_ONCE)
    context = multiprocessing.get_context("spawn")  # a fork would take threads' locks along
    with ProcessPoolExecutor(os.cpu_count(), context, _begin, (given.servers, given.ssds)) as pool:
        for part in pool.map(partial(_placed, groups), starts):
            parts.append(part)
            told(len(parts) / len(starts))
    return np.concatenate(parts)


_here: list[Placement] = []  # of a process of the pool


def _begin(servers: int, ssds: int) -> None:
    os.nice(5)
    # glibc gives arrays of megabytes back to the kernel each time, and half of all time goes into fresh pages: keep them
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 256 << 20)
    libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
    _here.append(Placement(cluster_map(servers, ssds)))


def _placed(groups: int, start: int) -> Lists:
    return _here[0].lists_of(np.arange(start, min(start + PLACED_AT_ONCE, groups), dtype=np.uint64))


@dataclass(frozen=True)
class Busiest:
    """Load of the busiest daemon in multiples of the mean: without a hot extent, and with one on top, over all groups it may lie in."""

    plain: float
    median: float
    worst: float


def busiest(lists: Lists, daemons: int, extra: float) -> Busiest:
    """`extra`: what the hot extent adds to each node of its group, in multiples of the mean daemon's load."""
    shares = np.bincount(lists.ravel(), minlength=daemons) * (daemons / lists.size)
    plain = float(shares.max())
    loads = np.maximum(shares[lists].max(axis=1) + extra, plain) if extra else np.full(len(lists), plain)
    return Busiest(plain, float(np.median(loads)), float(loads.max()))


@dataclass(frozen=True)
class Connections:
    """Open at once, a host that is in use and a daemon's share of all hosts."""

    client_small: float
    client_bulk: float
    daemon: float


def connections(given: Parameters, sent: Messages, idle_seconds: float, bulk_max: int) -> Connections:
    """A connection lives `idle_seconds` after its last use. Prompts are spread evenly over hosts, nodes over prompts."""
    prompts = given.prompts_per_second / given.hosts * idle_seconds

    def met(messages_of_one: float) -> float:
        return float(given.daemons * -np.expm1(-prompts * messages_of_one / given.daemons))

    small, bulk = met(sent.discover + sent.checks + sent.promise), min(met(sent.read + sent.write), bulk_max)
    return Connections(small, bulk, (small + bulk) * given.hosts / given.daemons)
