"""A mover brings the rows of a request from host RAM into an engine's pages, layer by layer, and back.

    rows   (blocks, row bytes)  host RAM, as a load leaves them    layer l of block i:  rows[i, columns of l]
    pages  (pages, row bytes)   device memory, the engine's        it belongs to:       pages[table[i], columns of l]

A mover is made for one `pages` and lives as long. Its verbs, in order:

    adopt(memory), host_rows(blocks)   at start: host memory that it may move from at full speed (pinned, registered)
    move(rows, table, layers, ...)     a Move; one thread iterates it
      next(move) -> Moved              begins the next layer, in the order of `layers`, and gives its event at once
      moved.event                      a stream is told to start after it, or a thread waits for it
      move.cancel()                    from any thread
      leaving the `with` block         waits until nothing reads `rows` and nothing writes `pages` any more
    close()                            gives back what was pinned and registered

`layers` may be a generator that waits for each layer to be loaded: the next layer moves while the one before is used. What the caller's
current stream was told before `move` is done before the first byte moves, so pages that it read may be written again.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, Self

import numpy as np

from kvstore.client.native import U8
from kvstore.errors import Closed, ConfigError, DeadlineExceeded, LayoutError
from kvstore.kernels._native import pinned_pages

if TYPE_CHECKING:
    from torch import Tensor

DEADLINE_SECONDS: Final = 5.0
SETTLE_SECONDS: Final = 10.0  # after the deadline, for what a device has begun and cannot be told to leave
PAUSE_SECONDS: Final = 20e-6  # a layer takes 20 us to 2 ms
PAUSE_SECONDS_MAX: Final = 1e-3
_HELD: Final[list[Any]] = []  # memory that a device may still use: never freed


class MoveOutcome(IntEnum):
    """`COMPLETE`: every layer is there. Else those whose event is done are."""

    COMPLETE = 0
    TIMEOUT = 1
    CANCELLED = 2


class Event(Protocol):
    """That a layer is in its place."""

    def done(self) -> bool: ...

    def wait(self, seconds: float) -> bool:
        """Whether it came in time. Raises Unreachable E221 where the device failed."""
        ...

    def before(self, stream: Any) -> None:
        """Work given to this CUDA stream from now on starts after it. Where a device cannot tell the stream, this waits: raises
        DeadlineExceeded E220."""
        ...


class DoneEvent:
    """Of a copy that was over when it was begun."""

    def done(self) -> bool:
        return True

    def wait(self, seconds: float) -> bool:
        return True

    def before(self, stream: Any) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Moved:
    """The layer of this number is on its way; `columns` of the pages are good once `event` is done."""

    layer: int
    columns: slice
    event: Event


class Way(Protocol):
    """One move, as a kind of mover does it."""

    def start(self, columns: slice, end: float) -> Event:
        """Begins; waits for room in the device's queue until `end` (monotonic) at most. Raises Unreachable E221, DeadlineExceeded E220."""
        ...

    def settle(self, seconds: float) -> bool:
        """Nothing that was begun touches memory any more when this returns True; False: that could not be had in time."""
        ...


class Move:
    """See above. Use it in a `with` block; `cancel` from any thread, everything else from one."""

    def __init__(self, way: Way, layers: Iterable[slice], end: float, width: int, held: Any) -> None:
        self._way, self._layers, self._width, self._held = way, iter(layers), width, held
        self.end = end  # monotonic; who iterates it may put it off
        self._cancelled = threading.Event()
        self._last: Event = DoneEvent()
        self._count = 0
        self._exhausted = False
        self.lost = False  # a device could not be told to leave the memory: it must not be used again
        self.outcome: MoveOutcome | None = None  # None: under way

    def cancel(self) -> None:
        """No layer is begun after this; those that were are finished."""
        self._cancelled.set()

    def __iter__(self) -> Iterator[Moved]:
        return self

    def __next__(self) -> Moved:
        if self.outcome is None and not self._stopped():
            columns = next(self._layers, None)
            if columns is None:
                self._exhausted = True
                self.finish()
            elif not self._stopped():
                if not _fits(columns, self._width):
                    told = f"columns {columns.start} to {columns.stop}" if isinstance(columns, slice) else f"layer {columns!r}"
                    raise LayoutError("E515", told, f"rows have {self._width} bytes", "give slices of whole numbers, both ends named")
                try:
                    self._last = self._way.start(columns, self.end)
                except DeadlineExceeded:
                    self.outcome = MoveOutcome.TIMEOUT
                    raise StopIteration from None
                self._count += 1
                return Moved(self._count - 1, columns, self._last)
        raise StopIteration

    def _stopped(self) -> bool:
        if self._cancelled.is_set():
            self.outcome = MoveOutcome.CANCELLED
        elif time.monotonic() >= self.end:
            self.outcome = MoveOutcome.TIMEOUT
        return self.outcome is not None

    def finish(self) -> MoveOutcome:
        """Ends it, after the layers that were begun. COMPLETE only where it was iterated to its end, and all came in time."""
        if self.outcome is None:
            came = self._last.wait(max(0.0, self.end - time.monotonic()))
            self.outcome = (MoveOutcome.COMPLETE if self._exhausted else MoveOutcome.CANCELLED) if came else MoveOutcome.TIMEOUT
        return self.outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            if self.outcome is None:
                self.outcome = MoveOutcome.CANCELLED
            if not self._way.settle(SETTLE_SECONDS):
                self.lost = True
                _HELD.append((self._held, self._way))


def _fits(columns: Any, width: int) -> bool:
    if not isinstance(columns, slice) or columns.step not in (None, 1):
        return False
    ends = columns.start, columns.stop
    return all(isinstance(end, (int, np.integer)) for end in ends) and 0 <= columns.start < columns.stop <= width


class Mover(ABC):
    """Any thread, and several moves at once; each is one thread's."""

    name: ClassVar[str]
    pins: ClassVar[bool] = False  # a device reads and writes the host memory by itself

    def __init__(self, pages: Tensor | U8) -> None:
        """`pages`: (pages, row bytes) of uint8, columns contiguous; in host RAM also a numpy array. Raises LayoutError E513 for others;
        ConfigError E156 where this host has not what the mover needs."""
        shape, strides = tuple(pages.shape), tuple(pages.strides if isinstance(pages, np.ndarray) else pages.stride())
        sound = str(pages.dtype).removeprefix("torch.") == "uint8" and len(shape) == 2 and min(shape) > 0
        if not sound or strides[1] != 1 or (shape[0] > 1 and strides[0] < shape[1]):
            raise LayoutError("E513", "pages", f"{pages.dtype} {shape}", "give (pages, row bytes) of uint8")
        self.pages: Any = pages  # kept: it is written to by address
        self.pages_count, self.row_bytes = int(shape[0]), int(shape[1])
        self.page_stride = int(strides[0])
        self.address = int(pages.ctypes.data if isinstance(pages, np.ndarray) else pages.data_ptr())
        self.device = "cpu" if isinstance(pages, np.ndarray) else str(pages.device)
        self._closed = False

    def adopt(self, memory: U8) -> None:  # noqa: B027  # a plain copy needs nothing
        """Makes host memory ready to be moved from; it must stay until `close`. Slow: at start only."""

    def host_rows(self, blocks: int) -> U8:
        """New host memory (blocks, row bytes), adopted. For a device it starts at a page: a huge one where there are some."""
        size = blocks * self.row_bytes
        memory = pinned_pages(size) if self.pins else np.zeros(size, np.uint8)
        rows: U8 = memory.reshape(blocks, self.row_bytes)
        self.adopt(rows)
        return rows

    def pages_for(self, blocks: int) -> int:
        """Of a table: how many it names for so many blocks."""
        return blocks

    def begins_page(self, block: int) -> bool:
        """Whether a move may begin with this block of the request. Only pages that hold more than a block say no."""
        return True

    def layers_in(self, columns: slice) -> list[slice]:
        """These columns of a block, cut where a layer of the pages is whole: each part is worth an event of its own."""
        return [columns]

    def move(
        self,
        rows: U8,
        table: Sequence[int] | Any,
        layers: Iterable[slice],
        *,
        to_device: bool = True,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> Move:
        """`rows` (n, row bytes), any distance apart; `table`: n pages, no two the same; `to_device` False: from the pages into `rows`.

        Raises LayoutError E514 for rows or a table that do not fit, Closed E519."""
        if self._closed:
            raise Closed("E519", f"mover {self.name}", "is closed", "make a new one")
        if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != self.row_bytes:
            told = f"{rows.dtype} {rows.shape}" if isinstance(rows, np.ndarray) else type(rows).__name__
            raise LayoutError("E514", "rows", f"{told}, pages have {self.row_bytes} bytes", "give (n, row bytes) of uint8")
        if rows.size and (rows.strides[1] != 1 or (len(rows) > 1 and rows.strides[0] < self.row_bytes)):
            raise LayoutError("E514", "rows", f"lie {rows.strides} bytes apart", "give them one after the other, each in one piece")
        target = self.pages if to_device else rows
        if isinstance(target, np.ndarray) and not target.flags.writeable:
            raise LayoutError("E514", "pages" if to_device else "rows", "are read-only", "give memory that may be written")
        if math.isnan(deadline_seconds):
            raise LayoutError("E514", "deadline_seconds", "is not a number", "give seconds")
        places = _places_of(table)
        wrong = places.shape != (self.pages_for(len(rows)),) or (len(places) and (places.min() < 0 or places.max() >= self.pages_count))
        if wrong or len(np.unique(places)) != len(places):
            cause = f"{places.size} places for {len(rows)} rows and {self.pages_count} pages"
            raise LayoutError("E514", "table", cause, "give each row a page of its own")
        end = time.monotonic() + deadline_seconds
        return Move(self._way(rows, places, to_device), layers, end, self.row_bytes, (rows, self.pages))

    @abstractmethod
    def _way(self, rows: U8, places: np.ndarray[Any, np.dtype[np.int64]], to_device: bool) -> Way: ...

    def close(self) -> None:
        """Harmless twice."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _places_of(table: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Page numbers as they are: 1.9 or True names no page. Raises LayoutError E514."""
    try:
        places = np.asarray(table)
    except (ValueError, TypeError, OverflowError):
        places = np.empty(1, object)
    if places.size and (places.dtype.kind not in "iu" or places.max() > np.iinfo(np.int64).max):
        raise LayoutError("E514", "table", "holds what is no page number", "give whole numbers")
    return np.ascontiguousarray(places, np.int64)


def runs_of(places: np.ndarray[Any, np.dtype[np.int64]]) -> list[tuple[int, int, int]]:
    """(first row, first page, count) of rows whose pages follow each other: what one strided copy can take."""
    if not len(places):
        return []
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    firsts = [0, *(int(cut) for cut in cuts)]
    ends = [*firsts[1:], len(places)]
    return [(first, int(places[first]), end - first) for first, end in zip(firsts, ends, strict=True)]


def held_in(memories: Iterable[U8], rows: U8, row_bytes: int) -> int:
    """Which of the memories that a mover was given holds `rows`. Raises LayoutError E517 where none does."""
    first = int(rows.ctypes.data)
    last = first + (len(rows) - 1) * rows.strides[0] + row_bytes if len(rows) else first
    for number, memory in enumerate(memories):
        low = int(memory.ctypes.data)
        if low <= first and last <= low + memory.nbytes:
            return number
    raise LayoutError("E517", "rows", "lie in memory that this mover was not given", "take them from host_rows(), or adopt() it at start")


def torch_cuda() -> Any:
    """torch.cuda, which is not typed. Imported late: it takes seconds, and the rest needs no torch."""
    import torch

    return torch.cuda


def poll_until(done: Callable[[], bool], end: float) -> bool:
    """Asks until it is so, or the time (monotonic) is over. The pauses grow: a device that takes long is asked seldom."""
    pause = PAUSE_SECONDS
    while not done():
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, PAUSE_SECONDS_MAX)
    return True


def refuse_encrypted(cipher_id: int) -> None:
    """Blocks of an encrypted namespace are decrypted in host RAM: they do not land in a GPU undeciphered. Raises ConfigError E158."""
    if cipher_id:
        cause = f"its blocks are encrypted (cipher {cipher_id})"
        raise ConfigError("E158", "landing in GPU memory", cause, "load this namespace through host RAM")
