"""The log line of every 10 s of an agent process, nothing when nothing happened: load, save, hit, queue, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from kvstore.units import format_bytes

LINE_SECONDS: Final = 10.0
_COUNTED: Final = ("load_bytes", "bytes_stored", "lookups", "lookup_tokens", "hit_tokens", "loads", "stores", "loads_short")
_DROPPED: Final = ("bytes_failed", "bytes_dropped", "bytes_unasked")


class AgentActivity:
    """Differences of Client.stats(), of all kinds of block together, between two looks."""

    def __init__(self) -> None:
        self._last: Counter[str] = Counter()

    def line(self, clients: Sequence[Mapping[str, int | float]], pinned_bytes: int, quota_bytes: int, seconds: float) -> str:
        """One line, "" if nothing was looked up, loaded or stored since the last call."""
        now = Counter({name: int(sum(each[name] for each in clients)) for name in (*_COUNTED, *_DROPPED)})
        did = {name: now[name] - self._last[name] for name in now}
        self._last = now
        if not any(did[name] for name in _COUNTED):
            return ""
        dropped = sum(did[name] for name in _DROPPED)
        parts = [
            f"load {format_bytes(did['load_bytes'] / seconds)}/s",
            f"save {format_bytes(did['bytes_stored'] / seconds)}/s",
            *([f"lookup {did['lookups'] / seconds:.1f}/s"] if did["lookups"] else []),
            *([f"hit {100 * did['hit_tokens'] / did['lookup_tokens']:.0f} %"] if did["lookup_tokens"] else []),
            f"queue {int(sum(each['stores_open'] for each in clients))}",
            f"pinned {100 * pinned_bytes / max(1, quota_bytes):.0f} %",
            *([f"short loads {did['loads_short']}"] if did["loads_short"] else []),
            *([f"not saved {format_bytes(dropped)}"] if dropped else []),
        ]
        return ", ".join(parts)
