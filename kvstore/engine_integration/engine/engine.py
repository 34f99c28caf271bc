"""The engine: `submit` from any thread; one thread computes. docs/ENGINE.md tells the flow."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from kvstore.engine_integration.engine.options import EngineConfig, RequestOptions
from kvstore.engine_integration.engine.request import Request
from kvstore.engine_integration.model.model import Model


class Engine:
    """Continuous batching over one model and one cache. Safe to share between threads; not usable in a forked child."""

    def __init__(self, model: Model, cache: Any, config: EngineConfig | None = None) -> None:
        """`cache`: a Client of the model's layout, an Agent around one, or None: nothing is looked up or stored."""

    def submit(self, prompt: list[int], *, options: RequestOptions | None = None) -> Request:
        """Begins to answer; returns at once. Raises MisuseError for a prompt that is empty, has ids that are no tokens (E590), or does
        not fit the engine's memory with its answer (E594); Closed after close(). A full queue is no fault: the request ends as "busy"."""
        raise NotImplementedError

    def stats(self) -> dict[str, int | float]:
        """Counters since the start and gauges of now, by plain name."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends all requests, as "closed"; waits for stores on their way. The cache stays open: it is its owner's."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
