"""One request on the engine, from asyncio: its text as it comes, cut at stop strings, and cancelled where nobody waits any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

from kvstore.engine_integration.engine import Piece, Request, Response
from kvstore.engine_integration.server.requests import Refusal
from kvstore.engine_integration.server.template import Template
from kvstore.engine_integration.server.text import TextDecoder

ENDINGS: Final[Mapping[str, tuple[int, str, str]]] = {  # of requests that did not come to their end: status, message, code
    "busy": (429, "the queue is full: try again later", "queue_full"),
    "closed": (503, "the server is shutting down", "shutting_down"),
    "deadline": (504, "the answer was not done in its time", "deadline_exceeded"),
    "cancelled": (499, "the request was cancelled", "cancelled"),
    "error": (500, "the engine failed on this request; the server's log has the trace", "engine_error"),
}


def refusal_of(ending: str) -> Refusal:
    status, message, code = ENDINGS[ending]
    return Refusal(status, message, code=code)


class StopStrings:
    """Passes text on up to the stop string that is complete first, however the text is cut; holds back an end that may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def feed(self, text: str, *, last: bool = False) -> str:
        if self.found:
            return ""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.found = True
            passed, self._held = self._held[: min(found)[1]], ""
            return passed
        held = 0 if last else max((self._overlap(stop) for stop in self._stops), default=0)
        passed, self._held = self._held[: len(self._held) - held], self._held[len(self._held) - held :]
        return passed

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of what is held that begins `stop`."""
        return next((n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)


class Generation:
    """Made on the event loop. `begin`, then `texts` to its end, in one task; `close` always."""

    def __init__(self, request: Request, template: Template, stops: Sequence[str]) -> None:
        self.request = request
        self._template = template
        self._decoder = TextDecoder()
        self._stops = StopStrings(stops)
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self._first: Piece | None = None
        loop = asyncio.get_running_loop()

        def pass_on(piece: Piece) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended; nobody waits
                loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

        request.listen(pass_on)

    async def begin(self) -> None:
        """Waits for the first piece, so that what refuses the request can still be its status. Raises Refusal."""
        self._first = await self._pieces.get()
        self._check(self._first)

    async def texts(self) -> AsyncIterator[str]:
        """Parts of the answer, none empty. Raises Refusal where the request did not come to its end."""
        piece = self._first or await self._pieces.get()
        while True:
            self._check(piece)
            raw = self._template.bytes_of(piece.tokens)
            last = piece.finished is not None
            text = self._stops.feed(self._decoder.feed(raw, last=last), last=last)
            if text:
                yield text
            if self._stops.found and not last:
                self.request.cancel()
            if last:
                return
            piece = await self._pieces.get()

    def _check(self, piece: Piece) -> None:
        if piece.finished is not None and piece.finished in ENDINGS and not (piece.finished == "cancelled" and self._stops.found):
            raise refusal_of(piece.finished)

    @property
    def finish_reason(self) -> str:
        """As OpenAI names it; once texts() has ended."""
        return "length" if self.response.finish_reason == "length" and not self._stops.found else "stop"

    @property
    def response(self) -> Response:
        """Once texts() has ended."""
        return self.request.result(0)

    def close(self) -> None:
        """Frees what the request holds where it is not done."""
        if not self.request.done:
            self.request.cancel()
