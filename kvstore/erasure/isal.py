"""ISA-L through the native core: in place, in batches, without the GIL."""

from collections.abc import Sequence

import numpy as np

from kvstore.erasure import checks
from kvstore.erasure.interface import U8
from kvstore.kernels import _native
from kvstore.layout import Plane


class IsalCodec:
    """See `interface.Codec`. Tables are made once per set of survivors and shared by all threads."""

    name = "isal"

    def __init__(self, k: int, m: int) -> None:
        checks.check_code(k, m)
        self.native = _native.Codec(k, m)

    @property
    def k(self) -> int:
        return self.native.k

    @property
    def m(self) -> int:
        return self.native.m

    def encode(self, data: U8) -> U8:
        data = checks.checked_data(data, self.k)
        parity = np.empty((self.m, data.shape[1]), np.uint8)
        self.native.encode(data, parity)
        return parity

    def decode(self, shards: Sequence[tuple[int, U8]]) -> U8:
        chosen = checks.checked_shards(shards, self.k, self.m)
        data = np.empty((self.k, chosen[0][1].size), np.uint8)
        have = [number for number, _ in chosen]
        lost = [number for number in range(self.k) if number not in have]
        self.native.decode(have, [piece for _, piece in chosen], lost, [data[number] for number in lost])
        for number, piece in chosen:
            if number < self.k:
                data[number] = piece
        return data

    def encode_plane(self, blocks: U8, plane: Plane) -> U8:
        checks.check_plane(blocks, plane, self.k)
        parity = np.empty((self.m, len(blocks), plane.shard_bytes), np.uint8)
        self.native.encode_plane(blocks, plane.offset_bytes, plane.bytes, parity)
        return parity

    def rebuild_plane(self, blocks: U8, plane: Plane, have: Sequence[int], parity: Sequence[U8]) -> None:
        checks.check_rebuild(blocks, plane, have, parity, self.k, self.m)
        pieces = [np.ascontiguousarray(piece) for piece in parity]
        self.native.rebuild_plane(blocks, plane.offset_bytes, plane.bytes, plane.shard_bytes, [int(number) for number in have], pieces)
