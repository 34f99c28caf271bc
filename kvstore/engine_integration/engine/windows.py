"""The cache of one host as the engine sees it: a Client for blocks, and window entries in this process's RAM."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final

from kvstore.client.client import Client
from kvstore.client.load import Load
from kvstore.client.store import StoreFuture
from kvstore.client.ticket import Ticket
from kvstore.client.values import Accept, Fidelity, PlaneReady
from kvstore.engine_integration.model.config import ModelConfig
from kvstore.keys import Keys

ENTRIES_MAX: Final = 4096
LIFETIME_SECONDS: Final = 180.0


@dataclass(frozen=True, slots=True)
class Window:
    """An entry at hand: it covers [tokens - slots, tokens)."""

    tokens: int
    entry: Any  # a contiguous buffer
    fidelity: Fidelity


class HostCache:
    """Of one engine process. Safe to share between threads."""

    def __init__(self, client: Client, config: ModelConfig) -> None:
        self.client, self._config = client, config
        self._entries: OrderedDict[tuple[bytes, bool], tuple[float, Any, Fidelity]] = OrderedDict()  # last used last
        self._lock = threading.Lock()

    def lookup(self, keys: Keys, *, input_tokens: int, accept: Accept, retention_class: str, deadline_seconds: float) -> Ticket:
        def at_hand(blocks: int) -> bool:
            return blocks * self._config.block in self._held(keys, blocks * self._config.block, accept, 1)

        return self.client.lookup(
            keys, input_tokens=input_tokens, accept=accept, retention_class=retention_class, deadline_seconds=deadline_seconds,
            recompute_tokens=self._config.slots, window=at_hand,
        )  # fmt: skip

    def windows_at(self, keys: Keys, end: int, ticket: Ticket | None, accept: Accept) -> set[int]:
        """Token counts, `end` at most and no further back than exact replay goes, whose entry may be had."""
        return self._held(keys, end, accept, self._config.encoder_layers + 1)

    def _held(self, keys: Keys, end: int, accept: Accept, blocks: int) -> set[int]:
        size = self._config.block
        with self._lock:
            places = range(end, max(0, end - blocks * size), -size)
            return {at for at in places if any(name in self._entries for name in self._names(keys, at, accept))}

    def window(self, keys: Keys, tokens: int, ticket: Ticket | None, accept: Accept) -> Window | None:
        with self._lock:
            for name in self._names(keys, tokens, accept):
                used, entry, fidelity = self._entries.get(name, (0.0, None, Fidelity.EXACT))
                if entry is not None and time.monotonic() - used <= LIFETIME_SECONDS and accept.takes(fidelity.kind, fidelity.depth):
                    self._entries[name] = (time.monotonic(), entry, fidelity)
                    self._entries.move_to_end(name)
                    return Window(tokens, entry, fidelity)
        return None

    def keep_window(self, keys: Keys, tokens: int, entry: Any, *, fidelity: Fidelity) -> bool:
        with self._lock:
            self._entries[keys[tokens // self._config.block - 1].tobytes(), fidelity.depth > 0] = (time.monotonic(), entry, fidelity)
            while len(self._entries) > ENTRIES_MAX:
                self._entries.popitem(last=False)
        return True

    def drop_window(self, keys: Keys, tokens: int) -> None:
        with self._lock:
            for name in self._names(keys, tokens, Accept.ANY):
                self._entries.pop(name, None)

    def _names(self, keys: Keys, tokens: int, accept: Accept) -> list[tuple[bytes, bool]]:
        key = keys[tokens // self._config.block - 1].tobytes()
        return [(key, False), *([(key, True)] if accept.depth_max > 0 else [])]

    def planes_with(
        self, began: Callable[[Load], None], ticket: Ticket, destination: Any, *, deadline_seconds: float, blocks: range
    ) -> Generator[PlaneReady, None, None]:
        return self.client.planes_with(began, ticket, destination, deadline_seconds=deadline_seconds, blocks=blocks)

    def store(self, keys: Keys, blocks: Any, *, first_block: int, retention_class: str, fidelity: Fidelity) -> StoreFuture:
        return self.client.store(keys, blocks, first_block=first_block, retention_class=retention_class, fidelity=fidelity)
