"""How numbers and tables of the document are written."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

from benchmarks.replay_error.tally import Tally, interval, mean

WIDTH: Final = 140


def nats(value: float) -> str:
    """Two digits: 0, 3.1e-7, 0.12."""
    if math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 0.01:
        return f"{value:.2g}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def with_interval(values: Sequence[float]) -> str:
    """Mean, and the 95% of its bootstrap."""
    low, high = interval(values)
    return f"{nats(mean(values))} ({nats(low)} to {nats(high)})"


def percent(share: float) -> str:
    """Of shares near 0 three digits, so that one in a thousand is told from none."""
    return f"{100 * share:.2f}%" if share >= 0.0005 or share == 0 else f"{100 * share:.3f}%"


def times(ratio: float) -> str:
    if math.isnan(ratio) or math.isinf(ratio):
        return "-"
    if ratio >= 10_000 or 0 < ratio < 0.01:
        return f"{nats(ratio)}x" if ratio < 1 else f"{ratio:.0e}x".replace("e+0", "e").replace("e+", "e")
    return f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in [headings, ["---"] * len(headings), *rows]]
    return "\n".join(lines) + "\n"


def flowed(text: str) -> str:
    """Paragraphs and list items filled anew to the width of the house; headings, tables and pictures as they are."""
    parts = []
    for part in text.split("\n\n"):
        if part.lstrip().startswith(("|", "#", "!")):
            parts.append(part)
        elif part.lstrip().startswith("- "):
            items = part.strip().removeprefix("- ").split("\n- ")
            parts.append(
                "\n".join(textwrap.fill(" ".join(one.split()), WIDTH, initial_indent="- ", subsequent_indent="  ") for one in items)
            )
        else:
            parts.append(textwrap.fill(" ".join(part.split()), WIDTH))
    return "\n\n".join(parts).rstrip() + "\n"


DEVIATION_HEADINGS = ("mean nats (95%)", "p99", "p99.9", "max", "top-1 changed", "true token's NLL (95%)", "tokens", "samples")


def deviation_cells(tally: Tally) -> list[str]:
    """One measurement under DEVIATION_HEADINGS."""
    tails = [nats(tally.percentile(99)), nats(tally.percentile(99.9)), nats(tally.greatest)]
    changed = percent(1 - tally.top_agreement)
    return [
        with_interval(tally.lists["nats"]),
        *tails,
        changed,
        with_interval(tally.lists["nll"]),
        f"{tally.tokens:,}",
        f"{tally.samples:,}",
    ]
