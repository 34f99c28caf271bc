"""What `kvstore plan` does and shows."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvstore.cli.output import Output
from kvstore.errors import InputError, UsageError
from kvstore.plan.accesses import Accesses, of_requests
from kvstore.plan.buy import Choice, Planner, Purchase, Spec
from kvstore.plan.cluster import loss_points, parse_nodes, rooms
from kvstore.plan.curve import Curve, exact_curve, sampled, sampled_curve
from kvstore.plan.log import is_log, read_log
from kvstore.plan.policies import Outcome, chosen, compare, require_every_block
from kvstore.plan.prices import read_prices
from kvstore.plan.reuse import Reuse, kept_text, reuse_of
from kvstore.plan.windows import BOTH, window_use
from kvstore.replay.requests import BLOCK_TOKENS
from kvstore.replay.trace import open_trace
from kvstore.units import format_bytes, format_seconds, parse_bytes

WINDOW_SECONDS = (10, 30, 60, 180, 600, 3600)
SCHEMES = ((1, 0), (10, 2), (8, 2), (6, 2), (1, 2))
LOST = (0, 1, 2, 3, 4)


def plan(args: argparse.Namespace, out: Output) -> int:
    policies = chosen(args.policy) if args.policy else []
    prices = read_prices(args.prices, args.price)
    if args.plot:
        from kvstore.plots import format_of

        format_of(args.plot)
    accesses, has_windows = _source(args, args.sources[0], out)
    source = accesses
    if policies:
        require_every_block(source)
    whole = accesses.sample == 1 and args.sample is None
    curve = exact_curve(accesses) if args.sample is None else sampled_curve(accesses, args.sample, args.seed)
    if args.sample is not None:
        accesses = sampled(accesses, args.sample, args.seed)
    reuse = reuse_of(accesses)
    capacities = _capacities(args.cache_sizes, curve.unique, args.block_bytes)
    _show_source(accesses, curve, args.block_bytes, out)
    grid = _show_grid(reuse, curve, capacities, args, out)
    windows = _show_windows(reuse, out) if whole and has_windows else {}
    outcomes = compare(source, policies, [max(1, int(blocks)) for blocks in capacities.values()]) if policies else []
    if outcomes:
        _show_policies(outcomes, list(capacities), args.block_bytes, out)
    spec = _spec(args, accesses)
    planner = Planner(reuse, curve, spec, prices)
    purchase = planner.purchase()
    _show_purchase(planner, purchase, accesses, out)
    losses = _show_losses(planner, purchase, out) if whole else {}
    schemes = _show_coding(planner, purchase, out)
    judged = _show_judged(args, planner, out)
    if args.plot:
        from kvstore.plan.pictures import curve_plot
        from kvstore.plots import save

        save(curve_plot(curve, outcomes, purchase, planner), args.plot)
        out.note(f"plot      {args.plot}")
    out.result(
        {
            "source": str(args.sources[0]),
            "requests": accesses.requests,
            "seconds": accesses.seconds,
            "input_tokens": accesses.total_input_tokens,
            "block_tokens": accesses.block_tokens,
            "unique_blocks": curve.unique,
            "sample": accesses.sample,
            "ideal_hit_ratio": purchase.ideal_hit_ratio,
            "grid": grid,
            "window_hit_ratios": windows,
            "policies": [
                {
                    "policy": o.policy.name,
                    "capacity_blocks": o.capacity_blocks,
                    "hit_ratio": o.hit_ratio,
                    "written_blocks": o.written_blocks,
                }
                for o in outcomes
            ],
            "assumed": {**{name: value for name, value in vars(spec).items() if name != "layout"}, "block_bytes": args.block_bytes},
            "prices": asdict(prices),
            "needed_nodes": purchase.needed,
            "binding_limit": purchase.binding,
            "choices": [asdict(choice) for choice in purchase.choices],
            "loss_points": losses,
            "coding": schemes,
            "judged": judged,
        }
    )
    bought = next(choice for choice in purchase.choices if choice.name == "buy")
    return 1 if bought.short_of else 0


def explain(args: argparse.Namespace, out: Output) -> int:
    from kvstore.plan.explain import write

    files = write(args.sources, args.explain)
    for path in files:
        out.line(f"wrote     {path}")
    out.result({"files": [str(path) for path in files]})
    return 0


def _source(args: argparse.Namespace, path: Path, out: Output) -> tuple[Accesses, bool]:
    """The source, and whether its ids end at every multiple of 128 tokens, as window entries do: a Mooncake trace's do at 512."""
    if is_log(path):
        if args.variant != "plain":
            raise UsageError("E140", "--variant with an access log", "a log has its own times", "leave it out")
        log = read_log(path, rate=1.0 if args.sample is None else args.sample)
        return log, log.block_tokens == BLOCK_TOKENS
    trace = open_trace(path, block_tokens=args.block_tokens, variant=args.variant, skip_bad=args.skip_bad, request_limit=args.requests)
    skipped: list[InputError] = []
    accesses = of_requests(trace.read(skipped.append), args.block_tokens, has_sessions=trace.format == "weka")
    for error in skipped[:3]:
        out.warn(str(error))
    if len(skipped) > 3:
        out.warn(f"and {len(skipped) - 3} more lines skipped")
    if not len(accesses.ids):
        raise InputError("E111", str(path), "no prompt in it is as long as a block", "name another trace")
    return accesses, trace.format == "weka"


def _capacities(text: str, unique: float, block_bytes: int) -> dict[str, float]:
    found = {}
    for part in (each.strip() for each in text.split(",")):
        if part.endswith("%") and part[:-1].replace(".", "", 1).isdigit():
            share = float(part[:-1]) / 100
            blocks = float(max(share > 0, int(unique * share + 1e-9)))  # of a small source a share is a block at least
        else:
            blocks = float(parse_bytes(part, "--capacity") // block_bytes)
        if blocks < 1:
            raise UsageError("E131", f'--capacity "{part}"', f"holds no block of {block_bytes} bytes", "give more, or a share as in 25%")
        found[part] = blocks
    return found


def _spec(args: argparse.Namespace, accesses: Accesses) -> Spec:
    scale = args.scale or 1.0
    if args.day_tokens is not None:
        if not accesses.total_input_tokens:
            raise UsageError("E131", "--tokens-a-day", "the source has no tokens to scale", "name another source")
        scale = args.day_tokens / (accesses.total_input_tokens / max(accesses.seconds, 1.0) * 86_400)
    return Spec(
        size_bytes=args.size_bytes,
        drive_writes_a_day=args.node_writes,
        network_bytes_per_second=args.node_network * 1e9 / 8,
        disk_bytes_per_second=args.node_disk * 1e9,
        spare_nodes=args.spare,
        within_points=args.within,
        keep_seconds=args.keep_seconds,
        scale=scale,
        layout=args.layout,
    )


# --- what is shown ---


def percent(ratio: float) -> str:
    return f"{100 * ratio:.2f} %"


def _show_source(accesses: Accesses, curve: Curve, block_bytes: int, out: Output) -> None:
    how = "exact" if not curve.parts else f"sampled at {curve.rate:.3%} of the blocks"
    out.line(
        f"source    {accesses.requests:,} requests in {format_seconds(accesses.seconds)}, {accesses.total_input_tokens:,} input tokens"
    )
    out.line(f"blocks    {curve.unique:,.0f} unique = {format_bytes(curve.unique * block_bytes)}, {curve.accesses:,.0f} accesses; {how}")
    best = curve.hit_ratio(curve.unique)
    out.line(f"best      {percent(best)} of tokens repeat: an infinite cache; the rest is new to any cache")


def _show_grid(reuse: Reuse, curve: Curve, capacities: dict[str, float], args: argparse.Namespace, out: Output) -> list[dict[str, Any]]:
    seconds = [one for one in args.retention_seconds if one < reuse.accesses.seconds * 1.001]
    band = ["band"] if curve.parts else []
    rows, found = [], []
    for name, blocks in capacities.items():
        kept = reuse.kept_seconds(blocks)
        ratios = [reuse.hit_ratio(blocks, one) for one in seconds]
        points = 100 * curve.band(blocks)
        row = [name, format_bytes(blocks * args.block_bytes), percent(curve.hit_ratio(blocks)), *([f"±{points:.2f}"] if band else [])]
        rows.append([*row, kept_text(kept), *(percent(one) for one in ratios)])
        by_retention = {f"{one:g}": ratio for one, ratio in zip(seconds, ratios, strict=True)}
        found.append(
            {
                "capacity": name,
                "capacity_blocks": blocks,
                "hit_ratio": curve.hit_ratio(blocks),
                "band_points": points,
                "kept_seconds": kept,
                "hit_ratio_by_retention_seconds": by_retention,
            }
        )
    out.line()
    out.table(["CAPACITY", "BYTES", "LRU HIT", *band, "KEPT", *(f"AND {format_seconds(one).upper()}" for one in seconds)], rows)
    out.note("KEPT: what such a cache keeps at the worst moment; AND: hit rate where nothing is kept longer than that either")
    return found


def _show_windows(reuse: Reuse, out: Output) -> dict[str, float]:
    hits = reuse.hit_blocks()
    use = window_use(reuse.accesses, hits, BOTH)
    if not len(use.gap_ms):
        return {}
    ratios = {f"{seconds}": use.hit_ratio(seconds) for seconds in WINDOW_SECONDS}
    out.line()
    told = "   ".join(f"{format_seconds(float(seconds))} {100 * ratio:.1f} %" for seconds, ratio in ratios.items())
    out.line(f"window    entry found if kept for   {told}")
    return ratios


def _show_policies(outcomes: list[Outcome], names: list[str], block_bytes: int, out: Output) -> None:
    capacities = list(dict.fromkeys(o.capacity_blocks for o in outcomes))
    rows = []
    for policy in dict.fromkeys(o.policy for o in outcomes):
        mine = {o.capacity_blocks: o for o in outcomes if o.policy is policy}
        cells = [f"{100 * mine[c].hit_ratio:.2f} / {format_bytes(mine[c].written_blocks * block_bytes)}" for c in capacities]
        rows.append([policy.name, *cells])
    out.line()
    out.table(["POLICY", *(f"{name}: HIT % / WRITTEN" for name, _ in zip(names, capacities, strict=False))], rows)


def _show_purchase(planner: Planner, purchase: Purchase, accesses: Accesses, out: Output) -> None:
    spec = planner.spec
    out.line()
    needs = ", ".join(f"{limit} {'-' if count is None else count}" for limit, count in purchase.needed.items())
    out.line(f"needed    nodes for each limit: {needs}; binding: {purchase.binding}; {spec.spare_nodes} to spare")
    money = _show_choices("", purchase.choices, out)
    bought = next(choice for choice in purchase.choices if choice.name == "buy")
    kept = f"all of the source's {format_seconds(accesses.seconds)}" if bought.kept_seconds is None else format_seconds(bought.kept_seconds)
    each = format_bytes(bought.raw_bytes / bought.nodes)
    out.line(f"buy       {bought.nodes} nodes of {each}: expect {percent(bought.hit_ratio)} of tokens to hit, {kept} kept")
    if spec.keep_seconds is not None and spec.keep_seconds > accesses.seconds:
        out.warn(
            f"the source covers {format_seconds(accesses.seconds)}: what {format_seconds(spec.keep_seconds)} need cannot be read off it"
        )
    if spec.scale == 1:
        day = accesses.total_input_tokens / max(accesses.seconds, 1.0) * 86_400
        out.note(f"hint: sized for the source's own pace, {day / 1e9:.3g}G tokens a day; yours: --tokens-a-day N")
    if not money:
        out.note("hint: what it costs and saves: --prices FILE, or --price tb_month=20 --price gpu_hour=2.50 ...")
    if bought.short_of:
        out.line(f"short     no number of these nodes meets: {', '.join(bought.short_of)}", "bold red")


def _show_choices(name: str, choices: Sequence[Choice], out: Output) -> bool:
    """Says whether there is money in it."""
    money = any(one is not None for choice in choices for one in _money(choice))
    head = [name, "NODES", "DISK", "RAW", "HOLDS", "HIT", "KEPT", "WRITES/DAY", "NETWORK", "DISK USE"]
    out.table([*head, *(("COST", "SAVED", "NET") if money else ()), "SHORT OF"], [_cells(choice, money) for choice in choices])
    return money


def _money(choice: Choice) -> tuple[float | None, float | None, float | None]:
    return choice.money.storage_cost, choice.money.gpu_saved, choice.money.net


def _cells(choice: Choice, money: bool) -> list[str]:
    kept = kept_text(choice.kept_seconds)
    shares = (f"{100 * choice.network_share:.1f} %", f"{100 * choice.disk_share:.1f} %")
    prices = ["-" if one is None else f"{one:,.0f}" for one in _money(choice)] if money else []
    head = [choice.name, str(choice.nodes), format_bytes(choice.raw_bytes / choice.nodes), format_bytes(choice.raw_bytes)]
    head += [format_bytes(choice.logical_bytes), percent(choice.hit_ratio), kept, f"{choice.drive_writes_a_day:.3g}"]
    return [*head, *shares, *prices, ", ".join(choice.short_of) or "-"]


def _show_losses(planner: Planner, purchase: Purchase, out: Output) -> dict[str, dict[str, float]]:
    """Points lost at once when nodes go, and once what is left has aged."""
    bought = next(choice for choice in purchase.choices if choice.name == "buy")
    sizes = [int(bought.raw_bytes / bought.nodes)] * bought.nodes
    found = {}
    for lost in (one for one in LOST if one <= bought.nodes):
        at_once = loss_points(planner.reuse, planner.extents, bought.nodes, lost, planner.spec.k, planner.spec.m)
        later = 100 * (bought.hit_ratio - planner.hit_ratio(planner.blocks_of(sizes[lost:]))) if lost < bought.nodes else math.nan
        found[f"{lost}"] = {"at_once": at_once, "later": later}
    rows = [[int(lost), f"{one['at_once']:.2f}", f"{one['later']:.2f}"] for lost, one in found.items() if lost != "0"]
    out.line()
    out.table(["NODES LOST", "POINTS GONE UNTIL WRITTEN AGAIN", "POINTS GONE FOR WANT OF ROOM"], rows)
    out.line()
    return found


def _show_coding(planner: Planner, purchase: Purchase, out: Output) -> dict[str, float]:
    """Hit rate of the same raw disks under other codes."""
    bought = next(choice for choice in purchase.choices if choice.name == "buy")
    found = {}
    plain = planner.blocks_of([int(bought.raw_bytes / bought.nodes)] * bought.nodes) * (planner.spec.k + planner.spec.m) / planner.spec.k
    for k, m in SCHEMES:
        found["none" if not m else f"{k}+{m}"] = planner.hit_ratio(plain * k / (k + m))
    told = ", ".join(f"{name} {percent(ratio)}" for name, ratio in found.items())
    out.line(f"coding    the same disks with other codes: {told}")
    return found


def _show_judged(args: argparse.Namespace, planner: Planner, out: Output) -> dict[str, Any]:
    """The cluster of --nodes, placed by its sizes and as if all were equal."""
    if not args.nodes:
        return {}
    sizes = parse_nodes(args.nodes)
    spec = planner.spec
    if len(sizes) < spec.k + spec.m:
        raise UsageError("E103", f'--nodes "{args.nodes}"', f"{len(sizes)} nodes, {spec.k}+{spec.m} needs {spec.k + spec.m}", "add nodes")
    weights = {"weights as sizes": [float(size) for size in sizes]}
    if len(set(sizes)) > 1:
        weights["equal weights"] = [1.0] * len(sizes)
    choices = {name: planner.choice(name, sizes, rooms(sizes, each, spec.k, spec.m)) for name, each in weights.items()}
    out.line()
    _show_choices("THERE", list(choices.values()), out)
    return {name: asdict(choice) for name, choice in choices.items()}
