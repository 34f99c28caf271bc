"""What lookups, loads and stores answer: small enums and frozen results. Only faults are raised."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import ClassVar, Final

from kvstore.errors import MisuseError

DEPTH_MAX: Final = (1 << 16) - 1


class FidelityKind(IntEnum):
    """As in records (kernels/common.hpp)."""

    EXACT = 0
    APPROX = 1
    DECODE = 2


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How the bytes were computed. `depth` counts bounded replays behind them; 0 unless kind is APPROX."""

    kind: FidelityKind
    depth: int = 0

    EXACT: ClassVar[Fidelity]
    DECODE: ClassVar[Fidelity]

    def __post_init__(self) -> None:
        if not 0 <= self.depth <= DEPTH_MAX or (self.depth > 0) != (self.kind == FidelityKind.APPROX):
            raise MisuseError("E563", f"fidelity {self.kind.name} of depth {self.depth}", "only approximations have a depth, of 1 to 65535")

    @staticmethod
    def approx(depth: int) -> Fidelity:
        return Fidelity(FidelityKind.APPROX, depth)


Fidelity.EXACT = Fidelity(FidelityKind.EXACT)
Fidelity.DECODE = Fidelity(FidelityKind.DECODE)


@dataclass(frozen=True, slots=True)
class Accept:
    """What a reader takes; the rest counts as not found. `depth_max` -1 takes no approximations."""

    depth_max: int = -1
    decode: bool = True  # bytes that a decode server computed, token by token

    EXACT: ClassVar[Accept]
    ANY: ClassVar[Accept]

    def takes(self, kind: int, depth: int) -> bool:
        if kind == FidelityKind.APPROX:
            return depth <= self.depth_max
        return kind == FidelityKind.EXACT or (kind == FidelityKind.DECODE and self.decode)


Accept.EXACT = Accept()
Accept.ANY = Accept(depth_max=DEPTH_MAX)


class LoadOutcome(Enum):
    """COMPLETE, or why fewer blocks came than the ticket promised. A shorter load is an answer, not a fault."""

    COMPLETE = "complete"
    TIMEOUT = "timeout"
    MISSING = "missing"  # nodes no longer have what they promised
    CORRUPT = "corrupt"  # bytes failed a check
    UNREACHABLE = "unreachable"
    EXPIRED = "expired"  # the ticket is too old: nothing was asked
    CANCELLED = "cancelled"
    BUSY = "busy"  # the agent process had no memory for more (kvstore/client/agent/worker.py)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The first `blocks` rows of the destination are whole and checked; the others may hold anything."""

    outcome: LoadOutcome
    blocks: int
    bytes: int
    seconds: float
    decoded: int  # (extent, plane) pieces with a data shard rebuilt
    late12: int  # shards of an extent beyond its eleventh that were asked for
    bad_shards: int  # failed a check; counted as lost
    missing_shards: int
    lagging_shards: int
    shards_asked: int


@dataclass(frozen=True, slots=True)
class PlaneReady:
    """Plane `plane` of the first `blocks` rows is whole and checked. Later planes may be whole for fewer rows, never for others."""

    plane: int
    blocks: int


class StoreOutcome(Enum):
    """Of a whole store: the worst of its extents."""

    STORED = "stored"
    DEGRADED = "degraded"  # readable, with fewer than k+1 acknowledgements
    DROPPED = "dropped"  # the queue was full: some extents were never sent
    DECLINED = "declined"  # the nodes voted against it (kvstore/client/admission.py): nothing was sent
    FAILED = "failed"  # some extents had fewer than k acknowledgements and were withdrawn
    STALE_MAP = "stale_map"  # the same, for nodes have a newer cluster map than this client can get

    @property
    def readable(self) -> bool:
        """Whether all of it can be loaded now."""
        return self in (StoreOutcome.STORED, StoreOutcome.DEGRADED)


@dataclass(frozen=True, slots=True)
class StoreResult:
    outcome: StoreOutcome
    blocks: int  # stored, degraded ones included
    bytes: int
    extents_stored: int
    extents_degraded: int
    extents_failed: int
    extents_dropped: int
    acks: tuple[int, ...]  # by extent that was to be sent
    extents_declined: int = 0  # of the end of the run; `outcome` is of those before
    map_epoch: int = 0  # by which it was placed; 0: it was not, or an agent process placed it
    node_epoch: int = 0  # STALE_MAP: the nodes'
