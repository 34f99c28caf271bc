"""Single keys from a terminal: unbuffered and unseen while the block runs, everything as it was after it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import termios
from collections.abc import Iterator
from typing import Final

_KEY: Final = re.compile(r"\x1b\[(?:[0-9;]*[A-Za-z~])|\x1bO[A-Z]|.", re.DOTALL)
_NAMES: Final = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home",
    "\x1b": "escape", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace",
}  # fmt: skip


class Keyboard:
    """Of a terminal's file descriptor; None: no keys ever."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def read(self, timeout_seconds: float) -> list[str]:
        """What was pressed, by name or as the character; [] when the time is over. An end of input raises EOFError."""
        ready, _, _ = select.select([] if self._descriptor is None else [self._descriptor], [], [], timeout_seconds)
        if not ready or self._descriptor is None:
            return []
        text = os.read(self._descriptor, 256).decode(errors="replace")
        if not text:
            raise EOFError
        return [_NAMES.get(key, key) for key in _KEY.findall(text)]


@contextlib.contextmanager
def keys_of(descriptor: int) -> Iterator[Keyboard]:
    """Ctrl-C still interrupts; Ctrl-Z does nothing, since it would leave the screen as it is."""
    if not os.isatty(descriptor):
        yield Keyboard(None)
        return
    before = termios.tcgetattr(descriptor)
    changed = termios.tcgetattr(descriptor)
    changed[3] &= ~(termios.ECHO | termios.ICANON)
    changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0
    changed[6][termios.VSUSP] = os.fpathconf(descriptor, "PC_VDISABLE").to_bytes(1, "little")
    try:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, changed)
        yield Keyboard(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)
