"""The window entries of one request, kept by the rules (keeps.py)."""

from __future__ import annotations

from typing import Any, Protocol

from kvstore.client.agent.keeps import decode_drops, prefill_keeps
from kvstore.client.values import Fidelity
from kvstore.keys import Keys


class WindowKeeper(Protocol):
    """What keeps: an Agent, or who speaks for one."""

    @property
    def block_tokens(self) -> int: ...
    @property
    def slots(self) -> int: ...
    def keep_window(self, keys: Keys, tokens: int, entry: Any, *, fidelity: Fidelity = Fidelity.EXACT) -> bool: ...
    def drop_window(self, keys: Keys, tokens: int) -> None: ...


class RequestWindows:
    """Two or three entries of the prompt, the last three of its answer. For one thread."""

    def __init__(self, keeper: WindowKeeper, prompt_tokens: int, missed_tokens: int = 0) -> None:
        """`missed_tokens`: where the hit ended, if no entry was found there; else 0."""
        self._keeper = keeper
        self._prompt_tokens = prompt_tokens
        self._prefill = prefill_keeps(prompt_tokens, missed_tokens, block_tokens=keeper.block_tokens, slots=keeper.slots)

    def wants(self, tokens: int) -> bool:
        """Whether the entry at `tokens`, a multiple that is just being crossed, is to be kept."""
        return tokens in self._prefill or tokens > self._prompt_tokens

    def keep(self, keys: Keys, tokens: int, entry: Any, *, fidelity: Fidelity = Fidelity.EXACT) -> bool:
        """Keeps it, and drops what the answer has left behind. False: not wanted, or no room."""
        if not self.wants(tokens):
            return False
        old = decode_drops(tokens, self._prompt_tokens, block_tokens=self._keeper.block_tokens)
        if old is not None:
            self._keeper.drop_window(keys, old)
        return self._keeper.keep_window(keys, tokens, entry, fidelity=fidelity)
