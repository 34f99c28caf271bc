"""Faults of listening, as one line that says who has the port and what to do."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.errors import ConfigError


def check_port(host: str, port: int) -> None:
    """Raises OSError where `port` cannot be listened on now. For libraries that do not say why."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


@contextmanager
def port_fault(host: str, port: int, flag: str, value: str = "N") -> Iterator[None]:
    """Turns an OSError of bind or listen inside into ConfigError E107 or E124, whose fix names flag and value."""
    try:
        yield
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE or "in use" in str(error).lower()
        if in_use or error.errno is None:
            from kvstore.server.local import port_owner  # reads /proc: only when something went wrong

            raise ConfigError("E107", f"port {port} is in use{port_owner(port)}", fix=f"stop it, or {flag} {value}") from None
        reason = (error.strerror or str(error)).lower()
        other = f"with {flag} {value}" if ":" in value else f"with --host, or {flag} {value}"
        raise ConfigError("E124", f"cannot listen on {host}:{port}", reason, f"give an address of this host {other}") from None
