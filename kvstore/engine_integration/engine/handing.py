"""Requests that one engine begins and another ends: prefill here, decode there. docs/ENGINE.md tells the flow.

    engine.submit(prompt, options=..., give=to(peers, address))   sends global rows while the prompt is read (giving.py), and the rest after
                                                                 the first token; where nobody takes it, goes on by itself
    Takeovers(engine, inbox)                                     the other side: lets its engine answer what arrives whole; what it cannot
                                                                 take is refused before its sender lets go of it

What goes over beside the rows: options (but for the tenant's secret, which never leaves its process), what of the request is stored and how
it was resumed. A request whose secret the other side does not know is answered there, and not stored.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Final

from kvstore.client.agent.frames import Offer, address_of
from kvstore.client.agent.handoff import begin
from kvstore.client.agent.inbox import Arrival, HandoffInbox
from kvstore.client.agent.moving import NOTE
from kvstore.client.agent.peers import Peers
from kvstore.engine_integration.engine.giving import Give
from kvstore.engine_integration.engine.options import RequestOptions
from kvstore.engine_integration.engine.request import Request
from kvstore.engine_integration.engine.resuming import Worth
from kvstore.engine_integration.model.handover import SAMPLER_BYTES_MAX, Buffer, blocks_needed, export_rest
from kvstore.engine_integration.model.resume import Resume, WindowUse
from kvstore.engine_integration.model.state import Bytes
from kvstore.errors import Closed, KvstoreError, LayoutError, MisuseError
from kvstore.wire import Status

if TYPE_CHECKING:
    from kvstore.engine_integration.engine.engine import Engine
    from kvstore.engine_integration.engine.task import Task

_log = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.25
_LAST_POLL_SECONDS: Final = 0.01
_DEFAULT: Final = RequestOptions()
_RESUME_COUNTS: Final = ("blocks_end_tokens", "start_tokens", "exact_from_tokens")
_SLACK_BYTES: Final = 16  # what is stored is not known yet when the settings' length is offered


def to(peers: Peers, address: str, note: bytes = b"") -> Give:
    """Gives to the agent at `address`. `note`: for who decides there (Takeovers' `secret_of`). Raises MisuseError E575 for what is none."""
    address_of(address)
    return lambda sections: begin(peers, address, sections, note=note)


def offered_bytes(task: Task) -> int | None:
    """Bytes of the settings in an offer, made while the prompt is read; None: too many, it cannot be given away."""
    size = len(_settings(task)) + _SLACK_BYTES
    return size if size <= SAMPLER_BYTES_MAX else None


def pack(task: Task, settings_bytes: int) -> dict[str, Bytes]:
    """All of a request between two steps of its answer but its whole blocks."""
    assert task.state is not None
    settings = _settings(task).ljust(settings_bytes)
    return export_rest(task.model, task.state, task.tokens, settings, task.last_output, task.drafts)


def _settings(task: Task) -> bytes:
    options = {field.name: getattr(task.options, field.name) for field in fields(RequestOptions) if field.name != "secret"}
    if task.options.deadline_seconds is not None:  # counts from the submission here
        options["deadline_seconds"] = max(0.001, round(task.deadline_seconds - time.monotonic(), 3))
    resume = {field.name: getattr(task.resume, field.name) for field in fields(Resume)}
    told = {
        "options": {name: sorted(value) if isinstance(value, frozenset) else value for name, value in options.items()},
        "secret": bool(task.options.secret),
        "resume": resume | {"window": task.resume.window.value},
        "worth": asdict(task.worth),
        "stored_blocks": task.stored_blocks,
    }
    return json.dumps(told).encode()


def settings_of(sampler: bytes, secret: bytes) -> tuple[RequestOptions, Resume, Worth, int]:
    """What `pack` told. Raises LayoutError E576."""
    try:
        told = json.loads(sampler)
        given: dict[str, Any] = {name: frozenset(value) if isinstance(value, list) else value for name, value in told["options"].items()}
        if told["secret"] and not secret:
            given["store"] = False  # under which keys?
        options = RequestOptions(**given, secret=secret if told["secret"] else b"")
        resume = Resume(**(told["resume"] | {"window": WindowUse(told["resume"]["window"])}))
        worth = Worth(**told["worth"])
        counts = (worth.approximate_tokens, worth.depth, told["stored_blocks"], *(getattr(resume, name) for name in _RESUME_COUNTS))
        fine = all(type(count) is int and 0 <= count < 1 << 31 for count in counts) and worth.depth < 1 << 16 and _same_types(options)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, KvstoreError):
        fine = False
    if not fine:
        raise LayoutError("E576", "handoff", "its settings cannot be", "hand over between processes of one version")
    return options, resume, worth, told["stored_blocks"]


def _same_types(options: RequestOptions) -> bool:
    """As the defaults', where these have one; ranges were checked before."""
    for field in fields(RequestOptions):
        value, default = getattr(options, field.name), getattr(_DEFAULT, field.name)
        if isinstance(default, frozenset):
            fine = isinstance(value, frozenset) and all(type(token) is int for token in value)
        else:
            fine = type(value) is type(default) or default is None or (isinstance(default, float) and type(value) is int)
        if not fine:
            return False
    return True


class Takeovers:
    """Lets `engine` answer what comes into `inbox`, from construction to `close`."""

    def __init__(
        self,
        engine: Engine,
        inbox: HandoffInbox,
        *,
        began: Callable[[bytes, Request], None] | None = None,
        secret_of: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """`began`: told each request with its handoff's id, on a thread of this object. `secret_of`: a tenant's, from the offer's note."""
        self.refused = self.taken = 0  # handoffs that were whole and could not be taken; those that were
        self._engine, self._inbox = engine, inbox
        self._began = began or (lambda handoff_id, request: None)
        self._secret_of = secret_of or (lambda note: b"")
        self._lock = threading.Lock()
        self._closing = False
        self._agreed: set[bytes] = set()  # to these, which are not taken yet
        inbox.agree = self._agree
        self._thread = threading.Thread(target=self._run, name="kvstore-takeovers", daemon=True)
        self._thread.start()

    def accept(self, offer: Offer) -> Status:
        """For HandoffInbox(accept=...): what the engine can never hold, or has no place for now, goes elsewhere."""
        if offer.note == NOTE:  # windows of an agent that ends: for another agent
            return Status.NO_SPACE
        return Status.DRAINING if self._closing else accepts(self._engine, offer, self._inbox.offers())

    def close(self) -> None:
        """What was agreed to is begun; everything else stays where it is, from now on."""
        with self._lock:
            self._closing = True
        self._thread.join()

    def _agree(self, arrival: Arrival) -> Status:
        """On a serving thread, once all is there: who sends it lets go of the request when this says OK."""
        if arrival.offer.note == NOTE:
            return Status.NO_SPACE
        try:
            self._engine.check_taken(_sections_of(arrival))
        except Closed:
            return Status.DRAINING
        except LayoutError as error:
            return self._refuse(Status.BAD_VERSION, str(error))
        except MisuseError as error:
            return self._refuse(Status.NO_SPACE, str(error))
        with self._lock:
            if self._closing:
                return Status.DRAINING
            if len(self._agreed) >= self._engine.places_free():
                return Status.BUSY
            self._agreed.add(arrival.id)
        return Status.OK

    def _refuse(self, status: Status, why: str) -> Status:
        self.refused += 1
        _log.warning("a handoff is not taken: %s", why)
        return status

    def _run(self) -> None:
        while self._take_one() or not self._done():
            pass

    def _done(self) -> bool:
        with self._lock:
            self._agreed = {name for name in self._agreed if self._inbox.holds(name)}
            return self._closing and not self._agreed

    def _take_one(self) -> bool:
        """A call of its own: between two of them nothing here holds on to an arrival's memory."""
        arrival = self._inbox.take(deadline_seconds=_LAST_POLL_SECONDS if self._closing else _POLL_SECONDS, owner="takeovers", whole=True)
        if arrival is None:
            return False
        request = None
        try:
            request = self._engine.take_over(_sections_of(arrival), secret=self._secret(arrival.offer.note))
            self.taken += 1
        except Exception as error:  # whatever it is: others still have to be answered
            self._refuse(Status.INTERNAL, str(error))
        finally:
            self._inbox.release(arrival)
            with self._lock:
                self._agreed.discard(arrival.id)
        if request is not None:
            self._tell(arrival.id, request)
        return True

    def _secret(self, note: bytes) -> bytes:
        try:
            return self._secret_of(note)
        except Exception:  # the caller's; then nothing of the request is stored
            _log.exception("the secret of a handoff is not known")
            return b""

    def _tell(self, handoff_id: bytes, request: Request) -> None:
        try:
            self._began(handoff_id, request)
        except Exception:  # the caller's: the next handoffs still have to be taken
            _log.exception("after a handoff was taken")


def _sections_of(arrival: Arrival) -> dict[str, Buffer]:
    found = {name: arrival.section(name) for name, _ in arrival.offer.sections}
    return {name: data for name, data in found.items() if data is not None}


def accepts(engine: Engine, offer: Offer, on_their_way: Iterable[Offer] = ()) -> Status:
    """Whether `engine` has pages and a place for an offer, beside those for offers whose prompts are still being read elsewhere, and for
    taken requests that wait."""
    needed, promised = blocks_needed(engine.model, offer.sections) + 1, engine.pages_promised()
    others = [blocks_needed(engine.model, other.sections) + 1 for other in on_their_way]
    assert engine.pages.capacity is not None
    if needed > engine.pages.capacity:
        return Status.NO_SPACE
    room = needed + promised + sum(others) <= engine.pages.free
    return Status.OK if room and len(others) < engine.places_free() else Status.BUSY


__all__ = ["Takeovers", "accepts", "offered_bytes", "pack", "settings_of", "to"]
