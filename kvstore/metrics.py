"""Every metric this project exports, in one table; docs/METRICS.md is written from it. Names are API: they are added, never changed.

Rules: prefix `kvstore_`; base units; counters end in `_total`; labels from closed lists, so that every series is there, at 0, from the
first second; classic buckets; no ratio and no rate (PromQL divides counters); never a key, prompt, user or address in a label.
Hits are counted at lookup, in tokens, against the tokens asked for: both counters, and what was delivered apart from them.

A process has one registry: `node_registry(...)`, `directory_registry(...)` of kvstore/metrics_directory.py, or `client_registry(...)` of
kvstore/client/metrics.py. All read their numbers, when they are scraped, from functions that the native parts give; nothing on a hot path
touches Prometheus. Over 600 lines because all names stand in one place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kvstore.owners import DEFAULT, OTHER, TAG_BYTES, Owner
from kvstore.version import revision, version

Kind = Literal["counter", "gauge", "histogram"]
LATENCY_BOUNDS_SECONDS: Final = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
HOUR: Final = 3600.0
AGE_BOUNDS_SECONDS: Final = tuple(h * HOUR for h in (1 / 60, 0.25, 1, 3, 6, 12, 24, 36, 48, 60, 72, 96, 120, 144, 168, 240, 336, 720))

MISS_REASONS: Final = ("unknown", "expired", "evicted", "lost_shards", "fidelity", "window", "tail", "deadline")  # docs/ACCESS_LOG.md
REUSE_AGE_NAMES: Final = ("1m", "5m", "1h", "6h", "12h", "1d", "2d", "3d", "5d", "7d", "14d", "more")
REUSE_AGE_BOUNDS_SECONDS: Final = tuple(h * HOUR for h in (1 / 60, 1 / 12, 1, 6, 12, 24, 48, 72, 120, 168, 336))

OPS: Final = ("hello", "discover", "promise", "withdraw", "why", "admit", "suspect", "read", "write")
CLASSES: Final = ("none", "batch", "chat", "agent", "other")
RESULTS: Final = ("ok", "not_found", "busy", "no_space", "stale_map", "draining", "refused", "corrupt", "error")
GONE_REASONS: Final = ("lru", "share", "quota", "expired")  # room for others; a class's share, an owner's cap passed; its time over
MODELS: Final = ("default",)  # a client has one, which its configuration names
# What a daemon finds out about itself (kvstore/server/selfcheck.py); kvstore/cli/codes.py explains them.
SELF_CHECKS: Final = (
    "CHECKSUM_ERRORS",
    "DISK_FULL",
    "DISK_WEAR",
    "EVICTION_STALLED",
    "INDEX_REBUILT",
    "NODE_EPOCH_BEHIND",
    "NODE_FLAPPING",
    "RETENTION_SHORT",
    "ZOMBIE_BYTES",
)
SEVERITIES: Final = ("INFO", "WARN", "ERR")
OWNERS: Final = (DEFAULT, OTHER)  # a daemon adds those that its configuration names (kvstore/owners.py)


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. `labels`: name -> its closed list of values."""

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    bounds: Sequence[float] = LATENCY_BOUNDS_SECONDS
    optional: bool = False  # there only where it is known: 0 would be a lie

    def series(self) -> Iterator[tuple[str, ...]]:
        """Every combination of label values."""
        return itertools.product(*self.labels.values())


_CLASS: Final = {"retention_class": CLASSES}
_OF_LOOKUPS: Final = {"owner": OWNERS, "model_name": MODELS, "retention_class": CLASSES}

COMMON: Final = (Metric("kvstore_build_info", "gauge", "1, with the version and commit of this process.", {"version": (), "revision": ()}),)

NODE: Final = (
    Metric("kvstore_node_requests_total", "counter", "Requests answered, by verb and outcome.", {"op": OPS, "result": RESULTS}),
    Metric("kvstore_node_request_duration_seconds", "histogram", "Seconds from a request's arrival to its answer.", {"op": OPS}),
    Metric("kvstore_node_queued_requests", "gauge", "Requests accepted and not yet answered.", {"op": OPS}),
    Metric("kvstore_node_read_shards_total", "counter", "Pieces asked for by READ requests, by outcome.", {"result": RESULTS}),
    Metric("kvstore_node_transfer_bytes_total", "counter", "Bytes on data connections.", {"direction": ("in", "out")}),
    Metric("kvstore_node_connections", "gauge", "Data connections open now."),
    Metric(
        "kvstore_node_connection_events_total",
        "counter",
        "Data connections, by what became of them.",
        {"event": ("opened", "refused", "idle_closed", "cut")},
    ),
    Metric(
        "kvstore_node_rdma_events_total",
        "counter",
        "Queue pairs: set up, asked for and not set up (the client stays on TCP), failed.",
        {"event": ("opened", "refused", "failed")},
    ),
    Metric("kvstore_node_rdma_queue_pairs", "gauge", "Queue pairs open now."),
    Metric("kvstore_node_rdma_bytes_total", "counter", "Bytes written to clients' landing zones and acknowledged."),
    Metric("kvstore_node_rdma_registered_bytes", "gauge", "Bytes of memory registered (pinned) for RDMA."),
    Metric("kvstore_node_malformed_frames_total", "counter", "Frames that broke the protocol; their connections were closed."),
    Metric("kvstore_node_memory_bytes", "gauge", "Bytes held for requests in flight.", {"kind": ("write", "read_head")}),
    Metric("kvstore_node_ready", "gauge", "1 while this node takes traffic."),
    Metric("kvstore_node_starts_total", "counter", "Starts of a daemon on this data directory."),
    Metric(
        "kvstore_health_check",
        "gauge",
        "1 while a check of this daemon about itself fires.",
        {"code": SELF_CHECKS, "severity": SEVERITIES},
    ),
    Metric("kvstore_node_start_timestamp_seconds", "gauge", "Unix time at which this process began to serve."),
    Metric("kvstore_node_extents", "gauge", "Shards of extents held (one for each writing and shard number)."),
    Metric("kvstore_node_pinned_extents", "gauge", "Shards pinned by a promise now."),
    Metric(
        "kvstore_node_discover_keys_total", "counter", "Block keys asked about, by how the answer was found.", {"by": ("filter", "index")}
    ),
    Metric("kvstore_disk_capacity_bytes", "gauge", "Bytes this node may fill."),
    Metric("kvstore_disk_free_bytes", "gauge", "Bytes free on the file system of the data directory, whoever fills it."),
    Metric(
        "kvstore_disk_used_bytes",
        "gauge",
        "Bytes on disk; freeing: no longer in the index, not yet given back; zombie: allocated, and nothing accounts for them.",
        {"kind": ("shards", "freeing", "index", "zombie")},
    ),
    Metric(
        "kvstore_disk_shard_bytes",
        "gauge",
        "Bytes of records by what their shard is; together what kvstore_disk_used_bytes calls shards.",
        {"kind": ("data", "parity")},
    ),
    Metric(
        "kvstore_disk_wear_ratio",
        "gauge",
        "Share of the disk's rated life that is used, by its own word (SMART); only where it tells.",
        optional=True,
    ),
    Metric("kvstore_disk_written_bytes_total", "counter", "Bytes of records written."),
    Metric("kvstore_disk_punched_bytes_total", "counter", "Bytes given back to the file system."),
    Metric(
        "kvstore_disk_reads_total",
        "counter",
        "Reads of the direct engine, by where the bytes came from.",
        {"source": ("direct", "cache", "buffered")},
    ),
    Metric(
        "kvstore_disk_io_duration_seconds",
        "histogram",
        "Seconds of a read of the direct engine at the disk, and of handing a record to the file system.",
        {"op": ("read", "write")},
    ),
    Metric("kvstore_disk_errors_total", "counter", "Faults of disk or index.", {"kind": ("io", "checksum", "index")}),
    Metric(
        "kvstore_index_starts_total",
        "counter",
        "How the index came up at the start of this process.",
        {"mode": ("fresh", "clean", "killed", "rebuild")},
    ),
    Metric(
        "kvstore_filter_starts_total",
        "counter",
        "Where the filter of this process came from: saved at the last stop, saved and not believed, or built by the start scan.",
        {"result": ("loaded", "ignored", "built")},
    ),
    Metric("kvstore_evicted_extents_total", "counter", "Shards evicted.", {**_CLASS, "reason": GONE_REASONS}),
    Metric("kvstore_evicted_bytes_total", "counter", "Bytes evicted.", {**_CLASS, "reason": GONE_REASONS}),
    Metric(
        "kvstore_evicted_contract_bytes_total",
        "counter",
        "Bytes evicted, by whether their class's time since the last use was over (kept) or not (broken).",
        {**_CLASS, "reason": GONE_REASONS, "contract": ("kept", "broken")},
    ),
    Metric("kvstore_eviction_age_seconds", "histogram", "Seconds from the last use of what was evicted.", _CLASS, AGE_BOUNDS_SECONDS),
    Metric("kvstore_class_share_bytes", "gauge", "Bytes past which a class loses its own oldest first, when room is needed.", _CLASS),
    Metric(
        "kvstore_node_suspect_shards_total",
        "counter",
        "Shards that readers reported as bad, by what the disk said.",
        {"result": ("damaged", "unfounded", "absent", "refused")},
    ),
    Metric("kvstore_admission_votes_total", "counter", "Votes on extents to be written.", {"vote": ("yes", "unseen", "budget")}),
    Metric("kvstore_write_budget_bytes", "gauge", "Bytes a day past which this node votes against writes; 0: no budget."),
    Metric("kvstore_owner_used_bytes", "gauge", "Bytes of records of an owner.", {"owner": OWNERS}),
    Metric("kvstore_class_used_bytes", "gauge", "Bytes of records of a class.", _CLASS),
    Metric("kvstore_owner_floor_bytes", "gauge", "Bytes below which an owner loses nothing to others.", {"owner": OWNERS}),
    Metric("kvstore_owner_cap_bytes", "gauge", "Bytes past which an owner loses its own oldest; 0: no cap.", {"owner": OWNERS}),
    Metric("kvstore_retention_seconds", "gauge", "Seconds since the last use of the oldest that is held; 0: nothing is.", _CLASS),
    Metric(
        "kvstore_retention_bound_seconds",
        "gauge",
        "Every use younger than this is still here, whatever the policy, restarts included; 0: nothing was dropped for room.",
        _CLASS,
    ),
    Metric("kvstore_scrubbed_bytes_total", "counter", "Bytes of records that the scrub looked at."),
    Metric("kvstore_scrub_completed_timestamp_seconds", "gauge", "Unix time at which a scrub had last seen every record; 0: none has."),
    Metric("kvstore_data_age_seconds", "gauge", "Seconds since this data directory was made; 0: since before that was written down."),
    Metric("kvstore_retention_contract_seconds", "gauge", "Seconds a class is to be kept after its last use.", _CLASS),
    Metric("kvstore_epoch", "gauge", "Epoch of the cluster map in use."),
    Metric("kvstore_epoch_seen", "gauge", "Newest epoch that any peer has named."),
)

CLIENT: Final = (
    Metric("kvstore_lookup_tokens_total", "counter", "Tokens of the prompts looked up.", _OF_LOOKUPS),
    Metric("kvstore_hit_tokens_total", "counter", "Tokens of them that lookups promised.", {**_OF_LOOKUPS, "tier": ("ssd",)}),
    Metric("kvstore_missed_tokens_total", "counter", "Tokens of them that did not hit, by why.", {**_OF_LOOKUPS, "reason": MISS_REASONS}),
    Metric(
        "kvstore_reuse_age_seconds",
        "histogram",
        "Tokens by the time since last use that they needed: hits, and what expired or was evicted.",
        _CLASS,
        REUSE_AGE_BOUNDS_SECONDS,
    ),
    Metric(
        "kvstore_unexplained_lookups_total",
        "counter",
        "Lookups whose misses no node was asked about: too many at once, or a closing client.",
    ),
    Metric("kvstore_access_log_rows_total", "counter", "Rows of the access log.", {"result": ("written", "dropped")}),
    Metric("kvstore_delivered_tokens_total", "counter", "Tokens loaded, checked and handed over.", _OF_LOOKUPS),
    Metric("kvstore_lookups_total", "counter", "Lookups, by what they found.", {"result": ("full", "partial", "miss", "error")}),
    Metric("kvstore_lookup_duration_seconds", "histogram", "Seconds of a lookup."),
    Metric("kvstore_load_duration_seconds", "histogram", "Seconds of a load."),
    Metric("kvstore_load_bytes_total", "counter", "Block bytes loaded.", {"tier": ("ssd",)}),
    Metric(
        "kvstore_load_fallbacks_total",
        "counter",
        "Loads that ended with fewer tokens than promised.",
        {"reason": ("timeout", "missing", "corrupt", "unreachable")},
    ),
    Metric("kvstore_short_hit_tokens_total", "counter", "Tokens promised and then not delivered."),
    Metric("kvstore_save_duration_seconds", "histogram", "Seconds from the handing over of an extent to its last needed acknowledgement."),
    Metric("kvstore_save_bytes_total", "counter", "Block bytes stored."),
    Metric(
        "kvstore_save_extents_total",
        "counter",
        "Extents whose store ended, by how.",
        {"result": ("whole", "degraded", "withdrawn", "declined")},
    ),
    Metric("kvstore_save_compacted_bytes_total", "counter", "Block bytes of short extents that were stored again as one."),
    Metric("kvstore_compacted_extents_total", "counter", "Short extents that were stored again as one."),
    Metric(
        "kvstore_save_dropped_bytes_total",
        "counter",
        "Block bytes given up unstored.",
        {"reason": ("full", "busy", "error", "declined")},
    ),
    Metric("kvstore_shards_asked_total", "counter", "Shards (of an extent) asked of nodes.", {"kind": ("data", "parity")}),
    Metric("kvstore_late_requests_total", "counter", "Twelfth shards asked for, by why.", {"reason": ("late", "error")}),
    Metric("kvstore_decoded_planes_total", "counter", "(block, plane) pieces that needed decoding."),
    Metric("kvstore_bad_shards_total", "counter", "Shards whose bytes failed a check; they count as lost, and their nodes are told."),
    Metric(
        "kvstore_bad_shard_reports_total",
        "counter",
        "Bad shards by their nodes' answer: will look, not here, not now; or not told.",
        {"result": ("taken", "absent", "busy", "unsent")},
    ),
    Metric("kvstore_degraded_reads_total", "counter", "Extents loaded with at least one data shard missing."),
    Metric("kvstore_agent_queued_requests", "gauge", "Requests waiting in this process.", {"op": ("load", "save")}),
    Metric("kvstore_agent_pinned_bytes", "gauge", "Bytes of buffers held for requests in flight."),
    Metric("kvstore_agent_connected_nodes", "gauge", "Nodes with an open connection."),
    Metric(
        "kvstore_cluster_nodes",
        "gauge",
        "Nodes of the map as this client finds them: late owes it an answer, down is not asked for a while, of up it knows no worse.",
        {"state": ("up", "late", "down")},
    ),
    Metric("kvstore_load_transport_bytes_total", "counter", "Bytes that nodes sent for loads, by how.", {"transport": ("tcp", "rdma")}),
    Metric("kvstore_rdma_fallbacks_total", "counter", "Connections that were to use RDMA and went over TCP, or were given up."),
    Metric("kvstore_rdma_faults_total", "counter", "RDMA connections that ended with an error of the device or the fabric."),
    Metric("kvstore_rdma_queue_pairs", "gauge", "RDMA queue pairs open now."),
    Metric("kvstore_rdma_registered_bytes", "gauge", "Memory registered with the RDMA device."),
    Metric("kvstore_agent_ram_asked_tokens_total", "counter", "Tokens of loads that were looked for in the RAM tier."),
    Metric("kvstore_agent_ram_hit_tokens_total", "counter", "Tokens of them that came from there; hits of lookups count apart."),
    Metric(
        "kvstore_agent_ram_extents_total", "counter", "Extents of the RAM tier, by what became of them.", {"event": ("admitted", "evicted")}
    ),
    Metric("kvstore_agent_ram_bytes", "gauge", "Bytes of the RAM tier.", {"kind": ("used", "capacity")}),
)

WINDOW_PLACES: Final = ("own", "peer", "missing")
WINDOW_FETCHES: Final = ("hit", "missing", "busy", "dead", "late", "skipped", "corrupt", "refused", "full")  # kvstore/client/agent/peers.py

WINDOW: Final = (
    Metric(
        "kvstore_window_lookups_total",
        "counter",
        "Lookups with a usable hit, by where the window entry at its end is said to be.",
        {"where": WINDOW_PLACES},
    ),
    Metric("kvstore_window_takes_total", "counter", "Window entries asked for, by where they came from.", {"where": WINDOW_PLACES}),
    Metric("kvstore_window_fetch_duration_seconds", "histogram", "Seconds of those that came from another agent, its search included."),
    Metric("kvstore_window_fetched_bytes_total", "counter", "Bytes of them."),
    Metric("kvstore_window_fetches_total", "counter", "Other agents asked for an entry, by outcome.", {"result": WINDOW_FETCHES}),
    Metric(
        "kvstore_window_served_total",
        "counter",
        "Entries that other agents asked for, by outcome.",
        {"result": ("sent", "missing", "busy")},
    ),
    Metric("kvstore_window_served_bytes_total", "counter", "Bytes of entries sent to other agents."),
    Metric(
        "kvstore_window_faults_total",
        "counter",
        "Entries that did not open with their key, and holders' names that are no address; counted as missing.",
        {"kind": ("corrupt", "address")},
    ),
    Metric("kvstore_window_kept_total", "counter", "Entries handed over to be kept, by outcome.", {"result": ("kept", "refused")}),
    Metric("kvstore_window_dropped_total", "counter", "Entries that went, by why.", {"reason": ("expired", "capacity", "discarded")}),
    Metric("kvstore_window_entries", "gauge", "Window entries held."),
    Metric(
        "kvstore_window_bytes",
        "gauge",
        "Bytes of entries; of memory, free buffers included; and what that may grow to.",
        {"kind": ("used", "allocated", "capacity")},
    ),
    Metric(
        "kvstore_window_directory_keys_total",
        "counter",
        "Window keys told to directories, or asked of them, by what came of it.",
        {"event": ("registered", "touched", "forgotten", "found", "missed")},
    ),
    Metric(
        "kvstore_window_directory_failures_total",
        "counter",
        "Requests to directories without a good answer; skipped: not sent, as the instance is out.",
        {"reason": ("timeout", "unreachable", "refused", "protocol", "skipped")},
    ),
)

# kvstore/client/agent/handoff.py
HANDOFF_OUTCOMES: Final = ("done", "busy", "too_large", "refused", "unreachable", "lost", "late", "aborted", "full")
HANDOFF_EVENTS: Final = ("offered", "refused", "committed", "lost", "expired")  # kvstore/client/agent/inbox.py

PEER: Final = (
    Metric("kvstore_handoffs_sent_total", "counter", "Handoffs to other agents, by outcome.", {"outcome": HANDOFF_OUTCOMES}),
    Metric("kvstore_handoff_sent_bytes_total", "counter", "Bytes of their sections, of those that came to nothing, too."),
    Metric(
        "kvstore_handoffs_received_total",
        "counter",
        "Handoffs of other agents: taken or refused when offered, come whole, forgotten (lost: the sender ended; expired: not taken).",
        {"event": HANDOFF_EVENTS},
    ),
    Metric("kvstore_handoff_received_bytes_total", "counter", "Bytes of sections that came from other agents."),
    Metric("kvstore_handoff_corrupt_parts_total", "counter", "Parts of handoffs whose sum was wrong; they are not taken."),
    Metric("kvstore_handoff_arrivals", "gauge", "Handoffs on their way here, or whole and not yet let go of."),
    Metric("kvstore_handoff_memory_bytes", "gauge", "Memory for them.", {"kind": ("used", "allocated", "capacity")}),
    Metric("kvstore_peer_connections", "gauge", "Open connections with other agents, by who asks on them.", {"asks": ("here", "there")}),
    Metric(
        "kvstore_peer_closed_connections_total",
        "counter",
        "Connections of other agents that were ended here: without a request for long, too slow, or against the protocol.",
        {"reason": ("idle", "cut", "refused")},
    ),
)

REPLAY_DEPTHS: Final = ("1", "2", "3", "more")  # bounded replays behind an answer, one behind the other
REPLAY_ERROR_BOUNDS_NATS: Final = (1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)

AUDIT: Final = (
    Metric(
        "kvstore_replay_audits_total",
        "counter",
        "Answers over a bounded replay that were chosen for the shadow audit, by what became of it.",
        {"result": ("done", "dropped", "long", "failed")},
    ),
    Metric(
        "kvstore_replay_audited_tokens_total",
        "counter",
        "Tokens of audited answers, by whether the exact run's most likely token is the same.",
        {"top": ("same", "changed")},
    ),
    Metric(
        "kvstore_replay_error_nats",
        "histogram",
        "Nats of KL from exact to approximate, of each audited token, by depth of its answer.",
        {"depth": REPLAY_DEPTHS},
        REPLAY_ERROR_BOUNDS_NATS,
    ),
)

ENGINE: Final = (
    Metric("kvstore_engine_open_requests", "gauge", "Requests that wait for room, and that run.", {"state": ("waiting", "running")}),
    Metric("kvstore_engine_pages", "gauge", "Pages of one block for the rows of running requests.", {"state": ("free", "used")}),
    Metric(
        "kvstore_engine_computed_tokens_total",
        "counter",
        "Tokens of prompts computed, replayed ones included, and tokens of answers computed, the first of each answer not counted.",
        {"phase": ("prefill", "decode")},
    ),
    Metric("kvstore_engine_preemptions_total", "counter", "Running requests that lost their pages to another, and went on later."),
    Metric(
        "kvstore_engine_guessed_tokens_total",
        "counter",
        "Tokens guessed ahead, of requests that ended, by what the model said of them.",
        {"result": ("accepted", "rejected")},
    ),
    Metric(
        "kvstore_engine_handoffs_total",
        "counter",
        "Requests offered to other processes, by outcome; but for done and aborted they were answered here.",
        {"outcome": HANDOFF_OUTCOMES},
    ),
    Metric(
        "kvstore_engine_handoff_bytes_total",
        "counter",
        "Bytes of requests that others went on with, by whether they were sent before the first token.",
        {"sent": ("early", "late")},
    ),
    Metric(
        "kvstore_engine_cache_faults_total",
        "counter",
        "Times the cache gave less than it promised or failed: the rest was computed, or not stored.",
        {"kind": ("lookup", "load", "window", "store")},
    ),
)

WINDOW_USES: Final = ("none", "hit", "older", "exact", "bounded")  # kvstore/engine_integration/model/resume.py
FIRST_TOKEN_BOUNDS_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

SERVER: Final = (
    Metric("kvstore_engine_requests_total", "counter", "Requests that ended, by how.", {"result": ("ok", "cancelled", "busy", "error")}),
    Metric(
        "kvstore_engine_tokens_total",
        "counter",
        "Tokens of prompts, of these cached, replayed, and resting on a bounded replay; and tokens of answers.",
        {"kind": ("prompt", "cached", "replayed", "approximate", "generated")},
    ),
    Metric(
        "kvstore_engine_first_token_seconds",
        "histogram",
        "Seconds from a request to its first token, by how its windows at the hit came about.",
        {"window": WINDOW_USES},
        FIRST_TOKEN_BOUNDS_SECONDS,
    ),
)


class Values:
    """What one scrape found: numbers by metric and label values. What is never set stays 0."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, tuple[str, ...]], float] = {}
        self.histograms: dict[tuple[str, tuple[str, ...]], tuple[Sequence[float], float]] = {}

    def set(self, name: str, value: float, *labels: str) -> None:
        self.numbers[name, labels] = float(value)

    def add(self, name: str, value: float, *labels: str) -> None:
        self.numbers[name, labels] = self.numbers.get((name, labels), 0.0) + float(value)

    def histogram(self, name: str, counts: Sequence[float], total: float, *labels: str) -> None:
        """`counts` of each bucket, not cumulative, the last beyond every bound; `total` is the sum of what was observed."""
        self.histograms[name, labels] = (counts, total)


class Histogram:
    """A histogram kept in Python, for what happens rarely (evictions). Callers serialise observe()."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0.0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[next((at for at, bound in enumerate(self.bounds) if value <= bound), len(self.bounds))] += 1
        self.total += value


class TableCollector(Collector):
    """Yields every family of a table with every series, from what `read` fills in."""

    def __init__(self, table: Iterable[Metric], read: Callable[[Values], None]) -> None:
        self._table = tuple(table)
        self._read = read

    def describe(self) -> Iterable[Family]:
        return ()  # registering must not read the sources

    def collect(self) -> Iterator[Family]:
        values = Values()
        self._read(values)
        for metric in self._table:
            if not metric.optional or any(name == metric.name for name, _ in values.numbers):
                yield _family(metric, values)


def _family(metric: Metric, values: Values) -> Family:
    labels = list(metric.labels)
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
        zero = ([0.0] * (len(metric.bounds) + 1), 0.0)
        for series in metric.series():
            counts, total = values.histograms.get((metric.name, series), zero)
            if len(counts) != len(metric.bounds) + 1:
                raise ValueError(f"{metric.name}: {len(counts)} buckets, expected {len(metric.bounds) + 1}")
            running = itertools.accumulate(counts)
            edges = [*(f"{bound:g}" for bound in metric.bounds), "+Inf"]
            histogram.add_metric(list(series), list(zip(edges, running, strict=True)), total)
        return histogram
    family = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(metric.name, metric.help, labels=labels)
    for series in metric.series():
        family.add_metric(list(series), values.numbers.get((metric.name, series), 0.0))
    return family


def registry_of(table: Iterable[Metric], read: Callable[[Values], None]) -> CollectorRegistry:
    """A registry of its own over one table, build_info included."""
    info = Metric(COMMON[0].name, "gauge", COMMON[0].help, {"version": (version(),), "revision": (revision(),)})

    def read_all(values: Values) -> None:
        values.set(info.name, 1, version(), revision())
        read(values)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(TableCollector((info, *table), read_all))
    return registry


def flat_values(registry: CollectorRegistry) -> dict[str, float]:
    """Every sample as `name{label="value",...}` -> number: what the control plane's Stats answers."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            inner = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            found[f"{sample.name}{{{inner}}}" if inner else sample.name] = float(sample.value)
    return found


_STATUS_RESULT: Final = {
    0: "ok", 1: "not_found", 2: "busy", 3: "no_space", 4: "ok", 5: "stale_map", 6: "draining", 7: "refused", 40: "corrupt",
}  # fmt: skip


def result_of_status(status: int) -> str:
    """The `result` label of a wire status (kernels/common.hpp): 20 to 39 are refusals, faults are errors; EXISTS counts as stored."""
    return _STATUS_RESULT.get(status) or ("refused" if 20 <= status < 40 else "error")


def class_label(class_id: int, names: Mapping[int, str] | None = None) -> str:
    """The `retention_class` label of a class number; operators' own classes share "other"."""
    name = (names or {0: "none", 1: "batch", 2: "chat", 3: "agent"}).get(class_id, "other")
    return name if name in CLASSES else "other"


class EvictionMetrics:
    """What the evictor tells: one call for each batch of one class and reason. `contract_seconds`: by class name."""

    def __init__(self, contract_seconds: Mapping[str, float] | None = None) -> None:
        self.contract_seconds = contract_seconds or {}
        self.extents: dict[tuple[str, str], int] = {}
        self.bytes: dict[tuple[str, str], int] = {}
        self.contract_bytes: dict[tuple[str, str, str], int] = {}
        self.ages: dict[str, Histogram] = {}

    def evicted(self, retention_class: str, reason: str, sizes_bytes: Sequence[int], ages_seconds: Sequence[float]) -> None:
        contract = self.contract_seconds.get(retention_class, 0.0)
        retention_class = retention_class if retention_class in CLASSES else "other"  # operators' own classes
        for size, age in zip(sizes_bytes, ages_seconds, strict=True):
            told = retention_class, reason, "kept" if age >= contract else "broken"
            self.contract_bytes[told] = self.contract_bytes.get(told, 0) + size
        key = retention_class, reason
        self.extents[key] = self.extents.get(key, 0) + len(sizes_bytes)
        self.bytes[key] = self.bytes.get(key, 0) + sum(sizes_bytes)
        ages = self.ages.setdefault(retention_class, Histogram(AGE_BOUNDS_SECONDS))
        for age in ages_seconds:
            ages.observe(age)

    def read(self, values: Values) -> None:
        # Copies first: the evictor's thread goes on.
        for (name, reason), count in list(self.extents.items()):
            values.set("kvstore_evicted_extents_total", count, name, reason)
        for (name, reason), count in list(self.bytes.items()):
            values.set("kvstore_evicted_bytes_total", count, name, reason)
        for labels, count in list(self.contract_bytes.items()):
            values.set("kvstore_evicted_contract_bytes_total", count, *labels)
        for name, ages in list(self.ages.items()):
            values.histogram("kvstore_eviction_age_seconds", list(ages.counts), ages.total, name)


@dataclass
class NodeFacts:
    """What a daemon knows besides its native counters; the daemon keeps it up to date."""

    capacity_bytes: int = 0
    epoch: int = 0
    ready: bool = False
    started_unix_seconds: float = 0.0
    starts: int = 0  # of any daemon on this data directory
    wear_ratio: float | None = None
    firing: Mapping[str, str] = field(default_factory=dict)  # code -> severity
    retention_seconds: Mapping[str, float] = field(default_factory=dict)
    retention_bounds: Callable[[], tuple[Mapping[str, float], float]] = lambda: ({}, 0.0)  # seconds by class, and the data's age
    scrub_ended: Callable[[], float] = lambda: 0.0  # unix seconds
    write_budget_bytes: int = 0
    class_shares: Mapping[str, float] = field(default_factory=dict)
    class_names: Mapping[int, str] = field(default_factory=dict)
    owners: Sequence[Owner] = ()

    def owner_names(self) -> tuple[str, ...]:
        """The closed list of this process."""
        return tuple(dict.fromkeys((DEFAULT, *(owner.name for owner in self.owners), OTHER)))


@dataclass(frozen=True, slots=True)
class Holding:
    """What one owner holds in one class."""

    retention_class: int
    owner: bytes
    used_bytes: int
    oldest_age_seconds: float  # since last use


def node_registry(
    server_stats: Callable[[], Mapping[str, Any]],
    store_stats: Callable[[], Mapping[str, Any]],
    facts: NodeFacts,
    evictions: EvictionMetrics | None = None,
    holdings: Callable[[], Iterable[Holding]] = tuple,
) -> CollectorRegistry:
    """A storage daemon's metrics: `server_stats` is Server.stats, `store_stats` Store.stats (kvstore/kernels/_native.pyi)."""
    owner_labels = {"owner": facts.owner_names()}
    table = [replace(metric, labels={**metric.labels, **owner_labels}) if "owner" in metric.labels else metric for metric in NODE]

    def read(values: Values) -> None:
        read_server(server_stats(), values)
        read_store(store_stats(), values)
        values.set("kvstore_disk_capacity_bytes", facts.capacity_bytes)
        values.set("kvstore_epoch", facts.epoch)
        values.set("kvstore_node_ready", facts.ready)
        values.set("kvstore_node_start_timestamp_seconds", facts.started_unix_seconds)
        values.set("kvstore_node_starts_total", facts.starts)
        if facts.wear_ratio is not None:
            values.set("kvstore_disk_wear_ratio", facts.wear_ratio)
        for code, severity in facts.firing.items():
            values.set("kvstore_health_check", 1, code, severity)
        for name, seconds in facts.retention_seconds.items():
            if name in CLASSES:
                values.set("kvstore_retention_contract_seconds", seconds, name)
        bounds, data_age = facts.retention_bounds()
        for name, seconds in bounds.items():
            values.set("kvstore_retention_bound_seconds", seconds, name)
        values.set("kvstore_data_age_seconds", data_age)
        values.set("kvstore_scrub_completed_timestamp_seconds", facts.scrub_ended())
        values.set("kvstore_write_budget_bytes", facts.write_budget_bytes)
        for name, share in facts.class_shares.items():
            if name in CLASSES:
                values.set("kvstore_class_share_bytes", share * facts.capacity_bytes, name)
        if evictions is not None:
            evictions.read(values)
        for owner in facts.owners:
            values.set("kvstore_owner_floor_bytes", owner.limits.floor_bytes, owner.name)
            values.set("kvstore_owner_cap_bytes", owner.limits.cap_bytes or 0, owner.name)
        read_holdings(holdings(), facts, values)

    return registry_of(table, read)


def read_holdings(holdings: Iterable[Holding], facts: NodeFacts, values: Values) -> None:
    """What owners hold -> the node table."""
    names = {bytes(TAG_BYTES): DEFAULT, **{owner.tag: owner.name for owner in facts.owners}}
    oldest: dict[str, float] = {}
    for held in holdings:
        values.add("kvstore_owner_used_bytes", held.used_bytes, names.get(held.owner, OTHER))
        name = class_label(held.retention_class, facts.class_names)
        values.add("kvstore_class_used_bytes", held.used_bytes, name)
        oldest[name] = max(oldest.get(name, 0.0), held.oldest_age_seconds)
    for name, seconds in oldest.items():
        values.set("kvstore_retention_seconds", seconds, name)


def read_server(stats: Mapping[str, Any], values: Values) -> None:
    """Server.stats() -> the node table."""
    read_front(stats, "kvstore_node", OPS, values)
    for op in OPS:
        values.set("kvstore_node_queued_requests", stats["queued"][op], op)
    for status, count in stats["read_items"].items():
        values.add("kvstore_node_read_shards_total", count, result_of_status(status))
    values.set("kvstore_node_memory_bytes", stats["write_arena_used_bytes"], "write")
    values.set("kvstore_node_memory_bytes", stats["read_head_bytes"], "read_head")
    read = stats["disk_read_seconds"]
    values.histogram("kvstore_disk_io_duration_seconds", read["counts"], read["sum_seconds"], "read")
    values.set("kvstore_disk_reads_total", stats["reads_direct"], "direct")
    values.set("kvstore_disk_reads_total", stats["reads_cached"], "cache")
    values.set("kvstore_disk_reads_total", stats["reads_fell_back"], "buffered")
    for event in ("opened", "refused", "failed"):
        values.set("kvstore_node_rdma_events_total", stats[f"verbs_{event}"], event)
    values.set("kvstore_node_rdma_queue_pairs", stats["verbs_queue_pairs"])
    values.set("kvstore_node_rdma_bytes_total", stats["verbs_bytes"])
    values.set("kvstore_node_rdma_registered_bytes", stats["verbs_registered_bytes"])
    values.set("kvstore_epoch_seen", stats["epoch_seen"])


def read_store(stats: Mapping[str, Any], values: Values) -> None:
    """Store.stats() -> the node table."""
    values.set("kvstore_node_extents", stats["entries"])
    values.set("kvstore_node_pinned_extents", stats["pins"])
    values.set("kvstore_node_discover_keys_total", stats["discover_filtered_total"], "filter")
    values.set("kvstore_node_discover_keys_total", stats["discover_keys_total"] - stats["discover_filtered_total"], "index")
    values.set("kvstore_disk_free_bytes", stats["disk_free_bytes"])
    values.set("kvstore_disk_used_bytes", stats["used_bytes"], "shards")
    values.set("kvstore_disk_shard_bytes", stats["used_bytes"] - stats["parity_bytes"], "data")
    values.set("kvstore_disk_shard_bytes", stats["parity_bytes"], "parity")
    written = stats["write_seconds"]
    values.histogram("kvstore_disk_io_duration_seconds", written["counts"], written["sum_seconds"], "write")
    values.set("kvstore_disk_used_bytes", stats["freeing_bytes"], "freeing")
    values.set("kvstore_disk_used_bytes", stats["zombie_bytes"], "zombie")
    values.set("kvstore_disk_used_bytes", stats.get("index_bytes", 0), "index")  # absent while the index is replaced
    values.set("kvstore_disk_written_bytes_total", stats["put_bytes_total"])
    values.set("kvstore_disk_punched_bytes_total", stats["punched_bytes_total"])
    values.set("kvstore_disk_errors_total", stats["io_errors_total"], "io")
    for vote in ("yes", "unseen", "budget"):
        values.set("kvstore_admission_votes_total", stats[f"votes_{vote}_total"], vote)
    values.set("kvstore_disk_errors_total", stats["corrupt_reported_total"] + stats["corrupt_found_total"], "checksum")
    values.set("kvstore_disk_errors_total", stats["index_faults_total"], "index")
    values.set("kvstore_scrubbed_bytes_total", stats["scrubbed_bytes_total"])
    for result in ("damaged", "unfounded", "absent", "refused"):
        values.set("kvstore_node_suspect_shards_total", stats[f"suspects_{result}_total"], result)
    values.set("kvstore_index_starts_total", 1, stats["start_mode"])
    filter_start = stats["filter_start"]
    values.set("kvstore_filter_starts_total", 1, "loaded" if filter_start == "loaded" else "ignored" if filter_start else "built")


def read_front(stats: Mapping[str, Any], prefix: str, ops: Sequence[str], values: Values) -> None:
    """What every data port counts alike."""
    if tuple(stats["bounds_seconds"]) != LATENCY_BOUNDS_SECONDS:
        raise ValueError("the server's histogram bounds are not LATENCY_BOUNDS_SECONDS")
    for op in ops:
        for status, count in stats["requests"][op].items():
            values.add(f"{prefix}_requests_total", count, op, result_of_status(status))
        histogram = stats["request_seconds"][op]
        values.histogram(f"{prefix}_request_duration_seconds", histogram["counts"], histogram["sum_seconds"], op)
    for direction in ("in", "out"):
        values.set(f"{prefix}_transfer_bytes_total", stats[f"bytes_{direction}"], direction)
    values.set(f"{prefix}_connections", stats["connections"])
    for event in ("opened", "refused", "idle_closed", "cut"):
        values.set(f"{prefix}_connection_events_total", stats[f"connections_{event}"], event)
    values.set(f"{prefix}_malformed_frames_total", stats["frames_malformed"])
