"""What the table assumes. Units stand last in the names; a value out of its range is a UsageError E131."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from benchmarks.prompts import AGENT_EXTENTS_OF_600, full_extents, short_extents
from kvstore.clustermap import NODES_MAX
from kvstore.errors import UsageError
from kvstore.keys import BLOCK_TOKENS

K: Final = 10
M: Final = 2
SHARDS: Final = K + M
STORED_EXTENT_BLOCKS: Final = {"chat": 37, "agent": 27}  # mean of what the traces leave stored; most are read for longer than one prompt
WINDOW_ENTRY_BYTES: Final = 1_415_040  # 134 slots of the first 20 layers
WINDOW_SECONDS: Final = 180
BLOCKS_MAX: Final = 65_535


@dataclass(frozen=True)
class Parameters:
    """One cluster and its load. Rates are of the whole cluster."""

    servers: int = 460
    ssds: int = 16  # of a server, a daemon each
    stored_bytes: float = 110e15  # parity included
    day_tokens: float = 155e12  # of prompts
    hit_rate: float = 0.96  # share of prompts' tokens
    generated: float = 0.0  # blocks that decode servers write, per block of a prompt
    prompt_blocks: int = 600
    shape: str = "agent"
    peak_read_bytes_per_second: float = 11e12  # as published, the eleventh shard of each read included
    peak_write_bytes_per_second: float = 0.91e12  # as published, parity included
    hot_share: float = 0.30  # of all prompts begin with one and the same extent
    hosts: int = 1_000  # that serve models, an agent each
    ssd_read_bytes_per_second: float = 7e9
    ssd_write_bytes_per_second: float = 2e9
    nic_bits_per_second: float = 400e9  # of a server

    def __post_init__(self) -> None:
        _need("--servers", self.servers, 1, NODES_MAX)
        _need("--ssds", self.ssds, 1, 256)
        if not SHARDS <= self.daemons <= NODES_MAX:
            raise UsageError(
                "E131", f"{self.servers} servers of {self.ssds} SSDs", "out of range", f"give {SHARDS} to {NODES_MAX} SSDs in all"
            )
        _need("--capacity", self.stored_bytes, 1e9, 1e21)
        _need("--tokens-a-day", self.day_tokens, 1, 1e18)
        _need("--hit-rate", self.hit_rate, 0.01, 1)
        _need("--generated", self.generated, 0, 10)
        _need("--blocks", self.prompt_blocks, 1, BLOCKS_MAX)
        if self.shape not in STORED_EXTENT_BLOCKS:
            raise UsageError("E131", f'--shape "{self.shape}"', "is not known", f"one of {', '.join(STORED_EXTENT_BLOCKS)}")
        _need("--peak-read", self.peak_read_bytes_per_second, 1, 1e18)
        _need("--peak-write", self.peak_write_bytes_per_second, 1, 1e18)
        _need("--hot", self.hot_share, 0, 1)
        _need("--hosts", self.hosts, 1, 10_000_000)
        _need("--ssd-read", self.ssd_read_bytes_per_second, 1, 1e15)
        _need("--ssd-write", self.ssd_write_bytes_per_second, 1, 1e15)
        _need("--nic", self.nic_bits_per_second / 1e9, 0.001, 1e6)

    @property
    def daemons(self) -> int:
        return self.servers * self.ssds

    @property
    def blocks_per_second(self) -> float:
        """Blocks of prompts, hit or not."""
        return self.day_tokens / 86_400 / BLOCK_TOKENS

    @property
    def prompts_per_second(self) -> float:
        return self.blocks_per_second / self.prompt_blocks

    @property
    def extent_lengths(self) -> list[int]:
        """Blocks of each extent on a prompt's chain, in order: full ones of a chat, 36 of 600 blocks of an agent."""
        if self.shape == "chat":
            return full_extents(self.prompt_blocks)
        return [length for length in short_extents(self.prompt_blocks, AGENT_EXTENTS_OF_600) if length]

    @property
    def extent_blocks(self) -> float:
        """Mean of an extent that a prompt reads."""
        return self.prompt_blocks / len(self.extent_lengths)

    @property
    def stored_extent_blocks(self) -> int:
        """Mean of an extent that is stored."""
        return STORED_EXTENT_BLOCKS[self.shape]


def _need(flag: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise UsageError("E131", f"{flag} {value:g}", "out of range", f"give {low:g} to {high:g}")
