"""What serves other agents: window entries out, handoffs in. A few threads, each with any number of connections.

A connection is a conversation (a generator that yields the memory to fill next) and bytes still to be sent. Nothing waits on one peer:
each has turns of 2 MiB; who owes something and moves less than 16 KiB in `progress_seconds` is cut; nothing more is read from a
connection before its answers are taken. What a peer can make us keep is one small frame, and what a HandoffSink gave it a place for.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from typing import Final, Protocol, TypeAlias

from kvstore import wire
from kvstore.client.agent import frames
from kvstore.client.agent.frames import Buffer, Offer, PeerConfig, Verb
from kvstore.daemon import address_text
from kvstore.errors import ProtocolError
from kvstore.wire import Frame, Hello, Kind, Status

TURN_BYTES: Final = 2 << 20
PROGRESS_BYTES: Final = 16 << 10
SWEEP_SECONDS: Final = 0.25
BUSY_MILLISECONDS: Final = 100
LINGER_SECONDS: Final = 1.0  # after a refusal: what still comes is read, or a reset would take the answer away
KEEPALIVE_SECONDS: Final = 1  # twice without an answer: a host that vanished is gone after 3 s

WindowSource: TypeAlias = Callable[[bytes, bytes], Buffer | None]
"""Owner tag (16 bytes) and window key (32) to the entry, None where it is not held. Called on a serving thread: it must not wait."""


class HandoffSink(Protocol):
    """Takes handoffs (`handoff.HandoffInbox`). Called on the serving threads; none of its verbs may wait. `link` is the connection."""

    def offer(self, offer: Offer, link: object) -> Status: ...
    def place(self, handoff_id: bytes, section: int, part: int, data_bytes: int) -> memoryview | Status:
        """Where the part goes, the caller's alone until `placed` or `unplaced`."""
        ...

    def placed(self, handoff_id: bytes, section: int, part: int, check: int) -> Status: ...
    def unplaced(self, handoff_id: bytes, section: int, part: int) -> None: ...
    def commit(self, handoff_id: bytes, digest: bytes) -> Status:
        """OK: it is this side's from now on."""
        ...

    def abort(self, handoff_id: bytes) -> Status: ...
    def owed(self, link: object) -> bool:
        """Is a handoff that was offered on this connection still on its way?"""
        ...

    def gone(self, link: object) -> None:
        """A connection has ended, perhaps that of an offer."""
        ...

    def sweep(self) -> None:
        """Called every 0.25 s: forgets what has lain for too long."""
        ...


_Conversation: TypeAlias = Generator[memoryview, None, None]


class PeerServer:
    """Serves from construction to `close`. Raises OSError where the port cannot be had."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        windows: WindowSource | None = None,
        handoffs: HandoffSink | None = None,
        cluster: bytes = bytes(16),
        config: PeerConfig | None = None,
    ) -> None:
        """`cluster` is ClusterMap.tag: peers of another one are refused. Port 0: any; see `address`."""
        self.config = config or PeerConfig()
        self.windows, self.handoffs, self.cluster = windows, handoffs, cluster
        self.boot_id = secrets.randbits(64)
        self.draining = False  # set: an OFFER is answered DRAINING; handoffs under way go on, windows are served
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128)
        set_congestion_control(self._listener, self.config.congestion_control)
        self._listener.setblocking(False)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self.connections = 0
        self.bytes_out = 0
        self._loops = [_Loop(self, number) for number in range(self.config.threads)]
        self._loops[0].listen(self._listener, self._accepted)
        for loop in self._loops:
            loop.thread.start()
        self._next = 0

    @property
    def address(self) -> str:
        return address_text(self.host, self.port)

    def stats(self) -> dict[str, int]:
        """Counts since the start, by name: windows_sent, windows_missing, busy, refused, cut, ...; and connections and bytes_out now."""
        with self._lock:
            return {**self._counts, "connections": self.connections, "bytes_out": self.bytes_out}

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def close(self) -> None:
        """Ends all connections at once; `draining` and the sink say how to end gently."""
        for loop in self._loops:  # the one that accepts first: the others then get nothing new
            loop.stop()
            loop.thread.join()
        self._listener.close()

    def _accepted(self, connection: socket.socket) -> None:
        with self._lock:
            full = self.connections >= self.config.connections_max
            if not full:
                self.connections += 1
        if full:
            self.count("busy")
            with connection, contextlib.suppress(OSError):
                connection.send(wire.encode(Verb.HELLO, kind=Kind.REPLY, status=Status.BUSY, aux=BUSY_MILLISECONDS), socket.MSG_DONTWAIT)
            return
        self._next = (self._next + 1) % len(self._loops)
        self._loops[self._next].adopt(connection)

    def reserve_out(self, size: int) -> bool:
        """Takes `size` of the bytes that may be on their way out."""
        with self._lock:
            if self.bytes_out and self.bytes_out + size > self.config.bytes_out_max:
                return False
            self.bytes_out += size
            return True

    def closed(self, link: _Link) -> None:
        with self._lock:
            self.connections -= 1
            self.bytes_out -= link.reserved
        if self.handoffs is not None:
            self.handoffs.gone(link)

    def sent(self, link: _Link) -> None:
        """All that was queued on the connection is with the kernel."""
        if link.reserved:
            with self._lock:
                self.bytes_out -= link.reserved
            link.reserved = 0


def set_congestion_control(connection: socket.socket, name: str) -> None:
    """Where the kernel has it; before the connection is made (kvstore/tcp.py)."""
    if name != "host":
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def set_liveness(connection: socket.socket) -> None:
    """No delay, and the end of a vanished host in 3 s."""
    tcp = socket.IPPROTO_TCP
    connection.setsockopt(tcp, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS), (socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS), (socket.TCP_KEEPCNT, 2)):
        connection.setsockopt(tcp, option, value)
    connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, 3000 * KEEPALIVE_SECONDS)


class _Link:
    """One connection of one loop."""

    def __init__(self, server: PeerServer, connection: socket.socket, now: float) -> None:
        self.server, self.socket = server, connection
        self.out: deque[memoryview] = deque()
        self.reserved = 0  # of server.bytes_out
        self.ending = False  # nothing more is read; closes once `out` is sent
        self._shut = False
        self.between = False  # waits for the peer's next request
        self.moved = 0  # since `since`
        self.since = now
        self.mask = selectors.EVENT_READ
        self._conversation = _converse(self)
        self.place = next(self._conversation)
        self.got = 0

    def turn(self) -> bool:
        """Moves up to TURN_BYTES. False: the connection is over."""
        left = TURN_BYTES
        while left > 0:
            if self.out:
                sent = self._send()
                if sent == 0:
                    return True
                self.moved += sent
                left -= sent
                continue
            if self.ending and not self._linger():
                return False
            try:
                count = self.socket.recv_into(self.place[self.got :], min(len(self.place) - self.got, left))
            except BlockingIOError:
                return True
            if count == 0:
                return False
            left -= count
            if self.ending:
                continue
            if self.between:
                self.between, self.moved, self.since = False, 0, time.monotonic()
            self.moved += count
            self.got += count
            if self.got == len(self.place):
                self.got = 0
                try:
                    self.place = next(self._conversation)
                except StopIteration:
                    self.ending = True
                    if not self.out:
                        return False
        return True

    def _linger(self) -> bool:
        """Says that no more will come, and goes on reading for a moment."""
        if not self._shut:
            self._shut, self.since = True, time.monotonic()
            self.place, self.got = memoryview(bytearray(4096)), 0
            self.socket.shutdown(socket.SHUT_WR)
        return time.monotonic() - self.since < LINGER_SECONDS

    def _send(self) -> int:
        """Bytes taken by the kernel; 0: it takes none now."""
        try:
            sent = count = self.socket.sendmsg(list(self.out)[:16])
        except BlockingIOError:
            return 0
        while count:
            first = self.out.popleft()
            if count < len(first):
                self.out.appendleft(first[count:])
                break
            count -= len(first)
        if not self.out:
            self.server.sent(self)
        return sent

    def late(self, now: float) -> bool:
        """Has it stood still for too long?"""
        config = self.server.config
        if self._shut:
            return now - self.since > LINGER_SECONDS
        if self.between and not self.out:
            limit = config.idle_seconds
        else:
            limit = config.progress_seconds
            if self.moved >= PROGRESS_BYTES:
                self.moved, self.since = 0, now
        if now - self.since <= limit:
            return False
        sink = self.server.handoffs
        return not (self.between and not self.out and sink is not None and sink.owed(self))  # its parts may come on others

    def left(self) -> bool:
        """Has the peer closed its end?"""
        look = select.poll()
        look.register(self.socket, select.POLLRDHUP)
        return bool(look.poll(0))

    def rest(self) -> None:
        """The peer owes nothing until its next request."""
        self.between, self.moved, self.since = True, 0, time.monotonic()

    def send(self, *parts: Buffer) -> None:
        self.out.extend(memoryview(part).cast("B") for part in parts if len(part))

    def answer(self, frame: Frame, status: Status, aux: int = 0) -> None:
        self.send(frames.bare(frame, status, aux))

    def close(self) -> None:
        self._conversation.close()
        self.out.clear()
        self.place = memoryview(b"")
        self.socket.close()
        self.server.closed(self)


class _Loop:
    """One serving thread."""

    def __init__(self, server: PeerServer, number: int) -> None:
        self.server = server
        self.thread = threading.Thread(target=self._run, name=f"kvstore-peer-{number}", daemon=True)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._new: deque[socket.socket] = deque()
        self._links: set[_Link] = set()
        self._stopping = False
        self._listener: socket.socket | None = None
        self._accepted: Callable[[socket.socket], None] = lambda connection: None
        self._deaf_until = 0.0  # out of descriptors: accepting again would fail at once

    def listen(self, listener: socket.socket, accepted: Callable[[socket.socket], None]) -> None:
        self._listener, self._accepted = listener, accepted
        self._selector.register(listener, selectors.EVENT_READ)

    def adopt(self, connection: socket.socket) -> None:
        self._new.append(connection)
        self._wake()

    def stop(self) -> None:
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
            self._wake_write.send(b"w", socket.MSG_DONTWAIT)

    def _run(self) -> None:
        swept = time.monotonic()
        while not self._stopping:
            for key, _ in self._selector.select(SWEEP_SECONDS):
                if isinstance(key.data, _Link):
                    self._turn(key.data)
                elif key.fileobj is self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_read.recv(4096)
                else:
                    self._accept()
            while self._new:
                self._begin(self._new.popleft())
            now = time.monotonic()
            if now - swept >= SWEEP_SECONDS:
                swept = now
                self._sweep(now)
        for link in list(self._links):
            self._end(link)
        while self._new:
            self._begin(self._new.popleft())
        for link in list(self._links):
            self._end(link)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            self._selector.unregister(self._listener)
            self._deaf_until = time.monotonic() + SWEEP_SECONDS
            return
        self._accepted(connection)

    def _begin(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            set_liveness(connection)
        link = _Link(self.server, connection, time.monotonic())
        self._links.add(link)
        self._selector.register(connection, selectors.EVENT_READ, link)

    def _turn(self, link: _Link) -> None:
        try:
            alive = link.turn()
        except OSError:
            alive = False
        except Exception:  # of a window source or a sink: one connection ends, not the thread that serves all others
            self.server.count("faults")
            alive = False
        if not alive:
            self._end(link)
            return
        mask = selectors.EVENT_WRITE if link.out else selectors.EVENT_READ
        if mask != link.mask:
            link.mask = mask
            self._selector.modify(link.socket, mask, link)

    def _sweep(self, now: float) -> None:
        for link in [link for link in self._links if link.late(now)]:
            self.server.count("idle" if link.between and not link.out else "cut")
            self._end(link)
        if self._listener is not None and self.server.handoffs is not None:
            self.server.handoffs.sweep()
        if self._deaf_until and now >= self._deaf_until and self._listener is not None:
            self._deaf_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _end(self, link: _Link) -> None:
        self._links.discard(link)
        self._selector.unregister(link.socket)
        link.close()


# --- the conversation ---


def _converse(link: _Link) -> _Conversation:
    """Ends where the connection has to."""
    server = link.server
    greeted = False
    head = memoryview(bytearray(wire.HEADER_BYTES))
    while True:
        link.rest()
        link.between = greeted  # a HELLO is owed from the first moment
        yield head
        try:
            frame, body_bytes = wire.decode_header(bytes(head))
        except ProtocolError:
            return  # not one of ours: not a word
        refusal = _refusal(frame, body_bytes, greeted)
        if refusal is not None:
            server.count("refused")
            link.answer(frame, refusal)
            return
        if frame.verb == Verb.PART:
            yield from _take_part(link, frame, body_bytes)
            continue
        body = memoryview(bytearray(body_bytes))
        if body_bytes:
            yield body
        small = bytes(body)
        if wire.body_check(small) != frame.check:
            link.answer(frame, Status.CORRUPT)
            return
        try:
            fine = _answer(link, frame, small)
        except ProtocolError:
            server.count("refused")
            link.answer(frame, Status.BAD_REQUEST)
            return
        if not fine:
            return
        greeted = True


def _refusal(frame: Frame, body_bytes: int, greeted: bool) -> Status | None:
    """Why nothing more is read after this header."""
    if frame.version != wire.VERSION:
        return Status.BAD_VERSION
    if frame.kind != Kind.REQUEST or frame.flags or frame.status or frame.aux:
        return Status.BAD_REQUEST
    if (frame.verb == Verb.HELLO) == greeted or frame.verb not in _VERBS:
        return Status.BAD_REQUEST
    limit = {Verb.HELLO: wire.HELLO_BODY_MAX, Verb.PART: frames.PART.size + frames.PART_BYTES_MAX}.get(Verb(frame.verb), frames.BODY_MAX)
    return Status.TOO_LARGE if body_bytes > limit else None


_VERBS: Final = frozenset(Verb)


def _answer(link: _Link, frame: Frame, body: bytes) -> bool:
    """False: the connection ends after this answer. Raises ProtocolError."""
    server, sink = link.server, link.server.handoffs
    match Verb(frame.verb):
        case Verb.HELLO:
            status = _greet(server, body)
            if status is not Status.OK:
                link.answer(frame, status)
                return False
            link.send(wire.encode(Verb.HELLO, frames.hello(server.cluster, server.boot_id), request_id=frame.request_id, kind=Kind.REPLY))
        case Verb.WINDOW:
            _give_window(link, frame, *frames.decode_window(body))
        case Verb.OFFER:
            offer = Offer.decode(body)
            accepts = sink is not None and not server.draining
            status = sink.offer(offer, link) if sink is not None and accepts else Status.DRAINING if server.draining else Status.BUSY
            server.count("offers_taken" if status is Status.OK else "offers_refused")
            link.answer(frame, status)
        case Verb.COMMIT:
            if link.left():  # it was given up while this stood here or on its way: who sent it answers itself, or is dead
                server.count("commits_left")
                return False
            link.answer(frame, sink.commit(*frames.decode_commit(body)) if sink is not None else Status.NOT_FOUND)
        case _:
            if len(body) != frames.ID_BYTES:
                raise ProtocolError("E625", "ABORT of an agent", "its lengths do not add up")
            link.answer(frame, sink.abort(body) if sink is not None else Status.NOT_FOUND)
    return True


def _greet(server: PeerServer, body: bytes) -> Status:
    theirs = Hello.decode(body)
    if not theirs.version_min <= wire.VERSION <= theirs.version_max:
        return Status.BAD_VERSION
    if theirs.role != frames.ROLE_AGENT:
        return Status.BAD_REQUEST
    if theirs.cluster != server.cluster:
        return Status.WRONG_CLUSTER
    return Status.OK


def _give_window(link: _Link, frame: Frame, owner: bytes, key: bytes) -> None:
    server = link.server
    entry = server.windows(owner, key) if server.windows is not None else None
    if entry is None:
        server.count("windows_missing")
        link.answer(frame, Status.NOT_FOUND)
        return
    view = memoryview(entry).cast("B")
    if len(view) > frames.WINDOW_BYTES_MAX or not server.reserve_out(len(view)):
        server.count("busy")
        link.answer(frame, Status.BUSY)
        return
    link.reserved += len(view)
    server.count("windows_sent")
    server.count("window_bytes_sent", len(view))
    link.send(frames.window_reply_head(frame, frames.window_sum(owner, key, view), len(view)), view)


def _take_part(link: _Link, frame: Frame, body_bytes: int) -> _Conversation:
    """The bytes go straight to their place; without one they are read and forgotten."""
    sink = link.server.handoffs
    left = body_bytes - frames.PART.size
    if left <= 0:
        link.answer(frame, Status.BAD_REQUEST)
        yield from _skip(body_bytes)
        return
    head = memoryview(bytearray(frames.PART.size))
    yield head
    handoff_id, section, part, check = frames.PART.unpack(head)
    place = sink.place(handoff_id, section, part, left) if sink is not None else Status.NOT_FOUND
    if not isinstance(place, memoryview):
        yield from _skip(left)
        link.answer(frame, place)
        return
    assert sink is not None
    status: Status | None = None
    try:
        yield place
        status = sink.placed(handoff_id, section, part, check)
    finally:
        if status is None:
            sink.unplaced(handoff_id, section, part)
    link.server.count("part_bytes_taken", left)
    link.answer(frame, status)


def _skip(count: int) -> _Conversation:
    scratch = memoryview(bytearray(min(count, 64 << 10)))
    while count > 0:
        yield scratch[: min(count, len(scratch))]
        count -= len(scratch)
