"""What lies where in a block and in a window entry.

block          for each source layer in order: its index rows (where the model has an indexer), then its main rows
window entry   for each encoder layer in order: `slots` rows in ring order (position % slots), zero-padded to a multiple of 32 bytes

        | mini, v41       bf16            f32      | tiny, v41       bf16            f32
block   | 256 x 53        256 x 192       256 x 384 | 24 x 18         24 x 64         24 x 128
        | 13,568          49,152          98,304    | 432             1,536           3,072
entry   | 6 x 8,864       6 x 17,152      6 x 34,304| 4 x 736         4 x 1,408       4 x 2,816
        | 53,184          102,912         205,824   | 2,944           5,632           11,264
"""

from __future__ import annotations

from typing import Final

from kvstore.engine_integration.model.codecs import CODECS, Codec
from kvstore.engine_integration.model.config import MINI, TINY, ModelConfig
from kvstore.layout import Layout, Section

ENTRY_ALIGN_BYTES: Final = 32


def block_layout(config: ModelConfig, codec: Codec) -> Layout:
    sections = []
    for layer, ratio in config.sources:
        rows = config.block // ratio
        if config.index_dim:
            sections.append(Section(f"source.{layer}.index", rows * codec.index.row_bytes(config.index_dim)))
        sections.append(Section(f"source.{layer}.main", rows * codec.main.row_bytes(config.latent)))
    return Layout(tuple(sections))


def entry_layer_bytes(config: ModelConfig, codec: Codec) -> int:
    """Of one encoder layer in a window entry."""
    return -(-config.slots * codec.window.row_bytes(config.latent) // ENTRY_ALIGN_BYTES) * ENTRY_ALIGN_BYTES


def entry_bytes(config: ModelConfig, codec: Codec) -> int:
    return config.encoder_layers * entry_layer_bytes(config, codec)


def _sums(config: ModelConfig) -> list[tuple[int, int]]:
    return [(block_layout(config, CODECS[name]).block_bytes, entry_bytes(config, CODECS[name])) for name in ("v41", "bf16", "f32")]


assert _sums(MINI) == [(13_568, 53_184), (49_152, 102_912), (98_304, 205_824)], _sums(MINI)
assert _sums(TINY) == [(432, 2_944), (1_536, 5_632), (3_072, 11_264)], _sums(TINY)
