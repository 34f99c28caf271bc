"""XXH3 (Yann Collet's specification, xxHash 0.8) over words of 8 bytes, many inputs at once: what shards and digests are checked with.

`secret` is the table of sums.py: entry o holds the 8 bytes of the default secret at byte o, entries 185 to 192 the first values of the
accumulators. A secret that is seeded has the seed added to its even words and subtracted from its odd ones; where words of it are taken
from between two, both are seeded first.
"""

import triton
import triton.language as tl

P1 = tl.constexpr(0x9E3779B185EBCA87)
P2 = tl.constexpr(0xC2B2AE3D27D4EB4F)
P4 = tl.constexpr(0x85EBCA77C2B2AE63)
SMALL_P1 = tl.constexpr(0x9E3779B1)
AVALANCHE = tl.constexpr(0x165667919E3779F9)
ONES_32 = tl.constexpr(0xFFFFFFFF)
ONES_64 = tl.constexpr(0xFFFFFFFFFFFFFFFF)
FIRST_VALUES_AT = tl.constexpr(185)


@triton.jit
def _word(base, at, mask):
    return tl.load(base + at, mask=mask, other=0).to(tl.uint64, bitcast=True)


@triton.jit
def _constant(secret, at):
    return tl.load(secret + at).to(tl.uint64, bitcast=True)


@triton.jit
def _fold(a, b):
    """Low half XOR high half of a x b in 128 bits."""
    low_low = (a & ONES_32) * (b & ONES_32)
    high_low = (a >> 32) * (b & ONES_32)
    low_high = (a & ONES_32) * (b >> 32)
    cross = (low_low >> 32) + (high_low & ONES_32) + low_high
    return (a * b) ^ ((high_low >> 32) + (cross >> 32) + (a >> 32) * (b >> 32))


@triton.jit
def _avalanche(h):
    h = (h ^ (h >> 37)) * AVALANCHE
    return h ^ (h >> 32)


@triton.jit
def _mix(low, high, secret, at: tl.constexpr, seed):
    return _fold(low ^ (_constant(secret, at) + seed), high ^ (_constant(secret, at + 8) - seed))


@triton.jit
def _mix_at(base, word: tl.constexpr, mask, secret, at: tl.constexpr, seed):
    return _mix(_word(base, word, mask), _word(base, word + 1, mask), secret, at, seed)


@triton.jit
def _short(base, mask, secret, seed, WORDS: tl.constexpr):
    """17 to 128 bytes."""
    total = seed * 0 + (8 * WORDS * P1 & ONES_64)
    if WORDS > 4:
        if WORDS > 8:
            if WORDS > 12:
                total += _mix_at(base, 6, mask, secret, 96, seed) + _mix_at(base, WORDS - 8, mask, secret, 112, seed)
            total += _mix_at(base, 4, mask, secret, 64, seed) + _mix_at(base, WORDS - 6, mask, secret, 80, seed)
        total += _mix_at(base, 2, mask, secret, 32, seed) + _mix_at(base, WORDS - 4, mask, secret, 48, seed)
    total += _mix_at(base, 0, mask, secret, 0, seed) + _mix_at(base, WORDS - 2, mask, secret, 16, seed)
    return _avalanche(total)


@triton.jit
def _middle(base, mask, secret, seed, WORDS: tl.constexpr):
    """129 to 240 bytes."""
    total = seed * 0 + (8 * WORDS * P1 & ONES_64)
    for i in tl.static_range(8):
        total += _mix_at(base, 2 * i, mask, secret, 16 * i, seed)
    total = _avalanche(total)
    for i in tl.static_range(8, WORDS // 2):
        total += _mix_at(base, 2 * i, mask, secret, 16 * (i - 8) + 3, seed)
    return _avalanche(total + _mix_at(base, WORDS - 2, mask, secret, 119, seed))


@triton.jit
def _seeded(secret, word, seed):
    """Word `word` of the seeded secret: seeds (n, 1) by words (8,), or (n, 1, 1) by words (16, 8)."""
    return tl.where(word % 2 == 0, _constant(secret, 8 * word) + seed, _constant(secret, 8 * word) - seed)


@triton.jit
def _between(secret, byte: tl.constexpr, seed):
    """Eight words of the seeded secret from byte `byte` on, which is no multiple of 8: (n, 8)."""
    word = (byte // 8 + tl.arange(0, 8))[None, :]
    shift: tl.constexpr = byte % 8 * 8
    return (_seeded(secret, word, seed) >> shift) | (_seeded(secret, word + 1, seed) << (64 - shift))


@triton.jit
def _merge(accumulators, keys, start):
    low, high = tl.split(tl.reshape(accumulators ^ keys, [accumulators.shape[0], 4, 2]))
    return _avalanche(tl.sum(_fold(low, high), axis=1) + start)


@triton.jit
def _accumulate(base, first, mask, keys):
    """What stripes of 8 words from word `first` on add to the accumulators, each stripe by itself."""
    lanes = tl.arange(0, 8)
    value = _word(base, first + lanes, mask)
    key = value ^ keys
    return _word(base, first + (lanes ^ 1), mask) + (key & ONES_32) * (key >> 32)


@triton.jit
def _long(base, mask, secret, seed, WORDS: tl.constexpr):
    """More than 240 bytes: the eight accumulators of each input, (n, 8). Sixteen stripes of 64 bytes are summed at once, then scrambled."""
    lanes = tl.arange(0, 8)
    stripes = tl.arange(0, 16)
    seeds = seed[:, None]
    keys = _seeded(secret, (stripes[:, None] + lanes[None, :])[None, :, :], seeds[:, :, None])
    scramble = _seeded(secret, (16 + lanes)[None, :], seeds)
    first = (8 * stripes)[None, :, None]
    bases = base[:, None, None]
    masks = mask[:, None, None]
    accumulators = _constant(secret, FIRST_VALUES_AT + lanes)[None, :] + seeds * 0
    blocks: tl.constexpr = (8 * WORDS - 1) // 1024
    for block in range(blocks):
        accumulators += tl.sum(_accumulate(bases, block * 128 + first, masks, keys), axis=1)
        accumulators = (accumulators ^ (accumulators >> 47) ^ scramble) * SMALL_P1
    whole: tl.constexpr = (8 * WORDS - 1 - 1024 * blocks) // 64
    if whole > 0:
        inside = masks & (stripes < whole)[None, :, None]
        added = _accumulate(bases, blocks * 128 + first, inside, keys)
        accumulators += tl.sum(tl.where(inside, added, 0), axis=1)
    return accumulators + _accumulate(base[:, None], WORDS - 8, mask[:, None], _between(secret, 121, seeds))


@triton.jit
def piece_sums(
    zone,  # int64
    shards,  # (count,) of each piece
    rows,
    of_row,  # (n,) which extent a row belongs to
    extents,  # (e, 8): owner 2 words, key 4, write id, block of row 0
    secret,
    out,
    count,
    plane,
    slot_stride,
    row_stride,
    UNIT: tl.constexpr,  # words in which the strides are counted: what the compiler may know of alignment
    WORDS: tl.constexpr,
    PIECES: tl.constexpr,
):
    piece = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    mask = piece < count
    shard = tl.load(shards + piece, mask=mask, other=0).to(tl.int64)
    row = tl.load(rows + piece, mask=mask, other=0).to(tl.int64)
    extent = extents + tl.load(of_row + row, mask=mask, other=0).to(tl.int64) * 8
    # The seed: XXH3 over the 72 bytes of the piece's identity. Words 7 and 8 are shard | plane << 32, and the block.
    none = tl.zeros([PIECES], tl.uint64)
    w3 = _word(extent, 3, mask)
    w4 = _word(extent, 4, mask)
    w5 = _word(extent, 5, mask)
    w6 = _word(extent, 6, mask)
    w7 = shard.to(tl.uint64) | (tl.cast(plane, tl.uint64) << 32)
    w8 = row.to(tl.uint64) + _word(extent, 7, mask)
    seed = _mix(w4, w5, secret, 64, none) + _mix(w3, w4, secret, 80, none) + (72 * P1 & ONES_64)
    seed += _mix(_word(extent, 2, mask), w3, secret, 32, none) + _mix(w5, w6, secret, 48, none)
    seed += _mix(_word(extent, 0, mask), _word(extent, 1, mask), secret, 0, none) + _mix(w7, w8, secret, 16, none)
    seed = _avalanche(seed)
    base = zone + shard * slot_stride * UNIT + row * row_stride * UNIT
    if WORDS <= 16:
        result = _short(base, mask, secret, seed, WORDS)
    elif WORDS <= 30:
        result = _middle(base, mask, secret, seed, WORDS)
    else:
        accumulators = _long(base, mask, secret, seed, WORDS)
        result = _merge(accumulators, _between(secret, 11, seed[:, None]), 8 * WORDS * P1 & ONES_64)
    tl.store(out + piece, result.to(tl.int64, bitcast=True), mask=mask)


@triton.jit
def _mix_pair(low, high, base, one: tl.constexpr, two: tl.constexpr, mask, secret, at: tl.constexpr, seed):
    a0 = _word(base, one, mask)
    a1 = _word(base, one + 1, mask)
    b0 = _word(base, two, mask)
    b1 = _word(base, two + 1, mask)
    low = (low + _mix(a0, a1, secret, at, seed)) ^ (b0 + b1)
    high = (high + _mix(b0, b1, secret, at + 16, seed)) ^ (a0 + a1)
    return low, high


@triton.jit
def wide_sums(messages, secret, out, count, WORDS: tl.constexpr, ROWS: tl.constexpr):
    """XXH3 of 128 bits, no seed, of rows of WORDS words (3 to 128): low and high half."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < count
    base = messages + row.to(tl.int64) * WORDS
    none = tl.zeros([ROWS], tl.uint64)
    length: tl.constexpr = 8 * WORDS
    if WORDS <= 30:
        low = none + (length * P1 & ONES_64)
        high = none
        if WORDS <= 16:
            if WORDS > 12:
                low, high = _mix_pair(low, high, base, 6, WORDS - 8, mask, secret, 96, none)
            if WORDS > 8:
                low, high = _mix_pair(low, high, base, 4, WORDS - 6, mask, secret, 64, none)
            if WORDS > 4:
                low, high = _mix_pair(low, high, base, 2, WORDS - 4, mask, secret, 32, none)
            low, high = _mix_pair(low, high, base, 0, WORDS - 2, mask, secret, 0, none)
        else:
            for i in tl.static_range(4):
                low, high = _mix_pair(low, high, base, 4 * i, 4 * i + 2, mask, secret, 32 * i, none)
            low = _avalanche(low)
            high = _avalanche(high)
            for i in tl.static_range(4, WORDS // 4):
                low, high = _mix_pair(low, high, base, 4 * i, 4 * i + 2, mask, secret, 32 * i - 125, none)
            low, high = _mix_pair(low, high, base, WORDS - 2, WORDS - 4, mask, secret, 103, none)
        first = _avalanche(low + high)
        second = none - _avalanche(low * P1 + high * P4 + (length * P2 & ONES_64))
    else:
        accumulators = _long(base, mask, secret, none, WORDS)
        seeds = none[:, None]
        first = _merge(accumulators, _between(secret, 11, seeds), length * P1 & ONES_64)
        second = _merge(accumulators, _between(secret, 117, seeds), ONES_64 - (length * P2 & ONES_64))
    tl.store(out + 2 * row, first.to(tl.int64, bitcast=True), mask=mask)
    tl.store(out + 2 * row + 1, second.to(tl.int64, bitcast=True), mask=mask)


PROBE = piece_sums
