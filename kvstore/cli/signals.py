"""Signals that end a command: by the way of its `finally`, and never in the middle of an import.

An exception that a handler raises inside an import may come out of an extension as something else (seen: TypeError, and a process that
ends by SIGINT although KeyboardInterrupt was caught). Commands import what they need when they run, so that comes up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

_AGAIN_SECONDS: Final = 0.02
_IMPORTER: Final = "<frozen importlib._bootstrap>"
_again: threading.Timer | None = None


def interrupt(signum: int, frame: FrameType | None) -> None:
    """A handler: raises KeyboardInterrupt; where the main thread is importing, once that is done."""
    global _again
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTER:
            if _again is None or not _again.is_alive():  # of several signals one counts
                _again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), signum))
                _again.daemon = True
                _again.start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """While the block runs, the first SIGTERM or SIGHUP raises KeyboardInterrupt in the main thread (exit code 130)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
