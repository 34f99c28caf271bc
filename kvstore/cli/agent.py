"""`kvstore agent`: the agent of an inference host as a process, its status, and its drain."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvstore.cli.cluster import map_path
from kvstore.cli.flags import add_log_level, add_transport, fabric_of, follow_log_level
from kvstore.cli.output import Output
from kvstore.config import xdg
from kvstore.errors import ConfigError, KvstoreError, UsageError
from kvstore.units import format_bytes, format_seconds, parse_bytes, parse_seconds

DRAIN_SECONDS: Final = 60.0
ANSWER_SECONDS: Final = 5.0  # beyond the drain itself


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "agent",
        help="what an inference host runs beside its engine workers: one process, shared memory",
        description="Looks up, loads, checks, decodes and stores for the engine workers of this host, keeps hot extents and window "
        "entries in RAM, and gives windows to other hosts. Serves until SIGTERM, Ctrl-C or `kvstore agent drain`.",
        epilog="""\
examples:
  kvstore agent --map map.toml --memory 8GiB --ram 32GiB --windows 64GiB
  kvstore agent --directory 10.0.0.1:7399 --listen 10.0.3.7:7600     share windows with other hosts
  kvstore agent status
  kvstore agent drain --within 60s                  ends it in order: what runs is finished, windows move

A worker attaches with kvstore.client.agent.worker.WorkerAgent(SOCKET, layout=...). Only this user and root may.
""",
    )
    parser.add_argument(
        "action", nargs="?", choices=("run", "status", "drain"), default="run", metavar="ACTION", help="run, status or drain"
    )
    add = parser.add_argument
    add("--socket", metavar="PATH", help="Unix socket of the workers (default: kvstore/agent.sock in this user's runtime directory)")
    add("--memory", metavar="SIZE", help="shared memory that loads are staged in (default 1GiB)")
    add("--quota", metavar="SIZE", help="of it, what one worker may have pinned (default: half)")
    add("--worker-memory", metavar="SIZE", help="shared memory of each worker, to store from (default 256MiB)")
    add("--ram", metavar="SIZE", help="RAM tier of hot extents (default 1GiB; 0B: none)")
    add("--windows", metavar="SIZE", help="window entries of this host (default 1GiB; 0B: none)")
    add("--handoffs", metavar="SIZE", help="handoffs from other hosts that wait for a worker here (default 0B: none are taken)")
    add("--workers", metavar="N", type=int, help="engine workers at once (default 16)")
    add("--kinds", metavar="N", type=int, help="kinds of engines at once: layout, owner, KV group, block size (default 1)")
    add("--listen", metavar="HOST:PORT", help="where other agents reach this one (default 127.0.0.1 and any free port)")
    add("--advertise", metavar="HOST:PORT", help="the address that others are told (default: that of --listen)")
    add("--directory", metavar="HOST:PORT", action="append", default=[], help="a window directory (repeatable; default: those of the map)")
    add("--http", metavar="HOST:PORT", help="of /livez, /readyz and /metrics (default 127.0.0.1 and any free port)")
    add_transport(parser)
    add("--ticket-key", metavar="FILE", help="16 to 64 bytes that all agents share, so that each redeems the others' tickets")
    add(
        "--to",
        metavar="HOST:PORT",
        help="the agent that takes the window entries when this one ends (its address: kvstore agent status there; default: one that the "
        "directory names)",
    )
    add("--within", metavar="TIME", help="how long a drain, or a SIGTERM, may take (default 60s)")
    add_log_level(parser)
    parser.set_defaults(settings_flags=("transport", "log_level"))


_FLAGS: Final[dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "memory": ("memory_bytes", parse_bytes),
    "quota": ("quota_bytes", parse_bytes),
    "worker_memory": ("worker_bytes", parse_bytes),
    "ram": ("ram_bytes", parse_bytes),
    "windows": ("window_bytes", parse_bytes),
    "handoffs": ("handoff_bytes", parse_bytes),
    "workers": ("workers_max", int),
    "kinds": ("kinds_max", int),
    "ticket_key": ("ticket_key_path", Path),
    "within": ("drain_seconds", parse_seconds),
    "to": ("drain_to", str),
    "advertise": ("advertise", str),
}


def run(args: argparse.Namespace) -> int:
    path = Path(args.socket) if args.socket else xdg("runtime") / "agent.sock"
    if args.action == "status":
        return _status(args, path)
    if args.action == "drain":
        return _drain(args, path)
    from kvstore.client.agent.process import run_agent
    from kvstore.client.agent.process_config import ProcessConfig

    follow_log_level(args)
    given: dict[str, Any] = {"map_path": map_path(args), "socket_path": path, "directories": tuple(args.directory)}
    given |= {"transport": args.settings["transport"], "fabric": fabric_of(args.settings)}
    for flag, (field, convert) in _FLAGS.items():
        if (value := getattr(args, flag)) is not None:
            given[field] = _converted(flag, value, convert)
    for flag, host, port in (("listen", "host", "port"), ("http", "http_host", "http_port")):
        if (value := getattr(args, flag)) is not None:
            given[host], given[port] = _host_port(flag, value)
    return run_agent(ProcessConfig(**given))


def _converted(flag: str, value: Any, convert: Callable[[Any], Any]) -> Any:
    try:
        return convert(value)
    except KvstoreError as error:
        raise ConfigError(error.code, f'--{flag.replace("_", "-")} "{value}" not understood', fix=error.fix) from None


def _host_port(flag: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError("E131", f"--{flag} {text}", fix="write HOST:PORT, an IPv6 host in brackets")
    return host.strip("[]"), int(port)


def _ask(path: Path, kind: str, body: bytes, timeout_seconds: float) -> dict[str, Any]:
    from kvstore.client.agent.attachment import control
    from kvstore.client.agent.link import Kind

    found: dict[str, Any] = json.loads(control(str(path), Kind[kind], body, timeout_seconds))
    return found


def _status(args: argparse.Namespace, path: Path) -> int:
    out: Output = args.out
    found = _ask(path, "STATUS", b"", args.settings["timeout"])
    pinned, memory, workers = found["pinned_bytes"], found["memory_bytes"], found["workers"]
    locked = "" if found["locked"] else ", not locked"
    out.line(f"agent    {found['state']}, pid {found['pid']}, up {format_seconds(found['uptime_seconds'])}, kvstore {found['version']}")
    out.line(f"memory   {format_bytes(pinned)} of {format_bytes(memory)} pinned{locked}; {format_bytes(found['quota_bytes'])} a worker")
    if ram := found["ram"]:
        out.line(
            f"ram      {format_bytes(ram['used_bytes'])} of {format_bytes(ram['capacity_bytes'])}, {ram['extents']} extents, "
            f"{ram['hit_tokens']} of {ram['asked_tokens']} tokens came from there"
        )
    for windows in found["windows"]:
        size = format_bytes(windows["entry_bytes"])
        out.line(f"windows  {windows['entries']} entries, {size}; {windows['hits']} found, {windows['misses']} not")
    out.line(
        f"nodes    {found['nodes_connected']} connected" + "".join(f"; other agents reach it at {place}" for place in found["addresses"])
    )
    columns = ("worker", "name", "pinned", "loads", "stores", "attached")
    rows = [
        (w["pid"], w["name"] or "-", format_bytes(w["pinned_bytes"]), w["loads"], w["stores"], format_seconds(w["attached_seconds"]))
        for w in workers
    ]
    if rows:
        out.table(columns, rows)
    else:
        out.line("workers  none")
    out.result(found, cluster=found["cluster"], epoch=found["epoch"])
    return 0


def _drain(args: argparse.Namespace, path: Path) -> int:
    out: Output = args.out
    if args.to:
        _host_port("to", args.to)
    seconds = DRAIN_SECONDS if args.within is None else _converted("within", args.within, parse_seconds)
    found = _ask(path, "DRAIN", json.dumps({"seconds": seconds, "to": args.to or ""}).encode(), seconds + ANSWER_SECONDS)
    cut = f", {found['loads_cut']} loads and {found['stores_cut']} stores cut off"
    moved = (
        f", {found['windows_moved']} window entries and {found['handoffs_moved']} handoffs moved to {found['windows_to']}"
        if found["windows_moved"] or found["handoffs_moved"]
        else ""
    )
    out.line(f"drained in {format_seconds(found['seconds'])}{moved}" + ("" if found["finished"] else cut))
    if found["windows_left"] or found["handoffs_left"]:
        out.line(f"lost: {found['windows_left']} window entries and {found['handoffs_left']} handoffs ({found['windows_why']})")
    out.result(found)
    return 0 if found["finished"] else 1
