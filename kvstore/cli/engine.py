"""`kvstore engine serve`: the bundled model behind OpenAI's interface, with a cluster of its own as its cache, until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvstore.cli.cluster import ask_nodes, require_some
from kvstore.cli.flags import add_transport, fabric_of
from kvstore.cli.output import Output
from kvstore.cli.up import K, M, check_erasable, check_room, short_path, stop_on_signals
from kvstore.client.movers.choose import pick
from kvstore.clustermap import ClusterMap
from kvstore.config import xdg
from kvstore.errors import ConfigError, UsageError
from kvstore.server.local import LocalCluster
from kvstore.server.ports import port_fault
from kvstore.version import version

LISTEN: Final = "127.0.0.1:8000"
NODES: Final = 12
CAPACITY_BYTES: Final = 512_000_000
NEEDED: Final = ("torch", "fastapi", "uvicorn")
WATCH_SECONDS: Final = 1.0
THREADS_MAX: Final = 64
QUEUE: Final = 64


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "engine",
        help="the bundled model behind OpenAI's interface, with a chat page",
        description="Serves a small mixture-of-experts model over HTTP. What it computes of a prompt is kept in the cluster.",
        epilog=f"""\
examples:
  kvstore engine serve                           a cluster, the engine and a chat page on http://{LISTEN}
  kvstore engine serve --listen 127.0.0.1:0      on any free port
  kvstore engine serve --map map.toml            with a cluster that runs already
  kvstore engine serve --access-log DIR          then: kvstore report DIR tells the hit rate, and why tokens missed
  kvstore engine serve --weights mine.safetensors

then, from elsewhere:
  curl http://{LISTEN}/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{{"model": "mini", "messages": [{{"role": "user", "content": "import os"}}]}}'

It needs torch: pip install 'kvstore[engine]'. There is no login: listen on 127.0.0.1, or on a network that you trust.
""",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs", required=True, parser_class=type(parser))
    serve = verbs.add_parser("serve", help="answers until Ctrl-C", epilog="examples: kvstore engine --help")
    serve.add_argument("--model", metavar="SIZE", default="mini", help="mini, or tiny (for tests) (default mini)")
    serve.add_argument("--weights", metavar="FILE", type=Path, help="safetensors (default: those that came with kvstore, else random ones)")
    serve.add_argument("--listen", metavar="HOST:PORT", default=LISTEN, help=f"where to answer (default {LISTEN}; port 0: any free one)")
    serve.add_argument("--directory", metavar="DIR", type=Path, help="of its own cluster (default: this user's data directory)")
    serve.add_argument("--nodes", metavar="N", default=str(NODES), help=f"of its own cluster (default {NODES}, coded {K}+{M})")
    serve.add_argument("--fresh", action="store_true", help="erase what its own cluster holds first")
    serve.add_argument("--threads", metavar="N", default="1", help="that compute (default 1; the same number for all that share a cache)")
    serve.add_argument(
        "--queue", metavar="N", default=str(QUEUE), help=f"requests that may wait; more are refused with 429 (default {QUEUE})"
    )
    serve.add_argument(
        "--window-directory", metavar="HOST:PORT", action="append", default=[],
        help="a window directory (kvstore directory), to share windows with other hosts; repeatable (default: those of the map)",
    )  # fmt: skip
    serve.add_argument(
        "--audit", metavar="N", default="0", help="of N answers over a bounded replay compute one again exactly (default 0: none)"
    )
    serve.add_argument(
        "--mover", metavar="NAME", help="how loaded rows come into its memory: cpu, loopback; auto (the default): the faster here"
    )
    add_transport(serve)
    serve.set_defaults(settings_flags=("mover", "transport"))
    serve.add_argument("--access-log", metavar="DIR", type=Path, help="write a row for each prompt there, for kvstore report and plan")


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    out: Output = args.out
    host, port = _address(args.listen, "--listen")
    model_name, threads, nodes = _size(args.model), _count(args.threads, "--threads", THREADS_MAX), _count(args.nodes, "--nodes", 128)
    queue = _count(args.queue, "--queue", 10_000)
    audit = _count(args.audit, "--audit", 1_000_000, least=0)
    for address in args.window_directory:
        _address(address, "--window-directory")
    _need_packages()
    stop = stop_on_signals()
    out.line(f"kvstore {version()}   engine")
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(_bound(host, port))
        from kvstore.engine_integration.models import load_model  # torch: seconds, and only where it is there
        from kvstore.engine_integration.server.serving import ServeConfig, serving

        began = time.monotonic()
        model, weights = load_model(model_name, args.weights, threads)
        out.step("ok", "model", f"{model_name}, weights {weights}{_noise(weights)}, {time.monotonic() - began:.1f} s")
        mover = pick(args.settings["mover"], layout=model.layout)
        out.step("ok", "mover", f"{mover.name}: {mover.why}")
        config = ServeConfig(
            queue_max=queue, directories=tuple(args.window_directory), audit_every=audit, access_log=args.access_log,
            mover=mover.name, transport=args.settings["transport"], fabric=fabric_of(args.settings),
        )  # fmt: skip
        cluster_map, map_path, cluster = _cluster(args, out, stack, nodes)
        url = stack.enter_context(serving(model, weights, cluster_map, listening, config))
        out.step("ok", "server", url)
        _ready(out, url, model_name, mover.name, cluster_map, map_path, cluster, time.monotonic() - started)
        _watch(cluster, out, stop)
    out.note("stopped; what is cached is kept")
    return 0


def _need_packages() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError("E160", f"the engine needs {', '.join(missing)}", "not installed", "pip install 'kvstore[engine]'")


def _address(text: str, flag: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError("E131", f'{flag} "{text}"', "is no address and port", f"write it as {LISTEN}")
    return host.strip("[]"), int(port)


def _size(text: str) -> str:
    if text not in ("mini", "tiny"):
        raise UsageError("E190", f'no model "{text}"', fix="--model mini, or tiny")
    return text


def _count(text: str, flag: str, most: int, least: int = 1) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise UsageError("E131", f"{flag} {text}", fix=f"give a number from {least} to {most}")
    return int(text)


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """Before anything else is started, so that a taken port costs no time."""
    with contextlib.ExitStack() as stack:
        with port_fault(host, port, "--listen", "HOST:PORT"):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(128)  # a second server on this port is refused from now on
        yield listening


def _noise(weights: str) -> str:
    return " (its text is noise, its cache is real)" if weights == "random" else ""


def _cluster(
    args: argparse.Namespace, out: Output, stack: contextlib.ExitStack, nodes: int
) -> tuple[ClusterMap, Path, LocalCluster | None]:
    """The one that is named; else one of our own, kept from start to start."""
    named = args.settings["map"]
    if named is not None and (args.directory is not None or args.fresh):
        raise UsageError("E140", "--map with --directory or --fresh", fix="one of them: a cluster that runs, or where to start one")
    if named is not None:
        cluster_map = ClusterMap.load(Path(named))
        require_some(ask_nodes(cluster_map, args.settings["timeout"], values=False), cluster_map)
        out.step("ok", "cluster", f"{cluster_map.cluster_id}, {len(cluster_map.newest.nodes)} nodes, {cluster_map.k}+{cluster_map.m}")
        return cluster_map, Path(named), None
    directory = args.directory or xdg("data") / "engine"
    k, m = (K, M) if nodes >= K + M else (max(1, nodes - M), min(M, nodes - 1))
    if args.fresh:
        check_erasable(directory)
    cluster = LocalCluster(directory, nodes, capacity_bytes=CAPACITY_BYTES, k=k, m=m, cluster_id="engine", fresh=args.fresh)
    room = check_room(cluster)
    stack.callback(cluster.stop)
    cluster.start()
    out.step("ok", "nodes", f"{nodes} of {nodes}, {k}+{m}, in {short_path(directory)}; {room}")
    return cluster.map, cluster.map_path, cluster


def _ready(
    out: Output, url: str, model: str, mover: str, cluster_map: ClusterMap, map_path: Path, cluster: LocalCluster | None, seconds: float
) -> None:
    option = f" --map {map_path}"
    out.line(f"Ready in {seconds:.1f} s.", style="bold")
    out.line(f"  page   {url}")
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "import os"}}]}}'
    out.line(f"  curl   curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    out.line(f'  python openai.OpenAI(base_url="{url}/v1", api_key="none")')
    out.line(f"  look   kvstore status{option}")
    out.line(f"         kvstore dashboard{option} --client {url}")
    out.line("  stop   Ctrl-C (what is cached is kept)")
    sys.stdout.flush()
    data = {
        "url": url,
        "model": model,
        "mover": mover,
        "pid": os.getpid(),
        "ready_seconds": round(seconds, 3),
        "map": str(map_path),
        "node_pids": [cluster.pid(node) for node in range(cluster.nodes_count)] if cluster is not None else [],
    }
    out.frame(data, cluster=cluster_map.cluster_id, epoch=cluster_map.epoch)


def _watch(cluster: LocalCluster | None, out: Output, stop: threading.Event) -> None:
    """Until a signal. The engine goes on without nodes: they are misses."""
    told: set[int] = set()
    while not stop.wait(WATCH_SECONDS):
        for node in range(cluster.nodes_count if cluster is not None else 0):
            if cluster is not None and not cluster.alive(node) and node not in told:
                told.add(node)
                out.warn(f"node-{node:02} ended; its log: {cluster.log_path(node)}")
