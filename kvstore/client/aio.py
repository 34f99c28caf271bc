"""The asyncio face: the same verbs as coroutines over the same core. Waiting happens in a few threads without the GIL; nothing polls."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from kvstore.client.client import Client
from kvstore.client.load import Hedge, Load
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
        loads = _Loads()
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
        loads = _Loads()
        iterator = self.client.planes_with(loads.began, ticket, destination, hedge=hedge, deadline_seconds=deadline_seconds, blocks=blocks)
        try:
            while (ready := await self._until_free(loads, lambda: next(iterator, None))) is not None:
                yield ready
        finally:
            loads.cancel()
            iterator.close()  # at once: nobody is inside, and the load has been told

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

    async def _until_free(self, loads: _Loads, call: Callable[[], T]) -> T:
        """As _run, but a cancelled task waits until `call` has let go of the memory; a second cancellation does not shorten that."""
        submitted = self._pool.submit(call)
        waiting = asyncio.wrap_future(submitted)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            loads.cancel()
            if not submitted.cancel():  # it has begun
                while not waiting.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([waiting])
            raise


class _Loads:
    """The loads of one call, which another thread begins: told to end, also when they begin only afterwards."""

    def __init__(self) -> None:
        self._begun: list[Load] = []
        self._gave_up = threading.Event()

    def began(self, load: Load) -> None:
        self._begun.append(load)
        if self._gave_up.is_set():
            load.cancel()

    def cancel(self) -> None:
        self._gave_up.set()
        for load in self._begun:
            load.cancel()
