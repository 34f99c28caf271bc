"""Requests that one engine begins and another ends: prefill here, decode there. docs/ENGINE.md tells the flow.

    engine.submit(prompt, options=..., give=to(peers, address))   sends global rows while the prompt is read (giving.py), and the rest after
                                                                 the first token; where nobody takes it, goes on by itself
    Takeovers(engine, inbox)                                     the other side: lets its engine answer what arrives whole

What goes over beside the rows: options (but for the tenant's secret, which never leaves its process), what of the request is stored and how
it was resumed. A request whose secret the other side does not know is answered there, and not stored.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from kvstore.client.agent.frames import Offer
from kvstore.client.agent.handoff import begin
from kvstore.client.agent.inbox import HandoffInbox
from kvstore.client.agent.peers import Peers
from kvstore.engine_integration.engine.giving import Give
from kvstore.engine_integration.engine.options import RequestOptions
from kvstore.engine_integration.engine.request import Request
from kvstore.engine_integration.engine.resuming import Worth
from kvstore.engine_integration.model.handover import SAMPLER_BYTES_MAX, Buffer, blocks_needed, export_rest
from kvstore.engine_integration.model.resume import Resume, WindowUse
from kvstore.engine_integration.model.state import Bytes
from kvstore.errors import KvstoreError, LayoutError
from kvstore.wire import Status

if TYPE_CHECKING:
    from kvstore.engine_integration.engine.engine import Engine
    from kvstore.engine_integration.engine.task import Task

_POLL_SECONDS: Final = 0.25
_DEFAULT: Final = RequestOptions()
_RESUME_COUNTS: Final = ("blocks_end_tokens", "start_tokens", "exact_from_tokens")
_SLACK_BYTES: Final = 16  # what is stored is not known yet when the settings' length is offered


def to(peers: Peers, address: str, note: bytes = b"") -> Give:
    """Gives to the agent at `address`. `note`: for who decides there (Takeovers' `secret_of`)."""
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
    resume = {field.name: getattr(task.resume, field.name) for field in fields(Resume)}
    told = {
        "options": {name: sorted(value) if isinstance(value, frozenset) else value for name, value in options.items()},
        "secret": bool(task.options.secret),
        "resume": resume | {"window": task.resume.window.value},
        "worth": [task.worth.approximate_tokens, task.worth.depth],
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
        approximate_tokens, depth = told["worth"]
        counts = (approximate_tokens, depth, told["stored_blocks"], *(getattr(resume, name) for name in _RESUME_COUNTS))
        fine = all(type(count) is int and 0 <= count < 1 << 31 for count in counts) and _same_types(options)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, KvstoreError):
        fine = False
    if not fine:
        raise LayoutError("E576", "handoff", "its settings cannot be", "hand over between processes of one version")
    return options, resume, Worth(approximate_tokens, depth), told["stored_blocks"]


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
        self.refused = self.taken = 0  # handoffs whose bytes were not a request of this model; those that were
        self._engine, self._inbox = engine, inbox
        self._began = began or (lambda handoff_id, request: None)
        self._secret_of = secret_of or (lambda note: b"")
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvstore-takeovers", daemon=True)
        self._thread.start()

    def accept(self, offer: Offer) -> Status:
        """For HandoffInbox(accept=...): what the engine can never hold, or has no place for now, goes elsewhere."""
        return accepts(self._engine, offer, self._inbox.offers())

    def close(self) -> None:
        self._closing = True
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._take_one()

    def _take_one(self) -> None:
        """A call of its own: between two of them nothing here holds on to an arrival's memory."""
        arrival = self._inbox.take(deadline_seconds=_POLL_SECONDS, owner="takeovers", whole=True)
        if arrival is None:
            return
        try:
            found = {name: arrival.section(name) for name, _ in arrival.offer.sections}
            sections: dict[str, Buffer] = {name: data for name, data in found.items() if data is not None}
            request = self._engine.take_over(sections, secret=self._secret_of(arrival.offer.note))
            self.taken += 1
        except Exception:  # whatever was sent: others still have to be answered
            self.refused += 1
            return
        finally:
            self._inbox.release(arrival)
        self._began(arrival.id, request)


def accepts(engine: Engine, offer: Offer, on_their_way: Iterable[Offer] = ()) -> Status:
    """Whether `engine` has pages for an offer, beside those for offers whose prompts are still being read elsewhere."""
    needed = blocks_needed(engine.model, offer.sections) + 1
    promised = sum(blocks_needed(engine.model, other.sections) + 1 for other in on_their_way)
    assert engine.pages.capacity is not None
    if needed > engine.pages.capacity:
        return Status.NO_SPACE
    return Status.OK if needed + promised <= engine.pages.free else Status.BUSY


__all__ = ["Takeovers", "accepts", "offered_bytes", "pack", "settings_of", "to"]
