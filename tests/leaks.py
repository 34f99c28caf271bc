"""Whether doing a thing again and again leaves something behind: descriptors, threads, mappings."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

Counts = tuple[int, ...]
_DEADLINE_SECONDS: Final = 30.0
_STILL_SECONDS: Final = 0.15


def held(pid: int | str = "self") -> Counts:
    """Descriptors and threads of a process."""
    of = Path(f"/proc/{pid}")
    return len(list((of / "fd").iterdir())), len(list((of / "task").iterdir()))


def at_rest(read: Callable[[], Counts] = held) -> Counts:
    """What `read` gives when it has given the same for a while: what ends late does not count as held."""
    deadline, pause = time.monotonic() + _DEADLINE_SECONDS, threading.Event()
    counts, since = read(), time.monotonic()
    while (now := time.monotonic()) < min(since + _STILL_SECONDS, deadline):
        pause.wait(0.01)
        if (again := read()) != counts:
            counts, since = again, now
    return counts


def until_no_more(before: Counts, read: Callable[[], Counts] = held, spare: int = 0) -> None:
    """Waits until each count is at most what it was. `spare` is for what pools start when they first need it: a few, and fewer than the
    repetitions in between, so that a leak of one each time still shows."""
    deadline, pause = time.monotonic() + _DEADLINE_SECONDS, threading.Event()
    while any(now > then + spare for now, then in zip(read(), before, strict=True)):
        assert time.monotonic() < deadline, f"held at first {before}, and {_DEADLINE_SECONDS:g} s after the last {read()}"
        pause.wait(0.01)
