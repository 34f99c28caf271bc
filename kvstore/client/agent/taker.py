"""What other agents send to an agent process: window entries of one that ends, which it takes in, and handoffs, which wait for a worker."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from kvstore.client.agent.agent import Agent
from kvstore.client.agent.frames import Offer
from kvstore.client.agent.handoff import HandoffOutcome, begin
from kvstore.client.agent.inbox import Arrival, ArrivalState, HandoffInbox
from kvstore.client.agent.moving import BATCH_BYTES, BATCH_SECONDS, NOBODY, NOTE, Moved
from kvstore.client.agent.peers import Peers
from kvstore.wire import Status

WINDOW_INBOX_BYTES: Final = 4 * BATCH_BYTES  # taken from others at once; allocated when the first one comes
LOOK_SECONDS: Final = 0.25
WAITING_MAX: Final = 4096


class Taker:
    """For one agent. `inbox` is what its PeerServer has as `handoffs`; `watch` begins, `close` ends."""

    def __init__(self, owner: bytes, handoff_bytes: int) -> None:
        """`handoff_bytes`: of handoffs that wait for a worker, on their way or whole; 0: none are taken."""
        self.inbox = HandoffInbox(WINDOW_INBOX_BYTES + handoff_bytes, accept=self._accept)
        self.entries = self.refused = 0  # of windows
        self._owner = owner
        self._handoff_bytes = handoff_bytes
        self._windows: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._waiting: deque[bytes] = deque()  # ids of handoffs, the oldest first
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def _accept(self, offer: Offer) -> Status:
        """On a serving thread, under the inbox's lock. It may still find no room: then nothing of this id is ever found."""
        if offer.owner != self._owner:
            return Status.BUSY
        if offer.note == NOTE:
            self._windows.put(offer.id)
            return Status.OK
        if not self._handoff_bytes:
            return Status.BUSY
        if offer.total_bytes > self._handoff_bytes:
            return Status.NO_SPACE
        if len(self._waiting) >= WAITING_MAX:  # of most there was no room after all
            for name in [name for name in self._waiting.copy() if not self.inbox.holds(name)]:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(name)
        if offer.id not in self._waiting:
            self._waiting.append(offer.id)
        return Status.OK

    # --- windows ---

    def watch(self, agent: Agent) -> None:
        self._thread = threading.Thread(target=self._run, args=(agent,), name="kvstore-taker", daemon=True)
        self._thread.start()

    def _run(self, agent: Agent) -> None:
        while (name := self._windows.get()) is not None:
            arrival = self.inbox.take(name, LOOK_SECONDS)
            if arrival is None:
                continue
            if arrival.wait(BATCH_SECONDS) is ArrivalState.COMPLETE:
                for section, _ in arrival.offer.sections:
                    sealed = arrival.section(section)
                    taken = sealed is not None and agent.adopt_window(_key(section), sealed)
                    self.entries += taken
                    self.refused += not taken
            self.inbox.release(arrival)

    def close(self) -> None:
        self._windows.put(None)
        if self._thread is not None:
            self._thread.join(BATCH_SECONDS)

    # --- handoffs ---

    @property
    def waiting(self) -> bool:
        """Some may be here that nobody has taken."""
        return bool(self._waiting)

    def take(self, handoff_id: bytes | None, deadline_seconds: float) -> Arrival | None:
        """The handoff of that id, or the one that came first, when it is whole; the caller's to release or to put back."""
        end = time.monotonic() + deadline_seconds
        arrival = self._next(handoff_id)
        if arrival is not None and arrival.wait(max(0.0, end - time.monotonic())) is ArrivalState.COMPLETE:
            return arrival
        if arrival is not None:
            self.put_back(arrival)
        return None

    def _next(self, handoff_id: bytes | None) -> Arrival | None:
        with self._lock:
            names = [handoff_id] if handoff_id is not None else list(self._waiting)
            for name in names:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(name)
                if (arrival := self.inbox.take(name)) is not None:
                    return arrival
        return None

    def put_back(self, arrival: Arrival) -> None:
        """For another to take; one that is lost is forgotten."""
        if arrival.state in (ArrivalState.RECEIVING, ArrivalState.COMPLETE):
            arrival.taken, arrival.owner = False, ""
            with self._lock:
                self._waiting.appendleft(arrival.id)
        else:
            self.inbox.release(arrival)

    def forward(self, peers: Peers, addresses: Sequence[str], end: float) -> Moved:
        """Gives the agents at `addresses`, the first that takes it, what nobody here has taken, until `end` (monotonic)."""
        moved = Moved()
        while (arrival := self._next(None)) is not None:
            outcome = None
            if arrival.wait(max(0.0, end - time.monotonic())) is ArrivalState.COMPLETE:
                for address in addresses:
                    outcome = _send(peers, address, arrival, end)
                    if outcome is HandoffOutcome.DONE:
                        break
            if outcome is HandoffOutcome.DONE:
                moved.entries, moved.bytes = moved.entries + 1, moved.bytes + arrival.offer.total_bytes
            else:
                moved.left, moved.why = moved.left + 1, outcome.value if outcome is not None else NOBODY
            self.inbox.release(arrival)
        return moved


def _send(peers: Peers, address: str, arrival: Arrival, end: float) -> HandoffOutcome:
    offer = arrival.offer
    left = max(0.0, end - time.monotonic())
    sender = begin(peers, address, offer.sections, handoff_id=offer.id, note=offer.note, deadline_seconds=left)
    if isinstance(sender, HandoffOutcome):
        return sender
    with sender:
        for name, _ in offer.sections:
            data = arrival.section(name)
            if data is None:
                return HandoffOutcome.LOST
            sender.put(name, data)
        return sender.commit(max(0.0, end - time.monotonic()))


def _key(name: str) -> bytes:
    """b"" for what is no key."""
    try:
        return bytes.fromhex(name) if len(name) == 64 else b""
    except ValueError:
        return b""
