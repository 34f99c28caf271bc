"""Half of the layers sleep through the first part of a run: what is learnt early, a shallow network learns as well, at half the cost.

A layer asleep adds nothing to its input: its two last products are zeros, so weights mean the same whether a reader skips it or not.
Woken, it has what the layer before it learnt, but for these two, and so begins without a jump.
"""

from __future__ import annotations

import torch

from kvstore.engine_integration.model.blocks import Network
from kvstore.engine_integration.model.config import ModelConfig


def sleepers(config: ModelConfig) -> frozenset[int]:
    """All but the first layer, those with sources, and every other one of the decoder."""
    sources = {layer for layer, _ in config.sources}
    kept = {0} | sources | set(range(config.encoder_layers, config.layers, 2))
    return frozenset(range(config.layers)) - kept


@torch.no_grad()
def put_to_sleep(network: Network, asleep: frozenset[int]) -> None:
    for number in asleep:
        network.layer(number).attention.out.weight.zero_()
        network.layer(number).moe.down.weight.zero_()


@torch.no_grad()
def wake(network: Network, asleep: frozenset[int]) -> None:
    for number in sorted(asleep):
        teacher = max(other for other in range(number) if other not in asleep)
        layer, learnt = network.layer(number), network.layer(teacher).state_dict()
        for name, weight in layer.state_dict().items():
            if name in learnt and name not in ("attention.out.weight", "moe.down.weight"):
                weight.copy_(learnt[name])
