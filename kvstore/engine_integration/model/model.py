"""Running the network for one request, block by block, and going on from what was stored.

A call computes rows [lo, hi) of one aligned block, always with keys up to the block's end (masked), in products of one of two shapes: all
rows of the block, or for a few tokens the aligned tile of 8 they lie in. A model asks the machine once whether the two give the same bits
(`tiles.py`); where not, it has the first only. So how a prompt is cut, where it was resumed, and whether a token was prompt or answer do
not change a bit of what is computed for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kvstore.engine_integration.model.attention import compressed_mask, rope_tables, window_mask
from kvstore.engine_integration.model.blocks import Network
from kvstore.engine_integration.model.codecs import codec_of
from kvstore.engine_integration.model.config import ModelConfig
from kvstore.engine_integration.model.layout import block_layout
from kvstore.engine_integration.model.resume import Resume
from kvstore.engine_integration.model.state import Bytes, RequestState
from kvstore.engine_integration.model.tiles import tile_rows
from kvstore.errors import MisuseError
from kvstore.keys import Namespace

_rope = lru_cache(maxsize=512)(rope_tables)


class Model:
    """A network and the codec its cache is kept in. Stateless: all that a request keeps is in its RequestState."""

    def __init__(self, network: Network, codec: str = "v41") -> None:
        self.network = network.eval()
        self.config: ModelConfig = network.config
        self.codec = codec_of(codec)
        self.tile = tile_rows(self.network)
        self.layout = block_layout(self.config, self.codec)
        self.namespace = Namespace(weights=network.digest(), kv_dtype=f"{self.config.name}.{codec}", layout_digest=self.layout.digest())

    @classmethod
    def random(cls, config: ModelConfig, codec: str = "v41", seed: int = 0) -> Model:
        network = Network(config)
        network.randomise(seed)
        return cls(network, codec)

    # --- a request ---

    def begin(
        self, prompt_tokens: int, resume: Resume | None = None, blocks: Bytes | None = None, entry: bytes | None = None
    ) -> RequestState:
        """A state at `resume.start_tokens` (0 without one): feed it the prompt from there on. `blocks` (n, block_bytes), of which the
        plan's are taken; `entry` where the plan says so. LayoutError for bytes of another model or codec, MisuseError for missing ones."""
        state = RequestState(self.config, self.codec, prompt_tokens)
        if resume is None or resume.blocks_end_tokens == 0:
            return state
        needed = resume.blocks_end_tokens // self.config.block
        if blocks is None or len(blocks) < needed or (entry is None and resume.entry):
            needs = f"{needed} blocks{' and an entry' if resume.entry else ''}"
            got = f"{0 if blocks is None else len(blocks)} blocks{', no entry' if entry is None else ''}"
            raise MisuseError("E589", "resume", f"needs {needs}; got {got}", "plan with what is there")
        state.import_blocks(blocks[:needed])
        state.start = state.length = state.reached = resume.start_tokens
        state.write_from = resume.blocks_end_tokens
        state.exact_from, state.approximate = resume.exact_from_tokens, resume.approximate
        if resume.entry:
            assert entry is not None
            state.import_entry(entry)
            state.start = max(0, resume.start_tokens - self.config.slots)
        return state

    def feed(self, state: RequestState, tokens: Sequence[int]) -> Tensor:
        """Computes the next tokens of the prompt or the answer. Logits (n, vocabulary) of those the decoder ran over: of a prompt the last
        `slots`, of an answer all. Raises MisuseError for ids that are no tokens."""
        return self.run(state, tokens)[1]

    @torch.inference_mode()
    def run(self, state: RequestState, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """As feed, but also the decoder's outputs (n, d), which a draft layer takes."""
        ids = np.asarray(tokens, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.config.vocabulary:
            raise MisuseError("E590", "tokens", f"ids from {ids.min()} to {ids.max()}", f"ids are 0 to {self.config.vocabulary - 1}")
        found = []
        end = state.length + len(ids)
        begin = state.length
        while state.length < end:
            hi = min(end, (state.length // self.config.block + 1) * self.config.block)
            if hi - state.length <= self.config.block // 4:  # few enough that tiles cost less than a block
                hi = min(hi, (state.length // self.tile + 1) * self.tile)
            rows = self._rows(state, ids[state.length - begin : hi - begin], state.length, hi)
            if rows is not None:
                found.append(rows)
            state.length = hi
            state.reached = max(state.reached, hi)
            if hi % self.config.block == 0:
                state.take_entry()
        if not found:
            return torch.zeros(0, self.config.d), torch.zeros(0, self.config.vocabulary)
        outputs, logits = zip(*found, strict=True)
        return torch.cat(outputs), torch.cat(logits)

    def _rows(
        self, state: RequestState, tokens: np.ndarray[tuple[int], np.dtype[np.int64]], lo: int, hi: int
    ) -> tuple[Tensor, Tensor] | None:
        size, layers = self.config.block, self.config.encoder_layers
        block = lo // size
        base = block * size
        begin = lo // self.tile * self.tile if lo // self.tile == (hi - 1) // self.tile else base
        ids = torch.zeros(1, self.tile if begin + self.tile >= hi else size, dtype=torch.int64)
        ids[0, lo - begin : hi - begin] = torch.from_numpy(tokens)
        x = self.network.embedding(ids)
        x = self._layers(state, x, begin, range(layers), block, lo, hi)
        self._source(state, layers, x, begin, block, lo, hi)
        first = max(lo, state.decoder_start)
        if first >= hi:
            return None
        x = self._layers(state, x, begin, range(layers, self.config.layers), block, first, hi)
        shown = slice(first - begin, hi - begin)
        return x[0, shown], self.network.logits(x)[0, shown]

    def _layers(self, state: RequestState, x: Tensor, begin: int, layers: range, block: int, lo: int, hi: int) -> Tensor:
        """`x` holds rows from `begin` on; [lo, hi) of them are tokens, the others filler."""
        size, codec = self.config.block, self.codec.window
        base = block * size
        shown = slice(begin - base, begin - base + x.shape[1])
        cos, sin = (table[shown] for table in _rope(self.config, block))
        start = state.start if layers.start == 0 else state.decoder_start
        window = window_mask(self.config, block, start)[:, shown]
        rows = slice(lo - begin, hi - begin)
        chosen: Tensor | None = None
        for number in layers:
            layer = self.network.layer(number)
            if number < self.config.encoder_layers:
                self._source(state, number, x, begin, block, lo, hi)
            buffer = state.window_buffer(number, block, lo, start)
            codes = codec.encode(layer.attention.window_rows(x, cos, sin))[0]
            values = codec.decode(codes)
            state.rings[number].put(lo, codes[rows], values[rows])
            buffer[size + lo - base : size + hi - base] = values[rows]
            keys, mask = buffer, window
            source = self.config.source_of(number)
            if source is not None:
                ratio = self.config.sources[source][1]
                count = (block + 1) * size // ratio
                visible = compressed_mask(self.config, block, ratio)[:, shown]
                if layer.indexer is not None and self.config.top_k:
                    chosen = layer.indexer(x, cos, sin, state.index[source].values[None, :count], visible)
                keys = torch.cat([buffer, state.main[source].values[:count]])
                mask = torch.cat([window, visible if chosen is None else chosen], 2)
            x = layer(x, cos, sin, keys[None], mask)
        return x

    def _source(self, state: RequestState, layer: int, x: Tensor, begin: int, block: int, lo: int, hi: int) -> None:
        """Where `layer` owns compressed rows: writes those that [lo, hi) completes, none below what came from blocks."""
        source = self.config.source_of(layer)
        if source is None or self.config.sources[source][0] != layer or hi <= state.write_from:
            return
        size, ratio = self.config.block, self.config.sources[source][1]
        base = block * size
        pending = state.pending[source]
        pending[lo - base : hi - base] = x[0, lo - begin : hi - begin]
        first, end = lo // ratio, hi // ratio
        shown = slice(begin - base, begin - base + x.shape[1])
        made = self.network.source(source)(pending[None, shown], *(table[shown] for table in _rope(self.config, block)))
        for rows, new in zip((state.main, state.index), made, strict=True):
            if new is not None:
                codes = rows[source].codec.encode(new)[0]
                rows[source].reserve((block + 1) * size // ratio)
                part = slice(first - begin // ratio, end - begin // ratio)
                rows[source].put(first, codes[part], rows[source].codec.decode(codes)[part])
