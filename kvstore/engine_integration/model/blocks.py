"""The network: embedding, layers, sources, head. It keeps nothing; `model` runs it over what a request keeps, `train` over whole texts."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from kvstore.engine_integration.model import weights
from kvstore.engine_integration.model.attention import Attention, Indexer, RmsNorm
from kvstore.engine_integration.model.compressor import Source
from kvstore.engine_integration.model.config import ModelConfig
from kvstore.engine_integration.model.moe import MoE
from kvstore.errors import InputError


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, *, indexer: bool) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.moe = MoE(config)
        self.indexer = Indexer(config) if indexer else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(x, cos, sin, keys, mask)
        out: Tensor = x + self.moe(x)
        return out

    def of_rows(
        self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, window: Tensor, tail: Tensor | None, hidden: Tensor | None
    ) -> Tensor:
        """As forward, for rows of one request (attention.attend_rows)."""
        x = x + self.attention.of_rows(x, cos, sin, keys, window, tail, hidden)
        out: Tensor = x + self.moe(x)
        return out


class Draft(nn.Module):
    """One window-only layer that guesses the token after next from the decoder's output and the next token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.hidden_norm = RmsNorm(config.d)
        self.token_norm = RmsNorm(config.d)
        self.join = nn.Linear(2 * config.d, config.d, bias=False)
        self.layer = Layer(config, indexer=False)

    def mix(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Input of the layer at position i: the decoder's output there, and the embedding of the token at i+1."""
        out: Tensor = self.join(torch.cat([self.hidden_norm(hidden), self.token_norm(embedded)], -1))
        return out


class Network(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.d)
        self.layers = nn.ModuleList(Layer(config, indexer=i in config.index_sources and config.index_dim > 0) for i in range(config.layers))
        self.sources = nn.ModuleList(Source(config, ratio) for _, ratio in config.sources)
        self.norm = RmsNorm(config.d)
        self.head = nn.Linear(config.d, config.vocabulary, bias=False)
        self.draft = Draft(config) if config.draft_tokens else None

    def layer(self, index: int) -> Layer:
        found = self.layers[index]
        assert isinstance(found, Layer)
        return found

    def source(self, index: int) -> Source:
        found = self.sources[index]
        assert isinstance(found, Source)
        return found

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x))
        return out

    @torch.no_grad()
    def randomise(self, seed: int) -> None:
        """Weights of a fresh model, the same on every machine with this torch."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in sorted(self.named_parameters()):
            if weight.ndim == 2 and not name.endswith("bias"):
                deep = name.endswith(("out.weight", "down.weight"))
                fan = weight.shape[1] if name != "embedding.weight" else weight.shape[1] / 4
                scale = 1 / math.sqrt(fan) / (math.sqrt(2 * self.config.layers) if deep else 1)
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)

    @classmethod
    def load(cls, config: ModelConfig, path: Path) -> Network:
        """From a file of weights, or a checkpoint of the training. InputError where it is of another model."""
        tensors, _ = weights.load(path)
        network = cls(config)
        kept = {name.removeprefix("weight."): tensor for name, tensor in tensors.items() if name.startswith("weight.")}
        named = {name: tensor.float() for name, tensor in (kept or tensors).items()}  # a checkpoint also holds what its optimizers keep
        try:
            network.load_state_dict(named)
        except RuntimeError as error:
            cause = str(error).splitlines()[-1].strip()
            raise InputError("E174", str(path), f"weights are not those of {config.name!r}: {cause}", "name the right size") from None
        return network

    def digest(self) -> bytes:
        """32 bytes that stand for the weights in a namespace: names, shapes and bytes."""
        digest = hashlib.blake2b(digest_size=32)
        for name, weight in sorted(self.state_dict().items()):
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
            digest.update(weight.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
        return digest.digest()
