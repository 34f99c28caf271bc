"""What the transport rests on, by verbs alone and on whichever device this is: windows fence, immediates arrive, in order."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import pyverbs.enums as e
from verbs.peer import End, immediate_of

Pair = tuple[End, End]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A writer, and a reader whose zone is open to it."""
    with End("rxe0") as writer, End("rxe1") as reader:
        writer.connect(reader.gid, reader.qpn, reader.psn)
        reader.connect(writer.gid, writer.qpn, writer.psn)
        reader.receive(8)
        reader.open_zone(4096, 64 << 10)
        yield writer, reader


def test_a_body_lies_in_the_zone_when_its_immediate_has_come(pair: Pair) -> None:
    writer, reader = pair
    body = os.urandom(10_000)
    writer.zone.write(body, len(body))
    writer.write(reader.rkey, reader.zone.buf + 4096, len(body), immediate=7)
    writer.write(reader.rkey, reader.zone.buf + 4096, 0, immediate=8)  # no bytes: a status
    told = reader.completions(2)
    assert [immediate_of(c) for c in told] == [7, 8]
    assert reader.zone.read(len(body), 4096) == body
    assert [c.status for c in writer.completions(2)] == [e.IBV_WC_SUCCESS] * 2


@pytest.mark.parametrize("fault", ["below the region", "beyond the region", "another key", "after the fence"])
def test_what_the_window_does_not_allow_changes_nothing(pair: Pair, fault: str) -> None:
    """The region's ends, not the window's: soft-RoCE of Linux 6.1 does not look at those."""
    writer, reader = pair
    canary = b"\xa5" * reader.zone_bytes
    reader.zone.write(canary, len(canary))
    rkey, offset = reader.rkey, 4096
    if fault == "below the region":
        offset = -1
    elif fault == "beyond the region":
        offset = reader.zone_bytes - 99
    elif fault == "another key":
        rkey ^= 0x5A00
    else:
        reader.close_zone()
    writer.write(rkey, reader.zone.buf + offset, 100)
    (refused,) = writer.completions(1)
    assert refused.status == e.IBV_WC_REM_ACCESS_ERR
    assert reader.zone.read(len(canary), 0) == canary
