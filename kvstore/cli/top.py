"""`kvstore top`: the cluster live in a terminal; one plain frame off a terminal or with --once; with --json a frame a line."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from typing import Any, Final

from kvstore.cli.cluster import map_path
from kvstore.cli.directories import directory_address
from kvstore.cli.output import Health, Output
from kvstore.cli.signals import interrupted_by_signals
from kvstore.errors import UsageError
from kvstore.live.collector import Collector
from kvstore.live.frame import Data
from kvstore.live.keyboard import Keyboard, keys_of
from kvstore.live.recent_log import RecentLog
from kvstore.live.scrape import client_url
from kvstore.live.view import Screen, View, plain_lines, screen_lines
from kvstore.units import parse_seconds

LOOK_SECONDS: Final = 0.1  # how soon a new frame or another size of the terminal is seen
TABLE_KEYS: Final = {"n": "nodes", "s": "classes", "o": "owners", "c": "clients", "a": "agents", "d": "directories"}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "top",
        help="the cluster live in this terminal",
        description="Nodes worst first, classes, owners, watched clients, agents among them, window directories, renewed every interval."
        " Off a terminal: one plain frame.",
        epilog="""\
examples:
  kvstore top                            q quits, ? tells the keys
  kvstore top --client http://gpu-12:9100   with the hit rate that this client process counts (repeatable)
  kvstore top --once                     one plain frame, two looks apart
  kvstore top --json | jq .data.traffic  a frame a line
""",
    )
    parser.add_argument("--interval", metavar="TIME", default="2s", help="between two looks (default 2s)")
    add_clients(parser)
    parser.add_argument("--once", action="store_true", help="one frame, then exit")


def add_clients(parser: argparse.ArgumentParser) -> None:
    text = "also watch the client or agent process that serves its metrics there (repeatable)"
    parser.add_argument("--client", dest="clients", metavar="URL", action="append", default=[], help=text)
    text = "watch this window directory, too (repeatable; those of the map are asked in any case)"
    parser.add_argument("--directory", dest="directories", metavar="ADDRESS", action="append", default=[], help=text)


def collector_of(args: argparse.Namespace) -> Collector:
    """What --interval, --client and the map say. Raises UsageError, ConfigError."""
    interval = parse_seconds(args.interval, "--interval")
    if not 0.1 <= interval <= 3600:
        raise UsageError("E131", f"--interval {args.interval}", fix="0.1s to 1h")
    clients = list(dict.fromkeys(client_url(text) for text in args.clients))
    log = RecentLog(args.log) if getattr(args, "log", None) else None
    directories = [directory_address(text) for text in args.directories]
    timeout = args.settings["timeout"]
    return Collector(map_path(args), clients, directories=directories, log=log, interval_seconds=interval, timeout_seconds=timeout)


def run(args: argparse.Namespace) -> int:
    out: Output = args.out
    collector = collector_of(args)
    collector.poll()
    collector.require_some()
    with interrupted_by_signals():
        if args.json:
            return _stream(out, collector, args.once)
        if args.once or not out.stdout.is_terminal or os.environ.get("TERM") == "dumb":
            _await_next(collector, threading.Event())
            for text, style in plain_lines(collector.poll(), collector.map.cluster_id, collector.interval_seconds):
                out.line(text, style or None)
            return 0
        return _live(out, collector)


def _await_next(collector: Collector, pause: threading.Event) -> None:
    """In short waits: a signal that another thread took is seen when this one wakes."""
    while (left := collector.interval_seconds - (collector.age_seconds() or 0.0)) > 0:
        pause.wait(min(left, 2 * LOOK_SECONDS))


def _stream(out: Output, collector: Collector, once: bool) -> int:
    pause = threading.Event()  # nobody sets it: a wait that Ctrl-C ends
    while True:
        _await_next(collector, pause)
        frame = collector.poll()
        health = [Health(**check) for check in frame["health"]]
        data = {name: value for name, value in frame.items() if name != "health"}
        out.frame(data, cluster=collector.map.cluster_id, epoch=collector.map.epoch, health=health)
        if once:
            return 0


def _live(out: Output, collector: Collector) -> int:
    from rich.console import ConsoleDimensions
    from rich.live import Live

    console, view = out.stdout, View()
    ascii_only = not (console.encoding or "").lower().startswith("utf")
    stdin = sys.stdin.fileno() if sys.stdin is not None else -1
    collector.start()
    try:
        with keys_of(stdin) as keys, Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False) as live:
            frame, drawn = collector.frame, None
            while True:
                if not view.paused:
                    frame = collector.frame
                size = os.get_terminal_size(sys.stdout.fileno())
                console.size = ConsoleDimensions(size.columns, size.lines)  # COLUMNS and LINES know of no change
                assert frame is not None
                state = (id(frame), size, vars(view).copy(), _stale(collector))
                if state != drawn:
                    live.update(_screen(frame, collector, view, Screen(size.columns, size.lines, ascii_only)), refresh=True)
                    drawn = state
                if not _act(keys, view):
                    return 0
    finally:
        collector.stop()


def _stale(collector: Collector) -> int:
    """Seconds that the data is older than it should be; 0 while it is fresh."""
    age = collector.age_seconds() or 0.0
    return int(age) if age > 3 * collector.interval_seconds + 1 else 0


def _screen(frame: Data, collector: Collector, view: View, screen: Screen) -> Any:
    from rich.console import Group
    from rich.text import Text

    history = collector.history()
    lines = screen_lines(frame, collector.map.cluster_id, collector.interval_seconds, history, view, screen)
    if stale := _stale(collector):
        lines[0] = (f"{lines[0][0]}   DATA {stale} s OLD", "bold red")
    return Group(*(Text(text, style=style, no_wrap=True, overflow="crop") for text, style in lines))


def _act(keys: Keyboard, view: View) -> bool:
    """What was pressed in the next moment; False: quit."""
    try:
        pressed = keys.read(LOOK_SECONDS)
    except EOFError:  # the terminal is gone
        return False
    for key in pressed:
        if view.typing:
            _type(key, view)
        elif key == "q":
            return False
        elif key in TABLE_KEYS:
            view.show(TABLE_KEYS[key])
            view.help = False
        elif key in "<>":
            view.move_sort(-1 if key == "<" else 1)
        elif key in ("up", "down", "page up", "page down"):
            view.offset = max(0, view.offset + {"up": -1, "down": 1, "page up": -10, "page down": 10}[key])
        elif key == "r":
            view.descending = not view.descending
        elif key == "p":
            view.paused = not view.paused
        elif key == "?":
            view.help = not view.help
        elif key == "/":
            view.typing, view.filter = True, ""
        elif key == "escape":
            view.filter, view.help = "", False
    return True


def _type(key: str, view: View) -> None:
    if key in ("enter", "escape"):
        view.typing = False
        view.filter = "" if key == "escape" else view.filter
    elif key == "backspace":
        view.filter = view.filter[:-1]
    elif len(key) == 1 and key.isprintable():
        view.filter += key
