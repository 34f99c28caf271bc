"""Who has which window entry, and the entries themselves from those who do: own RAM, the directory, other agents."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from kvstore.client.agent.counters import WindowCounters
from kvstore.client.agent.directory import DirectoryClient, Holder
from kvstore.client.agent.peers import Peers
from kvstore.client.agent.sealed import window_key
from kvstore.client.agent.teller import rows_of
from kvstore.client.agent.windows import WindowStore
from kvstore.client.ticket import Ticket, WindowAt
from kvstore.client.values import Accept
from kvstore.errors import MisuseError
from kvstore.keys import Keys

HERE: Final = ""  # the address of an agent that serves nobody; never leaves the process
_HOLDERS_SEEN_MAX: Final = 4096


class WindowFinder:
    """Of one agent. Safe to share between threads."""

    def __init__(
        self, windows: WindowStore, directory: DirectoryClient | None, peers: Peers, counters: WindowCounters, older_blocks_max: int
    ) -> None:
        self.address = HERE  # where its own entries are to be had
        self._windows, self._directory, self._peers, self._counters = windows, directory, peers, counters
        self._older_blocks_max = older_blocks_max
        self._holders: OrderedDict[str, Holder] = OrderedDict()  # by address, as the directory named them last
        self._lock = threading.Lock()

    def candidates(self, keys: Keys, usable: int, accept: Accept) -> list[WindowAt]:
        """Entries at the end of `usable` blocks and a little before it, the highest first. One trip to the directory, none where the entry
        at the end is here."""
        names = [
            (block, approximate, window_key(keys[block - 1].tobytes(), approximate))
            for block in range(usable, max(0, usable - self._older_blocks_max - 1), -1)
            for approximate in kinds(accept)
        ]
        own = self._windows.holds(key for _, _, key in names)
        others = self._locate([key for _, _, key in names]) if self._directory is not None and not own[0] else itertools.repeat([])
        found = []
        for (block, approximate, _), here, there in zip(names, own, others, strict=False):
            holders = [self.address] if here else []
            holders += [holder for holder in there if not self._peers.paused(holder)]
            if holders:
                found.append(WindowAt(block, tuple(holders), approximate))
        return found

    def _locate(self, names: Sequence[bytes]) -> list[list[str]]:
        """Addresses of other agents that hold each; one trip."""
        assert self._directory is not None
        located = self._directory.locate(rows_of(list(names)))
        with self._lock:
            for holder in itertools.chain.from_iterable(located):
                self._holders[holder.address] = holder
                self._holders.move_to_end(holder.address)
            while len(self._holders) > _HOLDERS_SEEN_MAX:
                self._holders.popitem(last=False)
        return [[holder.address for holder in holders if holder.address != self.address] for holders in located]

    def _holders_of(self, key: bytes, block: int, approximate: bool, ticket: Ticket | None) -> Iterator[str]:
        """Those of the ticket first; the directory is asked only when they are used up."""
        tried = {HERE, self.address}
        for window in ticket.windows if ticket is not None else ():
            if (window.block, window.approximate) == (block, approximate):
                yield from (holder for holder in window.holders if holder not in tried)
                tried.update(window.holders)
        if self._directory is not None:
            yield from (holder for holder in self._locate([key])[0] if holder not in tried)

    def fetched(self, key: bytes, block: int, approximate: bool, ticket: Ticket | None, end: float) -> Iterator[memoryview]:
        """What each holder of the entry sends, sealed, until `end` on time.monotonic()."""
        for address in self._holders_of(key, block, approximate, ticket):
            left = end - time.monotonic()
            if left <= 0:
                return
            known_dead = self._peers.paused(address)
            try:
                sealed = self._peers.fetch_window(address, key, left)
            except MisuseError:  # the directory, or another agent's ticket, names what is no address
                self._counters.fault("address")
                continue
            if sealed is not None:
                yield sealed
            elif self._directory is not None and not known_dead and self._peers.paused(address) and address in self._holders:
                self._directory.report(self._holders[address])


def kinds(accept: Accept) -> tuple[bool, ...]:
    """Exact entries, and approximate ones where they are taken."""
    return (False, True) if accept.depth_max > 0 else (False,)
