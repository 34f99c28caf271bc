"""An engine worker's agent, where that is a process of its own (`kvstore agent`): the verbs of Agent, over a socket and shared memory.

    with WorkerAgent("/run/user/1000/kvstore/agent.sock", layout=layout) as agent:
        ticket = agent.lookup(keys, input_tokens=len(prompt))
        with agent.stage(ticket, by_plane=True) as staged:
            for ready in staged.planes():
                use(staged.rows[: ready.blocks], ready.plane)  # the agent's memory: nothing is copied

An agent that is gone, hangs or is full is a miss, said once in the log: the engine computes. It is attached again by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from kvstore.client import store as stores
from kvstore.client.agent import bodies
from kvstore.client.agent.agent import Window
from kvstore.client.agent.attachment import Attachment, Call, Gone, attach
from kvstore.client.agent.frames import ID_BYTES
from kvstore.client.agent.handoff import ANSWER_SECONDS, HandoffOutcome
from kvstore.client.agent.keeps import WINDOW_SLOTS
from kvstore.client.agent.link import Kind
from kvstore.client.agent.request import RequestWindows
from kvstore.client.agent.staged import Staged, StagedLoad
from kvstore.client.agent.worker_values import ClientFacts, HandedOver, WorkerTicket
from kvstore.client.buffers import as_rows
from kvstore.client.load import Hedge, Load, checked_blocks
from kvstore.client.native import U8
from kvstore.client.store import StoreFuture
from kvstore.client.ticket import EXTENT, Ticket
from kvstore.client.values import Accept, Fidelity, LoadOutcome, LoadResult, PlaneReady, StoreOutcome
from kvstore.errors import Closed, KvstoreError, LayoutError, MisuseError, Unreachable
from kvstore.keys import BLOCK_TOKENS, Keys, checked_keys
from kvstore.layout import Layout

log = logging.getLogger(__name__)

GRACE_SECONDS: Final = 0.5  # beyond the deadline that the agent was given: then it hangs
LOOKUP_SECONDS: Final = 2.0  # the defaults of ClientConfig
LOAD_SECONDS: Final = 10.0
STORE_SECONDS: Final = 60.0
WINDOW_SECONDS: Final = 0.5
AGAIN_SECONDS: Final = (0.05, 1.0)  # between tries to attach: the first, doubled up to the second


class WorkerAgent:
    """Safe to share between threads; not usable in a forked child."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        layout: Layout,
        owner: bytes = bytes(16),
        kv_group: int = 0,
        block_tokens: int = BLOCK_TOKENS,
        slots: int = WINDOW_SLOTS,
        name: str = "",
        wait_seconds: float = 2.0,
    ) -> None:
        """Attaches to the agent at `path`, and goes on without it where nobody answers in `wait_seconds`. `slots` as in AgentConfig.

        Raises what the agent refuses this engine with: ProtocolError (another version, user, or kind of engine), Unreachable (full).
        """
        self.path = os.fspath(path)
        self.layout = layout
        self.block_tokens = block_tokens
        self.slots = slots
        self._hello = bodies.Hello(layout, owner, kv_group, block_tokens, slots, name)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._attachment: Attachment | None = None
        self._facts: ClientFacts | None = None
        self._refused: KvstoreError | None = None
        self._closed = False
        self._attached_count = self._missed = self._stores_open = 0
        self._thread = threading.Thread(target=self._run, name="kvstore-worker", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._attachment is not None or self._refused is not None, wait_seconds)
            refused = self._refusal()
        if refused is not None:
            self.close()
            raise refused

    # --- the connection ---

    def _run(self) -> None:
        pause, warned = AGAIN_SECONDS[0], False
        while not self._is_closed():
            why = ""
            try:
                attachment = attach(self.path, self._hello)
            except (Gone, KvstoreError) as error:
                why = str(error)
                if isinstance(error, KvstoreError) and not self._attached_count:
                    with self._changed:
                        self._refused = error
                        self._changed.notify_all()
            else:
                pause = AGAIN_SECONDS[0]
                with self._changed:
                    self._attachment = attachment
                    self._facts = self._facts or ClientFacts.of(self._hello, attachment.welcome)
                    self._attached_count += 1
                    self._changed.notify_all()
                if self._is_closed():
                    attachment.close()
                if warned:
                    log.warning("agent at %s is back", self.path)
                warned = False
                why = attachment.serve()
                with self._changed:
                    self._attachment = None
            if not self._is_closed() and not warned:
                log.warning("agent at %s is not there (%s): lookups miss and the engine computes until it is back", self.path, why)
                warned = True
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause)
            pause = min(2 * pause, AGAIN_SECONDS[1])

    def _refusal(self) -> KvstoreError | None:
        return self._refused

    def _is_closed(self) -> bool:
        return self._closed

    @property
    def attached(self) -> bool:
        return self._attachment is not None

    @property
    def memory(self) -> U8 | None:
        """The agent's memory, in which staged rows lie, read-only: for a mover to adopt at the start. None: no agent is there; a new one
        has another."""
        attachment = self._attachment
        return attachment.arena if attachment is not None else None

    def wait_attached(self, timeout_seconds: float) -> bool:
        """Waits until the agent is there; False when the time passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._attachment is not None, timeout_seconds)

    def _ask(self, kind: Kind, *parts: bytes) -> Call:
        """Raises Gone, and counts it."""
        attachment = self._attachment
        if attachment is None:
            self._missed += 1
            raise Gone("not attached")
        return attachment.ask(kind, *parts)

    @property
    def client(self) -> ClientFacts:
        """What an engine asks of its agent's client. Raises Unreachable E214 where no agent has been there yet."""
        facts = self._facts
        if facts is None:
            raise Unreachable("E214", f"agent at {self.path}", "has not been there yet", "start one with kvstore agent; wait_attached()")
        return facts

    # --- lookup ---

    def lookup(
        self,
        keys: Keys,
        *,
        input_tokens: int | None = None,
        accept: Accept = Accept.EXACT,
        retention_class: str = "chat",
        deadline_seconds: float | None = None,
    ) -> Ticket:
        """Agent.lookup. Without an agent, or where it is draining, nothing hits."""
        self._check_open()
        keys = checked_keys(keys)
        if len(keys) > bodies.KEYS_MAX:
            keys = keys[: bodies.KEYS_MAX]
        asked = bodies.LookupAsked(keys, accept, retention_class, deadline_seconds, input_tokens)
        try:
            answer = self._ask(Kind.LOOKUP, asked.encode()).only(_end(deadline_seconds, LOOKUP_SECONDS))
        except Gone:
            return self._miss(keys, retention_class)
        if answer.kind != Kind.TICKET:
            return self._miss(keys, retention_class)
        ticket = WorkerTicket.unverified(answer.body, b"")
        return replace(ticket, asked_blocks=len(keys), retention_class=retention_class, data=answer.body)

    def _miss(self, keys: Keys, retention_class: str) -> Ticket:
        tag = int.from_bytes(self.layout.digest()[:8], "little")
        nothing: Any = np.zeros(0, EXTENT)
        return WorkerTicket(
            keys[:0], nothing, self.block_tokens, len(keys), self._hello.owner, bytes(16), tag, 0, 0, b"", retention_class
        )  # fmt: skip

    def ticket(self, data: bytes) -> Ticket:
        """A ticket that an agent made; the agent that loads it checks its seal. Raises ProtocolError."""
        return replace(WorkerTicket.unverified(data, b""), data=data)

    # --- loads ---

    def stage(
        self,
        ticket: Ticket,
        *,
        by_plane: bool = True,
        hedge: Hedge = "lazy",
        deadline_seconds: float | None = None,
        blocks: range | None = None,
    ) -> Staged:
        """Has the agent load `blocks` of the ticket's hit (all of it by default) into its memory, of which the rows come to be seen here.

        Where the worker's quota is smaller, or used up, only as many leading blocks as fit: `LoadOutcome.BUSY`.
        Raises MisuseError, Closed, and for a ticket of another agent's key ProtocolError.
        """
        self._check_open()
        wanted = checked_blocks(ticket, blocks)
        if not len(wanted):
            return Staged(self.layout, 1, None, LoadOutcome.COMPLETE, 0.0)
        data = ticket.to_bytes()
        asked = bodies.LoadAsked(
            data, wanted.start, len(wanted), hedge == "eager", by_plane, deadline_seconds, ticket.retention_class
        )  # fmt: skip
        end = _end(deadline_seconds, LOAD_SECONDS)
        try:
            call = self._ask(Kind.LOAD, asked.encode())
        except Gone:
            return Staged(self.layout, 1, None, LoadOutcome.UNREACHABLE, end)
        try:
            return Staged(self.layout, call.attachment.welcome.k, call, LoadOutcome.UNREACHABLE, end)
        except BaseException:
            call.attachment.let_go(call.number)
            raise

    def load(
        self,
        ticket: Ticket,
        destination: Any = None,
        *,
        hedge: Hedge = "lazy",
        deadline_seconds: float | None = None,
        blocks: range | None = None,
    ) -> LoadResult:
        """Client.load, into memory of the caller's own, in as many parts as the quota asks for."""
        wanted = checked_blocks(ticket, blocks)
        rows = self._destination(destination, wanted)
        began, end, done = time.monotonic(), _end(deadline_seconds, LOAD_SECONDS), 0
        while True:
            left = end - GRACE_SECONDS - time.monotonic()
            with self.stage(ticket, by_plane=False, hedge=hedge, deadline_seconds=max(0.0, left), blocks=wanted[done:]) as staged:
                result = staged.finish()
                rows[done : done + result.blocks] = staged.rows[: result.blocks]
            done += result.blocks
            if result.outcome is not LoadOutcome.BUSY or not result.blocks:
                return replace(result, blocks=done, bytes=done * rows.shape[1], seconds=time.monotonic() - began)

    def planes(
        self,
        ticket: Ticket,
        destination: Any,
        *,
        hedge: Hedge = "lazy",
        deadline_seconds: float | None = None,
        blocks: range | None = None,
    ) -> Iterator[PlaneReady]:
        """Client.planes, into memory of the caller's own. As many leading blocks as the quota has room for."""
        return self.planes_with(None, ticket, destination, hedge=hedge, deadline_seconds=deadline_seconds, blocks=blocks)

    def planes_with(
        self,
        began: Callable[[Load], None] | None,
        ticket: Ticket,
        destination: Any,
        *,
        hedge: Hedge = "lazy",
        deadline_seconds: float | None = None,
        blocks: range | None = None,
    ) -> Generator[PlaneReady, None, None]:
        """Client.planes_with: `began` is given what can be cancelled, and tells how it ended."""
        wanted = checked_blocks(ticket, blocks)
        rows = self._destination(destination, wanted)
        with self.stage(ticket, hedge=hedge, deadline_seconds=deadline_seconds, blocks=wanted) as staged:
            if began is not None:
                began(StagedLoad(staged))
            missing = True
            try:
                for ready in staged.planes():
                    columns = staged.columns(ready.plane)
                    rows[: ready.blocks, columns] = staged.rows[: ready.blocks, columns]
                    yield ready
                missing = False
            finally:
                if missing:  # let go of in mid-way: what is whole by now is there in every plane, as of any load
                    staged.cancel()
                    blocks_whole = staged.finish().blocks
                    rows[:blocks_whole] = staged.rows[:blocks_whole]

    def _destination(self, destination: Any, wanted: range) -> U8:
        if destination is None:
            destination = np.empty((len(wanted), self.layout.block_bytes), np.uint8)
        return as_rows(destination, len(wanted), self.layout.block_bytes, writable=True)

    # --- stores ---

    def buffer(self, blocks: int) -> U8:
        """(blocks, block_bytes) to compute into: store() takes them from there without a copy. Free again when the last view of it is gone.
        Where the shared memory is full, or there is no agent, plain memory, which store() copies."""
        attachment, size = self._attachment, blocks * self.layout.block_bytes
        taken = attachment.take(size) if attachment is not None and size else None
        return (np.empty(size, np.uint8) if taken is None else taken).reshape(blocks, self.layout.block_bytes)

    def store(
        self, keys: Keys, blocks: Any, *, first_block: int, retention_class: str = "chat", fidelity: Fidelity = Fidelity.EXACT
    ) -> StoreFuture:
        """Client.store. Memory that is not from buffer() is copied before this returns. DROPPED where there is no room or no agent."""
        self._check_open()
        keys, rows = checked_keys(keys), as_rows(blocks, None, self.layout.block_bytes, writable=False)
        if not 0 <= first_block <= len(keys) - len(rows):
            what = f"blocks {first_block} to {first_block + len(rows)}"
            raise LayoutError("E524", what, f"the chain has {len(keys)} keys", "pass the whole chain from block 0")
        if not len(rows):
            return stores.nothing_to_store()
        future = stores.new_future()
        attachment = self._attachment
        offset = attachment.own_offset(rows) if attachment is not None else None
        copied = attachment is not None and offset is None
        if attachment is not None and copied:
            offset = attachment.copy_in(rows)
        if attachment is None or offset is None or len(keys) > bodies.KEYS_MAX:
            self._missed += 1
            future.set_result(stores.not_sent(StoreOutcome.DROPPED, 1))
            return future
        asked = bodies.StoreAsked(keys[: first_block + len(rows)], offset, first_block, len(rows), fidelity, retention_class)
        with self._changed:
            self._stores_open += 1
        try:
            attachment.ask(Kind.STORE, asked.encode(), then=partial(self._stored, future, None if copied else rows, offset))
        except Gone:
            self._store_ended()
            future.set_result(stores.not_sent(StoreOutcome.DROPPED, 1))
        return future

    def _store_ended(self) -> None:
        with self._changed:
            self._stores_open -= 1
            self._changed.notify_all()

    def _stored(self, future: StoreFuture, rows: U8 | None, offset: int, call: Call) -> None:
        """`rows`, the caller's, lived until now: the agent read them. None: a copy at `offset` of our own memory."""
        if rows is None:
            call.attachment.own_ranges.give(offset)  # first: who waited for this store has room for the next
        self._store_ended()
        try:
            answer = call.next(0.0)
            if answer.kind == Kind.STORED:
                future.set_result(bodies.decode_store_result(answer.body))
            else:
                future.set_result(stores.not_sent(StoreOutcome.DROPPED, 1))
        except Gone:
            future.set_result(stores.not_sent(StoreOutcome.FAILED, 1))
        except KvstoreError as error:
            future.set_exception(error)

    def flush(self, deadline_seconds: float | None = None) -> bool:
        """Waits until every store is done; False when the time passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._stores_open, STORE_SECONDS if deadline_seconds is None else deadline_seconds)

    # --- windows ---

    def window(
        self,
        keys: Keys,
        tokens: int,
        ticket: Ticket | None = None,
        accept: Accept = Accept.EXACT,
        *,
        deadline_seconds: float | None = None,
    ) -> Window | None:
        """Agent.window. The entry lies in the agent's memory, which is let go of when the last view of it is gone."""
        block = self._block_of(keys, tokens)
        data = ticket.to_bytes() if ticket is not None else b""
        asked = bodies.WindowAsked(checked_keys(keys)[:block], data, accept, deadline_seconds)
        try:
            call = self._ask(Kind.WINDOW, asked.encode())
            answer = call.only(_end(deadline_seconds, WINDOW_SECONDS))
        except Gone:
            return None
        if answer.kind != Kind.ENTRY:
            return None
        entry = bodies.Entry.decode(answer.body)
        if not entry.where:
            return None
        view = call.attachment.pinned(call.number, entry.offset, entry.size)
        return Window(entry.tokens, view.data, entry.fidelity, entry.where)

    def windows_at(self, keys: Keys, end: int, ticket: Ticket | None = None, accept: Accept = Accept.EXACT) -> set[int]:
        """Agent.windows_at. Nowhere, without an agent."""
        block = self._block_of(keys, end)
        if ticket is not None and ticket.usable_blocks == block:
            return {window.block * self.block_tokens for window in ticket.windows}
        asked = bodies.WindowAsked(checked_keys(keys)[:block], b"", accept, None)
        try:
            answer = self._ask(Kind.PLACES, asked.encode()).only(_end(None, WINDOW_SECONDS))
        except Gone:
            return set()
        return bodies.decode_places(answer.body) if answer.kind == Kind.FOUND else set()

    def keep_window(self, keys: Keys, tokens: int, entry: Any, *, fidelity: Fidelity = Fidelity.EXACT) -> bool:
        """Agent.keep_window. False, too, where there is no agent."""
        block = self._block_of(keys, tokens)
        source = np.frombuffer(entry, np.uint8)
        attachment = self._attachment
        offset = attachment.copy_in(source) if attachment is not None and len(source) else None
        if attachment is None or offset is None:
            self._missed += 1
            return False
        asked = bodies.KeepAsked(checked_keys(keys)[:block], offset, len(source), fidelity)
        give = partial(attachment.own_ranges.give, offset)
        try:  # an agent that is late may read it yet: its room is free when it has answered, or is gone
            answer = attachment.ask(Kind.KEEP, asked.encode(), then=lambda _: give()).next(_end(None, WINDOW_SECONDS))
        except Gone:
            return False
        return answer.kind == Kind.KEPT and answer.body == b"\1"

    def drop_window(self, keys: Keys, tokens: int) -> None:
        """Agent.drop_window."""
        block = self._block_of(keys, tokens)
        with contextlib.suppress(Gone):
            asked = bodies.KeepAsked(checked_keys(keys)[:block], 0, 0)
            self._ask(Kind.DROP, asked.encode()).only(_end(None, WINDOW_SECONDS))

    def request(self, prompt_tokens: int, missed_tokens: int = 0) -> RequestWindows:
        """Agent.request."""
        return RequestWindows(self, prompt_tokens, missed_tokens)

    # --- handoffs ---

    def give_handoff(
        self, address: str, sections: Mapping[str, Any], *, note: bytes = b"", deadline_seconds: float = 10.0
    ) -> HandoffOutcome:
        """Hands a request over to the agent at `address` (handoff.send_handoff); copied into shared memory first, which may be FULL.

        Raises MisuseError for what cannot be offered to anybody.
        """
        self._check_open()
        attachment = self._attachment
        if attachment is None:
            return HandoffOutcome.UNREACHABLE
        views = {name: np.frombuffer(data, np.uint8) for name, data in sections.items()}
        start = attachment.own_ranges.take(sum(len(view) for view in views.values()))
        if start is None:
            return HandoffOutcome.FULL
        table, at = [], start
        for name, view in views.items():
            attachment.own[at : at + len(view)] = view
            table.append((name, at, len(view)))
            at += len(view)
        asked = bodies.GiveAsked(address, tuple(table), note, deadline_seconds)
        give = partial(attachment.own_ranges.give, start)
        try:
            call = attachment.ask(Kind.GIVE, asked.encode(), then=lambda _: give())
        except Gone:
            return HandoffOutcome.LOST
        try:
            answer = call.next(_end(deadline_seconds + ANSWER_SECONDS, LOAD_SECONDS))
        except Gone:  # an agent that stood still must not send it now
            with contextlib.suppress(Gone):
                attachment.tell(Kind.CANCEL, call.number)
            return HandoffOutcome.LOST
        return HandoffOutcome(answer.body.decode()) if answer.kind == Kind.GIVEN else HandoffOutcome.FULL

    def take_handoff(self, handoff_id: bytes | None = None, *, deadline_seconds: float = 0.0) -> HandedOver | None:
        """The handoff with that id, or the one that came first, once it is whole: seen in the agent's memory. None: none by then, or the
        quota has no room for it (it waits for whoever has)."""
        self._check_open()
        try:
            call = self._ask(Kind.TAKE, bodies.TakeAsked(handoff_id or bytes(ID_BYTES), deadline_seconds).encode())
            answer = call.only(_end(deadline_seconds, 0.0))
        except Gone:
            return None
        arrived = bodies.Arrived.decode(answer.body) if answer.kind == Kind.ARRIVED else bodies.Arrived()
        if not arrived.id:
            return None
        view, at, found = call.attachment.pinned(call.number, arrived.offset, arrived.size).data.toreadonly(), 0, {}
        for name, size in arrived.sections:
            found[name] = view[at : at + size]
            at += size
        return HandedOver(arrived.id, arrived.note, found)

    def _block_of(self, keys: Keys, tokens: int) -> int:
        self._check_open()
        block, rest = divmod(tokens, self.block_tokens)
        if rest or not 0 < block <= len(keys):
            fix = f"name a multiple of {self.block_tokens} within the prompt"
            raise MisuseError("E572", f"window entry at {tokens} tokens", f"{len(keys)} keys are given", fix)
        return block

    # --- life ---

    def stats(self) -> dict[str, int]:
        """Of this worker; the agent counts the rest."""
        attachment = self._attachment
        used = attachment.own_ranges.taken_bytes if attachment is not None else 0
        return {
            "attached": int(self.attached),
            "attachments": self._attached_count,
            "missed_without_agent": self._missed,
            "buffer_bytes": used,
        }

    def close(self) -> None:
        """Detaches: the agent lets go of all that was pinned. Memory that is still looked at stays mapped. A second call does nothing, nor
        does one in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closed = True
            attachment = self._attachment
            self._changed.notify_all()
        if attachment is not None:
            attachment.close()
        if attachment is None or not attachment.telling:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise MisuseError("E548", "worker's agent", "used in a forked process", "attach in the process that uses it")
        if self._closed:
            raise Closed("E573", "agent", "is closed", "make a new one")


def _end(deadline_seconds: float | None, default: float) -> float:
    return time.monotonic() + (default if deadline_seconds is None else deadline_seconds) + GRACE_SECONDS
