"""What a run does when: its recipe, which texts a step has, and which weights learn how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvstore.engine_integration.model.blocks import Network


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What decides the result, with the seed; the whole of it is in the checkpoint, and one that differs is not resumed."""

    tokens: int = 20_000_000
    long_tokens: int = 4_096  # of a text that is a step by itself
    short_tokens: int = 512  # of the other texts; half of it in the first sixth of the run
    step_tokens: int = 2_048  # of a step of short texts
    truncated_share: float = 0.125  # of batches whose decoder begins within the text
    matrix_rate: float = 0.02  # of Muon
    rate: float = 4e-3  # of AdamW, which has embedding, head, routers and vectors
    warmup_steps: int = 40
    decay_share: float = 0.4  # of the run, at its end, in which rates fall to nothing
    draft_from: float = 0.6  # share of the run after which the draft layer learns too
    wake_at: float = 0.5  # share of the run through which half of the layers sleep; 0: none do
    balance_step: float = 1e-3
    seed: int = 0
    bf16: bool = False  # products in bf16: twice as fast on processors with avx512_bf16, more with AMX, slower on others

    def rate_at(self, step: int, progress: float) -> float:
        """Share of the full rates: linear up, level, linear down to nothing."""
        return min(1.0, (step + 1) / self.warmup_steps, max(0.0, 1.0 - progress) / self.decay_share)


class Plan:
    """Which texts a step has: a function of recipe and step. A quarter of the tokens are in long texts, none of them in the first third
    of the run; texts of one length do not overlap until all of the corpus was seen in that length."""

    def __init__(self, recipe: Recipe, corpus_tokens: int) -> None:
        self.recipe, self.corpus_tokens = recipe, corpus_tokens
        self._tokens = [0]  # before each step
        self._kinds: list[tuple[bool, int]] = []  # of each step: long, and how many of its kind came before
        self._counts = [0, 0]

    def tokens(self, step: int) -> int:
        """In the steps before `step`."""
        recipe = self.recipe
        while len(self._kinds) < step:
            done = self._tokens[-1]
            long = (done - recipe.tokens / 3) * 3 / 8 >= (self._counts[True] + 0.5) * recipe.long_tokens
            self._kinds.append((long, self._counts[long]))
            self._counts[long] += 1
            self._tokens.append(done + (recipe.long_tokens if long else recipe.step_tokens))
        return self._tokens[step]

    def texts(self, step: int) -> tuple[npt.NDArray[np.int64], int]:
        """Where the texts of `step` begin in the corpus, and their length."""
        done = self.tokens(step + 1) and self._tokens[step]
        long, before = self._kinds[step]
        length = self.recipe.long_tokens if long else self.recipe.short_tokens
        count = 1 if long else self.recipe.step_tokens // length
        pieces = (self.corpus_tokens - 1) // length - 1
        starts = []
        for number in range(before * count, (before + 1) * count):
            chosen = np.random.default_rng([self.recipe.seed, length, number // pieces])
            starts.append(int(chosen.integers(0, length)) + length * int(chosen.permutation(pieces)[number % pieces]))
        if not long and done < self.recipe.tokens / 6:
            length //= 2
            starts = [at + half for at in starts for half in (0, length)]
        return np.array(starts), length


def split(network: Network) -> tuple[list[tuple[Tensor, Callable[[Tensor], Tensor]]], list[Tensor]]:
    """Weights for Muon, each with its view as (n, rows, columns), and those for AdamW."""
    matrices: list[tuple[Tensor, Callable[[Tensor], Tensor]]] = []
    others: list[Tensor] = []
    for name, weight in network.named_parameters():
        if weight.ndim != 2 or name.startswith(("embedding", "head")) or name.endswith(("router.weight", "bias")):
            others.append(weight)
        else:
            inter = network.config.inter if ".moe." in name else 0
            matrices.append((weight, partial(_matrices, inter=inter, columns=name.endswith("down.weight"))))
    return matrices, others


def _matrices(weight: Tensor, *, inter: int, columns: bool) -> Tensor:
    if not inter:
        return weight[None]
    return weight.view(len(weight), -1, inter).transpose(0, 1) if columns else weight.view(-1, inter, weight.shape[1])
