"""Signals of commands that leave something to clean up: SIGTERM and SIGHUP end them as Ctrl-C does, by the way of their `finally`."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """While the block runs, the first SIGTERM or SIGHUP raises KeyboardInterrupt in the main thread (exit code 130)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
