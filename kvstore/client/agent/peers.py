"""What asks other agents: window entries, and the streams a handoff goes out on. No thread of its own: the caller's does the work.

A holder that is dead costs its first caller `silence_seconds` (20 ms: connecting and the first byte of an answer, together) and nobody
anything for `pause_seconds` after. Whatever goes wrong with an entry is a miss, counted by reason in `stats`: nothing is raised for it.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self

from kvstore import wire
from kvstore.client.agent import frames
from kvstore.client.agent.frames import PeerConfig, Verb, address_of
from kvstore.client.agent.peer_server import set_congestion_control, set_liveness
from kvstore.errors import Closed, ProtocolError
from kvstore.wire import Hello, Kind, Status

_PAUSED_MAX: Final = 4096  # holders that are remembered as dead


class Peers:
    """Asks any number of agents. Safe to share between threads."""

    def __init__(self, *, cluster: bytes = bytes(16), owner: bytes = wire.NO_OWNER, config: PeerConfig | None = None) -> None:
        """`cluster` is ClusterMap.tag; `owner` the tenant whose entries are asked for. Connects to nothing yet."""
        self.config = config or PeerConfig()
        self.cluster, self.owner = cluster, owner
        self._idle: dict[str, deque[tuple[socket.socket, float]]] = {}  # newest last, with the time it came back
        self._dead_until: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._open = 0  # connections, idle or in use
        self._bytes_in = 0
        self._closed = False
        self._lock = threading.Lock()

    def fetch_window(self, address: str, key: bytes, deadline_seconds: float = 1.0, into: memoryview | None = None) -> memoryview | None:
        """The entry that the agent at `address` (host:port) holds under `key` (32 bytes), its sum checked; None: it is not to be had.

        `into`: where to put it, at least as long as the entry; what is returned is then its front. After None it may hold anything.
        Raises MisuseError for an address or key that cannot be one, Closed.
        """
        return self.fetch_first([address], key, deadline_seconds, into)

    def fetch_first(
        self, addresses: Iterable[str], key: bytes, deadline_seconds: float = 1.0, into: memoryview | None = None
    ) -> memoryview | None:
        """As fetch_window, from the first of several holders that has it, asked in order within one deadline."""
        end = time.monotonic() + deadline_seconds
        body = frames.encode_window(self.owner, key)
        for address in addresses:
            place = address_of(address)
            if self._closed:
                raise Closed("E578", "peers", "were closed")
            if time.monotonic() >= end:
                self._count("late")
                break
            if self.paused(address):
                self._count("skipped")
                continue
            outcome, entry = self._fetch(address, place, key, body, end, into)
            self._count(outcome)
            if entry is not None:
                self._count("window_bytes", len(entry))
                return entry
        return None

    def paused(self, address: str) -> bool:
        """Was it found dead a moment ago?"""
        with self._lock:
            return time.monotonic() < self._dead_until.get(address, 0.0)

    def stats(self) -> dict[str, int]:
        """Fetches by outcome (hit, missing, busy, dead, late, skipped, corrupt, refused, full), bytes of hits, connections open now;
        handoffs by outcome (handoff_done, ...) and their bytes (handoff_bytes)."""
        with self._lock:
            return {**self._counts, "connections": self._open, "bytes_in": self._bytes_in}

    def gave(self, outcome: str, sent_bytes: int) -> None:
        """Counts a handoff that has ended, or was not taken."""
        self._count(f"handoff_{outcome}")
        self._count("handoff_bytes", sent_bytes)

    def close(self) -> None:
        """Closes idle connections; those in use end with their call."""
        with self._lock:
            self._closed = True
            idle = [connection for waiting in self._idle.values() for connection, _ in waiting]
            self._idle.clear()
        for connection in idle:
            self.drop(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- one fetch ---

    def _fetch(
        self, address: str, place: tuple[str, int], key: bytes, body: bytes, end: float, into: memoryview | None
    ) -> tuple[str, memoryview | None]:
        """What came of it, and the entry."""
        answer_end = min(end, time.monotonic() + self.config.silence_seconds)
        connection = self._take_idle(address)
        if connection is not None:
            try:
                return self._finish(address, connection, key, body, answer_end, end, into)
            except TimeoutError:
                return self._late(address, end), None
            except (OSError, EOFError):
                pass  # the agent closed it, or started anew, while it lay idle
            except ProtocolError:
                self._found_dead(address)
                return "refused", None
        try:
            connection = self._connect(place, answer_end)
            if connection is None:
                return "full", None
            return self._finish(address, connection, key, body, answer_end, end, into, greeted=False)
        except TimeoutError:
            return self._late(address, end), None
        except (OSError, EOFError):
            self._found_dead(address)
            return "dead", None
        except ProtocolError:
            self._found_dead(address)
            return "refused", None

    def _late(self, address: str, end: float) -> str:
        """A wait ran out: the caller's own, or what a holder that lives would have kept."""
        if time.monotonic() >= end:
            return "late"
        self._found_dead(address)
        return "dead"

    def _finish(
        self, address: str, connection: socket.socket, key: bytes, body: bytes, answer_end: float, end: float, into: memoryview | None,
        greeted: bool = True,
    ) -> tuple[str, memoryview | None]:  # fmt: skip
        """Asks, and takes the answer; the connection is then back in the pool, or closed."""
        reusable = False
        try:
            connection.settimeout(_left(answer_end))
            greeting = b"" if greeted else wire.encode(Verb.HELLO, frames.hello(self.cluster))
            connection.sendall(greeting + frames.request(Verb.WINDOW, body))
            if not greeted:
                _expect_hello(connection, answer_end)
            outcome, entry = self._receive(connection, key, answer_end, end, into)
            reusable = outcome in _WHOLE
            return outcome, entry
        finally:
            if reusable:
                self.keep(address, connection)
            else:
                self.drop(connection)

    def _receive(
        self, connection: socket.socket, key: bytes, answer_end: float, end: float, into: memoryview | None
    ) -> tuple[str, memoryview | None]:
        """Outcome and entry. Raises OSError, EOFError, ProtocolError."""
        frame, body_bytes = read_header(connection, answer_end)
        if frame.verb != Verb.WINDOW or frame.kind != Kind.REPLY or (frame.status != Status.OK and body_bytes):
            raise ProtocolError("E626", "agent", f"answered WINDOW with verb {frame.verb}, status {frame.status}, {body_bytes} bytes")
        if frame.status != Status.OK:
            return _OUTCOMES.get(frame.status, "refused"), None
        size = body_bytes - frames.SUM_BYTES
        if not 0 <= size <= frames.WINDOW_BYTES_MAX:
            raise ProtocolError("E626", "agent", f"sends an entry of {size} bytes")
        if into is not None and size > len(into):
            return "refused", None
        if not self._reserve(size):
            return "full", None
        try:
            silence = self.config.silence_seconds
            check = bytes(receive_into(connection, memoryview(bytearray(frames.SUM_BYTES)), end, silence))
            place = into[:size] if into is not None else memoryview(bytearray(size))
            receive_into(connection, place, end, silence)
        finally:
            with self._lock:
                self._bytes_in -= size
        if frames.window_sum(self.owner, key, place) != check:
            return "corrupt", None
        return "hit", place

    def _reserve(self, size: int) -> bool:
        with self._lock:
            if self._bytes_in and self._bytes_in + size > self.config.bytes_in_max:
                return False
            self._bytes_in += size
            return True

    # --- connections ---

    def connect(self, address: str, deadline_seconds: float) -> socket.socket | None:
        """A greeted connection for the caller alone, one that lay idle where there is one; given back with `keep`, or `drop` where it may
        not stand at a frame's end. None at the limit of open ones.

        Raises OSError or EOFError where nobody answers in time, ProtocolError E627 where the greeting is refused.
        """
        end = time.monotonic() + deadline_seconds
        connection = self._take_idle(address)
        if connection is not None:
            return connection
        connection = self._connect(address_of(address), end)
        if connection is not None:
            try:
                connection.settimeout(_left(end))
                connection.sendall(wire.encode(Verb.HELLO, frames.hello(self.cluster)))
                _expect_hello(connection, end)
            except BaseException:
                self.drop(connection)
                raise
        return connection

    def keep(self, address: str, connection: socket.socket) -> None:
        """Takes back what `connect` gave, for the next call."""
        with self._lock:
            waiting = self._idle.setdefault(address, deque())
            if not self._closed and len(waiting) < self.config.connections_per_peer:
                waiting.append((connection, time.monotonic()))
                return
        self.drop(connection)

    def close_idle(self) -> None:
        """Closes connections that nobody has used for half of `idle_seconds`: the other side is about to, or has."""
        stale = []
        with self._lock:
            now = time.monotonic()
            for address, waiting in list(self._idle.items()):
                while waiting and now - waiting[0][1] >= self.config.idle_seconds / 2:
                    stale.append(waiting.popleft()[0])
                if not waiting:
                    del self._idle[address]
        for connection in stale:
            self.drop(connection)

    def drop(self, connection: socket.socket) -> None:
        """Ends what `connect` gave."""
        connection.close()
        with self._lock:
            self._open -= 1

    def _connect(self, place: tuple[str, int], end: float) -> socket.socket | None:
        with self._lock:
            if self._open >= self.config.open_max:
                oldest = self._oldest_idle()
                if oldest is None:
                    return None
            else:
                oldest = None
                self._open += 1  # else the place of the one that is closed below
        if oldest is not None:
            oldest.close()
        connection = None
        try:
            connection = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
            set_congestion_control(connection, self.config.congestion_control)
            set_liveness(connection)
            connection.settimeout(_left(end))
            connection.connect(place)
        except BaseException:
            if connection is not None:
                connection.close()
            with self._lock:
                self._open -= 1
            raise
        return connection

    def _take_idle(self, address: str) -> socket.socket | None:
        stale = []
        found = None
        with self._lock:
            waiting = self._idle.get(address, deque())
            while waiting and found is None:
                connection, since = waiting.pop()
                if time.monotonic() - since < self.config.idle_seconds / 2 and not _spoke(connection):
                    found = connection
                else:
                    stale.append(connection)
            if not waiting:
                self._idle.pop(address, None)
        for connection in stale:
            self.drop(connection)
        return found

    def _oldest_idle(self) -> socket.socket | None:
        """Under the lock: the connection that has waited longest, no longer kept."""
        address = min(self._idle, key=lambda address: self._idle[address][0][1], default=None)
        if address is None:
            return None
        connection, _ = self._idle[address].popleft()
        if not self._idle[address]:
            del self._idle[address]
        return connection

    def _found_dead(self, address: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._dead_until[address] = now + self.config.pause_seconds
            if len(self._dead_until) > _PAUSED_MAX:
                self._dead_until = {place: until for place, until in self._dead_until.items() if until > now}
            while len(self._dead_until) > _PAUSED_MAX:
                del self._dead_until[next(iter(self._dead_until))]

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number


_OUTCOMES: Final = {int(Status.NOT_FOUND): "missing", int(Status.BUSY): "busy"}
_WHOLE: Final = ("hit", "missing", "busy", "corrupt")  # after these the connection stands at a frame's end


def _spoke(connection: socket.socket) -> bool:
    """Did the other side say something, or end, while nothing was asked?"""
    look = select.poll()
    look.register(connection, select.POLLIN | select.POLLRDHUP)
    return bool(look.poll(0))


def _left(end: float) -> float:
    """Seconds until `end`. Raises TimeoutError where there are none: a timeout of 0 would mean not to wait at all."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def receive_into(connection: socket.socket, place: memoryview, end: float, silence_seconds: float = math.inf) -> memoryview:
    """Fills `place`. Raises TimeoutError at `end` or after `silence_seconds` without a byte, EOFError at the peer's end, OSError."""
    got = 0
    while got < len(place):
        connection.settimeout(min(_left(end), silence_seconds))
        count = connection.recv_into(place[got:])
        if not count:
            raise EOFError("the agent closed the connection")
        got += count
    return place


def read_header(connection: socket.socket, end: float) -> tuple[wire.Frame, int]:
    """A frame without its body, and the body's length. Raises as receive_into does, and ProtocolError."""
    frame, body_bytes = wire.decode_header(bytes(receive_into(connection, memoryview(bytearray(wire.HEADER_BYTES)), end)))
    if frame.version != wire.VERSION:
        raise ProtocolError("E626", "agent", f"speaks version {frame.version}")
    return frame, body_bytes


def _expect_hello(connection: socket.socket, end: float) -> Hello:
    frame, body_bytes = read_header(connection, end)
    if frame.verb != Verb.HELLO or frame.status != Status.OK or body_bytes > wire.HELLO_BODY_MAX:
        raise ProtocolError("E627", "agent", f"refused the greeting: status {frame.status}")
    return Hello.decode(bytes(receive_into(connection, memoryview(bytearray(body_bytes)), end)))
