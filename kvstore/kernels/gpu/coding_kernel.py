"""Lost data shards from k that are there, in GF(2^8) modulo 0x11D.

A product with a constant c is the XOR of x 2^b over the bits b of c. So for each lost shard and each b, first XOR all survivors whose
coefficient has bit b (a mask of ones or zeros), then Horner's rule: double, add, double, add; eight doublings in all instead of eight for
each survivor. Four bytes at once in 32 bits, and two lost shards at once in the halves of 64.
"""

import triton
import triton.language as tl


@triton.jit
def _double(x):
    """Each of the eight bytes times 2."""
    return ((x & 0x7F7F7F7F7F7F7F7F) << 1) ^ (((x >> 7) & 0x0101010101010101) * 0x1D)


@triton.jit
def _mask(bits, b: tl.constexpr):
    return tl.load(bits + b).to(tl.uint64, bitcast=True)


@triton.jit
def rebuild(
    zone,  # int32
    blocks,  # (count,) blocks that lost something
    sets,  # (count,) which row of the tables below is for them
    have,  # (sets, K) shards to read
    lost,  # (sets, 2 PAIRS) shards to write, -1 for none
    masks,  # (sets, PAIRS, K, 8) int64: bit b of the coefficients of two lost shards, spread over the halves
    count,
    slot_stride,
    block_stride,
    UNIT: tl.constexpr,  # words in which the strides are counted: what the compiler may know of alignment
    WORDS: tl.constexpr,  # of a shard
    K: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,  # programs for the words of a shard
    BLOCKS: tl.constexpr,
    UNROLL: tl.constexpr,  # survivors whose loads are under way at once
    TILE: tl.constexpr,
):
    number = (tl.program_id(0) // TILES * BLOCKS + tl.arange(0, BLOCKS))[:, None]
    at = (tl.program_id(0) % TILES * TILE + tl.arange(0, TILE))[None, :]
    inside = (number < count) & (at < WORDS)
    block = tl.load(blocks + number, mask=number < count, other=0).to(tl.int64)
    chosen = tl.load(sets + number, mask=number < count, other=0).to(tl.int64)
    here = zone + block * block_stride * UNIT + at
    for pair in tl.static_range(PAIRS):
        a0 = tl.zeros([BLOCKS, TILE], tl.uint64)
        a1 = tl.zeros([BLOCKS, TILE], tl.uint64)
        a2 = tl.zeros([BLOCKS, TILE], tl.uint64)
        a3 = tl.zeros([BLOCKS, TILE], tl.uint64)
        a4 = tl.zeros([BLOCKS, TILE], tl.uint64)
        a5 = tl.zeros([BLOCKS, TILE], tl.uint64)
        a6 = tl.zeros([BLOCKS, TILE], tl.uint64)
        a7 = tl.zeros([BLOCKS, TILE], tl.uint64)
        for i in tl.range(K, loop_unroll_factor=UNROLL):
            shard = tl.load(have + chosen * K + i).to(tl.int64)
            x = tl.load(here + shard * slot_stride * UNIT, mask=inside, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
            x = x | (x << 32)
            bits = masks + ((chosen * PAIRS + pair) * K + i) * 8
            a0 ^= x & _mask(bits, 0)
            a1 ^= x & _mask(bits, 1)
            a2 ^= x & _mask(bits, 2)
            a3 ^= x & _mask(bits, 3)
            a4 ^= x & _mask(bits, 4)
            a5 ^= x & _mask(bits, 5)
            a6 ^= x & _mask(bits, 6)
            a7 ^= x & _mask(bits, 7)
        y = _double(a7) ^ a6
        y = _double(y) ^ a5
        y = _double(y) ^ a4
        y = _double(y) ^ a3
        y = _double(y) ^ a2
        y = _double(y) ^ a1
        y = _double(y) ^ a0
        low = tl.load(lost + (chosen * PAIRS + pair) * 2).to(tl.int64)
        high = tl.load(lost + (chosen * PAIRS + pair) * 2 + 1).to(tl.int64)
        tl.store(here + low * slot_stride * UNIT, y.to(tl.uint32).to(tl.int32, bitcast=True), mask=inside & (low >= 0))
        tl.store(here + high * slot_stride * UNIT, (y >> 32).to(tl.uint32).to(tl.int32, bitcast=True), mask=inside & (high >= 0))


PROBE = rebuild
