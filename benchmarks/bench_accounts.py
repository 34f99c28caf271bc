"""miss_labels, tokens_add_up, accounting_cost: are the reasons of misses right, do all parts make the whole, what does it take.

Labels: twelve nodes in this process play the conversation trace at 15% of its blocks, with two classes (one expires after a minute of
the trace), approximations that half of the requests refuse, and three nodes that are gone for a while. The oracle forgets nothing: it sees
every store as it is acknowledged and every deletion as the evictors do it. Tokens count as right where a request's counts agree.

Cost: processor time of this process for lookups of 600 blocks with accounts and access log, less without, over that of a lookup and load.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import pyarrow.parquet as pq

from benchmarks.harness import ROOT, Bench, Figure, at_least, at_most, equal_to, interleaved, measures
from benchmarks.prompts import LAYOUT, chain_keys, full_extents, pretouched, store_in_turns
from benchmarks.rig import rig
from kvstore.client import Accept, Client, ClientConfig, Fidelity
from kvstore.clustermap import DEFAULT_CLASSES, ClusterMap
from kvstore.clustermap import Node as Member
from kvstore.extents import cut
from kvstore.gc import Evictor
from kvstore.keys import Keys
from kvstore.layout import Layout
from kvstore.metrics import MISS_REASONS
from kvstore.replay import Request, open_trace, shape_of
from kvstore.replay.capacity import node_capacity_bytes
from kvstore.replay.clock import TraceClock
from kvstore.replay.player import ReplayOptions, block_keys
from kvstore.server.config import NodeConfig
from kvstore.server.node import Node
from kvstore.wire import Gone

TRACE: Final = ROOT / "traces" / "mooncake_conversation_trace.jsonl.gz"
SMALL: Final = Layout.single(320)
NODES, K, M = 12, 10, 2
SHARE: Final = 0.15
BATCH_SECONDS: Final = 60.0
REQUESTS: Final = 2_500  # of the trace, at the sizes beyond smoke
GONE_NODES: Final = (1, 4, 8)
LOOKUPS: Final = 400


@dataclass
class Stored:
    """One writing, as it was acknowledged."""

    start: int
    exact: bool
    write_ids_before: set[bytes]


@dataclass
class Oracle:
    """Remembers every store and every deletion."""

    stored: dict[int, list[tuple[bytes, Stored]]] = field(default_factory=lambda: defaultdict(list))  # block id: extents with it, in order
    dropped: dict[bytes, list[tuple[int, bytes, int]]] = field(default_factory=lambda: defaultdict(list))  # extent key: node, write id, why
    gone_nodes: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def store(self, keys: Keys, ids: Sequence[int], first: int, exact: bool) -> None:
        for span in cut(first, len(ids) - first, SMALL):
            key = keys[span.start].tobytes()
            with self.lock:
                before = {write_id for _, write_id, _ in self.dropped[key]}
            for at in range(span.start, span.start + span.count):
                self.stored[ids[at]].append((key, Stored(span.start, exact, before)))

    def reasons(self, ids: Sequence[int], hit: int, takes_approximations: bool) -> Counter[str]:
        """Of the blocks from `hit` on."""
        found: list[str | None] = [self._reason(one, takes_approximations) for one in ids[hit:]]
        broken = next((reason for reason in found if reason), "deadline")
        return Counter(reason or broken for reason in found)

    def _reason(self, block: int, takes_approximations: bool) -> str | None:
        """Why this block cannot be read; None: it can."""
        whys = [self._why(key, stored, takes_approximations) for key, stored in self.stored.get(block, ())]
        if not whys:
            return "unknown"
        for first in (None, "fidelity", "lost_shards"):
            if first in whys:
                return first
        return whys[-1]

    def _why(self, key: bytes, stored: Stored, takes_approximations: bool) -> str | None:
        with self.lock:
            drops = {node: why for node, write_id, why in self.dropped[key] if write_id not in stored.write_ids_before}
        if len(drops) > M:
            return "expired" if Counter(drops.values()).most_common(1)[0][0] == Gone.EXPIRED else "evicted"
        if len(drops.keys() | self.gone_nodes) > M:
            return "lost_shards" if not drops else "evicted"
        return None if stored.exact or takes_approximations else "fidelity"


class Watched:
    """A store whose deletions the oracle sees."""

    def __init__(self, store: Any, oracle: Oracle, node: int) -> None:
        self._store, self._oracle, self._node = store, oracle, node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def evict(self, rows: list[bytes], reason: int) -> Any:
        gone = self._store.evict(rows, reason)
        with self._oracle.lock:
            for at, *_ in gone:
                self._oracle.dropped[rows[at][25:57]].append((self._node, rows[at][57:65], int(reason)))
        return gone


class Cluster:
    """Twelve daemons in this process."""

    def __init__(self, directory: Path, capacity_bytes: int, oracle: Oracle) -> None:
        classes = [replace(c, keep_seconds=BATCH_SECONDS) if c.name == "batch" else c for c in DEFAULT_CLASSES]
        self._oracle = oracle
        self._map_path = directory / "map.toml"
        members = [Member(f"node-{i:02}", f"node-{i:02}", f"127.0.0.1:{i + 1}") for i in range(NODES)]
        for member in members:
            (directory / member.id).mkdir(parents=True)
        planned = ClusterMap.local(members, cluster_id="labels", bucket_seconds=1, classes=classes)
        planned.save(self._map_path)
        self._configs = [
            NodeConfig(
                data_dir=directory / f"node-{i:02}", capacity_bytes=capacity_bytes, node_id=f"node-{i:02}", cluster_map_path=self._map_path,
                virtual_clock=True,
            )
            for i in range(NODES)
        ]  # fmt: skip
        self.nodes: list[Node | None] = [None] * NODES
        for number in range(NODES):
            self.start(number)
        placed = [replace(m, address=f"127.0.0.1:{self._port(i)}") for i, m in enumerate(members)]
        self.map = ClusterMap.local(placed, cluster_id="labels", bucket_seconds=1, classes=classes)

    def _port(self, number: int) -> int:
        node = self.nodes[number]
        assert node is not None and node.server is not None
        return node.server.port

    def start(self, number: int) -> None:
        def watched(store: Any, *rest: Any, **named: Any) -> Evictor:
            return Evictor(Watched(store, self._oracle, number), *rest, **named)

        with mock.patch("kvstore.server.node.Evictor", watched):
            node = Node(self._configs[number])
            node.start()
        self._configs[number] = replace(self._configs[number], port=node.server.port if node.server else 0)
        self.nodes[number] = node
        self._oracle.gone_nodes.discard(number)

    def stop(self, number: int) -> None:
        node = self.nodes[number]
        if node is not None:
            node.request_stop()
            node.serve_until_stopped()
            self.nodes[number] = None
            self._oracle.gone_nodes.add(number)

    def close(self) -> None:
        for number in range(NODES):
            self.stop(number)


def _play(client: Client, cluster: Cluster, oracle: Oracle, clock: TraceClock, requests: list[Request]) -> tuple[int, int]:
    """(tokens labelled right, tokens missed)."""
    options = ReplayOptions(layout=SMALL)
    right = total = 0
    away = range(len(requests) * 6 // 10, len(requests) * 7 // 10)
    for number, request in enumerate(requests):
        clock.advance_to(request.time_ms)
        if number == away.start:
            for node in GONE_NODES:
                cluster.stop(node)
        if number == away.stop:
            for node in GONE_NODES:
                cluster.start(node)
        ids = request.ids()
        if not len(ids):
            continue
        keys, listed = block_keys(options, ids), ids.tolist()
        kind = "batch" if listed[-1] % 3 == 0 else "chat"
        takes = number % 2 == 0
        before = dict(client.counters.missed_tokens)
        ticket = client.lookup(keys, retention_class=kind, accept=Accept.ANY if takes else Accept.EXACT)
        expected = oracle.reasons(listed, ticket.hit_blocks, takes)
        if not client.accounts.flush(30):
            raise RuntimeError("accounts were not settled in 30 s")
        told = Counter({reason: count - before.get((kind, reason), 0) for (_, reason), count in _of(client, kind)})
        for reason, blocks in expected.items():
            total += blocks * 128
            right += min(told[reason], blocks * 128)
        if ticket.hit_blocks < len(ids):
            exact = listed[-1] % 10 != 0
            data = np.zeros((len(ids) - ticket.hit_blocks, SMALL.block_bytes), np.uint8)
            fidelity = Fidelity.EXACT if exact else Fidelity.approx(1)
            done = client.store(keys, data, first_block=ticket.hit_blocks, retention_class=kind, fidelity=fidelity).result(30)
            if done.outcome.readable:
                oracle.store(keys, listed, ticket.hit_blocks, exact)
    return right, total


def _of(client: Client, kind: str) -> list[tuple[tuple[str, str], int]]:
    return [(key, count) for key, count in client.counters.missed_tokens.items() if key[0] == kind]


@measures("miss_labels", "tokens_add_up")
def labels(bench: Bench) -> dict[str, Figure]:
    requests = list(islice(open_trace(TRACE), bench.scale.trace_requests or REQUESTS))
    shape = shape_of(requests, SMALL, K)
    capacity = node_capacity_bytes(max(1, int(shape.unique_blocks * SHARE)), shape, shards=NODES, nodes=NODES)
    oracle, clock, log = Oracle(), TraceClock(), bench.directory / "access"
    cluster = Cluster(bench.directory / "labels", capacity, oracle)
    # A promise counts real seconds, in which a virtual clock passes many minutes.
    config = ClientConfig(access_log=log, promise_seconds=1, promise_reuse_seconds=0, connect_timeout_seconds=0.3)
    try:
        with Client(cluster.map, layout=SMALL, config=config, clock=clock) as client, redirect_stderr(StringIO()):  # daemons' logs
            right, total = _play(client, cluster, oracle, clock, requests)
            counts = {reason: client.stats()[f"missed_{reason}_tokens"] for reason in MISS_REASONS}
    finally:
        cluster.close()
    told = ", ".join(f"{reason} {count / sum(counts.values()):.1%}" for reason, count in counts.items() if count)
    rows = [row for path in log.glob("access-*.parquet") for row in pq.read_table(path).to_pylist()]
    wrong = sum(row["input_tokens"] != row["hit_tokens"] + sum(row[f"miss_{reason}"] for reason in MISS_REASONS) for row in rows)
    return {
        "miss_labels": Figure(right / total, at_least(0.95), f"of {total:,} tokens that missed: {told}"),
        "tokens_add_up": Figure(wrong, equal_to(0), f"requests of {len(rows):,} whose parts do not make the whole"),
    }


@measures("accounting_cost")
def accounting_cost(bench: Bench) -> dict[str, Figure]:
    """Both clients ask the same nodes about the same prompt, turn about; processor time of all their threads."""
    blocks = bench.scale.chain_blocks
    keys = chain_keys(90, blocks)
    with ExitStack() as stack:
        cluster = rig(bench, stack, "accounts").cluster
        on, off = (
            stack.enter_context(Client(cluster.map, layout=LAYOUT, config=config))
            for config in (ClientConfig(access_log=bench.directory / "cost"), ClientConfig(accounting=False))
        )
        store_in_turns(off, keys, full_extents(blocks))
        place = pretouched(blocks)
        lookups = LOOKUPS if bench.scale.name != "smoke" else 10

        def lookups_of(client: Client) -> float:
            began = time.process_time()
            for _ in range(lookups):
                client.lookup(keys)
            client.accounts.flush(30)
            return (time.process_time() - began) / lookups

        def load() -> float:
            began = time.process_time()
            client_loads = off.load(off.lookup(keys), place)
            if client_loads.blocks != blocks:
                raise RuntimeError(f"loaded {client_loads.blocks} of {blocks} blocks")
            return time.process_time() - began

        with_it, without, loads = interleaved(bench.scale.rounds, lambda: lookups_of(on), lambda: lookups_of(off), load)
    cost, whole = float(np.median(with_it) - np.median(without)), float(np.median(loads))
    note = f"{cost * 1e6:.0f} us of {whole * 1000:.1f} ms processor time; {blocks} blocks, accounts and access log, all hit"
    return {"accounting_cost": Figure(max(0.0, cost) / whole, at_most(0.01), note)}
