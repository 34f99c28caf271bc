"""Prompts of the table: chains of true-sized blocks, in the shapes that chats (64-block extents) and agents (many short ones) leave behind.

Block bytes are made from the block's key, so that a reader in another process can say whether they are right.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.client import Client
from kvstore.kernels import _native
from kvstore.keys import BLOCK_TOKENS, KeyChain, Namespace
from kvstore.layout import PRESETS

LAYOUT = PRESETS["v41"]
BLOCK_BYTES = LAYOUT.block_bytes
FULL_EXTENT_BLOCKS = 64
LATE_SHARDS_SECONDS = 10.0
AGENT_EXTENTS_OF_600 = 36  # a weka prompt's chain
AGENT_EXTENTS_P99_OF_600 = 116

Blocks = npt.NDArray[np.uint8]


def namespace(name: str) -> Namespace:
    return Namespace(weights=name, kv_dtype="v41", layout_digest=LAYOUT.digest())


def tokens_of(seed: int, blocks: int) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 128_000, blocks * BLOCK_TOKENS, dtype=np.uint32)


def chain_keys(seed: int, blocks: int, name: str = "bench") -> Blocks:
    """Keys (blocks, 32) of a prompt of random tokens; another seed or name is another prompt."""
    return KeyChain(namespace(name)).extend(tokens_of(seed, blocks))


def bytes_of(keys: Blocks, out: Blocks | None = None) -> Blocks:
    """True-sized blocks (n, block_bytes) made from their keys."""
    filled = np.empty((len(keys), BLOCK_BYTES), np.uint8) if out is None else out
    _native.generate_blocks(keys, BLOCK_BYTES, filled)
    return filled


def are_bytes_of(keys: Blocks, blocks: Blocks) -> bool:
    """Whether blocks (n, block_bytes) are what their keys stand for."""
    return _native.verify_blocks(keys, BLOCK_BYTES, blocks) < 0


def full_extents(blocks: int) -> list[int]:
    """Block counts of a chain stored at once."""
    return [min(FULL_EXTENT_BLOCKS, blocks - at) for at in range(0, blocks, FULL_EXTENT_BLOCKS)]


def short_extents(blocks: int, extents_of_600: int) -> list[int]:
    """Block counts of a chain that grew turn by turn: as many extents as the share of 600 blocks that it is, lengths equal within one."""
    extents = max(2, blocks * extents_of_600 // 600)
    return [blocks * (i + 1) // extents - blocks * i // extents for i in range(extents)]


def store_in_turns(client: Client, keys: Blocks, lengths: Sequence[int]) -> None:
    """Stores a chain as extents of these lengths, one store each.

    A loaded machine acknowledges some shards late: they are waited for. Raises where an extent is not stored, or is degraded and stays so.
    """
    data = bytes_of(keys)
    first = extents = degraded = 0
    before = client.stats()["shards_acknowledged"]
    for length in lengths:
        result = client.store(keys[: first + length], data[first : first + length], first_block=first).result(60)
        if not result.outcome.readable:
            raise RuntimeError(f"store of blocks {first} to {first + length} gave {result.outcome}")
        first += length
        extents += result.extents_stored
        degraded += result.extents_degraded
    shards = extents * (client.map.k + client.map.m)
    deadline = time.monotonic() + LATE_SHARDS_SECONDS
    while (acknowledged := client.stats()["shards_acknowledged"] - before) < shards and time.monotonic() < deadline:
        time.sleep(0.001)
    if degraded and acknowledged < shards:
        raise RuntimeError(f"{degraded} of {extents} extents are degraded: {acknowledged} of {shards} shards after {LATE_SHARDS_SECONDS} s")


def pretouched(blocks: int) -> Blocks:
    """A destination whose pages are there already: a first touch costs more than the load (LIMITS)."""
    return np.ones((blocks, BLOCK_BYTES), np.uint8)


def chains(first_seed: int, blocks: int) -> Iterator[Blocks]:
    """Prompts without end, each a new one."""
    seed = first_seed
    while True:
        yield chain_keys(seed, blocks)
        seed += 1
