"""Guessing ahead changes the pace, never a token nor a stored byte."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kvstore.engine_integration.model import MINI, TINY, plan_resume
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.speculate import DraftLayer, Generated, Guesser, generate
from kvstore.engine_integration.model.state import RequestState
from kvstore.errors import MisuseError

pytestmark = pytest.mark.usefixtures("one_torch_thread")
DRAFTING = replace(TINY, name="drafting", draft_tokens=5)
PROMPT = random.Random(4).choices(range(256), k=83)
COUNT = 40


@dataclass
class Oracle:
    """Knows the answer, and lies every so often."""

    answer: list[int]
    right: float
    chosen: random.Random

    def observe(self, position: int, outputs: Tensor, following: list[int]) -> None:
        text = PROMPT + self.answer
        assert following == text[position + 1 : position + 1 + len(following)], "settled rows only"

    def guess(self, position: int, output: Tensor, token: int, count: int) -> list[int]:
        known = (PROMPT + self.answer)[position + 2 : position + 2 + count]
        return [token if self.chosen.random() < self.right else (token + 1) % 256 for token in known]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.random(DRAFTING)


@pytest.fixture(scope="module")
def plain(model: Model) -> tuple[Generated, RequestState]:
    state = model.begin(len(PROMPT))
    return generate(model, state, PROMPT, COUNT), state


def same(state: RequestState, other: RequestState) -> None:
    assert state.length == other.length == len(PROMPT) + COUNT - 1
    assert np.array_equal(state.export_blocks(0, state.length // 16), other.export_blocks(0, state.length // 16))
    assert all(state.entries[at] == other.entries[at] for at in state.entries.keys() & other.entries.keys())
    assert max(state.entries) == max(other.entries)


@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
def test_good_and_bad_guesses_give_the_text_and_bytes_of_none(model: Model, plain: tuple[Generated, RequestState], right: float) -> None:
    state = model.begin(len(PROMPT))
    got = generate(model, state, PROMPT, COUNT, Oracle(plain[0].tokens, right, random.Random(7)))
    assert got.tokens == plain[0].tokens
    same(state, plain[1])
    if right == 1.0:
        assert got.accepted == got.guessed and got.calls == -(-(COUNT - 1) // 6)
    if right == 0.0:
        assert got.accepted == 0 and got.calls == plain[0].calls == COUNT - 1


def test_the_draft_layer_gives_the_text_and_bytes_of_none(model: Model, plain: tuple[Generated, RequestState]) -> None:
    state = model.begin(len(PROMPT))
    got = generate(model, state, PROMPT, COUNT, DraftLayer(model))
    assert got.tokens == plain[0].tokens and got.guessed >= 5
    same(state, plain[1])


def test_speculation_over_a_resumed_prompt_gives_the_same_text(model: Model, plain: tuple[Generated, RequestState]) -> None:
    blocks = plain[1].export_blocks(0, 5)
    plan = plan_resume(DRAFTING, len(PROMPT), 5)
    guessers: list[Guesser | None] = [None, DraftLayer(model), Oracle(plain[0].tokens, 0.7, random.Random(1))]
    for guesser in guessers:
        state = model.begin(len(PROMPT), plan, blocks)
        assert plan.blocks_end_tokens == 48 and generate(model, state, PROMPT, COUNT, guesser).tokens == plain[0].tokens


def test_mini_drafts_across_a_block_boundary_and_keeps_its_text() -> None:
    mini, prompt = Model.random(MINI), PROMPT + PROMPT[:41]
    plain, drafted = (generate(mini, mini.begin(124), prompt, 10, guesser) for guesser in (None, DraftLayer(mini)))
    assert drafted.tokens == plain.tokens and drafted.guessed > 5


def test_a_draft_layer_runs_as_it_was_trained(model: Model) -> None:
    """Row by row on the model's outputs: what the training computes for the whole text."""
    from kvstore.engine_integration.train.forward import draft_hidden

    state = model.begin(16)
    outputs, _ = model.run(state, PROMPT[:16])
    want = draft_hidden(model.network, model.codec, outputs[None], torch.tensor(PROMPT[:16])[None])[0]
    draft = DraftLayer(model)
    got = torch.cat([draft._run(i, outputs[i : i + 1], [PROMPT[i + 1]]) for i in range(15)])
    assert torch.allclose(got, want[:15], atol=1e-4)


def test_generation_without_a_draft_layer_or_a_token_to_compute_is_refused(model: Model) -> None:
    with pytest.raises(MisuseError, match="E591"):
        DraftLayer(Model.random(TINY))
    with pytest.raises(MisuseError, match="E592"):
        generate(model, model.begin(4), [], 1)
