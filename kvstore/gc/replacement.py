"""What goes first when room is needed and no class is over its share: LRU, S3-FIFO or SIEVE, behind one interface.

    seam    ordered(View) -> rows in the order in which they go; asked anew for each round, read only as far as the round needs
    View    the store's recency rows, merged over classes and owners: of what was used again since it was written, and of what was not

The twelve nodes of an extent choose alone and have to choose alike, so an order may rest only on what all of them know: the buckets in
which clients wrote and used it, where it stands in its prompt, its key. A queue position or a hand of a node's own would be different on
each. So all three are told in those terms, and where the published policy keeps a position, here stands the time of last use:

    lru     the longest unused first
    s3fifo  two queues: not used again (FIFO, since it is in the order of writing), used again. While the first holds more than a tenth of
            the node, it gives; else the longest unused of both. What it lost and is written again starts in the second (the store
            remembers as many as it holds).
    sieve   one sweep after another from old to new: what was not used again goes as the hand meets it, what was used stays, and goes in a
            later sweep if it was not used since the sweep before that one began.

In each, within one bucket the later part of a prompt goes first; and what is used is used with all before it, so no order drops the head
of a prompt before its tail. docs/ARCHITECTURE.md says where they fail.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from kvstore.clustermap import POLICIES
from kvstore.entry import REUSED

SMALL_SHARE: Final = 0.10  # of the capacity, as in the S3-FIFO paper (SOSP 2023)

Queue = tuple[int, bytes, int, int]  # number, owner, rows, bytes
Row = tuple[tuple[bool, bytes], bytes, int]  # rank (live, order), recency row, bytes


def class_of(queue_number: int) -> int:
    return queue_number & (REUSED - 1)


@dataclass(frozen=True, slots=True)
class View:
    """One round's look at the store. `rows(queues)` merges them: what has expired first, then by last use."""

    queues: list[Queue]
    rows: Callable[[list[Queue]], Iterator[Row]]
    bucket_now: int
    capacity_bytes: int

    def part(self, *, reused: bool) -> list[Queue]:
        return [queue for queue in self.queues if bool(queue[0] & REUSED) == reused]


class Replacement(Protocol):
    second_chance: bool  # the store remembers what was evicted unused

    def ordered(self, view: View) -> Iterator[Row]: ...


class Lru:
    second_chance = False

    def ordered(self, view: View) -> Iterator[Row]:
        return view.rows(view.queues)


class S3Fifo:
    second_chance = True

    def ordered(self, view: View) -> Iterator[Row]:
        small, main = _Ahead(view.rows(view.part(reused=False))), _Ahead(view.rows(view.part(reused=True)))
        small_bytes = sum(queue[3] for queue in view.part(reused=False))
        small_max = SMALL_SHARE * (view.capacity_bytes or sum(queue[3] for queue in view.queues))
        while small.head or main.head:
            expired = main.head is not None and not main.head[0][0]
            demoting = small.head is not None and small_bytes > small_max and not expired
            if demoting or main.head is None or (small.head is not None and small.head < main.head):
                row = small.take()
                small_bytes -= row[2]
            else:
                row = main.take()
            yield row


class Sieve:
    """The two times are all that is kept. After a start they are unknown, and nothing counts as unused since the last sweep."""

    second_chance = False

    def __init__(self) -> None:
        self._swept_from = 0  # bucket in which the sweep before this one began
        self._sweep_from = 0  # bucket in which this one began

    def ordered(self, view: View) -> Iterator[Row]:
        unused, used = _Ahead(view.rows(view.part(reused=False))), _Ahead(view.rows(view.part(reused=True)))
        for sweep in range(2):
            while used.head and (not used.head[0][0] or _bucket(used.head) < self._swept_from):
                # The tail of a prompt, not used again, is as old as its head: it goes first.
                yield unused.take() if unused.head and unused.head < used.head else used.take()
            # It stops before what is being written: a prompt whose parts are still on their way would get a hole.
            while unused.head and _bucket(unused.head) < view.bucket_now - 1:
                yield unused.take()
            if sweep == 0 and used.head:  # the hand is at the newest, and begins again at the oldest
                self._swept_from, self._sweep_from = self._sweep_from, view.bucket_now
        yield from heapq.merge(used.rest(), unused.rest())


def replacement(name: str) -> Replacement:
    found: dict[str, Callable[[], Replacement]] = dict(zip(POLICIES, (Lru, S3Fifo, Sieve), strict=True))
    return found[name]()


def _bucket(row: Row) -> int:
    return int.from_bytes(row[0][1][:4], "big")


class _Ahead:
    """An iterator whose next row can be looked at."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self._rows = rows
        self.head = next(rows, None)

    def take(self) -> Row:
        taken, self.head = self.head, next(self._rows, None)
        assert taken is not None
        return taken

    def rest(self) -> Iterator[Row]:
        while self.head:
            yield self.take()
