"""What an agent that ends gives to another: its window entries, the last used first, as handoffs that agents make among themselves.

    note       "kvstore.windows/1": the offer is for the other agent, not for an engine
    section    name: the window key in hex; bytes: the entry as agents keep it (sealed.py), so that who takes it checks it against its key

A handoff holds what fits in BATCH_BYTES. Of several agents the next is asked where one does not take them, each within its share of the
time. What does not go over is a window miss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.client.agent.agent import Agent
from kvstore.client.agent.frames import HANDOFF_BYTES_MAX, SECTIONS_MAX
from kvstore.client.agent.handoff import HandoffOutcome, send_handoff

NOTE: Final = b"kvstore.windows/1"
BATCH_BYTES: Final = 32 << 20  # some twenty entries of the largest model known
BATCH_SECONDS: Final = 10.0
AGAIN_SECONDS: Final = 0.05
NOBODY: Final = "no other agent is known"
assert BATCH_BYTES < HANDOFF_BYTES_MAX


@dataclass(slots=True)
class Moved:
    """What became of the entries of one agent."""

    entries: int = 0
    bytes: int = 0
    left: int = 0  # not moved
    why: str = ""  # they were not


def move_windows(agent: Agent, addresses: Sequence[str], end: float) -> Moved:
    """Gives the agents at `addresses`, the first that takes them, what `agent` holds, until `end` (monotonic). Raises MisuseError for what
    is no address."""
    waiting = agent.windows.keys()  # the last used last
    moved = Moved(why="" if addresses else NOBODY)
    for number, address in enumerate(addresses):
        now = time.monotonic()
        moved.why = _to_one(agent, address, waiting, now + (end - now) / (len(addresses) - number), moved)
        if not moved.why:
            break
    moved.left = len(waiting)
    return moved


def _to_one(agent: Agent, address: str, waiting: list[bytes], end: float, moved: Moved) -> str:
    """Takes what was given off the end of `waiting`. "": all of it; else why not."""
    while waiting:
        batch, size = _batch(agent, waiting)
        if not batch:
            break
        left = end - time.monotonic()
        outcome = HandoffOutcome.LATE
        if left > 0:
            outcome = send_handoff(agent.peers, address, batch, note=NOTE, deadline_seconds=min(left, BATCH_SECONDS))
        if outcome is HandoffOutcome.DONE:
            moved.entries += len(batch)
            moved.bytes += size
            continue
        waiting += [bytes.fromhex(name) for name in reversed(batch)]
        if outcome is not HandoffOutcome.BUSY or end - time.monotonic() <= AGAIN_SECONDS:
            return str(outcome.value)
        threading.Event().wait(AGAIN_SECONDS)  # it takes in what it got; then again
    return ""


def _batch(agent: Agent, waiting: list[bytes]) -> tuple[dict[str, memoryview], int]:
    """The next entries by the hex of their keys, and their bytes; takes them off the end of `waiting`."""
    batch: dict[str, memoryview] = {}
    size = 0
    while waiting and len(batch) < SECTIONS_MAX:
        sealed = agent.windows.get(waiting[-1])
        if sealed is not None and batch and size + sealed.nbytes > BATCH_BYTES:
            break
        key = waiting.pop()
        if sealed is not None:  # else it has expired
            batch[key.hex()] = sealed
            size += sealed.nbytes
    return batch, size
