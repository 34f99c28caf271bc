"""Greedy generation, with or without guesses that are checked: the text is the same, for every row is computed as it would be alone.

A guesser proposes up to `draft_tokens` tokens; one call computes the last token and the guesses; what the model itself would have said is
kept, the rest is rolled back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from kvstore.engine_integration.model.attention import rope_tables
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.state import RequestState
from kvstore.errors import MisuseError

_rope = lru_cache(maxsize=256)(rope_tables)


class Guesser(Protocol):
    """Sees every row the model has settled, in order; then guesses what follows `token`."""

    def observe(self, position: int, outputs: Tensor, following: list[int]) -> None:
        """The decoder's outputs (n, d) at `position` on, and the token after each."""

    def guess(self, position: int, output: Tensor, token: int, count: int) -> list[int]:
        """At most `count` tokens after `token`, which follows the row of `output` (d,) at `position`."""
        ...


class DraftLayer:
    """The draft layer run on its own guesses. It decides the pace, never the text, so its rows need not keep to the shapes of blocks."""

    def __init__(self, model: Model, choose: Callable[[Tensor, int], int] | None = None) -> None:
        """`choose`: the token at a position from logits (vocabulary,), as the answer's own are chosen; the most likely by default."""
        if model.network.draft is None:
            raise MisuseError("E591", f"model {model.config.name!r}", "has no draft layer", "generate without one")
        self.network, self.draft, self.config, self.codec = model.network, model.network.draft, model.config, model.codec.window
        self.choose = choose or (lambda logits, position: int(logits.argmax()))
        self.first = 0  # position of the first row kept
        self.rows = torch.zeros(0, self.config.latent)

    def observe(self, position: int, outputs: Tensor, following: list[int]) -> None:
        if following:
            self._run(position, outputs, following)

    def guess(self, position: int, output: Tensor, token: int, count: int) -> list[int]:
        found: list[int] = []
        for step in range(count):
            output = self._run(position + step, output.view(1, -1), [found[-1] if found else token])[-1]
            found.append(self.choose(self.network.logits(output).detach(), position + 2 + step))
        return found

    @torch.inference_mode()
    def _run(self, position: int, outputs: Tensor, following: list[int]) -> Tensor:
        """Rows at `position` on, in place of those guessed there: (n, d)."""
        end = position + len(following)
        if not self.first <= position <= self.first + len(self.rows):
            self.first, self.rows = position, self.rows[:0]
        x = self.draft.mix(outputs, self.network.embedding(torch.tensor(following)))[None]
        size = self.config.block
        tables = [_rope(self.config, block) for block in range(position // size, (end - 1) // size + 1)]
        at = position % size
        cos, sin = (torch.cat(part)[at : at + len(following)] for part in zip(*tables, strict=True))
        own = self.codec.decode(self.codec.encode(self.draft.layer.attention.window_rows(x, cos, sin)))[0]
        self.rows = torch.cat([self.rows[: position - self.first], own])
        keys, queries = torch.arange(self.first, end)[None], torch.arange(position, end)[:, None]
        out: Tensor = self.draft.layer(x, cos, sin, self.rows[None], ((keys <= queries) & (keys > queries - self.config.window))[None])[0]
        spare = max(0, len(self.rows) - self.config.slots)
        self.first, self.rows = self.first + spare, self.rows[spare:]
        return out


@dataclass(frozen=True, slots=True)
class Generated:
    tokens: list[int]
    calls: int  # of the model; without guesses one a token
    guessed: int
    accepted: int


def generate(model: Model, state: RequestState, prompt: list[int], count: int, guesser: Guesser | None = None) -> Generated:
    """Computes the rest of `prompt` and the `count` most likely tokens after it. All but the last of them are then in `state`.

    Raises MisuseError where nothing of the prompt is left to compute, or nothing is asked."""
    if count < 1 or state.length >= len(prompt):
        raise MisuseError(
            "E592", "generate", f"{count} tokens after {len(prompt)}, of which {state.length} are computed", "leave at least one"
        )
    outputs, logits = model.run(state, prompt[state.length :])
    answer = [int(logits[-1].argmax())]
    if guesser is not None:
        guesser.observe(len(prompt) - len(outputs), outputs[:-1], prompt[len(prompt) - len(outputs) + 1 :])
    calls = guessed = accepted = 0
    while len(answer) < count:
        position = state.length - 1
        room = min(model.config.spare - 1, count - len(answer) - 1)
        guesses = guesser.guess(position, outputs[-1], answer[-1], room) if guesser is not None and room else []
        before = outputs[-1:]
        outputs, logits = model.run(state, [answer[-1], *guesses])
        said = logits.argmax(-1).tolist()
        right = next((i for i, guess in enumerate(guesses) if guess != said[i]), len(guesses))
        state.rollback(len(guesses) - right)
        outputs = outputs[: right + 1]
        if guesser is not None:
            guesser.observe(position, torch.cat([before, outputs[:-1]]), [answer[-1], *guesses[:right]])
        answer += said[: right + 1]
        calls, guessed, accepted = calls + 1, guessed + len(guesses), accepted + right
    return Generated(answer, calls, guessed, accepted)
