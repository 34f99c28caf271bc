"""What nodes say to a question that no engine asks: whether one answers at all; who holds which shards of a block key, what went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import ProtocolError, Unreachable
from kvstore.keys import KEY_BYTES
from kvstore.wire import Ghost, Status, Verb, Writing, decode_discover_reply, decode_why_reply, encode_discover, encode_why

if TYPE_CHECKING:
    from kvstore.client.client import Client
    from kvstore.clustermap import Node


@dataclass(frozen=True)
class KeyView:
    """One node's answer. `answered` False: down, or too slow; then nothing is known of it."""

    node: Node
    answered: bool
    writings: list[Writing] = field(default_factory=list)  # of extents that start with the key, held here
    ghosts: list[Ghost] = field(default_factory=list)  # of such that went, newest first


def require_some(client: Client, timeout_seconds: float) -> None:
    """Raises Unreachable E202 where not one node of the newest epoch answers: to a client that is no fault, all is a miss then."""
    nodes = client.map.newest.nodes
    question = encode_discover([bytes(KEY_BYTES)], owner=client.owner, epoch=client.map.epoch)
    answers = client._core.call_many([(node.ordinal, int(Verb.DISCOVER), question) for node in nodes], timeout_seconds, 1)
    if not any(status in (Status.OK, Status.BUSY) for status, _ in answers):
        what = f'no node of cluster "{client.map.cluster_id}" answers ({len(nodes)} asked)'
        raise Unreachable("E202", what, f"none by its data port in {timeout_seconds:g} s", "kvstore status, kvstore up, or correct --map")


def group_of(client: Client, key: bytes) -> int:
    """Placement group of a key in the newest epoch."""
    placement = client.placements[client.map.epoch]
    return int(placement.pg_of(np.frombuffer(key, np.uint8).reshape(1, -1))[0])


def views_of(client: Client, key: bytes, timeout_seconds: float) -> list[KeyView]:
    """Asks the nodes of the key's list in every live epoch, once each, all at the same time; in the order of the newest list."""
    ordinals = [
        node
        for _, placement in sorted(client.placements.items(), reverse=True)
        for node in placement.table()[placement.pg_of(np.frombuffer(key, np.uint8).reshape(1, -1))[0]].tolist()
    ]
    nodes = list(dict.fromkeys(ordinals))
    questions = (
        (Verb.DISCOVER, encode_discover([key], owner=client.owner, epoch=client.map.epoch)),
        (Verb.WHY, encode_why([key], owner=client.owner)),
    )
    answers = client._core.call_many([(node, int(verb), body) for node in nodes for verb, body in questions], timeout_seconds)
    found = []
    for at, node in enumerate(nodes):
        (held, held_body), (gone, gone_body) = answers[2 * at], answers[2 * at + 1]
        try:
            writings = decode_discover_reply(held_body)[0] if held == 0 else []
            ghosts = decode_why_reply(gone_body) if gone == 0 else []
        except ProtocolError:
            held = -1
            writings, ghosts = [], []
        found.append(KeyView(client.map.nodes[node], held == 0, writings, ghosts))
    return found
