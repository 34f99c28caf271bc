"""The network over whole texts at once, differentiable: layers, masks and codec of model.py, layer by layer instead of block by block."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kvstore.engine_integration.model.attention import rotate
from kvstore.engine_integration.model.blocks import Layer, Network
from kvstore.engine_integration.model.codecs import Codec, straight_through
from kvstore.engine_integration.model.config import ModelConfig
from kvstore.engine_integration.train.fused import attend, experts, norm, rope


def hidden(
    network: Network,
    codec: Codec,
    tokens: Tensor,
    decoder_start: int = 0,
    dtype: torch.dtype = torch.float32,
    asleep: frozenset[int] = frozenset(),
) -> Tensor:
    """Output of the decoder (n, length, d) for tokens (n, length), length whole blocks. Decoder layers begin at `decoder_start`, as they do
    for a prompt; rows before it are not computed and hold anything. Products in `dtype`. Layers that are `asleep` pass their input on."""
    config = network.config
    x = network.embedding(tokens)
    cos, sin = rope(config, tokens.shape[1])
    compressed: list[Tensor] = []
    first = decoder_start // config.block * config.block
    for number in range(config.layers):
        source = config.source_of(number)
        ratio = 0 if source is None else config.sources[source][1]
        if source is not None and config.sources[source][0] == number:
            made = network.source(source)
            compressed.append(straight_through(codec.main, made.main(norm(x, made.norm.weight), cos, sin)).to(dtype))
        if number == config.encoder_layers:
            before, x = x[:, :first], x[:, first:]
        if number in asleep:
            continue
        rows = compressed[source] if source is not None else None
        decoding = number >= config.encoder_layers
        x = _layer(config, network.layer(number), codec, x, rows, ratio, first if decoding else 0, decoder_start if decoding else 0, dtype)
    return torch.cat([before, x], 1) if first else x


def draft_hidden(
    network: Network, codec: Codec, outputs: Tensor, tokens: Tensor, decoder_start: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Output of the draft layer at i, from the decoder's output at i and the token at i+1; the last row has no such token and is filler."""
    assert network.draft is not None
    first = decoder_start // network.config.block * network.config.block
    mixed = network.draft.mix(outputs, network.embedding(tokens.roll(-1, 1)))
    made = _layer(network.config, network.draft.layer, codec, mixed[:, first:], None, 0, first, decoder_start, dtype)
    return torch.cat([mixed[:, :first], made], 1) if first else made


def _layer(
    config: ModelConfig,
    layer: Layer,
    codec: Codec,
    x: Tensor,
    compressed: Tensor | None,
    ratio: int,
    first: int,
    start: int,
    dtype: torch.dtype,
) -> Tensor:
    """Rows at `first` on of a text whose queries see window rows from `start` on."""
    attention = layer.attention
    cos, sin = (table[first:] for table in rope(config, first + x.shape[1]))
    weight = torch.cat([attention.q.weight * config.latent**-0.5, attention.kv.weight]).to(dtype)
    q, kv = torch.split(F.linear(norm(x, attention.norm.weight).to(dtype), weight), [config.heads * config.latent, config.latent], -1)
    window = straight_through(codec.window, rotate(norm(kv.float(), attention.kv_norm.weight), cos, sin)).to(dtype)
    seen = attend(q.view(*q.shape[:2], config.heads, config.latent), window, compressed, attention.sinks, config, ratio, first, start)
    x = x + F.linear(seen.flatten(-2), attention.out.weight.to(dtype))
    return x + experts(layer.moe, x.flatten(0, 1), dtype).view_as(x)
