"""The network over whole texts at once, differentiable: layers, masks and codec of model.py, layer by layer instead of block by block."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kvstore.engine_integration.model.attention import compressed_mask, rope_tables, window_mask
from kvstore.engine_integration.model.blocks import Layer, Network
from kvstore.engine_integration.model.codecs import Codec, straight_through

CHECKPOINT_TOKENS = 1024  # longer texts compute a layer's insides again on the way back: scores of one layer at 4,096 take 300 MB
_rope = lru_cache(maxsize=512)(rope_tables)


def hidden(network: Network, codec: Codec, tokens: Tensor, decoder_start: int = 0) -> Tensor:
    """Output of the decoder (n, length, d) for tokens (n, length), length whole blocks. Decoder layers begin at `decoder_start`, as they do
    for a prompt; rows before it are not computed and hold anything."""
    config = network.config
    blocks = list(network.embedding(tokens).chunk(tokens.shape[1] // config.block, 1))
    compressed: list[Tensor] = []
    for number in range(config.layers):
        source = config.source_of(number)
        if source is not None and config.sources[source][0] == number:
            made = [network.source(source)(x, *_rope(config, b))[0] for b, x in enumerate(blocks)]
            compressed.append(straight_through(codec.main, torch.cat(made, 1)))
        start = 0 if number < config.encoder_layers else decoder_start
        ratio = 0 if source is None else config.sources[source][1]
        blocks = _layer(network, network.layer(number), codec, blocks, compressed[source] if source is not None else None, ratio, start)
    return torch.cat(blocks, 1)


def draft_hidden(network: Network, codec: Codec, outputs: Tensor, tokens: Tensor, decoder_start: int = 0) -> Tensor:
    """Output of the draft layer at i, from the decoder's output at i and the token at i+1; the last row has no such token and is filler."""
    assert network.draft is not None
    mixed = network.draft.mix(outputs, network.embedding(tokens.roll(-1, 1)))
    blocks = list(mixed.chunk(tokens.shape[1] // network.config.block, 1))
    return torch.cat(_layer(network, network.draft.layer, codec, blocks, None, 0, decoder_start), 1)


def _layer(
    network: Network, layer: Layer, codec: Codec, blocks: list[Tensor], compressed: Tensor | None, ratio: int, start: int
) -> list[Tensor]:
    config = network.config
    first = start // config.block

    def run(window: Tensor, *rows: Tensor) -> Tensor:
        """All blocks from `first` on; `rows` is `compressed`, where there is one."""
        out = []
        before = torch.zeros_like(window[:, : config.block, : config.latent])
        for b, x in enumerate(window.chunk(window.shape[1] // config.block, 1), first):
            cos, sin = _rope(config, b)
            own = straight_through(codec.window, layer.attention.window_rows(x, cos, sin))
            keys, mask = [before, own], [window_mask(config, b, start)]
            if rows:
                keys.append(rows[0][:, : (b + 1) * config.block // ratio])
                mask.append(compressed_mask(config, b, ratio))
            out.append(layer(x, cos, sin, torch.cat(keys, 1), torch.cat(mask, 2)))
            before = own
        return torch.cat(out, 1)

    inputs = torch.cat(blocks[first:], 1)
    arguments = (inputs,) if compressed is None else (inputs, compressed)
    if torch.is_grad_enabled() and len(blocks) * config.block > CHECKPOINT_TOKENS:
        outputs: Tensor = checkpoint(run, *arguments, use_reentrant=False)
    else:
        outputs = run(*arguments)
    return blocks[:first] + list(outputs.chunk(len(blocks) - first, 1))
