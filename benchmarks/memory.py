"""A memory limit for processes that are started under it, by a control group: what page cache they read counts against it, too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A control group with a limit. Processes started inside `joined()` stay in it; `close()` once they have ended. Needs root."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        self._root, limit_name = _root_and_limit_name()
        self._group = self._root / name
        self._group.mkdir()
        (self._group / limit_name).write_text(str(limit_bytes))

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """This process is a member meanwhile, so that its children are born as members."""
        before = _group_of_this_process(self._root)
        (self._group / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (before / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        self._group.rmdir()


def can_limit() -> bool:
    """Whether this machine lets us make such a group."""
    try:
        _root_and_limit_name()
    except RuntimeError:
        return False
    return True


def _root_and_limit_name() -> tuple[Path, str]:
    if (V1 / "memory.limit_in_bytes").exists() and os.access(V1, os.W_OK):
        return V1, "memory.limit_in_bytes"
    controllers = V2 / "cgroup.subtree_control"
    if controllers.exists() and "memory" in controllers.read_text() and os.access(V2, os.W_OK):
        return V2, "memory.max"
    raise RuntimeError("no memory control group to be had here")


def _group_of_this_process(root: Path) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") or (number == "0" and root == V2):
            return root / path.lstrip("/")
    return root
