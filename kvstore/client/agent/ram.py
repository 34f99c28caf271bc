"""RAM tier of hot extents: blocks as they were loaded, given to later loads before any node is asked.

    name       layout tag 8 B | owner 16 B | extent key 32 B | write id 8 B: the identity of bytes that never change
    held       a run of an extent's blocks; a copy of our own, made before the load gave its memory back, never written again
    ghost      names without bytes: of what was loaded once, and of what had to go

An extent enters when it is loaded a second time while its name is remembered (second touch): a long cold prompt leaves names only. What was
unused for longest goes first, and within one load the later part of the prompt, so that its head stays, which is all that a prefix can use
(the order of nodes: kvstore/gc/replacement.py). A load never pushes out what it used itself.

One lock for the books; bytes are copied outside it. An entry that goes while it is read lives until the reader lets go of it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from kvstore.client.agent import tiered
from kvstore.client.load import Hedge
from kvstore.client.native import U8
from kvstore.client.ticket import Ticket
from kvstore.client.values import LoadResult, PlaneReady
from kvstore.errors import MisuseError
from kvstore.layout import Plane

if TYPE_CHECKING:
    from kvstore.client.client import Client

REMEMBERED: Final = 4  # ghosts stand for this many times the capacity
GHOSTS_MAX: Final = 1 << 18  # 240 B of Python objects each: 60 MB at worst
CAPACITY_BYTES_MIN: Final = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    first: int  # block in the extent
    rows: U8  # (blocks, block_bytes), read-only

    @property
    def end(self) -> int:
        return self.first + len(self.rows)


@dataclass(frozen=True, slots=True)
class _Span:
    """What a load wants of one extent: its blocks [first, first + count), from row `row` of the destination on."""

    name: bytes
    first: int
    count: int
    row: int


@dataclass(slots=True)
class RamStats:
    """Since the start but for the last four. Tokens, as hits are counted."""

    hit_tokens: int = 0
    asked_tokens: int = 0
    hit_bytes: int = 0
    admitted_extents: int = 0
    evicted_extents: int = 0
    extents: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    ghosts: int = 0


class RamTier:
    """A bounded cache for the loads of one or several clients: `Client(..., ram=RamTier(4 << 30))`. Safe to share between threads."""

    def __init__(self, capacity_bytes: int) -> None:
        """Takes memory as it fills. Raises MisuseError E546 for less than 1 MiB."""
        if capacity_bytes < CAPACITY_BYTES_MIN:
            raise MisuseError("E546", f"RAM tier of {capacity_bytes} bytes", "is too small to hold an extent", "give 1 MiB or more")
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, _Held] = OrderedDict()  # what goes first stands first
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()  # name -> bytes it would take
        self._ghost_bytes = 0
        self._filling: set[bytes] = set()
        self._bytes = 0  # held, and promised to loads that fill
        self._stats = RamStats(capacity_bytes=capacity_bytes)

    def begin(self, ticket: Ticket, blocks: range, rows: U8, planes: Sequence[Plane]) -> RamLoad:
        """One load of `blocks` of the ticket into `rows` (n, block_bytes): what is here of it, and what of the rest is to stay."""
        spans = _spans(ticket, blocks)
        block_bytes = rows.shape[1]
        load = RamLoad(self, rows, planes)
        with self._lock:
            load.used, load.pieces, load.blocks = self._leading(spans)
            self._use(load.used)
            load.filling = self._room_for(spans, load, block_bytes)
            self._stats.asked_tokens += len(blocks) * ticket.block_tokens
            self._stats.hit_tokens += load.blocks * ticket.block_tokens
            self._stats.hit_bytes += load.blocks * block_bytes
        try:
            for fill in load.filling:
                fill.rows = np.empty((fill.span.count, block_bytes), np.uint8)
        except MemoryError:  # the load goes on without us
            self.end(load, ())
            load.filling = []
        return load

    def load(
        self, client: Client, began: tiered.Began, ticket: Ticket, rows: U8, hedge: Hedge, deadline_seconds: float | None, wanted: range
    ) -> LoadResult:
        """Client.load, by way of this tier."""
        return tiered.load(client, self, began, ticket, rows, hedge, deadline_seconds, wanted)

    def planes(
        self, client: Client, began: tiered.Began, ticket: Ticket, rows: U8, hedge: Hedge, deadline_seconds: float | None, wanted: range
    ) -> Generator[PlaneReady, None, None]:
        """Client.planes, by way of this tier."""
        return tiered.planes(client, self, began, ticket, rows, hedge, deadline_seconds, wanted)

    def _leading(self, spans: Sequence[_Span]) -> tuple[list[bytes], list[tuple[int, U8]], int]:
        """Names used, (row, bytes) of each, and rows in all: as far as they follow each other without a gap."""
        used, pieces, blocks = [], [], 0
        for span in spans:
            held = self._held.get(span.name)
            if held is None or not held.first <= span.first < held.end:
                break
            part = held.rows[span.first - held.first :][: span.count]
            used.append(span.name)
            pieces.append((span.row, part))
            blocks = span.row + len(part)
            if len(part) < span.count:
                break
        return used, pieces, blocks

    def _room_for(self, spans: Sequence[_Span], load: RamLoad, block_bytes: int) -> list[_Fill]:
        """What of this load is touched for the second time gets room, from the prompt's head on; the rest leaves its name."""
        filling: list[_Fill] = []
        keep = set(load.used)
        full = False
        for span in spans:
            if span.row + span.count <= load.blocks:
                continue  # whole from here
            needed = span.count * block_bytes
            known = span.name in self._ghosts or span.name in self._held
            full = full or (known and not self._make_room(needed, keep))
            if not known or full or span.name in self._filling:
                self._remember(span.name, needed)
                continue
            self._bytes += needed
            self._filling.add(span.name)
            filling.append(_Fill(span, needed))
        return filling

    def _make_room(self, needed: int, keep: set[bytes]) -> bool:
        """Drops what goes first until `needed` bytes are free; False where only `keep` is left, and then nothing was dropped."""
        victims, free = [], self.capacity_bytes - self._bytes
        for name, held in self._held.items():
            if free >= needed:
                break
            if name not in keep:
                victims.append(name)
                free += held.rows.nbytes
        if free < needed:
            return False
        for name in victims:
            self._drop(name)
            self._stats.evicted_extents += 1
        return True

    def _drop(self, name: bytes) -> None:
        held = self._held.pop(name)
        self._bytes -= held.rows.nbytes
        self._remember(name, held.rows.nbytes)

    def _remember(self, name: bytes, size_bytes: int) -> None:
        if name in self._held:
            return
        self._ghost_bytes += size_bytes - self._ghosts.pop(name, 0)
        self._ghosts[name] = size_bytes
        while self._ghost_bytes > REMEMBERED * self.capacity_bytes or len(self._ghosts) > GHOSTS_MAX:
            self._ghost_bytes -= self._ghosts.popitem(last=False)[1]

    def _use(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):  # the head last: it goes last
            self._held.move_to_end(name)

    def end(self, load: RamLoad, done: Sequence[_Fill]) -> None:
        """`done`: filled to the last byte. The room of the others is given back."""
        with self._lock:
            for fill in load.filling:
                self._filling.discard(fill.span.name)
                self._bytes -= fill.bytes
            names = [name for name in load.used if name in self._held]
            for fill in done:
                name = fill.span.name
                if name in self._held:  # a shorter run of the same extent
                    self._drop(name)
                fill.rows.flags.writeable = False
                self._held[name] = _Held(fill.span.first, fill.rows)
                self._bytes += fill.bytes
                self._ghost_bytes -= self._ghosts.pop(name, 0)
                self._stats.admitted_extents += 1
                names.append(name)
            self._use(names)

    def clear(self) -> None:
        """Forgets all bytes; names stay."""
        with self._lock:
            for name in list(self._held):
                self._drop(name)

    def stats(self) -> RamStats:
        with self._lock:
            self._stats.extents = len(self._held)
            self._stats.used_bytes = self._bytes
            self._stats.ghosts = len(self._ghosts)
            return RamStats(**{name: getattr(self._stats, name) for name in RamStats.__slots__})

    def check_integrity(self) -> None:
        """Raises AssertionError where the books do not add up. For tests, between loads."""
        with self._lock:
            assert not self._filling
            assert self._bytes == sum(held.rows.nbytes for held in self._held.values()) <= self.capacity_bytes
            assert self._ghost_bytes == sum(self._ghosts.values())
            assert not self._held.keys() & self._ghosts.keys()
            assert not any(held.rows.flags.writeable for held in self._held.values())


@dataclass(slots=True, eq=False)
class _Fill:
    span: _Span
    bytes: int
    rows: U8 = field(default_factory=lambda: np.empty((0, 0), np.uint8))
    planes: int = 0  # copied so far


class RamLoad:
    """One load's dealings with the tier, as a context. The first `blocks` rows come from here. Who runs it sets `whole`: leading rows that
    are whole in every plane so far; what was kept of those enters at the end."""

    def __init__(self, tier: RamTier, rows: U8, planes: Sequence[Plane]) -> None:
        self.blocks = 0
        self.whole = 0
        self.used: list[bytes] = []
        self.pieces: list[tuple[int, U8]] = []
        self.filling: list[_Fill] = []
        self._tier = tier
        self._rows = rows
        self._planes = planes
        self._copied = 0  # planes of the leading rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        planes = len(self._planes)
        done = [fill for fill in self.filling if fill.planes == planes and fill.span.row + fill.span.count <= self.whole]
        self._tier.end(self, done)
        self.filling, self.pieces = [], []

    def copy(self, plane: int | None = None) -> None:
        """Fills the leading rows: one plane of them, or all."""
        columns = self._columns(plane)
        for row, part in self.pieces:
            self._rows[row : row + len(part), columns] = part[:, columns]
        self._copied = len(self._planes) if plane is None else plane + 1

    def copy_missing(self) -> None:
        """Fills what `copy` has not filled yet."""
        if not self._copied:
            self.copy()
        for plane in range(self._copied, len(self._planes)):
            self.copy(plane)

    @property
    def planes(self) -> int:
        return len(self._planes)

    def keep(self, rows_whole: int, plane: int | None = None) -> None:
        """Copies what is to stay, before the caller may change it. `rows_whole`: leading rows that are whole in `plane`."""
        columns = self._columns(plane)
        for fill in self.filling:
            span = fill.span
            if span.row + span.count <= rows_whole:
                fill.rows[:, columns] = self._rows[span.row : span.row + span.count, columns]
                fill.planes += len(self._planes) if plane is None else 1

    def _columns(self, plane: int | None) -> slice:
        if plane is None:
            return slice(None)
        one = self._planes[plane]
        return slice(one.offset_bytes, one.offset_bytes + one.bytes)


def _spans(ticket: Ticket, blocks: range) -> list[_Span]:
    """Of each extent that the range touches."""
    keys, owner = ticket.extents["extent_key"], ticket.layout_tag.to_bytes(8, "little") + ticket.owner
    found, begin = [], 0
    for at, (write_id, first, count) in enumerate(ticket.extents[["write_id", "first_block", "count"]].tolist()):
        end = begin + count
        low, high = max(begin, blocks.start), min(end, blocks.stop)
        if low < high:
            name = owner + keys[at].tobytes() + write_id.to_bytes(8, "little")
            found.append(_Span(name, first + low - begin, high - low, low - blocks.start))
        begin = end
    return found
