"""Muon: momentum whose matrices are made orthogonal before they are added, so that every direction learns at the same pace.

By Newton-Schulz iteration, a dozen products a matrix and no decomposition; matrices of one shape go together. The experts of a layer, which
share one tensor, are orthogonal each for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

_QUINTIC: Final = (3.4445, -4.7750, 2.0315)  # raises small singular values fast; they end between 0.7 and 1.2
_ITERATIONS: Final = 4


def orthogonal(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(n, rows, columns) with singular values near 1 and the same singular vectors. Zeros stay zeros."""
    a, b, c = _QUINTIC
    wide = matrices.shape[1] <= matrices.shape[2]
    x = (matrices if wide else matrices.mT) / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    x = x.to(dtype)
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    out: Tensor = (x if wide else x.mT).to(matrices.dtype)
    return out


class Muon(torch.optim.Optimizer):
    """Of (weight, view) pairs: `view` gives a tensor of the weight's shape as (n, rows, columns), sharing its memory."""

    def __init__(
        self,
        weights: list[tuple[Tensor, Callable[[Tensor], Tensor]]],
        lr: float,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__([weight for weight, _ in weights], {"lr": lr, "momentum": momentum})
        self._views = {id(weight): view for weight, view in weights}
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody passes a closure
        group = self.param_groups[0]
        found: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for weight in group["params"]:
            if weight.grad is None:
                continue
            state = self.state[weight]
            if "mean" not in state:
                state["mean"] = torch.zeros_like(weight)
            state["mean"].lerp_(weight.grad, 1 - group["momentum"])
            view = self._views[id(weight)]
            update, target = view(weight.grad.lerp(state["mean"], group["momentum"])), view(weight)
            if update.shape[1] > update.shape[2]:
                update, target = update.mT, target.mT
            found.setdefault(tuple(update.shape[1:]), []).append((update, target))
        for parts in found.values():
            made = orthogonal(torch.cat([update for update, _ in parts]), self._dtype)
            for (_, target), part in zip(parts, torch.split(made, [len(update) for update, _ in parts]), strict=True):
                target.sub_(part, alpha=group["lr"])
