"""What was counted in the last five minutes, in parts of one look each."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from kvstore.cluster_view import merged
from kvstore.live.counts import Counts

WINDOW_SECONDS: Final = 300.0
# What is kept of the nodes.
_KEPT_FAMILIES: Final = ("kvstore_node_requests_total", "kvstore_node_transfer_bytes_total", "kvstore_evicted_bytes_total")


@dataclass(frozen=True, slots=True)
class _Part:
    end: float
    seconds: float
    nodes: dict[str, float]
    clients: dict[str, float]
    of_each: dict[str, float]


class Sliding:
    """Samples that were added, of all nodes, of all clients, and `of_each` directory and agent (kvstore/live/window_rows.py)."""

    def __init__(self) -> None:
        self._parts: deque[_Part] = deque()

    def add(
        self, now: float, seconds: float, nodes: Mapping[str, float], clients: Mapping[str, float], of_each: Mapping[str, float]
    ) -> None:
        """`seconds` 0: a first look, which knows of no time."""
        kept = {key: value for key, value in nodes.items() if value and key.startswith(_KEPT_FAMILIES)}
        if seconds:
            self._parts.append(_Part(now, seconds, kept, {key: value for key, value in clients.items() if value}, dict(of_each)))
        while self._parts and now - self._parts[0].end > WINDOW_SECONDS:
            self._parts.popleft()

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self._parts)

    def counts(self, part: Literal["nodes", "clients", "of_each"]) -> Counts:
        return Counts(merged([getattr(each, part) for each in self._parts]))
