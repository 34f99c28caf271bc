"""`kvstore dashboard`: one page about the cluster, served from here until Ctrl-C. Reads only."""

from __future__ import annotations

import argparse
import sys
import threading
from typing import Any, Final

from kvstore.cli.output import Output
from kvstore.cli.signals import interrupted_by_signals
from kvstore.cli.top import add_clients, collector_of
from kvstore.errors import UsageError
from kvstore.http import HttpServer
from kvstore.live.collector import Collector
from kvstore.live.web import Dashboard
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
  kvstore dashboard --client http://gpu-12:9100 --client http://gpu-13:9100
  kvstore dashboard --host 0.0.0.0       for others on a network that you trust: there is no login

Hits are counted by clients: name the pages of client processes with --client to see hit rate, loads and misses by reason.
""",
    )
    parser.add_argument("--port", metavar="N", default=str(PORT), help=f"of the page (default {PORT}; 0: any free one)")
    parser.add_argument("--host", metavar="HOST", default=HOST, help=f"address to listen on (default {HOST}: this machine alone)")
    add_clients(parser)
    parser.add_argument("--interval", metavar="TIME", default="5s", help="between two looks (default 5s)")


def run(args: argparse.Namespace) -> int:
    if not args.port.isdecimal() or int(args.port) > 65535:
        raise UsageError("E131", f"--port {args.port}", fix="give 0 to 65535")
    return serve(args.out, collector_of(args), args.host, int(args.port))


def serve(out: Output, collector: Collector, host: str, port: int) -> int:
    """Until Ctrl-C or a signal, which end it in order."""
    stop = threading.Event()  # nobody sets it: a wait that signals end
    with port_fault(host, port, "--port"):
        server = HttpServer(host, port, Dashboard(collector, host))
    collector.start()
    try:
        with interrupted_by_signals():
            url = f"http://{'[' + host + ']' if ':' in host else host}:{server.port}"
            out.line(url)
            where = f"cluster {collector.map.cluster_id}, {len(collector.map.newest.nodes)} nodes"
            out.note(f"{where}, a look every {collector.interval_seconds:g} s; Ctrl-C ends it")
            sys.stdout.flush()
            out.frame({"url": url}, cluster=collector.map.cluster_id, epoch=collector.map.epoch)
            while not stop.wait(SIGNAL_POLL_SECONDS):
                pass
    except KeyboardInterrupt:
        pass  # as a daemon that ends in order: exit code 0
    finally:
        server.close()
        collector.stop()
    return 0
