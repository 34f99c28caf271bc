"""Path A as one iterator: a ticket's blocks go from the nodes through host memory into an engine's pages, layer after layer.

    nodes --planes--> rows, in memory that the mover was given --layers, mover--> pages[table[i]]

    with stream_planes(client, ticket, mover, table, rows) as stream:
        for moved in stream:                # in order: whole, checked, and on its way to its pages
            moved.event.before(compute)     # a CUDA stream; or event.wait(seconds), on the host
            ...                             # layers whose rows lie in moved.columns may be launched, for moved.blocks blocks
    stream.blocks, stream.outcome           # the pages of so many blocks are whole

A plane comes whole from the nodes; where the pages have a tensor for each layer, a plane of several is moved one by one, each with an event
(Mover.layers_in). While one moves, the next plane is waited for. When the `with` block is left, however that comes about, the load is over
and nothing reads `rows` or writes pages any more. Only planes that were checked are moved: the page of a block that is not counted holds,
column by column, what it held before or that block's right bytes.

The way back, for what an engine has computed:

    future = store_pages(client, keys, mover, table, rows, first_block=n)    # rows: blocks n and following, of pages[table[i]]
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol, Self

from kvstore.client.agent.agent import Agent
from kvstore.client.agent.worker import WorkerAgent
from kvstore.client.client import Client
from kvstore.client.load import BegunLoads, Hedge, checked_blocks
from kvstore.client.movers.interface import Event, Move, MoveOutcome, Mover
from kvstore.client.native import U8
from kvstore.client.store import StoreFuture
from kvstore.client.ticket import Ticket
from kvstore.client.values import Fidelity, LoadOutcome, LoadResult, PlaneReady
from kvstore.errors import DeadlineExceeded, LayoutError, Unreachable
from kvstore.keys import Keys

LOAD_SECONDS: Final = 10.0  # as ClientConfig has it
GATHER_SECONDS: Final = 5.0  # blocks into host RAM: far more than the slowest mover needs
MOVE_SECONDS: Final = 1.0  # after the load's deadline, for what had come by then: far more than the slowest mover needs


@dataclass(frozen=True, slots=True)
class PlaneMoved:
    """Of plane `plane` of the first `blocks` blocks, `columns` are on their way: good once `event` is done. All of it, or a layer.

    Of a PagedMover the tensors `mover.ends_in(columns)` are good then: one that began in an earlier plane is moved when it is whole.
    Later ones may come for fewer blocks."""

    plane: int
    blocks: int
    columns: slice
    event: Event


class Source(Protocol):
    """A load by plane, and where it goes: a Staged (kvstore/client/agent/staged.py) is one."""

    @property
    def rows(self) -> U8: ...
    def planes(self) -> Generator[PlaneReady, None, None]: ...
    def finish(self) -> LoadResult: ...
    def cancel(self) -> None: ...
    def release(self) -> None: ...


class PlaneStream:
    """See above. Use it in a `with` block, from one thread; `cancel` from any.

    `lost`: a device could not be told to leave the memory; rows and pages must never be used again."""

    def __init__(self, source: Source, columns: Sequence[slice], mover: Mover, table: Any, deadline_seconds: float) -> None:
        self.blocks = 0
        self.outcome = LoadOutcome.CANCELLED  # until it has ended by itself
        self.result: LoadResult | None = None  # of the load alone
        self.lost = False
        self._source, self._columns, self._mover, self._table = source, columns, mover, table
        self._parts = [(plane, part) for plane, whole in enumerate(columns) for part in mover.layers_in(whole)]
        self._load_end = time.monotonic() + deadline_seconds
        self._cancelled = threading.Event()
        self._moved = 0  # of parts
        self._ahead: PlaneReady | None = None  # has come, and is for a move of fewer blocks
        self._planes = source.planes()
        # Begun now: what does not fit is refused before a byte is asked for, and what the caller's CUDA stream was told so far comes first.
        blocks = len(source.rows)
        self._steps = self._run(blocks, self._move(blocks, self._whole_for(blocks)) if blocks else None)

    def cancel(self) -> None:
        """The load ends, and no plane is begun after this; those that were are finished."""
        self._cancelled.set()
        self._source.cancel()

    def __iter__(self) -> Iterator[PlaneMoved]:
        return self

    def __next__(self) -> PlaneMoved:
        return next(self._steps)

    def _run(self, blocks: int, move: Move | None) -> Generator[PlaneMoved, None, None]:
        in_time = True
        while move is not None:
            yield from self._each(move, blocks)
            in_time = move.outcome is MoveOutcome.COMPLETE
            move = None
            if in_time and self._ahead is not None and not self._cancelled.is_set():
                blocks = self._ahead.blocks
                move = self._move(blocks, self._whole_for(blocks))
        if not in_time:
            self._source.cancel()
        for _ in self._planes:
            pass
        self.result = self._source.finish()
        blocks = min(blocks, self.result.blocks)
        if in_time and blocks and not self._cancelled.is_set() and (left := self._parts[self._moved :]):
            # At the deadline: these blocks are whole, though no plane was for all that were asked for.
            move = self._move(blocks, (part for _, part in left))
            yield from self._each(move, blocks)
            in_time = move.outcome is MoveOutcome.COMPLETE
        whole = in_time and self._moved == len(self._parts)
        self.blocks = blocks if whole else 0
        self.outcome = self.result.outcome if in_time else LoadOutcome.TIMEOUT
        if self._cancelled.is_set() and not whole:
            self.outcome = LoadOutcome.CANCELLED

    def _whole_for(self, blocks: int) -> Iterator[slice]:
        """The columns of planes as they come, as long as they are whole for as many blocks."""
        while not self._cancelled.is_set():
            self._ahead = self._ahead or next(self._planes, None)
            if self._ahead is None or self._ahead.blocks != blocks:
                return
            ready, self._ahead = self._ahead, None
            yield from self._mover.layers_in(self._columns[ready.plane])

    def _move(self, blocks: int, columns: Iterator[slice]) -> Move:
        table = self._table[: self._mover.pages_for(blocks)]
        return self._mover.move(self._source.rows[:blocks], table, columns)

    def _each(self, move: Move, blocks: int) -> Generator[PlaneMoved, None, None]:
        try:
            with move:
                while True:  # whoever takes the planes may take longer than the load's deadline
                    move.end = max(self._load_end, time.monotonic()) + MOVE_SECONDS
                    one = next(move, None)
                    if one is None:
                        break
                    self._moved += 1
                    yield PlaneMoved(self._parts[self._moved - 1][0], blocks, one.columns, one.event)
        finally:
            self.lost |= move.lost

    def close(self) -> None:
        """What leaving the block does. Harmless twice."""
        try:
            self._steps.close()  # first: the mover reads rows
        finally:
            if self.result is None:
                self._source.cancel()
            self._planes.close()
            if not self.lost:
                self._source.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Loading:
    """A load by this process, or one that is copied into its memory."""

    def __init__(
        self, loader: Client | Agent | WorkerAgent, ticket: Ticket, rows: U8, blocks: range, hedge: Hedge, deadline_seconds: float
    ) -> None:
        self.rows = rows
        self._begun = BegunLoads()
        self._planes = loader.planes_with(
            self._begun.began, ticket, rows, hedge=hedge, deadline_seconds=deadline_seconds, blocks=blocks
        )  # fmt: skip

    def planes(self) -> Generator[PlaneReady, None, None]:
        return self._planes

    def finish(self) -> LoadResult:
        """Of one that was never begun: its ticket was too old, or there was nothing to load."""
        for load in self._begun.loads:
            return load.finish()
        return LoadResult(LoadOutcome.EXPIRED if len(self.rows) else LoadOutcome.COMPLETE, 0, 0, 0.0, 0, 0, 0, 0, 0, 0)

    def cancel(self) -> None:
        self._begun.cancel()

    def release(self) -> None:
        """The memory is the caller's."""


def stream_planes(
    loader: Client | Agent | WorkerAgent,
    ticket: Ticket,
    mover: Mover,
    table: Any,
    rows: U8 | None = None,
    *,
    blocks: range | None = None,
    hedge: Hedge = "lazy",
    deadline_seconds: float = LOAD_SECONDS,
) -> PlaneStream:
    """Loads `blocks` of the ticket's hit (all by default) into `rows`, plane by plane, and moves them to the pages that `table` names.

    `table`: the pages of these blocks in order; it may name more. `rows` (at least as many, block_bytes): of the mover's host_rows(), or
    adopted. None: with a WorkerAgent, whose agent loads into its own memory, of which the mover has adopted WorkerAgent.memory.
    `deadline_seconds`: of the load; what has come by then is moved.

    Raises LayoutError E514, E517 for rows or a table that do not fit, and what `loader` raises where its planes() does."""
    wanted = checked_blocks(ticket, blocks)
    _check_begins_page(mover, wanted.start if wanted else 0)
    source: Source
    if rows is not None:
        source = _Loading(loader, ticket, rows[: len(wanted)], wanted, hedge, deadline_seconds)
    elif isinstance(loader, WorkerAgent):
        source = loader.stage(ticket, hedge=hedge, deadline_seconds=deadline_seconds, blocks=wanted)
    else:
        raise LayoutError("E514", "rows", "only a WorkerAgent has memory of its own", "give what the mover was given: its host_rows()")
    try:
        columns: list[slice] = []
        if wanted:  # else there may never have been an agent that told its map
            facts = loader if isinstance(loader, Client) else loader.client
            columns = [plane.columns for plane in facts.layout.planes(facts.map.k)]
        return PlaneStream(source, columns, mover, table, deadline_seconds)
    except BaseException:
        source.cancel()
        source.release()
        raise


def _check_begins_page(mover: Mover, block: int) -> None:
    """A move fills its first page from the start: a block from the middle of a page would come to the wrong slot."""
    if not mover.begins_page(block):
        raise LayoutError("E514", f"block {block}", "lies in the middle of a page", "begin with the first block of that page")


def store_pages(
    storer: Client | Agent | WorkerAgent,
    keys: Keys,
    mover: Mover,
    table: Any,
    rows: U8,
    *,
    first_block: int,
    retention_class: str = "chat",
    fidelity: Fidelity = Fidelity.EXACT,
    deadline_seconds: float = GATHER_SECONDS,
) -> StoreFuture:
    """Gathers blocks from the pages that `table` names into `rows` (n, block_bytes): keys[first_block : first_block + n]. Stores them.

    When this returns, the pages are the engine's again: what the caller's CUDA stream was told before comes first. `rows`, of the mover's
    host_rows() or adopted, must stay as they are until the future is done. Bytes of a block that no page holds are stored as they are in
    `rows`. Where a page holds several blocks, `first_block` is one that begins a page. `deadline_seconds`: of the gathering.

    Raises LayoutError E514, E517 for rows or a table that do not fit, DeadlineExceeded E220 where pages did not come in time, Unreachable
    E221 where the device failed and `rows` must never be used again, and what `storer` raises where its store() does."""
    _check_begins_page(mover, first_block)
    with mover.move(rows, table, [slice(0, mover.row_bytes)], to_device=False, deadline_seconds=deadline_seconds) as move:
        for _ in move:
            pass
    if move.lost:
        raise Unreachable("E221", "pages to store", "the device holds on to them and to the rows", "never use either again")
    if move.outcome is not MoveOutcome.COMPLETE:
        raise DeadlineExceeded("E220", "pages to store", f"did not come into host RAM in {deadline_seconds:g} s", "give it more time")
    return storer.store(keys, rows, first_block=first_block, retention_class=retention_class, fidelity=fidelity)
