"""Metrics of a lookup service: its table, and how it is counted. Rules: kvstore/metrics.py. Text: docs/METRICS.md."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

from prometheus_client import CollectorRegistry

from kvstore.metrics import LATENCY_BOUNDS_SECONDS, Histogram, Metric, Values, registry_of

FACES: Final = ("grpc", "http")
LOOKUP_RESULTS: Final = ("ok", "refused", "busy", "error")
LOOKUP_TOKENS: Final = ("input", "prefix", "cached")

LOOKUP: Final = (
    Metric(
        "kvstore_lookup_service_requests_total",
        "counter",
        "Questions answered, by the face they came to and outcome.",
        {"face": FACES, "result": LOOKUP_RESULTS},
    ),
    Metric(
        "kvstore_lookup_service_request_duration_seconds",
        "histogram",
        "Seconds from a question that was read to its answer.",
        {"face": FACES},
    ),
    Metric(
        "kvstore_lookup_service_tokens_total",
        "counter",
        "Tokens of prompts asked for; of these stored in front; of these not to be computed.",
        {"kind": LOOKUP_TOKENS},
    ),
    Metric("kvstore_lookup_service_running_requests", "gauge", "Questions being answered now."),
)


class LookupCounters:
    """Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str]] = Counter()
        self._seconds = {face: Histogram(LATENCY_BOUNDS_SECONDS) for face in FACES}
        self._tokens: Counter[str] = Counter()
        self.running = 0

    def begin(self, running_max: int) -> bool:
        """False: there are as many already."""
        with self._lock:
            if self.running >= running_max:
                return False
            self.running += 1
            return True

    def end(self, face: str, result: str, seconds: float) -> None:
        """Of one that began."""
        with self._lock:
            self.running -= 1
            self._requests[face, result] += 1
            self._seconds[face].observe(seconds)

    def busy(self, face: str) -> None:
        with self._lock:
            self._requests[face, "busy"] += 1

    def answered(self, input_tokens: int, prefix_tokens: int, cached_tokens: int) -> None:
        with self._lock:
            self._tokens.update({"input": input_tokens, "prefix": prefix_tokens, "cached": cached_tokens})

    def registry(self) -> CollectorRegistry:
        return registry_of(LOOKUP, self.read)

    def read(self, values: Values) -> None:
        with self._lock:
            for (face, result), count in self._requests.items():
                values.set("kvstore_lookup_service_requests_total", count, face, result)
            for face, histogram in self._seconds.items():
                values.histogram("kvstore_lookup_service_request_duration_seconds", list(histogram.counts), histogram.total, face)
            for kind, count in self._tokens.items():
                values.set("kvstore_lookup_service_tokens_total", count, kind)
            values.set("kvstore_lookup_service_running_requests", self.running)
