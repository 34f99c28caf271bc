"""Flags and settings that several commands have alike."""

from __future__ import annotations

import argparse
from typing import Any, Final

from kvstore.config import LOG_LEVELS, Settings, load_settings

FABRIC: Final = ("rdma_traffic_class", "rdma_gid_index")


def add_transport(parser: argparse.ArgumentParser) -> None:
    """`--transport`, of commands that load; the command names "transport" among its `settings_flags`."""
    told = "how reads move: auto (RDMA where both ends can, else TCP), tcp, or rdma (never TCP; docs/RDMA.md) (default auto)"
    parser.add_argument("--transport", metavar="NAME", help=told)


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """`--log-level`, of commands that run a daemon; the command names "log_level" among its `settings_flags` and calls follow_log_level."""
    told = f"the least that the log tells: {', '.join(LOG_LEVELS)} (default {LOG_LEVELS[0]}; read again on SIGHUP)"
    parser.add_argument("--log-level", metavar="LEVEL", help=told)


def follow_log_level(args: argparse.Namespace) -> None:
    """Of the daemon that this process becomes: flag and environment stay as they are, the configuration file may change."""
    from kvstore.server.log import follow_level

    given = {"log_level": args.log_level, "config": getattr(args, "config", None)}
    follow_level(lambda: str(load_settings(given)["log_level"]))


def fabric_of(settings: Settings) -> dict[str, Any]:
    """The settings of this host's RDMA, as fields of ClientConfig and of NodeConfig."""
    return {name: settings[name] for name in FABRIC}
