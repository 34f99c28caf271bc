"""What the server counts of its answers: the SERVER table of kvstore/metrics.py."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

from kvstore.engine_integration.engine import Request
from kvstore.metrics import FIRST_TOKEN_BOUNDS_SECONDS, WINDOW_USES, Histogram, Values

_TOKENS: Final = ("prompt", "cached", "replayed", "approximate", "generated")
_RESULT_OF: Final = {"stop": "ok", "length": "ok", "handed_over": "ok", "cancelled": "cancelled", "busy": "busy"}


class Answers:
    """Counts answers; safe on many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._first = {window: Histogram(FIRST_TOKEN_BOUNDS_SECONDS) for window in WINDOW_USES}

    def count(self, request: Request) -> None:
        """A request that has ended."""
        try:
            response = request.result(0)
        except Exception:  # what ended it: whoever waits for the answer is told
            with self._lock:
                self._results["error"] += 1
            return
        with self._lock:
            self._results[_RESULT_OF.get(response.finish_reason, "error")] += 1
            if response.finish_reason == "busy":
                return
            counts = (response.prompt_tokens, response.cached_tokens, response.replayed_tokens, response.approximate_tokens)
            self._tokens.update(dict(zip(_TOKENS, (*counts, len(response.tokens)), strict=True)))
            if response.tokens:
                self._first[response.window].observe(response.ttft_seconds)

    def read(self, values: Values) -> None:
        with self._lock:
            for result, count in self._results.items():
                values.set("kvstore_engine_requests_total", count, result)
            for kind, count in self._tokens.items():
                values.set("kvstore_engine_tokens_total", count, kind)
            for window, histogram in self._first.items():
                values.histogram("kvstore_engine_first_token_seconds", list(histogram.counts), histogram.total, window)
