"""`kvstore fsck`: reads every byte of stopped nodes and says what is damaged; with --repair, drops it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore.cli.cluster import default_directory
from kvstore.cli.output import Output
from kvstore.errors import ConfigError, Refused
from kvstore.units import format_bytes

if TYPE_CHECKING:
    from kvstore.server.fsck import FsckReport

FINDINGS_SHOWN: Final = 20


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "fsck",
        help="verify a data directory",
        description="Checks every record, the index and the free space of nodes that are stopped. Reads only, unless told to --repair. "
        "Exit 0: sound, or repaired; 1: damage found.",
        epilog="""\
examples:
  kvstore fsck /data/nvme0
  kvstore fsck                           all nodes of this user's `kvstore up`
  kvstore fsck /data/nvme0 --repair --yes

A repair drops what is damaged: those blocks are misses from then on, nothing else changes.
""",
    )
    parser.add_argument("directories", metavar="DIR", nargs="*", help="data directories, or the directory of a `kvstore up`")
    parser.add_argument("--repair", action="store_true", help="drop what is damaged")
    parser.add_argument("--yes", action="store_true", help="repair without asking")


def run(args: argparse.Namespace) -> int:
    from kvstore.server.fsck import fsck

    out: Output = args.out
    directories = [found for name in args.directories or [default_directory()] for found in _data_directories(Path(name))]
    reports = []
    with out.progress("fsck", len(directories), unit="directories") as bar:
        for directory in directories:
            reports.append(fsck(directory))
            bar.advance()
    damaged = [report for report in reports if not report.ok]
    _show(out, reports)
    if damaged and not args.repair:
        out.note("repair: kvstore fsck DIR --repair (drops what is damaged)")
    if damaged and args.repair:
        _ask(args, damaged)
        for at, report in enumerate(reports):
            if not report.ok:
                reports[at] = fsck(report.data_dir, repair=True)
                for line in reports[at].repaired:
                    out.line(f"repaired {report.data_dir}: {line}")
    out.result({"ok": not damaged, "directories": [{**asdict(report), "ok": report.ok} for report in reports]})
    return int(bool(damaged) and not args.repair)


def _data_directories(path: Path) -> list[Path]:
    """The directory itself, or the nodes of the local cluster in it."""
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise ConfigError("E122", f"data directory {path}", what, "name the directory given to kvstore node --data")
    nodes = sorted(each for each in path.glob("node-*") if (each / "segments").is_dir())
    return nodes if nodes and not (path / "segments").is_dir() else [path]


def _show(out: Output, reports: Sequence[FsckReport]) -> None:
    columns = ("directory", "health", "records", "bad", "bytes", "orphans", "segments", "stopped")
    rows = [
        (
            report.data_dir,
            "ok" if report.ok else "ERR",
            f"{report.records:,}",
            report.records_bad,
            format_bytes(report.record_bytes),
            format_bytes(report.orphan_bytes),
            report.segments,
            "cleanly" if report.clean_stop else "uncleanly",
        )
        for report in reports
    ]
    out.table(columns, rows)
    for report in reports:
        for finding in report.findings[:FINDINGS_SHOWN]:
            out.line(f"  {finding.kind:<8} {report.data_dir}: {finding.text}")
        if report.findings_count > FINDINGS_SHOWN:
            out.line(f"           and {report.findings_count - FINDINGS_SHOWN} more findings (--json lists 1,000)")


def _ask(args: argparse.Namespace, damaged: Sequence[FsckReport]) -> None:
    if args.yes:
        return
    what = f"{sum(report.findings_count for report in damaged)} findings in {len(damaged)} directories would be dropped"
    if not sys.stdin.isatty() or args.json:
        raise Refused("E303", what, fix="add --yes")
    args.out.stderr.print(f"{what}. Go on? [y/N] ", end="", markup=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Refused("E303", "nothing was changed", fix="answer y, or add --yes")
