"""A client of VERBS_READ on pyverbs and plain Python: what the native client is measured against, and whatever it should never do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyverbs.enums as e
from server_tools import Client, assert_item
from verbs.peer import WAIT_SECONDS, End, immediate_of

from kvstore import record, wire
from kvstore.wire import Status, Verb

ROUND = 5


class Reader(End):
    """An end of a BULK connection to a daemon, opened with `credits` receive requests; `connection` is its TCP side."""

    def __init__(self, client: Client, *, device: str = "rxe1", credits: int = 32, zone_bytes: int = 1 << 20, go: bool = True,
                 base: End | None = None) -> None:  # fmt: skip
        super().__init__(device, zone_bytes, depth=max(64, credits), base=base)
        self.connection = client.connect(wire.Role.BULK, WAIT_SECONDS)
        self.credits = credits
        if go:
            assert self.ask_open().status == Status.OK

    def ask_open(self, **changed: Any) -> wire.Frame:
        """VERBS_OPEN; with an OK answer this end is connected and its zone open."""
        mine = wire.VerbsOpen(self.gid, self.qpn, self.psn, 5, self.credits, self.zone.buf, self.zone_bytes, self.first_rkey())
        answer = self.connection.ask(Verb.VERBS_OPEN, replace(mine, **changed).encode())
        if answer.status == Status.OK:
            assert answer.check == wire.body_check(answer.body)
            there = wire.VerbsOpen.decode(answer.body)
            assert (there.credits, there.zone_addr, there.zone_bytes, there.rkey) == (0, 0, 0, 0)
            self.connect(there.gid, there.qpn, there.psn)
            self.receive(self.credits)
            self.open_zone()
        return answer

    def ask(self, extents: list[wire.ReadExtent], items: list[wire.VerbsItem], *, credits_told: int = 0, round_: int = ROUND) -> None:
        self.connection.send(wire.encode(Verb.VERBS_READ, wire.encode_verbs_read(extents, items, credits_told=credits_told, round_=round_)))

    def answers(self, count: int, round_: int = ROUND) -> list[Status]:
        """The next `count` immediates, which have to be those of items 0, 1, ... of one request."""
        found = []
        for ordinal, completion in enumerate(self.completions(count)):
            assert completion.status == e.IBV_WC_SUCCESS, completion
            told = immediate_of(completion)
            assert (told & 0xFFFF, told >> 16 & 0xFF) == (ordinal, round_)
            found.append(Status(told >> 24))
        return found

    def assert_holds(self, item: wire.VerbsItem, r: record.Record) -> None:
        assert_item(self.zone.read(item.count, item.offset), r, item.plane)

    def end_tcp(self) -> None:
        self.connection.close()


def body_bytes(r: record.Record, plane: int) -> int:
    """Of an item: sums, digests, pieces."""
    return 24 * r.block_count + sum(map(len, r.pieces[plane]))


def items_of(records: list[record.Record], *, gap: int = 64) -> list[wire.VerbsItem]:
    """Every plane of every record, back to back in the zone with a gap between."""
    at, items = 0, []
    for ordinal, r in enumerate(records):
        for plane in range(len(r.plane_bytes)):
            items.append(wire.VerbsItem(ordinal, plane, body_bytes(r, plane), at))
            at += body_bytes(r, plane) + gap
    return items
