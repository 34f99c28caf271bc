"""What every daemon does from its start to its exit code, and how it writes its addresses."""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import threading
from collections.abc import Callable
from typing import Final, Protocol

END_SECONDS: Final = 1.0  # for what a signal began: reading a map


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
    # Python's handlers run on the main thread once it comes by, which one that waits for a lock, or is in native code, may never do. So
    # nothing is done in them: the interpreter also writes each signal's number to a pipe, at once, and a thread reads there.
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    due: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def work() -> None:
        while (each := due.get()) is not None:
            each()

    stops = itertools.count(1)

    def count_stop(signum: int) -> None:
        if next(stops) > 1:
            os._exit(128 + signum)  # what is on a node's disk is whole by construction; others keep nothing

    def hear() -> None:
        while signums := os.read(told, 64):
            for signum in signums:
                if signum == signal.SIGHUP:
                    due.put(reload)
                    due.put(daemon.log.reread_level)
                elif signum in (signal.SIGTERM, signal.SIGINT):
                    count_stop(signum)
                    due.put(daemon.request_stop)

    threads = [threading.Thread(target=body, name="kvstore-signals", daemon=True) for body in (hear, work)]
    for thread in threads:
        thread.start()
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    # Before the start: a node that is stopped while it starts must not leave its directory as a crash would.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)
    try:
        daemon.start()
        if not daemon.stopping:
            print(f"ready {json.dumps(daemon.facts())}", flush=True)
        return daemon.serve_until_stopped()
    finally:  # the threads hold the daemon
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda heard, _: count_stop(heard))
        os.close(tell)
        due.put(None)
        for thread in threads:
            thread.join(END_SECONDS)
        os.close(told)


def address_text(host: str, port: int) -> str:
    """host:port, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
