"""What is compared with what: each function is one sample. Lengths are in blocks of the model, so that `tiny` runs the same code.

A hit ends at H. The prompt ends at L, its decoder begins at L - 134 as it does for every request, and the answer is the text's true
continuation. "W windows" is bounded replay of so many: computing begins W x 128 tokens before H with no window at all.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.replay_error.costs import time_sample
from benchmarks.replay_error.floor import floor_sample
from benchmarks.replay_error.needle import needle_sample
from benchmarks.replay_error.probe import NO_END, Passage, answer_logits, begin, deviation, fork
from benchmarks.replay_error.study import Experiments, Study, chosen
from kvstore.engine_integration.model.speculate import DraftLayer, generate

HITS_A_PASSAGE = 4
GREEDY_TOKENS = 96
TURNS = 10
TURNS_BESIDE = (2, 5, TURNS)  # at which a chain is compared with more than the exact run
PARTS_OF_ANSWER = ("first", "early", "late")  # tokens 1-8, 9-32, 33-128


def replay_sample(study: Study, number: int) -> None:
    """What a window miss changes, by how much is replayed: 0, 1, 2 windows; of every fourth sample all others, and those that are exact."""
    model, config = study.model, study.model.config
    kind, nth = study.kind(number), number // len(study.texts)
    passage = study.passage(kind, nth // HITS_A_PASSAGE)
    draw = chosen("replay", number)
    hit = (8 + 6 * (nth % HITS_A_PASSAGE) + int(draw.integers(0, 3))) * config.block
    prompt = hit + config.slots + int(draw.integers(0, config.block))
    truth = passage.tokens[prompt : prompt + config.block]

    def answer(start: int, *, entry: bool = False) -> torch.Tensor:
        state = begin(model, passage, prompt, hit, start, entry=entry)
        return answer_logits(model, state, passage.tokens, prompt, len(truth))

    exact = answer(hit, entry=True)
    longer = nth % HITS_A_PASSAGE == nth // HITS_A_PASSAGE % HITS_A_PASSAGE  # every fourth, at each place in turn
    for windows in range(config.encoder_layers if longer else 3):
        found = deviation(exact, answer(hit - windows * config.window), truth)
        parts = zip(PARTS_OF_ANSWER, np.split(found.nats, [config.block // 16, config.block // 4]), strict=True)
        study.tally(f"replay/{kind}/{windows * config.window}").add(found, **{name: float(part.mean()) for name, part in parts})
    if longer:
        for name, start, entry in (
            ("exact replay: n(W-1) tokens", hit - config.replay_visible_tokens, False),
            ("exact replay: n windows", hit - config.replay_blocks_tokens, False),
            ("older window, two blocks back", hit - 2 * config.block, True),
        ):
            study.check(name, torch.equal(exact, answer(start, entry=entry)))


def suffix_lengths(block: int, slots: int) -> list[int]:
    """1 to 2,000 tokens between the hit's end and the prompt's."""
    return [1, block // 8, block // 2, slots, 2 * block, 4 * block, 8 * block, 125 * block // 8]


def suffix_sample(study: Study, number: int) -> None:
    """How the error of a miss with one window replayed fades, by how many tokens were computed between the hit and the answer.

    Under 134 tokens no request ends this close behind a hit: there the decoder begins with the first window replayed, in all runs."""
    model, config = study.model, study.model.config
    kind, nth = study.kind(number), number // len(study.texts)
    passage = study.passage(kind, nth)
    hit = int(chosen("suffix", number).integers(8, 16)) * config.block
    count = config.block // 2
    walkers = {0: begin(model, passage, NO_END, hit, hit - 2 * config.block, entry=True)}
    walkers[1] = begin(model, passage, NO_END, hit, hit - config.window)
    for suffix in suffix_lengths(config.block, config.slots):
        prompt = hit + suffix
        decoder_start = max(prompt - config.slots, hit - config.window)
        truth = passage.tokens[prompt : prompt + count]
        answers = {}
        for windows, walker in walkers.items():
            model.feed(walker, passage.tokens[walker.length : decoder_start])
            answers[windows] = answer_logits(model, fork(walker, prompt, decoder_start), passage.tokens, prompt, count)
        study.tally(f"suffix/{kind}/{suffix}").add(deviation(answers[0], answers[1], truth))


def lineage_sample(study: Study, number: int) -> None:
    """Ten turns of two blocks, every one with its window missed and one window replayed: each reads the blocks that those before wrote.

    Beside it, the same miss over exact blocks (depth 1), and an exact replay over the chain's blocks: what only a window can heal."""
    model, config = study.model, study.model.config
    kind, nth = study.kind(number), number // len(study.texts)
    passage = study.passage(kind, nth)
    size, first = config.block, int(chosen("lineage", number).integers(8, 12)) * config.block
    chain = passage.blocks[: first // size]
    for turn in range(1, TURNS + 1):
        hit = first + (turn - 1) * 2 * size
        prompt, end = hit + config.slots, hit + 2 * size
        truth = passage.tokens[prompt:end]
        exact = answer_logits(model, begin(model, passage, prompt, hit, hit, entry=True), passage.tokens, prompt, len(truth))
        inherited = Passage(passage.tokens, chain, {})
        if turn in TURNS_BESIDE:
            single = answer_logits(model, begin(model, passage, prompt, hit, hit - size), passage.tokens, prompt, len(truth))
            study.tally(f"lineage/{kind}/single/{turn}").add(deviation(exact, single, truth))
            state = begin(model, inherited, prompt, hit, hit - config.replay_blocks_tokens)
            healed = answer_logits(model, state, passage.tokens, prompt, len(truth))
            study.tally(f"lineage/{kind}/exact replay/{turn}").add(deviation(exact, healed, truth))
        state = begin(model, inherited, prompt, hit, hit - size)
        logits = model.feed(state, passage.tokens[hit - size : end])[-len(truth) - 1 : -1]
        study.tally(f"lineage/{kind}/chain/{turn}").add(deviation(exact, logits, truth))
        chain = np.concatenate([chain, state.export_blocks(hit // size, end // size)])


def decoder_starts(config_window: int, slots: int, layers: int) -> list[int]:
    """How many of the prompt's last tokens the decoder runs over: 134 as every request does, more, and as many as make it whole."""
    return [slots, *(slots + more * config_window for more in (1, 2, 3)), layers * config_window + slots]


def decoder_sample(study: Study, number: int) -> None:
    """What every prefill pays: the decoder over the last 134 tokens instead of all. The encoder is exact throughout."""
    model, config = study.model, study.model.config
    kind, nth = study.kind(number), number // len(study.texts)
    passage = study.passage(kind, nth // 2)
    draw = chosen("decoder", number)
    prompt = (12 + 8 * (nth % 2) + int(draw.integers(0, 8))) * config.block + int(draw.integers(0, config.block))
    truth = passage.tokens[prompt : prompt + config.block]
    starts = decoder_starts(config.window, config.slots, config.decoder_layers)

    def answer(tokens: int) -> torch.Tensor:
        at = (prompt - tokens) // config.block * config.block
        state = fork(begin(model, passage, NO_END, at, at, entry=True), prompt, prompt - tokens)
        return answer_logits(model, state, passage.tokens, prompt, len(truth))

    whole = answer(starts[-1])
    if number % 4 == 0:
        study.check("the decoder over n(W-1) + 134 tokens is whole", torch.equal(whole, answer(starts[-1] + config.block)))
    for tokens in starts[:-1]:
        study.tally(f"decoder/{kind}/{tokens}").add(deviation(whole, answer(tokens), truth))


def greedy_sample(study: Study, number: int) -> None:
    """How long the answers stay the same: the exact run's greedy text, then where another run would first have written something else."""
    model, config = study.model, study.model.config
    kind, nth = study.kind(number), number // len(study.texts)
    passage = study.passage(kind, nth // HITS_A_PASSAGE)
    draw = chosen("greedy", number)
    hit = (8 + 6 * (nth % HITS_A_PASSAGE) + int(draw.integers(0, 3))) * config.block
    prompt = hit + config.slots + int(draw.integers(0, config.block))
    count = GREEDY_TOKENS * config.block // 128
    tokens = passage.tokens[:prompt]
    guesser = DraftLayer(model) if config.draft_tokens else None
    text = generate(model, begin(model, passage, prompt, hit, hit, entry=True), tokens, count, guesser).tokens
    tokens += text

    def answer(start: int, *, entry: bool = False) -> torch.Tensor:
        return answer_logits(model, begin(model, passage, prompt, hit, start, entry=entry), tokens, prompt, count)

    exact = answer(hit, entry=True)
    study.check("greedy text is the most likely text", exact.argmax(-1).tolist() == text)
    for windows in range(3):
        found = deviation(exact, answer(hit - windows * config.window), text)
        study.tally(f"greedy/{kind}/{windows * config.window}").add(found, same=found.first_difference)


EXPERIMENTS: Experiments = {
    "replay": (0.30, replay_sample),
    "suffix": (0.15, suffix_sample),
    "lineage": (0.20, lineage_sample),
    "decoder": (0.08, decoder_sample),
    "greedy": (0.08, greedy_sample),
    "needle": (0.10, needle_sample),
    "floor": (0.06, floor_sample),
    "time": (0.03, time_sample),
}
