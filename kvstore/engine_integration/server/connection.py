"""A connection to the HTTP server, with limits of its own: how many there are, and how long the head of a request may take to come.

uvicorn has neither: as many clients as it takes that send nothing, or never end their first line, would shut out all others for good. It is
h11's, whose heads are bounded in size.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstore.engine_integration.server.guard import refuse
from kvstore.engine_integration.server.requests import Refusal

CONNECTIONS_MAX: Final = 256  # past it requests are refused; past twice as many connections are closed without a word
HEAD_SECONDS: Final = 10.0


class Connection(H11Protocol):
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > 2 * CONNECTIONS_MAX:
            transport.abort()
            return
        if len(self.connections) > CONNECTIONS_MAX:
            self.app: Any = _full
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._end_wait()
        elif self._late is None:  # the next request has begun
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._late = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _end_wait(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


async def _full(scope: Scope, receive: Receive, send: Send) -> None:
    await refuse(send, Refusal(503, f"{CONNECTIONS_MAX} connections are open: try again later", code="connections_full"))
