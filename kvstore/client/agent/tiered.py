"""Loads of a client that has a RAM tier: the leading part from there, the rest by one load from the nodes that goes on meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.client.load import Hedge, Load
from kvstore.client.native import U8
from kvstore.client.ticket import Ticket
from kvstore.client.values import LoadOutcome, LoadResult, PlaneReady

if TYPE_CHECKING:
    from kvstore.client.agent.ram import RamTier
    from kvstore.client.client import Client

Began = Callable[[Load], None] | None


def load(
    client: Client, tier: RamTier, began: Began, ticket: Ticket, rows: U8, hedge: Hedge, deadline_seconds: float | None, wanted: range
) -> LoadResult:
    """As Client.load, which checked its arguments."""
    client.check_load(ticket, hedge)
    started = time.monotonic()
    with tier.begin(ticket, wanted, rows, client.layout.planes(client.map.k)) as ram:
        here, rest = ram.blocks, wanted[ram.blocks :]
        result = LoadResult(LoadOutcome.COMPLETE, 0, 0, 0.0, 0, 0, 0, 0, 0, 0)
        if not rest:
            ram.copy()
        else:
            going = client.begin_load(ticket, rows[here:], hedge=hedge, deadline_seconds=deadline_seconds, blocks=rest)
            try:
                if began is not None:
                    began(going)
                ram.copy()
                result = client.counted(going, ticket, len(rest))
            except BaseException:
                going.cancel()
                client.counted(going, ticket, len(rest))
                raise
        client.counters.delivered_from_ram(ticket.retention_class, here * ticket.block_tokens)
        blocks = here + result.blocks
        ram.keep(blocks)
        ram.whole = blocks
    return replace(result, blocks=blocks, bytes=blocks * rows.shape[1], seconds=time.monotonic() - started)


def planes(
    client: Client, tier: RamTier, began: Began, ticket: Ticket, rows: U8, hedge: Hedge, deadline_seconds: float | None, wanted: range
) -> Generator[PlaneReady, None, None]:
    """As Client.planes, which checked its arguments."""
    client.check_load(ticket, hedge)
    cut = client.layout.planes(client.map.k)
    with tier.begin(ticket, wanted, rows, cut) as ram:
        here, rest = ram.blocks, wanted[ram.blocks :]
        with _coming(client, began, ticket, rows[here:], hedge, deadline_seconds, rest) as coming:
            for plane in range(len(cut)):
                ram.copy(plane)
                ready = next(coming, None)
                blocks = here + (ready.blocks if ready else 0)
                if not blocks:
                    break
                ram.keep(blocks, plane)
                ram.whole = blocks
                yield PlaneReady(plane, blocks)
            next(coming, None)  # to its end: how it ended is its own outcome, not that of a load which was let go of
        client.counters.delivered_from_ram(ticket.retention_class, here * ticket.block_tokens)


@contextlib.contextmanager
def _coming(
    client: Client, began: Began, ticket: Ticket, rows: U8, hedge: Hedge, deadline_seconds: float | None, rest: range
) -> Generator[Generator[PlaneReady, None, None], None, None]:
    """The planes of a load of `rest`; of nothing, none. Its memory is free afterwards."""
    if not rest:
        yield _nothing()
        return
    going = client.begin_load(ticket, rows, hedge=hedge, deadline_seconds=deadline_seconds, blocks=rest, by_plane=True)
    coming = going.planes()
    try:
        if began is not None:
            began(going)
        yield coming
    finally:
        coming.close()
        client.counted(going, ticket, len(rest))


def _nothing() -> Generator[PlaneReady, None, None]:
    yield from ()
