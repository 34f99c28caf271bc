"""What other agents send to an agent process: window entries of one that ends, which it takes in, and handoffs, which wait for a worker.

Only what is whole is looked at: one that is slow to come, or never does, holds up no other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

from kvstore.client.agent.agent import Agent
from kvstore.client.agent.frames import Offer
from kvstore.client.agent.handoff import CONNECT_SECONDS, HandoffOutcome, begin
from kvstore.client.agent.inbox import Arrival, HandoffInbox
from kvstore.client.agent.moving import AGAIN_SECONDS, BATCH_BYTES, BATCH_SECONDS, NOBODY, NOTE, Moved
from kvstore.client.agent.peers import Peers
from kvstore.wire import Status

WINDOW_INBOX_BYTES: Final = 4 * BATCH_BYTES  # taken from others at once; allocated when the first one comes
LOOK_SECONDS: Final = 0.25
PATIENT_SECONDS: Final = 10.0  # of a drain: an agent that is not there may be starting
LAST_SECONDS: Final = 5.0  # of a drain, or a quarter of a short one: nothing more is received, and what is here goes on


class Taker:
    """For one agent. `inbox` is what its PeerServer has as `handoffs`; `watch` begins, `close` ends."""

    def __init__(self, owner: bytes, handoff_bytes: int, one_bytes: int) -> None:
        """`handoff_bytes`: of handoffs that wait for a worker, on their way or whole; 0: none are taken. `one_bytes`: of the largest that a
        worker can take."""
        self.inbox = HandoffInbox(WINDOW_INBOX_BYTES + handoff_bytes, accept=self._accept)
        self.entries = self.refused = 0  # of windows
        self._owner = owner
        self._handoff_bytes, self._one_bytes = handoff_bytes, min(handoff_bytes, one_bytes)
        self._closing = False
        self._thread: threading.Thread | None = None

    def _accept(self, offer: Offer) -> Status:
        """On a serving thread."""
        if offer.owner != self._owner:
            return Status.BUSY
        if not is_request(offer):
            return Status.OK
        if not self._handoff_bytes:
            return Status.BUSY
        return Status.OK if offer.total_bytes <= self._one_bytes else Status.NO_SPACE

    # --- windows ---

    def watch(self, agent: Agent) -> None:
        self._thread = threading.Thread(target=self._run, args=(agent,), name="kvstore-taker", daemon=True)
        self._thread.start()

    def _run(self, agent: Agent) -> None:
        while not self._closing:
            self._adopt(agent)

    def _adopt(self, agent: Agent) -> None:
        """A call of its own: between two of them nothing here holds on to an arrival's memory."""
        arrival = self.inbox.take(None, LOOK_SECONDS, whole=True, wanted=lambda offer: not is_request(offer))
        if arrival is None:
            return
        for section, _ in arrival.offer.sections:
            sealed = arrival.section(section)
            taken = sealed is not None and agent.adopt_window(_key(section), sealed)
            self.entries += taken
            self.refused += not taken
        self.inbox.release(arrival)

    def close(self) -> None:
        self._closing = True
        if self._thread is not None:
            self._thread.join(BATCH_SECONDS)

    # --- handoffs ---

    @property
    def waiting(self) -> bool:
        """Some are here, or on their way, that nobody has taken."""
        return any(is_request(offer) for offer in self.inbox.offers(taken=False))

    def take(self, handoff_id: bytes | None, deadline_seconds: float) -> Arrival | None:
        """The handoff of that id, or of those that are whole the one that was offered first; the caller's to release or to put back."""
        return self.inbox.take(handoff_id, deadline_seconds, whole=True, wanted=is_request)

    def forward(self, peers: Peers, addresses: Sequence[str], end: float) -> Moved:
        """Gives the agents at `addresses`, the first that takes it, what nobody here has taken, until `end` (monotonic). What is still on
        its way shortly before that, or when nobody is left to take it, goes on where it comes from."""
        moved, places, began = Moved(), list(addresses), time.monotonic()
        last, patient = end - min(LAST_SECONDS, (end - began) / 4), min(began + PATIENT_SECONDS, end)
        while self.waiting:
            arrival = self.take(None, max(0.0, min(LOOK_SECONDS, last - time.monotonic())) if places else 0.0)
            if arrival is not None:
                self._forward(peers, places, arrival, patient, end, moved)
            elif not places or time.monotonic() >= last:
                self.inbox.end_receiving(is_request)
        return moved

    def _forward(self, peers: Peers, places: list[str], arrival: Arrival, patient: float, end: float, moved: Moved) -> None:
        outcome = _to_first(peers, places, arrival, patient, end)
        if outcome is HandoffOutcome.DONE:
            moved.entries, moved.bytes = moved.entries + 1, moved.bytes + arrival.offer.total_bytes
        else:
            moved.left, moved.why = moved.left + 1, outcome.value if outcome is not None else moved.why or NOBODY
        self.inbox.release(arrival)


def is_request(offer: Offer) -> bool:
    """For a worker, not for the agent itself."""
    return offer.note != NOTE


def _to_first(peers: Peers, places: list[str], arrival: Arrival, patient: float, end: float) -> HandoffOutcome | None:
    """To the first of `places` that takes it, each asked within its share of the time: again until `end` where one is busy, until `patient`
    where none is there (it may be starting). Who is not there is asked last from then on."""
    outcome, asked = None, list(places)
    while asked:
        busy, this_time = False, list(asked)
        for number, place in enumerate(this_time):
            now = time.monotonic()
            outcome = _send(peers, place, arrival, now + min(BATCH_SECONDS, (end - now) / (len(this_time) - number)))
            if outcome is HandoffOutcome.DONE:
                return outcome
            busy |= outcome is HandoffOutcome.BUSY
            if outcome in (HandoffOutcome.TOO_LARGE, HandoffOutcome.REFUSED):
                asked.remove(place)
            elif outcome is not HandoffOutcome.BUSY:
                places.append(places.pop(places.index(place)))
        if time.monotonic() + AGAIN_SECONDS >= (end if busy else patient):
            break
        if asked:
            threading.Event().wait(AGAIN_SECONDS)
    return outcome


def _send(peers: Peers, address: str, arrival: Arrival, end: float) -> HandoffOutcome:
    offer = arrival.offer
    left = min(CONNECT_SECONDS, max(0.0, end - time.monotonic()))
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
