"""Attention over one latent row a token that all heads share (K = V), with one softmax over window rows, compressed rows and a sink.

Shapes are (requests, rows, ...). Rows are those of one aligned block, always all of them, so that a row is computed by the same product of
the same shape at the same place whatever the rows around it are: prompts cut anywhere, and single decoded tokens, give the same bits.
"""

from __future__ import annotations

from functools import lru_cache

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


@lru_cache(maxsize=64)
def window_hidden(config: ModelConfig, first: int) -> Tensor:
    """(block, 2 block): window_mask's opposite where keys begin at row `first` of the two blocks. The same for every block."""
    return ~window_mask(config, 1, first)[0]


@lru_cache(maxsize=64)
def tail_hidden(config: ModelConfig, ratio: int) -> Tensor:
    """(block, rows of a block): which compressed rows of its own block a query does not see. It sees all of the blocks before."""
    return ~compressed_mask(config, 0, ratio)[0]


def attend_rows(q: Tensor, keys: Tensor, sinks: Tensor, window: Tensor, tail: Tensor | None, hidden: Tensor | None) -> Tensor:
    """As `attend`, for one request and with fewer passes over the scores: q (rows, heads, c), keys (k, c): two blocks of window rows, then
    compressed ones. `window` (rows, 2 block), `tail` (rows, last of k) and `hidden` (rows, compressed k) are true where not seen.

    keys[0], a window and more behind the first query, is seen by none: it is zero, and the sink's score takes its place."""
    rows, heads, c = q.shape
    scores = torch.mm(q.reshape(rows * heads, c) * c**-0.5, keys.T).view(rows, heads, -1)
    scores[..., : window.shape[1]].masked_fill_(window[:, None], float("-inf"))
    if hidden is not None:
        scores[..., window.shape[1] :].masked_fill_(hidden[:, None], float("-inf"))
    elif tail is not None:
        scores[..., -tail.shape[1] :].masked_fill_(tail[:, None], float("-inf"))
    scores[..., 0] = sinks
    return torch.mm(scores.softmax(-1).view(rows * heads, -1), keys).view(rows, heads, c)


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

    def of_rows(
        self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, window: Tensor, tail: Tensor | None, hidden: Tensor | None
    ) -> Tensor:
        """As forward for x (1, rows, d) of one request; the rest as in attend_rows."""
        q = self.q(self.norm(x))[0].view(x.shape[1], self.heads, self.latent)
        q = rotate(q, cos[:, None], sin[:, None])
        seen = rotate(attend_rows(q, keys, self.sinks, window, tail, hidden), cos[:, None], sin[:, None], inverse=True)
        out: Tensor = self.out(seen.flatten(-2)[None])
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
