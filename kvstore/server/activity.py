"""The log line of every 10 s: what a daemon did since the last one. Nothing when nothing happened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.units import format_bytes


class Activity:
    """Differences of Server.stats() between two looks."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def line(self, server: Mapping[str, Any], used_bytes: int, capacity_bytes: int, seconds: float) -> str:
        """One line, "" if no request was answered since the last call."""
        now = {op: sum(by_status.values()) for op, by_status in server["requests"].items()}
        now |= {key: int(server[key]) for key in ("bytes_in", "bytes_out", "connections_cut", "frames_malformed", "faults")}
        now["busy"] = sum(by_status.get(2, 0) for by_status in server["requests"].values())
        did = {key: value - self._last.get(key, 0) for key, value in now.items()}
        self._last = now
        if not any(did[op] for op in server["requests"]):
            return ""
        parts = [
            f"out {format_bytes(did['bytes_out'] / seconds)}/s",
            f"in {format_bytes(did['bytes_in'] / seconds)}/s",
            *(f"{op} {did[op] / seconds:.0f}/s" for op in ("discover", "promise", "read", "write") if did[op]),
            f"queue {server['inflight']}",
            f"connections {server['connections']}",
            f"used {100 * used_bytes / max(1, capacity_bytes):.0f} %",
            *(f"{name} {did[key]}" for name, key in _COMPLAINTS if did[key]),
        ]
        return ", ".join(parts)


_COMPLAINTS = (("busy", "busy"), ("cut", "connections_cut"), ("malformed", "frames_malformed"), ("faults", "faults"))
