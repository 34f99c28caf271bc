"""One side of a handoff in a process of its own. Talks in lines; ends at end of input.

python handoff_child.py take CAPACITY       an inbox and its server: prints the port; per line on stdin one answer:
    take SECONDS      id and note of the oldest arrival, its sections' digests once complete, or its state; then releases it
    stats             of the inbox
python handoff_child.py give ADDRESS SIZE   a handoff of three sections; puts the first two, prints `given`, and waits (to be killed)
"""

from __future__ import annotations

import hashlib
import json
import random
import sys

from kvstore.client.agent.handoff import HandoffOutcome, begin
from kvstore.client.agent.inbox import ArrivalState, HandoffInbox
from kvstore.client.agent.peer_server import PeerServer
from kvstore.client.agent.peers import Peers


def sections_of(seed: int, size: int) -> dict[str, bytes]:
    dice = random.Random(seed)
    return {"rows.0": dice.randbytes(size), "rows.1": dice.randbytes(size // 3 + 1), "empty": b"", "rings": dice.randbytes(777)}


def digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def take(capacity_bytes: int) -> None:
    inbox = HandoffInbox(capacity_bytes)
    server = PeerServer("127.0.0.1", 0, handoffs=inbox)
    print(server.port, flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "stats":
            print(json.dumps(inbox.stats()), flush=True)
            continue
        arrival = inbox.take(None, float(rest[0]))
        if arrival is None:
            print(json.dumps(None), flush=True)
            continue
        state = arrival.wait(float(rest[0]))
        found = {}
        if state is ArrivalState.COMPLETE:
            found = {name: digest(arrival.section(name) or b"") for name, _ in arrival.offer.sections}
        print(json.dumps([state.value, arrival.offer.note.decode(), found]), flush=True)
        inbox.release(arrival)
    server.close()


def give(address: str, size: int) -> None:
    sections = sections_of(1, size)
    sender = begin(Peers(), address, [(name, len(data)) for name, data in sections.items()], deadline_seconds=10)
    assert not isinstance(sender, HandoffOutcome), sender
    for name in ("rows.0", "rings"):
        sender.put(name, sections[name])
    print("given", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "take":
        take(int(sys.argv[2]))
    else:
        give(sys.argv[2], int(sys.argv[3]))
