"""Flags that several commands have alike."""

from __future__ import annotations

import argparse


def add_transport(parser: argparse.ArgumentParser) -> None:
    """`--transport`, of commands that load; the command names "transport" among its `settings_flags`."""
    told = "how reads move: auto (RDMA where both ends can, else TCP), tcp, or rdma (never TCP; docs/RDMA.md) (default auto)"
    parser.add_argument("--transport", metavar="NAME", help=told)
