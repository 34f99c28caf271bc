"""Prefill and decode of one request with the model alone, in one process or two.

python handover_tools.py ADDRESS     a prefill process: per line on stdin (JSON: prompt, options) one handoff to ADDRESS, sent while the
                                     prompt is read; prints its outcome
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvstore.client.agent.handoff import HandoffOutcome, begin
from kvstore.client.agent.peers import Peers
from kvstore.engine_integration.engine.options import RequestOptions
from kvstore.engine_integration.engine.sampling import choose
from kvstore.engine_integration.model import TINY
from kvstore.engine_integration.model.handover import Handover, export_rest, export_run, runs, sizes
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.speculate import DraftLayer
from kvstore.engine_integration.model.state import RequestState

DRAFTING = replace(TINY, name="drafting", draft_tokens=5)
CHUNK = 48


@dataclass
class Run:
    """A request under way."""

    model: Model
    state: RequestState
    options: RequestOptions
    tokens: list[int]
    drafts: DraftLayer | None
    outputs: list[Tensor] = field(default_factory=list)  # of rows the draft layer has not seen
    last_output: Tensor | None = None

    def choose(self, logits: Tensor, position: int) -> int:
        return choose(logits, position, self.options)

    def read(self, count: int) -> None:
        """Computes `count` more tokens of the prompt; the last gives the first token of the answer."""
        end = min(len(self.tokens), self.state.length + count)
        outputs, logits = self.model.run(self.state, self.tokens[self.state.length : end])
        self.outputs.append(outputs)
        if end == len(self.tokens):
            self._say([self.choose(logits[-1], end)], torch.cat(self.outputs))

    def step(self) -> None:
        assert self.last_output is not None
        position = self.state.length - 1
        guesses = self.drafts.guess(position, self.last_output, self.tokens[-1], 5) if self.drafts is not None else []
        outputs, logits = self.model.run(self.state, [self.tokens[-1], *guesses])
        said: list[int] = []
        for row, guess in zip(logits, [*guesses, None], strict=True):
            said.append(self.choose(row, position + 2 + len(said)))
            if said[-1] != guess:
                break
        self.state.rollback(1 + len(guesses) - len(said))
        self._say(said, torch.cat([self.last_output[None], outputs[: len(said)]]))

    def _say(self, said: list[int], outputs: Tensor) -> None:
        before = len(self.tokens)
        self.tokens += said
        if self.drafts is not None and len(outputs) > 1:
            first = before + len(said) - 1 - len(outputs)
            self.drafts.observe(first, outputs[:-1], self.tokens[first + 1 : first + len(outputs)])
        self.last_output, self.outputs = outputs[-1], []


def options_of(words: dict[str, Any]) -> RequestOptions:
    return RequestOptions(**words)


def started(model: Model, prompt: list[int], options: RequestOptions) -> Run:
    drafts = None
    run = Run(model, model.begin(len(prompt)), options, list(prompt), None)
    if options.speculate:
        drafts = DraftLayer(model, run.choose)
    run.drafts = drafts
    return run


def resumed(model: Model, handover: Handover) -> Run:
    options = options_of(json.loads(handover.sampler))
    run = Run(model, handover.state, options, list(handover.tokens), None, last_output=handover.last_output)
    if options.speculate:
        run.drafts = DraftLayer(model, run.choose)
        handover.give_to(run.drafts)
    return run


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def hand_over(model: Model, peers: Peers, address: str, prompt: list[int], words: dict[str, Any]) -> HandoffOutcome:
    """Offers before a token is read, and sends blocks as they become whole."""
    run, sampler = started(model, prompt, options_of(words)), json.dumps(words).encode()
    table = sizes(model, len(prompt), len(prompt) + 1, len(sampler))
    sender = begin(peers, address, table, note=b"prefill", deadline_seconds=20)
    if isinstance(sender, HandoffOutcome):
        return sender
    with sender:
        left = runs(model.config, len(prompt))
        while len(run.tokens) == len(prompt):
            run.read(CHUNK)
            while left and run.state.length >= left[0][2] * model.config.block:
                name, first, end = left.pop(0)
                sender.put(name, export_run(run.state, first, end).data)
        for name, data in export_rest(model, run.state, run.tokens, sampler, run.last_output, run.drafts).items():
            sender.put(name, data.data)
        return sender.commit(20)


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = Model.random(DRAFTING)
    with Peers() as asked:
        print("ready", flush=True)
        for line in sys.stdin:
            given = json.loads(line)
            print(hand_over(made, asked, sys.argv[1], given["prompt"], given["options"]).value, flush=True)
