"""What the cluster, its clients and engines say now, beside a log of what was. Who does not answer is told, and the report goes on."""

from __future__ import annotations

import http.client
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from kvstore.cli.cluster import NodeReport, ask_nodes
from kvstore.cluster_view import buckets, by_label, merged, quantile, retention, space, total
from kvstore.clustermap import ClusterMap
from kvstore.errors import UsageError
from kvstore.live.scrape import ask_clients
from kvstore.placement import Placement
from kvstore.report.page import count, percent, printable
from kvstore.units import format_bytes, format_seconds

BODY_BYTES_MAX: Final = 16 << 20
TTFT: Final = "time_to_first_token_seconds"  # vLLM and SGLang put their own name and a colon in front


def cluster_now(cluster_map: ClusterMap, timeout_seconds: float) -> dict[str, Any]:
    """The map's facts and, where at least one node answers, what they hold; `answers` is False where none does."""
    reports = ask_nodes(cluster_map, timeout_seconds)
    up = [report for report in reports if report.up]
    losses = Placement(cluster_map).losses_survived({report.node.ordinal for report in reports if not report.up})
    found = {
        "id": cluster_map.cluster_id,
        "epoch": cluster_map.epoch,
        "k": cluster_map.k,
        "m": cluster_map.m,
        "hosts": len({node.host for node in cluster_map.newest.nodes}),
        "nodes_total": len(reports),
        "promised": {each.name: each.keep_seconds for each in cluster_map.classes.values() if each.keep_seconds},
        "answers": bool(up),
        "error": None if up else next((report.error for report in reports if report.error), "no answer"),
    }
    unknown = (
        "nodes_up",
        "hosts_losable",
        "nodes_losable",
        "losses",
        "space",
        "retention",
        "node_read_p50_seconds",
        "node_read_p99_seconds",
    )
    if not up:
        return {**found, **dict.fromkeys(unknown)}
    reads = buckets(merged(report.values for report in up), "kvstore_node_request_duration_seconds", op="read")
    return {
        **found,
        "nodes_up": len(up),
        "hosts_losable": losses.hosts if losses.readable else 0,
        "nodes_losable": losses.nodes if losses.readable else 0,
        "losses": str(losses),
        "space": space(reports).data(),
        "retention": _retention(cluster_map, reports),
        "node_read_p50_seconds": quantile(reads, 0.5),
        "node_read_p99_seconds": quantile(reads, 0.99),
    }


def _retention(cluster_map: ClusterMap, reports: Sequence[NodeReport]) -> list[dict[str, Any]]:
    rows = [each.data() for each in retention(cluster_map, reports)]
    return [{name: value for name, value in row.items() if name != "nodes"} for row in rows]


def clients_now(urls: Sequence[str], timeout_seconds: float) -> dict[str, Any]:
    """What these client processes counted since they started; null where none counted."""
    reports = ask_clients(urls, timeout_seconds)
    values = merged(report.values for report in reports if report.up)
    lookups, loads = (buckets(values, f"kvstore_{name}_duration_seconds") for name in ("lookup", "load"))
    asked = total(values, "kvstore_lookup_tokens_total")
    fallbacks = by_label(values, "kvstore_load_fallbacks_total", "reason")
    ended = loads[-1][1] if loads else 0.0
    return {
        "clients_total": len(reports),
        "clients_up": sum(report.up for report in reports),
        "errors": {report.url: report.error for report in reports if report.error},
        "lookup_tokens": int(asked),
        "hit_tokens": int(total(values, "kvstore_hit_tokens_total")),
        "hit_ratio": total(values, "kvstore_hit_tokens_total") / asked if asked else None,
        "delivered_tokens": int(total(values, "kvstore_delivered_tokens_total")),
        "short_hit_tokens": int(total(values, "kvstore_short_hit_tokens_total")),
        "lookup_p50_seconds": quantile(lookups, 0.5),
        "lookup_p99_seconds": quantile(lookups, 0.99),
        "loads": int(ended),
        "load_p50_seconds": quantile(loads, 0.5),
        "load_p99_seconds": quantile(loads, 0.99),
        "load_fallbacks": {reason: int(number) for reason, number in fallbacks.items()},
        "load_fallback_ratio": sum(fallbacks.values()) / ended if ended else None,
    }


def engines_now(urls: Sequence[str], timeout_seconds: float) -> dict[str, Any]:
    """Time to first token of all requests, cached or not, since these engines started; null where none reports it."""
    sums: dict[float, float] = {}
    errors = {}
    for url in urls:
        try:
            page = _page(url, timeout_seconds)
            found = _first_tokens(page)
        except (OSError, http.client.HTTPException, ValueError) as error:
            errors[url] = (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()[:120]
            continue
        if not found:
            errors[url] = f"reports no {TTFT}"
        for bound, seen in found.items():
            sums[bound] = sums.get(bound, 0.0) + seen
    ordered = sorted(sums.items())
    return {
        "engines_total": len(urls),
        "errors": errors,
        "requests": int(ordered[-1][1]) if ordered else None,
        "ttft_p50_seconds": quantile(ordered, 0.5),
        "ttft_p99_seconds": quantile(ordered, 0.99),
    }


def engine_url(text: str) -> str:
    """An engine's /metrics, from http://host:port with or without the path. Raises UsageError E140."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        good = parts.scheme == "http" and bool(parts.hostname) and parts.port is not None and text.isascii() and text.isprintable()
    except ValueError:
        good = False
    if not good or " " in text:
        raise UsageError("E140", f'--engine "{text}"', "is not the address of a metrics page", "write http://HOST:PORT")
    return f"http://{parts.netloc.rpartition('@')[2]}{parts.path if parts.path not in ('', '/') else '/metrics'}"


def _page(url: str, timeout_seconds: float) -> str:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_seconds)
    try:
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        body = answer.read(BODY_BYTES_MAX)
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}")
        return body.decode()
    finally:
        connection.close()


def _first_tokens(page: str) -> Mapping[float, float]:
    """Upper bound -> cumulative count of the engine's own histogram."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[float, float] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name.rpartition(":")[2] == f"{TTFT}_bucket" and math.isfinite(sample.value):
                    bound = float(sample.labels["le"])
                    found[bound] = found.get(bound, 0.0) + sample.value
    except (ValueError, KeyError, IndexError):  # whatever the parser makes of bytes that are no metrics
        raise ValueError("not a metrics page") from None
    return found


# --- for people ---


def cluster_facts(cluster: Mapping[str, Any] | None, why_not: str) -> list[tuple[str, str]]:
    if cluster is None:
        return [("cluster", f"not asked: {why_not}; what it holds now is left out")]
    name = f"{printable(cluster['id'])}, epoch {cluster['epoch']}, {cluster['k']}+{cluster['m']}"
    if not cluster["answers"]:
        return [("cluster", f"{name}: no node answers ({cluster['error']}); what it holds now is left out")]
    found = [("cluster", f"{name}: {cluster['nodes_up']} of {cluster['nodes_total']} nodes up, {cluster['losses']}")]
    there = cluster["space"]
    share = f" ({percent(there['used_bytes'] / there['capacity_bytes'])})" if there["capacity_bytes"] else ""
    full = there["seconds_until_full"]
    outlook = "" if full is None else f"   full in {format_seconds(full)} at this pace"
    found.append(("space", f"{format_bytes(there['used_bytes'])} of {format_bytes(there['capacity_bytes'])} raw{share}{outlook}"))
    if cluster["retention"]:
        found.append(("promise", "   ".join(map(_promise, cluster["retention"]))))
    evicted = sum(each["evicted_bytes"] for each in cluster["retention"])
    if evicted:
        kept = sum((each["evicted_reached_contract_ratio"] or 0) * each["evicted_bytes"] for each in cluster["retention"])
        found.append(
            ("dropped", f"{format_bytes(evicted)} since the nodes started, {percent(kept / evicted)} of it had reached its class's time")
        )
    return found


def clients_facts(clients: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if clients is None:
        return []
    name = f"{clients['clients_up']} of {clients['clients_total']} answer"
    if not clients["clients_up"]:
        return [("clients", f"{name} ({next(iter(clients['errors'].values()), 'no answer')})")]
    hits = f"hit {percent(clients['hit_ratio'])} of {count(clients['lookup_tokens'])} tokens since they started"
    found = [("clients", f"{name}; {hits}")]
    if clients["load_p50_seconds"] is not None:
        times = f"p50 {format_seconds(clients['load_p50_seconds'])}   p99 {format_seconds(clients['load_p99_seconds'])}"
        found.append(
            ("load", f"{times}   fell back to recompute in {percent(clients['load_fallback_ratio'])} of {clients['loads']:,} loads")
        )
    return found


def _promise(each: Mapping[str, Any]) -> str:
    """ "all kept": nothing of the class was dropped for room since the nodes started."""
    name, contract, attained = printable(each["retention_class"]), each["contract_seconds"], each["attained_seconds"]
    promised = f" {format_seconds(contract)}" if contract else ""
    if attained is None:
        return f"{name}{promised}: all kept, oldest {format_seconds(each['oldest_seconds'])}"
    met = "" if each["contract_met"] is None else ", met" if each["contract_met"] else ", NOT MET"
    return f"{name}{promised}: {format_seconds(attained)} kept{met}"
