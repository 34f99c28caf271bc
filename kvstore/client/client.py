"""The synchronous face: lookup, load, store, over one native core (threads and connections) that all callers share."""

from __future__ import annotations

import functools
import logging
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from kvstore import tcp
from kvstore.client import store as stores
from kvstore.client.access_log import TOKENS_MAX, AccessLog
from kvstore.client.accounts import Account, Accounts
from kvstore.client.admission import Admission, Candidate
from kvstore.client.buffers import as_rows
from kvstore.client.clock import Clock
from kvstore.client.compaction import Compaction
from kvstore.client.config import ClientConfig
from kvstore.client.counters import Counters
from kvstore.client.load import Hedge, Load, checked_blocks
from kvstore.client.lookup import Hit, Lookup
from kvstore.client.native import U8, U32
from kvstore.client.promises import Promises
from kvstore.client.reach import Reaches
from kvstore.client.reasons import Limits
from kvstore.client.store import StoreFuture, Stores
from kvstore.client.suspects import Suspects
from kvstore.client.ticket import Ticket
from kvstore.client.tracing import Tracing
from kvstore.client.values import Accept, Fidelity, LoadOutcome, LoadResult, PlaneReady
from kvstore.clustermap import ClusterMap
from kvstore.errors import Closed, LayoutError, MisuseError
from kvstore.extents import ExtentSpan, cut
from kvstore.kernels import _native
from kvstore.keys import Keys, checked_keys
from kvstore.layout import Layout, Plane
from kvstore.owners import DEFAULT, OTHER
from kvstore.placement import Placement
from kvstore.record import EARLIER_MAX

if TYPE_CHECKING:
    from kvstore.client.agent.ram import RamTier

log = logging.getLogger(__name__)

OWNER_BYTES: Final = 16
_CHAINS_KEPT: Final = 4096
ACCOUNTS_CLOSE_SECONDS: Final = 3.0
SUSPECTS_CLOSE_SECONDS: Final = 1.0


class Client:
    """Lookup, load and store for blocks of one layout. Safe to share between threads; not usable in a forked child."""

    def __init__(
        self,
        cluster_map: ClusterMap,
        *,
        layout: Layout,
        config: ClientConfig | None = None,
        clock: Clock | None = None,
        owner: bytes = bytes(OWNER_BYTES),
        kv_group: int = 0,
        ram: RamTier | None = None,
    ) -> None:
        """Connects to nothing yet. `owner` stands for the tenant on the nodes. `ram`, which clients may share, gives what it has to loads
        before nodes are asked. Raises MisuseError for impossible arguments, ConfigError E145 to E148 where `config` insists on RDMA and
        there is none here."""
        if not isinstance(owner, bytes) or len(owner) != OWNER_BYTES:
            raise MisuseError("E565", "owner", "is not 16 bytes", "pass the tenant's owner tag")
        self.layout = layout
        self.config = config or ClientConfig()
        self.clock = clock or Clock()
        self.owner = owner
        self.ram = ram
        self._planes = layout.planes(cluster_map.k)
        self._plane_table: U32 = np.array([(p.offset_bytes, p.bytes, p.shard_bytes) for p in self._planes], np.uint32)
        tag = int.from_bytes(layout.digest()[:8], "little")
        self._readable = _native.ClientReadable(tag, layout.block_bytes, len(self._planes), cluster_map.k, cluster_map.m, kv_group)
        self._kv_group = kv_group
        self._promises = Promises(self.config.promise_reuse_seconds)
        self._counters = Counters()
        self._starts: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()  # last block's key of a chain: starts of its extents
        config = self.config
        self._reaches = Reaches(cluster_map, functools.partial(_connect, config, self._planes))
        self._tell()
        self._stores = Stores(self._reaches)
        self._admission = Admission(self._reaches, self._stores, owner, self._counters, config.queue_bytes_max)
        self._tracing = Tracing()
        self.access_log = AccessLog(
            Path(config.access_log), tenant=self.tenant, model=config.model_name, block_tokens=config.block_tokens,
            sample=config.access_log_sample, bytes_max=config.access_log_bytes_max, file_seconds=config.access_log_file_seconds,
        ) if config.access_log else None  # fmt: skip
        self._accounts = Accounts(self._reaches, owner, cluster_map.bucket_seconds, self._counters, self.access_log)
        self._suspects = Suspects(self._reaches, self._promises, self._counters)
        rate = config.compact_bytes_per_second
        self._compaction = Compaction(self, rate) if rate else None
        parts = (self._reaches, self._stores, self._admission, self._suspects, self._compaction)
        self._finalizer = weakref.finalize(self, _close, *parts, os.getpid())

    @property
    def map(self) -> ClusterMap:
        """The newest that it has: the one that it was given; a newer one of the same file, where a node named one; or that of take_map."""
        return self._reaches.current.map

    def take_map(self, cluster_map: ClusterMap) -> None:
        """Looks up, loads and stores by a newer map of its cluster from now on; what is under way ends by the one before. An older map
        changes nothing. Raises ConfigError E133 for another cluster's, Closed."""
        self._check_open()
        self._reaches.take(cluster_map)

    # --- lookup ---

    def lookup(
        self,
        keys: Keys,
        *,
        accept: Accept = Accept.EXACT,
        retention_class: str = "chat",
        deadline_seconds: float | None = None,
        input_tokens: int | None = None,
        recompute_tokens: int = 0,
        window: Callable[[int], bool] | None = None,
    ) -> Ticket:
        """The longest prefix of `keys` (n, 32) that can be read, promised for a while and touched for `retention_class`.

        The last three are for the accounts (docs/ACCESS_LOG.md) and the ticket's `usable_blocks`; the hit is the same. `input_tokens`: of
        the prompt, by default those of its whole blocks. `recompute_tokens`: at its end, that the engine computes in any case. `window`:
        told the usable hit in blocks, says whether the window entry there is at hand; without one the last block counts as missed.

        No node, no answer in time, nothing there: a ticket with fewer blocks, or none. Raises KeyFormatError, MisuseError, Closed.
        """
        began = time.monotonic()
        keys = checked_keys(keys)
        class_id = self._class_id(retention_class)
        self._check_open()
        limits = self._limits(len(keys), input_tokens, recompute_tokens)
        deadline = began + (self.config.lookup_deadline_seconds if deadline_seconds is None else deadline_seconds)
        if len(keys) == 0:
            if limits.input_tokens:
                self._account(keys, limits, Hit(), retention_class, window, began, 0)
            return self._ticket(keys, Hit(), retention_class, limits)
        bucket = int(self.clock.bucket_time() // self.map.bucket_seconds)
        with self._reaches.using() as reach, self._tracing.operation("kvstore.lookup") as span:
            lookup = Lookup(
                reach, self.config, self._promises, self._readable, self.owner, accept, class_id, bucket, self.clock.monotonic()
            )
            try:
                hit = lookup.run(keys, deadline)
            except BaseException:
                self._counters.lookup_failed()
                raise
            ticket = self._ticket(keys, hit, retention_class, limits)
            if span is not None:
                self._tracing.parts(span, lookup.intervals)
                self._tracing.tell(span, input_tokens=limits.input_tokens, hit_tokens=ticket.hit_tokens, extents=len(hit.extents))
        if reach.core.newest_epoch > reach.map.epoch:
            self._reaches.heard(reach.core.newest_epoch)
        if hit.blocks:
            self._remember(keys, hit.blocks, [start for start in hit.starts if start < hit.blocks])
        self._account(keys, limits, hit, retention_class, window, began, bucket)
        return ticket

    def _limits(self, keys: int, input_tokens: int | None, recompute_tokens: int) -> Limits:
        size = self.config.block_tokens
        limits = Limits(keys * size if input_tokens is None else input_tokens, recompute_tokens, size, keys)
        if recompute_tokens < 0 or not 0 <= limits.input_tokens <= TOKENS_MAX or keys > -(-limits.input_tokens // size):
            what = f"input_tokens={input_tokens}, recompute_tokens={recompute_tokens}"
            raise MisuseError("E569", what, f"{keys} keys of {size} tokens are given", "pass the length of the prompt")
        return limits

    def _account(
        self, keys: Keys, limits: Limits, hit: Hit, retention_class: str, window: Callable[[int], bool] | None, began: float, bucket: int
    ) -> None:
        """Counts the lookup; why it fell short is found out in the background."""
        usable = min(hit.blocks, limits.blocks)
        missing = window is not None and usable > 0 and not window(usable)
        seconds = time.monotonic() - began
        full = bool(usable) and usable == limits.blocks and not missing
        self._counters.looked_up(retention_class, limits.input_tokens, limits.before(usable - missing), full, seconds)
        if not self.config.accounting:
            return
        now_ms = int(self.clock.bucket_time() * 1000)
        self._accounts.add(Account(now_ms, retention_class, keys, limits, hit, missing, bucket, seconds))

    def ticket(self, data: bytes) -> Ticket:
        """A ticket that another agent made with the same ticket key. Raises ProtocolError."""
        return Ticket.from_bytes(data, self.config.ticket_key)

    def _ticket(self, keys: Keys, hit: Hit, retention_class: str, limits: Limits) -> Ticket:
        expires = int((self.clock.wall_time() + self.config.ticket_seconds) * 1000)
        return Ticket(
            keys[: hit.blocks].copy(), hit.extents, self.config.block_tokens, len(keys), self.owner, self.map.tag,
            self._readable.layout_tag, self.map.epoch, expires, self.config.ticket_key, retention_class, min(hit.blocks, limits.blocks),
        )  # fmt: skip

    # --- load ---

    def load(
        self,
        ticket: Ticket,
        destination: Any = None,
        *,
        hedge: Hedge = "lazy",
        deadline_seconds: float | None = None,
        blocks: range | None = None,
    ) -> LoadResult:
        """Fills `destination` (blocks, block_bytes) with blocks of the ticket; `blocks` names a part of its hit, all of it by default.

        Takes numpy arrays, torch CPU tensors and any writable buffer, rows any distance apart. The first `result.blocks` rows are whole;
        nothing writes to the memory once this has returned. Memory that was never touched costs half the speed: use it again.
        Raises LayoutError for memory that does not fit, MisuseError, Closed.
        """
        return self.load_with(None, ticket, destination, hedge=hedge, deadline_seconds=deadline_seconds, blocks=blocks)

    def load_with(
        self,
        began: Callable[[Load], None] | None,
        ticket: Ticket,
        destination: Any = None,
        *,
        hedge: Hedge = "lazy",
        deadline_seconds: float | None = None,
        blocks: range | None = None,
    ) -> LoadResult:
        """As load; `began` is given the load under way, so that another thread can cancel it."""
        wanted = checked_blocks(ticket, blocks)
        destination = self._destination(destination, wanted)
        early = self._cannot_load(ticket, wanted)
        if early is not None:
            return early
        if self.ram is not None:
            return self.ram.load(self, began, ticket, destination, hedge, deadline_seconds, wanted)
        load = self.begin_load(ticket, destination, hedge=hedge, deadline_seconds=deadline_seconds, blocks=wanted)
        try:
            if began is not None:
                began(load)
            return self.counted(load, ticket, len(wanted))
        except BaseException:
            load.cancel()
            self.counted(load, ticket, len(wanted))
            raise

    def planes(
        self,
        ticket: Ticket,
        destination: Any,
        *,
        hedge: Hedge = "lazy",
        deadline_seconds: float | None = None,
        blocks: range | None = None,
    ) -> Iterator[PlaneReady]:
        """As load, but yields each plane when it is whole over the range. Closing the iterator early ends the load.

        A load that falls short yields smaller `blocks`, or stops early: only rows whole in every plane may be used for later layers.
        """
        return self.planes_with(None, ticket, destination, hedge=hedge, deadline_seconds=deadline_seconds, blocks=blocks)

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
        """As planes; `began` is given the load under way, so that another thread can cancel it."""
        wanted = checked_blocks(ticket, blocks)
        destination = self._destination(destination, wanted)
        if self._cannot_load(ticket, wanted) is not None:
            return
        if self.ram is not None:
            yield from self.ram.planes(self, began, ticket, destination, hedge, deadline_seconds, wanted)
            return
        load = self.begin_load(ticket, destination, hedge=hedge, deadline_seconds=deadline_seconds, blocks=wanted, by_plane=True)
        try:
            if began is not None:
                began(load)
            yield from load.planes()
        finally:
            self.counted(load, ticket, len(wanted))

    def begin_load(
        self,
        ticket: Ticket,
        destination: Any,
        *,
        hedge: Hedge,
        deadline_seconds: float | None,
        blocks: range,
        by_plane: bool = False,
    ) -> Load:
        """A load under way, for those who drive it themselves; `finish()` must be called. Most want load() or planes().

        `by_plane` asks for plane after plane over all blocks, so that the first plane is there early; else for extent after extent.
        """
        self.check_load(ticket, hedge)
        rows = self._destination(destination, blocks)
        seconds = self.config.load_deadline_seconds if deadline_seconds is None else deadline_seconds
        span = self._tracing.begin("kvstore.load")
        load = Load(self._reaches, self._plane_table, ticket, blocks, rows, hedge, by_plane, seconds)
        load.span = span
        self._counters.load_began()
        return load

    def uncounted_load(self, ticket: Ticket, rows: U8, blocks: range) -> Load:
        """A load of this client's own, for nobody who waits; `finish()` must be called. Raises MisuseError, Closed."""
        self.check_load(ticket, "lazy")
        return Load(self._reaches, self._plane_table, ticket, blocks, rows, "lazy", False, self.config.load_deadline_seconds)

    @property
    def placements(self) -> Mapping[int, Placement]:
        """Who holds what, by the epoch it was written in."""
        return self._reaches.current.placements

    def check_direct(self, ticket: Ticket, blocks: range | None) -> range:
        """The blocks that a read past this client (kvstore/client/direct.py) may ask for; none of an expired ticket. Raises MisuseError or
        Closed where load would."""
        wanted = checked_blocks(ticket, blocks)
        self.check_load(ticket, "lazy")
        return range(0) if ticket.expired(self.clock.wall_time()) else wanted

    def check_load(self, ticket: Ticket, hedge: Hedge) -> None:
        """Raises MisuseError or Closed where begin_load would."""
        self._check_open()
        if ticket.layout_tag != self._readable.layout_tag or ticket.cluster != self.map.tag:
            raise MisuseError("E566", "ticket", "is of another layout or cluster", "redeem it with a client of the same")
        if hedge not in ("lazy", "eager"):
            raise MisuseError("E567", f"hedge {hedge!r}", "is not known", 'pass "lazy" or "eager"')

    def _destination(self, destination: Any, blocks: range) -> U8:
        if destination is None:
            destination = np.empty((len(blocks), self.layout.block_bytes), np.uint8)
        return as_rows(destination, len(blocks), self.layout.block_bytes, writable=True)

    def _cannot_load(self, ticket: Ticket, blocks: range) -> LoadResult | None:
        outcome = LoadOutcome.COMPLETE if not len(blocks) else LoadOutcome.EXPIRED if ticket.expired(self.clock.wall_time()) else None
        if outcome is None:
            return None
        self._check_open()
        if outcome is LoadOutcome.EXPIRED:
            self._counters.load_began()
            self._counters.loaded(ticket.retention_class, outcome.value, 0, len(blocks) * ticket.block_tokens, 0, 0.0)
        return LoadResult(outcome, 0, 0, 0.0, 0, 0, 0, 0, 0, 0)

    def counted(self, load: Load, ticket: Ticket, wanted: int) -> LoadResult:
        """Ends a load of `wanted` blocks that begin_load began, and counts what came of it."""
        result = load.finish()
        self._tell()
        self._suspects.look()
        if load.span is not None:
            self._tracing.load(load.span, load.times(), load.counts)
            self._tracing.tell(load.span, outcome=result.outcome.value, blocks=result.blocks, bytes=result.bytes, decoded=result.decoded)
            load.span.end()
            load.span = None
        short = (wanted - result.blocks) * ticket.block_tokens if result.outcome is not LoadOutcome.CANCELLED else 0
        self._counters.loaded(
            ticket.retention_class, result.outcome.value, result.blocks * ticket.block_tokens, short, result.bytes, result.seconds
        )
        if short:
            for name in ticket.names:
                self._promises.forget(name)
        elif self._compaction is not None and result.outcome is LoadOutcome.COMPLETE:
            self._compaction.look(ticket)
        return result

    # --- store ---

    def store(
        self,
        keys: Keys,
        blocks: Any,
        *,
        first_block: int,
        retention_class: str = "chat",
        fidelity: Fidelity = Fidelity.EXACT,
    ) -> StoreFuture:
        """Stores keys[first_block : first_block + n] from `blocks` (n, block_bytes); `keys` is the whole chain from block 0.

        Returns at once. The memory is read in the background and must stay as it is until the future is done; it is kept alive here.
        Past `queue_bytes_max` the oldest unsent extents are dropped. Raises LayoutError, KeyFormatError, MisuseError, Closed.
        """
        keys = checked_keys(keys)
        earlier = self._starts.get(keys[first_block - 1].tobytes(), ()) if 0 < first_block <= len(keys) else ()
        future, spans = self._store(keys, blocks, first_block, earlier, retention_class, fidelity)
        if spans:
            self._remember(keys, spans[-1].stop, [*earlier, *(span.start for span in spans)])
        return future

    def store_again(
        self, keys: Keys, blocks: U8, *, first_block: int, earlier: tuple[int, ...], retention_class: str, fidelity: Fidelity
    ) -> StoreFuture:
        """As store, of blocks that are stored already: what the chain's next store names as earlier extents does not change."""
        return self._store(keys, blocks, first_block, earlier, retention_class, fidelity)[0]

    def _store(
        self, keys: Keys, blocks: Any, first_block: int, earlier: tuple[int, ...], retention_class: str, fidelity: Fidelity
    ) -> tuple[StoreFuture, list[ExtentSpan]]:
        class_id = self._class_id(retention_class)
        self._check_open()
        rows = as_rows(blocks, None, self.layout.block_bytes, writable=False)
        if not 0 <= first_block <= len(keys) - len(rows):
            what = f"blocks {first_block} to {first_block + len(rows)}"
            raise LayoutError("E524", what, f"the chain has {len(keys)} keys", "pass the whole chain from block 0")
        if not len(rows):  # all of the prompt hit
            return stores.nothing_to_store(), []
        spans = cut(first_block, len(rows), self.layout)
        fields = {
            "layout_tag": self._readable.layout_tag,
            "bucket": int(self.clock.bucket_time() // self.map.bucket_seconds),
            "kv_group": self._kv_group,
            "depth": fidelity.depth,
            "retention_class": class_id,
            "fidelity": int(fidelity.kind),
        }

        began = time.monotonic()
        future = stores.new_future()
        own_keys = keys[first_block : first_block + len(rows)].copy()
        order = stores.Order(self.owner, own_keys, rows, spans, self._plane_table, earlier, fields, (blocks, rows), future)
        current = self._reaches.current
        if current.map.rules.asks_first and self.config.ask_first:
            first_keys = keys[[span.start for span in spans]].copy()
            nodes = current.newest.table()[current.newest.pg_of(first_keys)]
            self._admission.add(Candidate(first_keys, nodes, fields["bucket"], order))
        else:
            self._stores.add(order, len(spans))
        future.add_done_callback(lambda _: self._counters.stored(time.monotonic() - began))
        return future, spans

    def _remember(self, keys: Keys, end: int, starts: list[int]) -> None:
        """For the next store of this chain: what its records name as earlier extents."""
        name = keys[end - 1].tobytes()
        self._starts[name] = tuple(starts[-EARLIER_MAX:])
        self._starts.move_to_end(name)
        while len(self._starts) > _CHAINS_KEPT:
            self._starts.popitem(last=False)

    def flush(self, deadline_seconds: float | None = None) -> bool:
        """Waits until every store is done; False when the time passed first."""
        return self._stores.flush(self.config.store_deadline_seconds if deadline_seconds is None else deadline_seconds)

    # --- life ---

    def close(self) -> None:
        """Waits a while for stores on their way, ends loads, closes connections. A second call does nothing."""
        if self._finalizer.alive:
            if self._compaction is not None:
                self._compaction.end()
            self._stores.flush(self.config.close_seconds)
            self._admission.end()
            self._suspects.close(min(self.config.close_seconds, SUSPECTS_CLOSE_SECONDS))
            self._accounts.close(min(self.config.close_seconds, ACCOUNTS_CLOSE_SECONDS))
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def stats(self) -> dict[str, int | float]:
        """Counters since the start and gauges of now, by plain name; docs/CLIENT.md lists them."""
        return {**self._reaches.stats(), **self._counters.flat(), "stores_open": self._stores.open_count()}

    @property
    def tenant(self) -> str:
        """The name of its owner in metrics and the access log."""
        return self.config.tenant or (DEFAULT if self.owner == bytes(OWNER_BYTES) else OTHER)

    @property
    def accounts(self) -> Accounts:
        """Why tokens did not hit; `accounts.flush(seconds)` waits until all lookups so far are counted and logged."""
        return self._accounts

    @property
    def counters(self) -> Counters:
        """For kvstore.client.metrics."""
        return self._counters

    @property
    def _core(self) -> _native.ClientCore:
        return self._reaches.current.core

    def _tell(self) -> None:
        """Logs what became of RDMA, once for each reason."""
        for warn, text in self._core.take_notices():
            log.log(logging.WARNING if warn else logging.INFO, text)

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise Closed("E560", "client", "is closed", "make a new one")

    def _class_id(self, retention_class: str) -> int:
        found = self.map.classes.get(retention_class)
        if found is None:
            fix = f"use one of {', '.join(sorted(self.map.classes))}"
            raise MisuseError("E568", f"retention class {retention_class!r}", "is not in the cluster map", fix)
        return found.id


def _connect(config: ClientConfig, planes: tuple[Plane, ...], cluster_map: ClusterMap) -> _native.ClientCore:
    return _native.ClientCore(
        [node.address for node in cluster_map.nodes], cluster_map.tag, cluster_map.epoch, cluster_map.k, cluster_map.m,
        threads=config.threads, bulk_connections_max=config.bulk_connections_max, queue_bytes_max=config.queue_bytes_max,
        connect_timeout_seconds=config.connect_timeout_seconds, stall_timeout_seconds=config.stall_timeout_seconds,
        drain_timeout_seconds=config.drain_timeout_seconds, idle_timeout_seconds=config.idle_timeout_seconds,
        plane_wait_seconds=config.plane_wait_seconds,
        store_deadline_seconds=config.store_deadline_seconds, congestion_control=tcp.for_kernel(config.congestion_control),
        transport=config.transport, rdma_device=config.rdma_device, rdma_pool_bytes=config.rdma_pool_bytes,
        rdma_zone_bytes=max(config.rdma_zone_bytes, *(2 * p.shard_bytes for p in planes)), rdma_windows=config.rdma_windows,
        rdma_traffic_class=config.rdma_traffic_class, rdma_gid_index=config.rdma_gid_index,
    )  # fmt: skip


def _close(
    reaches: Reaches, open_stores: Stores, admission: Admission, suspects: Suspects, compaction: Compaction | None, pid: int
) -> None:
    if os.getpid() != pid:
        return  # a forked child has none of the threads
    if compaction is not None:
        compaction.end()
    admission.end()
    suspects.end()
    reaches.close()
    open_stores.end()
