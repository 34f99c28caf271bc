"""The lookup service's two faces: POST /v1/lookup, and kvstore.v1.Lookup (proto/lookup.proto). Both say the same."""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl

import grpc
import numpy as np

from kvstore.errors import KeyFormatError, KvstoreError, ProtocolError
from kvstore.http import ByteBudget, Page, Request
from kvstore.metrics_lookup import LookupCounters
from kvstore.owners import DEFAULT
from kvstore.server.lookup import Answer, Lookups, Question, keys_from
from kvstore.server.proto import lookup_pb2, lookup_pb2_grpc

PATH: Final = "/v1/lookup"
RUNNING_MAX: Final = 32
BODY_BYTES_MAX: Final = 16 << 20  # 10^6 tokens are 4 MB of binary, 5 MB of varints, 8 MB of JSON
CALL_BYTES_MAX: Final = 8 << 20  # of a gRPC question, which is in memory before anybody looks at it
QUESTIONS_BYTES_MAX: Final = 32 << 20  # of all that are being answered: as tokens they take six times that
LARGE_BYTES: Final = 1 << 20  # what such a question took is given back to the system when no more come
_FIELDS: Final = {"tenant": str, "retention_class": str, "depth_max": int, "input_tokens": int, "deadline_seconds": float}


class Faces:
    """One service, asked over both. Safe to share between threads."""

    def __init__(self, lookups: Lookups, counters: LookupCounters, running_max: int = RUNNING_MAX) -> None:
        self.lookups, self.counters, self.running_max = lookups, counters, running_max
        self.bytes = ByteBudget(QUESTIONS_BYTES_MAX)
        self.were_large = False  # questions since this was last set

    def took(self, question_bytes: int) -> None:
        self.were_large |= question_bytes >= LARGE_BYTES

    def ask(self, face: str, question: Question) -> Answer | None:
        """None: too many at once. Raises what Lookups.ask does."""
        if not self.counters.begin(self.running_max):
            self.counters.busy(face)
            return None
        began, result = time.monotonic(), "error"
        try:
            answer = self.lookups.ask(question)
            result = "ok"
            self.counters.answered(answer.input_tokens, answer.prefix_tokens, answer.cached_tokens)
            return answer
        except (ProtocolError, KeyFormatError):
            result = "refused"
            raise
        finally:
            self.counters.end(face, result, time.monotonic() - began)

    # --- HTTP ---

    def page(self, request: Request) -> Page:
        """Of POST /v1/lookup: JSON, or tokens as u32 LE with the other fields in the query."""
        if request.method != "POST":
            return _refused("POST a prompt here", HTTPStatus.METHOD_NOT_ALLOWED)
        self.took(len(request.body))
        try:
            answer = self.ask("http", self._question(request))
        except (ProtocolError, KeyFormatError) as error:
            return _refused(error.cause or error.what, HTTPStatus.BAD_REQUEST, error.code)
        except KvstoreError as error:
            return _refused(str(error), HTTPStatus.SERVICE_UNAVAILABLE, error.code)
        if answer is None:
            return _refused(f"{self.running_max} questions are being answered", HTTPStatus.TOO_MANY_REQUESTS)
        return Page(json.dumps(_as_json(answer)).encode() + b"\n", "application/json")

    def _question(self, request: Request) -> Question:
        if request.content_type.partition(";")[0].strip() == "application/octet-stream":
            if len(request.body) % 4:
                raise ProtocolError("E629", "lookup", f"{len(request.body)} bytes are no u32 tokens")
            return Question(tokens=np.frombuffer(request.body, "<u4"), **_fields(dict(parse_qsl(request.query)), texts=True))
        try:
            asked = json.loads(request.body)
        except (ValueError, RecursionError):
            raise ProtocolError("E629", "lookup", "the body is not JSON") from None
        if not isinstance(asked, dict):
            raise ProtocolError("E629", "lookup", "the body is not a JSON object")
        tokens, keys = asked.pop("tokens", None), asked.pop("keys", None)
        return Question(tokens=_tokens(tokens), keys=_keys(keys), **_fields(asked))

    # --- gRPC ---

    def add_to(self, server: grpc.Server) -> None:
        lookup_pb2_grpc.add_LookupServicer_to_server(_Servicer(self), server)  # type: ignore[no-untyped-call]  # generated code


class _Servicer(lookup_pb2_grpc.LookupServicer):
    def __init__(self, faces: Faces) -> None:
        self._faces = faces

    def Lookup(self, request: lookup_pb2.LookupRequest, context: Any) -> lookup_pb2.LookupReply:
        size = request.ByteSize()
        if not self._faces.bytes.take(size):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"questions of {QUESTIONS_BYTES_MAX} bytes are being answered")
        try:
            self._faces.took(size)
            return self._answer(request, context)
        finally:
            self._faces.bytes.give(size)

    def _answer(self, request: lookup_pb2.LookupRequest, context: Any) -> lookup_pb2.LookupReply:
        try:
            keys = keys_from(request.keys) if request.keys else None
            question = Question(
                tokens=np.array(request.tokens, np.uint32) if keys is None or request.tokens else None, keys=keys,
                input_tokens=request.input_tokens, tenant=request.tenant or DEFAULT, retention_class=request.retention_class or "chat",
                depth_max=request.depth_max, deadline_seconds=context.time_remaining(),
            )  # fmt: skip
            answer = self._faces.ask("grpc", question)
        except (ProtocolError, KeyFormatError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise  # abort raises itself
        except KvstoreError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise
        if answer is None:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._faces.running_max} questions are being answered")
            raise AssertionError  # abort raises itself
        return _as_reply(answer)


def _as_reply(answer: Answer) -> lookup_pb2.LookupReply:
    size, fidelity = answer.ticket.block_tokens, answer.ticket.fidelity
    windows = [
        lookup_pb2.Window(tokens=at.block * size, holders=list(at.holders), approximate=at.approximate) for at in answer.windows
    ]  # fmt: skip
    return lookup_pb2.LookupReply(
        ticket=answer.ticket.to_bytes(), input_tokens=answer.input_tokens, prefix_tokens=answer.prefix_tokens,
        cached_tokens=answer.cached_tokens, uncached_tokens=answer.uncached_tokens, window=answer.window, windows=windows,
        fidelity=fidelity.kind.name.lower(), depth=fidelity.depth, expires_unix_ms=answer.ticket.expires_unix_ms, block_tokens=size,
    )  # fmt: skip


def _as_json(answer: Answer) -> dict[str, Any]:
    size, fidelity = answer.ticket.block_tokens, answer.ticket.fidelity
    return {
        "ticket": base64.b64encode(answer.ticket.to_bytes()).decode(),
        "input_tokens": answer.input_tokens,
        "prefix_tokens": answer.prefix_tokens,
        "cached_tokens": answer.cached_tokens,
        "uncached_tokens": answer.uncached_tokens,
        "window": answer.window,
        "windows": [{"tokens": at.block * size, "holders": list(at.holders), "approximate": at.approximate} for at in answer.windows],
        "fidelity": fidelity.kind.name.lower(),
        "depth": fidelity.depth,
        "expires_unix_ms": answer.ticket.expires_unix_ms,
        "block_tokens": size,
    }


def _refused(cause: str, status: HTTPStatus, code: str = "") -> Page:
    return Page(json.dumps({"error": {"code": code, "message": cause}}).encode() + b"\n", "application/json", status)


def _tokens(given: Any) -> np.ndarray[Any, np.dtype[np.uint32]] | None:
    if given is None:
        return None
    if not isinstance(given, list) or not all(type(token) is int and 0 <= token < 1 << 32 for token in given):
        raise ProtocolError("E629", "lookup", '"tokens" is no list of numbers from 0 to 2^32 - 1')
    return np.array(given, np.uint32)


def _keys(given: Any) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    if given is None:
        return None
    try:
        return keys_from(bytes.fromhex("".join(given))) if isinstance(given, list) else keys_from(bytes.fromhex(given))
    except (ValueError, TypeError):
        raise ProtocolError("E629", "lookup", '"keys" is neither hex digits nor a list of them') from None


def _fields(given: Mapping[str, Any], texts: bool = False) -> dict[str, Any]:
    """The other fields of a question, each of its type; of texts, as in a query."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in _FIELDS:
            raise ProtocolError("E629", "lookup", f"no field {name[:64]!r} is known: tokens, keys, {', '.join(_FIELDS)}")
        kind: Any = _FIELDS[name]
        read: Any = value
        if texts or (kind is float and type(value) is int):
            with contextlib.suppress(ValueError, OverflowError):  # 10^400
                read = kind(value)
        if type(read) is not kind or (kind is float and not 0 < read < 1e6) or (kind is int and not 0 <= read < 1 << 32):
            raise ProtocolError("E629", "lookup", f"{name!r} is not a {kind.__name__} in its range")
        found[name] = read
    return found
