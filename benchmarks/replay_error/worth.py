"""Sections on costs: seconds of each way to resume, and when a window entry is worth its RAM."""

from __future__ import annotations

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
    entry = entry_bytes(found.config, codec_of("v41"))
    return f"""## What each way costs in time

Processor milliseconds of one thread from blocks in hand to the first token's logits, for a prompt that ends {found.config.slots} tokens
behind its hit; in brackets, beyond a window hit. Medians. A window entry of this model is {entry:,} bytes, of the original
{ENTRY_BYTES:,}: over 25 Gbit/s that is {ENTRY_BYTES * 8 / 25e9 * 1000:.2f} ms.

{table(["way", *(f"{at:,} tokens hit" for at in base), "samples"], rows)}"""


def ram(found: Found) -> str:
    keeps = [Keep(**one) for one in found.file["trace"]["keeps"]]
    price_gb_hour = RAM_PER_GB / (RAM_YEARS * 365 * 24)
    token_price = ACCELERATOR_PER_HOUR / 3600 / PREFILL_TOKENS_PER_SECOND

    def gain(before: Keep | None, after: Keep, layer_tokens: int) -> float:
        """Compute saved for RAM spent, both in money, from one keep to a longer one."""
        found_more = (after.hit_ratio - (before.hit_ratio if before else 0.0)) * after.needing
        more = entry_megabyte_seconds(after) - (entry_megabyte_seconds(before) if before else 0.0)
        return found_more * layer_tokens / TRUE_LAYERS * token_price / (more / 1000 / 3600 * price_gb_hour)

    rows = []
    for before, keep in zip([None, *keeps], keeps, strict=False):
        missed = (1 - keep.hit_ratio) * keep.needing
        rows.append(
            [
                f"{keep.seconds:,} s",
                f"{100 * keep.hit_ratio:.1f}%",
                f"{100 * keep.older_ratio:.0f}%",
                f"{entry_megabyte_seconds(keep):,.0f}",
                f"{missed * BOUNDED / TRUE_LAYERS:,.0f}",
                f"{missed * EXACT / TRUE_LAYERS:,.0f}",
                f"{gain(before, keep, BOUNDED):,.1f}",
                f"{gain(before, keep, EXACT):,.1f}",
            ]
        )
    at_180 = next(keep for keep in keeps if keep.seconds == 180)
    bounded = at_180.hit_ratio * at_180.needing * TRUE_WINDOW / entry_megabyte_seconds(at_180) * 1000  # tokens a second and GB
    exact = bounded * EXACT / BOUNDED
    headings = ["kept", "found", "of the others, an older one", "RAM, MB x s a request", "tokens replayed a request: bounded", "exact"]
    headings += ["worth against bounded", "against exact"]
    return f"""## When a window is worth its RAM

At the original's sizes ({ENTRY_BYTES:,} B an entry, {TRUE_LAYERS} encoder layers) on the agents' trace
({found.file["trace"]["requests"]:,} requests), infinite block cache. A request leaves entries at floor(L/128) and
floor((L-134)/128), each kept so long after its last use; *an older one* is at most ten blocks back. *Worth*: money that the replays
saved cost, over money that the RAM costs, for the step from the row above (the first: from keeping none). Above 1, RAM is the cheaper.
Assumed: an accelerator at ${ACCELERATOR_PER_HOUR:.2f} an hour computes {PREFILL_TOKENS_PER_SECOND:,} prompt tokens/s,
RAM costs ${RAM_PER_GB:.0f} a GB over {RAM_YEARS} years. Replay is counted whole ({BOUNDED:,} and {EXACT:,} layer-tokens;
an exact replay cut to the rows each layer needs is
{PYRAMID:,}, and {PYRAMID / EXACT:.2f} of its worth).

{table(headings, rows)}
At 180 s a GB of RAM kept for windows spares {bounded:,.0f} prompt tokens a second against bounded replay, {exact:,.0f} against
exact: with the speed assumed, {100 * bounded / PREFILL_TOKENS_PER_SECOND:.1f}% and {100 * exact / PREFILL_TOKENS_PER_SECOND:.0f}% of an
accelerator. Against bounded replay the window also spares the error above; against exact replay only time.
"""
