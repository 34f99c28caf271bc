"""`kvstore plan`: from a trace or an access log to decisions: hit rate by capacity, policy and retention, and what to buy."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from kvstore.cli.output import Output
from kvstore.errors import UsageError
from kvstore.layout import BLOCK_BYTES_MAX, PRESETS, Layout
from kvstore.units import parse_bytes, parse_long_seconds

TRUE_BLOCK_BYTES = 113_920
MULTIPLES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="what hit rate, retention and cost to expect of how many nodes",
        description="Simulates caches over a trace (Mooncake or weka) or an access log and says what to buy. Moves no data.",
        epilog="""\
examples:
  kvstore plan traces/mooncake_conversation_trace.jsonl.gz
  kvstore plan traces/weka_v6_dev.b128.jsonl.zst --variant busy1h --policy all
  kvstore plan /var/log/kvstore/access --keep 3d --tokens-a-day 200G --prices prices.toml --plot plan.svg
  kvstore plan trace.jsonl --nodes 10x4TB+4x8TB        what the cluster that is there gives
  kvstore plan traces/*.zst traces/*.gz --explain docs/HIT_RATE.md

docs/PLAN.md says what is computed and how far to trust it.
""",
    )
    add = parser.add_argument
    add("sources", metavar="SOURCE", type=Path, nargs="+", help="a trace file, or the directory of an access log")
    add("--requests", type=int, metavar="N", help="only the first N requests of a trace")
    add("--block-tokens", type=int, default=128, metavar="N", help="of a trace: 128, or 512 for the Mooncake format as published")
    add("--variant", choices=("plain", "busy1h"), default="plain", help="busy1h: weka conversations packed into an hour")
    add("--skip-bad", action="store_true", help="skip and count wrong lines instead of stopping")
    add("--sample", type=float, metavar="RATE", help="compute from this share of the blocks (SHARDS), and show the error band")
    add("--seed", type=int, default=0, metavar="N", help="another sample (default 0)")
    add("--policy", metavar="NAMES", help="compare policies: all, or names with commas (lru, lru-tail, s3fifo, sieve, second-touch, ...)")
    # Not dest "capacity": that is the setting of `kvstore up`, which knows no percentages.
    add(
        "--capacity", dest="cache_sizes", default="1%,5%,10%,25%,50%,100%", metavar="SIZES", help="logical bytes or shares of unique blocks"
    )
    add("--retention", default="5m,1h,6h,1d,3d,7d", metavar="TIMES", help="columns of the grid (default 5m,1h,6h,1d,3d,7d)")
    add("--block-bytes", type=int, default=TRUE_BLOCK_BYTES, metavar="N", help="of each block (default 113920)")
    buy = parser.add_argument_group("what to buy")
    add = buy.add_argument
    add("--keep", metavar="TIME", help="the retention that is promised, as 3d (default: no promise)")
    add("--within", type=float, default=1.0, metavar="POINTS", help="hit rate at most so far below an infinite cache's (default 1)")
    add("--scale", type=float, metavar="X", help="the real traffic is X times the source's (default 1)")
    add("--tokens-a-day", metavar="N", help="the real traffic in input tokens a day, as 200G: sets --scale")
    add("--node-size", default="3.84TB", metavar="SIZE", help="disk of one node (default 3.84TB)")
    add("--node-writes", type=float, default=1.0, metavar="DWPD", help="drive writes a day that the disk is rated for (default 1)")
    add("--node-network", type=float, default=25.0, metavar="GBIT", help="Gbit/s of one node (default 25)")
    add("--node-disk", type=float, default=3.0, metavar="GB", help="GB/s that its disk reads and writes (default 3)")
    add("--spare", type=int, default=1, metavar="N", help="nodes more than needed (default 1)")
    add("--nodes", metavar="LIST", help="judge this cluster too, as 14x3.84TB or 10x4TB+4x8TB")
    add("--prices", type=Path, metavar="FILE", help="TOML: tb_month, node_month, gpu_hour, prefill_tokens_per_second, ...")
    add("--price", action="append", default=[], metavar="NAME=VALUE", help="one price; may be given again")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve, as .svg or .png")
    parser.add_argument("--explain", type=Path, metavar="FILE", help="write the document that says where hits and misses come from")


def run(args: argparse.Namespace) -> int:
    from kvstore.plan import command  # numpy, pyarrow: not for --help

    out: Output = args.out
    _check(args)
    if args.explain:
        return command.explain(args, out)
    if len(args.sources) > 1:
        raise UsageError("E140", f"{len(args.sources)} sources", "one at a time", "name one, or add --explain FILE")
    return command.plan(args, out)


def _check(args: argparse.Namespace) -> None:
    if args.requests is not None and args.requests < 1:
        raise UsageError("E131", f"--requests {args.requests}", "out of range", "give at least 1")
    if not 1 <= args.block_bytes <= BLOCK_BYTES_MAX:
        raise UsageError("E131", f"--block-bytes {args.block_bytes}", "out of range", f"give 1 to {BLOCK_BYTES_MAX}")
    for flag, low in (("within", 0.0), ("node_writes", 0.0), ("node_network", 1e-3), ("node_disk", 1e-3), ("scale", 1e-9), ("spare", 0)):
        value = getattr(args, flag)
        if value is not None and not low <= value < 1e12:
            raise UsageError("E131", f"--{flag.replace('_', '-')} {value}", "out of range", f"give a number from {low:g}")
    if args.seed < 0 or args.seed >= 2**64:
        raise UsageError("E131", f"--seed {args.seed}", "out of range", "give a whole number from 0")
    if args.scale is not None and args.tokens_a_day is not None:
        raise UsageError("E140", "--scale with --tokens-a-day", "both say how large the traffic is", "leave one of them out")
    for flag in ("plot", "explain"):
        path = getattr(args, flag)
        if path and not path.absolute().parent.is_dir():
            raise UsageError("E100", f"--{flag} {path}", f"{path.parent} is no directory", "name a file in a folder that exists")
    args.size_bytes = parse_bytes(args.node_size, "--node-size")
    if args.size_bytes < 1 << 30:
        raise UsageError("E131", f"--node-size {args.node_size}", "less than 1 GiB", "give the disk of one node")
    args.keep_seconds = None if args.keep is None else parse_long_seconds(args.keep, "--keep")
    args.retention_seconds = [parse_long_seconds(text, "--retention") for text in args.retention.split(",")]
    args.day_tokens = None if args.tokens_a_day is None else count_of(args.tokens_a_day, "--tokens-a-day")
    args.layout = PRESETS["v41"] if args.block_bytes == TRUE_BLOCK_BYTES else Layout.single(args.block_bytes)


def count_of(text: str, what: str) -> float:
    """200G is 2e11. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)\s*", text)
    if not match or not float(match[1]):
        raise UsageError("E132", f'{what} "{text}"', "not understood", "write a number above 0, as 155T, 200G or 1500000")
    return float(match[1]) * MULTIPLES[match[2]]
