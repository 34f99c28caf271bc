"""The bytes of a ticket: what goes in comes out, and nothing else is read."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from client_tools import SMALL, chain

from kvstore.client.ticket import EXTENT, HOLDERS_MAX, WINDOWS_MAX, Ticket, WindowAt, _mac
from kvstore.errors import ProtocolError

KEY = bytes(range(32))


def ticket_of(blocks: int = 3, **fields: object) -> Ticket:
    extents = np.zeros(1, EXTENT)
    extents["count"] = blocks
    ticket = Ticket(chain(blocks, SMALL), extents, 128, blocks, bytes(16), bytes(range(16)), 7, 9, 123_456, KEY)
    return replace(ticket, **fields)  # type: ignore[arg-type]  # passed through


def test_usable_blocks_and_windows_come_back() -> None:
    windows = (WindowAt(2, ("10.0.0.1:7400", "[::1]:80")), WindowAt(2, ("b:1",), approximate=True), WindowAt(1, ()))
    found = Ticket.from_bytes(ticket_of(usable_blocks=2, windows=windows).to_bytes(), KEY)
    assert (found.usable_blocks, found.usable_tokens, found.windows) == (2, 256, windows)
    assert Ticket.from_bytes(ticket_of().to_bytes(), KEY).windows == ()


def test_holders_that_cannot_be_reached_from_elsewhere_stay_behind() -> None:
    found = Ticket.from_bytes(ticket_of(windows=(WindowAt(1, ("", "a:1", "x" * 256)),)).to_bytes(), KEY)
    assert found.windows == (WindowAt(1, ("a:1",)),)


def test_more_windows_and_holders_than_a_ticket_takes_are_left_out() -> None:
    windows = tuple(WindowAt(block, tuple(f"{n}:1" for n in range(20))) for block in range(1, 400))
    found = Ticket.from_bytes(ticket_of(windows=windows).to_bytes(), KEY)
    assert len(found.windows) == WINDOWS_MAX and {len(window.holders) for window in found.windows} == {HOLDERS_MAX}


def test_an_older_version_is_refused_with_what_to_do() -> None:
    body = b"KVT1" + ticket_of().to_bytes()[4:-32]
    with pytest.raises(ProtocolError, match=r"E611.*version b'KVT1', this process reads b'KVT2'.*same version of kvstore"):
        Ticket.from_bytes(body + _mac(body, KEY), KEY)


def test_bodies_that_a_key_holder_signed_and_that_do_not_add_up_are_refused() -> None:
    whole = ticket_of(usable_blocks=3, windows=(WindowAt(3, ("a:1", "b:2")),)).to_bytes()[:-32]
    rng = random.Random(1)
    bodies = [whole[:length] for length in range(len(whole))]
    bodies += [
        whole[:at] + bytes([value]) + whole[at + 1 :] for at in [*range(24), *range(len(whole) - 14, len(whole))] for value in (0, 255)
    ]
    bodies += [whole[:-14] + rng.randbytes(14) for _ in range(200)]
    read = 0
    for body in bodies:
        try:
            Ticket.from_bytes(body + _mac(body, KEY), KEY)
            read += 1  # a byte that may have any value
        except ProtocolError as error:
            assert error.code == "E611"
    assert read < 40


def test_a_wrong_key_or_a_changed_byte_is_refused() -> None:
    data = ticket_of().to_bytes()
    with pytest.raises(ProtocolError, match="E611"):
        Ticket.from_bytes(data, bytes(32))
    for at in range(0, len(data), 7):
        with pytest.raises(ProtocolError, match="E611"):
            Ticket.from_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], KEY)
