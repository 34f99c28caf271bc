"""Rates per daemon and column, and what follows from them: arithmetic alone, so that a hand can check it.

The two columns are not one load. `mean` is a day's tokens spread evenly, read by this project's client (10 shards of a block). `peak` is
the published pair of rates, as bytes that nodes moved, by a client that asks 11 nodes for every block; prompts follow from what was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.prompts import LAYOUT
from benchmarks.scale.parameters import SHARDS, WINDOW_ENTRY_BYTES, WINDOW_SECONDS, K, Parameters

SHARD_BYTES: Final = sum(plane.shard_bytes for plane in LAYOUT.planes(K))  # of one block, on one node
PUBLISHED_ASKS: Final = K + 1
# Of one prompt: LOCATE before it is scheduled, REGISTER by prefill and by decode, TOUCH of the entry that was used.
DIRECTORY_MESSAGES: Final = 4
REGISTERED: Final = 2 + 3  # prefill keeps two, decode its last three (kvstore/client/agent/keeps.py)
TOUCHED: Final = 1


@dataclass(frozen=True)
class Rates:
    """Of one daemon, a second."""

    prompts: float  # of the whole cluster
    read_bytes: float
    block_reads: float  # were each block an object: one shard read each
    extent_reads: float
    write_bytes: float  # parity included
    extent_writes: float
    discovery_keys: float  # each key once; what is asked again where a walk stops is placed.Messages.checked_keys
    promises: float  # of one extent at one node, with a touch


def mean(given: Parameters) -> Rates:
    blocks = given.blocks_per_second
    read = blocks * given.hit_rate * SHARD_BYTES * K
    written = blocks * (1 - given.hit_rate + given.generated) * SHARD_BYTES * SHARDS
    return _per_daemon(given, blocks, read, written)


def peak(given: Parameters) -> Rates:
    read_blocks = given.peak_read_bytes_per_second / (SHARD_BYTES * PUBLISHED_ASKS)
    return _per_daemon(given, read_blocks / given.hit_rate, given.peak_read_bytes_per_second, given.peak_write_bytes_per_second)


def _per_daemon(given: Parameters, blocks: float, read_bytes: float, written_bytes: float) -> Rates:
    prompts = blocks / given.prompt_blocks
    block_reads = read_bytes / SHARD_BYTES / given.daemons
    return Rates(
        prompts=prompts,
        read_bytes=read_bytes / given.daemons,
        block_reads=block_reads,
        extent_reads=block_reads / given.extent_blocks,
        write_bytes=written_bytes / given.daemons,
        extent_writes=written_bytes / given.daemons / SHARD_BYTES / given.extent_blocks,
        discovery_keys=blocks / given.daemons,
        promises=prompts * len(given.extent_lengths) * SHARDS / given.daemons,
    )


@dataclass(frozen=True)
class Stored:
    """On one daemon, when it is full."""

    bytes: float
    extents: float
    index_bytes: float
    index_share: float  # of stored bytes
    filter_bytes: float


def stored(given: Parameters, record_bytes: float, index_bytes_per_extent: float, filter_bytes_per_extent: float) -> Stored:
    """`record_bytes`: one shard of a mean stored extent with head, checks and padding."""
    each = given.stored_bytes / given.daemons
    extents = each / record_bytes
    return Stored(each, extents, extents * index_bytes_per_extent, index_bytes_per_extent / record_bytes, extents * filter_bytes_per_extent)


@dataclass(frozen=True)
class Windows:
    """Of the whole cluster, at the mean rate of prompts."""

    ram_bytes_per_kept: float  # for each entry that a prompt keeps
    entries_per_kept: float
    messages: float  # a second, to all directories
    operations: float  # keys located, registered and touched a second


def windows(given: Parameters, located_keys: int) -> Windows:
    """`located_keys`: that one lookup asks a directory for."""
    alive = given.prompts_per_second * WINDOW_SECONDS
    return Windows(
        ram_bytes_per_kept=alive * WINDOW_ENTRY_BYTES,
        entries_per_kept=alive,
        messages=given.prompts_per_second * DIRECTORY_MESSAGES,
        operations=given.prompts_per_second * (located_keys + REGISTERED + TOUCHED),
    )


@dataclass(frozen=True)
class Hot:
    """What one extent adds to each of the nodes that serve it, in multiples of the mean daemon's load of that kind."""

    discovery: float
    promises: float
    reads_no_tier: float  # every prompt reads it from the nodes
    reads_tier: float  # agents keep it in RAM from its second load on; one restart of each host in an hour


def hot(given: Parameters, rates: Rates, extent_blocks: int, promise_reuse_seconds: float, bucket_seconds: float) -> Hot:
    """Of the extent that `hot_share` of all prompts begin with, at the load `rates`.

    A key is asked at one of its 12 nodes. A host promises an extent once in `promise_reuse_seconds`, and in each new time bucket of
    `bucket_seconds`, at all 12. A load reads 10 of its 12 shards.
    """
    prompts = given.hot_share * rates.prompts
    again = 1 / promise_reuse_seconds + 1 / bucket_seconds
    promised = min(prompts, given.hosts * again) if promise_reuse_seconds else prompts
    shard_bytes = extent_blocks * SHARD_BYTES
    loads = min(prompts, 2 * given.hosts / 3600)
    return Hot(
        discovery=prompts / SHARDS / rates.discovery_keys,
        promises=promised / rates.promises,
        reads_no_tier=prompts * K / SHARDS * shard_bytes / rates.read_bytes,
        reads_tier=loads * K / SHARDS * shard_bytes / rates.read_bytes,
    )
