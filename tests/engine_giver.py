"""A prefill engine in a process of its own: python engine_giver.py ADDRESS; per line {prompt, options} one {tokens, finish_reason}.

With {halt_at: name} it prints `halted` where that section would be sent, and stands still there, to be killed.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import torch

from kvstore.client.agent.handoff import HandoffOutcome, HandoffSender, begin
from kvstore.client.agent.peers import Peers
from kvstore.engine_integration.engine import Engine, RequestOptions
from kvstore.engine_integration.engine.giving import Give
from kvstore.engine_integration.engine.handing import to
from kvstore.engine_integration.model import TINY
from kvstore.engine_integration.model.model import Model

DRAFTING = replace(TINY, name="drafting", draft_tokens=5)


def options_of(words: dict[str, object]) -> RequestOptions:
    return RequestOptions(**{name: frozenset(v) if isinstance(v, list) else v for name, v in words.items()})  # type: ignore[arg-type]  # a test's


class Watched:
    """A sender that calls `look` with what is to be put next, and with "commit"."""

    def __init__(self, sender: HandoffSender, look: Callable[[str], None]) -> None:
        self.sender, self._look = sender, look

    @property
    def outcome(self) -> HandoffOutcome | None:
        return self.sender.outcome

    @property
    def sent_bytes(self) -> int:
        return self.sender.sent_bytes

    def put(self, name: str, data: memoryview) -> None:
        self._look(name)
        self.sender.put(name, data)

    def commit(self, deadline_seconds: float) -> HandoffOutcome:
        self._look("commit")
        return self.sender.commit(deadline_seconds)

    def abort(self) -> None:
        self.sender.abort()


def watched(peers: Peers, address: str, look: Callable[[str], None]) -> Give:
    """As `to`; `look` is also called with "offer" first."""

    def give(sections: object) -> Watched | HandoffOutcome:
        look("offer")
        taken = begin(peers, address, sections)  # type: ignore[arg-type]  # of the engine
        return Watched(taken, look) if isinstance(taken, HandoffSender) else taken

    return give


def halt() -> None:
    print("halted", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with Engine(Model.random(DRAFTING), None) as engine, Peers() as peers:
        print("ready", flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            give, halt_at = to(peers, sys.argv[1]), asked.get("halt_at")
            if halt_at:
                give = watched(peers, sys.argv[1], lambda name, at=halt_at: halt() if name == at else None)  # type: ignore[misc]  # bound now
            request = engine.submit(asked["prompt"], options=options_of(asked["options"]), give=give)
            response = request.result(60)
            print(json.dumps({"tokens": response.tokens, "finish_reason": response.finish_reason}), flush=True)
