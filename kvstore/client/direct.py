"""Loads into registered memory, a GPU's too: path B of docs/GPU.md. Nodes write whole bodies there by RDMA, past host RAM.

    with DirectMemory(zone, "auto") as memory:              registered here, once: as dma-buf, by nvidia-peermem, or host RAM
        with memory.read(client, ticket) as arrived:        back when there is enough of every plane, and all nodes are fenced off
            for plane in range(arrived.planes_count):
                for row, landed in arrived.land(plane):     kernels check and rebuild (kvstore/kernels/gpu); nothing wrong gets further
                    landed.scatter(part, pages, table, first_row=row * part.rows)

Zone: for each extent and plane the k + m bodies of its shards as in an ITEM frame (docs/PROTOCOL.md), one behind the other, so that
`views_of_bodies` sees them. Fence: a node writes through a queue pair of its own, and read() returns only after all were reset and, of a
GPU, a byte was read back behind what they wrote; what came is looked at after that alone. Every load sets its queue pairs up anew: the
fence leaves none to use again. A GPU's kernels that use the zone are waited for, too: before nodes are asked, and where a read is closed.

Threads: one a node and load, gone when read() returns, but for one that is still connecting: it finds the load over and opens nothing.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from kvstore import wire
from kvstore.client.client import Client
from kvstore.client.load import spans_of
from kvstore.client.movers.cuda import CudaEvent, told_so_far, wait_for_all
from kvstore.client.movers.devices import device_for
from kvstore.client.movers.interface import poll_until, refuse_encrypted
from kvstore.client.movers.registering import Registered, register_gpu
from kvstore.client.native import U8
from kvstore.client.ticket import Ticket
from kvstore.client.values import LoadOutcome
from kvstore.config import of_environment
from kvstore.errors import Closed, KvstoreError, LayoutError, MisuseError, Unreachable
from kvstore.kernels._native import DirectLink, DirectZone
from kvstore.kernels.gpu import LandedPlane, PageTable, Part
from kvstore.placement import nodes_of_writings

if TYPE_CHECKING:
    from torch import Tensor

BODY_ALIGN: Final = 256  # of the first body of each (extent, plane); of all others by their length, a multiple of 8
SLICE_SECONDS: Final = 0.01  # how soon a thread sees that its load is over
CHECK_BYTES: Final = 8 + wire.DIGEST_BYTES  # of a piece, in front of all pieces
ITEMS_MAX: Final = 4096  # of one node and load: receive requests
READ_BACK_SECONDS: Final = 10.0  # microseconds, but for a device that is broken or emulated


@dataclass(frozen=True)
class _Item:
    """One body: of which extent, shard and plane, how long, and where in the zone."""

    extent: int
    shard: int
    plane: int
    count: int
    offset: int


@dataclass(frozen=True)
class DirectExtent:
    """Blocks [first_block, first_block + blocks) of an extent; they are rows [row, row + blocks) of what is loaded."""

    extent_key: bytes
    write_id: int
    first_block: int
    blocks: int
    row: int
    nodes: tuple[int, ...]  # of each shard; -1: nobody has it
    offsets: tuple[int, ...]  # in the zone, of each plane's bodies


class DirectMemory:
    """`zone`: uint8, flat and contiguous, in host RAM or on a GPU; the caller's, to be left alone until close(). `registration` says how.

    `device` "auto": device_for() says which. For any number of reads, one at a time. ConfigError E145 to E147, E149, E156, Unreachable
    E148, E221, LayoutError E508; ConfigError E158 where `cipher` says that what is stored is encrypted.
    """

    def __init__(self, zone: Tensor | U8, device: str = "auto", *, cipher: int = 0) -> None:
        refuse_encrypted(cipher)
        self.zone = zone
        flat = zone.ndim == 1 and str(zone.dtype).removeprefix("torch.") == "uint8"
        contiguous = zone.flags.c_contiguous and zone.flags.writeable if isinstance(zone, np.ndarray) else zone.is_contiguous()
        if not flat or not contiguous or not len(zone):
            raise LayoutError("E508", "landing zone", f"{zone.dtype} {tuple(zone.shape)}", "give flat, writable bytes in one piece")
        self.device = "cpu" if isinstance(zone, np.ndarray) else str(zone.device)
        self.address = int(zone.ctypes.data) if isinstance(zone, np.ndarray) else int(zone.data_ptr())
        route = of_environment("rdma_traffic_class"), of_environment("rdma_gid_index")  # a zone serves clients of any configuration
        self._core = DirectZone(device_for(device, self.device), *route)
        self._gpu: Registered[None] | None = None
        self._users: list[CudaEvent] = []  # what streams were told that looks at the zone, as far as it is not known to be over
        self._reading = threading.Lock()
        if self.device == "cpu":
            self._core.add(self.address, len(zone))
            self.registration = "host"
        else:
            wait_for_all(self.device)  # torch gives memory out again while kernels that were queued before are still at it
            self._gpu = register_gpu("landing zone", self.device, self.address, len(zone), self._core.add_dma_buf, self._core.add)
            self.registration = self._gpu.way
            self.after_fence()  # what this host cannot do is found out now

    def read(
        self, client: Client, ticket: Ticket, *, blocks: range | None = None, deadline_seconds: float | None = None, every: bool = False
    ) -> DirectRead:
        """Bodies of `blocks` of the ticket's hit, all of it by default. When this returns nobody writes to the zone any more.

        k shards of each plane are waited for; with `every` all that there are: a second try where some of the k were wrong (TOO_FEW).
        What this thread's current stream of the GPU was told so far is over before a node is asked; TIMEOUT where that takes too long.
        Raises LayoutError E508 where they do not fit, MisuseError E518 while another read is open, Unreachable E148 where a node could not
        be fenced off: then the memory must never be used again; E221 where the GPU failed. What nodes do wrong or late is no error: shards
        are missing.
        """
        if not self._reading.acquire(blocking=False):
            raise MisuseError("E518", "landing zone", "is in use by another read", "close that one first, or register a zone for each")
        try:
            return _Reading(self, client, ticket, blocks, deadline_seconds).run(every)
        except BaseException:
            self._reading.release()
            raise

    def note_user(self) -> None:
        """What this thread's current stream of the GPU was told so far may look at the zone."""
        if self._gpu is not None:
            self._users.append(told_so_far(self.device))

    def unused(self, end: float) -> bool:
        """All that was noted is over, at `end` (monotonic) at the latest: the zone may be written again. Raises Unreachable E221."""
        while self._users and poll_until(self._users[0].done, end):
            del self._users[0]
        return not self._users

    def after_fence(self) -> None:
        """What nodes wrote is in the GPU, and kernels begun later see it. Raises Unreachable E148, E221."""
        if self._gpu is not None:
            self._core.read_back(READ_BACK_SECONDS)
            self._gpu.flush(always=True)

    def close(self) -> None:
        """Raises Unreachable E148 where the device does not let go of the memory, which must then stay."""
        if not self._core.close():
            raise Unreachable("E148", self._core.device_name, "keeps a landing zone registered", "end what reads into it first")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class DirectPlane(LandedPlane):
    """A plane that landed in the zone of `read`, whose close() waits for its scatters. Closed E519 after that."""

    read: DirectRead

    def scatter(self, part: Part, pages: Tensor, table: PageTable, *, first_row: int = 0) -> None:
        with self.read.using():
            super().scatter(part, pages, table, first_row=first_row)


@dataclass
class DirectRead:
    """What lies in the zone until close(): `shards[extent][plane]` arrived. COMPLETE: k of every plane, though they may be wrong.

    For one thread, and any stream."""

    memory: DirectMemory
    outcome: LoadOutcome
    ticket: Ticket
    begin: int  # of the ticket's blocks
    extents: tuple[DirectExtent, ...]
    shards: tuple[tuple[tuple[int, ...], ...], ...]
    client: Client
    _closed: bool = field(default=False, init=False)

    @property
    def planes_count(self) -> int:
        return len(self.client.layout.planes(self.client.map.k))

    def bodies(self, extent: int, plane: int) -> Any:
        """(k + m, bytes) of the zone, a view. Rows of shards that did not arrive hold anything."""
        at, code = self.extents[extent], self.client.map
        size = _body_bytes(at.blocks, self.client.layout.planes(code.k)[plane].shard_bytes)
        begin = at.offsets[plane]
        return self.memory.zone[begin : begin + (code.k + code.m) * size].reshape(code.k + code.m, size)

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """close() waits for what the current stream is told within. `land` and `scatter` do it; others that look at `bodies` have to.
        Raises Closed E519."""
        if self._closed:
            raise Closed("E519", "read of a landing zone", "is closed", "scatter before it is")
        try:
            yield
        finally:
            self.memory.note_user()

    def land(self, plane: int) -> Iterator[tuple[int, DirectPlane]]:
        """Checks and rebuilds one plane, extent by extent, by kernels: (first row, landed). Without k shards it is left out."""
        import torch

        from kvstore.kernels.gpu import Arrived, Identity, land_plane, views_of_bodies

        code = self.client.map
        for number, extent in enumerate(self.extents):
            shards = self.shards[number][plane]
            if len(shards) < code.k:
                continue
            bodies = self.bodies(number, plane)
            tensor = torch.from_numpy(bodies) if isinstance(bodies, np.ndarray) else bodies
            name = Identity(self.ticket.owner, extent.extent_key, extent.write_id, extent.first_block)
            first = self.begin + extent.row
            keys = [key.tobytes() for key in self.ticket.keys[first : first + extent.blocks]]
            arrived = [Arrived(name, extent.blocks, shards)]
            where = {"plane": self.client.layout.planes(code.k)[plane], "plane_number": plane, "k": code.k, "m": code.m}
            with self.using():
                landed = land_plane(*views_of_bodies(tensor, extent.blocks), arrived, keys, **where)  # type: ignore[arg-type]  # by name
            yield extent.row, DirectPlane(**vars(landed), read=self)

    def close(self) -> None:
        """The zone is free for the next read; waits for kernels that still look at it. Raises Unreachable E221 where the GPU failed."""
        if not self._closed:
            self._closed = True
            try:
                self.memory.note_user()
                self.memory.unused(math.inf)
            finally:
                self.memory._reading.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _body_bytes(blocks: int, shard_bytes: int) -> int:
    return blocks * (CHECK_BYTES + shard_bytes)


class _Reading:
    """One read under way: what is asked of whom, what has come, and which links are open. `_changed` guards all that threads share."""

    def __init__(self, memory: DirectMemory, client: Client, ticket: Ticket, blocks: range | None, deadline_seconds: float | None) -> None:
        self.memory, self.client, self.ticket = memory, client, ticket
        self.blocks = client.check_direct(ticket, blocks)
        seconds = client.config.load_deadline_seconds if deadline_seconds is None else deadline_seconds
        self.end = time.monotonic() + seconds
        self.k, self.shards_count = client.map.k, client.map.k + client.map.m
        self.planes = client.layout.planes(self.k)
        self.extents, self.zone_bytes = self._places()
        if self.zone_bytes > min(len(memory.zone), wire.VERBS_ZONE_BYTES_MAX):
            cause = f"{len(memory.zone)} bytes, {self.zone_bytes} are needed; at most 1 GiB a read"
            raise LayoutError("E508", "landing zone", cause, "register more, or read fewer blocks at a time")
        self.arrived: list[list[set[int]]] = [[set() for _ in self.planes] for _ in self.extents]
        self._short = len(self.extents) * len(self.planes)  # (extent, plane) with fewer than k shards
        self._changed = threading.Condition()
        self._over = False
        self._working = self._open_links = 0
        self._sockets: set[socket.socket] = set()
        self._unfenced = False

    def _places(self) -> tuple[tuple[DirectExtent, ...], int]:
        spans, which = spans_of(self.ticket, self.blocks)
        rows = self.ticket.extents[which]
        keys = np.ascontiguousarray(rows["extent_key"])
        nodes = nodes_of_writings(self.client.placements, keys, rows["write_epoch"])
        at, extents = 0, []
        for number, (first, count, row) in enumerate(spans.tolist()):
            offsets = []
            for plane in self.planes:
                at += -at % BODY_ALIGN
                offsets.append(at)
                at += self.shards_count * _body_bytes(count, plane.shard_bytes)
            absent = int(rows["absent"][number])
            holders = tuple(-1 if absent >> shard & 1 else int(node) for shard, node in enumerate(nodes[number]))
            extents.append(DirectExtent(keys[number].tobytes(), int(rows["write_id"][number]), first, count, row, holders, tuple(offsets)))
        return tuple(extents), at

    def run(self, every: bool) -> DirectRead:
        items: dict[int, list[_Item]] = {}
        for plane, shape in enumerate(self.planes):
            for number, extent in enumerate(self.extents):
                size = _body_bytes(extent.blocks, shape.shard_bytes)
                for shard, node in enumerate(extent.nodes):
                    if node >= 0:
                        items.setdefault(node, []).append(_Item(number, shard, plane, size, extent.offsets[plane] + shard * size))
        self.memory.note_user()
        if not self.memory.unused(self.end):
            items.clear()
        self._working = len(items)
        for node, mine in items.items():
            threading.Thread(target=self._serve, args=(node, mine), name="kvstore-direct", daemon=True).start()
        with self._changed:
            try:
                while (self._short or every) and self._working and (left := self.end - time.monotonic()) > 0:
                    self._changed.wait(left)
            finally:
                self._stop_locked()
            whole = not self._short
        if self._unfenced:
            raise Unreachable("E148", "landing zone", "the device did not fence off a node", "never use this memory again")
        self.memory.after_fence()
        if not self.blocks and self.ticket.expired(self.client.clock.wall_time()):
            return DirectRead(self.memory, LoadOutcome.EXPIRED, self.ticket, 0, (), (), self.client)
        outcome = LoadOutcome.COMPLETE if whole else LoadOutcome.TIMEOUT if time.monotonic() >= self.end else LoadOutcome.UNREACHABLE
        shards = tuple(tuple(tuple(sorted(plane)) for plane in extent) for extent in self.arrived)
        return DirectRead(self.memory, outcome, self.ticket, self.blocks.start, self.extents, shards, self.client)

    def _stop_locked(self) -> None:
        """The fence: no new link, and all that are open are closed when this returns."""
        self._over = True
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes who waits for an answer
        while self._open_links:
            self._changed.wait()

    def _serve(self, node: int, items: list[_Item]) -> None:
        try:
            host, _, port = self.client.map.nodes[node].address.rpartition(":")
            seconds = min(self.client.config.connect_timeout_seconds, self.end - time.monotonic())
            if seconds <= 0 or len(items) > ITEMS_MAX:
                return
            hello = wire.Hello(wire.Role.BULK, self.client.map.tag, epoch=self.client.map.epoch)
            with wire.Connection((host.strip("[]"), int(port)), hello, seconds) as tcp, self._linked(tcp, len(items)) as link:
                if link is not None:
                    self._ask(tcp, link, items)
        except (OSError, EOFError, KvstoreError):
            pass  # its shards are missing
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def _linked(self, tcp: wire.Connection, credits_count: int) -> Iterator[DirectLink | None]:
        """A link, fenced at the end; None where the load is over already."""
        with self._changed:
            over = self._over
            if not over:
                self._open_links += 1
                self._sockets.add(tcp.socket)
        if over:
            yield None
            return
        fenced = True
        try:
            link = self.memory._core.link(self.memory.address, self.zone_bytes, credits_count)
            try:
                yield link
            finally:
                fenced = link.fence()
        finally:
            with self._changed:
                self._unfenced |= not fenced
                self._open_links -= 1
                self._sockets.discard(tcp.socket)
                self._changed.notify_all()

    def _ask(self, tcp: wire.Connection, link: DirectLink, items: list[_Item]) -> None:
        opened = tcp.ask(wire.Verb.VERBS_OPEN, link.address())
        if opened.status != wire.Status.OK or opened.check != wire.body_check(opened.body):
            return
        link.connect(opened.body)
        names = sorted({(item.extent, item.shard) for item in items})
        if len(names) > wire.READ_EXTENTS_MAX:
            return
        slots = {name: slot for slot, name in enumerate(names)}
        extents = [self.extents[number] for number, _ in names]
        asked = [
            wire.ReadExtent(extent.extent_key, extent.write_id, shard, extent.first_block, extent.blocks)
            for extent, (_, shard) in zip(extents, names, strict=True)
        ]
        wanted = [wire.VerbsItem(slots[item.extent, item.shard], item.plane, item.count, item.offset) for item in items]
        body = wire.encode_verbs_read(asked, wanted, owner=self.ticket.owner, epoch=self.ticket.epoch)
        tcp.send(wire.encode(wire.Verb.VERBS_READ, body))
        due = 0
        while due < len(items) and not self._over:
            came = link.take(SLICE_SECONDS)
            for immediate in came:
                status = immediate >> 24
                if due == len(items) or immediate != wire.verbs_immediate(status, 0, due):
                    return  # it does not keep to the protocol
                if not status:
                    self._note(items[due])
                due += 1
            if not came and select.select([tcp.socket], [], [], 0)[0]:
                return  # a refusal, or the end

    def _note(self, item: _Item) -> None:
        with self._changed:
            shards = self.arrived[item.extent][item.plane]
            shards.add(item.shard)
            if len(shards) == self.k:
                self._short -= 1
                if not self._short:
                    self._changed.notify_all()
