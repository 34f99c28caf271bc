"""The document's sections, but for costs: text around tables. Every figure in a sentence is computed."""

from __future__ import annotations

import math
from typing import Final

from benchmarks.replay_error.format import DEVIATION_HEADINGS, deviation_cells, nats, percent, table, times, with_interval
from benchmarks.replay_error.found import Found
from benchmarks.replay_error.tally import Tally, mean

BITS: Final = 1 / math.log(2)
FEW: Final = 20  # samples a row


def opening(found: Found) -> str:
    bits = ", ".join(f"{value:.3f} of {kind}" for kind, value in found.file["bits_per_byte"].items())
    runs = found.file["runs"]
    last = runs[-1]
    fewest = min(tally.samples for tally in found.tallies.values())
    early = f"\n**Early figures**: some rows rest on {fewest} samples. Run it again for more.\n" if fewest < FEW else ""
    return f"""# How far bounded replay moves the answer

Made by `python -m benchmarks.replay_error` from `replay_error.json`; run it again and it adds samples.

When the blocks of a prompt are found but the window entry at the hit's end is not, an engine can compute the last window of the hit again
from no window at all (**bounded replay**), or so much that nothing differs (**exact replay**), or take an **older window**. Only the first
is cheap, and it changes the answer. This document says by how much, on the bundled model `{found.config.name}`
({found.config.encoder_layers} encoder layers, window {found.config.window}), and what a window entry in RAM is worth.
It is a small model: the original has 20 encoder layers and a hundred thousand times the parameters. The method carries over, the figures
may not.

| | |
| --- | --- |
| weights | `{found.about["weights"]}`, {found.about["origin"]} |
| bits per byte, first 16 kB | {bits} |
| texts | {"; ".join(f"{kind}: {text}" for kind, text in found.about["texts"].items())} |
| machine | {last["machine"]}, torch {last["torch"]}, one thread |
| measured | {sum(run["minutes"] for run in runs):.0f} minutes in {len(runs)} runs, the last at {last["commit"]} |
{early}"""


def _one(found: Found, name: str) -> Tally:
    """Of both kinds, the first with samples."""
    return next((tally for kind in found.kinds if (tally := found.tally(name.format(kind))).tokens), Tally())


def in_short(found: Found) -> str:
    window, n = found.config.window, found.config.encoder_layers
    none, one, two = (_one(found, f"replay/{{}}/{k * window}") for k in (0, 1, 2))
    truncated = _one(found, f"decoder/{{}}/{found.config.slots}")
    rows, products, shapes = (_one(found, f"floor/{{}}/{name}") for name in ("v41 rows", "bf16 products", "other products"))
    chain, kind = found.by_number(f"lineage/{found.kinds[0]}/chain"), found.kinds[0]
    single = found.by_number(f"lineage/{kind}/single")
    deepest = max(chain, default=0)
    changed, lost = 1 - one.top_agreement, mean(one.lists.get("nll", ())) * BITS
    checks = found.checks("exact replay: n(W-1) tokens")
    growth = chain[deepest].mean_nats / single[deepest].mean_nats if deepest and single[deepest].mean_nats else math.nan
    lines = [
        f"**A miss, one window replayed** ({kind}): a token's distribution moves by {nats(one.mean_nats)} nats on average, "
        f"{nats(one.percentile(99))} at the 99th percentile, {nats(one.greatest)} at most in {one.tokens:,} tokens. "
        f"The most likely token changes in {percent(changed)} of tokens, the true one's cost by {nats(lost)} bits a byte.",
        f"**What a window of replay buys**: none {nats(none.mean_nats)}, one {nats(one.mean_nats)}, two {nats(two.mean_nats)} nats. "
        f"The first divides the error by {times(_ratio(none, one))[:-1]}, the second by {times(_ratio(one, two))[:-1]}.",
        f"**Exact is exact**: with n(W-1) = {n * (window - 1)} tokens replayed, or an older window, "
        f"all {checks} answers checked had the bits of a window hit.",
        f"**Held against what every request pays anyway**: the decoder's truncation moves a token by {nats(truncated.mean_nats)} nats "
        f"({times(_ratio(truncated, one))} the miss), the cache's FP4 and FP8 rows by {nats(rows.mean_nats)} ({times(_ratio(rows, one))}), "
        f"products in bf16 by {nats(products.mean_nats)} ({times(_ratio(products, one))}), "
        f"the same products in other shapes by {nats(shapes.mean_nats)} ({times(_ratio(shapes, one))}).",
        f"**Depth**: at the {deepest}th bounded replay in a row a token moves by "
        f"{nats(chain[deepest].mean_nats if deepest else math.nan)} nats, "
        f"{times(growth)} what the same miss over exact blocks does.",
    ]
    lines += _follows(one, rows, truncated, growth, found)
    return "## In short\n\n" + "\n".join(f"- {line}" for line in lines) + "\n"


def _follows(one: Tally, rows: Tally, truncated: Tally, growth: float, found: Found) -> list[str]:
    """What the figures say for an engine's choices; which words are taken depends on them."""
    than_decoder, than_rows = ("less" if one.mean_nats < other.mean_nats else "more" for other in (truncated, rows))
    tail = (
        "the largest single steps are smaller than theirs, too"
        if one.greatest <= max(rows.greatest, truncated.greatest)
        else ("but its largest single steps are larger than theirs")
    )
    seconds = {way: found.seconds(way) for way in ("window hit", "bounded, 1 windows", "exact replay")}
    longest = max(seconds["window hit"], default=0)
    cost = "what they cost was not measured"
    if longest and all(longest in by_tokens for by_tokens in seconds.values()):
        hit, bounded, exact = (1000 * by_tokens[longest] for by_tokens in seconds.values())
        beyond = f"a bounded replay costs {bounded - hit:,.0f} ms, an exact one {exact - hit:,.0f}"
        cost = f"beyond a window hit ({hit:,.0f} ms of one core) {beyond}"
    depth = "Depth adds up slowly" if growth < 3 else "Depth adds up, and a limit on it bounds the error"
    return [
        f"**What follows**: with one window replayed, a miss moves the answer {than_decoder} than the decoder's truncation and "
        f"{than_rows} than the cache's number format on average; {tail}. {depth}; an exact replay does not heal blocks that are "
        f"approximate already. "
        f"In time, {cost}."
    ]


def _ratio(above: Tally, below: Tally) -> float:
    return above.mean_nats / below.mean_nats if below.tokens and below.mean_nats else math.nan


def lengths(found: Found) -> str:
    config = found.config
    rows, parts = [], []
    for kind in found.kinds:
        for tokens, tally in found.by_number(f"replay/{kind}").items():
            rows.append([kind, str(tokens), *deviation_cells(tally)])
            parts.append([kind, str(tokens), *(nats(mean(tally.lists[part])) for part in ("first", "early", "late"))])
    bounds = (config.block // 16, config.block // 4, config.block)
    checks = "; ".join(
        f"{name}: {found.checks(name)}"
        for name in ("exact replay: n(W-1) tokens", "exact replay: n windows", "older window, two blocks back", "a prompt cut elsewhere")
    )
    return f"""## What a window miss changes, by tokens replayed

Decoder and blocks are the same in both runs; only the encoder's windows at the hit's end differ. The prompt ends
{config.slots} to {config.slots + config.block - 1} tokens behind the hit, as prompts do whose blocks are all there;
the {config.block} tokens after it are the text's own. KL(exact || approximate).

{table(["text", "replayed", *DEVIATION_HEADINGS], rows)}
![By length](replay_error_length.svg)

Answers equal to the last bit, checked: {checks}.

Where in the answer, mean nats:

{table(["text", "replayed", f"tokens 1 to {bounds[0]}", f"{bounds[0] + 1} to {bounds[1]}", f"{bounds[1] + 1} to {bounds[2]}"], parts)}
![Tails](replay_error_tails.svg)
"""


def suffixes(found: Found) -> str:
    rows = []
    for kind in found.kinds:
        for tokens, tally in found.by_number(f"suffix/{kind}").items():
            rows.append([kind, f"{tokens:,}", *deviation_cells(tally)])
    return f"""## By how much was computed behind the hit

The more new tokens lie between the hit and the answer, the less of the missed window is in the windows that answer it; what remains came in
through compressed rows that the suffix wrote. One window is replayed.
Under {found.config.slots} tokens no request ends: the decoder needs that many.

{table(["text", "suffix", *DEVIATION_HEADINGS], rows)}
![By suffix](replay_error_suffix.svg)
"""


def lineage(found: Found) -> str:
    rows = []
    for kind in found.kinds:
        chain, single = found.by_number(f"lineage/{kind}/chain"), found.by_number(f"lineage/{kind}/single")
        healed = found.by_number(f"lineage/{kind}/exact replay")
        for turn, tally in chain.items():
            exact = with_interval(healed[turn].lists["nats"]) if turn in healed else ""
            cells = [with_interval(tally.lists["nats"]), nats(tally.percentile(99)), nats(tally.greatest), percent(1 - tally.top_agreement)]
            alone = with_interval(single[turn].lists["nats"]) if turn in single else ""
            rows.append([kind, str(turn), *cells, alone, exact, str(tally.samples)])
    return f"""## Depth: approximate blocks under approximate turns

Turns of two blocks each, every one with its window missed and one window replayed, reading the blocks that the turns before it wrote.
Beside it the same miss over exact blocks, and an exact replay over the chain's blocks: the error that only the blocks carry.

{
        table(
            [
                "text",
                "depth",
                "mean nats (95%)",
                "p99",
                "max",
                "top-1 changed",
                "over exact blocks",
                "exact replay over the chain's blocks",
                "samples",
            ],
            rows,
        )
    }
![By depth](replay_error_depth.svg)
"""


def decoder(found: Found) -> str:
    rows = [
        [kind, str(tokens), *deviation_cells(tally)] for kind in found.kinds for tokens, tally in found.by_number(f"decoder/{kind}").items()
    ]
    return f"""## The decoder's truncation, which every request pays

Not a cache matter: decoder layers run over the prompt's last {found.config.slots} tokens only, cold or not. KL(whole decoder || truncated),
encoder exact. It is what the original gives up for half its prefill; the model is trained with it on a share of the batches.

{table(["text", "decoder tokens", *DEVIATION_HEADINGS], rows)}"""


def greedy(found: Found) -> str:
    rows = []
    for kind in found.kinds:
        for tokens, tally in found.by_number(f"greedy/{kind}").items():
            same, length = tally.lists["same"], tally.tokens // max(1, tally.samples)
            diverged = sorted(value for value in same if value < length)
            median = f"{diverged[len(diverged) // 2]:.0f}" if diverged else "-"
            first = f"{diverged[0]:.0f}" if diverged else "-"
            share = len(diverged) / len(same)
            cells = [percent(share), first, median, with_interval(tally.lists["nats"]), nats(tally.greatest), str(tally.samples)]
            rows.append([kind, str(tokens), f"{length}", *cells])
    headings = ["text", "replayed", "answer", "answers that differ", "earliest", "median, of those", "mean nats (95%)", "max", "samples"]
    return f"""## Greedy answers: how long the same text

The exact run writes its most likely tokens; where would the other have written another first?

{table(headings, rows)}"""


def needle(found: Found) -> str:
    rows = []
    places = dict.fromkeys(key.split("/")[1] for key in found.tallies if key.startswith("needle/"))
    for place in sorted(places, key=lambda one: ["nowhere", "in the last window", "one window back", "twelve back"].index(one)):
        for way, tally in sorted(found.by_word(f"needle/{place}").items(), key=lambda item: (item[0] != "exact", len(item[0]), item[0])):
            cells = [with_interval(tally.lists["own_nll"]), percent(mean(tally.lists["right"])), with_interval(tally.lists["nll"])]
            rows.append([place, way, *cells, nats(tally.greatest), str(tally.samples)])
    headings = ["planted", "replayed", "NLL a letter (95%)", "all letters right", "against exact (95%)", "max nats", "samples"]
    return f"""## A name planted before the window

A line assigns to a made-up name; the prompt ends with the name's first four letters, and the answer is the rest. "Nowhere" is the
control: what the letters cost a model that cannot know them.

{table(headings, rows)}"""


def floor(found: Found) -> str:
    told = {
        "threads": "two threads of torch for one",
        "other products": "the same products in other shapes (whole text at once)",
        "bf16 products": "products in bf16 for f32",
        "bf16 rows": "cache rows in bf16 for f32",
        "v41 rows": "cache rows in v41 (FP4, FP8) for f32",
    }
    rows = [
        [kind, words, *deviation_cells(found.tally(f"floor/{kind}/{name}"))]
        for kind in found.kinds
        for name, words in told.items()
        if found.tally(f"floor/{kind}/{name}").tokens
    ]
    return f"""## The floor: a cold run against itself

Within one engine on one machine the floor is zero: {found.checks("a prompt cut elsewhere")} prompts cut elsewhere gave equal bits.
Between machines, thread counts,
kernels and number formats it is not, and a bounded replay is to be held against that.

{table(["text", "changed", *DEVIATION_HEADINGS], rows)}"""


def method(found: Found) -> str:
    return f"""## How it was measured

- Blocks and window entries are those of a cold run of {32 * found.config.block:,} tokens; hits end between block 8 and block 28 of it.
  Every run of an answer then resumes on them: by the window entry (exact, and so equal to a cold run bit for bit) or as said.
  Answers are teacher-forced.
- Code is `train/heldout.txt`, whole files of the standard library that were not trained on. Prose are the licence texts that Debian puts on
  every machine; the model learned English from comments only. The Bible's text in Debian needs a program to unpack it, and so was not
  taken.
- Logarithms and sums are in float64. Means are over samples (prompts); their 95% intervals are bootstrapped over samples, since the
  tokens of an answer are not independent. Percentiles are over tokens, in classes of a twentieth of a decade (6%). The largest value
  grows with the number of tokens looked at: read it with its count.
- Nats are KL(exact || approximate) of the next token's distribution, a token being a byte. NLL is that of the text's own next token,
  approximate less exact: what is lost in quality, where KL says how much is different at all.
- Sampled seeds, texts and places are the same in every run; `{found.config.name}` in codec v41, one thread, samples in turn.
"""
