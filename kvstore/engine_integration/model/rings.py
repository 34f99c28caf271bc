"""What a request keeps of its rows: rings of window rows, and growing arrays of compressed ones.

A window entry holds `slots` rows, position p in slot p % slots. A running ring holds `spare` more, so that rows which a rejected guess
wrote, up to `spare` of them, have not cost an entry its oldest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvstore.engine_integration.model.codecs import RowCodec


class Ring:
    """Stored bytes, and what they decode to, of the last positions of one layer."""

    def __init__(self, slots: int, spare: int, dim: int, codec: RowCodec) -> None:
        self.slots, self.kept, self.codec = slots, slots + spare, codec
        self.codes = torch.zeros(self.kept, codec.row_bytes(dim), dtype=torch.uint8)
        self.values = torch.zeros(self.kept, dim)

    def put(self, first: int, codes: Tensor, values: Tensor) -> None:
        """Rows of positions first, first+1, ...; of more than fit, the last."""
        skip = max(0, len(codes) - self.kept)
        at = torch.arange(first + skip, first + len(codes)) % self.kept
        self.codes[at], self.values[at] = codes[skip:], values[skip:]

    def get(self, first: int, end: int) -> Tensor:
        return self.values[torch.arange(first, end) % self.kept]

    def entry(self, end: int) -> Tensor:
        """Bytes of the last `slots` positions before `end`, in an entry's order; zero before position 0."""
        positions = torch.arange(max(0, end - self.slots), end)
        out = torch.zeros(self.slots, self.codes.shape[1], dtype=torch.uint8)
        out[positions % self.slots] = self.codes[positions % self.kept]
        return out

    def take(self, end: int, entry: Tensor) -> None:
        """The inverse of `entry`."""
        positions = torch.arange(max(0, end - self.slots), end)
        codes = entry[positions % self.slots]
        self.put(int(positions[0]), codes, self.codec.decode(codes))


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
