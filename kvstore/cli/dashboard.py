"""`kvstore dashboard`: one page about the cluster, served from here until Ctrl-C. Reads only."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvstore.cli.cluster import find_map
from kvstore.cli.output import Output
from kvstore.cli.signals import interrupted_by_signals
from kvstore.cli.top import add_clients, collector_of
from kvstore.errors import ConfigError, UsageError
from kvstore.http import HttpServer
from kvstore.live.collector import Collector
from kvstore.live.web import Dashboard
from kvstore.observe import export
from kvstore.server.ports import port_fault

PORT: Final = 7480
HOST: Final = "127.0.0.1"
SIGNAL_POLL_SECONDS: Final = 0.2  # a signal that another thread took is seen when this one wakes


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "dashboard",
        help="one page about the cluster, in a browser",
        description="Serves one read-only page: health, what is slow, what hits, each node. No build, no other hosts; light, dark, phone.",
        epilog=f"""\
examples:
  kvstore dashboard                      http://{HOST}:{PORT}
  kvstore dashboard --client http://gpu-12:9100 --client http://gpu-13:9100     clients, and agents
  kvstore dashboard --log /var/log/kvstore     and tenants and models out of the access log
  kvstore dashboard --export grafana DIR       the same for Grafana and Prometheus, as files
  kvstore dashboard --host 0.0.0.0       for others on a network that you trust: there is no login

Hits are counted by clients: name the pages of client processes with --client to see hit rate, loads and misses by reason.
""",
    )
    parser.add_argument("--port", metavar="N", default=str(PORT), help=f"of the page (default {PORT}; 0: any free one)")
    parser.add_argument("--host", metavar="HOST", default=HOST, help=f"address to listen on (default {HOST}: this machine alone)")
    add_clients(parser)
    parser.add_argument("--log", metavar="DIR", type=Path, help="an access log: also show tenants and models of its last hour")
    parser.add_argument("--interval", metavar="TIME", default="5s", help="between two looks (default 5s)")
    text = "serve nothing: write a Grafana dashboard, Prometheus rules and the nodes to scrape into DIR (FORM is grafana)"
    parser.add_argument("--export", nargs=2, metavar=("FORM", "DIR"), help=text)


def run(args: argparse.Namespace) -> int:
    if args.export:
        return _export(args)
    port = port_of(args.port, "--port")
    if args.log and not args.log.is_dir():
        raise UsageError("E100", f"--log {args.log}", "is no directory", "name the directory that clients log to")
    out: Output = args.out
    collector = collector_of(args)
    stop = threading.Event()  # nobody sets it: a wait that signals end
    try:
        with interrupted_by_signals(), served(collector, args.host, port) as url:
            out.line(url)
            where = f"cluster {collector.map.cluster_id}, {len(collector.map.newest.nodes)} nodes"
            out.note(f"{where}, a look every {collector.interval_seconds:g} s; Ctrl-C ends it")
            sys.stdout.flush()
            out.frame({"url": url}, cluster=collector.map.cluster_id, epoch=collector.map.epoch)
            while not stop.wait(SIGNAL_POLL_SECONDS):
                pass
    except KeyboardInterrupt:
        pass  # as a daemon that ends in order: exit code 0
    return 0


def port_of(text: str, flag: str) -> int:
    """Raises UsageError E131."""
    if not text.isdecimal() or int(text) > 65535:
        raise UsageError("E131", f"{flag} {text}", fix="give a port from 0 to 65535")
    return int(text)


@contextlib.contextmanager
def served(collector: Collector, host: str, port: int) -> Iterator[str]:
    """The page while the block runs; gives its address. Raises ConfigError where the port cannot be had."""
    with port_fault(host, port, "--port"):
        server = HttpServer(host, port, Dashboard(collector, host))
    collector.start()
    try:
        yield f"http://{'[' + host + ']' if ':' in host else host}:{server.port}"
    finally:
        server.close()
        collector.stop()


def _export(args: argparse.Namespace) -> int:
    """A map is of use here, but not needed."""
    form, directory = args.export
    if form != "grafana":
        raise UsageError("E140", f"--export {form}", "is not known", "write --export grafana DIR")
    try:
        cluster_map = find_map(args)
    except ConfigError:
        if args.settings["map"] is not None:
            raise
        cluster_map = None
    paths = export(Path(directory), cluster_map)
    for path in paths:
        args.out.line(str(path))
    args.out.result({"files": [str(path) for path in paths]}, cluster=cluster_map.cluster_id if cluster_map else None)
    return 0
