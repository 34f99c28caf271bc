"""Plots of the document. Drawn on white, so that they are read on a dark page as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.replay_error.tally import Tally, interval
from kvstore.plots import Series, lines, save

LEAST: Final = 1e-12  # an axis of logarithms has no zero


def _line(label: str, x: Sequence[float], tallies: Sequence[Tally]) -> Series:
    """Means with their 95%."""
    bands = [interval(tally.lists["nats"]) for tally in tallies]
    low, high = zip(*bands, strict=True) if bands else ((), ())
    return Series(
        label,
        x,
        [max(LEAST, tally.mean_nats) for tally in tallies],
        low=[max(LEAST, value) for value in low],
        high=[max(LEAST, value) for value in high],
    )


def length_plot(found: Mapping[str, Mapping[int, Tally]], exact_tokens: int, path: Path) -> None:
    """By kind of text and tokens replayed."""
    series = []
    for kind, by_length in found.items():
        tokens, tallies = list(by_length), list(by_length.values())
        series.append(_line(f"{kind}: mean", tokens, tallies))
        series.append(Series(f"{kind}: 99th percentile", tokens, [max(LEAST, tally.percentile(99)) for tally in tallies]))
        series.append(Series(f"{kind}: largest", tokens, [max(LEAST, tally.greatest) for tally in tallies], kind="points"))
    figure = lines(
        series,
        title="A missed window: how far a token of the answer moves",
        x_label="tokens replayed before the hit's end",
        y_label="KL(exact || approximate), nats",
        y_log=True,
        x_ticks={float(tokens): str(tokens) for by_length in found.values() for tokens in (*by_length, exact_tokens)},
        marks={"exact": exact_tokens},
    )
    save(figure, path)


def tail_plot(found: Mapping[str, Tally], path: Path) -> None:
    series = []
    for label, tally in found.items():
        x, y = tally.exceeding()
        if x:
            series.append(Series(label, x, y))
    figure = lines(
        series,
        title="Tails: share of tokens that move at least so far",
        x_label="nats",
        y_label="share of tokens",
        x_log=True,
        y_log=True,
    )
    save(figure, path)


def suffix_plot(found: Mapping[str, Mapping[int, Tally]], path: Path) -> None:
    lengths = {float(tokens): f"{tokens:,}" for by_length in found.values() for tokens in by_length}
    figure = lines(
        [_line(label, list(by_length), list(by_length.values())) for label, by_length in found.items()],
        title="The error fades with what is computed behind the hit",
        x_label="tokens between the hit's end and the answer",
        y_label="mean KL, nats",
        x_log=True,
        y_log=True,
        x_ticks=lengths,
    )
    save(figure, path)


def depth_plot(found: Mapping[str, Mapping[int, Tally]], path: Path) -> None:
    figure = lines(
        [_line(label, list(by_turn), list(by_turn.values())) for label, by_turn in found.items()],
        title="Turns that each miss their window, over blocks of turns that did",
        x_label="depth: bounded replays in a row",
        y_label="mean KL, nats",
        y_log=True,
        x_ticks={float(turn): str(turn) for by_turn in found.values() for turn in by_turn},
    )
    save(figure, path)
