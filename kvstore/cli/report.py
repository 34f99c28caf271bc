"""`kvstore report`: hit rate, reasons of misses, reuse ages and what a day of retention is worth, from access logs."""

from __future__ import annotations

import argparse
import csv
import datetime
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvstore.cli.output import Output
from kvstore.errors import ConfigError, UsageError
from kvstore.plots import render, svg
from kvstore.report.charts import charts
from kvstore.report.database import MEMORY_BYTES, Answer, Database, Period, opened
from kvstore.report.figures import BY, measure
from kvstore.report.files import find_logs
from kvstore.report.page import log_page, printable
from kvstore.report.show import FORMATS, as_html, as_markdown, as_text
from kvstore.units import parse_bytes, parse_seconds

SQL_ROWS_SHOWN: Final = 10_000
MEMORY_BYTES_MIN: Final = 100_000_000


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="what the cache did: hit rate, why tokens missed, what retention is worth",
        description="Reads access logs (docs/ACCESS_LOG.md), also larger than memory. docs/REPORT.md says what the figures can tell.",
        epilog="""\
examples:
  kvstore report --log /var/log/kvstore
  kvstore report --log DIR --since 7d --by class,day --by tenant
  kvstore report --log DIR --format html -o report.html
  kvstore report --log DIR --sql "select tenant, sum(hit_tokens) / sum(input_tokens) from access group by 1"
  kvstore report --log DIR --json | jq .data.measured.what_if
""",
    )
    add = parser.add_argument
    add("--log", metavar="DIR", type=Path, action="append", default=[], help="directory of an access log, or one file of it (repeatable)")
    add("--since", metavar="WHEN", help="7d, 12h: so long ago; or 2026-11-22, 2026-11-22T14:00 (UTC)")
    add("--until", metavar="WHEN", help="likewise; not included")
    add(
        "--by",
        metavar="LABELS",
        action="append",
        default=[],
        help="a table by day, class, tenant, model, or by several: class,day (repeatable)",
    )
    add("--format", dest="form", choices=FORMATS, default="text", help="text (default), md, or html: one file that needs no other")
    add("-o", "--output", metavar="FILE", type=Path, help="write there instead of stdout")
    add("--plots", metavar="DIR", type=Path, help="write the plots there, as files")
    add("--plot-format", choices=("svg", "png"), default="svg", help="of --plots (default svg)")
    add("--sql", metavar="QUERY", help="one SELECT over the view `access`")
    add("--csv", action="store_true", help="with --sql: comma-separated, all rows")
    add("--memory", metavar="SIZE", default=str(MEMORY_BYTES), help="for the database; beyond it TMPDIR is used (default 1GB)")


def run(args: argparse.Namespace) -> int:
    out: Output = args.out
    by = _by(args.by)
    period = _period(args.since, args.until, time.time())
    memory = parse_bytes(args.memory, "--memory")
    if memory < MEMORY_BYTES_MIN:
        raise UsageError("E131", f"--memory {args.memory}", "too little for a database", "give 100MB or more")
    if args.csv and not args.sql:
        raise UsageError("E140", "--csv without --sql", fix="--json for programs, or add --sql")
    if not args.log:
        raise UsageError("E140", "kvstore report", "nothing to report on", "--log DIR: what ClientConfig.access_log names")
    files = find_logs(args.log)
    with opened(files, period, memory) as database:
        if args.sql:
            return _sql(database, args, out)
        measured = measure(database, by)
        _warn(database, out)
    page = log_page(measured, "kvstore report")
    out.result({"measured": measured, "doubts": page.doubts})
    figures = charts(measured) if args.plots or args.form == "html" else {}
    if args.plots:
        _plots(args.plots, figures, args.plot_format, out)
    text = (
        {"text": as_text, "md": as_markdown}[args.form](page)
        if args.form != "html"
        else as_html(page, [svg(one) for one in figures.values()])
    )
    if args.output:
        _write(args.output, text)
        out.note(f"written: {args.output}")
    else:
        out.line(text.rstrip("\n"))
    return 0


def _by(given: Sequence[str]) -> list[list[str]]:
    """[["day"], ["class", "tenant"]] of `--by day --by class,tenant`."""
    tables = [[label.strip() for label in each.split(",")] for each in given] or [[label] for label in BY]
    for labels in tables:
        for label in labels:
            if label not in BY:
                raise UsageError("E132", f'--by "{label}"', fix=f"known: {', '.join(BY)}")
        if len(set(labels)) < len(labels):
            raise UsageError("E132", f'--by "{",".join(labels)}"', "names a label twice", "each once")
    return list({",".join(labels): labels for labels in tables}.values())


def _period(since: str | None, until: str | None, now: float) -> Period:
    period = Period(_moment(since, "--since", now), _moment(until, "--until", now))
    if period.since_ms is not None and period.until_ms is not None and period.since_ms >= period.until_ms:
        raise UsageError("E131", f"--since {since} --until {until}", "ends before it begins", "the other way round")
    return period


def _moment(text: str | None, flag: str, now: float) -> int | None:
    """Unix milliseconds of a time ago or a date (UTC where it names no zone)."""
    if text is None:
        return None
    try:
        at = datetime.datetime.fromisoformat(text)
        return int((at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        pass
    try:
        return max(0, int((now - parse_seconds(text, flag)) * 1000))
    except (ConfigError, OverflowError):
        raise UsageError("E102", f'{flag} "{text}" is no time', fix="write it as 7d, 12h, 2026-11-22 or 2026-11-22T14:00") from None


def _warn(database: Database, out: Output) -> None:
    bad = database.files.skipped
    for each in bad[:3]:
        out.warn(str(each))
    if len(bad) > 3:
        out.warn(f"and {len(bad) - 3} more files left out; --json names all")


def _sql(database: Database, args: argparse.Namespace, out: Output) -> int:
    _warn(database, out)
    answer = database.ask(args.sql)
    if args.csv and not args.json:
        _csv(answer)
        return 0
    rows = list(answer.rows(SQL_ROWS_SHOWN + 1))
    if len(rows) > SQL_ROWS_SHOWN:
        out.warn(f"only the first {SQL_ROWS_SHOWN:,} rows are shown; --csv gives all")
    shown = rows[:SQL_ROWS_SHOWN]
    out.result({"columns": answer.columns, "rows": shown, "more_rows": len(rows) > SQL_ROWS_SHOWN})
    out.table(answer.columns, [[None if cell is None else printable(cell) for cell in row] for row in shown])
    return 0


def _csv(answer: Answer) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(answer.columns)
    for row in answer.rows():
        writer.writerow(["" if cell is None else cell for cell in row])


def _plots(directory: Path, figures: Mapping[str, Any], kind: str, out: Output) -> None:
    try:
        directory.mkdir(exist_ok=True)
        for name, figure in figures.items():
            path = directory / f"{name}.{kind}"
            path.write_bytes(render(figure, kind))
            out.note(f"written: {path}")
    except OSError as error:
        raise UsageError(
            "E100", f"--plots {directory}", (error.strerror or str(error)).lower(), "name a directory that can be made"
        ) from None


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    scratch = path.with_name(path.name + ".new")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise UsageError("E100", f"-o {path}", (error.strerror or str(error)).lower(), "name a file that can be written") from None
