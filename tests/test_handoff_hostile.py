"""Handoffs among peers that say anything at all: the honest ones arrive bit for bit, and what the others took is given back.

Seeded. Not covered: peers that open all connections there are, or offer as much as there is room for; they hold it up to 60 s.
"""

from __future__ import annotations

import random
import socket
import struct
import threading

import pytest
from client_tools import until
from handoff_child import sections_of

from kvstore import wire
from kvstore.client.agent import frames
from kvstore.client.agent.frames import Offer, PeerConfig, Verb
from kvstore.client.agent.handoff import HandoffOutcome, HandoffSender, begin, send_handoff
from kvstore.client.agent.inbox import HandoffInbox
from kvstore.client.agent.peer_server import PeerServer
from kvstore.client.agent.peers import Peers

WAIT_SECONDS = 20.0
LENGTHS = (0, 1, 15, 4095, 4096, 4097, 1 << 20, 1 << 31, (1 << 32) - 1)
STEPS = 200


def somebody(dice: random.Random, known: list[bytes]) -> bytes:
    """What a peer might send next: right, nearly right, or wrong."""
    name = dice.choice([*known, dice.randbytes(16)])
    kind = dice.randrange(8)
    if kind == 0:
        sections = tuple((f"s{i}", dice.choice((0, 1, 4096, 9000))) for i in range(dice.randrange(1, 4)))
        return frames.request(Verb.OFFER, Offer(name, bytes(16), sections, 4096, dice.choice((1, 600)), dice.randbytes(3)).encode())
    if kind == 1:
        data = dice.randbytes(dice.choice((1, 4096, 5000)))
        section, part = dice.choice((0, 1, 2**32 - 1)), dice.choice((0, 1, 2**32 - 1))
        check = dice.choice((0, frames.part_sum(name, section, part, data)))
        return frames.part_head(name, section, part, check, len(data)) + data[: dice.choice((len(data), len(data), len(data) // 2))]
    if kind == 2:
        return frames.request(Verb.COMMIT, frames.encode_commit(name, dice.choice((bytes(16), frames.handoff_digest(name, [[], [0]])))))
    if kind == 3:
        return frames.request(Verb.ABORT, dice.choice((dice.randbytes(16), name[:15])))
    if kind == 4:  # a length that nobody means
        head = bytearray(wire.encode(dice.choice((Verb.PART, Verb.OFFER, Verb.COMMIT)), b""))
        struct.pack_into("<I", head, dice.choice((4, 8, 12, 16)), dice.choice(LENGTHS))
        return bytes(head)
    if kind == 5:
        return wire.encode(Verb.HELLO, frames.hello(bytes(16)))
    if kind == 6:
        frame = bytearray(frames.request(Verb.OFFER, Offer(name, bytes(16), (("a", 4096),), 4096, 5).encode()))
        frame[dice.randrange(len(frame))] ^= 1 << dice.randrange(8)
        return bytes(frame)
    return dice.randbytes(dice.choice((1, 40, 200)))


def be_hostile(port: int, seed: int, known: list[bytes]) -> None:
    dice = random.Random(seed)
    for _ in range(STEPS):
        try:
            with socket.create_connection(("127.0.0.1", port), WAIT_SECONDS) as connection:
                connection.sendall(wire.encode(Verb.HELLO, frames.hello(bytes(16))))
                for _ in range(dice.randrange(1, 6)):
                    connection.sendall(somebody(dice, known))
                if dice.random() < 0.5:
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass
        except OSError:
            pass  # it was cut


@pytest.mark.parametrize("seed", range(2))
def test_honest_handoffs_arrive_whole_among_hostile_peers(seed: int) -> None:
    inbox = HandoffInbox(64 << 20)
    server = PeerServer("127.0.0.1", 0, handoffs=inbox, config=PeerConfig(progress_seconds=WAIT_SECONDS))
    mine = [bytes([number]) * 16 for number in (1, 2, 3)]  # nobody else knows them
    others = [threading.Thread(target=be_hostile, args=(server.port, 10 * seed + number, [bytes(16)])) for number in range(3)]
    with Peers(config=PeerConfig(progress_seconds=WAIT_SECONDS)) as peers:
        for thread in others:
            thread.start()
        rounds = 0
        while any(thread.is_alive() for thread in others):
            sections = sections_of(rounds, 30_000)
            sizes = [(name, len(data)) for name, data in sections.items()]
            sender = begin(peers, server.address, sizes, handoff_id=mine[rounds % 3], deadline_seconds=WAIT_SECONDS)
            assert isinstance(sender, HandoffSender), (sender, server.stats(), inbox.stats())
            for name, data in sections.items():
                sender.put(name, data)
            assert sender.commit(WAIT_SECONDS) is HandoffOutcome.DONE
            arrival = inbox.take(sender.id, whole=True)
            assert arrival is not None
            assert {name: bytes(arrival.section(name) or b"") for name in sections} == sections
            inbox.release(arrival)
            del arrival
            rounds += 1
        for thread in others:
            thread.join()
        assert rounds
        until(lambda: server.stats()["connections"] == peers.stats()["connections"], "the end of theirs")
        for arrival in [inbox.take(whole=True) for _ in inbox.offers()]:  # a right one by chance
            assert arrival is not None
            inbox.release(arrival)
        assert server.stats().get("faults", 0) == 0
        assert send_handoff(peers, server.address, {"a": b"hello"}, deadline_seconds=WAIT_SECONDS) is HandoffOutcome.DONE
        last = inbox.take()
        assert last is not None
        inbox.release(last)
        arrival = last = None
        until(lambda: inbox.stats()["used_bytes"] == inbox.stats()["arrivals"] == 0, "what they took")
    server.close()
