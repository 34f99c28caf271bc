"""A prefill engine in a process of its own: python engine_giver.py ADDRESS; per line {prompt, options} one {tokens, finish_reason}."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch

from kvstore.client.agent.peers import Peers
from kvstore.engine_integration.engine import Engine, RequestOptions
from kvstore.engine_integration.engine.handing import to
from kvstore.engine_integration.model import TINY
from kvstore.engine_integration.model.model import Model

DRAFTING = replace(TINY, name="drafting", draft_tokens=5)


def options_of(words: dict[str, object]) -> RequestOptions:
    return RequestOptions(**{name: frozenset(v) if isinstance(v, list) else v for name, v in words.items()})  # type: ignore[arg-type]  # a test's


if __name__ == "__main__":
    torch.set_num_threads(1)
    with Engine(Model.random(DRAFTING), None) as engine, Peers() as peers:
        print("ready", flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            request = engine.submit(asked["prompt"], options=options_of(asked["options"]), give=to(peers, sys.argv[1]))
            response = request.result(60)
            print(json.dumps({"tokens": response.tokens, "finish_reason": response.finish_reason}), flush=True)
