"""A load into the agent's memory, as the worker that asked for it sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from types import TracebackType
from typing import Self

import numpy as np

from kvstore.client.agent import bodies
from kvstore.client.agent.attachment import Call, Gone
from kvstore.client.agent.link import Kind
from kvstore.client.load import Load
from kvstore.client.native import U8
from kvstore.client.values import LoadOutcome, LoadResult, PlaneReady
from kvstore.errors import KvstoreError, ProtocolError
from kvstore.layout import Layout


class Staged:
    """A load into the agent's memory. `rows` (blocks, block_bytes) are read-only, and the agent's again after `release`, or when the last
    view of them is gone. Use it from one thread (`cancel` from any)."""

    def __init__(self, layout: Layout, k: int, call: Call | None, without: LoadOutcome, end: float) -> None:
        """Waits until the agent has said where the rows are. `without`: the outcome where there is no agent."""
        self.rows: U8 = np.empty((0, layout.block_bytes), np.uint8)
        self._planes = layout.planes(k)
        self._call = call
        self._end = end
        self._result: LoadResult | None = None
        if call is None:
            self._result = _nothing(without)
            return
        try:
            first = call.next(end)
        except Gone:
            self._lost(LoadOutcome.UNREACHABLE)
            return
        except ProtocolError as error:
            if error.code != "E611":
                raise
            self._lost(LoadOutcome.EXPIRED)  # of the agent that was here before this one
            return
        if first.kind != Kind.STAGED:
            self._lost(LoadOutcome.BUSY)
            return
        offset, blocks = bodies.decode_staged(first.body)
        view = call.attachment.pinned(call.number, offset, blocks * layout.block_bytes)
        self.rows = view.reshape(blocks, layout.block_bytes)

    def columns(self, plane: int) -> slice:
        """Of `rows`, those of a plane."""
        return self._planes[plane].columns

    def planes(self) -> Generator[PlaneReady, None, None]:
        """As Client.planes; for a load that was asked for by plane."""
        while self._result is None:
            ready = self._step()
            if ready is not None:
                yield ready

    def finish(self) -> LoadResult:
        """Waits for the end of the load. The same answer each time."""
        while self._result is None:
            self._step()
        return self._result

    def _step(self) -> PlaneReady | None:
        assert self._call is not None
        try:
            message = self._call.next(self._end)
        except Gone:
            self._lost(LoadOutcome.UNREACHABLE)
            return None
        except KvstoreError:
            self._lost(LoadOutcome.UNREACHABLE)
            raise
        if message.kind == Kind.PLANE:
            plane, blocks = bodies.decode_plane(message.body)
            if plane >= len(self._planes) or blocks > len(self.rows):
                raise bodies.wrong(f"plane {plane} of {blocks} blocks")
            return PlaneReady(plane, blocks)
        if message.kind == Kind.LOADED:
            self._result = bodies.decode_load_result(message.body)
        else:
            self._lost(LoadOutcome.BUSY)
        return None

    def _lost(self, outcome: LoadOutcome) -> None:
        self._result = _nothing(outcome)
        if self._call is None:
            return
        if not len(self.rows):
            self._call.attachment.let_go(self._call.number)
            return
        with contextlib.suppress(Gone):  # planes that were told of may be in use: the rows are ours until they are released
            self._call.attachment.tell(Kind.CANCEL, self._call.number)

    def cancel(self) -> None:
        """The load ends with what is there."""
        if self._call is not None and self._result is None:
            with contextlib.suppress(Gone):
                self._call.attachment.tell(Kind.CANCEL, self._call.number)

    def release(self) -> None:
        """The rows are the agent's again: what is seen there from now on is another's. A load under way is cancelled."""
        if self._call is not None:
            self._call.attachment.let_go(self._call.number)
            if self._result is None:
                self._result = _nothing(LoadOutcome.CANCELLED)
            self._call = None
        self.rows = self.rows[:0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class StagedLoad(Load):
    """A staged load by the name that Client.planes_with gives to who began it: to be cancelled, and asked how it ended."""

    def __init__(self, staged: Staged) -> None:
        # Not Load's own: the agent runs it.
        self._staged = staged

    def finish(self) -> LoadResult:
        return self._staged.finish()

    def planes(self) -> Generator[PlaneReady, None, None]:
        yield from self._staged.planes()

    def cancel(self) -> None:
        self._staged.cancel()


def _nothing(outcome: LoadOutcome) -> LoadResult:
    return LoadResult(outcome, 0, 0, 0.0, 0, 0, 0, 0, 0, 0)
