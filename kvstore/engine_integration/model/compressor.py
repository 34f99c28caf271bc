"""What a source layer makes of its input: compressed main rows, and index rows where the model has an indexer.

Ratio 2 pools pairs (2g, 2g+1) with a learned softmax gate for each dimension, no overlap; ratio 1 is a plain projection. A pair turns by
the position of its first token. Pairs end where blocks end, so no half-done pair is ever stored.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvstore.engine_integration.model.attention import RmsNorm, rotate
from kvstore.engine_integration.model.config import ModelConfig


class Compressor(nn.Module):
    def __init__(self, d: int, dim: int, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.rows = nn.Linear(d, dim, bias=False)
        self.norm = RmsNorm(dim)
        if ratio > 1:
            self.gate = nn.Linear(d, dim, bias=False)
            self.bias = nn.Parameter(torch.zeros(ratio, dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(n, block, d) of one whole block: (n, block/ratio, dim), as they go to the codec. Rows of tokens to come hold anything."""
        rows = self.rows(x)
        if self.ratio > 1:
            shares = (self.gate(x).unflatten(1, (-1, self.ratio)) + self.bias).softmax(2)
            rows = (rows.unflatten(1, (-1, self.ratio)) * shares).sum(2)
        return rotate(self.norm(rows), cos[:: self.ratio], sin[:: self.ratio])


class Source(nn.Module):
    """Compressors of one source layer."""

    def __init__(self, config: ModelConfig, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.norm = RmsNorm(config.d)
        self.main = Compressor(config.d, config.latent, ratio)
        self.index = Compressor(config.d, config.index_dim, ratio) if config.index_dim else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.norm(x)
        return self.main(x, cos, sin), self.index(x, cos, sin) if self.index is not None else None
