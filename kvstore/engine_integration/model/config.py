"""Sizes of the model. One code path runs them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.errors import MisuseError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Layers 0 .. encoder_layers-1 are the encoder; all that is stored depends on them alone."""

    name: str
    encoder_layers: int
    decoder_layers: int
    sources: tuple[tuple[int, int], ...]  # (layer, tokens per compressed row); the last is fed by the encoder's output
    index_sources: tuple[int, ...]  # layers that choose positions anew; later ones reuse the choice
    d: int
    heads: int
    latent: int  # dims of a head, and of the one K=V row all heads share
    rotary: int  # last dims of the latent
    index_dim: int  # 0: no indexer
    index_heads: int
    top_k: int  # 0: dense, every visible compressed row
    experts: int
    experts_top: int
    inter: int
    window: int
    block: int
    spare: int
    vocabulary: int
    draft_tokens: int  # 0: no draft layer

    def __post_init__(self) -> None:
        layers = [layer for layer, _ in self.sources]
        if self.window != self.block or self.block % 8 or any(self.block % ratio for _, ratio in self.sources):
            raise MisuseError("E580", f"model {self.name!r}", "window and block must be one multiple of 8, and of every ratio")
        if layers != sorted(set(layers)) or layers[-1] != self.encoder_layers or 0 in layers:
            raise MisuseError("E581", f"model {self.name!r}", f"sources {layers}; the last must be the first decoder layer, none layer 0")
        if not 0 < self.spare < self.block // 2:
            raise MisuseError("E582", f"model {self.name!r}", f"{self.spare} spare slots; at least 1, fewer than half a block")

    @property
    def layers(self) -> int:
        return self.encoder_layers + self.decoder_layers

    @property
    def slots(self) -> int:
        """Rows of a window ring: the window, and as many as may be rolled back."""
        return self.window + self.spare

    @property
    def replay_visible_tokens(self) -> int:
        """Tokens to replay until the W-1 rows that a later query can see are right: each layer looks back W-1 further."""
        return self.encoder_layers * (self.window - 1)

    @property
    def replay_window_tokens(self) -> int:
        return self.replay_visible_tokens + 1

    @property
    def replay_slots_tokens(self) -> int:
        """Until all rows of a window entry are right."""
        return self.replay_visible_tokens + self.spare + 1

    @property
    def replay_blocks_tokens(self) -> int:
        """replay_window_tokens in whole blocks."""
        return self.encoder_layers * self.window

    @property
    def replay_entry_tokens(self) -> int:
        """What exact replay runs: whole blocks, and as many tiles of 8 rows more as make the window entry at its end right, too."""
        return max(self.replay_blocks_tokens, -(-self.replay_slots_tokens // 8) * 8)

    def source_of(self, layer: int) -> int | None:
        """Index into `sources` that `layer` reads; None: window only."""
        found = [i for i, (source, _) in enumerate(self.sources) if source <= layer]
        return found[-1] if found else None


MINI: Final = ModelConfig(
    name="mini", encoder_layers=6, decoder_layers=6, sources=((1, 2), (3, 2), (6, 1)), index_sources=(1, 3, 6, 9), d=128, heads=4,
    latent=64, rotary=16, index_dim=32, index_heads=4, top_k=0, experts=8, experts_top=2, inter=96, window=128, block=128, spare=6,
    vocabulary=264, draft_tokens=5,
)  # fmt: skip
TINY: Final = ModelConfig(
    name="tiny", encoder_layers=4, decoder_layers=4, sources=((1, 2), (4, 1)), index_sources=(), d=64, heads=2,
    latent=32, rotary=8, index_dim=0, index_heads=0, top_k=0, experts=4, experts_top=1, inter=32, window=16, block=16, spare=6,
    vocabulary=256, draft_tokens=0,
)  # fmt: skip
SIZES: Final = {config.name: config for config in (MINI, TINY)}
