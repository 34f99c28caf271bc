"""Plain reference of kernels/generate.cpp in numpy: block bytes made from the block's key. The oracle of its tests."""

import numpy as np
import numpy.typing as npt
import xxhash

GAMMA = np.uint64(0x9E3779B97F4A7C15)


def generate_block(key: bytes, block_bytes: int, salt: int = 0) -> npt.NDArray[np.uint8]:
    """The block_bytes bytes of the block named by a 32-byte key, as the writer `salt` computes them."""
    seed = np.uint64(xxhash.xxh3_64_intdigest(key, salt))
    counters = np.arange(1, -(-block_bytes // 8) + 1, dtype=np.uint64)
    words = seed + counters * GAMMA
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words.astype("<u8").view(np.uint8)[:block_bytes]
