"""Spans of lookups and loads, for a host process that has set OpenTelemetry up; docs/TRACING.md lists them.

    kvstore.lookup                 kvstore.load
      kvstore.discover               kvstore.read     each extent: its first bytes until all of it is checked
      kvstore.promise                  kvstore.decode each of its planes that had to be rebuilt
                                     kvstore.plane    each plane: until it is there for all blocks

The API package alone, without an SDK, or no package at all: nothing is recorded, and an operation costs two microseconds more. Times are
taken where things happen and made into spans when the operation is over. No key, prompt or address is in a span.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.version import version

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

I64s = npt.NDArray[np.int64]
Interval = tuple[str, int, int]  # name, from, to in nanoseconds of CLOCK_MONOTONIC
_NAME: Final = "kvstore"


class Tracing:
    """One client's."""

    def __init__(self) -> None:
        self._tracer: Tracer | None = None
        with contextlib.suppress(ImportError):
            from opentelemetry import trace

            self._tracer = trace.get_tracer(_NAME, version())

    @contextlib.contextmanager
    def operation(self, name: str) -> Iterator[Span | None]:
        """A span that is the current one's child, around the operation; None where nobody records."""
        if self._tracer is None:
            yield None
            return
        with self._tracer.start_as_current_span(name) as span:
            yield span if span.is_recording() else None

    def begin(self, name: str) -> Span | None:
        """As operation, for one that ends elsewhere: `finish`."""
        if self._tracer is None:
            return None
        span = self._tracer.start_span(name)
        return span if span.is_recording() else None

    def tell(self, span: Span, **attributes: Any) -> None:
        span.set_attributes(_named(attributes))

    def parts(self, parent: Span, intervals: list[Interval]) -> None:
        to_unix = _unix_offset_ns()
        for name, begin, end in intervals:
            self._part(parent, to_unix, name, begin, end)

    def _part(self, parent: Span, to_unix: int, name: str, begin_ns: int, end_ns: int, **attributes: Any) -> Span:
        """A child that has ended already. Times of CLOCK_MONOTONIC."""
        from opentelemetry import trace

        assert self._tracer is not None
        span = self._tracer.start_span(
            name,
            trace.set_span_in_context(parent),
            start_time=begin_ns + to_unix,
            attributes=_named(attributes),
        )
        span.end(end_ns + to_unix)
        return span

    def load(self, parent: Span, times: I64s, counts: list[int]) -> None:
        """`times` (extents, planes, 4) as ClientLoad.times() has them; `counts`: blocks of each extent."""
        to_unix = _unix_offset_ns()
        began, done, decode_began, decode_ended = (times[:, :, at] for at in range(4))
        for extent, blocks in enumerate(counts):
            seen = began[extent] > 0
            if not seen.any():
                continue
            whole = bool((done[extent] > 0).all())
            end = max(int(done[extent].max()), int(began[extent].max()))
            read = self._part(
                parent, to_unix, "kvstore.read", int(began[extent][seen].min()), end, extent=extent, blocks=blocks, whole=whole
            )
            for plane in np.flatnonzero(decode_ended[extent]).tolist():
                self._part(read, to_unix, "kvstore.decode", int(decode_began[extent, plane]), int(decode_ended[extent, plane]), plane=plane)
        for plane in range(times.shape[1]):
            if (done[:, plane] > 0).all():
                self._part(
                    parent,
                    to_unix,
                    "kvstore.plane",
                    int(began[:, plane][began[:, plane] > 0].min()),
                    int(done[:, plane].max()),
                    plane=plane,
                )


def _named(attributes: dict[str, Any]) -> dict[str, Any]:
    return {f"kvstore.{name}": value for name, value in attributes.items()}


def _unix_offset_ns() -> int:
    """Unix time less CLOCK_MONOTONIC: of a few readings the one that was interrupted least."""
    readings = []
    for _ in range(4):
        before, unix, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, unix - (before + after) // 2))
    return min(readings)[1]
