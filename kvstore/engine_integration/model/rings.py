"""Rings of window rows, one a layer: position p lies in slot p % slots, until p + slots takes it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvstore.engine_integration.model.codecs import RowCodec


class Ring:
    """Stored bytes, and what they decode to, of the last `slots` positions."""

    def __init__(self, slots: int, dim: int, codec: RowCodec) -> None:
        self.slots, self.codec = slots, codec
        self.codes = torch.zeros(slots, codec.row_bytes(dim), dtype=torch.uint8)
        self.values = torch.zeros(slots, dim)

    def put(self, first: int, codes: Tensor, values: Tensor) -> None:
        """Rows of positions first, first+1, ...; of more than fit, the last."""
        skip = max(0, len(codes) - self.slots)
        at = torch.arange(first + skip, first + len(codes)) % self.slots
        self.codes[at], self.values[at] = codes[skip:], values[skip:]

    def get(self, first: int, end: int) -> Tensor:
        return self.values[torch.arange(first, end) % self.slots]

    def write(self, codes: Tensor) -> None:
        """Takes all slots from an entry."""
        self.codes.copy_(codes)
        self.values = self.codec.decode(self.codes)


class Rows:
    """A growing array of compressed rows: stored bytes, and what they decode to."""

    def __init__(self, dim: int, codec: RowCodec, step_rows: int) -> None:
        self.codec, self.step_rows = codec, step_rows
        self.codes = torch.zeros(0, codec.row_bytes(dim), dtype=torch.uint8)
        self.values = torch.zeros(0, dim)

    def reserve(self, rows: int) -> None:
        """Room for `rows`; grows to twice as much, in whole blocks, new rows zero."""
        if rows > len(self.codes):
            grown = -(-max(rows, 2 * len(self.codes)) // self.step_rows) * self.step_rows
            self.codes, self.values = _grown(self.codes, grown), _grown(self.values, grown)

    def put(self, first: int, codes: Tensor, values: Tensor) -> None:
        self.codes[first : first + len(codes)] = codes
        self.values[first : first + len(values)] = values

    def write(self, first: int, codes: Tensor) -> None:
        self.put(first, codes, self.codec.decode(codes))


def _grown(old: Tensor, rows: int) -> Tensor:
    new = torch.zeros(rows, old.shape[1], dtype=old.dtype)
    new[: len(old)] = old
    return new
