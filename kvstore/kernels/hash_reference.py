"""Plain reference of kernels/hash.cpp: keys by hashlib, checksums by the xxhash package. The oracle of its tests."""

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore import tagged

BLOCK_DOMAIN = "kvstore.block.v1"
EXTERNAL_DOMAIN = "kvstore.ext.v1"
SHARD_IDENTITY = struct.Struct("<16s32sQIIII")
assert SHARD_IDENTITY.size == 72


def block_keys(secret: bytes, namespace_digest: bytes, previous: bytes, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Keys of the whole blocks of `tokens`; `previous` is the key before them, empty at the start of a chain."""
    keys: list[bytes] = []
    for at in range(0, len(tokens) - block_tokens + 1, block_tokens):
        ids = struct.pack(f"<{block_tokens}I", *tokens[at : at + block_tokens])
        previous = tagged.digest(BLOCK_DOMAIN, [namespace_digest, previous, ids], secret)
        keys.append(previous)
    return keys


def external_keys(secret: bytes, namespace_digest: bytes, hashes: Sequence[bytes]) -> list[bytes]:
    """One key for each hash that an engine chained itself."""
    return [tagged.digest(EXTERNAL_DOMAIN, [namespace_digest, h], secret) for h in hashes]


def shard_seed(owner: bytes, extent_key: bytes, write_id: int, shard: int, plane: int, block: int) -> int:
    """Seed of the checksum of one shard of one (plane, block): its full identity."""
    return xxhash.xxh3_64_intdigest(SHARD_IDENTITY.pack(owner, extent_key, write_id, shard, plane, block, 0))


def shard_sum(piece: bytes, seed: int) -> int:
    """Checksum of the bytes of one piece, padding included."""
    return xxhash.xxh3_64_intdigest(piece, seed)


def plane_digest(block_key: bytes, write_id: int, data_sums: npt.NDArray[np.uint64]) -> tuple[int, int]:
    """Low and high half of the digest of one (block, plane)."""
    digest = xxhash.xxh3_128_intdigest(block_key + struct.pack(f"<Q{len(data_sums)}Q", write_id, *data_sums.tolist()))
    return digest & ((1 << 64) - 1), digest >> 64


def fingerprint(salt: bytes, key: bytes) -> int:
    """SipHash-2-4 (Aumasson and Bernstein, 2012) of a key of 32 bytes."""
    mask = (1 << 64) - 1

    def rotated(value: int, by: int) -> int:
        return (value << by | value >> (64 - by)) & mask

    k0, k1 = (int.from_bytes(half, "little") for half in (salt[:8], salt[8:]))
    v0, v1, v2, v3 = k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573
    for word, rounds in [*((int.from_bytes(key[at : at + 8], "little"), 2) for at in range(0, len(key), 8)), (len(key) << 56, 2), (0, 4)]:
        v3 ^= word
        if rounds == 4:
            v2 ^= 0xFF
        for _ in range(rounds):
            v0, v2 = (v0 + v1) & mask, (v2 + v3) & mask
            v1, v3 = rotated(v1, 13) ^ v0, rotated(v3, 16) ^ v2
            v0 = rotated(v0, 32)
            v2, v0 = (v2 + v1) & mask, (v0 + v3) & mask
            v1, v3 = rotated(v1, 17) ^ v2, rotated(v3, 21) ^ v0
            v2 = rotated(v2, 32)
        v0 ^= word
    return v0 ^ v1 ^ v2 ^ v3


def block_tag(block_key: bytes) -> int:
    """Bytes 8 to 16 of a key as u64 LE."""
    return int.from_bytes(block_key[8:16], "little")
