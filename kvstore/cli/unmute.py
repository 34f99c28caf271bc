"""`kvstore unmute`: a muted health check counts again."""

from __future__ import annotations

import argparse
from typing import Any

from kvstore.cli.cluster import find_map, map_path
from kvstore.cli.health_memory import HealthMemory
from kvstore.cli.mute import health_code


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "unmute",
        help="a muted health check counts again",
        epilog="""\
examples:
  kvstore unmute NODE_DOWN                       every mute of that code
  kvstore unmute NODE_DOWN --subject node-07
""",
    )
    parser.add_argument("code", metavar="CODE", help="a health code")
    parser.add_argument("--subject", metavar="NAME", help="only the mute of this node, class or client")


def run(args: argparse.Namespace) -> int:
    cluster_map = find_map(args)
    memory = HealthMemory(map_path(args))
    code = health_code(args.code)
    gone = memory.unmute(code, args.subject)
    if gone:
        memory.save(must=True)
    args.out.line(f"{code} counts again" if gone else f"{code} was not muted")
    args.out.result({"ended": [mute.data() for mute in gone]}, cluster=cluster_map.cluster_id, epoch=cluster_map.epoch)
    return 0
