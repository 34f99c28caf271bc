"""A worker's side of one connection to its agent: requests out, answers in, and the shared memory that goes with it.

Memory outlives the connection: what is mapped stays readable until the last view of it is gone, also when the agent has died in between.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from kvstore import errors
from kvstore.client.agent import bodies
from kvstore.client.agent.arena import Arena, is_sealed, map_memory
from kvstore.client.agent.link import FDS, Kind, Link, Message, check_peer, close_all
from kvstore.client.native import U8
from kvstore.errors import KvstoreError, ProtocolError, Unreachable

log = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 5.0
LAST: Final = (
    Kind.TICKET,
    Kind.LOADED,
    Kind.STORED,
    Kind.ENTRY,
    Kind.KEPT,
    Kind.FOUND,
    Kind.GIVEN,
    Kind.ARRIVED,
    Kind.TOLD,
    Kind.BUSY,
    Kind.REFUSED,
)
PINNING: Final = (Kind.STAGED, Kind.ENTRY, Kind.ARRIVED)


class Gone(Exception):
    """The agent is not there, or is no more, or did not answer in time. Never leaves WorkerAgent: verbs turn it into misses."""


class Call:
    """One request and the answers to it."""

    def __init__(self, attachment: Attachment, number: int, then: Callable[[Call], None] | None) -> None:
        self.attachment = attachment
        self.number = number
        self.then = then  # called when the last answer is there, or the agent is gone
        self.answers: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None: the agent is gone

    def next(self, end: float) -> Message:
        """The next answer. Raises Gone, or what the agent refused it with."""
        try:
            message = self.answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise Gone("no answer in time") from None
        if message is None:
            raise Gone("the agent is gone")
        if message.kind == Kind.REFUSED:
            raise error_of(message.body)
        return message

    def only(self, end: float) -> Message:
        """The one answer of this request; what it may have pinned is let go of where it does not come in time. Raises as `next`."""
        try:
            return self.next(end)
        except Gone:
            self.attachment.let_go(self.number)
            raise


class Attachment:
    """Made by `attach`; `serve` receives until the agent is gone. Any thread may ask."""

    def __init__(self, link: Link, welcome: bodies.Welcome, arena: U8, own: U8) -> None:
        self.welcome = welcome
        self.arena = arena  # read-only
        self.own = own
        self.own_ranges = Arena(welcome.own_bytes)
        self._link = link
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._gone = False
        # What must not wait for the thread that receives, nor run in a finalizer, which may come while any lock is held.
        self._later: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._teller = threading.Thread(target=self._tell_later, name="kvstore-told", daemon=True)
        self._teller.start()

    def ask(self, kind: Kind, *parts: bytes, then: Callable[[Call], None] | None = None) -> Call:
        """`then` is called on a thread of its own, for verbs that nobody waits for. Raises Gone."""
        with self._lock:
            if self._gone:
                raise Gone("the agent is gone")
            call = Call(self, next(self._numbers), then)
            self._calls[call.number] = call
        self.tell(kind, call.number, *parts)
        return call

    def tell(self, kind: Kind, number: int, *parts: bytes) -> None:
        """Without an answer of its own. Raises Gone, also in a forked child: what it let go of would be its parent's."""
        if os.getpid() != self._pid:
            raise Gone("a forked process")
        try:
            self._link.send(kind, number, *parts)
        except OSError as error:
            self.forget(number)
            raise Gone(str(error)) from None

    def forget(self, number: int) -> None:
        with self._lock:
            self._calls.pop(number, None)

    def let_go(self, number: int) -> None:
        """What the request pinned is the agent's again, whether or not it has been answered."""
        self.forget(number)
        with contextlib.suppress(Gone):
            self.tell(Kind.RELEASE, number)

    def serve(self) -> str:
        """Until the agent is gone; says why."""
        why = ""
        try:
            while True:
                message, _ = self._link.receive()
                with self._lock:
                    call = self._calls.get(message.number)
                    if message.kind in LAST:
                        self._calls.pop(message.number, None)
                if call is not None:
                    self._put(call, message, message.kind in LAST)
                elif message.kind in PINNING:  # too late: nobody waits for it any more
                    self._later.put(partial(self.let_go, message.number))
                elif message.kind == Kind.REFUSED:
                    why = str(error_of(message.body))  # of the connection, not of a request
        except (OSError, EOFError, KvstoreError) as error:
            why = why or str(error)
        finally:
            with self._lock:
                self._gone = True
                calls, self._calls = list(self._calls.values()), {}
            self._link.dispose()
            for call in calls:
                self._put(call, None, True)
            self._later.put(None)
            self._teller.join()
        return why

    def _put(self, call: Call, message: Message | None, last: bool) -> None:
        call.answers.put(message)
        if last and call.then is not None:
            self._later.put(partial(call.then, call))

    def _tell_later(self) -> None:
        while self._told():
            pass

    def _told(self) -> bool:
        """The next of it, in a frame of its own: what a callback holds is let go of before the next wait."""
        what = self._later.get()
        if what is None:
            return False
        try:
            what()
        except Exception:  # of a callback that the engine hung on a future
            log.exception("after an answer of the agent")
        return True

    def close(self) -> None:
        self._link.close()

    @property
    def telling(self) -> bool:
        """Whether this thread is the one that tells of answers: it must not wait for itself."""
        return threading.current_thread() is self._teller

    # --- memory ---

    def pinned(self, number: int, offset: int, size: int) -> U8:
        """A read-only range of the agent's memory that the request of this number pinned; let go of when the last view of it is gone."""
        if not 0 <= offset <= len(self.arena) - size:
            raise bodies.wrong(f"{size} bytes at {offset} of {len(self.arena)}")
        return self._until_unseen(self.arena[offset : offset + size], partial(self.let_go, number))

    def take(self, size: int) -> U8 | None:
        """Memory of our own that the agent can read; free again when the last view of it is gone. None: there is no room."""
        offset = self.own_ranges.take(size)
        if offset is None:
            return None
        return self._until_unseen(self.own[offset : offset + size], partial(self.own_ranges.give, offset))

    def copy_in(self, rows: U8) -> int | None:
        """A copy of `rows` in our own memory: its offset, whose room `own_ranges` takes back. None: there is no room."""
        offset = self.own_ranges.take(rows.nbytes)
        if offset is not None:
            self.own[offset : offset + rows.nbytes].reshape(rows.shape)[:] = rows
        return offset

    def own_offset(self, rows: U8) -> int | None:
        """Where contiguous `rows` lie in our own memory; None: elsewhere."""
        at = rows.ctypes.data - self.own.ctypes.data
        return at if rows.flags.c_contiguous and 0 <= at <= len(self.own) - rows.nbytes else None

    def _until_unseen(self, view: U8, end: Callable[[], None]) -> U8:
        # Views of views refer to the first owner, passing over those between: only a memoryview keeps `view` itself alive.
        weakref.finalize(view, self._unseen, end).atexit = False
        return np.frombuffer(view.data, np.uint8)

    def _unseen(self, end: Callable[[], None]) -> None:
        if not self._gone:  # else nobody is left to tell, and what waits would keep all of this alive
            self._later.put(end)


def attach(path: str, hello: bodies.Hello) -> Attachment:
    """Raises Gone where nobody answers, Unreachable where it has no place now, ProtocolError where it refuses this engine for good."""
    connection = socket.socket(socket.AF_UNIX)
    got: list[int] = []
    try:
        try:
            connection.settimeout(CONNECT_SECONDS)
            connection.connect(path)
            link = Link(connection)
            check_peer(connection)
            link.send(Kind.HELLO, 0, hello.encode())
            message, got = link.receive(fds=FDS, within_seconds=CONNECT_SECONDS)
        except (OSError, EOFError) as error:
            raise Gone(str(error)) from None
        if message.kind == Kind.REFUSED:
            raise error_of(message.body)
        if message.kind != Kind.WELCOME or len(got) != FDS or not all(is_sealed(descriptor) for descriptor in got):
            raise ProtocolError("E635", "agent socket", f"answered HELLO with message {message.kind}, {len(got)} descriptors")
        welcome = bodies.Welcome.decode(message.body)
        try:
            arena = map_memory(got[0], welcome.arena_bytes, write=False)
            own = map_memory(got[1], welcome.own_bytes, write=True)
        except (OSError, ValueError) as error:
            raise ProtocolError("E635", "agent's memory", f"cannot be mapped: {error}") from None
        return Attachment(link, welcome, arena, own)
    except BaseException:
        connection.close()
        raise
    finally:
        close_all(got)


def error_of(body: bytes) -> KvstoreError:
    """The agent's error as one of our own."""
    name, code, what, cause, fix = bodies.decode_error(body)
    kind = getattr(errors, name, ProtocolError)
    plain = isinstance(kind, type) and issubclass(kind, KvstoreError) and kind.__init__ is KvstoreError.__init__
    return (kind if plain else ProtocolError)(code, what, cause, fix)


def control(path: str, kind: Kind, body: bytes, timeout_seconds: float) -> bytes:
    """One question of `kvstore agent status` or `drain`. Raises Unreachable E214 where nobody answers in time, or the agent's refusal."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(path)
        link = Link(connection)
        link.send(kind, 1, body)
        message, _ = link.receive(within_seconds=timeout_seconds)
    except (OSError, EOFError) as error:
        raise Unreachable(
            "E214",
            f"agent at {path}",
            f"does not answer: {str(error.strerror or error).lower() if isinstance(error, OSError) else error}",
            "start one with kvstore agent, or name its --socket",
        ) from None
    finally:
        connection.close()
    if message.kind == Kind.REFUSED:
        raise error_of(message.body)
    return message.body
