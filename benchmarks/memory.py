"""A memory limit on running processes, by a control group of its own: page cache that a process reads counts against it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


def _root_and_limit_name() -> tuple[Path, str] | None:
    """Where groups are made and what their limit is called; None where this machine lets us make none."""
    if (V1 / "memory.limit_in_bytes").exists() and os.access(V1, os.W_OK):
        return V1, "memory.limit_in_bytes"
    controllers = V2 / "cgroup.subtree_control"
    if controllers.exists() and "memory" in controllers.read_text() and os.access(V2, os.W_OK):
        return V2, "memory.max"
    return None


def can_limit() -> bool:
    return _root_and_limit_name() is not None


@contextlib.contextmanager
def memory_limit(pid: int, limit_bytes: int) -> Iterator[None]:
    """Puts a process into a group of its own with this limit; afterwards back to where groups begin. Needs root."""
    found = _root_and_limit_name()
    if found is None:
        raise RuntimeError("no memory control group to be had here")
    root, limit_name = found
    group = root / f"kvstore-bench-{pid}"
    group.mkdir()
    try:
        (group / limit_name).write_text(str(limit_bytes))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            (root / "cgroup.procs").write_text(str(pid))
        group.rmdir()
