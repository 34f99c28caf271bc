"""Asking window directories how they are, over their own protocol: for `kvstore status`."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvstore import wire, wire_directory
from kvstore.clustermap import ClusterMap
from kvstore.errors import KvstoreError, UsageError
from kvstore.units import format_bytes
from kvstore.wire_directory import DirectoryStatus

ASKED_AT_ONCE: Final = 32


@dataclass(frozen=True)
class DirectoryReport:
    """What one window directory answered; `error` says why it did not."""

    address: str
    error: str = ""
    status: DirectoryStatus | None = None

    @property
    def up(self) -> bool:
        return self.status is not None

    def data(self) -> dict[str, Any]:
        return {"address": self.address, "error": self.error or None, **(asdict(self.status) if self.status else {})}


def directory_address(text: str) -> str:
    """`--directory`'s argument. Raises UsageError E140."""
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 65536:
        raise UsageError("E140", f'--directory "{text}"', "is not an address", "write HOST:PORT, as in 10.0.0.1:7399")
    return text


def ask_directories(cluster_map: ClusterMap, addresses: Sequence[str], timeout_seconds: float) -> list[DirectoryReport]:
    """One report an address, in order; all are asked at once."""
    if not addresses:
        return []
    with ThreadPoolExecutor(min(ASKED_AT_ONCE, len(addresses)), "kvstore-ask") as pool:
        return list(pool.map(lambda address: _ask(cluster_map, address, timeout_seconds), addresses))


def directories_line(reports: Sequence[DirectoryReport]) -> str:
    """ "2 of 2 directories up   81,204 entries   12 agents   2.6 MB of 1.0 GB"."""
    up = [report.status for report in reports if report.status is not None]
    noun = "directory" if len(reports) == 1 else "directories"
    text = f"{len(up)} of {len(reports)} {noun} up"
    if not up:
        return text
    used, most = sum(each.memory_bytes for each in up), sum(each.memory_max_bytes for each in up)
    entries, agents = sum(each.entries for each in up), max(each.agents for each in up)
    return f"{text}   {entries:,} entries   {agents} agents   {format_bytes(used)} of {format_bytes(most)}"


def _ask(cluster_map: ClusterMap, address: str, timeout_seconds: float) -> DirectoryReport:
    host, _, port = address.rpartition(":")
    hello = wire.Hello(wire.Role.DIRECTORY, cluster_map.tag)
    deadline = time.monotonic() + timeout_seconds
    try:
        with wire.Connection((host.strip("[]"), int(port)), hello, timeout_seconds) as connection:
            connection.socket.settimeout(max(0.01, deadline - time.monotonic()))
            return DirectoryReport(address, status=wire_directory.decode_status(connection.ask(wire.Verb.STATUS, b"").body))
    except TimeoutError:
        return DirectoryReport(address, f"no answer in {timeout_seconds:g} s")
    except (OSError, EOFError) as error:
        return DirectoryReport(address, (getattr(error, "strerror", None) or str(error)).lower())
    except KvstoreError as error:
        return DirectoryReport(address, error.cause or error.what)
