"""Mixture of experts: sqrt-softplus scores, a bias that only decides who is chosen, weights renormalised and times 1.5, one shared expert.

All experts are computed for all rows in two products of one shape, and what was not chosen gets weight 0: gathering the rows of an expert
would put a row at another place of another product, with other last bits. Costs 8/3 of the products of `mini`'s chosen and shared experts.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvstore.engine_integration.model.attention import RmsNorm
from kvstore.engine_integration.model.config import ModelConfig

ROUTED_SCALE: Final = 1.5


class MoE(nn.Module):
    selection_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.experts, self.top, self.inter = config.experts, config.experts_top, config.inter
        wide = (config.experts + 1) * config.inter  # the shared expert comes last
        self.norm = RmsNorm(config.d)
        self.router = nn.Linear(config.d, config.experts, bias=False)
        self.gate = nn.Linear(config.d, wide, bias=False)
        self.up = nn.Linear(config.d, wide, bias=False)
        self.down = nn.Linear(wide, config.d, bias=False)
        self.register_buffer("selection_bias", torch.zeros(config.experts))
        self.load = torch.zeros(config.experts)  # rows each expert got since the last `balance`

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        weights = self.route(x)
        if self.training:
            self.load += (weights.detach() > 0).flatten(0, -2).sum(0)
        weights = torch.cat([weights, torch.ones_like(weights[..., :1])], -1).repeat_interleave(self.inter, -1)
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x) * weights)
        return out

    def route(self, x: Tensor) -> Tensor:
        """(..., experts): weight of each, 0 where not chosen. Ties go to the lower number."""
        scores = F.softplus(self.router(x)).sqrt()
        chosen = (scores + self.selection_bias).sort(dim=-1, descending=True, stable=True).indices[..., : self.top]
        kept = scores.gather(-1, chosen)
        return torch.zeros_like(scores).scatter(-1, chosen, ROUTED_SCALE * kept / kept.sum(-1, keepdim=True))

    @torch.no_grad()
    def balance(self, step: float) -> None:
        """After a training step: moves the bias of each expert against its load."""
        self.selection_bias += step * torch.sign(self.load.mean() - self.load)
        self.load.zero_()
