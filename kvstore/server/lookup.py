"""What of a prompt is cached, asked by others: the part of the lookup service that knows nothing of HTTP or gRPC.

    prefix_tokens    what is stored of the prompt, in whole blocks from its start
    cached_tokens    of these, what an engine need not compute: not the tokens that it computes in any case (in whole blocks), and one block
                     less where the window entry there is known to be missing

A question that cannot be one raises ProtocolError E629; nodes that are down are misses, as everywhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from kvstore.client.agent.agent import Agent
from kvstore.client.agent.config import AgentConfig
from kvstore.client.client import Client
from kvstore.client.config import ClientConfig
from kvstore.client.ticket import Ticket, WindowAt
from kvstore.client.values import Accept
from kvstore.clustermap import ClusterMap
from kvstore.errors import ConfigError, ProtocolError
from kvstore.keys import KEY_BYTES, KeyChain, Keys
from kvstore.modelcard import ModelCard
from kvstore.owners import DEFAULT
from kvstore.tomlfile import TomlFile

TOKENS_MAX: Final = 1_000_000
TENANTS_MAX: Final = 64
DIRECTORY_SECONDS: Final = 0.02
_HEX_32: Final = r"[0-9a-f]{32}"
_SECRET: Final = r"([0-9a-f]{2}){0,64}"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose blocks are asked for: `owner` stands for it on the nodes, `secret` is in its keys."""

    owner: bytes = bytes(16)
    secret: bytes = field(default=b"", repr=False)


def load_tenants(path: str | Path) -> dict[str, Tenant]:
    """From `[tenants.NAME]` tables with owner and secret, both hex. Raises ConfigError, which names the line."""
    table = TomlFile.load(path).table()
    found = {}
    for name, row in table.subtables("tenants").items():
        owner = row.text("owner", "0" * 32, pattern=_HEX_32, form="32 hex digits")
        secret = row.text("secret", "", pattern=_SECRET, form="up to 128 hex digits")
        row.done()
        found[name] = Tenant(bytes.fromhex(owner), bytes.fromhex(secret))
    table.done()
    if not 0 < len(found) <= TENANTS_MAX:
        raise ConfigError("E198", f"{path}: {len(found)} tenants", fix=f"name 1 to {TENANTS_MAX}, each as [tenants.NAME]")
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """One prompt: its tokens, or the keys of its whole blocks."""

    tokens: npt.NDArray[np.uint32] | None = None
    keys: Keys | None = None  # (n, 32)
    input_tokens: int = 0  # with keys: of the prompt; 0: of its whole blocks
    tenant: str = DEFAULT
    retention_class: str = "chat"
    depth_max: int = 0
    deadline_seconds: float | None = None  # None, or more than the service's own: that


@dataclass(frozen=True, slots=True)
class Answer:
    """What a router needs. `window` is hit, missing, unknown (no directory was asked) or none (nothing was hit)."""

    ticket: Ticket
    input_tokens: int
    prefix_tokens: int
    cached_tokens: int
    window: str

    @property
    def uncached_tokens(self) -> int:
        return self.input_tokens - self.cached_tokens

    @property
    def windows(self) -> Sequence[WindowAt]:
        return self.ticket.windows


class Lookups:
    """Clients of one cluster and one model, one for each tenant. Safe to share between threads."""

    def __init__(
        self,
        cluster_map: ClusterMap,
        card: ModelCard,
        *,
        ticket_key: bytes,
        tenants: Mapping[str, Tenant] | None = None,
        directories: Sequence[str] = (),
        directory_seconds: float = DIRECTORY_SECONDS,
        deadline_seconds: float = 0.5,
        tokens_max: int = TOKENS_MAX,
    ) -> None:
        """Connects to nothing yet. `directory_seconds`: what an answer waits for the directories. Raises ConfigError for a setting out of
        its range."""
        if not 0 < deadline_seconds <= 60 or not 1 <= tokens_max <= TOKENS_MAX:
            what = f"lookup service with a deadline of {deadline_seconds:g} s and {tokens_max} tokens at most"
            raise ConfigError("E198", what, fix=f"a deadline above 0, at most 60 s; 1 to {TOKENS_MAX} tokens")
        self.card, self.tokens_max, self.deadline_seconds = card, tokens_max, deadline_seconds
        self.tenants = dict(tenants) if tenants is not None else {DEFAULT: Tenant()}
        self.classes = frozenset(cluster_map.classes)
        self._asks_directories = bool(directories or cluster_map.directories)
        self._map = cluster_map
        self._config = ClientConfig(
            block_tokens=card.block_tokens, ticket_key=ticket_key, model_name=card.name, accounting=False, threads=1,
        )  # fmt: skip
        # Serves nobody and keeps nothing: of an agent it has the way to the directories.
        self._agent = AgentConfig(
            directories=tuple(directories), directory_seconds=directory_seconds, serve=False, window_bytes=0,
            slots=max(1, card.recompute_tokens),
        )  # fmt: skip
        self._agents: dict[str, tuple[Client, Agent]] = {}
        self._retired: list[tuple[float, Client, Agent]] = []  # of an older map, and when the last question to each is over
        self._lock = threading.Lock()

    def ask(self, question: Question) -> Answer:
        """Raises ProtocolError E629 for what cannot be asked."""
        end = time.monotonic() + min(self.deadline_seconds, question.deadline_seconds or self.deadline_seconds)
        tenant = self.tenants.get(question.tenant)
        _need(tenant is not None, f"no tenant {question.tenant[:64]!r} is known here")
        _need(question.retention_class in self.classes, f"no retention class {question.retention_class[:64]!r} is in the cluster map")
        _need(0 <= question.depth_max < 1 << 16, "depth_max is 0 to 65535")
        assert tenant is not None
        keys, input_tokens = self._keys(question, tenant)
        accept = Accept(depth_max=question.depth_max) if question.depth_max else Accept.EXACT
        ticket = self._agent_of(question.tenant, tenant).lookup(
            keys, input_tokens=input_tokens, accept=accept, retention_class=question.retention_class,
            deadline_seconds=max(0.0, end - time.monotonic()),
        )  # fmt: skip
        return self._answer(ticket, input_tokens)

    def _keys(self, question: Question, tenant: Tenant) -> tuple[Keys, int]:
        size = self.card.block_tokens
        _need((question.tokens is None) != (question.keys is None), "give tokens, or keys")
        if question.tokens is not None:
            count = len(question.tokens)
            _need(count <= self.tokens_max, f"{count} tokens, at most {self.tokens_max}")
            return KeyChain(self.card.namespace, tenant.secret, block_tokens=size).extend(question.tokens), count
        keys = question.keys
        assert keys is not None
        count = question.input_tokens or len(keys) * size
        _need(0 <= count <= self.tokens_max, f"{count} tokens, at most {self.tokens_max}")
        _need(len(keys) == count // size, f"{len(keys)} keys for {count} tokens, whose whole blocks are {count // size}")
        return keys, count

    def _answer(self, ticket: Ticket, input_tokens: int) -> Answer:
        size, usable = self.card.block_tokens, ticket.usable_blocks
        window = "none"
        if usable:
            window = "unknown"
            if self._asks_directories:
                window = "hit" if any(at.block == usable for at in ticket.windows) else "missing"
        return Answer(ticket, input_tokens, min(ticket.hit_tokens, input_tokens), size * (usable - (window == "missing")), window)

    def _agent_of(self, name: str, tenant: Tenant) -> Agent:
        with self._lock:
            if name not in self._agents:
                client = Client(self._map, layout=self.card.layout, config=self._config, owner=tenant.owner)
                self._agents[name] = client, Agent(client, config=self._agent)
            return self._agents[name][1]

    def take_map(self, cluster_map: ClusterMap) -> None:
        """Asks by a newer map of the cluster from now on. Raises ConfigError E133."""
        self._map.check_successor(cluster_map)
        over = time.monotonic() + 2 * self.deadline_seconds
        with self._lock:
            self._retired += [(over, client, agent) for client, agent in self._agents.values()]
            self._agents, self._map, self.classes = {}, cluster_map, frozenset(cluster_map.classes)
            self._asks_directories = bool(self._agent.directories or cluster_map.directories)

    def tick(self, now: float | None = None) -> None:
        """Closes what nobody asks any more."""
        now = time.monotonic() if now is None else now
        with self._lock:
            due = [(client, agent) for over, client, agent in self._retired if over <= now]
            self._retired = [row for row in self._retired if row[0] > now]
        for client, agent in due:
            agent.close()
            client.close()

    @property
    def map(self) -> ClusterMap:
        return self._map

    def close(self) -> None:
        with self._lock:
            self._retired += [(0.0, client, agent) for client, agent in self._agents.values()]
            self._agents = {}
        self.tick(float("inf"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def keys_from(data: bytes) -> Keys:
    """Block keys one after the other. Raises ProtocolError E629."""
    _need(len(data) % KEY_BYTES == 0, f"{len(data)} bytes of keys, not a multiple of {KEY_BYTES}")
    return np.frombuffer(data, np.uint8).reshape(-1, KEY_BYTES)


def _need(holds: bool, cause: str) -> None:
    if not holds:
        raise ProtocolError("E629", "lookup", cause, "see docs/LOOKUP_SERVICE.md")
