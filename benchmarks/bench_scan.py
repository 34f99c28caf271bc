"""scan_resistance_points: what a one-pass scan in class batch costs the chats that share the cluster with it.

The conversation trace in class chat is replayed alone, then beside a scan of ten times the capacity that is stored between its requests,
then beside the same scan where batch has no share to keep to (plain LRU over all classes), which says what the share buys.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from benchmarks.bench_replay import LAYOUT, K, requests_of
from benchmarks.harness import Bench, Figure, at_most, measures
from kvstore.client import Client, ClientConfig
from kvstore.clustermap import DEFAULT_CLASSES, ClusterMap, RetentionClass
from kvstore.replay import ReplayOptions, Request, TraceShape, capacity_blocks, local_cluster, run_replay, shape_of
from kvstore.replay.capacity import record_bytes
from kvstore.replay.clock import TraceClock
from kvstore.replay.player import block_keys

CAPACITIES = ("10%", "25%")  # of the trace's unique blocks: where LRU's curve is steep, and where it is not
SCAN_CAPACITIES = 10
PROMPT_EXTENTS = 8  # of one prompt of the scan
REQUESTS_MAX = 3000  # but at full size: six replays, and most of their time goes into the scan
NO_SHARES = tuple(replace(each, share=1.0) for each in DEFAULT_CLASSES)


class Scan:
    """Prompts that nobody has asked for before or will again: looked up and stored, evenly spread over the requests of a trace."""

    def __init__(self, requests: Sequence[Request], prompts: int) -> None:
        self._requests = requests
        self._prompts = prompts
        self._done = 0
        self._options = ReplayOptions(layout=LAYOUT, namespace="scan")
        self._client: Client | None = None
        self._clock = TraceClock()
        self._rows = np.zeros((PROMPT_EXTENTS * LAYOUT.blocks_per_extent_max, LAYOUT.block_bytes), np.uint8)
        self.stored = 0

    def before(self, cluster: ClusterMap, number: int) -> None:
        """Stores the prompts that are due before request `number`."""
        if self._client is None:
            self._clock = TraceClock()  # its time and the replay's begin together
            self._client = Client(
                cluster, layout=LAYOUT, config=ClientConfig(promise_seconds=1, promise_reuse_seconds=0), clock=self._clock
            )
        self._clock.advance_to(self._requests[number].time_ms)
        due = self._prompts * (number + 1) // len(self._requests)
        for prompt in range(self._done, due):
            first = prompt * len(self._rows)
            keys = block_keys(self._options, np.arange(first, first + len(self._rows)))
            if self._client.lookup(keys, retention_class="batch").hit_blocks:
                raise RuntimeError("a prompt of the scan was there before")
            self.stored += self._client.store(keys, self._rows, first_block=0, retention_class="batch").result(30).blocks
        self._done = max(self._done, due)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


@measures("scan_resistance_points")
def scan_resistance_points(bench: Bench) -> dict[str, Figure]:
    requests = requests_of(bench)
    if bench.scale.name != "full":
        requests = requests[:REQUESTS_MAX]
    shape = shape_of(requests, LAYOUT, K)
    figures = {}
    for text in CAPACITIES[:1] if bench.scale.name == "smoke" else CAPACITIES:
        alone, _ = chat_hits(bench, requests, shape, text, DEFAULT_CLASSES, beside=False)
        shared, scanned = chat_hits(bench, requests, shape, text, DEFAULT_CLASSES, beside=True)
        plain, _ = chat_hits(bench, requests, shape, text, NO_SHARES, beside=True)
        note = f"chat alone {alone:.2%}, beside a scan of {scanned:,} blocks {shared:.2%}; without shares {plain:.2%}"
        note += f" ({100 * (alone - plain):.2f} points lost); {len(requests)} requests"
        figures[f"scan_resistance_points.{text.rstrip('%')}"] = Figure(100 * (alone - shared), at_most(0.5), note)
    return figures


def chat_hits(
    bench: Bench, requests: Sequence[Request], shape: TraceShape, text: str, classes: Sequence[RetentionClass], *, beside: bool
) -> tuple[float, int]:
    """Token hit rate of the trace, and the blocks that were scanned meanwhile: beside it, or else on a cluster of its own.

    Promises count real seconds, while the trace's time runs as fast as it goes: a run that has less to do holds more of its cache by them.
    """
    blocks = capacity_blocks(text, shape, LAYOUT)
    name = f"scan-{text}-{beside}-{classes is NO_SHARES}"
    with ExitStack() as stack:
        cluster = stack.enter_context(local_cluster(bench.directory / name, shape, blocks, layout=LAYOUT, classes=classes))
        scanned = cluster if beside else stack.enter_context(local_cluster(bench.directory / f"{name}-other", shape, blocks, layout=LAYOUT))
        prompt_bytes = PROMPT_EXTENTS * record_bytes(LAYOUT.blocks_per_extent_max, PROMPT_EXTENTS // 2, LAYOUT, K)
        scan = Scan(requests, -(-SCAN_CAPACITIES * cluster.capacity_bytes // prompt_bytes))
        stack.callback(scan.close)
        client = ClientConfig(promise_seconds=1, promise_reuse_seconds=0)
        options = ReplayOptions(layout=LAYOUT, client=client, before_request=lambda number: scan.before(scanned.map, number))
        report = run_replay(requests, cluster.map, options)
    if report.wrong_bytes or report.hit_ratio is None:
        raise RuntimeError(f"{report.wrong_bytes} wrong bytes, {report.input_tokens} tokens asked for")
    return report.hit_ratio, scan.stored
