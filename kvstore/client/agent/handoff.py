"""A handoff on the side that gives it: what prefill knows of a request, to the agent of the decode process, never stored.

    begin     says what will come; the other side may refuse                      -> HandoffSender, or why not
    put       section by section as they become ready; returns at once, the bytes go out on a few streams of their own
    commit    waits until all is over there, checked and agreed to                -> HandoffOutcome
    abort     the other side forgets it

Bytes are read where they lie: what was put must not change until `on_sent` is called for it, or the handoff has ended, in whatever way. It
ends by itself within 3 s of the other side's death (PeerConfig.progress_seconds), and then holds on to nothing.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Final, Self, TypeAlias

from kvstore.client.agent import frames
from kvstore.client.agent.frames import Buffer, Offer, Verb
from kvstore.client.agent.peers import Peers, read_header
from kvstore.errors import MisuseError, ProtocolError
from kvstore.wire import Frame, Kind, Status

PART_BYTES: Final = 1 << 20  # fits a core's cache: summed and then sent from there
STREAMS: Final = 2
STREAMS_MAX: Final = 16
UNANSWERED_MAX: Final = 32  # parts of one stream
LOOK_SECONDS: Final = 0.5  # between two looks whether the other side is still there, while nothing is to be sent
CONNECT_SECONDS: Final = 1.0
ANSWER_SECONDS: Final = 1.0  # for the answer to a COMMIT, past the deadline, too: who gives up before it may end as one of two that answer
IDLE_SECONDS: Final = 60


class HandoffOutcome(Enum):
    DONE = "done"
    BUSY = "busy"  # no room or no wish there now: another decode process, or later
    TOO_LARGE = "too_large"  # never fits there
    REFUSED = "refused"  # all of it is there, and is nothing that can be taken there: another model, codec or version
    UNREACHABLE = "unreachable"  # nobody answered, or who did is no agent of this cluster
    LOST = "lost"  # the other side died, or forgot it
    LATE = "late"  # the deadline passed
    ABORTED = "aborted"
    FULL = "full"  # this side's limit of open connections


_REFUSALS: Final = {
    int(Status.BUSY): HandoffOutcome.BUSY, int(Status.DRAINING): HandoffOutcome.BUSY, int(Status.NO_SPACE): HandoffOutcome.TOO_LARGE,
    int(Status.BAD_VERSION): HandoffOutcome.REFUSED,
}  # fmt: skip


class _Resting(Exception):
    """A stream ended while it had nothing to send and nothing to hear."""


class _Countdown:
    """Calls `then` once, when all parts of a section have been sent or given up."""

    def __init__(self, parts: int, then: Callable[[], None] | None) -> None:
        self._left, self._then, self._lock = parts, then, threading.Lock()

    def step(self) -> None:
        with self._lock:
            self._left -= 1
            over = self._left == 0
        if over and self._then is not None:
            self._then()


@dataclass(frozen=True, slots=True)
class _Job:
    section: int
    part: int
    data: memoryview
    left: _Countdown


Section: TypeAlias = tuple[str, int]


def begin(
    peers: Peers,
    address: str,
    sections: Sequence[Section],
    *,
    handoff_id: bytes | None = None,
    note: bytes = b"",
    streams: int = STREAMS,
    part_bytes: int = PART_BYTES,
    idle_seconds: int = IDLE_SECONDS,
    deadline_seconds: float = CONNECT_SECONDS,
) -> HandoffSender | HandoffOutcome:
    """Offers `sections` (name, bytes) to the agent at `address`. Raises MisuseError for what cannot be offered to anybody.

    `note`: up to 64 KiB for who decides there. `idle_seconds`: how long the other side waits for the next part.
    """
    offer = Offer(handoff_id or secrets.token_bytes(frames.ID_BYTES), peers.owner, tuple(sections), part_bytes, idle_seconds, note)
    body = offer.encode()
    if not 1 <= streams <= STREAMS_MAX:
        raise MisuseError("E577", "handoff", f"{streams} streams", f"1 to {STREAMS_MAX}")
    end = time.monotonic() + deadline_seconds
    opened: list[socket.socket] = []
    outcome = HandoffOutcome.UNREACHABLE
    try:
        for _ in range(streams):
            connection = peers.connect(address, max(0.0, end - time.monotonic()))
            if connection is None:
                outcome = HandoffOutcome.FULL
                break
            opened.append(connection)
        else:
            opened[0].settimeout(max(0.001, end - time.monotonic()))
            opened[0].sendall(frames.request(Verb.OFFER, body))
            frame, _ = read_header(opened[0], end)
            if frame.verb == Verb.OFFER and frame.status == Status.OK:
                sender = HandoffSender(peers, address, offer, opened)
                opened = []
                return sender
            outcome = _REFUSALS.get(frame.status, HandoffOutcome.UNREACHABLE)
    except (OSError, EOFError, ProtocolError):
        pass
    finally:
        for connection in opened:
            peers.drop(connection)
    peers.gave(outcome.value, 0)
    return outcome


def send_handoff(
    peers: Peers,
    address: str,
    sections: Mapping[str, Buffer],
    *,
    deadline_seconds: float = 10.0,
    note: bytes = b"",
    streams: int = STREAMS,
    wanted: Callable[[], bool] = lambda: True,
) -> HandoffOutcome:
    """A handoff of what is all ready: begin, put, commit. `wanted`: asked before the commit, whether it still is."""
    ended = time.monotonic() + deadline_seconds
    sizes = [(name, memoryview(data).nbytes) for name, data in sections.items()]
    sender = begin(peers, address, sizes, note=note, streams=streams, deadline_seconds=min(deadline_seconds, CONNECT_SECONDS))
    if isinstance(sender, HandoffOutcome):
        return sender
    for name, data in sections.items():
        sender.put(name, data)
    return sender.commit(max(0.0, ended - time.monotonic()), wanted)


class HandoffSender:
    """One handoff on its way. `put` from any thread; ends with `commit` or `abort`, or by itself when the other side dies."""

    def __init__(self, peers: Peers, address: str, offer: Offer, connections: list[socket.socket]) -> None:
        """Use `begin`."""
        self.offer = offer
        self._peers, self._address = peers, address
        self._numbers = {name: i for i, (name, _) in enumerate(offer.sections)}
        self._given: set[int] = {i for i, (_, size) in enumerate(offer.sections) if size == 0}
        self._sums = [array("Q", bytes(8 * offer.parts(i))) for i in range(len(offer.sections))]
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._ending = False  # no more jobs will come
        self._committing = False
        self._sent_bytes = 0
        self._outcome: HandoffOutcome | None = None
        self._open = len(connections)
        self._connections = connections
        self._control = connections[0]  # owns the handoff there
        self._threads = [threading.Thread(target=self._run, args=(c,), name="kvstore-handoff", daemon=True) for c in connections]
        for thread in self._threads:
            thread.start()

    @property
    def id(self) -> bytes:
        return self.offer.id

    @property
    def outcome(self) -> HandoffOutcome | None:
        """None while it is on its way."""
        return self._outcome

    @property
    def sent_bytes(self) -> int:
        """Of sections, given to the kernel so far."""
        return self._sent_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Aborts what was not committed."""
        if self._outcome is None:
            self.abort()

    def put(self, name: str, data: Buffer, on_sent: Callable[[], None] | None = None) -> None:
        """Hands over a whole section, once. Returns at once; after the end it does nothing but call `on_sent`.

        Raises MisuseError E579 for a name or a length that was not offered, or a second time.
        """
        view = memoryview(data).cast("B")
        number = self._numbers.get(name, -1)
        if number < 0 or len(view) != self.offer.sections[number][1]:
            raise MisuseError("E579", f"section {name!r} of {len(view)} bytes", "was not offered", f"offered are {self.offer.sections}")
        parts = self.offer.parts(number)
        with self._changed:
            if number in self._given and parts:
                raise MisuseError("E579", f"section {name!r}", "was put before", "put each once")
            self._given.add(number)
            going = self._outcome is None and parts > 0
            left = _Countdown(parts, on_sent)
            for part in range(parts if going else 0):
                first, end = self.offer.part_range(number, part)
                self._jobs.append(_Job(number, part, view[first:end], left))
            self._changed.notify_all()
        if on_sent is not None and not going:
            on_sent()

    def commit(self, deadline_seconds: float, wanted: Callable[[], bool] = lambda: True) -> HandoffOutcome:
        """Waits until the other side has all, has checked it and agreed to take it. At the deadline the handoff is given up; if all has
        been sent by then, ANSWER_SECONDS after that was said at the latest. `wanted`: asked before that is said.

        Raises MisuseError E579 where a section was not put.
        """
        end = time.monotonic() + deadline_seconds
        with self._changed:
            missing = [name for name, number in self._numbers.items() if number not in self._given]
            if missing and self._outcome is None:
                raise MisuseError("E579", "handoff", f"{', '.join(missing)} not put", "put every section, or abort")
            self._ending = self._committing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._open or self._outcome is not None, max(0.0, end - time.monotonic()))
            fine = not self._open and self._outcome is None and time.monotonic() < end
        if fine and not wanted():
            self._end(HandoffOutcome.ABORTED)
        elif fine:
            digest = frames.handoff_digest(self.id, self._sums)
            self._end(self._ask(frames.request(Verb.COMMIT, frames.encode_commit(self.id, digest)), end))
        else:
            self._end(HandoffOutcome.LATE)
        return self._settled()

    def abort(self) -> None:
        """Ends it; the other side forgets it at once. A commit that another thread waits in ends with it."""
        self._end(HandoffOutcome.ABORTED)
        with self._changed:
            if self._committing:  # it is that thread's to settle
                return
        self._settled()

    def _settled(self) -> HandoffOutcome:
        for thread in self._threads:
            thread.join()
        with self._changed:
            connections, self._connections = self._connections, []
        for connection in connections:
            if self._outcome is HandoffOutcome.DONE:
                self._peers.keep(self._address, connection)
            else:
                self._peers.drop(connection)
        assert self._outcome is not None
        if connections:  # the first time
            self._peers.gave(self._outcome.value, self._sent_bytes)
        return self._outcome

    def _ask(self, request: bytes, end: float) -> HandoffOutcome:
        control = self._control
        try:
            control.settimeout(max(0.001, end - time.monotonic()))
            control.sendall(request)
            answered = select.poll()
            answered.register(control, select.POLLIN)
            # An answer that lies there counts, however late it is: this process may have stood still.
            if not answered.poll(1000 * max(ANSWER_SECONDS, end - time.monotonic())):
                return HandoffOutcome.LATE
            frame, _ = read_header(control, time.monotonic() + ANSWER_SECONDS)
        except TimeoutError:
            return HandoffOutcome.LATE
        except (OSError, EOFError, ProtocolError):
            return HandoffOutcome.LOST
        if frame.verb == Verb.COMMIT and frame.status == Status.OK:
            return HandoffOutcome.DONE
        return _REFUSALS.get(frame.status, HandoffOutcome.LOST)

    def _end(self, outcome: HandoffOutcome) -> None:
        """The first one stands. What still waits is let go of."""
        with self._changed:
            if self._outcome is None:
                self._outcome = outcome
            jobs, self._jobs = list(self._jobs), deque()
            connections = list(self._connections)
            self._changed.notify_all()
        if outcome is not HandoffOutcome.DONE:
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # the other side forgets it; a stream that stands in a send wakes
        for job in jobs:
            job.left.step()

    # --- a stream ---

    def _run(self, connection: socket.socket) -> None:
        """One thread: parts from the queue, until no more will come and all are answered."""
        try:
            connection.settimeout(self._peers.config.progress_seconds)
            unanswered = 0
            while True:
                job = self._next(connection, wait=unanswered == 0)
                if job is not None:
                    try:
                        self._send(connection, job)
                    finally:
                        job.left.step()
                    unanswered += 1
                if unanswered and (job is None or unanswered >= UNANSWERED_MAX):
                    for _ in range(unanswered):
                        self._expect_ok(connection)
                    unanswered = 0
                elif job is None:
                    break
        except _Resting:
            pass  # the other side closed a stream that had nothing to do; the first one says whether it lives
        except (OSError, EOFError, ProtocolError):
            self._end(HandoffOutcome.LOST)
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def _next(self, connection: socket.socket, wait: bool) -> _Job | None:
        """None: nothing to send now, or with `wait` ever again. Raises EOFError where the other side goes while we wait,
        _Resting where only this stream does."""
        gone = select.poll()
        gone.register(connection, select.POLLIN | select.POLLRDHUP)
        while True:
            if wait and connection is not self._control and gone.poll(0):
                raise _Resting
            with self._changed:
                if self._jobs:
                    return self._jobs.popleft()
                if not wait or self._ending or self._outcome is not None:
                    return None
                self._changed.wait(LOOK_SECONDS)
            if connection is self._control and gone.poll(0):
                raise EOFError("the other side ended the handoff")

    def _send(self, connection: socket.socket, job: _Job) -> None:
        check = frames.part_sum(self.id, job.section, job.part, job.data)
        self._sums[job.section][job.part] = check
        head = frames.part_head(self.id, job.section, job.part, check, len(job.data))
        sent = connection.sendmsg([head, job.data]) - len(head)
        if sent < 0:
            raise OSError("not even a header could be sent")
        while sent < len(job.data):
            sent += connection.send(job.data[sent:])
        with self._changed:
            self._sent_bytes += sent

    def _expect_ok(self, connection: socket.socket) -> None:
        frame, body_bytes = read_header(connection, time.monotonic() + self._peers.config.progress_seconds)
        if frame.verb != Verb.PART or frame.kind != Kind.REPLY or frame.status != Status.OK or body_bytes:
            raise ProtocolError("E628", "handoff", f"a part was answered with {_name(frame)}")


def _name(frame: Frame) -> str:
    return f"status {frame.status} of verb {frame.verb}"
