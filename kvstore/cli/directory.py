"""`kvstore directory`: one window directory in the foreground. Its flags are the process's own (kvstore/server/directory_config.py)."""

from __future__ import annotations

import argparse
from typing import Any

from kvstore.cli.flags import add_log_level, follow_log_level
from kvstore.server.directory_config import add_directory_arguments, directory_config


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "directory",
        help="who holds which window entry: one process, RAM only",
        description="Tells agents which agent holds the window entry of a prompt's block, until SIGTERM or Ctrl-C. RAM only: after a"
        " restart agents miss their windows until they touch them again. Several share the keys where the cluster map lists them"
        " (directories = [...]). One process uses one core.",
        epilog="""\
examples:
  kvstore directory --listen 10.0.0.1:7399 --memory 2GB
  kvstore directory --map map.toml --listen 10.0.0.1:7399        for the cluster of that map
  kvstore directory --listen 127.0.0.1:0                         any free port: the ready line says which
  kvstore status --directory 10.0.0.1:7399                       how full it is, how many agents it hears
""",
    )
    add_directory_arguments(parser, map_argument=False)
    add_log_level(parser)
    parser.set_defaults(settings_flags=("log_level",))


def run(args: argparse.Namespace) -> int:
    from kvstore.server.directory import run_directory

    path = args.settings["map"]
    args.map = None if path is None else str(path)
    follow_log_level(args)
    return run_directory(directory_config(args))
