"""A request as its caller sees it: pieces of the answer as they come, the whole at the end, and what its cache did for it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from kvstore.engine_integration.engine.options import RequestOptions
from kvstore.errors import DeadlineExceeded

FinishReason = Literal["stop", "length", "cancelled", "deadline", "busy", "closed", "error", "handed_over"]
_numbers: Final = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Piece:
    """The next tokens of an answer: one, or several where guesses were right. The last piece says why the answer ended; it may be empty."""

    tokens: list[int]
    finished: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """The answer, and how it came about."""

    tokens: list[int]
    finish_reason: FinishReason  # stop, length: whole. cancelled, deadline, closed: cut short. busy: the queue was full, nothing was done.
    # handed_over: another process goes on
    prompt_tokens: int
    cached_tokens: int  # of the prompt, neither computed nor replayed
    window: Literal["none", "hit", "older", "exact", "bounded"]  # how the encoder's windows at the hit came about; none: nothing was hit
    replayed_tokens: int  # below the hit, computed again for their windows alone
    approximate_tokens: int  # of the prompt, whose blocks rest on a bounded replay: this one, or those behind the blocks that were read
    depth: int  # bounded replays behind this answer, one behind the other; 0: equal bit for bit to an answer without a cache
    ttft_seconds: float  # from submit to the first token; 0 where there was none
    queue_seconds: float  # of these, waiting for room
    lookup_seconds: float
    load_seconds: float  # until all that was used had come; overlaps with prefill
    prefill_seconds: float  # computing the prompt, other requests' turns not counted
    total_seconds: float
    guessed_tokens: int
    accepted_tokens: int  # of those guessed
    load_outcome: str  # a LoadOutcome's value; "none": nothing was loaded
    stored_blocks: int  # handed to the store, which is done with them later
    preemptions: int  # times its room was taken for another, and its rows loaded or computed again
    handoff_bytes: int = 0  # given to another process; 0: it was not
    handoff_early_bytes: int = 0  # of these, already sent when the first token was said


class Request:
    """One request. Its methods may be called from any thread; `stream` by one caller at a time."""

    def __init__(self, prompt: list[int], options: RequestOptions) -> None:
        self.number = next(_numbers)
        self.prompt = prompt
        self.options = options
        self.submitted_seconds = time.monotonic()
        self._changed = threading.Condition()
        self._pieces: list[Piece] = []
        self._listeners: list[Callable[[Piece], None]] = []
        self._response: Response | None = None
        self._error: BaseException | None = None
        self._cancelled = threading.Event()
        self._wake: Callable[[], None] = lambda: None

    def stream(self) -> Iterator[Piece]:
        """Pieces from the first on, each as it comes; the last has `finished`. Raises what ended the request where it was an error."""
        for at in itertools.count():
            with self._changed:
                self._changed.wait_for(lambda: len(self._pieces) > at)  # noqa: B023  # evaluated in this turn only
                piece = self._pieces[at]
            yield piece
            if piece.finished is not None:
                if self._error is not None:
                    raise self._error
                return

    def listen(self, callback: Callable[[Piece], None]) -> None:
        """Calls back with every piece, those that came already included, in order, on the engine's thread (the first on this one). For
        event loops: the callback must be quick, must not raise, and may not call the engine."""
        with self._changed:
            for piece in self._pieces:
                callback(piece)
            self._listeners.append(callback)

    def result(self, timeout: float | None = None) -> Response:
        """Waits for the end. Raises DeadlineExceeded E210 after `timeout` seconds (the request goes on), or what ended the request."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._response is not None or self._error is not None, timeout):
                raise DeadlineExceeded("E210", f"request {self.number}", f"not done after {timeout} s", "wait longer, or cancel it")
            if self._error is not None:
                raise self._error
            assert self._response is not None
            return self._response

    def cancel(self) -> None:
        """The answer ends, as "cancelled", within one step of the engine; what the request held is free then. No effect once it is done."""
        self._cancelled.set()
        self._wake()

    @property
    def done(self) -> bool:
        return self._response is not None or self._error is not None

    # --- the engine's side ---

    def on_cancel(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def give(self, tokens: list[int]) -> None:
        self._add(Piece(tokens))

    def end(self, response: Response) -> None:
        with self._changed:
            self._response = response
            self._add(Piece([], response.finish_reason))

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._add(Piece([], "error"))

    def _add(self, piece: Piece) -> None:
        with self._changed:
            self._pieces.append(piece)
            self._changed.notify_all()
            for callback in self._listeners:
                callback(piece)
