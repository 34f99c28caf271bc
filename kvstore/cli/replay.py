"""`kvstore replay`: a trace of real prompts against a real cluster, every byte checked, beside the ideal hit rate."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kvstore.cli.flags import add_transport, fabric_of
from kvstore.cli.output import Output
from kvstore.cli.signals import interrupted_by_signals
from kvstore.clustermap import ClusterMap, Rules
from kvstore.errors import ConfigError, InputError, UsageError
from kvstore.layout import BLOCK_BYTES_MAX, PRESETS, Layout
from kvstore.replay import ReplayOptions, ReplayReport, Trace, TraceShape, capacity_blocks, local_cluster, open_trace, run_replay, shape_of
from kvstore.replay.report import Latency
from kvstore.server.local import HOST
from kvstore.server.ports import check_port, port_fault
from kvstore.units import format_bytes, format_seconds

TRUE_BLOCK_BYTES = 113_920
K = 10


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="play a trace against a cluster and check every byte",
        description="Plays a trace (Mooncake or weka; plain, gzip, zstd): looks up, loads and checks, stores the rest.",
        epilog="""\
examples:
  kvstore replay traces/mooncake_conversation_trace.jsonl.gz --capacity 25% --block-bytes 320
  kvstore replay traces/weka_v6_dev.b128.jsonl.zst --variant busy1h --requests 500 --block-bytes 3200
  kvstore replay trace.jsonl --map cluster.toml --clock wall --speed 2 --concurrency 8 --log access.parquet

Without --map, a local cluster is started for the replay and removed after it. docs/REPLAY.md says what is counted.
""",
    )
    add = parser.add_argument
    add("trace", metavar="TRACE", type=Path, help="trace file")
    # Not dest "capacity": that is the setting of `kvstore up`, which knows no percentages.
    add(
        "--capacity",
        dest="cache_size",
        metavar="SIZE",
        help="of the local cluster: logical block bytes, as 8GB, 25%% or unlimited (default)",
    )
    add("--requests", type=int, metavar="N", help="only the first N requests")
    add("--block-bytes", type=int, default=TRUE_BLOCK_BYTES, metavar="N", help="of each block (default 113920; 320 for fast hit-rate runs)")
    add("--block-tokens", type=int, default=128, metavar="N", help="128, or 512 for the Mooncake format as published")
    add("--variant", choices=("plain", "busy1h"), default="plain", help="busy1h: weka conversations packed into an hour")
    add("--clock", choices=("virtual", "wall"), help="as fast as it goes, or in the trace's time (default virtual)")
    add("--speed", type=float, metavar="X", help="with --clock wall: trace seconds per second (default 1)")
    add("--concurrency", type=int, default=1, metavar="N", help="requests at once (default 1)")
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="compare every loaded byte (default)")
    add("--hedge", choices=("lazy", "eager"), default="lazy", help="how loads use the parity reply (default lazy)")
    add("--retention", default="chat", metavar="CLASS", help="retention class of stores and touches (default chat)")
    add("--namespace", default="replay", metavar="NAME", help="another name starts afresh on a cluster that was replayed to before")
    add("--bucket-seconds", type=int, metavar="N", help="length of a time bucket of the local cluster (default 1)")
    add("--policy", metavar="NAME", help="of the local cluster: lru, s3fifo or sieve (default lru)")
    add("--admit", metavar="RULE", help="of the local cluster: all or second-touch (default all)")
    add("--write-budget", metavar="SIZE", help="of the local cluster: bytes a day and node, of the trace's time (default none)")
    add_transport(parser)
    parser.set_defaults(settings_flags=("policy", "admit", "write_budget", "transport"))
    add("--log", type=Path, metavar="FILE", help="write what each request met, one Parquet row a request")
    add("--access-log", type=Path, metavar="DIR", help="write the client's access log: for kvstore report and plan (docs/ACCESS_LOG.md)")
    add(
        "--serve-metrics", type=int, metavar="PORT", help="the client's /metrics on 127.0.0.1 while it plays, for kvstore top and dashboard"
    )
    add("--data", type=Path, metavar="DIR", help="where the local cluster keeps its data (default: a temporary directory)")
    add("--skip-bad", action="store_true", help="skip and count wrong lines instead of stopping")


def run(args: argparse.Namespace) -> int:
    out: Output = args.out
    _check(args)
    layout = PRESETS["v41"] if args.block_bytes == TRUE_BLOCK_BYTES else Layout.single(args.block_bytes)
    trace = open_trace(
        args.trace, block_tokens=args.block_tokens, variant=args.variant, skip_bad=args.skip_bad, request_limit=args.requests
    )
    skipped: list[InputError] = []
    shape = shape_of(trace.read(skipped.append), layout, K)
    if not shape.requests:
        raise InputError(
            "E111",
            f"{args.trace} has no request to play",
            f"{len(skipped)} lines skipped, the first: {skipped[0].what}: {skipped[0].cause}",
            "name another trace",
        )
    for error in skipped[:3]:
        out.warn(str(error))
    if len(skipped) > 3:
        out.warn(f"and {len(skipped) - 3} more lines skipped")
    blocks = capacity_blocks(args.cache_size or "unlimited", shape, layout)
    with interrupted_by_signals(), ExitStack() as stack:
        cluster, map_path, where = _cluster(args, shape, blocks, layout, stack)
        if args.retention not in cluster.classes:
            raise InputError("E132", f'no retention class "{args.retention}"', fix=f"known: {', '.join(cluster.classes)}")
        out.line(f"trace     {shape.requests:,} requests, {shape.unique_blocks:,} unique blocks, {len(skipped)} lines skipped")
        out.line(f"cluster   {where}")
        options = ReplayOptions(
            layout=layout,
            namespace=args.namespace,
            block_tokens=args.block_tokens,
            clock=args.clock or "virtual",
            speed=args.speed or 1.0,
            concurrency=args.concurrency,
            check=args.check,
            retention_class=args.retention,
            hedge=args.hedge,
            lru_capacity_blocks=blocks,
            log=args.log,
            access_log=args.access_log,
            metrics_port=args.serve_metrics,
            transport=args.settings["transport"],
            reach_seconds=args.settings["timeout"],
            fabric=fabric_of(args.settings),
        )
        if args.serve_metrics is not None:
            with port_fault(HOST, args.serve_metrics, "--serve-metrics"):
                check_port(HOST, args.serve_metrics)
            out.note(f"watch     kvstore dashboard --map {map_path} --client http://{HOST}:{args.serve_metrics}")
        report = _play(trace, cluster, options, shape, out)
    print_report(report, out)
    out.result(_data(args, shape, blocks, len(skipped), report), cluster=cluster.cluster_id, epoch=cluster.epoch)
    return int(not _is_sound(report, map_path, out))


def _is_sound(report: ReplayReport, map_path: Path, out: Output) -> bool:
    """Says what makes the figures worth less than they look: a cluster that fails has a hit rate, too."""
    stores, loads = report.store.count, report.load.count
    faults = [
        (report.wrong_bytes, f"{report.wrong_bytes:,} wrong bytes"),
        (report.failed_stores, f"{report.failed_stores:,} of {stores:,} stores failed"),
        (report.short_loads, f"{report.short_loads:,} of {loads:,} loads came back shorter than promised"),
    ]
    told = ", ".join(text for count, text in faults if count)
    if told:
        out.line(f"not sound {told}  ->  kvstore status --map {map_path}", "bold red")
    return not told


def _check(args: argparse.Namespace) -> None:
    for flag, low in (("requests", 1), ("block_bytes", 1), ("concurrency", 1), ("bucket_seconds", 1)):
        value = getattr(args, flag)
        if value is not None and value < low:
            raise UsageError("E131", f"--{flag.replace('_', '-')} {value}", "out of range", f"give at least {low}")
    if args.block_bytes > BLOCK_BYTES_MAX:
        raise UsageError("E131", f"--block-bytes {args.block_bytes}", "out of range", f"give 1 to {BLOCK_BYTES_MAX}")
    if args.serve_metrics is not None and not 1 <= args.serve_metrics <= 65535:
        raise UsageError("E131", f"--serve-metrics {args.serve_metrics}", "out of range", "give a port from 1 to 65535")
    if args.speed is not None and not 0 < args.speed < float("inf"):
        raise UsageError("E131", f"--speed {args.speed}", "out of range", "give a number above 0")
    if args.speed is not None and args.clock != "wall":
        raise UsageError("E140", "--speed without --clock wall", "the virtual clock goes as fast as it can", "add --clock wall")
    try:
        args.namespace.encode()
    except UnicodeEncodeError:
        raise UsageError("E140", "--namespace", "is not UTF-8", "give it as text") from None
    if args.log and args.log.exists() and not args.log.is_file():  # a device: a file must not take its name
        raise UsageError("E100", f"--log {args.log}", "is no file", "name a file")
    if args.log and not args.log.parent.is_dir():
        raise UsageError("E100", f"--log {args.log}", f"{args.log.parent} is no directory", "name a file in a folder that exists")
    if args.settings["map"]:
        _check_of_map(args)


# Flags of the local cluster: field of the arguments -> flag, and what an existing cluster has instead.
_OF_LOCAL: Final = {
    "policy": ("--policy", "the rules of its map"),
    "admit": ("--admit", "the rules of its map"),
    "write_budget": ("--write-budget", "the rules of its map"),
    "bucket_seconds": ("--bucket-seconds", "the buckets of its map"),
    "cache_size": ("--capacity", "the room that its nodes have"),
    "data": ("--data", "its own directories"),
}


def _check_of_map(args: argparse.Namespace) -> None:
    """Raises UsageError for what would be taken and change nothing."""
    for field, (flag, instead) in _OF_LOCAL.items():
        if getattr(args, field) is not None:
            raise UsageError("E140", f"{flag} with --map", f"an existing cluster has {instead}", "leave one of them out")


def _cluster(
    args: argparse.Namespace, shape: TraceShape, blocks: int | None, layout: Layout, stack: ExitStack
) -> tuple[ClusterMap, Path, str]:
    if args.settings["map"]:
        found = ClusterMap.load(args.settings["map"])
        return found, Path(args.settings["map"]), f"{found.cluster_id}, {len(found.nodes)} nodes, {found.k}+{found.m}"
    directory = args.data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-replay-")))
    virtual = args.clock != "wall"
    local = local_cluster(
        directory,
        shape,
        blocks,
        layout=layout,
        bucket_seconds=args.bucket_seconds or 1,
        virtual_clock=virtual,
        nodes=args.settings["nodes"],
        rules=Rules(*(args.settings[name] for name in ("policy", "admit", "write_budget"))),
    )
    need = min(local.capacity_bytes, int(shape.record_bytes * 12 / local.nodes_count) + 1) * local.nodes_count
    free = shutil.disk_usage(directory if directory.exists() else directory.parent).free
    if need > free:
        what = f"the replay needs {format_bytes(need)} in {directory}, {format_bytes(free)} are free"
        raise ConfigError("E143", what, fix="give a smaller --capacity, --block-bytes or --requests, or another --data")
    stack.enter_context(local)
    held = shape.unique_blocks if blocks is None else blocks
    size = "every block" if blocks is None else f"{held:,} blocks"
    clock = "virtual clock" if virtual else "wall clock"
    return (
        local.map,
        local.map_path,
        f"{local.nodes_count} local nodes, 10+2, room for {size} = {format_bytes(held * layout.block_bytes)}, {clock}",
    )


def _play(trace: Trace, cluster: ClusterMap, options: ReplayOptions, shape: TraceShape, out: Output) -> ReplayReport:
    with out.progress("replay", shape.requests, unit="requests") as bar:
        return run_replay(trace, cluster, replace(options, after_request=lambda _: bar.advance()))


def print_report(report: ReplayReport, out: Output) -> None:
    """The figures for people: also what the demo ends with."""
    hit = f"hit       {percent(report.hit_ratio)} of tokens   ideal {percent(report.ideal_hit_ratio)}"
    if report.lru_hit_ratio is not None and report.points_from_lru is not None:
        hit += f"   exact LRU {percent(report.lru_hit_ratio)} ({report.points_from_lru:+.2f} points)"
    out.line(hit)
    if report.hit_tokens > report.ideal_hit_tokens:
        out.note("hint: more hits than the ideal: the cluster held blocks of an earlier replay; --namespace NAME starts afresh")
    loaded, stored = _rate(report.load_bytes_per_second), _rate(report.store_bytes_per_second)
    out.line(f"time      {format_seconds(report.seconds)}   {loaded} loaded, {stored} stored")
    outcomes = ", ".join(f"{count:,} {name}" for name, count in sorted(report.store_outcomes.items())) or "none"
    out.line(f"stores    {outcomes}")
    late, short = f"{report.late_requests:,} late 12th requests", f"{report.short_loads:,} short"
    out.line(f"loads     {report.extents:,} extents, {report.decodes:,} decodes, {late}, {short}")
    checked = f"checked   {format_bytes(report.checked_bytes)}, {report.wrong_bytes:,} wrong bytes"
    out.line(checked, "bold red" if report.wrong_bytes else None)
    if report.behind_seconds_max > 1:
        out.line(f"late      the latest request started {format_seconds(report.behind_seconds_max)} after its time")
    verbs = (("lookup", report.lookup), ("load", report.load), ("store", report.store))
    out.table(("verb", "count", "p50 ms", "p90 ms", "p99 ms", "max ms"), [(name, f"{one.count:,}", *_ms(one)) for name, one in verbs])


def percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.3f} %"


def _rate(bytes_per_second: float | None) -> str:
    return "-" if bytes_per_second is None else f"{bytes_per_second / 1e9:.3f} GB/s"


def _ms(latency: Latency) -> list[str]:
    each = (latency.p50_seconds, latency.p90_seconds, latency.p99_seconds, latency.max_seconds)
    return ["-" if seconds is None else f"{1000 * seconds:.2f}" for seconds in each]


def _data(args: argparse.Namespace, shape: TraceShape, blocks: int | None, skipped: int, report: ReplayReport) -> dict[str, Any]:
    return {
        "trace": str(args.trace),
        "skipped_lines": skipped,
        "block_tokens": args.block_tokens,
        "block_bytes": args.block_bytes,
        "unique_blocks": shape.unique_blocks,
        "capacity_blocks": blocks,
        "log": None if args.log is None else str(args.log),
        **report.to_dict(),
    }
