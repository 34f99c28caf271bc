"""Plays a trace against a real cluster: look up, load, check every byte, store the rest; request by request as an engine would.

Order. With one worker, requests run one after the other, as in the model caches. With several, a request waits for those before it that are
still storing a block it uses for the first time; so at infinite capacity the hits are the ideal ones at any concurrency.

Time. `virtual` runs as fast as it goes and gives the trace's time to the client's clock; daemons started with a virtual clock age their
extents by it. `wall` starts each request at its time divided by `speed`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvstore.client import Client, ClientConfig
from kvstore.client.inspect import require_some
from kvstore.client.metrics import serve_metrics
from kvstore.clustermap import ClusterMap
from kvstore.kernels import _native
from kvstore.keys import Keys, Namespace, external_keys
from kvstore.layout import PRESETS, Layout
from kvstore.replay.access_log import AccessLog
from kvstore.replay.clock import TraceClock
from kvstore.replay.exact import BlockIds, InfiniteCache, LruCache, hit_tokens
from kvstore.replay.report import ReplayReport, RequestOutcome
from kvstore.replay.requests import BLOCK_TOKENS, Request

PROMISE_SECONDS = 5

Blocks = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """How to play. Callbacks run on the caller's thread."""

    layout: Layout = PRESETS["v41"]
    namespace: str = "replay"  # another name is another world: nothing of earlier replays is found
    block_tokens: int = BLOCK_TOKENS
    clock: Literal["virtual", "wall"] = "virtual"
    speed: float = 1.0  # wall: trace seconds per second
    concurrency: int = 1
    check: bool = True  # compare every loaded byte with what its key says
    retention_class: str = "chat"
    hedge: Literal["lazy", "eager"] = "lazy"
    deadline_seconds: float = 30.0  # of each verb
    reach_seconds: float = 5.0  # for the first node to answer, before anything is played
    lru_capacity_blocks: int | None = None  # also run exact LRU of this size over the same requests
    log: Path | None = None  # what each request met, one Parquet file
    access_log: Path | None = None  # the client's own log, a folder (docs/ACCESS_LOG.md)
    metrics_port: int | None = None  # the client's /metrics on 127.0.0.1 while it plays; 0: any free port
    transport: str = ""  # of reads: auto, tcp or rdma; "": as ClientConfig has it
    fabric: Mapping[str, Any] = field(default_factory=dict)  # rdma_traffic_class, rdma_gid_index; without: as ClientConfig has them
    client: ClientConfig | None = None  # None: what suits the clock, and the transport
    before_request: Callable[[int], None] | None = None  # ordinal, before it is handed to a worker
    after_request: Callable[[RequestOutcome], None] | None = None  # in the order of the trace


def run_replay(trace: Iterable[Request], cluster: ClusterMap, options: ReplayOptions = ReplayOptions()) -> ReplayReport:
    """Plays all requests and sums up. Raises Unreachable E202 where no node answers at the beginning. From then on what goes wrong is
    counted, not raised: wrong bytes, short loads, stores that failed."""
    with ExitStack() as stack:
        log = stack.enter_context(AccessLog(options.log)) if options.log else None
        clock = TraceClock() if options.clock == "virtual" else None
        client = stack.enter_context(Client(cluster, layout=options.layout, config=options.client or _client_config(options), clock=clock))
        require_some(client, options.reach_seconds)
        if options.metrics_port is not None:
            stack.enter_context(serve_metrics(client, options.metrics_port))
        pool = stack.enter_context(ThreadPoolExecutor(options.concurrency, "kvstore-replay"))
        player = _Player(client, clock, options)
        outcomes: list[RequestOutcome] = []

        def finish(outcome: RequestOutcome) -> None:
            outcomes.append(outcome)
            if log:
                log.append(outcome.log_row())
            if options.after_request:
                options.after_request(outcome)

        try:
            player.play(trace, pool, finish)
        except BaseException:
            player.stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        return ReplayReport.of(
            outcomes,
            seconds=player.elapsed_seconds(),
            lru_capacity_blocks=options.lru_capacity_blocks,
            behind_seconds_max=player.behind_seconds_max,
            client=client.stats(),
        )


def block_keys(options: ReplayOptions, ids: BlockIds) -> Keys:
    """Keys (n, 32) of the blocks that a trace's ids (n,) name. Ids are chained already, so each stands for its whole prefix."""
    namespace = Namespace(weights=options.namespace, kv_dtype="replay", layout_digest=options.layout.digest())
    return external_keys(namespace, b"", [one.tobytes() for one in ids.astype("<u8")])


def wrong_bytes(keys: Keys, blocks: Blocks) -> int:
    """How many bytes of `blocks` (n, block_bytes) differ from what their keys (n, 32) stand for."""
    block_bytes = blocks.shape[1]
    if _native.verify_blocks(keys, block_bytes, blocks) < 0:
        return 0
    expected = np.empty_like(blocks)
    _native.generate_blocks(keys, block_bytes, expected)
    return int(np.count_nonzero(expected != blocks))


def _client_config(options: ReplayOptions) -> ClientConfig:
    config = ClientConfig(block_tokens=options.block_tokens, access_log=options.access_log, **options.fabric)
    if options.transport:
        config = replace(config, transport=options.transport)
    if options.clock == "wall":
        return config
    # A promise counts real seconds, in which a virtual clock passes many minutes: held for 60 s it would keep half of a small cache alive.
    return replace(config, promise_seconds=PROMISE_SECONDS, promise_reuse_seconds=PROMISE_SECONDS / 2)


@dataclass(slots=True)
class _Running:
    future: Future[RequestOutcome]
    new_ids: list[int]


class _Player:
    def __init__(self, client: Client, clock: TraceClock | None, options: ReplayOptions) -> None:
        self.stopped = threading.Event()
        self.behind_seconds_max = 0.0
        self._client = client
        self._clock = clock
        self._options = options
        self._began = time.perf_counter()
        self._buffers = threading.local()

    def elapsed_seconds(self) -> float:
        return time.perf_counter() - self._began

    def play(self, trace: Iterable[Request], pool: ThreadPoolExecutor, finish: Callable[[RequestOutcome], None]) -> None:
        options = self._options
        ideal = InfiniteCache()
        lru = None if options.lru_capacity_blocks is None else LruCache(options.lru_capacity_blocks)
        running: deque[_Running] = deque()
        storing: dict[int, Future[RequestOutcome]] = {}  # block id -> the request that stores it for the first time

        def settle(one: _Running) -> None:
            finish(one.future.result())
            for new in one.new_ids:
                del storing[new]

        for number, request in enumerate(trace):
            while running and (running[0].future.done() or len(running) >= 2 * options.concurrency):
                settle(running.popleft())
            if options.before_request:
                options.before_request(number)
            self._wait_until_due(request)
            ids = request.ids()
            leading = ideal.leading_hits(ids)
            outcome = RequestOutcome(
                number=number,
                trace_time_ms=request.time_ms,
                input_tokens=request.input_tokens,
                blocks=len(ids),
                ideal_hit_tokens=hit_tokens(leading, request, options.block_tokens),
                lru_hit_tokens=hit_tokens(lru.leading_hits(ids), request, options.block_tokens) if lru else 0,
            )
            new_ids = ids[leading:].tolist()
            waits = {id(storing[one]): storing[one] for one in ids.tolist() if one in storing} if storing else {}
            future = pool.submit(self._request, request, ids, outcome, list(waits.values()))
            new_ids = [one for one in new_ids if one not in storing]
            storing.update(dict.fromkeys(new_ids, future))
            running.append(_Running(future, new_ids))
        while running:
            settle(running.popleft())

    def _wait_until_due(self, request: Request) -> None:
        if self._options.clock == "virtual":
            return
        ahead = request.time_ms / 1000 / self._options.speed - self.elapsed_seconds()
        if ahead > 0:
            self.stopped.wait(ahead)
        self.behind_seconds_max = max(self.behind_seconds_max, -ahead)

    def _request(self, request: Request, ids: BlockIds, outcome: RequestOutcome, waits: list[Future[RequestOutcome]]) -> RequestOutcome:
        for earlier in waits:
            earlier.exception()  # its own failure is reported where it is settled
        if self._clock:
            self._clock.advance_to(request.time_ms)
        outcome.started_seconds = self.elapsed_seconds()
        if not len(ids):
            self._client.lookup(
                np.empty((0, 32), np.uint8), retention_class=self._options.retention_class, input_tokens=request.input_tokens
            )
            return outcome
        keys = block_keys(self._options, ids)
        self._look_up_and_load(request, keys, outcome)
        if outcome.hit_blocks < len(ids):
            self._store(keys, outcome)
        return outcome

    def _look_up_and_load(self, request: Request, keys: Keys, outcome: RequestOutcome) -> None:
        options = self._options
        began = time.perf_counter()
        ticket = self._client.lookup(
            keys, retention_class=options.retention_class, deadline_seconds=options.deadline_seconds, input_tokens=request.input_tokens
        )
        outcome.lookup_seconds = time.perf_counter() - began
        outcome.hit_blocks = ticket.hit_blocks
        outcome.hit_tokens = hit_tokens(ticket.hit_blocks, request, options.block_tokens)
        outcome.extents = len(ticket.extents)
        if not ticket.hit_blocks:
            return
        place = self._buffer("load", ticket.hit_blocks)
        began = time.perf_counter()
        loaded = self._client.load(ticket, place, hedge=options.hedge, deadline_seconds=options.deadline_seconds)
        outcome.load_seconds = time.perf_counter() - began
        outcome.loaded_blocks = loaded.blocks
        outcome.loaded_tokens = hit_tokens(loaded.blocks, request, options.block_tokens)
        outcome.loaded_bytes = loaded.blocks * options.layout.block_bytes
        outcome.decodes = loaded.decoded
        outcome.late_requests = loaded.late12
        outcome.bad_shards = loaded.bad_shards
        if options.check and loaded.blocks:
            outcome.wrong_bytes = wrong_bytes(keys[: loaded.blocks], place[: loaded.blocks])
            outcome.checked_bytes = outcome.loaded_bytes

    def _store(self, keys: Keys, outcome: RequestOutcome) -> None:
        options = self._options
        first = outcome.hit_blocks
        blocks = self._buffer("store", len(keys) - first)
        _native.generate_blocks(keys[first:], options.layout.block_bytes, blocks)
        began = time.perf_counter()
        pending = self._client.store(keys, blocks, first_block=first, retention_class=options.retention_class)
        result = pending.result(options.deadline_seconds)
        outcome.store_seconds = time.perf_counter() - began
        outcome.store_outcome = result.outcome.value
        outcome.stored_bytes = result.bytes

    def _buffer(self, name: str, block_count: int) -> Blocks:
        """Memory of this worker for `block_count` blocks, kept and grown: touching new pages costs more than the load itself."""
        blocks: Blocks | None = getattr(self._buffers, name, None)
        if blocks is None or len(blocks) < block_count:
            blocks = np.empty((block_count + block_count // 4, self._options.layout.block_bytes), np.uint8)
            setattr(self._buffers, name, blocks)
        return blocks[:block_count]
