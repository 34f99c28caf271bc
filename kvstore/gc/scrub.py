"""The scrub of one node: reads records that nobody asks for, so many bytes a second, so that rot is found while it can be decoded around.

One thread, behind those that read. The store looks at records in the order of its index: the next is always the one that was looked at
longest ago. What is bad is dropped there as after a reader's report. DIR/scrub remembers over a restart, text, a line each:

    after 00ab...              key of the last record looked at, hex; "-": a pass begins
    began 1764460800           when this pass began, unix seconds
    ended 1764461880           when the last whole pass ended; 0: none has
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

FILE: Final = "scrub"
STEP_SECONDS: Final = 1.0  # bytes of so long are looked at in one go, one record at least
STEP_BYTES_MAX: Final = 32 << 20  # a stop waits for one step
PASS_SECONDS_MIN: Final = 3600.0  # a small store is not read over and over
SAVE_SECONDS: Final = 60.0  # a kill costs so much of a pass
_NICE: Final = 12  # as kernels/priority.hpp
log = logging.getLogger(__name__)


class ScrubbableStore(Protocol):
    """What the scrub needs of _native.Store."""

    def wait_started(self, timeout_seconds: float) -> bool: ...
    def scrub(self, after: bytes, bytes_max: int) -> tuple[bytes, int, int]: ...


class Scrubber:
    """`ended`: when the last whole pass ended, unix seconds; 0: none has. Read by other threads."""

    def __init__(self, store: ScrubbableStore, directory: Path, bytes_per_second: int, wall_clock: Callable[[], float] = time.time) -> None:
        """A file that is damaged or cannot be written costs the place in the pass alone."""
        self._store = store
        self._path = directory / FILE
        self._bytes_per_second = bytes_per_second
        self._wall_clock = wall_clock
        self._after, self._began, self.ended = b"", 0.0, 0.0
        with contextlib.suppress(OSError, ValueError, KeyError):
            lines = dict(line.split() for line in self._path.read_text().splitlines())
            after = b"" if lines["after"] == "-" else bytes.fromhex(lines["after"])
            self._after, self._began, self.ended = after, float(lines["began"]), float(lines["ended"])
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="scrub", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; what is being looked at is finished first."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._save()

    def step(self) -> float:
        """Looks at a second's worth or less; seconds until the next step is due."""
        now = self._wall_clock()
        if not self._after:
            if self._began <= now < self._began + PASS_SECONDS_MIN:
                return self._began + PASS_SECONDS_MIN - now
            self._began = now
        step_bytes = min(int(self._bytes_per_second * STEP_SECONDS), STEP_BYTES_MAX)
        self._after, looked_bytes, _ = self._store.scrub(self._after, step_bytes)
        if not self._after:
            self.ended = self._wall_clock()
        return looked_bytes / self._bytes_per_second or STEP_SECONDS

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while not self._stopping.is_set() and not self._store.wait_started(1.0):
            pass
        saved = time.monotonic()
        while not self._stopping.is_set():
            try:
                pause = self.step()
            except Exception:  # a place that no store gave, or no memory: from the first record on
                log.exception("the scrub failed; it begins again")
                self._after, pause = b"", PASS_SECONDS_MIN
            if not self._after or time.monotonic() - saved >= SAVE_SECONDS:
                saved = time.monotonic()
                self._save()
            self._stopping.wait(pause)

    def _save(self) -> None:
        fresh = self._path.with_name(f"{FILE}.new")
        with contextlib.suppress(OSError):
            fresh.write_text(f"after {self._after.hex() or '-'}\nbegan {self._began:.0f}\nended {self.ended:.0f}\n")
            fresh.replace(self._path)
