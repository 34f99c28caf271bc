"""What every daemon does from its start to its exit code, and how it writes its addresses."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Protocol


class DaemonLog(Protocol):
    def reread_level(self) -> None: ...


class Daemon(Protocol):
    """Verbs in their order. `request_stop` may come at any time, on another thread, and more than once."""

    def start(self) -> None:
        """Serves when it returns. On any error all that was taken is given back. Raises KvstoreError."""

    @property
    def log(self) -> DaemonLog: ...

    @property
    def stopping(self) -> bool: ...

    def facts(self) -> dict[str, object]:
        """What the ready line says. Only while serving."""
        ...

    def request_stop(self) -> None: ...

    def serve_until_stopped(self) -> int:
        """The exit code."""
        ...


def run_daemon(daemon: Daemon, reload: Callable[[], None] = lambda: None) -> int:
    """Starts it, prints its ready line for whoever waits on stdout, and serves until SIGTERM or SIGINT; a second one ends it at once.
    SIGHUP has it call `reload`, and read its log level again.

    Gives the exit code. Call it from the main thread. Raises KvstoreError, with its one line, where it cannot start.
    """
    signals = 0
    # Handlers run between any two steps of the main thread, which may hold a lock that these need: they are done on another.
    due: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def on_stop(signum: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            os._exit(128 + signum)  # what is on a node's disk is whole by construction; others keep nothing
        due.put(daemon.request_stop)

    def on_reload(signum: int, frame: FrameType | None) -> None:
        due.put(reload)
        due.put(daemon.log.reread_level)

    def work() -> None:
        while True:
            due.get()()

    threading.Thread(target=work, name="kvstore-signals", daemon=True).start()
    # Before the start: a node that is stopped while it starts must not leave its directory as a crash would.
    for signum, handler in ((signal.SIGTERM, on_stop), (signal.SIGINT, on_stop), (signal.SIGHUP, on_reload)):
        signal.signal(signum, handler)
    daemon.start()
    if not daemon.stopping:
        print(f"ready {json.dumps(daemon.facts())}", flush=True)
    return daemon.serve_until_stopped()


def address_text(host: str, port: int) -> str:
    """host:port, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
