"""Between blocks and shards, with copies: for tools, tests and the portable codec. The hot path codes in place and never comes here."""

from collections.abc import Mapping

import numpy as np

from kvstore.erasure.checks import check_numbers, check_plane
from kvstore.erasure.interface import U8
from kvstore.errors import CodecError
from kvstore.layout import Plane


def cut_plane(blocks: U8, plane: Plane, k: int) -> U8:
    """Data shards (k, n, shard_bytes) of one plane of blocks (n, block_bytes), padded with zeros: what nodes store."""
    check_plane(blocks, plane, k)
    padded = np.zeros((len(blocks), k * plane.shard_bytes), np.uint8)
    padded[:, : plane.bytes] = blocks[:, plane.offset_bytes : plane.offset_bytes + plane.bytes]
    return np.ascontiguousarray(padded.reshape(len(blocks), k, plane.shard_bytes).swapaxes(0, 1))


def place_pieces(blocks: U8, plane: Plane, k: int, pieces: Mapping[int, U8]) -> None:
    """Copies data shards {number: (n, shard_bytes)} to their places in blocks (n, block_bytes), without their padding."""
    check_plane(blocks, plane, k)
    for number, piece in pieces.items():
        check_numbers([number], 1, k - 1)
        if piece.shape != (len(blocks), plane.shard_bytes):
            raise CodecError("E528", f"shard {number}", f"has shape {piece.shape}, not {(len(blocks), plane.shard_bytes)}")
        start = number * plane.shard_bytes
        real = max(0, min(plane.shard_bytes, plane.bytes - start))
        blocks[:, plane.offset_bytes + start : plane.offset_bytes + start + real] = piece[:, :real]
