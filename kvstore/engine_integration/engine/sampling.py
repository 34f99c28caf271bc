"""The next token from a row of logits. What chance decides hangs on the request's seed and the token's position alone, so a sampled answer
is the same whatever else runs and whether or not tokens were guessed ahead."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvstore.engine_integration.engine.options import RequestOptions

TEMPERATURE_MIN: Final = 1e-6  # the most likely token, as nothing else comes near; less would divide to infinity, and draw from nonsense


def choose(logits: Tensor, position: int, options: RequestOptions) -> int:
    """The token at `position`, from logits (vocabulary,) of the row before. The largest of logits and Gumbel noise is a draw by softmax."""
    if options.banned_tokens:
        logits = logits.index_fill(0, torch.tensor(sorted(options.banned_tokens)), -torch.inf)
    if options.temperature == 0:
        return int(logits.argmax())
    scores = logits.double().numpy() / max(options.temperature, TEMPERATURE_MIN)
    if options.top_p < 1:
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        order = np.argsort(-shares, kind="stable")
        before = np.cumsum(shares[order]) - shares[order]
        scores[order[before >= options.top_p]] = -np.inf
    generator = np.random.Generator(np.random.Philox(key=options.seed, counter=position))
    return int((scores - np.log(-np.log(generator.random(len(scores)) + 1e-300))).argmax())
