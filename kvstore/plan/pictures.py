"""The plot of `kvstore plan`: hit rate over capacity, what others give, and where the purchase stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.plan.buy import Planner, Purchase
from kvstore.plan.curve import Curve
from kvstore.plan.policies import Outcome
from kvstore.plots import Series, lines
from kvstore.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 80


def curve_series(curve: Curve, label: str) -> Series:
    """Hit rate in % over capacity in % of the unique blocks."""
    shares = np.geomspace(0.001, 1.0, POINTS)
    hits = [100 * curve.hit_ratio(share * curve.unique) for share in shares]
    if not curve.parts:
        return Series(label, list(100 * shares), hits)
    bands = [100 * curve.band(share * curve.unique) for share in shares]
    low, high = ([hit + sign * band for hit, band in zip(hits, bands, strict=True)] for sign in (-1, 1))
    return Series(label, list(100 * shares), hits, low=low, high=high)


def curve_plot(curve: Curve, outcomes: Sequence[Outcome], purchase: Purchase, planner: Planner) -> Figure:
    series = [curve_series(curve, "LRU")]
    for policy in dict.fromkeys(outcome.policy for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.policy is policy]
        shares = [100 * outcome.capacity_blocks / curve.unique for outcome in mine]
        series.append(Series(policy.name, shares, [100 * outcome.hit_ratio for outcome in mine], kind="points"))
    ticks = {share: f"{share:g} %" for share in (0.1, 0.3, 1, 3, 10, 30, 100)}
    whole = format_bytes(curve.unique * planner.spec.scale * planner.spec.layout.block_bytes)
    bought = next(choice for choice in purchase.choices if choice.name == "buy")
    share = 100 * bought.logical_bytes / (curve.unique * planner.spec.scale * planner.spec.layout.block_bytes)
    marks = {f"buy {bought.nodes} nodes": share} if share <= 100 else {}
    return lines(
        series,
        title=f"Hit rate by capacity; infinite cache {100 * purchase.ideal_hit_ratio:.2f} %",
        x_label=f"capacity, % of the unique blocks ({whole})",
        y_label="hit tokens, % of input",
        x_log=True,
        x_ticks=ticks,
        y_range=(0, 100),
        marks=marks,
    )
