"""Handoffs on the side that takes them: memory under a cap, filled part by part, handed on section by section.

    offer     room is taken, or the answer says why not          owned by the sender's connection: with it all is given back
    parts     checked one by one; a section is there when its last part is
    commit    everything is there, and `agree`, who will take it, says yes: owned by whoever took the arrival, or by the inbox, which
              forgets it after `keep_seconds`
    release   or the end of its owner (`free_owner`)

A place has one owner: a part that is being received or is here is never written again. Memory is used again when nothing points into it any
more, so a view that outlives its release keeps its bytes (and its room).
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from array import array
from collections import Counter, deque
from collections.abc import Callable
from enum import Enum
from itertools import accumulate, islice
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.client.agent import frames
from kvstore.client.agent.frames import Offer
from kvstore.errors import MisuseError
from kvstore.wire import Status

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
KEEP_SECONDS: Final = 60.0
SILENT_SECONDS: Final = 60.0
ARRIVALS_MAX: Final = 1024
_ROUND_BYTES: Final = 64 << 10  # lengths that differ by less share a buffer later
_EMPTY, _BUSY, _DONE = 0, 1, 2  # a part


class ArrivalState(Enum):
    RECEIVING = "receiving"
    COMPLETE = "complete"  # every byte is here and checked
    LOST = "lost"  # the sender died, gave it up, or was silent for too long
    RELEASED = "released"


class Arrival:
    """One handoff as it comes in. Safe to share between threads."""

    def __init__(self, offer: Offer, memory: Bytes, link: object, now: float) -> None:
        self.offer = offer
        self.state = ArrivalState.RECEIVING
        self.owner = ""  # who took it; "" nobody yet
        self.taken = False
        self.changed = threading.Condition()
        self._link: object | None = link
        self._memory: Bytes | None = memory
        self._heard = now
        self._first = list(accumulate((size for _, size in offer.sections), initial=0))
        self._parts = [bytearray(offer.parts(i)) for i in range(len(offer.sections))]
        self._sums = [array("Q", bytes(8 * len(parts))) for parts in self._parts]  # a handoff may have millions
        self._missing = [len(parts) for parts in self._parts]
        self._numbers = {name: i for i, (name, _) in enumerate(offer.sections)}

    @property
    def id(self) -> bytes:
        return self.offer.id

    def section(self, name: str, deadline_seconds: float = 0.0) -> memoryview | None:
        """The section's bytes, read-only, as soon as all of them are here and checked; None at the deadline, or when it will not come.

        Raises MisuseError E579 for a name that the offer does not have.
        """
        if name not in self._numbers:
            raise MisuseError("E579", f"section {name!r}", "is not in this handoff", f"it has {', '.join(self._numbers)}")
        number = self._numbers[name]
        with self.changed:
            self.changed.wait_for(lambda: not self._missing[number] or self._over(), deadline_seconds)
            if self._missing[number] or self._memory is None:
                return None
            return self._view(number, 0, self.offer.sections[number][1]).toreadonly()

    def wait(self, deadline_seconds: float) -> ArrivalState:
        """COMPLETE, LOST or RELEASED; RECEIVING at the deadline."""
        with self.changed:
            self.changed.wait_for(lambda: self.state is not ArrivalState.RECEIVING, deadline_seconds)
            return self.state

    def _over(self) -> bool:
        return self.state in (ArrivalState.LOST, ArrivalState.RELEASED)

    def _view(self, section: int, first: int, end: int) -> memoryview:
        assert self._memory is not None
        at = self._first[section]
        return self._memory.data[at + first : at + end]

    def _end(self, state: ArrivalState, only: ArrivalState | None = None) -> bool:
        """Lets go of the memory; views that others have keep theirs. False: it is not in the state `only`, or somebody has taken it."""
        with self.changed:
            if only is not None and (self.state is not only or (self.taken and only is ArrivalState.COMPLETE)):
                return False
            self.state, self._memory, self._link = state, None, None
            self.changed.notify_all()
            return True

    # --- of the inbox ---

    def _take(self, owner: str, whole: bool) -> bool:
        with self.changed:
            if self.taken or self._over() or (whole and self.state is not ArrivalState.COMPLETE):
                return False
            self.taken, self.owner = True, owner
            return True

    def _place(self, section: int, part: int, data_bytes: int, now: float) -> memoryview | Status:
        with self.changed:
            if self._memory is None or self.state is not ArrivalState.RECEIVING:
                return Status.NOT_FOUND
            if section >= len(self._parts) or part >= len(self._parts[section]):
                return Status.BAD_REQUEST
            first, end = self.offer.part_range(section, part)
            if end - first != data_bytes:
                return Status.BAD_REQUEST
            if self._parts[section][part] != _EMPTY:
                return Status.EXISTS
            self._parts[section][part] = _BUSY
            self._heard = now
            return self._view(section, first, end)

    def _placed(self, section: int, part: int, check: int, now: float) -> Status:
        memory = self._memory
        if memory is None:
            return Status.NOT_FOUND
        first, end = self.offer.part_range(section, part)
        at = self._first[section]
        fine = frames.part_sum(self.offer.id, section, part, memory.data[at + first : at + end]) == check
        with self.changed:
            if self.state is not ArrivalState.RECEIVING:
                return Status.NOT_FOUND
            self._parts[section][part] = _DONE if fine else _EMPTY
            self._heard = now
            if fine:
                self._sums[section][part] = check
                self._missing[section] -= 1
                if not self._missing[section]:
                    self.changed.notify_all()
        return Status.OK if fine else Status.CORRUPT

    def _unplaced(self, section: int, part: int) -> None:
        with self.changed:
            if self._parts[section][part] == _BUSY:
                self._parts[section][part] = _EMPTY

    def _whole(self, digest: bytes) -> Status:
        with self.changed:
            if self.state is not ArrivalState.RECEIVING:
                return Status.NOT_FOUND
            if any(self._missing):
                return Status.BAD_REQUEST
            return Status.OK if frames.handoff_digest(self.offer.id, self._sums) == digest else Status.CORRUPT

    def _commit(self, now: float) -> Status:
        with self.changed:
            if self.state is not ArrivalState.RECEIVING:
                return Status.NOT_FOUND
            self.state, self._link, self._heard = ArrivalState.COMPLETE, None, now
            self.changed.notify_all()
        return Status.OK


class HandoffInbox:
    """What a decode process gives its PeerServer as `handoffs`, and takes arrivals from. Safe to share between threads."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        keep_seconds: float = KEEP_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        accept: Callable[[Offer], Status] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`accept` sees each offer that there is room for: OK, or why not (BUSY, ...). It is called on a serving thread and must not wait.
        `keep_seconds`: for what was committed and nobody took. `silent_seconds`: most between two parts, whatever the offer asks for.
        Raises MisuseError E579 for under 64 KiB."""
        if capacity_bytes < _ROUND_BYTES or keep_seconds <= 0:
            raise MisuseError("E579", f"inbox of {capacity_bytes} bytes, {keep_seconds} s", "impossible", "at least 64 KiB, above 0 s")
        self.capacity_bytes, self.keep_seconds, self.silent_seconds = capacity_bytes, keep_seconds, silent_seconds
        # Asked about each that is whole, before its sender is told so: OK, or why it cannot be taken (BAD_VERSION, NO_SPACE, BUSY, ...):
        # then its sender goes on with it. On a serving thread: it must not wait.
        self.agree: Callable[[Arrival], Status] | None = None
        self.allocated_bytes = 0  # of buffers, in use or kept for the next
        self._accept, self._clock = accept, clock
        self._arrivals: dict[bytes, Arrival] = {}
        self._spare: list[Bytes] = []  # buffers that nothing points into
        self._returned: deque[Bytes] = deque()  # likewise: finalizers append, on any thread, with any lock held
        self._counts: Counter[str] = Counter()
        self._changed = threading.Condition()

    # --- for the decode side ---

    def take(
        self,
        handoff_id: bytes | None = None,
        deadline_seconds: float = 0.0,
        owner: str = "",
        *,
        whole: bool = False,
        wanted: Callable[[Offer], bool] | None = None,
    ) -> Arrival | None:
        """The arrival with that id, or the oldest that nobody took, of those `wanted`: as soon as it was offered, so that its sections can
        be used while others are still on their way, or with `whole` once all of it is there. It is the caller's to release, or to put
        back. None at the deadline."""
        with self._changed:
            found: list[Arrival] = []

            def there() -> bool:
                waiting = self._arrivals.values() if handoff_id is None else filter(None, [self._arrivals.get(handoff_id)])
                ready = (a for a in waiting if (wanted is None or wanted(a.offer)) and a._take(owner, whole))
                found[:] = islice(ready, 1)
                return bool(found)

            return found[0] if self._changed.wait_for(there, deadline_seconds) else None

    def put_back(self, arrival: Arrival) -> None:
        """For another to take, if it is not lost."""
        with self._changed:
            arrival.taken, arrival.owner = False, ""
            self._changed.notify_all()

    def offers(self, taken: bool = True) -> list[Offer]:
        """Of all that are on their way or here, those included that are `taken`. May be called where `accept` is."""
        return [arrival.offer for arrival in self._listed() if taken or not arrival.taken]

    def holds(self, handoff_id: bytes) -> bool:
        """Is it on its way or here, and not taken?"""
        arrival = self._arrivals.get(handoff_id)
        return arrival is not None and not arrival.taken

    def release(self, arrival: Arrival) -> None:
        """Ends it, in whatever state it is. Its room is free once the last view of its sections is gone."""
        with self._changed:
            if self._arrivals.get(arrival.id) is arrival:
                del self._arrivals[arrival.id]
        arrival._end(ArrivalState.RELEASED)

    def free_owner(self, owner: str) -> int:
        """Releases all that `owner`, who died, took; how many."""
        with self._changed:
            theirs = [arrival for arrival in self._arrivals.values() if arrival.taken and arrival.owner == owner]
        for arrival in theirs:
            self.release(arrival)
        return len(theirs)

    def stats(self) -> dict[str, int]:
        """Counts since the start (offered, refused, committed, lost, expired, corrupt_parts); arrivals and bytes now."""
        with self._changed:
            self._collect()
            free = sum(len(buffer) for buffer in self._spare)
            return {
                **self._counts, "arrivals": len(self._arrivals), "allocated_bytes": self.allocated_bytes,
                "used_bytes": self.allocated_bytes - free,
            }  # fmt: skip

    # --- for the server ---

    def offer(self, offer: Offer, link: object) -> Status:
        with self._changed:
            status = self._room(offer)
            if status is Status.OK and self._accept is not None:
                status = self._accept(offer)
            memory = self._memory(offer.total_bytes) if status is Status.OK else None
            if status is Status.OK and memory is None:
                status = Status.BUSY
            self._counts["offered" if status is Status.OK else "refused"] += 1
            if memory is not None:
                self._arrivals[offer.id] = Arrival(offer, memory, link, self._clock())
                self._changed.notify_all()
            return status

    def _room(self, offer: Offer) -> Status:
        if offer.id in self._arrivals:
            return Status.EXISTS
        if offer.total_bytes > self.capacity_bytes:
            return Status.NO_SPACE
        return Status.BUSY if len(self._arrivals) >= ARRIVALS_MAX else Status.OK

    def place(self, handoff_id: bytes, section: int, part: int, data_bytes: int) -> memoryview | Status:
        arrival = self._arrivals.get(handoff_id)
        return Status.NOT_FOUND if arrival is None else arrival._place(section, part, data_bytes, self._clock())

    def placed(self, handoff_id: bytes, section: int, part: int, check: int) -> Status:
        arrival = self._arrivals.get(handoff_id)
        status = Status.NOT_FOUND if arrival is None else arrival._placed(section, part, check, self._clock())
        if status is Status.CORRUPT:
            self._count("corrupt_parts")
        return status

    def unplaced(self, handoff_id: bytes, section: int, part: int) -> None:
        arrival = self._arrivals.get(handoff_id)
        if arrival is not None:
            arrival._unplaced(section, part)

    def commit(self, handoff_id: bytes, digest: bytes) -> Status:
        arrival = self._arrivals.get(handoff_id)
        if arrival is None:
            return Status.NOT_FOUND
        status = arrival._whole(digest)
        if status is Status.OK and self.agree is not None and (status := self.agree(arrival)) is not Status.OK:
            self._lose([arrival], "lost")  # its sender goes on with it
        if status is Status.OK:
            status = arrival._commit(self._clock())
        if status is Status.OK:
            with self._changed:
                self._counts["committed"] += 1
                self._changed.notify_all()
        return status

    def abort(self, handoff_id: bytes) -> Status:
        arrival = self._arrivals.get(handoff_id)
        lost = arrival is not None and self._lose([arrival], "lost")
        return Status.OK if lost else Status.NOT_FOUND

    def owed(self, link: object) -> bool:
        return any(arrival._link is link for arrival in self._listed())

    def gone(self, link: object) -> None:
        self._lose([arrival for arrival in self._listed() if arrival._link is link], "lost")

    def sweep(self) -> None:
        """Forgets what its sender let lie, and what was committed and nobody took."""
        now = self._clock()
        listed = self._listed()
        self._lose([a for a in listed if now - a._heard > min(a.offer.idle_seconds, self.silent_seconds)], "expired")
        if unwanted := self._lose([a for a in listed if now - a._heard > self.keep_seconds], "expired", ArrivalState.COMPLETE):
            log.warning("handoffs are lost that nobody took within %g s: %d", self.keep_seconds, unwanted)

    def end_receiving(self, wanted: Callable[[Offer], bool]) -> None:
        """Takes no more of those `wanted` that are on their way: who sends them learns it with the next part, or the commit."""
        self._lose([arrival for arrival in self._listed() if wanted(arrival.offer)], "lost")

    def _listed(self) -> list[Arrival]:
        with self._changed:
            return list(self._arrivals.values())

    def _lose(self, arrivals: list[Arrival], why: str, state: ArrivalState = ArrivalState.RECEIVING) -> int:
        """Forgets those that are in `state` at that moment, and not taken if they are whole; how many."""
        lost = [arrival for arrival in arrivals if arrival._end(ArrivalState.LOST, state)]
        with self._changed:
            for arrival in lost:
                if self._arrivals.get(arrival.id) is arrival:
                    del self._arrivals[arrival.id]
                self._counts[why] += 1
        return len(lost)

    def _count(self, name: str) -> None:
        with self._changed:
            self._counts[name] += 1

    # --- memory ---

    def _memory(self, size: int) -> Bytes | None:
        """`size` bytes, warm ones where there are some; None where that would pass the capacity. Under the lock."""
        self._collect()
        rounded = min(-(-max(size, 1) // _ROUND_BYTES) * _ROUND_BYTES, self.capacity_bytes)
        base = min((buffer for buffer in self._spare if rounded <= len(buffer) <= 2 * rounded), key=len, default=None)
        if base is None:
            while self.allocated_bytes + rounded > self.capacity_bytes and self._spare:
                self.allocated_bytes -= len(self._spare.pop(0))
            if self.allocated_bytes + rounded > self.capacity_bytes:
                return None
            base = np.empty(rounded, np.uint8)
            self.allocated_bytes += rounded
        else:
            self._spare = [buffer for buffer in self._spare if buffer is not base]
        view = base[:size]
        weakref.finalize(view, self._returned.append, base).atexit = False
        return view

    def _collect(self) -> None:
        while self._returned:
            self._spare.append(self._returned.popleft())
