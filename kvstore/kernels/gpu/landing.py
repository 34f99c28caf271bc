"""One plane of many blocks, from what arrived in a landing zone to an engine's pages: path B of docs/GPU.md.

    zone      uint8 (k + m, n, shard_bytes)   zone[s, b]: shard s of block b; the place of a lost data shard is where it is rebuilt
    sums      int64 (k + m, n)                what came with each piece: its sum,
    digests   int64 (k + m, n, 2)             and the digest of its (block, plane), low half first; rows of absent shards are not read

    land_plane(...) -> LandedPlane            checks pieces, rebuilds, checks blocks; returns once it is known which blocks are right
        .scatter(part, pages, table)          asynchronous; rows of wrong blocks are left alone

Steps: every arrived piece must have its sum; among the pieces of a block, those whose digest most others do not have are wrong, too. From
the k lowest right ones the lost data pieces are rebuilt and summed. Then the digest of the block under the *reader's* key must be the one
that came. A wrong piece is lost for its block alone. The path through host memory also looks for one wrong piece among more than k whose
sums all hold; here such a block is WRONG_DIGEST, and the caller may load it that way.

Nobody else may write the zone meanwhile: the transport has fenced it. Any thread; results are ready on the current CUDA stream.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.erasure.checks import check_code
from kvstore.errors import MisuseError
from kvstore.kernels.gpu.coding import Survivors, lost_of, rebuild
from kvstore.kernels.gpu.launch import check_zone, require
from kvstore.kernels.gpu.paging import PageTable, Part, scatter
from kvstore.kernels.gpu.sums import Identity, piece_sums, plane_digests
from kvstore.layout import Plane

if TYPE_CHECKING:
    from torch import Tensor


class Outcome(enum.IntEnum):
    """Of one (block, plane)."""

    RIGHT = 0  # as it came
    REBUILT = 1  # right, some pieces decoded
    TOO_FEW = 2  # fewer than k right pieces
    WRONG_DIGEST = 3  # its pieces do not belong together, or not to the reader's key


@dataclass(frozen=True)
class Arrived:
    """Rows of a zone that belong to one extent, and which of its shards are all there."""

    identity: Identity
    rows_count: int
    shards: tuple[int, ...]


def views_of_bodies(bodies: Tensor, blocks_count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(zone, sums, digests) of one extent's ITEM bodies as a transport writes them: uint8 (k + m, body bytes), one behind the other.

    Body: sums u64 x c | digests 16 B x c | c pieces (docs/PROTOCOL.md). Nothing is copied. LayoutError E508 for bodies of no such length.
    """
    import torch

    head_bytes = 24 * blocks_count
    sound = str(bodies.dtype) == "torch.uint8" and bodies.ndim == 2 and bodies.is_contiguous() and bodies.data_ptr() % 8 == 0
    require(sound and blocks_count > 0, "bodies", f"{bodies.dtype} {tuple(bodies.shape)} of {blocks_count} blocks")
    piece_bytes, rest = divmod(bodies.shape[1] - head_bytes, blocks_count)
    require(
        piece_bytes > 0 and rest == 0 and piece_bytes % 32 == 0, "bodies", f"{bodies.shape[1]} bytes, not those of {blocks_count} blocks"
    )
    checks = bodies.view(torch.int64)
    zone = bodies[:, head_bytes:].view(-1, blocks_count, piece_bytes)
    return zone, checks[:, :blocks_count], checks[:, blocks_count : 3 * blocks_count].view(-1, blocks_count, 2)


@dataclass(frozen=True)
class LandedPlane:
    """`outcomes[b]` of each block, `wrong_pieces` (block, shard), `good` (n,) uint8 where the zone lies."""

    plane: Plane
    k: int
    zone: Tensor
    good: Tensor
    outcomes: tuple[Outcome, ...]
    wrong_pieces: tuple[tuple[int, int], ...]

    def scatter(self, part: Part, pages: Tensor, table: PageTable, *, first_row: int = 0) -> None:
        """Writes the part of every right block into `pages`, see `paging.scatter`; rows of the others are left alone."""
        data = self.zone[: self.k]
        scatter(data, part, pages, table, first_row=first_row, plane_offset_bytes=self.plane.offset_bytes, good=self.good)


def land_plane(
    zone: Tensor,
    sums: Tensor,
    digests: Tensor,
    arrived: Sequence[Arrived],
    block_keys: Sequence[bytes],
    *,
    plane: Plane,
    plane_number: int,
    k: int,
    m: int,
    cipher: int = 0,
) -> LandedPlane:
    """Checks, rebuilds and checks again; block_keys (n) are the reader's own.

    Waits for the GPU twice: for which pieces are right, and for which blocks. MisuseError E510 for encrypted bytes, LayoutError E508 for
    buffers that do not fit; before anything is written.
    """
    import torch

    if cipher:
        raise MisuseError("E510", "loading into GPU memory", f"stored bytes are encrypted (cipher {cipher})", "load through host memory")
    _check(zone, sums, digests, arrived, block_keys, plane, k, m)
    extents = [(extent.identity, extent.rows_count) for extent in arrived]
    blocks = zone.shape[1]
    here = np.zeros((k + m, blocks), np.bool_)
    begin = 0
    for extent in arrived:
        here[list(extent.shards), begin : begin + extent.rows_count] = True
        begin += extent.rows_count

    def sums_of(pieces: np.ndarray[tuple[int, int], np.dtype[np.bool_]]) -> tuple[Tensor, Tensor, Tensor]:
        shards, rows = (torch.from_numpy(numbers.astype(np.int32)).to(zone.device) for numbers in np.nonzero(pieces))
        return shards, rows, piece_sums(zone, shards, rows, plane_number, extents)

    shards, rows, found = sums_of(here)
    sound = torch.zeros((k + m, blocks), dtype=torch.bool, device=zone.device)
    sound[shards, rows] = found == sums[shards, rows]
    # votes[s, b]: how many sound pieces of the block say the same digest as piece s; the lowest of the most stands for them.
    same = (digests[:, None] == digests[None]).all(dim=3) & sound[:, None] & sound[None]
    judge = same.sum(dim=1).argmax(dim=0)
    column = torch.arange(blocks, device=zone.device)
    right = same[judge, :, column].T
    right_here = right.cpu().numpy()

    survivors = _survivors(right_here, k)
    rebuild(zone, k, m, survivors)
    rebuilt = np.zeros_like(here)
    for b, have in enumerate(survivors):
        if have is not None:
            rebuilt[list(lost_of(have, k)), b] = True
    data_sums = sums[:k].clone()
    if rebuilt.any():
        shards, rows, found = sums_of(rebuilt)
        data_sums[shards, rows] = found
    write_ids = [extent.identity.write_id for extent in arrived for _ in range(extent.rows_count)]
    enough = torch.tensor([have is not None for have in survivors], dtype=torch.bool, device=zone.device)
    good = (plane_digests(block_keys, write_ids, data_sums) == digests[judge, column]).all(dim=1) & enough

    outcomes = []
    for b, is_good in enumerate(good.tolist()):
        if survivors[b] is None:
            outcomes.append(Outcome.TOO_FEW)
        else:
            outcomes.append((Outcome.REBUILT if rebuilt[:, b].any() else Outcome.RIGHT) if is_good else Outcome.WRONG_DIGEST)
    wrong = tuple((int(b), int(s)) for b, s in np.argwhere((here & ~right_here).T))
    return LandedPlane(plane, k, zone, good.to(torch.uint8), tuple(outcomes), wrong)


def _survivors(right: np.ndarray[tuple[int, int], np.dtype[np.bool_]], k: int) -> list[Survivors | None]:
    """The k lowest right shards of each block, None where there are fewer. Few different sets: each is made once."""
    known: dict[bytes, Survivors | None] = {}
    result = []
    for column in np.ascontiguousarray(right.T):
        name = column.tobytes()
        if name not in known:
            numbers = np.flatnonzero(column)[:k]
            known[name] = tuple(int(number) for number in numbers) if len(numbers) == k else None
        result.append(known[name])
    return result


def _check(
    zone: Tensor, sums: Tensor, digests: Tensor, arrived: Sequence[Arrived], block_keys: Sequence[bytes], plane: Plane, k: int, m: int
) -> None:
    check_code(k, m)
    check_zone(zone)
    shards, blocks, shard_bytes = zone.shape
    require(
        shards == k + m and shard_bytes == plane.shard_bytes,
        "landing zone",
        f"{tuple(zone.shape)} for {k}+{m} shards of {plane.shard_bytes} bytes",
    )
    require(plane.bytes <= k * shard_bytes, f"{plane}", f"{k} shards do not hold it")
    for name, tensor, shape in (("sums", sums, (shards, blocks)), ("digests", digests, (shards, blocks, 2))):
        sound = str(tensor.dtype) == "torch.int64" and tuple(tensor.shape) == shape and tensor.device == zone.device
        require(sound, name, f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, not int64 {shape} on {zone.device}")
    require(
        sum(extent.rows_count for extent in arrived) == blocks and all(extent.rows_count > 0 for extent in arrived),
        "extents",
        f"have other than {blocks} rows",
    )
    for extent in arrived:
        numbers = extent.shards
        require(
            len(set(numbers)) == len(numbers) and all(0 <= n < shards for n in numbers),
            f"shards {numbers}",
            f"are not distinct numbers below {shards}",
        )
    require(len(block_keys) == blocks and all(len(key) == 32 for key in block_keys), "block keys", f"are not {blocks} of 32 bytes")
