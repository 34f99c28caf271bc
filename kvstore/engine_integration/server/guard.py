"""What every request passes first: a host name of this machine where only this machine is listened on, and a body of bounded size."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstore.engine_integration.server.requests import Refusal
from kvstore.live.web import is_loopback, named_host

BODY_BYTES_MAX: Final = 8 << 20
DISCARDED_BYTES_MAX: Final = 64 << 20
BODY_SECONDS: Final = 30.0


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._loopback = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if self._loopback and not is_loopback(named_host(host)):
            await refuse(send, Refusal(421, f'"{host[:64]}" is not the name of this server; ask http://127.0.0.1'))
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(receive)
        except TimeoutError:
            await refuse(send, Refusal(408, f"the body did not come within {BODY_SECONDS:g} s"))
            return
        except Refusal as refusal:
            await refuse(send, refusal)
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)


async def _body(receive: Receive) -> bytes:
    """The whole of it. Raises Refusal where it is too long, or where the client went away."""
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise Refusal(499, "the client went away")
        part = message.get("body", b"")
        size += len(part)
        if size <= BODY_BYTES_MAX:
            parts.append(part)
        elif size <= DISCARDED_BYTES_MAX:  # a client that is refused while it sends sees a broken connection instead of the reason
            parts.clear()
        else:
            break
        more = message.get("more_body", False)
    if size > BODY_BYTES_MAX:
        raise Refusal(413, f"a request has at most {BODY_BYTES_MAX:,} bytes", code="request_too_large")
    return b"".join(parts)


async def refuse(send: Send, refusal: Refusal) -> None:
    """Answers, and ends the connection."""
    body: Any = json.dumps(refusal.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
