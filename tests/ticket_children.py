"""Processes that work from one ticket: a prefill and a decode side of the tiny model. Each says its address, then a line of JSON for each
line of JSON that it reads.

python ticket_children.py decode MAP KEY_FILE
    {ticket, count, prompt_tokens}: takes a handoff, reads the ticket's blocks itself -> {tokens, handed_over, same_blocks, blocks}
python ticket_children.py prefill MAP KEY_FILE DIRECTORY
    {ticket, prompt, decode}: loads, takes the window, computes the rest, hands over -> {outcome, window, computed, blocks}
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstore.client import Client, ClientConfig
from kvstore.client.agent.agent import Agent
from kvstore.client.agent.config import AgentConfig
from kvstore.client.agent.frames import PeerConfig
from kvstore.client.agent.handoff import send_handoff
from kvstore.client.agent.inbox import HandoffInbox
from kvstore.clustermap import ClusterMap
from kvstore.engine_integration.model import TINY, plan_resume
from kvstore.engine_integration.model.handover import export_handoff, import_handoff
from kvstore.engine_integration.model.model import Model
from kvstore.keys import KeyChain

WAIT_SECONDS = 20.0


def client_of(model: Model, map_path: str, key_path: str) -> Client:
    config = ClientConfig(block_tokens=TINY.block, ticket_key=Path(key_path).read_bytes())
    return Client(ClusterMap.load(map_path), layout=model.layout, config=config)


def loaded(agent: Agent, data: str) -> tuple[Any, np.ndarray[Any, Any]]:
    """The ticket, redeemed: no lookup is made."""
    ticket = agent.ticket(base64.b64decode(data))
    blocks = np.zeros((ticket.usable_blocks, agent.client.layout.block_bytes), np.uint8)
    result = agent.load(ticket, blocks, blocks=range(ticket.usable_blocks))
    return ticket, blocks[: result.blocks]


def prefill(model: Model, agent: Agent, asked: dict[str, Any]) -> dict[str, Any]:
    prompt = asked["prompt"]
    ticket, blocks = loaded(agent, asked["ticket"])
    end = ticket.usable_blocks * TINY.block
    keys = KeyChain(model.namespace, block_tokens=TINY.block).extend(prompt)
    window = agent.window(keys, end, ticket, deadline_seconds=WAIT_SECONDS) if end else None
    plan = plan_resume(TINY, len(prompt), len(blocks), {end} if window is not None else ())
    state = model.begin(len(prompt), plan, blocks, bytes(window.entry) if window is not None else None)
    logits = model.feed(state, prompt[plan.start_tokens :])
    sections = export_handoff(model, state, [*prompt, int(logits[-1].argmax())])
    outcome = send_handoff(
        agent.peers, asked["decode"], {name: data.data for name, data in sections.items()}, deadline_seconds=WAIT_SECONDS
    )
    computed = len(prompt) - plan.start_tokens
    return {"outcome": outcome.value, "window": plan.window.value, "computed": computed, "blocks": len(blocks)}


def decode(model: Model, agent: Agent, inbox: HandoffInbox, asked: dict[str, Any]) -> dict[str, Any]:
    arrival = inbox.take(None, WAIT_SECONDS)
    assert arrival is not None
    arrival.wait(WAIT_SECONDS)
    sections = {name: arrival.section(name) for name, _ in arrival.offer.sections}
    taken = import_handoff(model, {name: data for name, data in sections.items() if data is not None})
    inbox.release(arrival)
    _, blocks = loaded(agent, asked["ticket"])
    same = np.array_equal(blocks, taken.state.export_blocks(0, len(blocks)))
    computed = taken.state.length
    while len(taken.tokens) < asked["prompt_tokens"] + asked["count"]:
        taken.tokens.append(int(model.feed(taken.state, taken.tokens[-1:])[-1].argmax()))
    return {"tokens": taken.tokens, "handed_over": computed, "same_blocks": same, "blocks": len(blocks)}


def main(role: str, map_path: str, key_path: str, *directories: str) -> None:
    torch.set_num_threads(1)
    model = Model.random(TINY)
    inbox = HandoffInbox(64 << 20) if role == "decode" else None
    config = AgentConfig(
        directories=directories, slots=TINY.slots, window_bytes=0, directory_seconds=3, peer=PeerConfig(silence_seconds=10)
    )
    with client_of(model, map_path, key_path) as client, Agent(client, config=config, handoffs=inbox) as agent:
        print(json.dumps(agent.address), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            answer = prefill(model, agent, asked) if inbox is None else decode(model, agent, inbox, asked)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
