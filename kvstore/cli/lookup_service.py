"""`kvstore lookup-service`: what of a prompt is cached, for routers, in the foreground."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from kvstore.cli.cluster import map_path
from kvstore.cli.flags import add_log_level, follow_log_level
from kvstore.errors import ConfigError, KvstoreError
from kvstore.units import parse_seconds

LISTEN: Final = "127.0.0.1:7398"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "lookup-service",
        help="what of a prompt is cached, for routers (gRPC and HTTP)",
        description="Answers routers: of this prompt, how many tokens are cached, and a ticket that any agent with the same ticket key"
        " redeems without a lookup of its own. Until SIGTERM or Ctrl-C. Keeps nothing.",
        epilog="""\
examples:
  kvstore lookup-service --model mini.toml --ticket-key key
  kvstore lookup-service --model mini.toml --ticket-key key --directory 10.0.0.1:7399 --listen 10.0.0.1:7398 --http-port 7397
  curl -s http://127.0.0.1:7397/v1/lookup -d '{"tokens": [72, 105]}'
""",
    )
    add = parser.add_argument
    add("--model", metavar="FILE", required=True, help="a model card: layout and namespace of its blocks (docs/LOOKUP_SERVICE.md)")
    add("--ticket-key", metavar="FILE", required=True, help="16 to 64 bytes, the same as the agents': they redeem the tickets")
    add("--tenants", metavar="FILE", help="[tenants.NAME] with owner and secret (default: one tenant, without either)")
    add(
        "--directory",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="a window directory; may be given again (default: the cluster map's)",
    )
    add("--listen", metavar="HOST:PORT", default=LISTEN, help=f"of gRPC (default {LISTEN}; port 0: any free one)")
    add("--http-port", metavar="N", type=int, default=0, help="of POST /v1/lookup, probes and metrics (default: any free one)")
    add("--deadline", metavar="TIME", default="500ms", help="of one answer; what nodes said by then counts (default 500ms)")
    add("--directory-deadline", metavar="TIME", default="20ms", help="what an answer waits for the directories (default 20ms)")
    add("--max-tokens", metavar="N", type=int, help="of one prompt (default, and at most: 1000000)")
    add("--max-running", metavar="N", type=int, help="questions at once; one more is told so (default 32)")
    add_log_level(parser)
    parser.set_defaults(settings_flags=("log_level",))


def run(args: argparse.Namespace) -> int:
    from kvstore.server.lookup_service import LookupServiceConfig, run_lookup_service

    follow_log_level(args)
    host, _, port = args.listen.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or len(port) > 5:
        raise ConfigError("E198", f'--listen "{args.listen}"', fix="write an IP address and a port, as in 10.0.0.1:7398")
    given = {name: value for name, value in (("tokens_max", args.max_tokens), ("running_max", args.max_running)) if value is not None}
    return run_lookup_service(
        LookupServiceConfig(
            map_path=map_path(args),
            model_path=Path(args.model),
            ticket_key_path=Path(args.ticket_key),
            tenants_path=Path(args.tenants) if args.tenants else None,
            directories=tuple(args.directory),
            directory_seconds=_seconds("--directory-deadline", args.directory_deadline),
            host=host.strip("[]"),
            port=int(port),
            http_port=args.http_port,
            deadline_seconds=_seconds("--deadline", args.deadline),
            **given,
        )
    )


def _seconds(flag: str, text: str) -> float:
    try:
        return parse_seconds(text)
    except KvstoreError as error:
        raise ConfigError(error.code, f'{flag} "{text}" not understood', fix=error.fix) from None
