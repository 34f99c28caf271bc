"""Loads of a client that has a RAM tier: the leading part from there, the rest by one load from the nodes that goes on meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.client.load import Hedge, Load
from kvstore.client.native import U8
from kvstore.client.ticket import Ticket
from kvstore.client.values import LoadOutcome, LoadResult, PlaneReady

if TYPE_CHECKING:
    from kvstore.client.agent.ram import RamLoad, RamTier
    from kvstore.client.client import Client

Began = Callable[[Load], None] | None


class TieredLoad(Load):
    """A load under way whose first rows come from RAM. As a Load, but for traces: `times` are of the part that comes from nodes."""

    def __init__(self, ram: RamLoad, rest: Load | None, block_bytes: int) -> None:
        # Not Load's own: what it would begin is `rest`.
        self._ram = ram
        self._rest = rest
        self._bytes_of_block = block_bytes
        self._began = time.monotonic()
        self._told: LoadResult | None = None

    def finish(self) -> LoadResult:
        """Ends the load: whatever is missing of the leading rows is copied, the rest is waited for. The same answer each time."""
        if self._told is None:
            self._ram.copy_missing()
            here = self._ram.blocks
            rest = self._rest.finish() if self._rest is not None else LoadResult(LoadOutcome.COMPLETE, 0, 0, 0.0, 0, 0, 0, 0, 0, 0)
            blocks = here + rest.blocks
            self._told = replace(rest, blocks=blocks, bytes=blocks * self._bytes_of_block, seconds=time.monotonic() - self._began)
        return self._told

    def planes(self) -> Generator[PlaneReady, None, None]:
        """Planes in order, each when it is whole and what is to stay of it has been copied. Ends the load, also when closed early."""
        here = self._ram.blocks
        coming = self._rest.planes() if self._rest is not None else _nothing()
        try:
            for plane in range(self._ram.planes):
                self._ram.copy(plane)
                ready = next(coming, None)
                blocks = here + (ready.blocks if ready else 0)
                if not blocks:
                    break
                self._ram.keep(blocks, plane)
                yield PlaneReady(plane, blocks)
            next(coming, None)  # to its end: how it ended is its own outcome, not that of a load which was let go of
        finally:
            coming.close()
            self.finish()

    @property
    def blocks_from_ram(self) -> int:
        return self._ram.blocks

    def cancel(self) -> None:
        """Any thread: the waiter returns with what is there."""
        if self._rest is not None:
            self._rest.cancel()


def load(
    client: Client, tier: RamTier, began: Began, ticket: Ticket, rows: U8, hedge: Hedge, deadline_seconds: float | None, wanted: range
) -> LoadResult:
    """As Client.load, which checked its arguments."""
    client.check_load(ticket, hedge)
    with tier.begin(ticket, wanted, rows, client.layout.planes(client.map.k)) as ram:
        rest = _rest(client, ram, ticket, rows, hedge, deadline_seconds, wanted, by_plane=False)
        going = TieredLoad(ram, rest, rows.shape[1])
        try:
            if began is not None:
                began(going)
            result = going.finish()
        except BaseException:
            going.cancel()
            raise
        finally:
            result = _counted(client, going, rest, ticket, wanted)
        ram.keep(result.blocks)
        ram.whole = result.blocks
    return result


def planes(
    client: Client, tier: RamTier, began: Began, ticket: Ticket, rows: U8, hedge: Hedge, deadline_seconds: float | None, wanted: range
) -> Generator[PlaneReady, None, None]:
    """As Client.planes, which checked its arguments."""
    client.check_load(ticket, hedge)
    with tier.begin(ticket, wanted, rows, client.layout.planes(client.map.k)) as ram:
        rest = _rest(client, ram, ticket, rows, hedge, deadline_seconds, wanted, by_plane=True)
        going = TieredLoad(ram, rest, rows.shape[1])
        try:
            if began is not None:
                began(going)
            yield from going.planes()
        finally:
            ram.whole = _counted(client, going, rest, ticket, wanted).blocks


def _rest(
    client: Client, ram: RamLoad, ticket: Ticket, rows: U8, hedge: Hedge, deadline_seconds: float | None, wanted: range, *, by_plane: bool
) -> Load | None:
    """The load of what is not in RAM; None: all of it is."""
    left = wanted[ram.blocks :]
    if not left:
        return None
    return client.begin_load(
        ticket, rows[ram.blocks :], hedge=hedge, deadline_seconds=deadline_seconds, blocks=left, by_plane=by_plane
    )  # fmt: skip


def _counted(client: Client, going: TieredLoad, rest: Load | None, ticket: Ticket, wanted: range) -> LoadResult:
    here = going.blocks_from_ram
    result = going.finish()
    client.counters.delivered_from_ram(ticket.retention_class, here * ticket.block_tokens)
    if rest is not None:
        client.counted(rest, ticket, len(wanted) - here)
    return result


def _nothing() -> Generator[PlaneReady, None, None]:
    yield from ()
