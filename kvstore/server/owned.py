"""Whose a data directory is: its file `node` names cluster and node.

Served under another name, every block in it would be a miss: places are computed from a node's id. The file is written at the first start
and never changed; a directory without it belongs to whoever starts there first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError, DirectoryInUse

FILE_NAME: Final = "node"
_HEAD: Final = "kvstore node 1"


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """DIR/LOCK, as a store holds it (kernels/dirstate.hpp), while the block runs. Raises DirectoryInUse, or the OSError of opening it."""
    with (directory / "LOCK").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            pid = lock.read().strip()
            raise DirectoryInUse(int(pid) if pid.isdigit() else 0, str(directory)) from None
        yield


def check(directory: Path, cluster_id: str, node_id: str) -> None:
    """Raises ConfigError where the directory is another node's, or another cluster's."""
    owner = _read(directory)
    if owner is not None and owner != (cluster_id, node_id):
        raise ConfigError(
            "E125",
            f"data directory {directory} belongs to {owner[1]} of cluster {owner[0]}, not to {node_id} of {cluster_id}",
            fix=f"name this node's own with --data, or remove {directory / FILE_NAME} to start over with what is in it lost",
        )


def claim(directory: Path, cluster_id: str, node_id: str) -> None:
    """Notes the owner where none is noted. Only for who holds the directory."""
    if _read(directory) is not None:
        return
    fresh = directory / f"{FILE_NAME}.new"
    with fresh.open("w", encoding="utf-8") as file:
        file.write(f"{_HEAD}\ncluster {cluster_id}\nnode {node_id}\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(directory / FILE_NAME)


def _read(directory: Path) -> tuple[str, str] | None:
    """Cluster and node; None where the file is not there or is none of ours."""
    try:
        lines = (directory / FILE_NAME).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    if len(lines) != 3 or lines[0] != _HEAD or not lines[1].startswith("cluster ") or not lines[2].startswith("node "):
        return None
    return lines[1].removeprefix("cluster "), lines[2].removeprefix("node ")
