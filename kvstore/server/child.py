"""Runs a daemon that must not outlive its parent: `python -m kvstore.server.child PARENT_PID DAEMON-ARGUMENTS...`.

The kernel sends SIGTERM when the *thread* that started this process ends (PR_SET_PDEATHSIG), so a killed parent leaves no orphans.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _run() -> None:
    parent = int(sys.argv.pop(1))
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the call above
        raise SystemExit(1)
    runpy.run_module("kvstore.server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run()
