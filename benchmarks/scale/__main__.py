"""`python -m benchmarks.scale [--servers N] [--ssds N] [--capacity SIZE] ... [--small] [--json]`.

Prints what a cluster asks of one daemon, and what of that fits. Exit: 0, 2 bad usage, 3 and 1 where the cluster that is measured fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from benchmarks.harness import commit, machine
from benchmarks.prompts import FULL_EXTENT_BLOCKS
from benchmarks.scale import costs, derive, placed
from benchmarks.scale.parameters import STORED_EXTENT_BLOCKS, Parameters
from benchmarks.scale.show import Found, shares, show
from kvstore.cli.plan import count_of
from kvstore.client import ClientConfig
from kvstore.client.agent.config import AgentConfig
from kvstore.errors import KvstoreError, UsageError
from kvstore.placement import Placement
from kvstore.units import parse_bytes

DEFAULTS = Parameters()
SMALL_GROUPS = 1 << 12
EPILOG = """Rates and capacity are of the whole cluster. A share above 100% is marked "!": it does not fit.
Shares of cores are of this machine's; SSD and NIC are assumed (--ssd-read, --ssd-write, --nic), for there is none of theirs here.

  python -m benchmarks.scale                                   460 servers, 110 PB
  python -m benchmarks.scale --shape chat --hosts 400          chats, from 400 hosts
  python -m benchmarks.scale --servers 6 --ssds 8 --capacity 700TB --tokens-a-day 2T --peak-read 140GB --peak-write 12GB
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError("E140", message.replace("'", '"'), fix=f"{self.prog} --help")


def _arguments() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m benchmarks.scale",
        description="What a cluster of this size and load asks of each daemon: derived, and priced by unit costs measured in this run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--servers", type=int, default=DEFAULTS.servers, metavar="N", help="hosts of SSDs (default %(default)s)")
    add("--ssds", type=int, default=DEFAULTS.ssds, metavar="N", help="SSDs of each, a daemon each (default %(default)s)")
    add("--capacity", default="110PB", metavar="SIZE", help="bytes on all SSDs, parity included (default %(default)s)")
    add("--tokens-a-day", default="155T", metavar="N", help="tokens of prompts (default %(default)s)")
    add("--hit-rate", type=float, default=DEFAULTS.hit_rate, metavar="SHARE", help="of those tokens (default %(default)s)")
    add("--generated", type=float, default=0.0, metavar="SHARE", help="blocks decode servers write, per prompt block (default %(default)s)")
    add("--blocks", type=int, default=DEFAULTS.prompt_blocks, metavar="N", help="blocks of a prompt (default %(default)s)")
    add("--shape", choices=STORED_EXTENT_BLOCKS, default=DEFAULTS.shape, help="who makes the prompts (default %(default)s)")
    add("--peak-read", default="11TB", metavar="SIZE", help="a second, at peak, the 11th shard included (default %(default)s)")
    add("--peak-write", default="0.91TB", metavar="SIZE", help="a second, at peak, parity included (default %(default)s)")
    add("--hot", type=float, default=DEFAULTS.hot_share, metavar="SHARE", help="of prompts begin with one extent (default %(default)s)")
    add("--hosts", type=int, default=DEFAULTS.hosts, metavar="N", help="hosts that serve models, assumed (default %(default)s)")
    add("--ssd-read", default="7GB", metavar="SIZE", help="a second, of one SSD, assumed (default %(default)s)")
    add("--ssd-write", default="2GB", metavar="SIZE", help="a second, of one SSD, assumed (default %(default)s)")
    add("--nic", type=float, default=400.0, metavar="GBIT", help="Gbit/s of a server, each way, assumed (default %(default)s)")
    add("--groups", type=int, metavar="N", help="placement groups looked at for the busiest daemon (default: all)")
    add("--small", action="store_true", help="tiny measurements and few groups: says that it runs, not what it costs")
    add("--directory", type=Path, help="where measured daemons keep their data, 2 GB (default: a new folder in the temporary one)")
    add("--json", action="store_true", help="one JSON object on stdout, nothing else")
    return parser


def _parameters(asked: argparse.Namespace) -> Parameters:
    return Parameters(
        servers=asked.servers,
        ssds=asked.ssds,
        stored_bytes=parse_bytes(asked.capacity, "--capacity"),
        day_tokens=count_of(asked.tokens_a_day, "--tokens-a-day"),
        hit_rate=asked.hit_rate,
        generated=asked.generated,
        prompt_blocks=asked.blocks,
        shape=asked.shape,
        peak_read_bytes_per_second=parse_bytes(asked.peak_read, "--peak-read"),
        peak_write_bytes_per_second=parse_bytes(asked.peak_write, "--peak-write"),
        hot_share=asked.hot,
        hosts=asked.hosts,
        ssd_read_bytes_per_second=parse_bytes(asked.ssd_read, "--ssd-read"),
        ssd_write_bytes_per_second=parse_bytes(asked.ssd_write, "--ssd-write"),
        nic_bits_per_second=asked.nic * 1e9,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        asked = _arguments().parse_args(arguments)
        given = _parameters(asked)
        if asked.groups is not None and asked.groups < 1:
            raise UsageError("E131", f"--groups {asked.groups}", "out of range", "give 1 or more")
        if asked.directory is not None and not asked.directory.is_dir():
            raise UsageError("E100", f"--directory {asked.directory}", "is no directory", "name one you may write to")
        found = run(given, costs.SMALL if asked.small else costs.DEFAULT, asked.directory, asked.groups, small=asked.small)
    except KvstoreError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if asked.json:
        about: dict[str, Any] = {"machine": machine(), "commit": commit(), "small": asked.small}
        print(json.dumps(about | found.as_object()))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(f"rig     {machine()}\ncommit  {commit()}", highlight=False)
    if asked.small:
        console.print("small   costs say that they can be measured, nothing more", highlight=False)
    show(console, found)
    return 0


def run(given: Parameters, size: costs.Size, directory: Path | None, groups: int | None, *, small: bool = False) -> Found:
    """Measures and derives. Raises what the measured cluster raises."""
    begin = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begin:5.0f} s  {line}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=directory) as scratch:
        measured = costs.measure(given, size, Path(scratch), say)
    say(f"placing keys on {given.daemons:,} daemons")
    placement = Placement(placed.cluster_map(given.servers, given.ssds))
    sent = {
        shape: placed.messages(placement, replace(given, shape=shape), size.prompts)
        for shape in STORED_EXTENT_BLOCKS
    }  # fmt: skip
    looked = min(placement.pg_count, groups or (SMALL_GROUPS if small else placement.pg_count))
    told = [0.0]

    def share_done(share: float) -> None:
        if share - told[0] >= 0.1:
            told[0] = share
            say(f"placing {looked:,} groups: {share:.0%}")

    lists = placed.table(given, placement, looked, share_done)
    rates = {"mean": derive.mean(given), "peak": derive.peak(given)}
    client, agent = ClientConfig(), AgentConfig()
    added = derive.hot(
        given, rates["mean"], min(FULL_EXTENT_BLOCKS, given.prompt_blocks), client.promise_reuse_seconds, costs.BUCKET_SECONDS
    )
    say("done")
    return Found(
        given=given,
        costs=measured,
        rates=rates,
        shares={name: shares(given, each, sent[given.shape], measured) for name, each in rates.items()},
        stored=derive.stored(given, measured.record_bytes, measured.index_bytes_per_extent, measured.filter_bytes_per_extent),
        messages=sent,
        connections=placed.connections(given, sent[given.shape], client.idle_timeout_seconds, client.bulk_connections_max),
        windows=derive.windows(given, agent.older_blocks_max + 1),
        hot=added,
        busiest={kind: placed.busiest(lists, given.daemons, getattr(added, kind)) for kind in asdict(added)},
        groups=looked,
        groups_in_all=placement.pg_count,
    )


if __name__ == "__main__":
    sys.exit(main())
