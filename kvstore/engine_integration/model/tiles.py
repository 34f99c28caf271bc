"""Whether a few rows computed alone have the bits they have among all rows of a block. Often true from 4 rows on, promised by none.

A decoded token then costs 8 rows instead of 128. Asked of every product of the network, and of attention's two at short and long contexts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvstore.engine_integration.model.blocks import Network

TILE_ROWS: Final = 8
CONTEXT_ROWS: Final = (0, 200, 1_000, 8_000)  # compressed rows beside two blocks of window rows


@torch.inference_mode()
def tile_rows(network: Network) -> int:
    """8 where this machine, with as many threads as it has now, computes tiles of 8 as it computes blocks; else the block."""
    config = network.config
    generator = torch.Generator().manual_seed(0)
    weights = {module.weight.shape: module.weight for module in network.modules() if isinstance(module, nn.Linear)}
    agree = all(_same(F.linear, torch.randn(config.block, w.shape[1], generator=generator), w, TILE_ROWS) for w in weights.values())
    for heads, dim in {(config.heads, config.latent), (config.index_heads or config.heads, config.index_dim or config.latent)}:
        for context in CONTEXT_ROWS:
            keys = torch.randn(2 * config.block + context, dim, generator=generator)
            q = torch.randn(config.block * heads, dim, generator=generator)
            agree = agree and _same(lambda rows, k: torch.mm(rows, k.T), q, keys, TILE_ROWS * heads)
            agree = agree and _same(lambda rows, k: torch.bmm(rows[None], k.T[None])[0], q, keys, TILE_ROWS * heads)  # the indexer's
            agree = agree and _same(torch.mm, torch.mm(q, keys.T).softmax(-1), keys, TILE_ROWS * heads)
    return TILE_ROWS if agree else config.block


def _same(product: Callable[[Tensor, Tensor], Tensor], rows: Tensor, other: Tensor, tile: int) -> bool:
    parts = [product(part.clone(), other) for part in rows.split_with_sizes([tile] * (len(rows) // tile))]
    return torch.equal(torch.cat(parts), product(rows, other))
