"""One look at the cluster, summed up: plain data with units in the keys, null for unknown, as --json prints it and the page draws it.

Rates are of the interval since the look before; what is told of `window_seconds` is of the last five minutes, or since the watching began.
Bytes of nodes are with parity. Hits are counted by clients alone, in tokens; where none is watched or none looks up, they are null.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvstore.cli.cluster import NodeReport
from kvstore.cluster_view import ClassRetention, quantile
from kvstore.live.counts import Counts
from kvstore.live.scrape import ClientReport

MISS_REASONS: Final = ("unknown", "expired", "evicted", "lost_shards", "fidelity", "window", "tail", "deadline")
FALLBACK_REASONS: Final = ("timeout", "missing", "corrupt", "unreachable")
ERRORS: Final = ("error", "corrupt", "refused", "no_space", "busy")
READ: Final = "kvstore_node_request_duration_seconds"
OWNER_LIMITS: Final = {
    "used_bytes": "kvstore_owner_used_bytes",
    "floor_bytes": "kvstore_owner_floor_bytes",
    "cap_bytes": "kvstore_owner_cap_bytes",
}

Data = dict[str, Any]


def rate(count: float | None, seconds: float) -> float | None:
    return None if count is None or seconds <= 0 else count / seconds


def ratio(part: float, whole: float) -> float | None:
    """None where there is nothing to divide: no traffic is not 0 %."""
    return part / whole if whole > 0 else None


def errors_of(counts: Counts) -> float:
    by_result = counts.by("kvstore_node_requests_total", "result")
    return sum(by_result.get(name, 0.0) for name in ERRORS)


def traffic_of(counts: Counts | None, seconds: float) -> Data:
    """Of one node, or of all together. None: not known yet, or away."""
    known = counts is not None and seconds > 0
    counts = counts or Counts({})
    reads = counts.sum(f"{READ}_count", op="read")
    buckets = counts.buckets(READ, op="read")
    values: Data = {
        "load_bytes_per_second": counts.sum("kvstore_node_transfer_bytes_total", direction="out"),
        "save_bytes_per_second": counts.sum("kvstore_node_transfer_bytes_total", direction="in"),
        "reads_per_second": reads,
        "writes_per_second": counts.sum(f"{READ}_count", op="write"),
        "errors_per_second": errors_of(counts),
        "evicted_bytes_per_second": counts.sum("kvstore_evicted_bytes_total"),
    }
    rates: Data = {name: value / seconds if known else None for name, value in values.items()}
    return {**rates, "read_p50_seconds": quantile(buckets, 0.5), "read_p99_seconds": quantile(buckets, 0.99)}


def node_row(report: NodeReport, newest_epoch: int, counts: Counts | None, seconds: float, age_seconds: float | None) -> Data:
    now = Counts(report.values)
    behind = report.state == "ready" and report.epoch < newest_epoch
    row: Data = {
        "id": report.node.id,
        "host": report.node.host,
        "address": report.node.address,
        "http_address": report.node.metrics_address or None,
        "state": "behind" if behind else report.state,
        "error": report.error or None,
        "age_seconds": age_seconds,  # of the last answer; null: none yet
        **traffic_of(counts, seconds),
    }
    if not report.up:
        return {**row, **dict.fromkeys(_FACTS)}
    facts: Data = {
        "epoch": report.epoch,
        "version": report.version or None,
        "io": report.io or None,
        "pid": report.pid or None,
        "uptime_seconds": report.uptime_seconds,
        "used_bytes": report.used_bytes,
        "capacity_bytes": report.capacity_bytes,
        "used_ratio": ratio(report.used_bytes, report.capacity_bytes),
        "shards": report.extents,
        "pinned_shards": now.sum("kvstore_node_pinned_extents"),
        "connections": now.sum("kvstore_node_connections"),
        "queued_requests": now.sum("kvstore_node_queued_requests"),
        "disk_errors": now.sum("kvstore_disk_errors_total"),
        "clock_offset_seconds": report.clock_offset_seconds,
        "answer_seconds": report.answer_seconds,
    }
    assert tuple(facts) == _FACTS
    return {**row, **facts}


_FACTS: Final = (
    "epoch", "version", "io", "pid", "uptime_seconds", "used_bytes", "capacity_bytes", "used_ratio", "shards", "pinned_shards",
    "connections", "queued_requests", "disk_errors", "clock_offset_seconds", "answer_seconds",
)  # fmt: skip


def hits_of(clients: Sequence[ClientReport], window: Counts, seconds: float, window_seconds: float, last: Counts) -> Data:
    """What client processes counted: `window` of five minutes, `last` of the interval."""
    lookup = window.sum("kvstore_lookup_tokens_total")
    hit = window.sum("kvstore_hit_tokens_total")
    now = last.sum("kvstore_lookup_tokens_total")
    by_tier = window.by("kvstore_hit_tokens_total", "tier")
    loads = window.buckets("kvstore_load_duration_seconds")
    lookups = window.buckets("kvstore_lookup_duration_seconds")
    fallbacks = dict.fromkeys(FALLBACK_REASONS, 0.0) | window.by("kvstore_load_fallbacks_total", "reason")
    missed = window.by("kvstore_missed_tokens_total", "reason")
    told = any(key.startswith("kvstore_missed_tokens_total") for client in clients for key in client.values)
    return {
        "clients_total": len(clients),
        "clients_up": sum(client.up for client in clients),
        "window_seconds": window_seconds,
        "lookup_tokens": lookup,
        "hit_tokens": hit,
        "hit_ratio": ratio(hit, lookup),
        "hit_ratio_now": ratio(last.sum("kvstore_hit_tokens_total"), now),
        "hit_tokens_by_tier": by_tier if len(by_tier) > 1 else None,  # one tier alone tells nothing
        "lookup_tokens_per_second": now / seconds if seconds > 0 else None,
        "lookup_p99_seconds": quantile(lookups, 0.99),
        "load_p50_seconds": quantile(loads, 0.5),
        "load_p99_seconds": quantile(loads, 0.99),
        "load_p99_seconds_now": quantile(last.buckets("kvstore_load_duration_seconds"), 0.99),
        "loads": loads[-1][1] if loads else 0.0,
        "fallbacks": fallbacks if clients else None,
        "short_hit_tokens": window.sum("kvstore_short_hit_tokens_total"),
        "missed_tokens": {reason: missed.get(reason, 0.0) for reason in MISS_REASONS} if told else None,
    }


def class_rows(kept: Sequence[ClassRetention], window: Counts, contracts: Mapping[str, float]) -> list[Data]:
    """Classes that hold something, lost something or are asked for. `attained_seconds` null: nothing that matters was dropped for room."""
    fields = ("retention_class", "contract_seconds", "attained_seconds", "oldest_seconds", "used_bytes", "reached_ratio", "short")
    rows: dict[str, Data] = {each.retention_class: {field: getattr(each, field) for field in fields} for each in kept}
    hits, tokens = (window.by(f"kvstore_{word}_tokens_total", "retention_class") for word in ("hit", "lookup"))
    for name in tokens:
        if tokens[name] and name not in rows:
            known = {"retention_class": name, "contract_seconds": contracts.get(name) or None, "short": False}
            rows[name] = {**dict.fromkeys(fields), **known}
    for name, row in rows.items():
        row.update(lookup_tokens=tokens.get(name, 0.0), hit_ratio=ratio(hits.get(name, 0.0), tokens.get(name, 0.0)))
    return sorted(rows.values(), key=lambda row: (-row["lookup_tokens"], row["retention_class"]))


def owner_rows(up: Sequence[NodeReport], window: Counts) -> list[Data]:
    """Tenants with bytes, limits or lookups, who asks the most first, then who holds the most."""
    rows: dict[str, Data] = defaultdict(lambda: dict.fromkeys((*OWNER_LIMITS, "lookup_tokens", "hit_tokens"), 0.0))
    for field, metric in OWNER_LIMITS.items():
        for report in up:
            for name, value in report.by_label(metric, "owner").items():
                rows[name][field] += value
    for field in ("lookup", "hit"):
        for name, tokens in window.by(f"kvstore_{field}_tokens_total", "owner").items():
            rows[name][f"{field}_tokens"] += tokens
    found = [{"owner": name, **row, "hit_ratio": ratio(row["hit_tokens"], row["lookup_tokens"])} for name, row in rows.items()]
    known = [row for row in found if row["lookup_tokens"] or any(row[field] for field in OWNER_LIMITS)]
    return sorted(known, key=lambda row: (-row["lookup_tokens"], -row["used_bytes"], row["owner"]))
