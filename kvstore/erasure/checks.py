"""Refuses, with CodecError, what a coder must not see: zfec 1.6 hangs on duplicates and accepts number 200. Both codecs check here."""

from collections.abc import Sequence

import numpy as np

from kvstore.erasure.interface import U8
from kvstore.errors import CodecError
from kvstore.layout import K_MAX, Plane

M_MAX = 4


def check_code(k: int, m: int) -> None:
    if type(k) is not int or type(m) is not int or not 1 <= k <= K_MAX or not 0 <= m <= M_MAX:
        raise CodecError("E522", f"code {k}+{m}", f"k must be 1 to {K_MAX} and m 0 to {M_MAX}")


def checked_data(data: U8, k: int) -> U8:
    """The same k data shards, contiguous."""
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or len(data) != k or data.shape[1] == 0:
        shape = f"{getattr(data, 'dtype', type(data).__name__)} {getattr(data, 'shape', '')}".strip()
        raise CodecError("E523", "data shards", f"got {shape}", f"pass a uint8 array of shape ({k}, bytes)")
    return np.ascontiguousarray(data)


def check_numbers(numbers: Sequence[int], k: int, m: int) -> None:
    """Numbers of shards that are at hand: distinct, in range, k or more."""
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or not 0 <= number < k + m:
            raise CodecError("E524", f"shard number {number!r}", f"is not one of 0 to {k + m - 1}")
    if len(set(numbers)) != len(numbers):
        raise CodecError("E525", f"shard numbers {sorted(numbers)}", "one is there twice")
    if len(numbers) < k:
        raise CodecError("E526", f"{len(numbers)} shards", f"{k} are needed")


def checked_shards(shards: Sequence[tuple[int, U8]], k: int, m: int) -> list[tuple[int, U8]]:
    """The k shards of lowest number, in order of number, each contiguous and of one length."""
    check_numbers([number for number, _ in shards], k, m)
    for number, piece in shards:
        if not isinstance(piece, np.ndarray) or piece.dtype != np.uint8 or piece.ndim != 1:
            raise CodecError("E527", f"shard {number}", "is not a one-dimensional uint8 array")
    lengths = {piece.size for _, piece in shards}
    if len(lengths) != 1 or 0 in lengths:
        raise CodecError("E528", "shards", f"their lengths are {sorted(lengths)}", "all must have one length, at least 1 byte")
    return [(int(number), np.ascontiguousarray(piece)) for number, piece in sorted(shards, key=lambda shard: int(shard[0]))[:k]]


def check_plane(blocks: U8, plane: Plane, k: int) -> None:
    """Blocks (n, block_bytes) that hold the plane, with contiguous rows; k shards that hold it, too."""
    if not isinstance(blocks, np.ndarray) or blocks.dtype != np.uint8 or blocks.ndim != 2:
        raise CodecError("E529", "blocks", "are not a two-dimensional uint8 array")
    if plane.offset_bytes < 0 or plane.bytes < 1 or plane.offset_bytes + plane.bytes > blocks.shape[1]:
        raise CodecError("E530", f"plane {plane}", f"does not lie inside a block of {blocks.shape[1]} bytes")
    if plane.shard_bytes * k < plane.bytes:
        raise CodecError("E530", f"plane {plane}", f"{k} shards do not hold it")


def check_rebuild(blocks: U8, plane: Plane, have: Sequence[int], parity: Sequence[U8], k: int, m: int) -> None:
    """Arguments of rebuild_plane: exactly k numbers, one array (n, shard_bytes) for each parity number among them."""
    check_plane(blocks, plane, k)
    check_numbers(have, k, m)
    if len(have) != k:
        raise CodecError("E526", f"{len(have)} shards", f"exactly {k} are needed")
    if len(parity) != sum(number >= k for number in have):
        raise CodecError("E526", f"{len(parity)} parity arrays", f"shards {sorted(have)} name another count")
    for piece in parity:
        if not isinstance(piece, np.ndarray) or piece.dtype != np.uint8 or piece.shape != (len(blocks), plane.shard_bytes):
            raise CodecError("E528", "parity shards", f"are not all uint8 arrays of shape {(len(blocks), plane.shard_bytes)}")
