"""All that a request is, in bytes: what a prefill process gives a decode process, which then computes no token again.

    section       bytes                                                     what
    head          84, _HEAD                                                 see there
    tokens        4 a token                                                 prompt and answer so far, u32
    sampler       as given                                                  the engine's own
    blocks.F      block bytes x up to 8, in long prompts more               whole blocks F, F+1, ..., as they are stored
    tail          block bytes                                               the block that is not whole; rows not computed are zero
    rings.encoder layers x (slots + spare) x row bytes                      codes of window rows, position p in slot p % (slots + spare)
    rings.decoder likewise
    pending       sources x block x width x 4                               inputs of sources, of this block's tokens: f32
    entries       3 x (4 + entry bytes)                                     token count u32 (0: none), entry; oldest first
    draft         4 x (width + slots x latent)                              the decoder's last output; the draft layer's last rows: f32

All lengths follow from the head, and before any row is computed from the prompt's length: a handoff can be offered, and its blocks sent,
while the prompt is still being read. All little-endian. A new form is a new version in the head.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore.engine_integration.model.config import ModelConfig
from kvstore.engine_integration.model.layout import entry_bytes
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.pages import Pages
from kvstore.engine_integration.model.rings import Ring
from kvstore.engine_integration.model.speculate import DraftLayer
from kvstore.engine_integration.model.state import ENTRIES_KEPT, Bytes, RequestState
from kvstore.errors import LayoutError, MisuseError

VERSION: Final = 2
RUN_BLOCKS: Final = 8  # 0.9 MB of the original: one part of a handoff
RUNS_MAX: Final = 2048  # half of the sections that a handoff may have; from 16,384 blocks on runs are longer
TOKENS_MAX: Final = 1 << 24
SAMPLER_BYTES_MAX: Final = 4096
_MAGIC: Final = b"KVH1"
_HEAD: Final = struct.Struct("<4sHBB11I32s")
assert _HEAD.size == 84

Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


@dataclass(slots=True)
class Handover:
    """A request between two processes. `tokens`: prompt and answer so far; all but the last are computed in `state`."""

    state: RequestState
    tokens: list[int]
    sampler: bytes = b""
    last_output: Tensor | None = None  # (d,), the decoder's at the last computed token: what the draft layer guesses from
    draft_first: int = 0
    draft_rows: Tensor | None = None  # (n, latent)

    def give_to(self, drafts: DraftLayer) -> None:
        """The draft layer goes on where the other process's was."""
        if self.draft_rows is not None:
            drafts.first, drafts.rows = self.draft_first, self.draft_rows.clone()


def runs(config: ModelConfig, length: int) -> list[tuple[str, int, int]]:
    """Sections of whole blocks of `length` computed tokens: name, first block, one past the last."""
    whole = length // config.block
    step = max(RUN_BLOCKS, -(-whole // RUNS_MAX))
    return [(f"blocks.{first}", first, min(first + step, whole)) for first in range(0, whole, step)]


def sizes(model: Model, length: int, token_count: int, sampler_bytes: int = 0) -> list[tuple[str, int]]:
    """Every section and its bytes, in the order in which they become ready. For a prompt of L that is still being read: of L, L + 1."""
    config, block_bytes = model.config, model.layout.block_bytes
    ring = (config.slots + config.spare) * model.codec.window.row_bytes(config.latent)
    return [
        *((name, (end - first) * block_bytes) for name, first, end in runs(config, length)),
        ("tail", block_bytes),
        ("rings.encoder", config.encoder_layers * ring),
        ("rings.decoder", config.decoder_layers * ring),
        ("pending", len(config.sources) * config.block * config.d * 4),
        ("entries", ENTRIES_KEPT * (4 + entry_bytes(config, model.codec))),
        ("draft", 4 * (config.d + config.slots * config.latent)),
        ("tokens", 4 * token_count),
        ("sampler", sampler_bytes),
        ("head", _HEAD.size),
    ]


def export_run(state: RequestState, first: int, end: int) -> Bytes:
    """The bytes of one of `runs`, as soon as its blocks are computed."""
    return state.export_blocks(first, end).reshape(-1)


def export_rest(
    model: Model, state: RequestState, tokens: Sequence[int], sampler: bytes = b"", last_output: Tensor | None = None,
    drafts: DraftLayer | None = None,
) -> dict[str, Bytes]:  # fmt: skip
    """All sections but those of `runs`. Raises MisuseError E585 where rows are still missing, or `tokens` are not those of the state."""
    config = model.config
    if state.missing or len(tokens) != state.length + 1 or len(sampler) > SAMPLER_BYTES_MAX:
        cause = f"{state.length} computed of {len(tokens)} tokens, {len(state.missing)} sources missing, sampler of {len(sampler)} bytes"
        raise MisuseError("E585", "handover", cause, "hand over between two steps: all tokens but the last are computed")
    draft = np.zeros(config.d + config.slots * config.latent, "<f4")
    rows = drafts.rows[-config.slots :] if drafts is not None else torch.zeros(0, config.latent)
    first = drafts.first + len(drafts.rows) - len(rows) if drafts is not None else 0
    if last_output is not None:
        draft[: config.d] = last_output.detach().numpy()
    draft[config.d : config.d + rows.numel()] = rows.detach().reshape(-1).numpy()
    flags = state.approximate | (last_output is not None) << 1 | (drafts is not None) << 2
    head = _HEAD.pack(
        _MAGIC, VERSION, flags, len(state.entries), state.prompt_tokens, state.length, state.reached, state.start, state.write_from,
        state.exact_from, len(tokens), len(sampler), first, len(rows), 0, model.namespace.digest(),
    )  # fmt: skip
    encoder, decoder = state.rings[: config.encoder_layers], state.rings[config.encoder_layers :]
    return {
        "tail": _tail(state),
        "rings.encoder": _stacked([ring.codes for ring in encoder]),
        "rings.decoder": _stacked([ring.codes for ring in decoder]),
        "pending": torch.stack(state.pending).numpy().astype("<f4", copy=False).view(np.uint8).reshape(-1),
        "entries": _entries(model, state),
        "draft": draft.view(np.uint8),
        "tokens": np.asarray(tokens, "<u4").view(np.uint8),
        "sampler": np.frombuffer(sampler, np.uint8),
        "head": np.frombuffer(head, np.uint8),
    }


def export_handoff(
    model: Model, state: RequestState, tokens: Sequence[int], sampler: bytes = b"", last_output: Tensor | None = None,
    drafts: DraftLayer | None = None,
) -> dict[str, Bytes]:  # fmt: skip
    """All sections at once: what `sizes` tells, name by name."""
    rest = export_rest(model, state, tokens, sampler, last_output, drafts)
    return {name: export_run(state, first, end) for name, first, end in runs(model.config, state.length)} | rest


def _stacked(codes: list[Tensor]) -> Bytes:
    stacked: Bytes = torch.stack(codes).numpy().reshape(-1)
    return stacked


def _tail(state: RequestState) -> Bytes:
    """Rows past the computed ones are zero: a page may hold what another request left there."""
    out = np.zeros(sum(section.bytes for section in state.pages.sections), np.uint8)
    block, rest = divmod(state.length, state.config.block)
    if rest:
        page = state.pages.codes[state.table[block]].numpy()
        for section in state.pages.sections:
            count = rest // state.config.sources[section.source][1] * section.row_bytes
            out[section.offset_bytes : section.offset_bytes + count] = page[section.offset_bytes : section.offset_bytes + count]
    return out


def _entries(model: Model, state: RequestState) -> Bytes:
    out = np.zeros((ENTRIES_KEPT, 4 + entry_bytes(model.config, model.codec)), np.uint8)
    for row, at in zip(out, sorted(state.entries), strict=False):
        row[:4] = np.frombuffer(struct.pack("<I", at), np.uint8)
        row[4:] = np.frombuffer(state.entries[at], np.uint8)
    return out.reshape(-1)


# --- the other side ---


def blocks_needed(model: Model, sections: Sequence[tuple[str, int]]) -> int:
    """Pages that a handoff of these sections will take: for who decides whether to accept it."""
    return sum(size for name, size in sections if name.startswith("blocks.")) // model.layout.block_bytes + 1


def told(model: Model, sections: Mapping[str, Buffer]) -> tuple[int, bytes]:
    """How long the prompt is, and the sampler's bytes, before anything is taken over. Raises LayoutError E576, also for a request whose
    next token cannot be guessed from the last output."""
    head = _checked(model, sections)
    _need(head.has_output, "it lacks the decoder's last output")
    return head.prompt_tokens, _bytes(sections["sampler"]).tobytes()


def tokens_of(sections: Mapping[str, Buffer]) -> list[int]:
    """Prompt and answer so far, of sections that were found good."""
    found: list[int] = _bytes(sections["tokens"]).view("<u4").tolist()
    return found


def import_handoff(model: Model, sections: Mapping[str, Buffer], pages: Pages | None = None) -> Handover:
    """The request as it was: bytes are copied, `sections` may go. `pages`: where its rows are to lie.

    Raises LayoutError E576 for bytes of another model, form or request, MisuseError E595 where the pages do not suffice; nothing is kept.
    """
    config = model.config
    head = _checked(model, sections)
    state = RequestState(config, model.codec, head.prompt_tokens, pages)
    if not state.reserve(head.length // config.block + 1):
        raise MisuseError("E595", "pages", f"{head.length // config.block + 1} are needed", "reserve before, or refuse the offer")
    try:
        return _filled(model, state, head, sections)
    except BaseException:
        state.release()
        raise


def _filled(model: Model, state: RequestState, head: _Head, sections: Mapping[str, Buffer]) -> Handover:
    config = model.config
    state.length, state.reached, state.start = head.length, head.reached, head.start
    state.write_from, state.exact_from, state.approximate = head.write_from, head.exact_from, head.approximate
    whole = head.length // config.block
    blocks = np.empty((whole + 1, model.layout.block_bytes), np.uint8)
    for name, first, end in runs(config, head.length):
        blocks[first:end] = _bytes(sections[name]).reshape(end - first, -1)
    blocks[whole] = _bytes(sections["tail"])
    state.import_blocks(blocks)
    _fill_rings(state.rings[: config.encoder_layers], _bytes(sections["rings.encoder"]))
    _fill_rings(state.rings[config.encoder_layers :], _bytes(sections["rings.decoder"]))
    pending = _floats(sections["pending"]).reshape(len(config.sources), config.block, config.d)
    state.pending = [torch.from_numpy(rows.copy()) for rows in pending]
    entries = _bytes(sections["entries"]).reshape(ENTRIES_KEPT, -1)
    state.entries = {int(entry[:4].view("<u4")[0]): entry[4:].tobytes() for entry in entries[: head.entries]}
    draft = _floats(sections["draft"])
    rows = draft[config.d : config.d + head.draft_rows * config.latent].reshape(head.draft_rows, config.latent)
    return Handover(
        state, _bytes(sections["tokens"]).view("<u4").tolist(), _bytes(sections["sampler"]).tobytes(),
        torch.from_numpy(draft[: config.d].copy()) if head.has_output else None, head.draft_first,
        torch.from_numpy(rows.copy()) if head.has_draft else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Head:
    flags: int
    entries: int
    prompt_tokens: int
    length: int
    reached: int  # the most that length was
    start: int
    write_from: int
    exact_from: int
    token_count: int
    sampler_bytes: int
    draft_first: int
    draft_rows: int

    @property
    def approximate(self) -> bool:
        return bool(self.flags & 1)

    @property
    def has_output(self) -> bool:
        return bool(self.flags & 2)

    @property
    def has_draft(self) -> bool:
        return bool(self.flags & 4)


def _checked(model: Model, sections: Mapping[str, Buffer]) -> _Head:
    """The head, once everything in it and every length agrees. Nothing was allocated before."""
    config = model.config
    data = bytes(_bytes(sections["head"])) if "head" in sections else b""
    _need(len(data) == _HEAD.size, "it has no head")
    magic, version, flags, entries, *numbers, zero, digest = _HEAD.unpack(data)
    _need(magic == _MAGIC and version == VERSION and flags < 8 and not zero, "another form or version")
    _need(digest == model.namespace.digest(), f"not of model {config.name!r} with these weights in codec {model.codec.name!r}")
    head = _Head(flags, entries, *numbers)
    _need(0 < head.prompt_tokens <= head.length <= head.reached <= head.length + config.spare, "its lengths cannot be")
    _need(head.token_count == head.length + 1 <= TOKENS_MAX and head.sampler_bytes <= SAMPLER_BYTES_MAX, "its counts cannot be")
    _need(max(head.start, head.write_from, head.exact_from) <= head.length and head.write_from % config.block == 0, "its hit cannot be")
    _need(head.entries <= ENTRIES_KEPT and head.draft_rows <= config.slots, "more entries or draft rows than are kept")
    _need(head.draft_first + head.draft_rows <= head.length + config.spare, "its draft rows lie past its end")
    expected = dict(sizes(model, head.length, head.token_count, head.sampler_bytes))
    found = {name: _bytes(section).nbytes for name, section in sections.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    _need(not wrong, f"section {wrong[0] if wrong else ''!r} is missing, of another length, or not of this form")
    _need(int(_bytes(sections["tokens"]).view("<u4").max()) < config.vocabulary, "ids that are no tokens")
    held = _bytes(sections["entries"]).reshape(ENTRIES_KEPT, -1)[: head.entries, :4].copy().view("<u4").reshape(-1).tolist()
    _need(all(0 < at <= head.length and at % config.block == 0 for at in held) and len(set(held)) == len(held), "entries that cannot be")
    return head


def _fill_rings(rings: Sequence[Ring], codes: Bytes) -> None:
    for ring, part in zip(rings, codes.reshape(len(rings), -1), strict=True):
        ring.codes = torch.from_numpy(part.reshape(ring.codes.shape).copy())
        ring.values = ring.codec.decode(ring.codes)


def _bytes(section: Buffer) -> Bytes:
    """A view, flat."""
    found: Bytes = np.frombuffer(section, np.uint8) if len(section) else np.zeros(0, np.uint8)
    return found


def _floats(section: Buffer) -> npt.NDArray[np.float32]:
    return _bytes(section).view("<f4").astype(np.float32, copy=False)


def _need(holds: bool, cause: str) -> None:
    if not holds:
        raise LayoutError("E576", "handoff", cause, "hand over between processes of one model, codec and version")
