"""What a request keeps of its window rows: one ring for each layer.

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
