"""Attention over one latent row a token that all heads share (K = V), with one softmax over window rows, compressed rows and a sink.

Shapes are (requests, rows, ...). Rows are those of one aligned block, always all of them, so that a row is computed by the same product of
the same shape at the same place whatever the rows around it are: prompts cut anywhere, and single decoded tokens, give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvstore.engine_integration.model.config import ModelConfig

ROPE_BASE = 10_000.0


class RmsNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        return normed


def rope_tables(config: ModelConfig, block: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (block, rotary/2) of the positions of one block. Always a whole block: one shape, one result."""
    half = config.rotary // 2
    positions = torch.arange(config.block, dtype=torch.float64) + block * config.block
    angles = positions[:, None] * ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Turns the last dims of (..., rows, dim) by each row's position."""
    half = cos.shape[-1]
    kept, a, b = x[..., : -2 * half], x[..., -2 * half : -half], x[..., -half:]
    if inverse:
        sin = -sin
    return torch.cat([kept, a * cos - b * sin, a * sin + b * cos], -1)


def attend(q: Tensor, keys: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    """q (n, rows, heads, c), keys (n, k, c), mask (n or 1, rows, k) true where seen, sinks (heads,): (n, rows, heads, c)."""
    n, rows, heads, c = q.shape
    scores = (q.reshape(n, rows * heads, c) @ keys.transpose(1, 2)).view(n, rows, heads, -1) * c**-0.5
    scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
    weights = torch.cat([scores, sinks.view(1, 1, heads, 1).expand(n, rows, heads, 1)], -1).softmax(-1)
    return (weights[..., :-1].reshape(n, rows * heads, -1) @ keys).view(n, rows, heads, c)


def window_mask(config: ModelConfig, block: int, start: int) -> Tensor:
    """(1, block, 2 block): which rows of this block and the one before a query sees: `window`, itself included, none before `start`."""
    queries = torch.arange(config.block)[:, None] + block * config.block
    keys = torch.arange(2 * config.block)[None] + (block - 1) * config.block
    return ((keys <= queries) & (keys > queries - config.window) & (keys >= start))[None]


def compressed_mask(config: ModelConfig, block: int, ratio: int) -> Tensor:
    """(1, block, rows up to the block's end): a compressed row is seen once its last token is not later than the query."""
    queries = torch.arange(config.block)[:, None] + block * config.block
    last_tokens = torch.arange((block + 1) * config.block // ratio)[None] * ratio + ratio - 1
    return (last_tokens <= queries)[None]


class Attention(nn.Module):
    """Of one layer: query, window row, output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.latent = config.heads, config.latent
        self.norm = RmsNorm(config.d)
        self.q = nn.Linear(config.d, config.heads * config.latent, bias=False)
        self.kv = nn.Linear(config.d, config.latent, bias=False)
        self.kv_norm = RmsNorm(config.latent)
        self.out = nn.Linear(config.heads * config.latent, config.d, bias=False)
        self.sinks = nn.Parameter(torch.zeros(config.heads))

    def window_rows(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(n, rows, latent), rotated, as they go to the codec."""
        return rotate(self.kv_norm(self.kv(self.norm(x))), cos, sin)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        q = self.q(self.norm(x)).view(*x.shape[:2], self.heads, self.latent)
        q = rotate(q, cos[:, None], sin[:, None])
        seen = rotate(attend(q, keys, mask, self.sinks), cos[:, None], sin[:, None], inverse=True)
        out: Tensor = self.out(seen.flatten(-2))
        return out


class Indexer(nn.Module):
    """Chooses the compressed rows a query sees. Ties go to the earlier row."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dim, self.top_k = config.index_heads, config.index_dim, config.top_k
        self.norm = RmsNorm(config.d)
        self.q = nn.Linear(config.d, self.heads * self.dim, bias=False)
        self.weigh = nn.Linear(config.d, self.heads, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, index_keys: Tensor, visible: Tensor) -> Tensor:
        """The part of `visible` (1, rows, k) that is chosen, (n, rows, k); the best `top_k` of each query."""
        x = self.norm(x)
        q = rotate(self.q(x).view(*x.shape[:2], self.heads, self.dim), cos[:, None], sin[:, None])
        scores = (q.flatten(1, 2) @ index_keys.transpose(1, 2)).view(*q.shape[:3], -1).relu()
        best = (scores * self.weigh(x).unsqueeze(-1)).sum(2).masked_fill(~visible, float("-inf"))
        order = best.sort(dim=-1, descending=True, stable=True).indices[..., : self.top_k]
        return torch.zeros_like(best, dtype=torch.bool).scatter_(-1, order, True) & visible
