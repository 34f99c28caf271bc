"""What a codec promises, and how to get one.

Shards are numbered: 0 to k - 1 are data (the bytes as they are), k to k + m - 1 are parity. Any k of them give the data back.
Both codecs use zfec's generator matrix (`kernels/codec.hpp` states it), so parity written by one is read by the other.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.errors import CodecError
from kvstore.layout import Plane

U8 = npt.NDArray[np.uint8]


class Codec(Protocol):
    """A (k, m) code. Objects are immutable, and safe to use from many threads at once.

    Faults: CodecError, before anything is written, for shards that are duplicate, missing, out of range, empty or unequal.
    """

    @property
    def name(self) -> str: ...
    @property
    def k(self) -> int: ...
    @property
    def m(self) -> int: ...

    def encode(self, data: U8) -> U8:
        """Parity (m, shard_bytes) of data (k, shard_bytes)."""

    def decode(self, shards: Sequence[tuple[int, U8]]) -> U8:
        """Data (k, shard_bytes) from at least k numbered shards, each of shard_bytes; of more than k the lowest numbers are used."""

    def encode_plane(self, blocks: U8, plane: Plane) -> U8:
        """Parity (m, n, plane.shard_bytes) of one plane of n blocks (n, block_bytes), which may lie any distance apart."""

    def rebuild_plane(self, blocks: U8, plane: Plane, have: Sequence[int], parity: Sequence[U8]) -> None:
        """Writes the data shards that `have` (exactly k numbers) does not name into their places in blocks (n, block_bytes).

        The data shards that it names lie in their places already; `parity` holds an array (n, plane.shard_bytes) for each parity number
        that it names, in its order. Only real bytes are written, never padding.
        """


def codec(name: str, k: int = 10, m: int = 2) -> Codec:
    """The codec called `name` ("isal" or "zfec") for 1 <= k <= 32 data and 0 <= m <= 4 parity shards."""
    # Imported here: who uses one codec does not pay for the other.
    if name == "isal":
        from kvstore.erasure.isal import IsalCodec

        return IsalCodec(k, m)
    if name == "zfec":
        from kvstore.erasure.portable import ZfecCodec

        return ZfecCodec(k, m)
    raise CodecError("E520", f"codec {name!r}", "is not known", 'use "isal" or "zfec"')
