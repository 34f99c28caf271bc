"""`kvstore plan --explain FILE`: docs/HIT_RATE.md, where hits and misses come from, its plots beside it. Equal traces give equal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.errors import InputError
from kvstore.plan.accesses import I64, Accesses, of_requests
from kvstore.plan.curve import Curve, exact_curve
from kvstore.plan.log import is_log
from kvstore.plan.pictures import curve_series
from kvstore.plan.policies import POLICIES, simulate
from kvstore.plan.reuse import Reuse, kept_text, reuse_of
from kvstore.plan.routing import conversations, decode_gain_blocks, local_hits, random_hosts, sticky_hosts
from kvstore.plan.windows import capped_hits, window_use
from kvstore.plots import Series, bars, lines, save
from kvstore.replay.requests import BLOCK_TOKENS
from kvstore.replay.trace import MOONCAKE_BLOCK_TOKENS, Variant, open_trace
from kvstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOSTS: Final = (2, 4, 16, 64)
FACTORS: Final = (1, 2, 4, 8, 16, 32)
SHARES: Final = (0.01, 0.02, 0.05, 0.10, 0.25, 0.50)
RETENTIONS: Final = (60, 300, 900, 3600, 21_600, 86_400, 259_200, 604_800)
WINDOW_KEEPS: Final = (10, 30, 60, 180, 600, 3600)
WINDOW_KEEP: Final = 180
ROOM: Final = 0.10  # of the unique blocks, where one capacity stands for all
BLOCK_BYTES: Final = 113_920
UNIQUE_MIN: Final = 3200  # 1% of them in blocks 32 times as long is still a block


@dataclass(frozen=True)
class Subject:
    """One trace in its own block size."""

    name: str
    accesses: Accesses
    keep_seconds: float  # its class's retention
    spread: bool = True  # False: a variant that only says something about capacity
    windows: bool = True

    @cached_property
    def reuse(self) -> Reuse:
        return reuse_of(self.accesses)

    @cached_property
    def curve(self) -> Curve:
        return exact_curve(self.accesses)

    @cached_property
    def ideal(self) -> I64:
        return self.reuse.hit_blocks()

    def percent(self, hits: I64) -> float:
        return 100 * float(self.accesses.hit_tokens(hits).sum()) / self.accesses.total_input_tokens

    @property
    def best(self) -> float:
        return self.percent(self.ideal)


def write(sources: Sequence[Path], target: Path) -> list[Path]:
    """Writes the document and its plots; the paths written. Raises InputError for a log: it does not tell what was generated."""
    subjects = [subject for path in sources for subject in _subjects(path)]
    plots = {
        f"{target.stem.lower()}_{name}.svg": draw(subjects)
        for name, draw in (("parts", _plot_parts), ("capacity", _plot_capacity), ("retention", _plot_retention))
    }
    files = [target]
    for name, figure in plots.items():
        save(figure, target.with_name(name))
        files.append(target.with_name(name))
    command = f"kvstore plan {' '.join(map(str, sources))} --explain {target}"
    target.write_text(document(subjects, command, list(plots)))
    return files


def document(subjects: Sequence[Subject], command: str, plots: Sequence[str]) -> str:
    parts = [
        "# Hit rate: design or traffic?\n",
        f"Made by `{command}`;",
        "the same traces give the same text. Simulated on prefix semantics: hit tokens are those of the leading blocks that are there,",
        "rate = hit tokens / input tokens. A *point* is a hundredth of the input tokens. [PLAN](PLAN.md) says how far to trust it.\n",
        _answer(subjects),
        f"![Where the input tokens go]({plots[0]})\n",
        _traffic(subjects),
        _sharing(subjects),
        _decode(subjects),
        _block_size(subjects),
        _windows(subjects),
        _retention(subjects),
        f"![Hit rate by retention]({plots[2]})\n",
        _capacity(subjects),
        f"![Hit rate by capacity]({plots[1]})\n",
        _policies(subjects),
    ]
    return "\n".join(parts)


def _subjects(path: Path) -> list[Subject]:
    if is_log(path):
        raise InputError("E142", str(path), "an access log does not tell what was generated", "--explain needs traces")

    def read(block_tokens: int, variant: Variant = "plain") -> Accesses:
        trace = open_trace(path, block_tokens=block_tokens, variant=variant)
        accesses = of_requests(trace, block_tokens, has_sessions=trace.format == "weka")
        if accesses.unique < UNIQUE_MIN:
            raise InputError(
                "E111", str(path), f"{accesses.unique} unique blocks are too few to explain", f"take a trace of {UNIQUE_MIN} or more"
            )
        return accesses

    if open_trace(path).format == "mooncake":
        return [Subject("conversation", read(MOONCAKE_BLOCK_TOKENS), 7 * 86_400, windows=False)]
    agents = Subject("weka", read(BLOCK_TOKENS), 3 * 86_400)
    return [agents, Subject("weka busy hour", read(BLOCK_TOKENS, "busy1h"), 3 * 86_400, spread=False)]


def waterfall(subject: Subject) -> dict[str, float]:
    """Points of all input tokens, in the order in which they are lost; they add up to 100."""
    accesses, reuse = subject.accesses, subject.reuse
    room = int(ROOM * accesses.unique)
    kept = capped_hits(accesses, reuse.hit_blocks(None, subject.keep_seconds))
    held = capped_hits(accesses, reuse.hit_blocks(room, subject.keep_seconds))
    levels = [100.0, subject.best, subject.percent(capped_hits(accesses, subject.ideal)), subject.percent(kept), subject.percent(held)]
    windows = held.copy()
    if subject.windows:
        windows[window_use(accesses, held).missed(WINDOW_KEEP)] -= 1
    levels.append(subject.percent(windows))
    names = ("new", "tail", "retention", "capacity", "window")
    lost = {name: above - below for name, above, below in zip(names, levels[:-1], levels[1:], strict=True)}
    return {"hit": levels[-1], **lost}


def _answer(subjects: Sequence[Subject]) -> str:
    rows = [(subject.name, waterfall(subject)) for subject in subjects]
    told = {
        "hit": "**hit**",
        "window": f"window entry gone after {WINDOW_KEEP} s: one block computed again",
        "capacity": f"room for {ROOM:.0%} of the unique blocks only",
        "retention": "older than its class keeps (chats 7 days, agents 3)",
        "tail": "the last 134 tokens, and what a whole block more would need: never asked of a cache",
        "new": "**new to any cache**: the traffic itself",
    }
    lines_ = ["## The answer\n", "| of 100 input tokens | " + " | ".join(name for name, _ in rows) + " |", "| --- |" + " --- |" * len(rows)]
    lines_ += [f"| {text} | " + " | ".join(_points(shares[key]) for _, shares in rows) + " |" for key, text in told.items()]
    for subject, (_, shares) in zip(subjects, rows, strict=True):
        design = 100 - shares["hit"] - shares["new"]
        share = 100 * shares["new"] / (100 - shares["hit"])
        lines_.append(
            f"\n- {subject.name}: {100 - shares['hit']:.2f} points do not hit; {shares['new']:.2f} of them ({share:.0f}%) are traffic, "
            f"{design:.2f} are design: tail, retention, capacity and window."
        )
    return "\n".join([*lines_, ""])


def _traffic(subjects: Sequence[Subject]) -> str:
    lines_ = [
        "## Traffic: what an infinite shared cache hits\n",
        "| trace | requests | input tokens | unique blocks | bytes of them | hit |",
    ]
    lines_.append("| --- | --- | --- | --- | --- | --- |")
    for subject in (one for one in subjects if one.spread):
        of = subject.accesses
        size = format_bytes(of.unique * BLOCK_BYTES * of.block_tokens / BLOCK_TOKENS)
        blocks = f"{of.unique:,} of {of.block_tokens} tokens"
        lines_.append(f"| {subject.name} | {of.requests:,} | {of.total_input_tokens:,} | {blocks} | {size} | {subject.best:.2f}% |")
    return "\n".join([*lines_, ""])


def _sharing(subjects: Sequence[Subject]) -> str:
    lines_ = [
        "## Sharing: one cache for all hosts, or one each\n",
        "Every cache is infinite here, which favours many small ones: each keeps its own copy of what it saw. Sticky: a conversation stays",
        "on its host, hosts never fail and load is never moved; random: any request anywhere. In brackets: blocks stored in all, as a",
        "multiple of the shared cache's.\n",
        "| hosts | " + " | ".join(f"{one.name}, random | {one.name}, sticky" for one in subjects if one.spread) + " |",
        "| --- |" + " --- | --- |" * sum(one.spread for one in subjects),
        "| shared | " + " | ".join(f"{one.best:.2f}% | {one.best:.2f}%" for one in subjects if one.spread) + " |",
    ]
    for hosts in HOSTS:
        cells = []
        for subject in (one for one in subjects if one.spread):
            for route in (random_hosts, sticky_hosts):
                hits, stored = local_hits(subject.accesses, route(subject.accesses, hosts), hosts)
                cells.append(f"{subject.percent(hits):.2f}% ({stored / subject.accesses.unique:.2f}x)")
        lines_.append(f"| {hosts} | " + " | ".join(cells) + " |")
    for subject in (one for one in subjects if one.spread):
        count = len(np.unique(conversations(subject.accesses)))
        how = (
            "as the trace numbers them"
            if subject.accesses.sessions[0] >= 0
            else "a prompt that begins with all of an earlier one goes on with it"
        )
        lines_.append(f"\n- {subject.name}: {count:,} conversations, {how}.")
    return "\n".join([*lines_, ""])


def _decode(subjects: Sequence[Subject]) -> str:
    lines_ = [
        "## Decode writes: storing what was generated\n",
        "The trace says how long each answer was, not whether it came back word for word: the gain is an upper bound, counted where a hit",
        "ends just where the conversation's prompt before ended. Without decode writes those blocks are computed at the next turn, and",
        "stored by it.\n",
        "| trace | hit without | hit with, at most | requests that gain | points |",
        "| --- | --- | --- | --- | --- |",
    ]
    for subject in (one for one in subjects if one.spread):
        gain = decode_gain_blocks(subject.accesses, subject.ideal)
        after = subject.percent(subject.ideal + gain)
        lines_.append(
            f"| {subject.name} | {subject.best:.2f}% | {after:.2f}% | {int((gain > 0).sum()):,} | +{_points(after - subject.best)} |"
        )
    return "\n".join([*lines_, ""])


def _block_size(subjects: Sequence[Subject]) -> str:
    spread = [one for one in subjects if one.spread]
    lines_ = [
        "## Block size\n",
        f"Only whole blocks are stored. Infinite cache, and LRU with room for {ROOM:.0%} of the unique tokens. The conversation trace",
        "names 512 tokens at a time: nothing finer can be read off it (its 128-token reading hits 37.36%, traces/README.md).\n",
        "| tokens a block | " + " | ".join(f"{one.name}, infinite | {one.name}, {ROOM:.0%}" for one in spread) + " |",
        "| --- |" + " --- | --- |" * len(spread),
    ]
    sizes = sorted(
        {one.accesses.block_tokens * factor for one in spread for factor in FACTORS if one.accesses.block_tokens * factor <= 4096}
    )
    for tokens in sizes:
        cells = []
        for subject in spread:
            factor, rest = divmod(tokens, subject.accesses.block_tokens)
            if rest or not factor:
                cells += ["-", "-"]
                continue
            coarse = subject.accesses if factor == 1 else subject.accesses.coarser(factor)
            curve = subject.curve if factor == 1 else exact_curve(coarse)
            room = int(ROOM * subject.accesses.unique / factor)
            cells += [f"{100 * curve.hit_ratio(coarse.unique):.2f}%", f"{100 * curve.hit_ratio(room):.2f}%"]
        lines_.append(f"| {tokens} | " + " | ".join(cells) + " |")
    return "\n".join([*lines_, ""])


def _windows(subjects: Sequence[Subject]) -> str:
    chosen = [one for one in subjects if one.spread and one.windows]
    lines_ = [
        "## Window entries\n",
        "A hit ends at a multiple of 128 tokens, at most at L - 134, and needs the window entry that was left there; else one block is",
        "computed again. Which multiples leave one decides more than how long it is kept. Not shown for the conversation trace: its ids",
        "end at multiples of 512.\n",
    ]
    for subject in chosen:
        lines_ += ["| entry kept | at floor(L/128) only | and at floor((L-134)/128) | points lost with both |", "| --- | --- | --- | --- |"]
        first, both = (window_use(subject.accesses, subject.ideal, left) for left in ((0,), (0, 134)))
        total = subject.accesses.total_input_tokens
        for keep in WINDOW_KEEPS:
            lost = 100 * len(both.missed(keep)) * BLOCK_TOKENS / total
            name = format_seconds(float(keep))
            lines_.append(f"| {name} | {100 * first.hit_ratio(keep):.2f}% | {100 * both.hit_ratio(keep):.2f}% | {_points(lost)} |")
        left = f"{both.entries:,} entries are left with both rules, {first.entries:,} with one"
        lines_.append(f"\n{subject.name}: {len(both.needed):,} requests need one; {left}.")
    return "\n".join([*lines_, ""])


def _retention(subjects: Sequence[Subject]) -> str:
    spread = [one for one in subjects if one.spread]
    lines_ = [
        "## Retention\n",
        "Time since last use after which a block is dropped, infinite room. The conversation trace covers an hour: what days bring cannot",
        "be read off it.\n",
        "| kept | " + " | ".join(one.name for one in spread) + " |",
        "| --- |" + " --- |" * len(spread),
    ]
    for keep in RETENTIONS:
        cells = [f"{100 * one.reuse.hit_ratio(None, keep):.2f}%" if keep < one.accesses.seconds else "-" for one in spread]
        if any(cell != "-" for cell in cells):
            lines_.append(f"| {format_seconds(float(keep))} | " + " | ".join(cells) + " |")
    lines_.append("| for ever | " + " | ".join(f"{one.best:.2f}%" for one in spread) + " |")
    return "\n".join([*lines_, ""])


def _capacity(subjects: Sequence[Subject]) -> str:
    lines_ = [
        "## Capacity\n",
        "LRU, shares of the unique blocks. Kept: the age that such a cache attains at its worst moment.\n",
        "| room | " + " | ".join(f"{one.name} | kept" for one in subjects) + " |",
        "| --- |" + " --- | --- |" * len(subjects),
    ]
    for share in SHARES:
        cells = []
        for subject in subjects:
            room = int(share * subject.accesses.unique)
            kept = subject.reuse.kept_seconds(room)
            cells.append(f"{100 * subject.curve.hit_ratio(room):.2f}% | {kept_text(kept)}")
        lines_.append(f"| {share:.0%} | " + " | ".join(cells) + " |")
    lines_.append("| 100% | " + " | ".join(f"{100 * one.curve.hit_ratio(one.accesses.unique):.2f}% | all" for one in subjects) + " |")
    return "\n".join([*lines_, ""])


def _policies(subjects: Sequence[Subject]) -> str:
    told = "What goes first, in which order a prompt is written, what is let in. Hit rate, and in brackets blocks written over unique ones."
    lines_ = ["## Policies\n", f"{told}\n"]
    lines_ += [f"- `{policy.name}`: {policy.meaning}" for policy in POLICIES.values()]
    columns = [(one, share) for one in subjects for share in (0.05, 0.25)]
    lines_ += [
        "",
        "| policy | " + " | ".join(f"{one.name}, {share:.0%}" for one, share in columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    for policy in POLICIES.values():
        cells = []
        for subject, share in columns:
            outcome = simulate(subject.accesses, policy, int(share * subject.accesses.unique))
            cells.append(f"{100 * outcome.hit_ratio:.2f}% ({outcome.written_blocks / subject.accesses.unique:.2f}x)")
        lines_.append(f"| {policy.name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines_, ""])


def _plot_parts(subjects: Sequence[Subject]) -> Figure:
    shares = [waterfall(subject) for subject in subjects]
    stacks = {name: [one[name] for one in shares] for name in ("hit", "window", "capacity", "retention", "tail", "new")}
    return bars([one.name for one in subjects], stacks, title="Where the input tokens go", y_label="% of input tokens", y_range=(0, 100))


def _plot_capacity(subjects: Sequence[Subject]) -> Figure:
    ticks = {share: f"{share:g} %" for share in (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)}
    series = [curve_series(one.curve, one.name) for one in subjects]
    labels = ("LRU by capacity", "room, % of the unique blocks", "hit tokens, % of input")
    return _over_log(series, labels, ticks)


def _plot_retention(subjects: Sequence[Subject]) -> Figure:
    keeps = [float(one) for one in np.geomspace(10, RETENTIONS[-1], 40)]
    ticks = {60.0: "1 min", 300.0: "5 min", 3600.0: "1 h", 21_600.0: "6 h", 86_400.0: "1 d", 259_200.0: "3 d", 604_800.0: "7 d"}
    series = []
    for subject in (one for one in subjects if one.spread):
        mine = [keep for keep in keeps if keep < subject.accesses.seconds]
        series.append(Series(subject.name, mine, [100 * subject.reuse.hit_ratio(None, keep) for keep in mine]))
    labels = ("Hit rate by retention, infinite room", "kept since last use", "hit tokens, % of input")
    return _over_log(series, labels, ticks)


def _over_log(series: Sequence[Series], labels: tuple[str, str, str], ticks: dict[float, str]) -> Figure:
    title, x_label, y_label = labels
    return lines(series, title=title, x_label=x_label, y_label=y_label, x_log=True, x_ticks=ticks, y_range=(0, 100))


def _points(value: float) -> str:
    return f"{value:.2f}"
