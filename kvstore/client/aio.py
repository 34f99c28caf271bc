"""The asyncio face: the same verbs as coroutines over the same core. Waiting happens in a few threads without the GIL; nothing polls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from kvstore.client.client import Client
from kvstore.client.load import BegunLoads, Hedge
from kvstore.client.movers.interface import Mover
from kvstore.client.native import U8
from kvstore.client.streaming import LOAD_SECONDS, PlaneMoved, PlaneStream, stream_planes
from kvstore.client.ticket import Ticket
from kvstore.client.values import Accept, Fidelity, LoadResult, PlaneReady, StoreResult
from kvstore.keys import Keys

T = TypeVar("T")
WAITERS_MAX: Final = 64  # verbs waiting at once; a waiter is a sleeping thread


class AsyncClient:
    """Verbs of a Client for one event loop. Cancelling a load's task waits, briefly, until its memory is free again."""

    def __init__(self, client: Client) -> None:
        """Takes over `client`: closing this closes it."""
        self.client = client
        self._pool = ThreadPoolExecutor(WAITERS_MAX, "kvstore-async")

    async def lookup(
        self,
        keys: Keys,
        *,
        accept: Accept = Accept.EXACT,
        retention_class: str = "chat",
        deadline_seconds: float | None = None,
        input_tokens: int | None = None,
        recompute_tokens: int = 0,
        window: Callable[[int], bool] | None = None,
    ) -> Ticket:
        """As Client.lookup; `window` is called on another thread."""
        return await self._run(
            lambda: self.client.lookup(
                keys, accept=accept, retention_class=retention_class, deadline_seconds=deadline_seconds,
                input_tokens=input_tokens, recompute_tokens=recompute_tokens, window=window,
            )
        )  # fmt: skip

    async def load(
        self,
        ticket: Ticket,
        destination: Any = None,
        *,
        hedge: Hedge = "lazy",
        deadline_seconds: float | None = None,
        blocks: range | None = None,
    ) -> LoadResult:
        """As Client.load. When the task is cancelled, the load ends first: the destination is untouched afterwards."""
        loads = BegunLoads()
        return await self._until_free(
            loads,
            lambda: self.client.load_with(loads.began, ticket, destination, hedge=hedge, deadline_seconds=deadline_seconds, blocks=blocks),
        )

    async def planes(
        self,
        ticket: Ticket,
        destination: Any,
        *,
        hedge: Hedge = "lazy",
        deadline_seconds: float | None = None,
        blocks: range | None = None,
    ) -> AsyncIterator[PlaneReady]:
        """As Client.planes. When the task is cancelled, the load ends first, as in load."""
        loads = BegunLoads()
        iterator = self.client.planes_with(loads.began, ticket, destination, hedge=hedge, deadline_seconds=deadline_seconds, blocks=blocks)
        try:
            while (ready := await self._until_free(loads, lambda: next(iterator, None))) is not None:
                yield ready
        finally:
            loads.cancel()
            iterator.close()  # at once: nobody is inside, and the load has been told

    @contextlib.asynccontextmanager
    async def stream_planes(
        self, ticket: Ticket, mover: Mover, table: Any, rows: U8, *, blocks: range | None = None, hedge: Hedge = "lazy",
        deadline_seconds: float = LOAD_SECONDS,
    ) -> AsyncIterator[AsyncPlaneStream]:  # fmt: skip
        """As stream_planes of kvstore/client/streaming.py. When the task is cancelled, load and moves end first."""
        stream = stream_planes(self.client, ticket, mover, table, rows, blocks=blocks, hedge=hedge, deadline_seconds=deadline_seconds)
        try:
            yield AsyncPlaneStream(self, stream)
        finally:
            await self._until_free(stream, stream.close)

    async def store(
        self, keys: Keys, blocks: Any, *, first_block: int, retention_class: str = "chat", fidelity: Fidelity = Fidelity.EXACT
    ) -> StoreResult:
        """Stores and waits for the outcome. Cancelling the task leaves the store going on."""
        future = self.client.store(keys, blocks, first_block=first_block, retention_class=retention_class, fidelity=fidelity)
        return await asyncio.shield(asyncio.wrap_future(future))

    async def flush(self, deadline_seconds: float | None = None) -> bool:
        return await self._run(lambda: self.client.flush(deadline_seconds))

    async def close(self) -> None:
        await self._run(self.client.close)
        self._pool.shutdown(wait=False)

    def stats(self) -> dict[str, int | float]:
        return self.client.stats()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def _until_free(self, going: BegunLoads | PlaneStream, call: Callable[[], T]) -> T:
        """As _run, but a cancelled task waits until `call` has let go of the memory; a second cancellation does not shorten that."""
        submitted = self._pool.submit(call)
        waiting = asyncio.wrap_future(submitted)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            going.cancel()
            if not submitted.cancel():  # it has begun
                while not waiting.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([waiting])
            raise


class AsyncPlaneStream:
    """A PlaneStream (`stream`: its `blocks`, `outcome` and `cancel`) for one event loop."""

    def __init__(self, client: AsyncClient, stream: PlaneStream) -> None:
        self.stream = stream
        self._client = client

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PlaneMoved:
        moved = await self._client._until_free(self.stream, lambda: next(self.stream, None))
        if moved is None:
            raise StopAsyncIteration
        return moved
