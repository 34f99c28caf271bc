"""`kvstore node`: one storage daemon in the foreground. Its flags are the daemon's own (kvstore/server/config.py)."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from kvstore.cli.flags import FABRIC, add_log_level, fabric_of, follow_log_level
from kvstore.server.config import add_node_arguments, config_from_args


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "node",
        help="one storage daemon: one process per SSD",
        description="Serves one data directory until SIGTERM or Ctrl-C, which drains: no new work, what runs is finished, flush, exit 0.",
        epilog="""\
examples:
  kvstore node --data /data/nvme0 --capacity 3.6TB --map map.toml --id node-07
  kvstore node --data /data/nvme0 --owner name=default,floor=400GB
  kvstore node --data /tmp/try                     a cluster of one, for trying out
""",
    )
    add_node_arguments(parser, map_argument=False)
    add_log_level(parser)
    parser.set_defaults(settings_flags=("log_level", *FABRIC))


def run(args: argparse.Namespace) -> int:
    from kvstore.server.node import run_node

    path = args.settings["map"]
    args.map = None if path is None else str(path)
    follow_log_level(args)
    config = config_from_args(args, args.settings.owners)
    return run_node(replace(config, **fabric_of(args.settings)))
