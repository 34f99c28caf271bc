"""`kvstore stats`: what the nodes do, a row per interval; for eyes, grep, and with --csv for a spreadsheet."""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstore.cli.cluster import NodeReport, ask_nodes, find_map, require_some
from kvstore.cli.output import Output, rfc3339_now
from kvstore.cluster_view import buckets, by_label, difference, merged, quantile, total
from kvstore.errors import UsageError
from kvstore.units import parse_seconds

HEADER_EVERY: Final = 20
_ERRORS: Final = ("error", "corrupt", "refused", "no_space", "busy")
# Column -> unit line, printed format.
_COLUMNS: Final = {
    "time": ("UTC", "{}"),
    "read": ("MB/s", "{:.1f}"),
    "write": ("MB/s", "{:.1f}"),
    "keys": ("/s", "{:.0f}"),
    "reads": ("/s", "{:.1f}"),
    "p50": ("ms", "{:.2f}"),
    "p99": ("ms", "{:.2f}"),
    "writes": ("/s", "{:.1f}"),
    "errors": ("/s", "{:.2f}"),
    "evict": ("MB/s", "{:.1f}"),
    "used": ("%", "{:.1f}"),
    "up": ("nodes", "{}"),
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "stats",
        help="what the nodes do, a row per interval",
        description="Rows of what all nodes did together in each interval; bytes with parity, as networks see them. `-`: no traffic.",
        epilog="""\
examples:
  kvstore stats                          a row every 2 s until Ctrl-C
  kvstore stats --interval 10s --count 6
  kvstore stats --csv > stats.csv
  kvstore stats --json | jq .data.read_bytes_per_second
""",
    )
    parser.add_argument("--interval", metavar="TIME", default="2s", help="length of a row (default 2s)")
    parser.add_argument("--count", "-n", metavar="N", type=int, default=0, help="rows to print (default: until Ctrl-C)")
    parser.add_argument("--csv", action="store_true", help="comma-separated, base units, one header")


def run(args: argparse.Namespace) -> int:
    interval = parse_seconds(args.interval, "--interval")
    if not 0.1 <= interval <= 86400 or args.count < 0:
        raise UsageError("E131", f"--interval {args.interval} --count {args.count}", fix="0.1s to 1d, and 0 rows or more")
    cluster_map = find_map(args)
    out: Output = args.out
    frames: list[_Frame] = []
    pause = threading.Event()  # nobody sets it: a wait that Ctrl-C ends
    before, at = ask_nodes(cluster_map, args.settings["timeout"]), time.monotonic()
    require_some(before, cluster_map)
    due = at
    try:
        for number in itertools.count() if not args.count else range(args.count):
            due += interval
            pause.wait(max(0.0, due - time.monotonic()))
            after, now = ask_nodes(cluster_map, args.settings["timeout"]), time.monotonic()
            frame = _Frame.between(before, after, now - at)
            frames.append(frame)
            before, at = after, now
            out.frame(frame.data(interval), cluster=cluster_map.cluster_id, epoch=cluster_map.epoch)
            if args.csv:
                _print_csv(out, frame, number == 0)
            else:
                _print_row(out, frame, number)
    finally:
        if frames and not args.csv:
            out.note(_summary(frames, interval))
    return 0


@dataclass(frozen=True)
class _Frame:
    """One interval. Rates are None where there was no traffic: unknown is not 0."""

    time: str
    numbers: Mapping[str, float | None]

    @classmethod
    def between(cls, before: Sequence[NodeReport], after: Sequence[NodeReport], seconds: float) -> _Frame:
        # One that started in this interval counts from its start; of one that was out of sight at the last look nothing is known yet.
        seen = [(new, old.up and old.pid == new.pid, old) for old, new in zip(before, after, strict=True) if new.up]
        pairs = [(new.values, old.values if same else {}) for new, same, old in seen if same or new.uptime_seconds <= seconds]
        did = merged(difference(new, old) for new, old in pairs)
        up = [report for report in after if report.up]
        capacity = sum(report.capacity_bytes for report in up)
        moved = by_label(did, "kvstore_node_transfer_bytes_total", "direction")
        reads = total(did, "kvstore_node_request_duration_seconds_count", op="read")
        durations = buckets(did, "kvstore_node_request_duration_seconds", op="read")
        requests = total(did, "kvstore_node_requests_total")
        errors = sum(total(did, "kvstore_node_requests_total", result=result) for result in _ERRORS)
        idle = requests == 0
        rates: dict[str, float | None] = {
            "read": moved.get("out", 0.0) / seconds,
            "write": moved.get("in", 0.0) / seconds,
            "keys": total(did, "kvstore_node_discover_keys_total") / seconds,
            "reads": reads / seconds,
            "p50": quantile(durations, 0.5),
            "p99": quantile(durations, 0.99),
            "writes": total(did, "kvstore_node_request_duration_seconds_count", op="write") / seconds,
            "errors": errors / seconds,
            "evict": total(did, "kvstore_evicted_bytes_total") / seconds,
        }
        if idle:
            rates = dict.fromkeys(rates) | {"evict": rates["evict"] or None}
        used = sum(report.used_bytes for report in up) / capacity if capacity else None
        return cls(rfc3339_now(), {**rates, "used": used, "up": float(len(up))})

    def data(self, interval: float) -> dict[str, Any]:
        """For --json: base units, units in the names, null for unknown."""
        n = self.numbers
        return {
            "time": self.time,
            "interval_seconds": interval,
            "read_bytes_per_second": n["read"],
            "write_bytes_per_second": n["write"],
            "discover_keys_per_second": n["keys"],
            "reads_per_second": n["reads"],
            "read_p50_seconds": n["p50"],
            "read_p99_seconds": n["p99"],
            "writes_per_second": n["writes"],
            "errors_per_second": n["errors"],
            "evicted_bytes_per_second": n["evict"],
            "used_ratio": n["used"],
            "nodes_up": int(n["up"] or 0),
        }


def _print_row(out: Output, frame: _Frame, number: int) -> None:
    if number % HEADER_EVERY == 0:
        out.line(f"{'time':<9}" + "".join(f"{name:>9}" for name in list(_COLUMNS)[1:]), style="bold")
        out.line(f"{'UTC':<9}" + "".join(f"{unit:>9}" for unit, _ in list(_COLUMNS.values())[1:]), style="dim")
    scale = {"read": 1e-6, "write": 1e-6, "evict": 1e-6, "p50": 1e3, "p99": 1e3, "used": 100.0}
    cells = []
    for name in list(_COLUMNS)[1:]:
        value = frame.numbers[name]
        form = _COLUMNS[name][1]
        cells.append("-" if value is None else form.format(int(value) if name == "up" else value * scale.get(name, 1.0)))
    out.line(f"{frame.time[11:19]:<9}" + "".join(f"{cell:>9}" for cell in cells))


def _print_csv(out: Output, frame: _Frame, first: bool) -> None:
    data = frame.data(0)
    del data["interval_seconds"]
    if first:
        out.line(",".join(data))
    out.line(",".join("" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value) for value in data.values()))


def _summary(frames: Sequence[_Frame], interval: float) -> str:
    busy = [frame for frame in frames if frame.numbers["read"] is not None]
    if not busy:
        return f"{len(frames) * interval:g} s: no traffic"
    read = sum(frame.numbers["read"] or 0 for frame in busy) / len(frames)
    write = sum(frame.numbers["write"] or 0 for frame in busy) / len(frames)
    worst = max(busy, key=lambda frame: frame.numbers["p99"] or 0.0)
    errors = sum(bool(frame.numbers["errors"]) for frame in frames)
    p99 = f"worst read p99 {1e3 * (worst.numbers['p99'] or 0):.2f} ms at {worst.time[11:19]}, " if worst.numbers["p99"] else ""
    total = f"{len(frames) * interval:g} s: read {read / 1e6:.1f} MB/s, write {write / 1e6:.1f} MB/s, "
    return f"{total}{p99}errors in {errors} of {len(frames)} rows"
