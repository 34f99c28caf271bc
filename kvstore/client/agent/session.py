"""One worker of an agent process: what it asked, and what is pinned for it. When its socket closes or its process ends, all is let go.

    pin        a range of the agent's memory, under the number of the request that made it, until RELEASE or the end of the session
    a load     writes into its pin until the client has ended it: only then the range is free for others, whatever became of the worker
    a store    reads the worker's own memory, which nobody else is given, until it is done; it goes on when the worker is gone

The reader thread takes messages and never waits for nodes or peers; verbs that do run on the process's pool. A worker that asks too much at
once, or pins more than its quota, is told BUSY; one that breaks the protocol or does not take its answers is cut.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np

from kvstore.client.agent import bodies
from kvstore.client.agent.agent import Agent
from kvstore.client.agent.arena import Arena, make_memory
from kvstore.client.agent.handoff import send_handoff
from kvstore.client.agent.link import BODY_BYTES_MAX, HEADER, Kind, Link, Message, peer_of
from kvstore.client.agent.taker import LOOK_SECONDS, Taker
from kvstore.client.load import Load
from kvstore.client.native import U8
from kvstore.client.ticket import Ticket
from kvstore.client.values import LoadOutcome, LoadResult, StoreResult
from kvstore.errors import KvstoreError, LayoutError, MisuseError, ProtocolError

REQUESTS_MAX: Final = 32  # of one worker, asked and not answered: each may take a thread of the pool
STORES_MAX: Final = 256  # likewise of stores, which take none
GREETING_SECONDS: Final = 5.0
HANDOFF_SECONDS: Final = 60.0  # what a GIVE or a TAKE may take
STALE_SECONDS: Final = 0.25  # a TAKE that is so late is not answered with a handoff: less than a worker's grace
assert bodies.KEYS_MAX * (32 + 72) + HEADER.size < BODY_BYTES_MAX


class Host(Protocol):
    """What a session needs of its process (process.py)."""

    memory: U8
    memory_fd: int
    arena: Arena
    pool: ThreadPoolExecutor
    quota_bytes: int
    own_bytes: int
    draining: bool

    def attach(self, session: Session, hello: bodies.Hello) -> Agent: ...
    def taker_of(self, agent: Agent) -> Taker: ...
    def control(self, message: Message) -> dict[str, Any]: ...
    def count(self, what: str, result: str) -> None: ...
    def warn(self, text: str) -> None: ...


@dataclass(slots=True)
class _Pin:
    offset: int
    size: int
    filling: bool = True  # something writes there: until that has ended the range is nobody else's
    released: bool = False


class _Running:
    """A load that was asked for, which may be called off before it has begun. What it writes to is free only when it has ended."""

    def __init__(self) -> None:
        self.load: Load | None = None
        self.cancelled = False
        self.released = False  # by the worker, or with it

    def began(self, load: Load) -> None:
        self.load = load
        if self.cancelled:
            load.cancel()

    def cancel(self) -> None:
        self.cancelled = True
        if self.load is not None:
            self.load.cancel()


class Session:
    """`run` on a thread of its own; `end` from any."""

    def __init__(self, host: Host, connection: socket.socket) -> None:
        self.host = host
        self.link = Link(connection)
        self.pid, self.uid = peer_of(connection)
        self.hello: bodies.Hello | None = None  # once attached
        self.kind: bodies.Hello | None = None  # of engine; the process's own
        self.attached_at = 0.0
        self._agent: Agent | None = None
        self._own: U8 | None = None
        self._lock = threading.Lock()
        self._pins: dict[int, _Pin] = {}
        self._running: dict[int, _Running] = {}
        self._asked: set[int] = set()  # not answered yet; but for stores
        self._storing: set[int] = set()
        self._called_off: set[int] = set()  # of GIVEs that are not answered
        self._over = False

    # --- the reader ---

    def run(self) -> None:
        handle = -1
        with contextlib.suppress(OSError):  # of another pid namespace, or gone already: the socket's end must do
            handle = os.pidfd_open(self.pid) if self.pid else -1
        try:
            self._serve(handle)
        except (OSError, EOFError):
            pass  # the worker is gone
        except KvstoreError as error:
            self.host.count("worker", "cut")
            self.host.warn(f"worker {self.pid} is cut: {error}")
            with contextlib.suppress(OSError):
                self.link.send(Kind.REFUSED, 0, bodies.encode_error(error))
        except Exception as error:  # a bug of ours: it costs this worker its connection, and is told
            self.host.count("worker", "cut")
            self.host.warn(f"worker {self.pid} is cut: {error!r}")
        finally:
            self.end()
            self.link.dispose()
            if handle >= 0:
                os.close(handle)

    def _serve(self, handle: int) -> None:
        poll = select.poll()
        poll.register(self.link.fileno(), select.POLLIN)
        if not poll.poll(GREETING_SECONDS * 1000):
            raise ProtocolError("E635", "agent socket", "a connection that says nothing")
        message, _ = self.link.receive()
        if message.kind in (Kind.STATUS, Kind.DRAIN):
            self._tell(message)
            return
        if message.kind != Kind.HELLO:
            raise ProtocolError("E635", "agent socket", f"a connection that begins with message {message.kind}")
        self._attach(message)
        if handle >= 0:  # a child that was forked from the worker may hold the socket open
            poll.register(handle, select.POLLIN)
        while not self._over:
            if any(descriptor == handle for descriptor, _ in poll.poll()):
                return
            self._take(self.link.receive()[0])

    def _tell(self, message: Message) -> None:
        import json

        self.link.send(Kind.TOLD, message.number, json.dumps(self.host.control(message)).encode())

    def _attach(self, message: Message) -> None:
        hello = bodies.Hello.decode(message.body)
        try:
            self._agent = self.host.attach(self, hello)
        except KvstoreError as error:
            self.host.count("worker", "refused")
            self.link.send(Kind.REFUSED, message.number, bodies.encode_error(error))
            raise EOFError from None
        self.hello, self.attached_at = hello, time.monotonic()
        own_fd, self._own = make_memory("kvstore-worker", self.host.own_bytes, read_only=False)
        try:
            map_of = self._agent.client.map
            welcome = bodies.Welcome(
                self.host.arena.size_bytes, self.host.own_bytes, self.host.quota_bytes, map_of.k, map_of.tag, tuple(map_of.classes)
            )  # fmt: skip
            self.link.send(Kind.WELCOME, message.number, welcome.encode(), fds=[self.host.memory_fd, own_fd])
        finally:
            os.close(own_fd)
        self.host.count("worker", "attached")

    def _take(self, message: Message) -> None:
        number = message.number
        if message.kind == Kind.CANCEL:
            self._cancel(number)
        elif message.kind == Kind.RELEASE:
            self._release(number)
        elif message.kind in _VERBS:
            name, verb = _VERBS[Kind(message.kind)]
            with self._lock:
                if number in self._asked or number in self._storing or number in self._pins:
                    raise ProtocolError("E635", "agent socket", f"request {number} is asked twice")
                open_now, most = (self._storing, STORES_MAX) if message.kind == Kind.STORE else (self._asked, REQUESTS_MAX)
                busy = len(open_now) >= most or (self.host.draining and message.kind in _NEW_WORK)
                if not busy:
                    open_now.add(number)
                    if message.kind == Kind.LOAD:
                        self._running[number] = _Running()
            if busy:
                self._answer(name, "busy", Kind.BUSY, number)
            else:
                self.host.pool.submit(self._run, name, verb, message)
        else:
            raise ProtocolError("E635", "agent socket", f"message {message.kind}, which no worker sends")

    # --- on the pool ---

    def _run(self, name: str, verb: Callable[[Session, Message], None], message: Message) -> None:
        try:
            if not self._over:
                verb(self, message)
        except KvstoreError as error:
            if isinstance(error, ProtocolError) and error.code == "E637":  # no worker of ours writes that
                self.host.count("worker", "cut")
                self.host.warn(f"worker {self.pid} is cut: {error}")
                self.link.close()
            self._answer(name, "refused", Kind.REFUSED, message.number, bodies.encode_error(error))
        except OSError:
            self.host.count(name, "gone")
        except Exception as error:  # a bug of ours costs this worker its request, not the others theirs
            self.host.warn(f"{name} of worker {self.pid} failed: {error!r}")
            fault = MisuseError("E549", name, f"failed in the agent: {error!r}", "report it, with the agent's log")
            self._answer(name, "refused", Kind.REFUSED, message.number, bodies.encode_error(fault))

    def _answer(self, name: str, result: str, kind: Kind, number: int, *parts: bytes) -> bool:
        """False: the worker is gone."""
        with self._lock:
            self._asked.discard(number)
            self._called_off.discard(number)
            self._storing.discard(number)
            self._running.pop(number, None)  # of a load that never began
        self.host.count(name, result)
        try:
            self.link.send(kind, number, *parts)
        except OSError:  # the reader finds out
            return False
        return True

    def _lookup(self, message: Message) -> None:
        asked = bodies.LookupAsked.decode(message.body)
        ticket = self.agent.lookup(
            asked.keys, accept=asked.accept, retention_class=asked.retention_class, deadline_seconds=asked.deadline_seconds,
            input_tokens=asked.input_tokens,
        )  # fmt: skip
        self._answer("lookup", "ok", Kind.TICKET, message.number, ticket.to_bytes())

    def _load(self, message: Message) -> None:
        asked = bodies.LoadAsked.decode(message.body)
        client = self.agent.client
        ticket = replace(self.agent.ticket(asked.ticket), retention_class=asked.retention_class)
        wanted = range(asked.first, asked.first + asked.count)
        if wanted.stop > ticket.hit_blocks:
            raise MisuseError("E564", f"blocks {wanted}", f"the ticket has {ticket.hit_blocks} blocks", "pass a range inside them")
        size, running = client.layout.block_bytes, self._running[message.number]
        pin = self._pin(message.number, size, asked.count)
        if pin is None:
            self._answer("load", "busy", Kind.BUSY, message.number)
            return
        wanted = wanted[: pin.size // size]
        try:
            rows = self.host.memory[pin.offset : pin.offset + len(wanted) * size].reshape(-1, size)
            self.link.send(Kind.STAGED, message.number, bodies.encode_staged(pin.offset, len(wanted)))
            result = self._fill(message.number, ticket, rows, wanted, asked, running)
        finally:  # the pin stays also where no block is whole: the worker may be looking at a plane that it was told of
            with self._lock:
                del self._running[message.number]
            self._filled(message.number, release=running.released)
        if len(wanted) < asked.count and result.outcome is LoadOutcome.COMPLETE:
            result = replace(result, outcome=LoadOutcome.BUSY)
        self._answer("load", "ok", Kind.LOADED, message.number, bodies.encode_load_result(result))

    def _fill(self, number: int, ticket: Ticket, rows: U8, wanted: range, asked: bodies.LoadAsked, running: _Running) -> LoadResult:
        client = self.agent.client
        options: dict[str, Any] = {
            "hedge": "eager" if asked.eager else "lazy", "deadline_seconds": asked.deadline_seconds, "blocks": wanted,
        }  # fmt: skip
        if running.cancelled:
            return _nothing(LoadOutcome.CANCELLED)
        if not asked.by_plane:
            return client.load_with(running.began, ticket, rows, **options)
        with contextlib.closing(client.planes_with(running.began, ticket, rows, **options)) as planes:
            for ready in planes:
                self.link.send(Kind.PLANE, number, bodies.encode_plane(ready.plane, ready.blocks))
        return running.load.finish() if running.load is not None else _nothing(LoadOutcome.EXPIRED)

    def _store(self, message: Message) -> None:
        asked = bodies.StoreAsked.decode(message.body)
        size = self.agent.client.layout.block_bytes
        rows = self._own_range(asked.offset, asked.blocks * size).reshape(asked.blocks, size)
        future = self.agent.store(
            asked.keys, rows, first_block=asked.first_block, retention_class=asked.retention_class, fidelity=asked.fidelity
        )  # fmt: skip

        def done(result: StoreResult) -> None:
            self._answer("store", "ok", Kind.STORED, message.number, bodies.encode_store_result(result))

        # Not on the thread that tells all stores: this worker may be slow to take its answer.
        future.add_done_callback(lambda told: self.host.pool.submit(done, told.result()))

    def _window(self, message: Message) -> None:
        asked = bodies.WindowAsked.decode(message.body)
        ticket = self.agent.ticket(asked.ticket) if asked.ticket else None
        tokens = len(asked.keys) * self.agent.block_tokens
        found = self.agent.window(asked.keys, tokens, ticket=ticket, accept=asked.accept, deadline_seconds=asked.deadline_seconds)
        entry = bodies.Entry()
        if found is not None:
            size = len(found.entry)
            pin = self._pin(message.number, size, 1)
            if pin is None:
                self._answer("window", "busy", Kind.BUSY, message.number)
                return
            try:
                self.host.memory[pin.offset : pin.offset + size] = np.frombuffer(found.entry, np.uint8)
            finally:
                self._filled(message.number)
            entry = bodies.Entry(pin.offset, size, found.tokens, found.fidelity, found.where)
        self._answer("window", "ok", Kind.ENTRY, message.number, entry.encode())

    def _places(self, message: Message) -> None:
        asked = bodies.WindowAsked.decode(message.body)
        ticket = self.agent.ticket(asked.ticket) if asked.ticket else None
        found = self.agent.windows_at(asked.keys, len(asked.keys) * self.agent.block_tokens, ticket, asked.accept)
        self._answer("places", "ok", Kind.FOUND, message.number, bodies.encode_places(sorted(found)))

    def _keep(self, message: Message) -> None:
        asked = bodies.KeepAsked.decode(message.body)
        tokens = len(asked.keys) * self.agent.block_tokens
        kept = self.agent.keep_window(asked.keys, tokens, self._own_range(asked.offset, asked.size), fidelity=asked.fidelity)
        self._answer("keep", "ok", Kind.KEPT, message.number, bytes([kept]))

    def _drop(self, message: Message) -> None:
        asked = bodies.KeepAsked.decode(message.body)
        self.agent.drop_window(asked.keys, len(asked.keys) * self.agent.block_tokens)
        self._answer("drop", "ok", Kind.KEPT, message.number, b"\0")

    def _give(self, message: Message) -> None:
        asked = bodies.GiveAsked.decode(message.body)
        sections = {name: self._own_range(offset, size).data for name, offset, size in asked.sections}
        seconds = HANDOFF_SECONDS if asked.deadline_seconds is None else min(HANDOFF_SECONDS, asked.deadline_seconds)
        outcome = send_handoff(
            self.agent.peers, asked.address, sections, note=asked.note, deadline_seconds=seconds,
            wanted=lambda: not self._over and message.number not in self._called_off,
        )  # fmt: skip
        self._answer("give", "ok", Kind.GIVEN, message.number, outcome.value.encode())

    def _take_handoff(self, message: Message) -> None:
        asked = bodies.TakeAsked.decode(message.body)
        taker, wanted = self.host.taker_of(self.agent), asked.id if any(asked.id) else None
        end = time.monotonic() + min(HANDOFF_SECONDS, asked.deadline_seconds or 0.0)
        arrival = None
        while arrival is None and not self._over and not self.host.draining:
            left = end - time.monotonic()
            if left < -STALE_SECONDS:  # this process stood still, and the worker has gone on
                break
            arrival = taker.take(wanted, max(0.0, min(left, LOOK_SECONDS)))
            if left <= 0:
                break
        if arrival is None:
            self._answer("take", "ok", Kind.ARRIVED, message.number)
            return
        pin = self._pin(message.number, max(1, arrival.offer.total_bytes), 1)
        if pin is None:
            taker.inbox.put_back(arrival)
            self._answer("take", "busy", Kind.BUSY, message.number)
            return
        at, copied = pin.offset, False
        try:
            for name, size in arrival.offer.sections:
                data = arrival.section(name)
                assert data is not None  # it is whole, and ours
                self.host.memory[at : at + size] = np.frombuffer(data, np.uint8)
                at += size
            copied = True
        finally:
            wanted_still = self._filled(message.number, release=not copied)
            if not copied:
                taker.inbox.put_back(arrival)
        offer = arrival.offer
        arrived = bodies.Arrived(offer.id, pin.offset, offer.sections, offer.note)
        if wanted_still and self._answer("take", "ok", Kind.ARRIVED, message.number, arrived.encode()):
            taker.inbox.release(arrival)
            return
        taker.inbox.put_back(arrival)  # the worker is gone, or has gone on: for another
        if not wanted_still:
            self._answer("take", "gone", Kind.ARRIVED, message.number)

    # --- pins ---

    @property
    def agent(self) -> Agent:
        assert self._agent is not None
        return self._agent

    def _own_range(self, offset: int, size: int) -> U8:
        assert self._own is not None
        if not 0 <= offset <= len(self._own) - size:
            raise LayoutError("E547", "worker's memory", f"{size} bytes at {offset} are not inside its {len(self._own)}")
        return self._own[offset : offset + size]

    def _pin(self, number: int, unit_bytes: int, units: int) -> _Pin | None:
        """As many units as the quota has room for; None: for none, or the memory is full."""
        with self._lock:
            left = self.host.quota_bytes - sum(pin.size for pin in self._pins.values())
            size = min(units, left // unit_bytes) * unit_bytes
            offset = None if size <= 0 or self._over else self.host.arena.take(size)
            if offset is None:
                return None
            pin = self._pins[number] = _Pin(offset, size)
            return pin

    def _cancel(self, number: int) -> None:
        with self._lock:
            running = self._running.get(number)
            if running is None and number in self._asked:
                self._called_off.add(number)
        if running is not None:
            running.cancel()

    def _release(self, number: int) -> None:
        """At once, or when what fills it has ended: whoever asks for a window or a handoff may release it before it is there."""
        with self._lock:
            running, pin = self._running.get(number), self._pins.get(number)
            if running is not None:
                running.released = True
            if pin is not None:
                pin.released = True
                self._give_if_done(number, pin)
        if running is not None:
            running.cancel()

    def _filled(self, number: int, release: bool = False) -> bool:
        """Nothing writes there any more. False: nobody wants what is there."""
        with self._lock:
            pin = self._pins[number]
            pin.filling, pin.released = False, pin.released or release
            self._give_if_done(number, pin)
            return not pin.released

    def _give_if_done(self, number: int, pin: _Pin) -> None:
        if pin.released and not pin.filling:
            del self._pins[number]
            self.host.arena.give(pin.offset)

    def end(self) -> None:
        """Lets go of everything. Any thread, any number of times."""
        with self._lock:
            self._over = True
            numbers = {*self._pins, *self._running}
        self.link.close()
        for number in numbers:
            self._release(number)

    @property
    def working(self) -> bool:
        """Loads or stores are under way, or something is not answered."""
        with self._lock:
            return bool(self._running or self._storing or self._asked)

    def facts(self) -> dict[str, Any]:
        """For `kvstore agent status`."""
        with self._lock:
            return {
                "pid": self.pid or None,
                "name": self.hello.name if self.hello else "",
                "pinned_bytes": sum(pin.size for pin in self._pins.values()),
                "pins": len(self._pins),
                "loads": len(self._running),
                "stores": len(self._storing),
                "requests": len(self._asked),
                "attached_seconds": round(time.monotonic() - self.attached_at, 1),
            }


def _nothing(outcome: LoadOutcome) -> LoadResult:
    return LoadResult(outcome, 0, 0, 0.0, 0, 0, 0, 0, 0, 0)


_VERBS: Final[dict[Kind, tuple[str, Callable[[Session, Message], None]]]] = {
    Kind.LOOKUP: ("lookup", Session._lookup),
    Kind.LOAD: ("load", Session._load),
    Kind.STORE: ("store", Session._store),
    Kind.WINDOW: ("window", Session._window),
    Kind.KEEP: ("keep", Session._keep),
    Kind.DROP: ("drop", Session._drop),
    Kind.PLACES: ("places", Session._places),
    Kind.GIVE: ("give", Session._give),
    Kind.TAKE: ("take", Session._take_handoff),
}
_NEW_WORK: Final = (Kind.LOOKUP, Kind.LOAD, Kind.STORE, Kind.GIVE)
