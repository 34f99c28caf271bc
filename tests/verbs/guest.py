"""Runs tests under a kernel that has RDMA: ../shared/rdma/rdma-vm starts one in software, on this machine's own file tree.

A test of the host starts a guest and runs the files of this folder in it; on a machine that has RDMA devices they run as they are.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT.parent / "shared" / "rdma" / "rdma-vm"
DEVICES = Path("/sys/class/infiniband")
MEMORY_MIB = 4096  # of a guest: 12 daemons with registered memory, and what tests write to its file system in RAM


def has_devices() -> bool:
    return DEVICES.is_dir() and any(DEVICES.iterdir())


def device_or_first(name: str) -> str:
    """`name` where this host has it, as guests do, or has none; else its first RDMA device."""
    found = sorted(path.name for path in DEVICES.iterdir()) if has_devices() else [name]
    return name if name in found else found[0]


@contextmanager
def folder_in_guest() -> Iterator[Path]:
    """A folder that a guest sees too: within the checkout, for the host's /tmp is hidden there by one of the guest's own."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="guest-", dir=ROOT / "build") as folder:
        yield Path(folder)


def run_in_guest(*command: str, seconds: float, hosts: int = 1, env: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs `command`, relative to the checkout, in one guest or, with `hosts` 2, in each of two; its exit status and output come back.

    A folder of its own under build/ is shared, so that the checkout is read-only there and tests that write leave nothing behind."""
    if not TOOL.exists():
        pytest.skip(f"no kernel with RDMA to be had: {TOOL.parent.parent.name}/rdma/rdma-vm is not beside this checkout")
    with folder_in_guest() as share:
        words = [str(TOOL), "--share", str(share), "--timeout", f"{seconds:g}", "--hosts", str(hosts), "--memory", str(MEMORY_MIB)]
        for variable in (f"KVSTORE_GUEST_SHARE={share}", "PYTHONDONTWRITEBYTECODE=1", *env):
            words += ["--env", variable]
        words += ["--", *command]
        # A session of its own, so that a test that is given up takes the tool and its emulators along.
        tool = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        with tool:
            try:
                stdout, stderr = tool.communicate(timeout=seconds + 60)
            except BaseException:
                os.killpg(tool.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(words, tool.returncode, stdout, stderr)


def pytest_in_guest(*arguments: str, seconds: float, hosts: int = 1, env: tuple[str, ...] = ()) -> str:
    """Runs pytest there, on files of this folder, and gives its report; fails with it where it was not green."""
    command = (sys.executable, "-m", "pytest", "-c", "tests/verbs/pytest.ini", *arguments)
    size = tuple(f"SIZE={value}" for value in (os.environ.get("SIZE"),) if value)
    ended = run_in_guest(*command, seconds=seconds, hosts=hosts, env=("PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", *size, *env))
    assert ended.returncode == 0, f"exit {ended.returncode} in the guest\n{ended.stdout[-8000:]}\n{ended.stderr[-4000:]}"
    return ended.stdout
