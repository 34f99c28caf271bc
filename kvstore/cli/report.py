"""`kvstore report`: hit rate, reasons of misses, reuse ages and what a day of retention is worth, from access logs."""

from __future__ import annotations

import argparse
import csv
import datetime
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from kvstore.cli.cluster import find_map
from kvstore.cli.output import Output, rfc3339_now
from kvstore.cli.signals import interrupted_by_signals
from kvstore.errors import ConfigError, UsageError
from kvstore.live.scrape import client_url
from kvstore.plan.prices import read_prices
from kvstore.plots import render, svg
from kvstore.report.charts import charts
from kvstore.report.database import MEMORY_BYTES, Answer, Database, Period, opened
from kvstore.report.datasheet import datasheet, datasheet_page
from kvstore.report.figures import BY, measure
from kvstore.report.files import find_logs
from kvstore.report.page import Page, count, log_page, printable
from kvstore.report.present import clients_facts, clients_now, cluster_facts, cluster_now, engine_url, engines_now
from kvstore.report.show import FORMATS, as_html, as_markdown, as_text
from kvstore.report.value import value_facts, value_of
from kvstore.units import parse_bytes, parse_seconds
from kvstore.version import version
from kvstore.wholefile import write_whole

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
  kvstore report --log DIR --client http://gpu-12:9100 --prefill-rate 8000 --price gpu_hour=2.50
  kvstore report --datasheet --log DIR --engine http://gpu-12:8000 --format html -o datasheet.html
  kvstore report --log DIR --json | jq .data.measured.what_if
""",
    )
    add = parser.add_argument
    add("logs", metavar="DIR", type=Path, nargs="*", help="as --log DIR")
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
    add("--offline", action="store_true", help="ask no cluster: only the log, and what --client and --engine name")
    client_help = "metrics of a client process, http://HOST:PORT: load latencies, fallbacks (repeatable)"
    add("--client", "--metrics", dest="clients", metavar="URL", action="append", default=[], help=client_help)
    add(
        "--engine",
        dest="engines",
        metavar="URL",
        action="append",
        default=[],
        help="metrics of vLLM or SGLang: time to first token (repeatable)",
    )
    add("--prefill-rate", metavar="N", help="tokens a second that one of your GPUs prefills: hits become GPU-hours")
    add("--prices", metavar="FILE", type=Path, help="your prices (TOML, as for kvstore plan): hits become money")
    add("--price", metavar="NAME=VALUE", action="append", default=[], help="one price (repeatable)")
    add("--datasheet", action="store_true", help="one page for a buyer: where, how long, how fast, how exact, what may fail now")
    add("--plots", metavar="DIR", type=Path, help="write the plots there, as files")
    add("--plot-format", choices=("svg", "png"), default="svg", help="of --plots (default svg)")
    add("--sql", metavar="QUERY", help="one SELECT over the view `access`")
    add("--csv", action="store_true", help="with --sql: comma-separated, all rows")
    add("--memory", metavar="SIZE", default=str(MEMORY_BYTES), help="for the database; beyond it TMPDIR is used (default 1GB)")


def run(args: argparse.Namespace) -> int:
    out: Output = args.out
    args.log = [*args.log, *args.logs]
    by, period, memory = _by(args.by), _period(args.since, args.until, time.time()), parse_bytes(args.memory, "--memory")
    if memory < MEMORY_BYTES_MIN:
        raise UsageError("E131", f"--memory {args.memory}", "too little for a database", "give 100MB or more")
    _check_flags(args)
    rate = [] if args.prefill_rate is None else [f"prefill_tokens_per_second={args.prefill_rate}"]
    prices = read_prices(args.prices, [*args.price, *rate])
    urls = [client_url(text) for text in args.clients], [engine_url(text) for text in args.engines]
    if args.log:
        with interrupted_by_signals(), opened(find_logs(args.log), period, memory) as database:
            if args.sql:
                return _sql(database, args, out)
            measured: dict[str, Any] | None = measure(database, by)
            _warn(database, out)
    else:
        measured = None
    timeout = args.settings["timeout"]
    cluster, why_not = _cluster(args, timeout)
    clients = clients_now(urls[0], timeout) if urls[0] else None
    engines = engines_now(urls[1], timeout) if urls[1] else None
    if not args.log and cluster is None and clients is None and engines is None:
        raise UsageError(
            "E140", "kvstore report", f"nothing to report on: no --log, and {why_not}", "--log DIR: what ClientConfig.access_log names"
        )
    for url, error in [*(clients or {}).get("errors", {}).items(), *(engines or {}).get("errors", {}).items()]:
        out.warn(f"{url}: {error}; left out")
    title = f"kvstore report, cluster {printable(cluster['id'])}" if cluster else "kvstore report"
    if args.datasheet:
        sheet = datasheet(measured, cluster, clients, engines)
        page = datasheet_page(sheet, (cluster or {}).get("losses"))
        data: dict[str, Any] = {"datasheet": sheet}
    else:
        page = log_page(measured, title) if measured else Page(title)
        computed = value_of(
            prices,
            *_hits(measured, clients),
            ((cluster or {}).get("space") or {}).get("capacity_bytes"),
            (cluster or {}).get("nodes_total"),
        )
        page.facts += [
            *cluster_facts(cluster, why_not),
            *clients_facts(clients),
            *value_facts(computed, count(_hits(measured, clients)[0]), prices),
        ]
        if prices.any:
            page.doubts.append("benefit assumes no queueing, and that the engine's own GPU cache would not have had these tokens")
        data = {"measured": {**(measured or {}), "cluster": cluster, "clients": clients, "engines": engines}}
        data |= {"assumed": asdict(prices), "computed": computed, "doubts": page.doubts}
    page.facts.insert(0, ("as of", f"{rfc3339_now()}, kvstore {version()}"))
    names = {"cluster": cluster["id"], "epoch": cluster["epoch"]} if cluster else {}
    out.result(data, **names)
    figures = charts(measured) if measured and not args.datasheet and (args.plots or args.form == "html") else {}
    if args.plots:
        _plots(args.plots, figures, args.plot_format, out)
    _give(args, page, figures, out)
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """A flag that would do nothing is refused."""
    of_log = {"--since": args.since, "--until": args.until, "--by": args.by, "--plots": args.plots, "--sql": args.sql}
    of_pages = {"--output": args.output, "--plots": args.plots, "--datasheet": args.datasheet, "--format": args.form != "text"}
    rules = (
        (not args.log, of_log, "without --log", "--log DIR: what ClientConfig.access_log names"),
        (bool(args.sql), of_pages, "with --sql", "--csv or --json, and a redirection"),
        (args.datasheet, {"--plots": args.plots}, "with --datasheet", "leave it out"),
        (not args.sql, {"--csv": args.csv}, "without --sql", "--json for programs, or add --sql"),
    )
    for holds, flags, words, fix in rules:
        if holds and (given := [flag for flag, value in flags.items() if value]):
            raise UsageError("E140", f"{given[0]} {words}", "does nothing", fix)


def _cluster(args: argparse.Namespace, timeout_seconds: float) -> tuple[dict[str, Any] | None, str]:
    """What the cluster says now; or None, and why it was not asked."""
    if args.offline:
        return None, "--offline"
    try:
        cluster_map = find_map(args)
    except ConfigError as error:
        if error.code != "E141":  # a map that was named and is wrong
            raise
        return None, "no cluster is known (--map)"
    return cluster_now(cluster_map, timeout_seconds), ""


def _hits(measured: Mapping[str, Any] | None, clients: Mapping[str, Any] | None) -> tuple[int | None, float | None]:
    """Hit tokens and the seconds in which they were counted: of the log; else of the clients, whose time is not known."""
    if measured:
        return measured["hit_tokens"], measured["log"]["span_seconds"]
    return (clients["hit_tokens"] if clients and clients["clients_up"] else None), None


def _give(args: argparse.Namespace, page: Page, figures: Mapping[str, Any], out: Output) -> None:
    if args.form == "html":
        text = as_html(page, [svg(one) for one in figures.values()])
    else:
        text = as_markdown(page) if args.form == "md" else as_text(page)
    if not args.output:
        out.line(text.rstrip("\n"))
        return
    _write(args.output, text)
    out.note(f"written: {args.output}")


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
    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError("E100", f"-o {path}", (error.strerror or str(error)).lower(), "name a file that can be written") from None
