"""Running the network for one request, block by block, and going on from what was stored.

A call computes rows [lo, hi) of one aligned block, always with keys up to the block's end (masked), in products of one of two shapes: all
rows of the block, or for a few tokens the aligned tile of 8 they lie in. A model asks the machine once whether the two give the same bits
(`tiles.py`); where not, it has the first only. So how a prompt is cut, where it was resumed, and whether a token was prompt or answer do
not change a bit of what is computed for it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import lru_cache
from importlib import resources

import numpy as np
import torch
from torch import Tensor

from kvstore.engine_integration.model.attention import compressed_mask, rope_tables, tail_hidden, window_hidden
from kvstore.engine_integration.model.blocks import Network
from kvstore.engine_integration.model.codecs import codec_of
from kvstore.engine_integration.model.config import MINI, ModelConfig
from kvstore.engine_integration.model.layout import block_layout
from kvstore.engine_integration.model.pages import Pages
from kvstore.engine_integration.model.resume import Resume
from kvstore.engine_integration.model.state import Bytes, RequestState, check_blocks
from kvstore.engine_integration.model.tiles import tile_rows
from kvstore.errors import MisuseError
from kvstore.keys import Namespace

_rope = lru_cache(maxsize=4096)(rope_tables)


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

    @classmethod
    def mini(cls, codec: str = "v41") -> Model:
        """`mini` with the weights that come with the package (docs/ENGINE.md, Training)."""
        with resources.as_file(resources.files("kvstore.engine_integration.model") / "mini.safetensors") as path:
            return cls(Network.load(MINI, path), codec)

    # --- a request ---

    def begin(
        self, prompt_tokens: int, resume: Resume | None = None, blocks: Bytes | None = None, entry: bytes | memoryview | None = None
    ) -> RequestState:
        """A state at `resume.start_tokens` (0 without one): feed it the prompt from there on. `blocks` (n, block_bytes), of which the
        plan's are taken; `entry` where the plan says so. LayoutError for bytes of another model or codec, MisuseError for missing ones."""
        needed = resume.blocks_end_tokens // self.config.block if resume is not None else 0
        if resume is not None and needed and (blocks is None or len(blocks) < needed or (entry is None and resume.entry)):
            needs = f"{needed} blocks{' and an entry' if resume.entry else ''}"
            got = f"{0 if blocks is None else len(blocks)} blocks{', no entry' if entry is None else ''}"
            raise MisuseError("E589", "resume", f"needs {needs}; got {got}", "plan with what is there")
        if blocks is not None and needed:
            check_blocks(self.config, self.codec, blocks)
        state = self.begin_early(prompt_tokens, resume, entry)
        if blocks is not None and needed:
            state.import_blocks(blocks[:needed])
            state.missing.clear()
        return state

    def begin_early(
        self, prompt_tokens: int, resume: Resume | None = None, entry: bytes | memoryview | None = None, pages: Pages | None = None
    ) -> RequestState:
        """As begin, before any block has come: every source is `missing`, until import_source gave its rows and took it out. Only `steps`
        can compute in such a state."""
        state = RequestState(self.config, self.codec, prompt_tokens, pages)
        if resume is None or resume.blocks_end_tokens == 0:
            return state
        state.missing = set(range(len(self.config.sources)))
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

    def run(self, state: RequestState, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """As feed, but also the decoder's outputs (n, d), which a draft layer takes."""
        steps = self.steps(state, tokens)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                found: tuple[Tensor, Tensor] = done.value
                return found
            if state.missing:
                raise MisuseError("E589", "resume", "blocks have not come yet", "use steps, or begin with the blocks")

    @torch.inference_mode()
    def steps(self, state: RequestState, tokens: Sequence[int]) -> Generator[int, None, tuple[Tensor, Tensor]]:
        """As run, but stops where a source's rows are missing, yielding its number; go on once they have come. Others may be computed
        meanwhile. Raises MisuseError E595 where the state's pages do not suffice: reserve() before."""
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
            found += yield from self._rows(state, ids[state.length - begin : hi - begin], state.length, hi)
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
    ) -> Generator[int, None, list[tuple[Tensor, Tensor]]]:
        size, layers, tile = self.config.block, self.config.encoder_layers, self.tile
        block = lo // size
        if not state.reserve(block + 1):
            raise MisuseError("E595", "pages", f"none is left for block {block}", "reserve before, and wait or take another's")
        begin, end = self._span(lo, hi)
        ids = torch.zeros(1, end - begin, dtype=torch.int64)
        ids[0, lo - begin : hi - begin] = torch.from_numpy(tokens)
        x = self.network.embedding(ids)
        x = yield from self._layers(state, x, begin, range(layers), block, lo, hi)
        self._source(state, layers, x, begin, block, lo, hi)
        found = []
        first = max(lo, state.decoder_start)
        while first < hi:  # a prompt's decoder begins 134 tokens before its end: often in the last few rows of a block
            stop = min(hi, (first // tile + 1) * tile) if hi - first <= size // 4 else hi
            at, end = self._span(first, stop)
            y = yield from self._layers(state, x[:, at - begin : end - begin], at, range(layers, self.config.layers), block, first, stop)
            shown = slice(first - at, stop - at)
            found.append((y[0, shown], self.network.logits(y)[0, shown]))
            first = stop
        return found

    def _span(self, lo: int, hi: int) -> tuple[int, int]:
        """Rows that are computed for [lo, hi) of one block: their tile if they lie in one, else the block."""
        step = self.tile if lo // self.tile == (hi - 1) // self.tile else self.config.block
        return lo // step * step, lo // step * step + step

    def _layers(
        self, state: RequestState, x: Tensor, begin: int, layers: range, block: int, lo: int, hi: int
    ) -> Generator[int, None, Tensor]:
        """`x` holds rows from `begin` on; [lo, hi) of them are tokens, the others filler."""
        size, codec = self.config.block, self.codec.window
        base = block * size
        shown = slice(begin - base, begin - base + x.shape[1])
        cos, sin = (table[shown] for table in _rope(self.config, block))
        start = state.start if layers.start == 0 else state.decoder_start
        window = window_hidden(self.config, max(0, start - base + size))[shown]
        rows = slice(lo - begin, hi - begin)
        hidden: Tensor | None = None
        tail: Tensor | None = None
        keys, source = torch.empty(2 * size, self.config.latent), None
        for number in layers:
            layer = self.network.layer(number)
            if number < self.config.encoder_layers:
                self._source(state, number, x, begin, block, lo, hi)
            if source != (source := self.config.source_of(number)) and source is not None:
                while source in state.missing:
                    yield source
                ratio = self.config.sources[source][1]
                keys = torch.empty(2 * size + (block + 1) * size // ratio, self.config.latent)
                state.gather(source, True, keys[2 * size :])
                tail = tail_hidden(self.config, ratio)[shown]
            buffer = keys[: 2 * size]
            state.window_into(buffer, number, block, lo, start)
            codes = codec.encode(layer.attention.window_rows(x, cos, sin))[0]
            values = codec.decode(codes)
            state.rings[number].put(lo, codes[rows], values[rows])
            buffer[size + lo - base : size + hi - base] = values[rows]
            if layer.indexer is not None and self.config.top_k and source is not None:
                index = torch.empty(1, len(keys) - 2 * size, self.config.index_dim)
                state.gather(source, False, index[0])
                visible = compressed_mask(self.config, block, self.config.sources[source][1])[:, shown]
                hidden = ~layer.indexer(x, cos, sin, index, visible)[0]
            x = layer.of_rows(x, cos, sin, keys, window, tail, hidden)
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
        main, index = self.network.source(source)(pending[None, shown], *(table[shown] for table in _rope(self.config, block)))
        part = slice(first - begin // ratio, end - begin // ratio)
        for section in state.pages.sections:
            if section.source == source:
                codes = section.codec.encode(main if section.main else index)[0]
                state.put(section, first, codes[part], section.codec.decode(codes)[part])
