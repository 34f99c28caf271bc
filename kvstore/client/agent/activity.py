"""The log line of every 10 s of an agent process, nothing when nothing happened: load, save, hit, queue, memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvstore.units import format_bytes

LINE_SECONDS: Final = 10.0
_COUNTED: Final = ("load_bytes", "delivered_tokens", "bytes_stored", "lookups", "lookup_tokens", "hit_tokens", "stores", "loads_short")
_DROPPED: Final = ("bytes_failed", "bytes_busy", "bytes_dropped", "bytes_unasked")


class AgentActivity:
    """Differences of Client.stats() between two looks, of all clients together."""

    def __init__(self) -> None:
        self._last: dict[Any, dict[str, int]] = {}

    def line(self, clients: Mapping[Any, Mapping[str, int | float]], pinned_bytes: int, memory_bytes: int, seconds: float) -> str:
        """One line, "" if nothing was looked up, loaded or stored since the last call. `clients`: stats by whose they are."""
        did = dict.fromkeys((*_COUNTED, *_DROPPED), 0)
        now = {whose: {name: int(stats[name]) for name in did} for whose, stats in clients.items()}
        for whose, counts in now.items():  # one that has come since is counted from 0, one that has gone no more
            before = self._last.get(whose, {})
            for name, count in counts.items():
                did[name] += count - before.get(name, 0)
        self._last = now
        if not any(did[name] for name in _COUNTED):
            return ""
        dropped = sum(did[name] for name in _DROPPED)
        parts = [
            f"load {format_bytes(did['load_bytes'] / seconds)}/s from nodes",
            *([f"delivered {did['delivered_tokens'] / seconds:,.0f} tokens/s"] if did["delivered_tokens"] else []),
            f"save {format_bytes(did['bytes_stored'] / seconds)}/s",
            *([f"lookup {did['lookups'] / seconds:.1f}/s"] if did["lookups"] else []),
            *([f"hit {100 * did['hit_tokens'] / did['lookup_tokens']:.0f} %"] if did["lookup_tokens"] else []),
            f"queue {int(sum(each['stores_open'] for each in clients.values()))}",
            f"pinned {100 * pinned_bytes / max(1, memory_bytes):.0f} %",
            *([f"short loads {did['loads_short']}"] if did["loads_short"] else []),
            *([f"not saved {format_bytes(dropped)}"] if dropped else []),
        ]
        return ", ".join(parts)
