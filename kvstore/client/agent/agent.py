"""An agent within the engine's process: a Client, this host's window entries, the directory that knows of others', and those others.

    with Agent(client, config=AgentConfig(host="10.0.0.5", window_bytes=64 << 30)) as agent:  # directories: the cluster map's
        ticket = agent.lookup(keys, input_tokens=len(prompt))
        window = agent.window(keys, ticket.usable_tokens, ticket=ticket)  # None: resume from an older one of ticket.windows, or replay
        loaded = agent.load(ticket, memory, blocks=range(ticket.usable_blocks))
        kept = agent.request(len(prompt))  # the keep rules
        ...  # compute; at each multiple crossed: if kept.wants(tokens): kept.keep(keys, tokens, entry)
        agent.store(keys, rest, first_block=loaded.blocks)

A window that cannot be had in time is a miss and never an error: it costs a replay. docs/WINDOWS.md tells the whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from kvstore.client.agent.config import AgentConfig, reachable
from kvstore.client.agent.counters import WindowCounters
from kvstore.client.agent.directory import DirectoryClient
from kvstore.client.agent.finder import HERE, WindowFinder, kinds
from kvstore.client.agent.peer_server import HandoffSink, PeerServer
from kvstore.client.agent.peers import Peers
from kvstore.client.agent.request import RequestWindows
from kvstore.client.agent.sealed import seal, unseal, window_key
from kvstore.client.agent.teller import Teller, Word, presence_key, rows_of
from kvstore.client.agent.windows import WindowStore
from kvstore.client.client import Client
from kvstore.client.load import Hedge, Load
from kvstore.client.store import StoreFuture
from kvstore.client.ticket import Ticket, WindowAt
from kvstore.client.values import Accept, Fidelity, LoadResult, PlaneReady
from kvstore.clustermap import ClusterMap
from kvstore.errors import Closed, MisuseError
from kvstore.keys import KEY_BYTES, Keys, checked_keys


@dataclass(frozen=True, slots=True)
class Window:
    """An entry at hand. `entry` is read-only and stays as it is while it is held: a reply, or this host's memory, not dropped meanwhile."""

    tokens: int  # it ends here
    entry: memoryview
    fidelity: Fidelity
    where: str  # "own" or "peer"


class Agent:
    """Safe to share between threads. The client is its maker's, who closes it after the agent."""

    def __init__(
        self,
        client: Client,
        *,
        config: AgentConfig | None = None,
        handoffs: HandoffSink | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`handoffs` takes what other agents hand over. `clock`: seconds that entries age by, here and at directories that take their time
        from agents (trace replay); None: each host's own.

        Raises OSError where `config.port` cannot be had, MisuseError for addresses that are none.
        """
        self.client = client
        self.config = config = config or AgentConfig()
        self.counters = WindowCounters()
        self.windows = WindowStore(config.window_bytes, config.window_seconds, clock or time.monotonic, on_drop=self._driven_out)
        self.directory: DirectoryClient | None = None
        self.server: PeerServer | None = None
        self._teller: Teller | None = None
        self._presence = presence_key(client.layout.digest())
        cluster, owner, asks = client.map.tag, client.owner, config.directories or client.map.directories
        with ExitStack() as stack:  # closes what was made where the rest cannot be
            stack.callback(self.windows.clear)
            self.peers = stack.enter_context(Peers(cluster=cluster, owner=owner, config=config.peer))
            if asks:
                self.directory = DirectoryClient(asks, cluster=cluster, owner=owner, deadline_seconds=config.directory_seconds, clock=clock)
                stack.callback(self.directory.close)
            if config.serve and (asks or handoffs is not None):
                self.server = PeerServer(
                    config.host, config.port, windows=self._serve, handoffs=handoffs, cluster=cluster, config=config.peer
                )
                stack.callback(self.server.close)
            self.finder = WindowFinder(self.windows, self.directory, self.peers, self.counters, config.older_blocks_max)
            self.address = (config.advertise or self.server.address) if self.server is not None else HERE
            if reachable(self.address, asks):
                self.finder.address = self.address
            if self.directory is not None and self.finder.address != HERE:
                self._teller = Teller(self.directory, self.address, self._presence if clock is None else b"", self.peers.close_idle)
                stack.callback(self._teller.close, config.close_seconds)
            self._made = stack.pop_all()
        self._lock = threading.Lock()
        self._closed = False

    # --- lookup ---

    def lookup(
        self,
        keys: Keys,
        *,
        input_tokens: int | None = None,
        accept: Accept = Accept.EXACT,
        retention_class: str = "chat",
        deadline_seconds: float | None = None,
    ) -> Ticket:
        """Client.lookup of a prompt of `input_tokens`. In the ticket: `usable_blocks`, the hit under the rule that the last `config.slots`
        tokens are computed, and `windows`, the entries there and up to `older_blocks_max` blocks before that are at hand, the highest
        first.

        Where this host has the entry at the very end, the directory is not asked. Raises as Client.lookup does.
        """
        self._check_open()
        found: list[WindowAt] = []

        def at_hand(usable: int) -> bool:
            found.extend(self.finder.candidates(keys, usable, accept))
            first = found[0] if found else None
            where = "missing" if first is None or first.block != usable else "own" if self.finder.address in first.holders else "peer"
            self.counters.looked_up(where)
            return where != "missing"

        ticket = self.client.lookup(
            keys, accept=accept, retention_class=retention_class, deadline_seconds=deadline_seconds, input_tokens=input_tokens,
            recompute_tokens=self.config.slots, window=at_hand,
        )  # fmt: skip
        return replace(ticket, windows=tuple(found))

    def ticket(self, data: bytes) -> Ticket:
        """A ticket that another agent made with the same ticket key, its windows included. Raises ProtocolError."""
        return self.client.ticket(data)

    # --- window entries ---

    def window(
        self,
        keys: Keys,
        tokens: int,
        ticket: Ticket | None = None,
        accept: Accept = Accept.EXACT,
        *,
        deadline_seconds: float | None = None,
    ) -> Window | None:
        """The entry that ends at `tokens`: from this host's RAM, else from the agents that `ticket` names, else from those that the
        directory names. Checked against the caller's own key. None: not to be had within `deadline_seconds` (default: the configuration's).

        Raises MisuseError E572 where `tokens` is no multiple of a block, or beyond `keys`; Closed.
        """
        block = self._block_of(keys, tokens)
        names = [(approximate, window_key(keys[block - 1].tobytes(), approximate)) for approximate in kinds(accept)]
        for _, key in names:
            sealed = self.windows.get(key)
            found = sealed is not None and self._opened(key, sealed, accept)
            if found:
                self._tell(key, Word.USED)
                self.counters.taken("own")
                return Window(tokens, *found, "own")
        end = time.monotonic() + (self.config.fetch_seconds if deadline_seconds is None else deadline_seconds)
        began = time.perf_counter()
        for approximate, key in names:
            for sealed in self.finder.fetched(key, block, approximate, ticket, end):
                found = self._opened(key, sealed, accept)
                if found:
                    self.counters.taken("peer")
                    self.counters.fetched(time.perf_counter() - began, len(found[0]))
                    return Window(tokens, *found, "peer")
        self.counters.taken("missing")
        return None

    def windows_at(self, keys: Keys, end: int, ticket: Ticket | None = None, accept: Accept = Accept.EXACT) -> set[int]:
        """Token counts, `end` at most, at which window() may find an entry: the ticket's word where it is about the same end, or one trip
        to the directory. Raises MisuseError E572, Closed."""
        block = self._block_of(keys, end)
        named = ticket.windows if ticket is not None and ticket.usable_blocks == block else self.finder.candidates(keys, block, accept)
        return {window.block * self.block_tokens for window in named}

    def _opened(self, key: bytes, sealed: memoryview, accept: Accept) -> tuple[memoryview, Fidelity] | None:
        opened = unseal(key, sealed)
        if opened is None:
            self.counters.fault("corrupt")
            if self.windows.discard(key):
                self._tell(key, Word.GONE)
            return None
        return opened if accept.takes(opened[1].kind, opened[1].depth) else None

    def keep_window(self, keys: Keys, tokens: int, entry: Any, *, fidelity: Fidelity = Fidelity.EXACT) -> bool:
        """Copies `entry`, any contiguous buffer, into this host's RAM and has the directory told. False: there was no room.

        Raises MisuseError E572, E571, Closed.
        """
        block = self._block_of(keys, tokens)
        key = window_key(keys[block - 1].tobytes(), fidelity.depth > 0)
        view = memoryview(entry).cast("B")
        if not view.nbytes:
            raise MisuseError("E571", f"window entry at {tokens} tokens", "has no bytes", "pass the rows of the window")
        kept = self.windows.put(key, seal(key, view, fidelity), view)
        if kept:
            self._tell(key, Word.KEPT)
        return kept

    def adopt_window(self, key: bytes, sealed: memoryview) -> bool:
        """Keeps what another agent held (sealed.py) under the window key `key`. False: it was not sealed under that key, or no room."""
        if len(key) != KEY_BYTES or unseal(key, sealed) is None:
            self.counters.fault("corrupt")
            return False
        kept = self.windows.put(key, sealed)
        if kept:
            self._tell(key, Word.KEPT)
        return kept

    def drop_window(self, keys: Keys, tokens: int) -> None:
        """Forgets it here and at the directory. Raises MisuseError E572, Closed."""
        block = self._block_of(keys, tokens)
        for approximate in (False, True):
            key = window_key(keys[block - 1].tobytes(), approximate)
            if self.windows.discard(key):
                self._tell(key, Word.GONE)

    def request(self, prompt_tokens: int, missed_tokens: int = 0) -> RequestWindows:
        """The keep rules of one request; `missed_tokens`: where its hit ended, if no entry was found there."""
        return RequestWindows(self, prompt_tokens, missed_tokens)

    def _serve(self, owner: bytes, key: bytes) -> memoryview | None:
        """For another agent; on a thread of the server."""
        sealed = self.windows.get(key) if owner == self.client.owner else None
        if sealed is not None:
            self._tell(key, Word.USED)
        return sealed

    def _tell(self, key: bytes, word: Word) -> None:
        if self._teller is not None:
            self._teller.tell(key, word)

    def _driven_out(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._tell(key, Word.GONE)

    def _block_of(self, keys: Keys, tokens: int) -> int:
        self._check_open()
        keys = checked_keys(keys)
        block, rest = divmod(tokens, self.block_tokens)
        if rest or not 0 < block <= len(keys):
            fix = f"name a multiple of {self.block_tokens} within the prompt"
            raise MisuseError("E572", f"window entry at {tokens} tokens", f"{len(keys)} keys are given", fix)
        return block

    # --- blocks ---

    def load(
        self,
        ticket: Ticket,
        destination: Any = None,
        *,
        hedge: Hedge = "lazy",
        deadline_seconds: float | None = None,
        blocks: range | None = None,
    ) -> LoadResult:
        """Client.load."""
        return self.client.load(ticket, destination, hedge=hedge, deadline_seconds=deadline_seconds, blocks=blocks)

    def planes(
        self,
        ticket: Ticket,
        destination: Any,
        *,
        hedge: Hedge = "lazy",
        deadline_seconds: float | None = None,
        blocks: range | None = None,
    ) -> Iterator[PlaneReady]:
        """Client.planes."""
        return self.client.planes(ticket, destination, hedge=hedge, deadline_seconds=deadline_seconds, blocks=blocks)

    def planes_with(
        self,
        began: Callable[[Load], None] | None,
        ticket: Ticket,
        destination: Any,
        *,
        hedge: Hedge = "lazy",
        deadline_seconds: float | None = None,
        blocks: range | None = None,
    ) -> Generator[PlaneReady, None, None]:
        """Client.planes_with."""
        return self.client.planes_with(began, ticket, destination, hedge=hedge, deadline_seconds=deadline_seconds, blocks=blocks)

    def store(
        self, keys: Keys, blocks: Any, *, first_block: int, retention_class: str = "chat", fidelity: Fidelity = Fidelity.EXACT
    ) -> StoreFuture:
        """Client.store."""
        return self.client.store(keys, blocks, first_block=first_block, retention_class=retention_class, fidelity=fidelity)

    # --- life ---

    def take_map(self, cluster_map: ClusterMap) -> None:
        """Client.take_map. Directories stay those of the start."""
        self._check_open()
        self.client.take_map(cluster_map)

    def others(self) -> list[str]:
        """Addresses of up to four agents of this kind that the directory knows, those that it hears first. One trip."""
        found = self.directory.locate(rows_of([self._presence]))[0] if self.directory is not None else []
        return [holder.address for holder in found if holder.address != self.address and not self.peers.paused(holder.address)]

    def leave(self) -> None:
        """It takes no handoffs any more, and is not named to agents that end."""
        if self.server is not None:
            self.server.draining = True
        if self._teller is not None:
            self._teller.leave()

    def flush(self, deadline_seconds: float | None = None) -> bool:
        """Waits until every store is done and the directory knows of every entry; False when the time passed first."""
        end = time.monotonic() + (self.client.config.store_deadline_seconds if deadline_seconds is None else deadline_seconds)
        done = self.client.flush(end - time.monotonic())
        return (self._teller is None or self._teller.flush(max(0.0, end - time.monotonic()))) and done

    def close(self) -> None:
        """Forgets its entries, here and at the directory, and serves no more. The client stays open. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def block_tokens(self) -> int:
        return self.client.config.block_tokens

    @property
    def slots(self) -> int:
        return self.config.slots

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("E573", "agent", "is closed", "make a new one")
