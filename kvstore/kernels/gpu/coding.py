"""Lost data shards rebuilt in a landing zone, each block from its own set of survivors, all in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.erasure.checks import check_code, check_numbers
from kvstore.errors import CodecError
from kvstore.kernels import _native
from kvstore.kernels.gpu.launch import check_zone, kernels, on, power_of_two, require, whole_programs

if TYPE_CHECKING:
    from torch import Tensor

TILE_WORDS = 512  # 128 threads x 16 bytes; accumulators then take 64 registers
UNROLL = 5
TILE_WORDS_MAX, BLOCKS_MAX = 1 << 12, 32  # where programs are interpreted

Survivors = tuple[int, ...]


@lru_cache(maxsize=4096)
def coefficients(k: int, m: int, have: Survivors, lost: Survivors) -> npt.NDArray[np.uint8]:
    """(lost, k): data shard lost[j] is the sum over i of [j, i] x shard have[i], as our codec decodes it. `have` and `lost` ascend.

    The codec itself says: decoding the unit vectors gives its matrix. CodecError for numbers that it must not see.
    """
    check_code(k, m)
    check_numbers(have, k, m)
    if len(have) != k or list(have) != sorted(have) or list(lost) != sorted(set(lost)) or any(not 0 <= n < k or n in have for n in lost):
        raise CodecError(
            "E526", f"shards {list(lost)} of {list(have)}", f"{k} that are there are needed, and data shards that are not, ascending"
        )
    rows = np.zeros((len(lost), k), np.uint8)
    _native.Codec(k, m).decode(list(have), list(np.eye(k, dtype=np.uint8)), list(lost), list(rows))
    rows.flags.writeable = False
    return rows


def lost_of(have: Survivors, k: int) -> Survivors:
    """The data shards that `have` does not name."""
    return tuple(number for number in range(k) if number not in have)


def rebuild(zone: Tensor, k: int, m: int, survivors: Sequence[Survivors | None]) -> None:
    """Writes the data shards that survivors[b] does not name into their places in zone[:, b]; asynchronous on a GPU.

    zone: uint8 (k + m, n, shard_bytes), see `launch.check_zone`. survivors[b]: exactly k ascending shard numbers, or None to leave block b.
    Nobody else may write the places of lost shards meanwhile: fence late replies first. LayoutError E508, CodecError.
    """
    import torch

    check_code(k, m)
    check_zone(zone)
    require(
        zone.shape[0] == k + m and zone.shape[1] == len(survivors),
        "landing zone",
        f"{tuple(zone.shape)} for {len(survivors)} blocks of {k}+{m}",
    )
    sets = [have for have in dict.fromkeys(survivors) if have is not None and lost_of(have, k)]
    if not sets:
        return
    pairs = -(-max(len(lost_of(have, k)) for have in sets) // 2)
    lost = np.full((len(sets), 2 * pairs), -1, np.int32)
    masks = np.zeros((len(sets), pairs, k, 8), np.uint64)
    for at, have in enumerate(sets):
        numbers = lost_of(have, k)
        lost[at, : len(numbers)] = numbers
        for j, row in enumerate(coefficients(k, m, have, numbers)):
            half = np.uint64(0xFFFFFFFF << 32 * (j % 2))
            masks[at, j // 2] |= (row[:, None] >> np.arange(8, dtype=np.uint8) & 1) * half
    number_of = {have: at for at, have in enumerate(sets)}
    blocks, chosen = np.array([(b, number_of[have]) for b, have in enumerate(survivors) if have in number_of], np.int32).T
    words = zone.shape[2] // 4
    unit = gcd(32, *zone.stride()[:2]) // 4
    few = whole_programs(zone)
    tile = min(TILE_WORDS_MAX, power_of_two(words)) if few else TILE_WORDS
    tiles = -(-words // tile)
    of_one = min(BLOCKS_MAX, power_of_two(len(blocks))) if few else 1
    kernel = kernels("coding_kernel", zone).rebuild
    with on(zone):
        kernel[(-(-len(blocks) // of_one) * tiles,)](
            zone.view(torch.int32),
            *(
                torch.from_numpy(table.copy()).to(zone.device)
                for table in (blocks, chosen, np.array(sets, np.int32), lost, masks.view(np.int64))
            ),
            len(blocks),
            zone.stride(0) // (4 * unit),
            zone.stride(1) // (4 * unit),
            UNIT=unit,
            WORDS=words,
            K=k,
            PAIRS=pairs,
            TILES=tiles,
            BLOCKS=of_one,
            UNROLL=UNROLL,
            TILE=tile,
        )
