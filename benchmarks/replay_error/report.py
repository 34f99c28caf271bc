"""docs/REPLAY_ERROR.md and its plots, from replay_error.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.replay_error import sections, worth
from benchmarks.replay_error.figures import depth_plot, length_plot, suffix_plot, tail_plot
from benchmarks.replay_error.format import flowed
from benchmarks.replay_error.found import Found


def write_report(file: Path, out: Path) -> None:
    """Four plots beside the text."""
    found = Found(json.loads(file.read_text()))
    exact = found.config.replay_visible_tokens
    length_plot(
        {kind: by_length for kind in found.kinds if (by_length := found.by_number(f"replay/{kind}"))},
        exact,
        out / "replay_error_length.svg",
    )
    tail_plot(_tails(found), out / "replay_error_tails.svg")
    suffix_plot(
        {kind: by_length for kind in found.kinds if (by_length := found.by_number(f"suffix/{kind}"))}, out / "replay_error_suffix.svg"
    )
    chains: dict[str, Any] = {}
    for kind in found.kinds:
        chains[f"{kind}: every turn bounded"] = found.by_number(f"lineage/{kind}/chain")
        chains[f"{kind}: this turn alone"] = found.by_number(f"lineage/{kind}/single")
    depth_plot({label: by_turn for label, by_turn in chains.items() if by_turn}, out / "replay_error_depth.svg")
    parts = [
        sections.opening(found),
        sections.in_short(found),
        sections.lengths(found),
        sections.suffixes(found),
        sections.lineage(found),
        sections.decoder(found),
        sections.greedy(found),
        sections.needle(found),
        sections.floor(found),
        worth.seconds(found),
        worth.ram(found),
        sections.method(found),
    ]
    (out / "REPLAY_ERROR.md").write_text(flowed("\n".join(parts)))


def _tails(found: Found) -> dict[str, Any]:
    """Code: misses beside what else moves an answer."""
    window, slots = found.config.window, found.config.slots
    tails = {
        "no replay": found.tally("replay/code/0"),
        f"{window} replayed": found.tally(f"replay/code/{window}"),
        f"{2 * window} replayed": found.tally(f"replay/code/{2 * window}"),
        f"decoder's last {slots} (every request)": found.tally(f"decoder/code/{slots}"),
        "v41 rows for f32": found.tally("floor/code/v41 rows"),
        "bf16 products": found.tally("floor/code/bf16 products"),
        "products of other shapes": found.tally("floor/code/other products"),
    }
    return {name: tally for name, tally in tails.items() if tally.tokens}
