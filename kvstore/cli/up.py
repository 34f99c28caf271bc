"""`kvstore up`: a whole cluster on this machine with one command, until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from kvstore.cli.cluster import default_directory
from kvstore.cli.dashboard import HOST as DASHBOARD_HOST
from kvstore.cli.dashboard import PORT as DASHBOARD_PORT
from kvstore.cli.dashboard import port_of, served
from kvstore.cli.flags import fabric_of
from kvstore.cli.output import Output
from kvstore.clustermap import Rules
from kvstore.config import Settings
from kvstore.errors import Unreachable, UsageError
from kvstore.live.collector import Collector
from kvstore.placement import Placement
from kvstore.server.local import PORTS_PER_NODE, LocalCluster
from kvstore.units import format_bytes
from kvstore.version import version

K: Final = 10
M: Final = 2
FREE_BYTES_MIN: Final = 1 << 30
CAPACITY_BYTES_MIN: Final = 64_000_000
DIRECTORIES_MAX: Final = 16
WATCH_SECONDS: Final = 1.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "up",
        help="a cluster on this machine, one command",
        description="Starts N storage daemons here, tries them out, and keeps them until Ctrl-C. Data is kept for the next start.",
        epilog="""\
examples:
  kvstore up                              12 nodes, 10+2, 4 GB each
  kvstore up --nodes 1 --capacity 20GB    one process; nothing survives its loss
  kvstore up --dir /data/try --port 0     elsewhere, on any free ports
  kvstore up --fresh                      forget what is there

It listens on 127.0.0.1 only, with no passwords: it is for one machine.
""",
    )
    parser.add_argument("--nodes", metavar="N", help="storage daemons (default 12)")
    parser.add_argument("--capacity", metavar="SIZE", help="of each daemon (default 4GB)")
    parser.add_argument("--dir", metavar="DIR", help="where map, data and logs lie (default: this user's data directory)")
    parser.add_argument("--port", metavar="N", help=f"first of {PORTS_PER_NODE} ports a node (default 7400; 0: any free ones)")
    parser.add_argument("--io", metavar="ENGINE", help="auto, buffered or direct (default auto)")
    parser.add_argument("--policy", metavar="NAME", help="what goes when room is needed: lru, s3fifo or sieve (default lru)")
    parser.add_argument("--admit", metavar="RULE", help="what is written: all, or what was asked for before: second-touch (default all)")
    parser.add_argument("--write-budget", metavar="SIZE", help="bytes a day and node; past it, writes as with second-touch, then none")
    parser.add_argument("--directories", metavar="N", type=int, default=1, help="window directories beside the nodes (default 1)")
    parser.add_argument("--fresh", action="store_true", help="erase what the directory holds first")
    text = f"also serve the page of kvstore dashboard (default port {DASHBOARD_PORT})"
    parser.add_argument("--dashboard", metavar="PORT", nargs="?", const=str(DASHBOARD_PORT), help=text)
    parser.add_argument("--no-self-test", action="store_true", help="be ready without trying")
    parser.set_defaults(settings_flags=("nodes", "capacity", "port", "io", "policy", "admit", "write_budget"))


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    out: Output = args.out
    directory = Path(args.dir) if args.dir else default_directory()
    stop = stop_on_signals()
    out.line(f"kvstore {version()}   local cluster in {short_path(directory)}")
    cluster = _cluster(args, directory)
    try:
        room = check_room(cluster)
        cluster.claim()
        out.step("ok", "checks", room + _ports_text(cluster, args.settings["port"]))
        cluster.start()
        out.step("ok", "nodes", _nodes(cluster))
        if addresses := cluster.map.directories:
            out.step("ok", "windows", f"directory on {', '.join(addresses)}")
        losses = Placement(cluster.map).losses_survived()
        if not losses.full:
            out.step("WARN", "losses", str(losses))
        tested = None
        if not args.no_self_test and not stop.is_set():
            from kvstore.cli.selftest import self_test

            tested = self_test(cluster)
            gone = f"stopped {tested.nodes_stopped} nodes, " if tested.nodes_stopped else ""
            out.step("ok", "self-test", f"wrote {format_bytes(tested.bytes)}, {gone}read back equal, {tested.seconds:.1f} s")
        seconds = time.monotonic() - started
        with contextlib.ExitStack() as stack:
            url = None
            if args.dashboard is not None:
                url = stack.enter_context(served(Collector(cluster.map_path), DASHBOARD_HOST, port_of(args.dashboard, "--dashboard")))
            _ready(out, cluster, seconds, None if tested is None else vars(tested), url)
            _watch(cluster, out, stop)
    finally:
        cluster.stop()
    out.note(f"stopped; data kept in {short_path(directory)}")
    return 0


def _cluster(args: argparse.Namespace, directory: Path) -> LocalCluster:
    settings = args.settings
    if args.fresh:
        check_erasable(directory)
    if settings["capacity"] < CAPACITY_BYTES_MIN:
        raise UsageError(
            "E131", f"--capacity {settings['capacity']} bytes", fix=f"give each node {format_bytes(CAPACITY_BYTES_MIN)} or more"
        )
    if not 0 <= args.directories <= DIRECTORIES_MAX:
        raise UsageError("E131", f"--directories {args.directories}", fix=f"write a whole number from 0 to {DIRECTORIES_MAX}")
    return LocalCluster(
        directory,
        settings["nodes"],
        capacity_bytes=settings["capacity"],
        io=settings["io"],
        k=K,
        m=M,
        rules=Rules(settings["policy"], settings["admit"], settings["write_budget"]),
        base_port=settings["port"],
        extra_arguments=[*_fabric(settings), *(word for owner in settings.owners for word in ("--owner", owner.argument))],
        fresh=args.fresh,
        directories=args.directories,
    )


def check_erasable(directory: Path) -> None:
    """Raises UsageError E136 for a directory that holds anything but a local cluster."""
    if directory.exists() and any(directory.iterdir()) and not (directory / "lock").exists():
        raise UsageError("E136", f"{directory} is not a directory of a local cluster", "it holds other files", "name another one")


def _fabric(settings: Settings) -> list[str]:
    """What the file or a variable says of this host's RDMA, for the nodes."""
    given = {name: value for name, value in fabric_of(settings).items() if settings.origin(name) != "default"}
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", "auto" if value < 0 else str(value))]


def check_room(cluster: LocalCluster) -> str:
    """What to tell of the disk. Raises UsageError E143 where it has no room for even a little data."""
    place = next(path for path in (cluster.directory, *cluster.directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < FREE_BYTES_MIN:
        raise UsageError(
            "E143",
            f"{place} has {format_bytes(free)} free",
            f"a cluster needs {format_bytes(FREE_BYTES_MIN)} to start",
            "free some, or name another place",
        )
    text = f"{format_bytes(free)} free"
    wanted = cluster.capacity_bytes * cluster.nodes_count
    if wanted > free:
        text += f" (less than {cluster.nodes_count} x {format_bytes(cluster.capacity_bytes)}: nodes will fill the disk and then evict)"
    return text


def _ports_text(cluster: LocalCluster, port: int) -> str:
    return f", ports {port}-{port + PORTS_PER_NODE * cluster.nodes_count + cluster.directories_count - 1} free" if port else ""


def _nodes(cluster: LocalCluster) -> str:
    n = cluster.nodes_count
    io = cluster.ready[0].get("io", "")
    size = format_bytes(cluster.capacity_bytes)
    return f"{n} of {n}, {cluster.map.k}+{cluster.map.m}, {size} each, {io} (one disk: no protection if it dies)"


def _ready(out: Output, cluster: LocalCluster, seconds: float, tested: dict[str, Any] | None, url: str | None) -> None:
    nodes = cluster.map.nodes
    option = "" if cluster.directory == default_directory() else f" --map {cluster.map_path}"
    out.line(f"Ready in {seconds:.1f} s.", style="bold")
    out.line("  use    kvstore.client.Client(ClusterMap.load(" + repr(str(cluster.map_path)) + "), layout=...)")
    out.line(f"  look   kvstore status{option} | kvstore top{option} | http://{nodes[0].metrics_address}/metrics")
    out.line(f"  page   {url or f'kvstore dashboard{option}'}")
    out.line("  stop   Ctrl-C (data kept; kvstore up --fresh starts empty)")
    sys.stdout.flush()
    data = {
        "directory": str(cluster.directory),
        "map": str(cluster.map_path),
        "pid": os.getpid(),
        "ready_seconds": round(seconds, 3),
        "self_test": tested,
        "dashboard_url": url,
        "nodes": [
            {
                "id": node.id,
                "pid": cluster.pid(node.ordinal),
                "address": node.address,
                "admin_address": node.admin_address,
                "http_address": node.metrics_address,
                "data": str(cluster.node_directory(node.ordinal)),
                "log": str(cluster.log_path(node.ordinal)),
            }
            for node in nodes
        ],
        "directories": [
            {"address": address, "http_address": cluster.ready[at].get("http"), "pid": cluster.pid(at), "log": str(cluster.log_path(at))}
            for at, address in enumerate(cluster.map.directories, cluster.nodes_count)
        ],
    }
    out.frame(data, cluster=cluster.map.cluster_id, epoch=cluster.map.epoch)


def _watch(cluster: LocalCluster, out: Output, stop: threading.Event) -> None:
    """Until a signal. A daemon that ends by itself is told once; a person who kills one to see what happens wants it to stay down."""
    told: set[int] = set()
    while not stop.wait(WATCH_SECONDS):
        for member in range(cluster.nodes_count + cluster.directories_count):
            if not cluster.alive(member) and member not in told:
                told.add(member)
                out.warn(f"{cluster.log_path(member).stem} ended; its log: {cluster.log_path(member)}")
        if told >= set(range(cluster.nodes_count)):
            raise Unreachable("E201", "every node has ended", fix=f"read the logs in {cluster.directory}")


def stop_on_signals() -> threading.Event:
    """SIGTERM, SIGHUP and Ctrl-C stop in order; a second one ends this process at once (the daemons go with it)."""
    stop = threading.Event()

    def handle(signum: int, frame: Any) -> None:
        if stop.is_set():
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, handle)
    return stop


def short_path(path: Path) -> str:
    home = str(Path.home())
    text = str(path)
    return "~" + text[len(home) :] if text.startswith(home + "/") else text
