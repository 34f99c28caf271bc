"""The numbers that kernels/client*.hpp and Python share. Sizes are asserted when this is imported."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.kernels import _native

U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]
Records = npt.NDArray[Any]

# struct Found of client_small.hpp
FOUND: Final = np.dtype(
    [
        ("write_id", "<u8"), ("write_epoch", "<u8"), ("start", "<u4"), ("match", "<u4"),
        ("depth", "<u2"), ("fidelity", "u1"), ("zero", "u1", (5,)),
    ]
)  # fmt: skip
assert FOUND.itemsize == _native.FOUND_BYTES

# struct Piece of walk.hpp: blocks [start, end) are read from row `row` of what was found, an extent that begins at block `first`
PIECE: Final = np.dtype([("start", "<u4"), ("end", "<u4"), ("first", "<u4"), ("row", "<u4")])
assert PIECE.itemsize == _native.PIECE_BYTES

# WritingName of wire.hpp
NAME: Final = np.dtype([("extent_key", "u1", (32,)), ("write_id", "<u8")])
assert NAME.itemsize == 40

# WhyGhost of wire.hpp
GHOST: Final = np.dtype(
    [
        ("ordinal", "<u4"), ("last_bucket", "<u4"), ("blocks", "<u2"), ("reason", "u1"), ("retention_class", "u1"), ("zero", "<u4"),
        ("tags", "u1", (64,)),
    ]
)  # fmt: skip
assert GHOST.itemsize == 80

# BadShard of client_load.hpp
BAD_SHARD: Final = np.dtype(
    [("owner", "u1", (16,)), ("extent_key", "u1", (32,)), ("write_id", "<u8"), ("node", "<i4"), ("shard", "u1"), ("zero", "u1", (3,))]
)
assert BAD_SHARD.itemsize == _native.BAD_SHARD_BYTES

PROMISE_PIN: Final = 1
PROMISE_TOUCH: Final = 2

# enum Stored of client_store.hpp
STORED, DEGRADED, FAILED, DROPPED = 1, 2, 3, 4

# What ClientCore raises as ConfigError where RDMA is insisted on (kernels/verbs.hpp): no library, no device, locked memory, refused by it,
# no such GID.
RDMA_FAULTS: Final = ("E145", "E146", "E147", "E148", "E149")

# ClientCore.health()
HEALTHY, LATE, SILENT, DOWN = 0, 1, 2, 3


def names_of(keys: U8, write_ids: U64) -> U8:
    """(n, 40): keys (n, 32) with their write ids, as they stand in requests."""
    names = np.empty((len(keys), NAME.itemsize), np.uint8)
    names[:, :32] = keys
    names[:, 32:] = np.ascontiguousarray(write_ids, "<u8").view(np.uint8).reshape(-1, 8)
    return names


def name_of(extent_key: bytes, write_id: int) -> bytes:
    """One of them, 40 bytes."""
    return extent_key + write_id.to_bytes(8, "little")
