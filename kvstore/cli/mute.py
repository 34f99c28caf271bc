"""`kvstore mute`: a health check that is known is shown and not counted, for a while."""

from __future__ import annotations

import argparse
from typing import Any

from kvstore.cli.cluster import find_map, map_path
from kvstore.cli.codes import HEALTH
from kvstore.cli.health_memory import ANY, HealthMemory
from kvstore.cli.output import Output
from kvstore.clustermap import ClusterMap
from kvstore.errors import UsageError
from kvstore.tomlfile import suggestion
from kvstore.units import format_seconds, parse_long_seconds


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "mute",
        help="a health check that is known does not count for a while",
        description="The check stays visible, and does not change the word of `status` or its exit code. A mute ends by itself, and early "
        "where the fault gets worse: a higher severity, or more of it. Without arguments: what is muted.",
        epilog="""\
examples:
  kvstore mute NODE_DOWN 4h --subject node-07
  kvstore mute RETENTION_SHORT 2d
  kvstore mute                           what is muted, and for how long
""",
    )
    parser.add_argument("code", nargs="?", metavar="CODE", help="a health code, as `status` shows it")
    parser.add_argument("time", nargs="?", metavar="TIME", help="for how long: 30m, 4h, 2d; at most 30d")
    parser.add_argument("--subject", metavar="NAME", help="of this node (or class, or client) only; default: all")


def run(args: argparse.Namespace) -> int:
    cluster_map = find_map(args)
    memory = HealthMemory(map_path(args))
    out: Output = args.out
    if args.code is None:
        for mute in memory.live_mutes():
            subject = "" if mute.subject == ANY else f" {mute.subject}"
            out.line(f"{mute.code}{subject}  {format_seconds(memory.remaining_seconds(mute))} left")
        if not memory.live_mutes():
            out.note("nothing is muted")
    else:
        code = health_code(args.code)
        if args.time is None:
            raise UsageError("E140", f"for how long is {code} to be muted", fix=f"kvstore mute {code} 4h")
        seconds = parse_long_seconds(args.time, "TIME")
        mute = memory.mute(code, seconds, check_subject(cluster_map, args.subject))
        memory.save(must=True)
        shown = "" if mute.subject == ANY else f" of {mute.subject}"
        out.line(f"{code}{shown} is muted for {format_seconds(seconds)}; it ends early where the fault grows")
    out.result({"mutes": [each.data() for each in memory.live_mutes()]}, cluster=cluster_map.cluster_id, epoch=cluster_map.epoch)
    return 0


def health_code(text: str) -> str:
    """Raises UsageError for what is no health code."""
    code = text.upper()
    if code not in HEALTH:
        raise UsageError("E140", f'no health code "{text}"', fix=suggestion(code, HEALTH))
    return code


def check_subject(cluster_map: ClusterMap, subject: str | None) -> str:
    """A slip in a node's name would mute nothing, in silence: "node" looks like one, the rest are classes and clients."""
    if subject is None:
        return ANY
    known = [*(node.id for node in cluster_map.nodes), *cluster_map.classes, "cluster"]
    if subject not in known and "://" not in subject:
        raise UsageError("E140", f'--subject "{subject}"', "no node, class or client of that name", suggestion(subject, known))
    return subject
