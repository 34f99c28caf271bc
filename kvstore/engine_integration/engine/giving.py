"""A request on its way to another process while its prompt is still being read.

    begin      an I/O thread: offers it; the other side may refuse
    put_runs   the engine's thread, after each block: global rows that are whole now; what comes before the offer is answered waits for it
    finish     an I/O thread, after the first token: the rest, and the commit
    withdraw   any thread, at any time: the other side forgets it

Whatever is given is a copy: the request's pages are its own. Nothing here waits longer than the offer and `deadline_seconds` of the commit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvstore.client.agent.handoff import HandoffOutcome
from kvstore.engine_integration.model.handover import export_run, runs, sizes
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.state import Bytes, RequestState

log = logging.getLogger(__name__)


class Sender(Protocol):
    """A handoff that was taken: kvstore/client/agent/handoff.py's HandoffSender."""

    @property
    def outcome(self) -> HandoffOutcome | None: ...
    @property
    def sent_bytes(self) -> int: ...
    def put(self, name: str, data: memoryview) -> None: ...
    def commit(self, deadline_seconds: float) -> HandoffOutcome: ...
    def abort(self) -> None: ...


Give = Callable[[Sequence[tuple[str, int]]], Sender | HandoffOutcome]
"""Offers sections (name, bytes) to somebody; on an I/O thread. Why not, where nobody takes them."""


class Outgoing:
    """One request. `outcome` is known as soon as nobody takes it any more."""

    def __init__(self, give: Give, model: Model, prompt_tokens: int, sampler_bytes: int) -> None:
        self.sampler_bytes = sampler_bytes  # as offered
        self._give = give
        self._block = model.config.block
        self._sections = sizes(model, prompt_tokens, prompt_tokens + 1, sampler_bytes)
        self._left = runs(model.config, prompt_tokens)
        self._sender: Sender | None = None
        self._refused: HandoffOutcome | None = None
        self._waiting: list[tuple[str, Bytes]] = []  # until the offer is answered
        self._answered = threading.Event()
        self._withdrawn = False
        self._lock = threading.Lock()

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self._sections)

    @property
    def sent_bytes(self) -> int:
        return self._sender.sent_bytes if self._sender is not None else 0

    @property
    def outcome(self) -> HandoffOutcome | None:
        """None: it may still be taken."""
        return self._sender.outcome if self._sender is not None else self._refused

    def begin(self) -> None:
        try:
            found = self._give(self._sections)
        except Exception as error:  # whatever it is: the request can still be answered here
            log.debug("a handoff could not be offered", exc_info=error)
            found = HandoffOutcome.UNREACHABLE
        with self._lock:
            if isinstance(found, HandoffOutcome):
                self._refused = found
            else:
                self._sender = found
                self._put(self._waiting)
            self._waiting = []
            self._answered.set()
            withdrawn = self._withdrawn
        if withdrawn and self._sender is not None:
            self._sender.abort()

    def put_runs(self, state: RequestState) -> None:
        """What is whole by now."""
        while self._left and not state.missing and state.length >= self._left[0][2] * self._block and self.outcome is None:
            name, first, end = self._left.pop(0)
            ready = [(name, export_run(state, first, end))]
            with self._lock:
                if self._answered.is_set():
                    self._put(ready)
                elif not self._withdrawn:
                    self._waiting += ready

    def finish(self, rest: Mapping[str, Bytes], deadline_seconds: float) -> HandoffOutcome:
        """`rest`: every section but those of put_runs."""
        end = time.monotonic() + deadline_seconds
        if not self._answered.wait(deadline_seconds):
            self.withdraw()
            return HandoffOutcome.LATE
        if self._withdrawn:
            return HandoffOutcome.ABORTED
        if self._sender is None:
            return self._refused or HandoffOutcome.UNREACHABLE
        self._put(list(rest.items()))
        return self._sender.commit(max(0.0, end - time.monotonic()))

    def withdraw(self) -> None:
        with self._lock:
            self._withdrawn, self._waiting = True, []
            self._answered.set()  # nobody waits for that any more
            sender = self._sender
        if sender is not None:
            sender.abort()

    def _put(self, ready: Sequence[tuple[str, Bytes]]) -> None:
        if self._sender is not None:
            for name, data in ready:
                self._sender.put(name, data.data)
