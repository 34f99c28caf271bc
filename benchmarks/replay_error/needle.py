"""A name planted in code, that the answer has to write again: does it find it behind the window?

The passage gets a line that assigns to a made-up name, D tokens before the hit's end; the prompt ends with the name's first letters. All
runs see the line's compressed rows in the blocks; those that miss the window lack it in the window rows near the hit. A control has no
such line.
"""

from __future__ import annotations

from typing import Final

import torch

from benchmarks.replay_error.probe import answer_logits, begin, deviation, read_passage
from benchmarks.replay_error.study import Study, chosen

SYLLABLES: Final = ("ba", "ke", "li", "mo", "nu", "ra", "se", "ti", "vo", "zu", "pe", "dra", "ski", "lor", "ven", "quo")
SHOWN_LETTERS: Final = 4


def needle_distances(block: int) -> dict[str, int]:
    """Tokens from the planted line's end to the hit's end."""
    return {"in the last window": block // 4, "one window back": 3 * block // 2, "twelve back": 12 * block}


def needle_sample(study: Study, number: int) -> None:
    model, config = study.model, study.model.config
    base = study.passage("code", number)
    draw = chosen("needle", number)
    name = "".join(SYLLABLES[at] for at in draw.choice(len(SYLLABLES), 5, replace=False))
    line = f"\n    {name} = {int(draw.integers(100, 999))}\n".encode()
    ask = f"\n    return {name}".encode()
    hit = int(draw.integers(16, 26)) * config.block
    prompt = hit + config.slots + int(draw.integers(0, config.block))
    count = len(name) - SHOWN_LETTERS
    for where, distance in {"nowhere": 0, **needle_distances(config.block)}.items():
        at = hit - distance
        planted = base.tokens[: at - len(line)] + list(line) + base.tokens[at:] if distance else base.tokens
        tokens = planted[: prompt - (len(ask) - count)] + list(ask)
        passage = read_passage(model, tokens[:hit], base, at - len(line)) if distance else base
        truth = tokens[prompt:]

        def answer(start: int, *, entry: bool = False) -> torch.Tensor:
            return answer_logits(model, begin(model, passage, prompt, hit, start, entry=entry), tokens, prompt, count)  # noqa: B023 - called in this round only

        exact = answer(hit, entry=True)
        for windows in (None, 0, 1):
            logits = exact if windows is None else answer(hit - windows * config.window)
            own = -float(logits.double().log_softmax(-1).gather(1, torch.tensor(truth)[:, None]).mean())
            right = float(logits.argmax(-1).tolist() == truth)
            way = "exact" if windows is None else str(windows * config.window)
            study.tally(f"needle/{where}/{way}").add(deviation(exact, logits, truth), own_nll=own, right=right)
