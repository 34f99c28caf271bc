"""Tells the window directory what this agent holds: in the background, many keys a message, the last word about a key only.

Nobody waits for it. What is told late, or never, is a window miss at another host. An agent also says, under a key that all of its kind
know (`presence_key`), that it is there: the four of them that said so last are those that one which ends gives its entries to.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Final

import numpy as np

from kvstore.client.agent.directory import DirectoryClient
from kvstore.keys import KEY_BYTES, Keys

log = logging.getLogger(__name__)

LINGER_SECONDS: Final = 0.002  # one message for what happens within it; the next turn is seconds away
WAITING_MAX: Final = 1 << 16  # keys; past it the oldest is not told
KEYS_AT_ONCE: Final = 1 << 12
PRESENCE_SECONDS: Final = 30.0  # between two words of being there; an entry lives 180 s


class Word(Enum):
    """What is said of a key."""

    KEPT = "kept"
    USED = "used"
    GONE = "gone"


def presence_key(layout_digest: bytes) -> bytes:
    """The window key under which agents for one layout say that they are there."""
    return hashlib.blake2b(b"kvstore.agents.v1" + layout_digest, digest_size=KEY_BYTES).digest()


class Teller:
    """Speaks for one agent. One thread, from the first word on; `close()` ends it."""

    def __init__(self, directory: DirectoryClient, address: str, presence: bytes = b"", tick: Callable[[], None] = lambda: None) -> None:
        """`presence`: presence_key; b"": does not say that it is there. `tick`: called whenever it does."""
        self._tick = tick
        self._presence, self._presence_due = presence, 0.0
        self._directory = directory
        self._address = address
        self._changed = threading.Condition()
        self._words: dict[bytes, Word] = {}
        self._busy = self._stopping = False
        self._hurry = 0  # who waits in flush()
        self._thread: threading.Thread | None = None
        if presence:
            self.tell(presence, Word.KEPT)

    def leave(self) -> None:
        """From now on it is not named to those that end."""
        with self._changed:
            presence, self._presence = self._presence, b""
        if presence:
            self.tell(presence, Word.GONE)

    def tell(self, key: bytes, word: Word) -> None:
        """Any thread; never waits for the directory."""
        with self._changed:
            if self._stopping:
                return
            before = self._words.pop(key, None)
            self._words[key] = Word.KEPT if word is Word.USED and before is Word.KEPT else word
            if len(self._words) > WAITING_MAX:
                del self._words[next(iter(self._words))]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-windows", daemon=True)
                self._thread.start()
            elif len(self._words) == 1:
                self._changed.notify_all()

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until all that was told has been sent and answered, or given up. False when time passed first."""
        with self._changed:
            self._hurry += 1
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: self._stopping or not (self._words or self._busy), timeout_seconds)
            self._hurry -= 1
            return done

    def close(self, timeout_seconds: float) -> None:
        """Takes back all: the directory forgets this agent. What had not been told yet never is."""
        with self._changed:
            self._stopping = True
            self._words.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        self._directory.forget(self._address)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                due = self._presence_due - time.monotonic() if self._presence else None
                self._changed.wait_for(lambda: bool(self._words) or self._stopping, due)
                if self._presence and time.monotonic() >= self._presence_due:
                    self._presence_due = time.monotonic() + PRESENCE_SECONDS
                    self._words[self._presence] = Word.KEPT
                    self._tick()
                self._changed.wait_for(lambda: self._hurry or self._stopping or len(self._words) >= KEYS_AT_ONCE, LINGER_SECONDS)
                if self._stopping:
                    return
                words, self._words = self._words, {}
                self._busy = True
            try:
                for word, say in (
                    (Word.GONE, self._directory.forget),
                    (Word.KEPT, self._directory.register),
                    (Word.USED, self._directory.touch),
                ):
                    keys = [key for key, last in words.items() if last is word]
                    for at in range(0, len(keys), KEYS_AT_ONCE):
                        say(self._address, rows_of(keys[at : at + KEYS_AT_ONCE]))
            except Exception:  # a client that is being closed, or a bug: the engine must not feel either
                log.debug("the window directory could not be told", exc_info=True)


def rows_of(keys: list[bytes]) -> Keys:
    """(n, 32)"""
    rows: Keys = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
    return rows
