"""Sections on costs: seconds of each way to resume, and when a window entry is worth its RAM."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

from benchmarks.replay_error.costs import TRUE_LAYERS, TRUE_WINDOW, Keep, entry_megabyte_seconds
from benchmarks.replay_error.format import table
from benchmarks.replay_error.found import Found
from kvstore.engine_integration.model.codecs import codec_of
from kvstore.engine_integration.model.layout import entry_bytes
from kvstore.plan.windows import ENTRY_BYTES

BOUNDED: Final = TRUE_WINDOW * TRUE_LAYERS  # layer-tokens of the encoder
EXACT: Final = TRUE_LAYERS * TRUE_WINDOW * TRUE_LAYERS
PYRAMID: Final = sum(TRUE_WINDOW + (TRUE_LAYERS - 1 - layer) * (TRUE_WINDOW - 1) for layer in range(TRUE_LAYERS))
MORE: Final = EXACT // BOUNDED  # exact replay, as a multiple of bounded
# Assumed, to be replaced by one's own: what a processor of an inference host does, and what things cost.
PREFILL_TOKENS_PER_SECOND: Final = 10_000  # of one accelerator
ACCELERATOR_PER_HOUR: Final = 2.5
RAM_PER_GB: Final = 5.0
RAM_YEARS: Final = 4
assert (BOUNDED, EXACT, PYRAMID) == (2_560, 51_200, 26_690)


def seconds(found: Found) -> str:
    ways = ["window hit", "older window, 1 back", "older window, 2 back", "older window, 4 back"]
    ways += [f"bounded, {windows} windows" for windows in (0, 1, 2)] + ["exact replay", "cold"]
    base = found.seconds("window hit")
    rows = []
    for way in ways:
        mine = found.seconds(way)
        samples = sum(len(values) for key, values in found.file["seconds"].items() if key.rpartition("/")[0] == way)
        cells = [f"{1000 * mine[at]:,.0f} ({1000 * (mine[at] - base[at]):+,.0f})" if at in mine else "-" for at in base]
        rows.append([way, *cells, str(samples)])
    fetches = found.seconds("fetch")
    entry = entry_bytes(found.config, codec_of("v41"))
    return f"""## What each way costs in time

Processor milliseconds of one thread from blocks in hand to the first token's logits, for a prompt that ends {found.config.slots} tokens
behind its hit; in brackets, beyond a window hit. Medians. A window entry of this model is {entry:,} bytes, of the original
{ENTRY_BYTES:,}: {ENTRY_BYTES * 8 / 25e9 * 1000:.2f} ms of a 25 Gbit/s link. From another agent over loopback they were here in
{1000 * fetches.get(entry, math.nan):.2f} and {1000 * fetches.get(ENTRY_BYTES, math.nan):.2f} ms (wall time, the machine otherwise busy).

{table(["way", *(f"{at:,} tokens hit" for at in base), "samples"], rows)}"""


def ram(found: Found) -> str:
    keeps = [Keep(**one) for one in found.file["trace"]["keeps"]]

    def spared(before: Keep | None, after: Keep) -> float:
        """Prompt tokens that need no bounded replay, for each GB x s of RAM, from one keep to a longer one."""
        more = after.hit_ratio - (before.hit_ratio if before else 0.0)
        room = entry_megabyte_seconds(after) - (entry_megabyte_seconds(before) if before else 0.0)
        return more * after.needing * TRUE_WINDOW / room * 1000

    rows = []
    for before, keep in zip([None, *keeps], keeps, strict=False):
        missed = (1 - keep.hit_ratio) * keep.needing
        cells = [f"{keep.seconds:,} s", f"{100 * keep.hit_ratio:.1f}%", f"{100 * keep.older_ratio:.0f}%"]
        cells += [f"{entry_megabyte_seconds(keep):,.0f}", f"{missed * TRUE_WINDOW:,.0f}", f"{missed * TRUE_WINDOW * MORE:,.0f}"]
        rows.append([*cells, f"{spared(before, keep):,.1f}", f"{MORE * spared(before, keep):,.0f}"])
    at_180 = next(keep for keep in keeps if keep.seconds == 180)
    share = 100 * spared(None, at_180) / PREFILL_TOKENS_PER_SECOND  # of an accelerator, for a GB
    ram_price = RAM_PER_GB / (RAM_YEARS * 365 * 24 * 3600)
    even = ram_price / (ACCELERATOR_PER_HOUR / 3600) * PREFILL_TOKENS_PER_SECOND
    last = next((keep.seconds for before, keep in reversed([*pairwise(keeps)]) if spared(before, keep) > even), 0)
    headings = ["kept", "found", "of the others, an older one", "RAM, MB x s a request", "replayed a request: bounded", "exact"]
    headings += ["tokens spared by a GB x s: against bounded", "against exact"]
    return f"""## When a window is worth its RAM

At the original's sizes ({ENTRY_BYTES:,} B an entry, {TRUE_LAYERS} encoder layers) on the agents' trace
({found.file["trace"]["requests"]:,} requests), infinite block cache. A request leaves entries at floor(L/128) and
floor((L-134)/128), each kept so long after its last use; *an older one* is at most ten blocks back. Replay is in prompt tokens through the
encoder: {TRUE_WINDOW} bounded ({BOUNDED:,} layer-tokens), {TRUE_WINDOW * MORE:,} exact ({EXACT:,}; cut to the rows each layer needs
{PYRAMID:,}, {PYRAMID / EXACT:.2f} of it). *Spared*: for the step from the row above, the first from keeping none.

{table(headings, rows)}
A GB of RAM kept for windows of 180 s spares {spared(None, at_180):,.0f} prompt tokens a second against bounded replay, {MORE} times that
against exact: with an accelerator that prefills {PREFILL_TOKENS_PER_SECOND:,} tokens/s, {share:.1f}% and {MORE * share:.0f}% of one. RAM is
the cheaper wherever a GB of it costs less than that. With an accelerator at ${ACCELERATOR_PER_HOUR:.2f} an hour and RAM at
${RAM_PER_GB:.0f} a GB over {RAM_YEARS} years (assumed; put in your own) a step is worth it above {even:.2g} tokens spared by a GB x s:
against bounded replay up to {f"{last:,} s" if last else "less than the shortest"}. Against exact replay a window spares
time only; against bounded replay it spares the error above, too, which no price is put on here.
"""
