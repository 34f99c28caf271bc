"""TCP congestion control of data connections, both ends.

The default is cubic and not the host's: a host may use one that paces every connection for the wide area (BBR), which within a rack
costs processor time and wins nothing (docs/PERFORMANCE.md).
"""

from __future__ import annotations

import re
import socket
from typing import Final

HOST: Final = "host"
NAME_TEXT: Final = "host, or the name of an algorithm (sysctl net.ipv4.tcp_available_congestion_control)"


def is_name(text: str) -> bool:
    """May this be the name of an algorithm? (At most 15 of a-z, 0-9, _ and -.)"""
    return re.fullmatch(r"[a-z0-9_-]{1,15}", text) is not None


def for_kernel(name: str) -> str:
    """What the native parts take: the name, empty for the host's."""
    return "" if name == HOST else name


def refusal(name: str) -> str:
    """Why this kernel will not use it, empty when it will. Raises nothing."""
    if name == HOST:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError as error:
            return error.strerror.lower() if error.strerror else str(error)
    return ""
