"""zfec: needs no native core, is some 25 times slower, and is the oracle of the other codec."""

from collections.abc import Sequence

import numpy as np
import zfec

from kvstore.erasure import checks
from kvstore.erasure.interface import U8
from kvstore.erasure.pieces import cut_plane, place_pieces
from kvstore.layout import Plane


class ZfecCodec:
    """See `interface.Codec`."""

    name = "zfec"

    def __init__(self, k: int, m: int) -> None:
        checks.check_code(k, m)
        self.k = k
        self.m = m
        self._encoder = zfec.Encoder(k, k + m)
        self._decoder = zfec.Decoder(k, k + m)

    def encode(self, data: U8) -> U8:
        data = checks.checked_data(data, self.k)
        if self.m == 0:
            return np.empty((0, data.shape[1]), np.uint8)
        return self._array(self._encoder.encode([row.data for row in data], list(range(self.k, self.k + self.m))))

    def decode(self, shards: Sequence[tuple[int, U8]]) -> U8:
        chosen = checks.checked_shards(shards, self.k, self.m)
        return self._array(self._decoder.decode([piece.data for _, piece in chosen], [number for number, _ in chosen]))

    def encode_plane(self, blocks: U8, plane: Plane) -> U8:
        data = cut_plane(blocks, plane, self.k)
        parity = np.empty((self.m, len(blocks), plane.shard_bytes), np.uint8)
        for b in range(len(blocks)):
            parity[:, b] = self.encode(data[:, b])
        return parity

    def rebuild_plane(self, blocks: U8, plane: Plane, have: Sequence[int], parity: Sequence[U8]) -> None:
        checks.check_rebuild(blocks, plane, have, parity, self.k, self.m)
        data = cut_plane(blocks, plane, self.k)
        of_parity = dict(zip([number for number in have if number >= self.k], parity, strict=True))
        for b in range(len(blocks)):
            shards = [(number, data[number, b] if number < self.k else of_parity[number][b]) for number in have]
            rebuilt = self.decode(shards)
            lost = {number: rebuilt[number][None] for number in range(self.k) if number not in have}
            place_pieces(blocks[b : b + 1], plane, self.k, lost)

    @staticmethod
    def _array(rows: Sequence[bytes]) -> U8:
        return np.stack([np.frombuffer(row, np.uint8) for row in rows])
