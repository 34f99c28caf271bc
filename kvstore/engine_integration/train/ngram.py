"""A Witten-Bell n-gram over bytes: what a model has to beat.

p(w|h) = (c(hw) + t(h) p(w|h')) / (c(h) + t(h)), h' = h without its first byte, t(h) = how many different bytes follow h.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]


def bits_per_byte(train: bytes, heldout: bytes, order: int = 5) -> float:
    """Of `heldout` under counts of `train`; grams of up to `order` bytes, at most 7."""
    probability = np.full(len(heldout), 1 / 256)
    for length in range(1, order + 1):
        grams, counts = np.unique(_grams(train, length), return_counts=True)
        contexts, first, kinds = np.unique(grams >> np.uint64(8), return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, first)
        asked = _grams(heldout, length)
        c_hw = _found(grams, counts, asked)
        c_h, t_h = (_found(contexts, of, asked >> np.uint64(8)) for of in (totals, kinds))
        seen = c_h > 0
        tail = probability[length - 1 :]  # the first bytes have shorter histories and keep their estimate
        tail[seen] = (c_hw[seen] + t_h[seen] * tail[seen]) / (c_h[seen] + t_h[seen])
    return float(-np.log2(probability).mean())


def _grams(text: bytes, length: int) -> U64:
    """Every run of `length` bytes as one number."""
    raw = np.frombuffer(text, np.uint8).astype(np.uint64)
    out = np.zeros(max(0, len(raw) - length + 1), np.uint64)
    for i in range(length):
        out = out << np.uint64(8) | raw[i : i + len(out)]
    return out


def _found(keys: U64, values: npt.NDArray[np.int64], asked: U64) -> npt.NDArray[np.int64]:
    at = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[at] == asked, values[at], 0)
