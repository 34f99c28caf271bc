"""The store's checks over many pieces at once: sums of pieces (xxh3-64, seeded with all that names a place), digests (xxh3-128).

docs/FORMAT.md says what they are over; the plain references are `shard_seed`, `shard_sum` and `plane_digest` of kernels/hash_reference.py.
Sums and digests are u64 numbers held in int64 tensors bit by bit: torch adds and compares those.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import KeyFormatError
from kvstore.kernels.gpu.launch import check_zone, kernels, on, power_of_two, require, whole_programs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PIECES = 4  # of one program: a tile of 4 x 1 KiB in 128 threads
PIECES_MAX = 256  # where programs are interpreted
K_MAX = 32

# XXH3's default secret, and the first values of its accumulators.
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
FIRST_VALUES = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip
assert len(SECRET) == 192


@dataclass(frozen=True)
class Identity:
    """What names the pieces of one extent: owner (16 bytes), extent key (32), write id, and which of its blocks the first row holds."""

    owner: bytes
    extent_key: bytes
    write_id: int
    first_block: int = 0

    def __post_init__(self) -> None:
        if len(self.owner) != 16 or len(self.extent_key) != 32:
            raise KeyFormatError("E531", "identity of an extent", "an owner has 16 bytes, an extent key 32")


@lru_cache(maxsize=8)
def _secret(device: torch.device) -> Tensor:
    import torch

    words = [int.from_bytes(SECRET[at : at + 8], "little") for at in range(len(SECRET) - 7)] + list(FIRST_VALUES)
    return torch.from_numpy(np.array(words, np.uint64).view(np.int64)).to(device)


def piece_sums(zone: Tensor, shards: Tensor, rows: Tensor, plane: int, extents: Sequence[tuple[Identity, int]]) -> Tensor:
    """Sums (count,) int64 of the pieces zone[shards[i], rows[i]], asynchronous on a GPU.

    zone: uint8 (shards, n, shard_bytes), see `launch.check_zone`. shards, rows: int32 (count,), inside the zone. extents: identity and
    number of rows of each, in the order of the zone's rows. LayoutError E508.
    """
    import torch

    check_zone(zone)
    count = len(shards)
    require(
        shards.shape == rows.shape == (count,) and shards.dtype == rows.dtype == torch.int32,
        "pieces",
        "shards and rows are not int32 of one length",
    )
    require(sum(rows_count for _, rows_count in extents) == zone.shape[1], "extents", f"have other than {zone.shape[1]} rows")
    out = torch.empty(count, dtype=torch.int64, device=zone.device)
    if count == 0:
        return out
    names, of_row, begin = bytearray(), np.empty(zone.shape[1], np.int32), 0
    for at, (name, rows_count) in enumerate(extents):
        # The block of a row is its number and this, which may be below zero.
        names += struct.pack("<16s32sQq", name.owner, name.extent_key, name.write_id, name.first_block - begin)
        of_row[begin : begin + rows_count] = at
        begin += rows_count
    unit = gcd(32, *zone.stride()[:2]) // 8
    pieces = min(PIECES_MAX, power_of_two(count)) if whole_programs(zone) else PIECES
    kernel = kernels("sums_kernel", zone).piece_sums
    with on(zone):
        kernel[(-(-count // pieces),)](
            zone.view(torch.int64),
            shards,
            rows,
            torch.from_numpy(of_row).to(zone.device),
            torch.frombuffer(names, dtype=torch.int64).to(zone.device),
            _secret(zone.device),
            out,
            count,
            plane,
            zone.stride(0) // (8 * unit),
            zone.stride(1) // (8 * unit),
            UNIT=unit,
            WORDS=zone.shape[2] // 8,
            PIECES=pieces,
        )
    return out


def plane_digests(block_keys: Sequence[bytes], write_ids: Sequence[int], data_sums: Tensor) -> Tensor:
    """Digests (n, 2) int64, low half first, over key, write id and sums (k, n) of each block's data pieces; asynchronous on a GPU."""
    import torch

    k, blocks = data_sums.shape
    require(data_sums.dtype == torch.int64 and 1 <= k <= K_MAX, "sums", f"{data_sums.dtype} {tuple(data_sums.shape)}, not int64 (k, n)")
    require(
        len(block_keys) == len(write_ids) == blocks,
        "block keys",
        f"{len(block_keys)} keys and {len(write_ids)} write ids of {blocks} blocks",
    )
    if any(len(key) != 32 for key in block_keys):
        raise KeyFormatError("E531", "block keys", "a key has 32 bytes")
    out = torch.empty((blocks, 2), dtype=torch.int64, device=data_sums.device)
    if blocks == 0:
        return out
    names = bytearray().join(key + struct.pack("<Q", write_id) for key, write_id in zip(block_keys, write_ids, strict=True))
    heads = torch.frombuffer(names, dtype=torch.int64).reshape(blocks, 5).to(data_sums.device)
    messages = torch.cat([heads, data_sums.T], dim=1).contiguous()
    rows = min(PIECES_MAX, power_of_two(blocks)) if whole_programs(data_sums) else 32
    kernel = kernels("sums_kernel", data_sums).wide_sums
    with on(data_sums):
        kernel[(-(-blocks // rows),)](messages, _secret(data_sums.device), out, blocks, WORDS=5 + k, ROWS=rows)
    return out
