"""What one request keeps while it runs: rings, compressed rows, half-done pairs, window entries taken on the way.

Everything lies by its token's position, so going back is forgetting: rows past `length` are written again before anyone sees them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore.engine_integration.model.codecs import Codec
from kvstore.engine_integration.model.config import ModelConfig
from kvstore.engine_integration.model.layout import block_layout, entry_bytes, entry_layer_bytes
from kvstore.engine_integration.model.rings import Ring, Rows
from kvstore.errors import LayoutError, MisuseError

Bytes = npt.NDArray[np.uint8]
ENTRIES_KEPT: Final = 3  # covers both that prefill wants (the last two boundaries it can resume at) and decode's last three


class RequestState:
    """`length` tokens are computed. Not for use by two threads at once."""

    def __init__(self, config: ModelConfig, codec: Codec, prompt_tokens: int) -> None:
        self.config, self.codec = config, codec
        self.prompt_tokens = prompt_tokens
        self.length = 0
        self.reached = 0  # most that `length` was: what lies this far back was overwritten
        self.start = 0  # window rows of the encoder before this do not exist for this run
        self.decoder_start = max(0, prompt_tokens - config.slots)
        self.write_from = 0  # compressed rows of tokens before this came from blocks and are never written
        self.exact_from = 0  # window rows from here on are whole in every encoder layer
        self.approximate = False
        self.entries: dict[int, bytes] = {}
        self.rings = [Ring(config.slots, config.spare, config.latent, codec.window) for _ in range(config.layers)]
        self.main = [Rows(config.latent, codec.main, config.block // ratio) for _, ratio in config.sources]
        self.index = [Rows(config.index_dim, codec.index, config.block // ratio) for _, ratio in config.sources if config.index_dim]
        self.pending = [torch.zeros(config.block, config.d) for _ in config.sources]  # a source's inputs of this block

    # --- blocks ---

    def sections(self) -> list[tuple[Rows, int]]:
        """Arrays in the order of a block's sections, and their rows in one block."""
        found = []
        for i, (_, ratio) in enumerate(self.config.sources):
            found += [(rows[i], self.config.block // ratio) for rows in (self.index, self.main) if rows]
        return found

    def export_blocks(self, first: int, end: int) -> Bytes:
        """Blocks [first, end), whole ones only, as they are stored: (end-first, block_bytes)."""
        if not 0 <= first <= end <= self.length // self.config.block:
            raise MisuseError("E585", f"blocks {first} to {end}", f"{self.length} tokens are computed", "export whole blocks only")
        parts = [rows.codes[first * n : end * n].view(end - first, n * rows.codes.shape[1]) for rows, n in self.sections()]
        out: Bytes = torch.cat(parts, 1).numpy()
        return out

    def import_blocks(self, blocks: Bytes) -> None:
        """Takes blocks 0, 1, ... of the prompt. LayoutError for rows of another layout."""
        layout = block_layout(self.config, self.codec)
        if blocks.dtype != np.uint8 or blocks.ndim != 2 or blocks.shape[1] != layout.block_bytes:
            cause = f"{blocks.dtype} {blocks.shape}, blocks have {layout.block_bytes} bytes"
            raise LayoutError("E586", "blocks", cause, f"load blocks of model {self.config.name!r} in codec {self.codec.name!r}")
        offset = 0
        for section, (rows, n) in zip(layout.sections, self.sections(), strict=True):
            part = torch.from_numpy(np.ascontiguousarray(blocks[:, offset : offset + section.bytes]))
            rows.reserve(len(blocks) * n)
            rows.write(0, part.view(len(blocks) * n, -1))
            offset += section.bytes

    # --- window entries ---

    def take_entry(self) -> None:
        """At a multiple of the block: keeps the encoder's rings, unless rows in them are not what an entry promises."""
        first = self.length - self.config.slots
        if self.exact_from and first < self.exact_from:
            return
        padded = np.zeros((self.config.encoder_layers, entry_layer_bytes(self.config, self.codec)), np.uint8)
        for layer in range(self.config.encoder_layers):
            codes = self.rings[layer].entry(self.length).numpy().reshape(-1)
            padded[layer, : len(codes)] = codes
        self.entries[self.length] = padded.tobytes()
        for old in sorted(self.entries)[:-ENTRIES_KEPT]:
            del self.entries[old]

    def import_entry(self, entry: bytes) -> None:
        """Takes the encoder's rings at `length`."""
        if len(entry) != entry_bytes(self.config, self.codec):
            cause = f"{len(entry)} bytes, not {entry_bytes(self.config, self.codec)}"
            raise LayoutError("E587", "window entry", cause, f"take one of model {self.config.name!r} in codec {self.codec.name!r}")
        layers = torch.from_numpy(np.frombuffer(entry, np.uint8).reshape(self.config.encoder_layers, -1).copy())
        for ring, padded in zip(self.rings, layers, strict=False):
            row_bytes = ring.codes.shape[1]
            ring.take(self.length, padded[: ring.slots * row_bytes].view(ring.slots, row_bytes))

    # --- going back ---

    def rollback(self, tokens: int) -> None:
        """Forgets the last tokens: at most `spare` below the furthest this run has been."""
        length = self.length - tokens
        if tokens < 0 or length < max(self.write_from, self.start) or self.reached - length > self.config.spare:
            cause = f"{self.length} tokens computed, {self.reached} at most, blocks up to {self.write_from}"
            raise MisuseError("E588", f"rollback of {tokens} tokens", cause, f"at most {self.config.spare}, none of the prompt's hit")
        self.length = length
        self.entries = {at: entry for at, entry in self.entries.items() if at <= length}

    def window_buffer(self, layer: int, block: int, lo: int, start: int) -> Tensor:
        """Rows of the block before and this one, (2 block, latent); those before `lo` that a query from there on can see are filled in."""
        size = self.config.block
        buffer = torch.zeros(2 * size, self.config.latent)
        first = max(start, lo - self.config.window + 1, 0)
        if first < lo:
            at = first - (block - 1) * size
            buffer[at : at + lo - first] = self.rings[layer].get(first, lo)
        return buffer
