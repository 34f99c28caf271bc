"""Runs a daemon that must not outlive its parent: `python -m kvstore.server.child PARENT_PID DAEMON-ARGUMENTS...`.

A thread waits for the parent's end and then asks this process, once, to drain and end. The kernel's own signal (PR_SET_PDEATHSIG) is
SIGCONT, so that a daemon that stands still (SIGSTOP) goes on to its end. It comes once for each thread that the parent had: a SIGTERM as
often would cut the drain short.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import select
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _run() -> None:
    parent = int(sys.argv.pop(1))
    try:
        handle = os.pidfd_open(parent)
    except ProcessLookupError:
        raise SystemExit(1) from None
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the call above
        raise SystemExit(1)
    threading.Thread(target=_end_with, args=(handle,), name="kvstore-parent", daemon=True).start()
    runpy.run_module("kvstore.server", run_name="__main__", alter_sys=True)


def _end_with(handle: int) -> None:
    select.select([handle], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    _run()
