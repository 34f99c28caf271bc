"""What the engine asks of its host's cache: an Agent in this process, or a WorkerAgent, which speaks to the host's agent process."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol

from kvstore.client.agent.agent import Agent, Window
from kvstore.client.agent.config import AgentConfig
from kvstore.client.agent.request import RequestWindows
from kvstore.client.client import Client
from kvstore.client.load import Load
from kvstore.client.store import StoreFuture
from kvstore.client.ticket import Ticket
from kvstore.client.values import Accept, Fidelity, PlaneReady
from kvstore.engine_integration.model.config import ModelConfig
from kvstore.keys import Keys


class HostCache(Protocol):
    """See kvstore/client/agent/agent.py for each verb. Safe to share between threads, and between engines of one model."""

    @property
    def client(self) -> Any:
        """A Client, or what a worker knows of its agent's: layout, config.block_tokens, map.k, map.classes, clock."""

    @property
    def slots(self) -> int:
        """Tokens of a window entry."""

    def lookup(
        self, keys: Keys, *, input_tokens: int | None, accept: Accept, retention_class: str, deadline_seconds: float | None
    ) -> Ticket: ...
    def windows_at(self, keys: Keys, end: int, ticket: Ticket | None, accept: Accept) -> set[int]: ...
    def window(self, keys: Keys, tokens: int, ticket: Ticket | None, accept: Accept) -> Window | None: ...
    def request(self, prompt_tokens: int, missed_tokens: int) -> RequestWindows: ...
    def planes_with(
        self,
        began: Callable[[Load], None] | None,
        ticket: Ticket,
        destination: Any,
        *,
        deadline_seconds: float | None,
        blocks: range | None,
    ) -> Generator[PlaneReady, None, None]: ...
    def store(self, keys: Keys, blocks: Any, *, first_block: int, retention_class: str, fidelity: Fidelity) -> StoreFuture: ...


def agent_config(config: ModelConfig, **more: Any) -> AgentConfig:
    """Of an agent for this model: how long its windows are, and how far back one is of use."""
    return AgentConfig(slots=config.slots, older_blocks_max=config.encoder_layers, **more)


def host_of(client: Client, config: ModelConfig) -> Agent:
    """An agent that keeps this process's window entries and knows of no other."""
    return Agent(client, config=agent_config(config, serve=False))
