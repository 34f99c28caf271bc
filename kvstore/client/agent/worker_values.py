"""What a WorkerAgent answers with, where its own process knows less than the agent's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from kvstore.client.agent import bodies
from kvstore.client.clock import Clock
from kvstore.client.ticket import Ticket
from kvstore.layout import Layout


@dataclass(frozen=True, eq=False)
class WorkerTicket(Ticket):
    """Made by the agent, whose ticket key a worker does not know."""

    data: bytes = field(default=b"", repr=False)

    def to_bytes(self) -> bytes:
        """For any agent with that key. b"" where the agent was gone: there is nothing to redeem."""
        return self.data


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A handoff: its sections, read-only, in the agent's memory until the last view of them is gone."""

    id: bytes
    note: bytes
    sections: Mapping[str, memoryview]


@dataclass(frozen=True, slots=True)
class MapFacts:
    k: int
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    block_tokens: int


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """Of the agent's client, by the names that a Client has them under."""

    layout: Layout
    config: ConfigFacts
    map: MapFacts
    clock: Clock

    @classmethod
    def of(cls, hello: bodies.Hello, welcome: bodies.Welcome) -> Self:
        return cls(hello.layout, ConfigFacts(hello.block_tokens), MapFacts(welcome.k, welcome.classes), Clock())
