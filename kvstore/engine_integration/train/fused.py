"""Parts of a layer over whole texts, with their gradients written out: what training on a processor spends its time on.

The values are those of model/attention.py and model/moe.py. What differs is the work: attention skips keys that no query of a tile sees,
rows go to the experts that were chosen for them and to no others, and products run in `dtype`, all else in float32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from kvstore.engine_integration.model.attention import rope_tables
from kvstore.engine_integration.model.config import ModelConfig
from kvstore.engine_integration.model.moe import ROUTED_SCALE, MoE

PADDED: Final = 16  # rows of zeros after a tile's keys: the first stands for the sink, the others are never seen
EXPERT_ROWS: Final = 64  # an expert's rows are filled up to a multiple: a product of a new shape costs more to set up than to compute
TILE_TOKENS: Final = 64  # queries of one product, times the heads
_EPSILON: Final = 1e-6  # of RmsNorm


@lru_cache(maxsize=64)
def rope(config: ModelConfig, tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (tokens, rotary/2) of positions 0 on, block by block as the model makes them."""
    with torch.inference_mode(False):  # whoever asked first, others may train with them
        cos, sin = zip(*(rope_tables(config, block) for block in range(tokens // config.block)), strict=True)
        return torch.cat(cos), torch.cat(sin)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPSILON)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, inverse = ctx.saved_tensors
        scaled = grads[0].float() * inverse
        of_weight = (scaled * x).flatten(0, -2).sum(0)
        scaled *= weight
        along = (scaled * x).mean(-1, keepdim=True) * inverse.square()
        return scaled.sub_(x * along), of_weight


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RmsNorm of float32 rows."""
    out: Tensor = _Norm.apply(x, weight)  # type: ignore[no-untyped-call]  # torch gives it no types
    return out


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turns the last dims of (n, tokens, heads, dim) in place."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    a, b = x[..., -2 * half : -half].float(), x[..., -half:].float()
    x[..., -2 * half :] = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


@lru_cache(maxsize=256)
def _tail(window: int, before: int, size: int, ratio: int, hidden: int) -> Tensor:
    """(size, columns) added to the last scores of a tile: compressed rows of the tile itself, `before` + `size` window rows, of which the
    first `hidden` are before the text's start, one sink, and columns up to a multiple of 16 that nobody sees."""
    queries = torch.arange(size)[:, None]
    keys = torch.arange(-before, size)[None]
    parts = [(keys <= queries) & (keys > queries - window) & (keys >= hidden - before), (torch.arange(PADDED) == 0).expand(size, -1)]
    if ratio:
        parts.insert(0, torch.arange(size // ratio)[None] * ratio + ratio - 1 <= queries)
    seen = torch.cat(parts, 1)
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))


class _Attend(torch.autograd.Function):
    """Of all queries of a text from `first` on. q (n, tokens, heads, c), not yet rotated but scaled; window (n, tokens, c) and compressed
    (n, rows, c) as they are cached, sinks (heads,). (n, tokens, heads, c), rotated back."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        window: Tensor,
        compressed: Tensor | None,
        sinks: Tensor,
        config: ModelConfig,
        ratio: int,
        first: int,
        start: int,
    ) -> Tensor:
        n, tokens, heads, c = q.shape
        cos, sin = (table[first:] for table in rope(config, first + tokens))
        q = q.clone()
        _rotate_(q, cos, sin)
        out = torch.empty_like(q)
        size = min(TILE_TOKENS, config.block)
        kept = []
        for lo in range(0, tokens, size):
            keys, tail = _Attend.keys(window, compressed, config, ratio, first, start, lo, size)
            added = tail.to(q.dtype)[:, None].repeat(1, heads, 1)
            added[:, :, -PADDED] = sinks.to(q.dtype)
            scores = q[:, lo : lo + size].reshape(n, size * heads, c) @ keys.transpose(1, 2)
            scores[:, :, scores.shape[2] - tail.shape[1] :] += added.view(1, size * heads, -1)
            shares = scores.softmax(-1)
            out[:, lo : lo + size] = (shares @ keys).view(n, size, heads, c)
            kept.append(shares)
        _rotate_(out, cos, -sin)
        ctx.save_for_backward(q, window, *([compressed] if compressed is not None else []))
        ctx.shares, ctx.asked = kept, (config, ratio, first, start, size)
        return out

    @staticmethod
    def keys(
        window: Tensor, compressed: Tensor | None, config: ModelConfig, ratio: int, first: int, start: int, lo: int, size: int
    ) -> tuple[Tensor, Tensor]:
        """Rows that a tile sees: compressed, window, and one of zeros whose score the sink becomes; and what to add to the last scores."""
        low = max(0, lo - config.window)
        hidden = min(max(0, start - first - low), lo + size - low)
        parts = [window[:, low : lo + size], window.new_zeros(window.shape[0], PADDED, window.shape[2])]
        if compressed is not None:
            parts.insert(0, compressed[:, : (first + lo + size) // ratio])
        return torch.cat(parts, 1), _tail(config.window, lo - low, size, ratio if compressed is not None else 0, hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, window, *rest = ctx.saved_tensors
        compressed = rest[0] if rest else None
        config, ratio, first, start, size = ctx.asked
        n, tokens, heads, c = q.shape
        cos, sin = (table[first:] for table in rope(config, first + tokens))
        grad = grads[0].clone()
        _rotate_(grad, cos, sin)
        of_q = torch.empty_like(q)
        of_window = torch.zeros(window.shape)
        of_compressed = torch.zeros(compressed.shape) if compressed is not None else None
        of_sinks = torch.zeros(heads)
        for lo, shares in zip(range(0, tokens, size), ctx.shares, strict=True):
            keys, _ = _Attend.keys(window, compressed, config, ratio, first, start, lo, size)
            out = grad[:, lo : lo + size].reshape(n, size * heads, c)
            asked = q[:, lo : lo + size].reshape(n, size * heads, c)
            of_scores = torch._softmax_backward_data(out @ keys.transpose(1, 2), shares, -1, shares.dtype)
            of_q[:, lo : lo + size] = (of_scores @ keys).view(n, size, heads, c)
            of_sinks += of_scores[:, :, -PADDED].float().view(n, size, heads).sum((0, 1))
            of_keys = of_scores.transpose(1, 2) @ asked
            of_keys += shares.transpose(1, 2) @ out
            low = max(0, lo - config.window)
            count = keys.shape[1] - PADDED - (lo + size - low)
            of_window[:, low : lo + size] += of_keys[:, count:-PADDED]
            if of_compressed is not None:
                of_compressed[:, :count] += of_keys[:, :count]
        ctx.shares = None
        _rotate_(of_q, cos, -sin)
        return of_q, of_window, of_compressed, of_sinks, None, None, None, None


def attend(
    q: Tensor, window: Tensor, compressed: Tensor | None, sinks: Tensor, config: ModelConfig, ratio: int, first: int, start: int
) -> Tensor:
    out: Tensor = _Attend.apply(q, window, compressed, sinks, config, ratio, first, start)  # type: ignore[no-untyped-call]  # torch gives it no types
    return out


class _Spread(torch.autograd.Function):
    """Rows of x (t, d) at `at`: each `top` times, at `back` (t * top,), and row 0 as filler."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor, back: Tensor, top: int) -> Tensor:
        ctx.save_for_backward(at, back)
        ctx.top = top
        return x[at]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, back = ctx.saved_tensors
        return grads[0][back].view(-1, ctx.top, grads[0].shape[1]).sum(1), None, None, None


class _Gather(torch.autograd.Function):
    """The other way: sums the `top` copies of every row."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, at: Tensor, back: Tensor, top: int) -> Tensor:
        ctx.save_for_backward(at)
        return y[back].view(-1, top, y.shape[1]).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (at,) = ctx.saved_tensors
        return grads[0][at], None, None, None


def experts(moe: MoE, x: Tensor, dtype: torch.dtype) -> Tensor:
    """MoE.forward of rows (t, d), each through its chosen experts and the shared one alone."""
    x = norm(x, moe.norm.weight)
    scores = F.softplus(F.linear(x, moe.router.weight)).sqrt()
    chosen = (scores.detach() + moe.selection_bias).topk(moe.top, -1).indices
    kept = scores.gather(-1, chosen)
    weights = ROUTED_SCALE * kept / kept.sum(-1, keepdim=True)
    counts = torch.bincount(chosen.flatten(), minlength=moe.experts)
    if moe.training:
        moe.load += counts
    rows = x.to(dtype)
    padded = (counts + EXPERT_ROWS - 1) // EXPERT_ROWS * EXPERT_ROWS
    order = chosen.flatten().argsort(stable=True)
    place = torch.arange(len(order)) + (padded.cumsum(0) - padded - counts.cumsum(0) + counts).repeat_interleave(counts)
    sizes = padded.tolist()
    at = torch.zeros(sum(sizes), dtype=torch.int64)
    at[place] = order // moe.top
    back = torch.empty_like(order)
    back[order] = place
    groups = _Spread.apply(rows, at, back, moe.top).split(sizes)  # type: ignore[no-untyped-call]  # torch gives it no types
    shares = torch.zeros(len(at)).index_put((place,), weights.flatten()[order]).to(dtype)[:, None]
    width = x.shape[1]
    wide = torch.cat([moe.gate.weight.view(-1, moe.inter, width), moe.up.weight.view(-1, moe.inter, width)], 1).to(dtype).unbind()
    narrow = moe.down.weight.view(width, -1, moe.inter).to(dtype).unbind(1)
    made = []
    for group, share, into, out in zip(groups, torch.split(shares, sizes), wide, narrow, strict=False):
        gate, up = F.linear(group, into).chunk(2, -1)
        made.append(F.linear(F.silu(gate) * up * share, out))
    gate, up = F.linear(rows, wide[-1]).chunk(2, -1)
    routed: Tensor = _Gather.apply(torch.cat(made), at, back, moe.top)  # type: ignore[no-untyped-call]  # torch gives it no types
    return routed + F.linear(F.silu(gate) * up, narrow[-1])
