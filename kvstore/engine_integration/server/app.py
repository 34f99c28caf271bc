"""The endpoints.

    POST /v1/chat/completions, /v1/completions      OpenAI's, streaming or not
    GET  /v1/models, /v1/models/{id}
    GET  /health (also /livez, /readyz), /metrics
    GET  /                                          the chat page; it asks no other host, and neither do we

A body is read up to a limit before anything parses it. On a loopback address requests must name a loopback host, so that no page of another
site gets an answer by a name that it points here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from kvstore.engine_integration.engine import Engine
from kvstore.engine_integration.engine import Request as EngineRequest
from kvstore.engine_integration.server.answers import Form, event
from kvstore.engine_integration.server.generation import Generation, refusal_of
from kvstore.engine_integration.server.guard import Guard
from kvstore.engine_integration.server.metrics import Answers
from kvstore.engine_integration.server.page import page
from kvstore.engine_integration.server.requests import ChatAsked, CompletionAsked, Refusal
from kvstore.engine_integration.server.template import Template
from kvstore.errors import Closed, KvstoreError, MisuseError
from kvstore.http import METRICS_TYPE
from kvstore.live.web import HEADERS

OWNER: Final = "kvstore"
EXAMPLE: Final = "model.py"  # the page's long prompt: a source file, which is what the model was trained on
EXAMPLE_CHARS: Final = 6000  # some seconds of computing
ANSWER_SECONDS: Final = 1800.0  # of one answer, taken by its client included; the engine's own deadline is shorter
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Service:
    """What the endpoints answer from."""

    engine: Engine
    template: Template
    model: str
    host: str  # that is listened on
    context_tokens: int  # of a prompt and its answer
    classes: frozenset[str]  # retention classes of the cluster
    facts: dict[str, Any] = field(default_factory=dict)  # for the page: weights, cluster
    answers: Answers = field(default_factory=Answers)
    metrics: Callable[[], bytes] = lambda: b""
    draining: Callable[[], bool] = lambda: False
    created: int = field(default_factory=lambda: int(time.time()))


def app_of(service: Service) -> FastAPI:
    app = FastAPI(title="kvstore", docs_url=None, redoc_url=None)  # both would load scripts of other hosts
    app.add_middleware(Guard, host=service.host)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatAsked, request: Request) -> Response:
        return await answer(service, request, asked)

    @app.post("/v1/completions")
    async def complete(asked: CompletionAsked, request: Request) -> Response:
        return await answer(service, request, asked)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(service, name)
        return _model(service)

    @app.get("/health")
    @app.get("/livez")
    @app.get("/readyz")
    async def health(request: Request) -> Response:
        draining = service.draining() and request.url.path != "/livez"
        return Response("draining\n" if draining else "ok\n", 503 if draining else 200, media_type="text/plain")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(service.metrics), media_type=METRICS_TYPE)

    @app.get("/")
    async def chat_page() -> Response:
        body, policy = page()
        return Response(body, headers={**HEADERS, "Content-Security-Policy": policy}, media_type="text/html; charset=utf-8")

    @app.get("/api/facts")
    async def facts() -> dict[str, Any]:
        return {"model": service.model, "context_tokens": service.context_tokens, **service.facts}

    @app.get("/api/example")
    async def example() -> dict[str, Any]:
        return {"name": EXAMPLE, "text": files("kvstore.engine_integration.model").joinpath(EXAMPLE).read_text()[:EXAMPLE_CHARS]}

    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> Response:
        return _refused(refusal)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return _refused(_of_validation(error))

    @app.exception_handler(HTTPException)
    async def wrong(request: Request, error: HTTPException) -> Response:
        return _refused(Refusal(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}".lower()), error.headers)

    @app.exception_handler(Exception)  # a bug of ours; its trace is logged
    async def failed(_: Request, error: Exception) -> Response:
        return _refused(refusal_of("error"))

    return app


async def answer(service: Service, request: Request, asked: ChatAsked | CompletionAsked) -> Response:
    """Raises Refusal for whatever is wrong before the first token."""
    stops, form = asked.stop, Form(isinstance(asked, ChatAsked), service.model, asked.include_usage)
    generation = Generation(_submit(service, asked), service.template, stops)
    gone = asyncio.create_task(_until_gone(request))
    streaming = False
    try:
        await _first_of(asyncio.create_task(generation.begin()), gone)
        if asked.stream:
            streaming = True
            return _Stream(form, generation)
        text = await _first_of(asyncio.create_task(_whole_text(generation)), gone)
        return JSONResponse(form.whole(text, generation))
    finally:
        gone.cancel()
        if not streaming:
            generation.close()


def _submit(service: Service, asked: ChatAsked | CompletionAsked) -> EngineRequest:
    asked.check_extras()
    _check_model(service, asked.model)
    tokens = asked.prompt_tokens(service.template)
    wanted = asked.answer_tokens()
    if len(tokens) + wanted > service.context_tokens:
        raise Refusal(
            400,
            f"this model's context is {service.context_tokens} tokens: {len(tokens)} of the prompt and {wanted} of the answer are more",
            param="messages" if isinstance(asked, ChatAsked) else "prompt",
            code="context_length_exceeded",
        )
    if asked.kvstore.retention_class not in service.classes:
        known = ", ".join(sorted(service.classes))
        raise Refusal(400, f"no such retention class; the cluster has {known}", param="kvstore.retention_class", code="invalid_value")
    if service.draining():
        raise Refusal(503, "the server is shutting down", code="shutting_down")
    try:
        request = service.engine.submit(tokens, options=asked.options(service.template))
    except Closed:
        raise Refusal(503, "the server is shutting down", code="shutting_down") from None
    except MisuseError as error:  # tokens out of range, a class that is unknown, more than fits
        raise Refusal(400, _told(error), code=error.code) from None
    request.listen(lambda piece: service.answers.count(request) if piece.finished else None)
    return request


class _Stream(StreamingResponse):
    """Ends its request however it ends itself: also where the client goes away before the first byte, or takes none."""

    def __init__(self, form: Form, generation: Generation) -> None:
        super().__init__(_events(form, generation), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


async def _events(form: Form, generation: Generation) -> AsyncIterator[bytes]:
    """What goes wrong from here on is an event, for the status is sent."""
    try:
        yield form.first()
        async for text in generation.texts():
            yield form.part(text)
        yield form.last(generation)
    except Refusal as refusal:
        yield event(refusal.body())


async def _whole_text(generation: Generation) -> str:
    return "".join([text async for text in generation.texts()])


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _first_of(work: asyncio.Task[T], gone: asyncio.Task[None]) -> T:
    """The work's result. Raises Refusal where the client went away before, or where it took too long."""
    await asyncio.wait({work, gone}, timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        work.cancel()
        raise refusal_of("cancelled" if gone.done() else "deadline")
    return work.result()


def _check_model(service: Service, name: str) -> None:
    if name != service.model:
        raise Refusal(
            404, f'the model "{name[:64]}" does not exist; this server has "{service.model}"', param="model", code="model_not_found"
        )


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": OWNER,
        "max_model_len": service.context_tokens,
    }


def _of_validation(error: RequestValidationError) -> Refusal:
    """The first thing that is wrong, and where."""
    first = error.errors()[0]
    path = list(first["loc"][1:])
    if not path or not isinstance(path[0], str):  # no JSON, or no object
        return Refusal(400, "the body is no JSON object, or its Content-Type is not application/json", code="invalid_value")
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:129]
    return Refusal(400, f"{name}: {first['msg']}", param=name, code="invalid_value")


def _told(error: KvstoreError) -> str:
    return f"{error.what}: {error.cause}" if error.cause else error.what


def _refused(refusal: Refusal, headers: Any = None) -> Response:
    more = {"Retry-After": "1"} if refusal.status == 429 else {}
    return JSONResponse(refusal.body(), refusal.status, headers={**(headers or {}), **more})
