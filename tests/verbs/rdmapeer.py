"""The peers of tests/faultpeer.py with RDMA: a second daemon's end, in plain Python over pyverbs. Needs an RDMA device."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from faultpeer import Peer, PeerCluster, Pipe, Raw
from verbs.nodes import DEVICE
from verbs.peer import End

from kvstore import wire
from kvstore.wire import Kind, Status, Verb

BODY_BYTES_MAX = 2 << 20
MTU_4096 = 5


@dataclass
class Zone:
    """What one connection was told, and how far it may go."""

    end: End
    opened: wire.VerbsOpen
    credits: int
    late: list[tuple[int, int]] = field(default_factory=list)  # offset, length of what tests write afterwards


class RdmaPeer(Peer):
    """`open_rule` decides about VERBS_OPEN: a status refuses, bytes are the reply's body; None: as it should be."""

    def __init__(self, cluster: PeerCluster) -> None:
        super().__init__(cluster)
        self.open_rule: Status | bytes | None = None
        self.zones: dict[Pipe, Zone] = {}
        self.rounds: list[tuple[int, int]] = []  # items and credits of each VERBS_READ
        self.no_more = False  # posts nothing: the client waits in vain
        self.immediate_xor = 0

    async def serve(self, pipe: Pipe) -> None:
        try:
            await super().serve(pipe)
        finally:
            if zone := self.zones.pop(pipe, None):
                zone.end.close()

    async def _answer(self, frame: wire.Frame, body: bytes, pipe: Pipe) -> None:
        if frame.verb == Verb.VERBS_OPEN:
            self.asked[Verb.VERBS_OPEN] += 1
            await self._open(frame, body, pipe)
        elif frame.verb == Verb.VERBS_READ:
            self.asked[Verb.VERBS_READ] += 1
            await self._verbs_read(body, pipe)
        else:
            await super()._answer(frame, body, pipe)

    async def _open(self, frame: wire.Frame, body: bytes, pipe: Pipe) -> None:
        def answer(reply: bytes, status: int = Status.OK) -> bytes:
            return wire.encode(Verb.VERBS_OPEN, reply, request_id=frame.request_id, kind=Kind.REPLY, status=status)

        assert frame.check == wire.body_check(body)
        if isinstance(self.open_rule, Status):
            await pipe.send(answer(b"", self.open_rule))
            return
        opened = wire.VerbsOpen.decode(body)
        end = End(DEVICE, BODY_BYTES_MAX)
        self.zones[pipe] = Zone(end, opened, opened.credits)
        end.connect(opened.gid, opened.qpn, opened.psn)
        right = wire.VerbsOpen(end.gid, end.qpn, end.psn, MTU_4096).encode()
        await pipe.send(answer(self.open_rule or right))

    async def _verbs_read(self, body: bytes, pipe: Pipe) -> None:
        zone = self.zones[pipe]
        extents, items, told, round_ = wire.decode_verbs_read(body)
        zone.credits += told
        self.rounds.append((len(items), told))
        for ordinal, asked in enumerate(items):
            item = self._item(extents[asked.extent], asked.plane, pipe, 0, ordinal)
            self.items_asked.append((item.shard, asked.plane))
            verdict = await self.item_rule(item) if self.item_rule is not None else None
            if isinstance(verdict, Raw):
                await pipe.send(verdict.data)
                raise ConnectionError
            if verdict is None:
                verdict = item.body if len(item.body) == asked.count else Status.BAD_REQUEST if item.body else Status.NOT_FOUND
            if self.no_more:
                return
            assert zone.credits > 0, "the client asked for more than it gives credits for"
            zone.credits -= 1
            if isinstance(verdict, Status):
                await self.write(zone, 0, b"", wire.verbs_immediate(verdict, round_, ordinal) ^ self.immediate_xor)
            else:
                await self.write(zone, asked.offset, verdict, wire.verbs_immediate(0, round_, ordinal) ^ self.immediate_xor)

    async def write(self, zone: Zone, offset: int, body: bytes, immediate: int | None = None, rkey: int | None = None) -> int:
        """One RDMA WRITE; the status of its completion."""
        if body:
            zone.end.zone.write(body, len(body))
        zone.end.write(zone.opened.rkey if rkey is None else rkey, zone.opened.zone_addr + offset, len(body), immediate)
        while not zone.end.pending():
            await asyncio.sleep(0)
        (done,) = zone.end.completions(1)
        status: int = done.status
        return status
