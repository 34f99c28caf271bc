"""Small plots for plan, report and the documents: lines, steps, bars; SVG or PNG, the same bytes for the same data.

matplotlib is imported late and drawn with its Agg backend: no display is needed, and who plots nothing never pays for it.
Colours are told apart by people who see few, and each series has its own dash, too.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from kvstore.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")
DASHES: Final = ("-", "--", "-.", ":")
FORMATS: Final = ("svg", "png")


@dataclass(frozen=True)
class Series:
    """One line: `y` over `x`, both of one length. `low` and `high`, where given, are drawn as a band around it."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    kind: Literal["line", "step", "points"] = "line"
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def lines(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_log: bool = False,
    y_log: bool = False,
    x_ticks: Mapping[float, str] | None = None,
    y_range: tuple[float | None, float | None] = (None, None),
    marks: Mapping[str, float] | None = None,
) -> Figure:
    """Series over one axis. `x_ticks` names places on x; `marks` are vertical lines, as {"you are here": x}."""
    figure, axes = _axes(title, x_label, y_label)
    if x_log:
        axes.set_xscale("log")
    if y_log:
        axes.set_yscale("log")
    for at, one in enumerate(series):
        color = COLORS[at % len(COLORS)]
        dash = "" if one.kind == "points" else DASHES[at // len(COLORS) % len(DASHES)]
        marker = "o" if one.kind == "points" or len(one.x) <= 12 else ""
        style = "steps-post" if one.kind == "step" else "default"
        axes.plot(one.x, one.y, linestyle=dash, marker=marker, markersize=4, color=color, label=one.label, drawstyle=style)
        if one.low is not None and one.high is not None:
            axes.fill_between(one.x, one.low, one.high, color=color, alpha=0.2, linewidth=0)
    for name, x in (marks or {}).items():
        axes.axvline(x, color="#333333", linewidth=1, linestyle=":")
        axes.annotate(name, (x, 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize=8, ha="right", va="bottom")
    _name_places(axes, x_ticks)
    axes.set_ylim(*y_range)
    if len(series) > 1 or (series and series[0].label):
        axes.legend(fontsize=8, frameon=False)
    return figure


def bars(
    labels: Sequence[str],
    stacks: Mapping[str, Sequence[float]],
    *,
    title: str,
    y_label: str,
    x_label: str = "",
    y_range: tuple[float | None, float | None] = (None, None),
) -> Figure:
    """One bar a label, its parts stacked in the order of `stacks`: {"part": one value a label}."""
    figure, axes = _axes(title, x_label, y_label)
    base = [0.0] * len(labels)
    for at, (name, values) in enumerate(stacks.items()):
        axes.bar(range(len(labels)), values, bottom=base, color=COLORS[at % len(COLORS)], label=name, width=0.7)
        base = [below + value for below, value in zip(base, values, strict=True)]
    long = sum(map(len, labels)) > 70
    axes.set_xticks(range(len(labels)), labels, rotation=30 if long else 0, ha="right" if long else "center")
    axes.set_ylim(*y_range)
    if len(stacks) > 1:  # beside the bars: above them it could not be read
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes .svg or .png, by the name's end. Raises UsageError E142 for another end."""
    path.write_bytes(render(figure, format_of(path)))


def format_of(path: Path) -> str:
    """ "svg" or "png": to be asked before the work that ends in a plot. Raises UsageError E142."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in FORMATS:
        raise UsageError("E140", f'plot "{path}"', "its name ends neither in .svg nor in .png", "name it so")
    return ending


def svg(figure: Figure) -> str:
    """The figure as one <svg> element, to stand inside an HTML page: no XML head, nothing outside itself."""
    text = render(figure, "svg").decode()
    return text[text.index("<svg") :]


def render(figure: Figure, kind: str) -> bytes:
    """The figure's bytes; no date and no random name in them, so that equal data gives equal files."""
    import matplotlib

    out = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "kvstore", "svg.fonttype": "none"}):
        figure.savefig(out, format=kind, dpi=150, metadata=metadata)
    return out.getvalue()


def _axes(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("E160", "a plot", "matplotlib is not installed", "pip install 'kvstore[plots]'") from None
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _name_places(axes: Axes, ticks: Mapping[float, str] | None) -> None:
    if ticks:
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.minorticks_off()
