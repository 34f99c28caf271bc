"""What one request keeps while it runs: rings, compressed rows, half-done pairs, window entries taken on the way.

Everything lies by its token's position, so going back is forgetting: rows past `length` are written again before anyone sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore.engine_integration.model.codecs import Codec
from kvstore.engine_integration.model.config import ModelConfig
from kvstore.engine_integration.model.layout import block_layout, entry_bytes, entry_layer_bytes
from kvstore.engine_integration.model.pages import Pages, Section
from kvstore.engine_integration.model.rings import Ring
from kvstore.errors import LayoutError, MisuseError

Bytes = npt.NDArray[np.uint8]
Mover = Callable[[Bytes, npt.NDArray[np.int64], slice], bool]
ENTRIES_KEPT: Final = 3  # covers both that prefill wants (the last two boundaries it can resume at) and decode's last three


def check_blocks(config: ModelConfig, codec: Codec, blocks: Bytes) -> None:
    """Raises LayoutError for rows of another layout."""
    layout = block_layout(config, codec)
    if blocks.dtype != np.uint8 or blocks.ndim != 2 or blocks.shape[1] != layout.block_bytes:
        cause = f"{blocks.dtype} {blocks.shape}, blocks have {layout.block_bytes} bytes"
        raise LayoutError("E586", "blocks", cause, f"load blocks of model {config.name!r} in codec {codec.name!r}")


class RequestState:
    """`length` tokens are computed. Not for use by two threads at once."""

    def __init__(self, config: ModelConfig, codec: Codec, prompt_tokens: int, pages: Pages | None = None) -> None:
        """`pages`: shared with others, and given back by `release`; else own ones."""
        self.config, self.codec = config, codec
        self.pages = pages or Pages(config, codec, None)
        self.table: list[int] = []  # page of each block
        self._table = torch.zeros(0, dtype=torch.int64)  # the same
        self.missing: set[int] = set()  # sources whose rows of the hit are still on their way
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
        self.pending = [torch.zeros(config.block, config.d) for _ in config.sources]  # a source's inputs of this block

    # --- blocks ---

    def reserve(self, blocks: int) -> bool:
        """Room for so many blocks in all. False: the pages are all taken."""
        more = blocks - len(self.table)
        if more > 0:
            taken = self.pages.take(more)
            if taken is None:
                return False
            self.table += taken
            self._table = torch.tensor(self.table)
        return True

    def abandon(self) -> None:
        """Never gives the pages back: a device may still write to them."""
        self.table = []

    def release(self) -> None:
        """Gives the pages back; nothing can be computed or exported after that."""
        self.pages.give(self.table)
        self.table, self._table = [], torch.zeros(0, dtype=torch.int64)

    def put(self, section: Section, first: int, codes: Tensor, values: Tensor) -> None:
        """Rows first, first+1, ... of one block, in a block that has its page."""
        page, row = self.table[first // section.rows], first % section.rows
        part = self.pages.codes[page, section.offset_bytes : section.offset_bytes + section.bytes].view(section.rows, section.row_bytes)
        part[row : row + len(codes)] = codes
        read = self.pages.values.get((section.source, section.main))
        if read is not None:
            read[page, row : row + len(values)] = values

    def gather(self, source: int, main: bool, out: Tensor) -> None:
        """Decoded rows of the first blocks, as many as `out` (blocks x rows, dim) holds, in position order."""
        values = self.pages.values[source, main]
        torch.index_select(values, 0, self._table[: len(out) // values.shape[1]], out=out.view(-1, *values.shape[1:]))

    def export_blocks(self, first: int, end: int) -> Bytes:
        """Blocks [first, end), whole ones only, as they are stored: (end-first, block_bytes)."""
        if not 0 <= first <= end <= self.length // self.config.block:
            raise MisuseError("E585", f"blocks {first} to {end}", f"{self.length} tokens are computed", "export whole blocks only")
        out: Bytes = self.pages.codes[self._table[first:end]].numpy()
        return out

    def import_blocks(self, blocks: Bytes) -> None:
        """Takes blocks 0, 1, ... of the prompt. LayoutError for rows of another layout."""
        for source in range(len(self.config.sources)):
            self.import_source(source, blocks)

    def import_source(self, source: int, blocks: Bytes, move: Mover | None = None) -> None:
        """Of blocks 0, 1, ... what one source needs; bytes of other sources are not looked at. Any thread, one for each source.

        `move(blocks, table, columns)` brings the stored bytes into the pages; where it says False, and without it, they are copied."""
        check_blocks(self.config, self.codec, blocks)
        self.reserve(len(blocks))
        at = self._table[: len(blocks)]
        mine = [section for section in self.pages.sections if section.source == source]
        columns = slice(mine[0].offset_bytes, mine[-1].offset_bytes + mine[-1].bytes)
        if move is None or not move(blocks, at.numpy(), columns):
            self.pages.codes[:, columns][at] = torch.from_numpy(blocks[:, columns])
        for section in mine:
            if len(blocks):
                span = slice(section.offset_bytes, section.offset_bytes + section.bytes)
                part = torch.from_numpy(blocks[:, span])
                values = self.pages.values.get((source, section.main))
                if values is not None:
                    rows = section.codec.decode(part.reshape(len(blocks), section.rows, section.row_bytes))
                    values[at] = rows

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

    def import_entry(self, entry: bytes | memoryview) -> None:
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

    def window_into(self, buffer: Tensor, layer: int, block: int, lo: int, start: int) -> None:
        """Fills `buffer` (2 block, latent): rows of the block before and this one that lie before `lo` and that a query from there on can
        see; the others are zero."""
        size = self.config.block
        buffer.zero_()
        first = max(start, lo - self.config.window + 1, 0)
        if first < lo:
            at = first - (block - 1) * size
            buffer[at : at + lo - first] = self.rings[layer].get(first, lo)
