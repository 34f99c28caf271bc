"""A text with all its blocks and window entries, runs that resume on it one way or another, and how far apart their answers are."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore.engine_integration.engine.audit import divergence
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.resume import Resume, WindowUse
from kvstore.engine_integration.model.state import Bytes, RequestState

Numbers = npt.NDArray[np.float64]
NO_END: Final = 1 << 40  # as a prompt's length: the decoder does not run yet


@dataclass(frozen=True)
class Passage:
    """`tokens`, the blocks of all whole blocks of it, and the window entry at each of their ends, as a cold run leaves them."""

    tokens: list[int]
    blocks: Bytes
    entries: dict[int, bytes]


def read_passage(model: Model, tokens: Sequence[int], known: Passage | None = None, known_tokens: int = 0) -> Passage:
    """A cold run of the encoder over `tokens`; what `known` has of its first `known_tokens` (whole blocks) is taken from there."""
    size = model.config.block
    known_tokens = known_tokens // size * size
    state, entries = begin(model, known, NO_END, known_tokens, known_tokens, entry=True) if known else model.begin(NO_END), {}
    if known:
        entries = {at: entry for at, entry in known.entries.items() if at <= known_tokens}
    for at in range(state.length, len(tokens) // size * size, size):
        model.feed(state, tokens[at : at + size])
        entries.update(state.entries)
    return Passage(list(tokens), state.export_blocks(0, len(tokens) // size), entries)


def begin(model: Model, passage: Passage | None, prompt_tokens: int, end: int, start: int, *, entry: bool = False) -> RequestState:
    """A request that reads blocks [0, end) and computes from `start` on: with the window entry there, or with no window at all.

    The plans of `plan_resume` are of this form (a test compares them); here `start` need not be at a block's edge."""
    if end == 0 or passage is None:
        return model.begin(prompt_tokens)
    exact_from = max(0, start - model.config.slots) if entry else start
    plan = Resume(WindowUse.HIT if entry else WindowUse.BOUNDED, end, start, entry, exact_from, not entry)
    return model.begin(prompt_tokens, plan, passage.blocks, passage.entries.get(start) if entry else None)


def fork(state: RequestState, prompt_tokens: int, decoder_start: int) -> RequestState:
    """A copy whose prompt ends at `prompt_tokens`; its decoder has not begun."""
    other = copy.deepcopy(state)
    other.prompt_tokens, other.decoder_start = prompt_tokens, decoder_start
    return other


def answer_logits(model: Model, state: RequestState, tokens: Sequence[int], prompt_tokens: int, count: int) -> Tensor:
    """Computes up to the token before the last of the answer, teacher-forced: logits (count, vocabulary) for `count` tokens from the
    prompt's end on."""
    return model.feed(state, tokens[state.length : prompt_tokens + count - 1])[-count:]


@dataclass(frozen=True)
class Deviation:
    """Of an approximate run from an exact one, a number a token of the answer."""

    nats: Numbers  # KL(exact || approximate)
    nll: Numbers  # negative log-likelihood of the true token, approximate less exact
    same_top: npt.NDArray[np.bool_]  # the most likely token is the same

    @property
    def first_difference(self) -> int:
        """Tokens before the first whose most likely one differs: on greedy text, how long both would write the same. All, if none does."""
        return len(self.same_top) if self.same_top.all() else int(self.same_top.argmin())


def deviation(exact: Tensor, approximate: Tensor, truth: Sequence[int]) -> Deviation:
    """Logits (count, vocabulary) twice and the tokens that follow, (count,). In float64: differences of 1e-12 nats are real."""
    true = torch.tensor(list(truth))[:, None]
    p, q = (logits.double().log_softmax(-1).gather(1, true)[:, 0] for logits in (exact, approximate))
    return Deviation(divergence(exact, approximate).numpy(), (p - q).numpy(), (exact.argmax(-1) == approximate.argmax(-1)).numpy())


def bits_per_byte(model: Model, tokens: Sequence[int]) -> float:
    """Of all but the first token, in texts of 32 blocks that overlap by a quarter, decoder whole: how good the model is at this text."""
    length = 32 * model.config.block
    bits, known = 0.0, 0
    while known < len(tokens) - 1:
        at = max(0, known - length // 4)
        piece = tokens[at : at + length + 1]
        logits = model.feed(model.begin(1), piece[:-1])[known - at :]
        told = logits.double().log_softmax(-1).gather(1, torch.tensor(piece[known - at + 1 :])[:, None])
        bits -= float(told.sum()) / math.log(2)
        known = at + len(piece) - 1
    return bits / (len(tokens) - 1)
