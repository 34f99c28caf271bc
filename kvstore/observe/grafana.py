"""The Grafana dashboard (Grafana 10 and newer) as one table of panels; `dashboard()` makes the JSON that Grafana imports.

First the numbers one looks at when woken at night, then plots on one time axis. No ratio is drawn where there is no traffic: the number
says "no traffic", the plot has a gap. Expressions use metrics of docs/METRICS.md and the recording rules of rules.yml, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

SCHEMA_VERSION: Final = 39  # Grafana 10.4; newer ones migrate it
COLUMNS: Final = 24
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
NODES: Final = 'cluster=~"$cluster"'
GREEN, YELLOW, RED = "green", "yellow", "red"


@dataclass(frozen=True)
class Panel:
    """`targets`: (PromQL, legend). `steps`: colour from a value on; none: no judgement, a low hit rate is a fact and no fault."""

    title: str
    about: str
    unit: str
    targets: Sequence[tuple[str, str]]
    kind: str = "timeseries"
    width: int = 12
    height: int = 8
    empty: str = "no data"
    steps: Sequence[tuple[float | None, str]] = ((None, "text"),)
    stacked: bool = False
    dashed: str = ""  # legends that match are limits: drawn dashed


def _number(
    title: str, about: str, unit: str, expr: str, empty: str, steps: Sequence[tuple[float | None, str]] = ((None, "text"),)
) -> Panel:
    return Panel(title, about, unit, ((expr, ""),), kind="stat", width=3, height=4, empty=empty, steps=steps)


def _quantile(q: float, metric: str, window: str = "$__rate_interval") -> str:
    return f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{{NODES}}}[{window}])))"


BAD_RESULTS: Final = "busy|no_space|refused|corrupt|error|stale_map"
NUMBERS: Final = (
    _number(
        "Firing checks", "Of the daemons about themselves; kvstore status knows more", "short",
        f'count(kvstore_health_check{{{NODES},severity=~"WARN|ERR"}} == 1) or vector(0)', "no daemon is scraped",
        ((None, GREEN), (1, YELLOW), (3, RED)),
    ),
    _number(
        "Unreachable targets", "Daemons and clients that Prometheus cannot scrape", "short",
        'count(up{job=~"kvstore-.*"} == 0) or vector(0)', "nothing is scraped", ((None, GREEN), (1, YELLOW), (3, RED)),
    ),
    _number(
        "Hit, 5 min", "Tokens promised by lookups, of those looked up", "percentunit",
        f"avg(kvstore:hit_ratio:rate5m{{{NODES}}})", "no traffic",
    ),
    _number(
        "Load p99", "Of whole loads, in clients", "s",
        f"max(kvstore:load_duration_seconds:p99_5m{{{NODES}}} >= 0)", "no traffic",
    ),
    _number("Load", "Block bytes handed to engines", "Bps", f"sum(kvstore:load_bytes:rate5m{{{NODES}}} > 0)", "no traffic"),
    _number("Save", "Block bytes stored", "Bps", f"sum(kvstore:save_bytes:rate5m{{{NODES}}} > 0)", "no traffic"),
    _number(
        "Kept, of contract", "Shortest class: attained retention against its contract; 100 % is enough", "percentunit",
        f"min(kvstore:retention_attained_seconds{{{NODES}}} / on (cluster, retention_class) (kvstore:retention_contract_seconds > 0))",
        "all: nothing was dropped for room", ((None, RED), (0.5, YELLOW), (1, GREEN)),
    ),
    _number(
        "Space used", "Of all nodes; a full cluster is normal: it drops the oldest", "percentunit",
        f"max(kvstore:disk_used_ratio{{{NODES}}})", "no daemon is scraped",
    ),
)  # fmt: skip

PLOTS: Final = (
    Panel(
        "Hit rate of tokens", "Counted at lookup. A gap: no lookups.", "percentunit",
        ((f"kvstore:hit_ratio:rate5m{{{NODES}}}", "all"), (f"kvstore:class_hit_ratio:rate5m{{{NODES}}}", "{{retention_class}}")),
    ),
    Panel(
        "Tokens that did not hit, by why", "expired: its class's time was over; evicted: room; unknown: never stored", "short",
        ((f"kvstore:missed_tokens:rate5m{{{NODES}}}", "{{reason}}"),), stacked=True,
    ),
    Panel(
        "Loads and lookups, p50 and p99", "Seconds, in clients. Set engines' time to first token beside it.", "s",
        (
            (_quantile(0.5, "kvstore_load_duration_seconds"), "load p50"),
            (_quantile(0.99, "kvstore_load_duration_seconds"), "load p99"),
            (_quantile(0.99, "kvstore_lookup_duration_seconds"), "lookup p99"),
        ),
    ),
    Panel(
        "READ requests p99, by node", "One slow node hides in a mean; here it does not.", "s",
        ((f"kvstore:node_read_duration_seconds:p99_5m{{{NODES}}}", "{{instance}}"),),
    ),
    Panel(
        "Load and save, against limits", "Clients' block bytes. Limit: the variable limit_GBps, else the highest of 7 days.", "Bps",
        (
            (f"sum(kvstore:load_bytes:rate5m{{{NODES}}})", "load"),
            (f"sum(kvstore:save_bytes:rate5m{{{NODES}}})", "save"),
            (f"sum(max_over_time(kvstore:load_bytes:rate5m{{{NODES}}}[7d]))", "load, highest of 7 days"),
            ("vector($limit_GBps) * 1e9 > 0", "limit"),
        ),
        dashed="limit|load, highest.*",
    ),
    Panel(
        "Bytes on the nodes' connections", "With parity. Both directions of all nodes.", "Bps",
        ((f"sum by (direction) (rate(kvstore_node_transfer_bytes_total{{{NODES}}}[$__rate_interval]))", "{{direction}}"),),
    ),
    Panel(
        "Kept, against contract", "Every use younger than this can still be read. A gap: nothing was dropped for room.", "s",
        (
            (f"kvstore:retention_attained_seconds{{{NODES}}}", "{{retention_class}}"),
            (f"kvstore:retention_contract_seconds{{{NODES}}} > 0", "{{retention_class}} contract"),
        ),
        dashed=".* contract",
    ),
    Panel(
        "Dropped bytes that had reached their class's time", "Of one hour. A gap: nothing was dropped.", "percentunit",
        ((f"kvstore:evicted_contract_kept_ratio:rate1h{{{NODES}}}", "{{retention_class}}"),),
    ),
    Panel(
        "Dropped, by why", "expired: its time was over; lru: room; share, quota: its class or owner was over its own limit", "Bps",
        ((f"sum by (reason) (rate(kvstore_evicted_bytes_total{{{NODES}}}[$__rate_interval]))", "{{reason}}"),), stacked=True,
    ),
    Panel(
        "Age of hits and near misses, p50 and p90", "Time since last use that tokens needed: what longer retention would bring", "s",
        (
            (_quantile(0.5, "kvstore_reuse_age_seconds", "1h"), "p50"),
            (_quantile(0.9, "kvstore_reuse_age_seconds", "1h"), "p90"),
        ),
    ),
    Panel(
        "Space by class", "Bytes of records, parity included, against capacity", "bytes",
        (
            (f"sum by (retention_class) (kvstore_class_used_bytes{{{NODES}}}) > 0", "{{retention_class}}"),
            (f"sum(kvstore_disk_capacity_bytes{{{NODES}}})", "capacity"),
        ),
        dashed="capacity",
    ),
    Panel(
        "Space by owner", "The ten largest tenants", "bytes",
        ((f"topk(10, sum by (owner) (kvstore_owner_used_bytes{{{NODES}}}) > 0)", "{{owner}}"),),
    ),
    Panel(
        "Space that is no cache", "freeing: dropped, not given back yet; zombie: nothing accounts for it; index: the database", "bytes",
        ((f'sum by (kind) (kvstore_disk_used_bytes{{{NODES},kind!="shards"}})', "{{kind}}"),), width=8,
    ),
    Panel(
        "Full in", "At the pace of six hours. A gap: not growing, or dropping the oldest already.", "s",
        ((f"kvstore:disk_full_in_seconds{{{NODES}}}", "{{cluster}}"),), width=8,
    ),
    Panel(
        "Drive writes a day, by node", "Bytes written against capacity: what wears the disks", "short",
        ((f"kvstore:drive_writes_per_day{{{NODES}}}", "{{instance}}"),), width=8,
    ),
    Panel(
        "Loads that fell short, by why", "They gave fewer tokens than promised; engines computed the rest", "ops",
        ((f"sum by (reason) (rate(kvstore_load_fallbacks_total{{{NODES}}}[$__rate_interval]))", "{{reason}}"),), width=8,
    ),
    Panel(
        "Saves given up, by why", "Block bytes not stored", "Bps",
        ((f"sum by (reason) (rate(kvstore_save_dropped_bytes_total{{{NODES}}}[$__rate_interval]))", "{{reason}}"),), width=8,
    ),
    Panel(
        "Requests that nodes did not answer well", "By outcome; not_found is no fault and not here", "ops",
        ((f'sum by (result) (rate(kvstore_node_requests_total{{{NODES},result=~"{BAD_RESULTS}"}}[$__rate_interval]))', "{{result}}"),),
        width=8,
    ),
    Panel(
        "Window entries found", "Of entries asked of agents, own ones and others'; of keys asked of directories", "percentunit",
        (
            (f"kvstore:window_hit_ratio:rate5m{{{NODES}}}", "agents"),
            (
                f'sum by (cluster) (rate(kvstore_directory_keys_total{{{NODES},what="found"}}[$__rate_interval]))'
                f' / (sum by (cluster) (rate(kvstore_directory_keys_total{{{NODES},what="located"}}[$__rate_interval])) > 0)',
                "directories",
            ),
        ),
        width=8,
    ),
    Panel(
        "Window entries held", "In agents' RAM, and known to directories: a key in two agents counts twice there", "short",
        (
            (f"sum by (instance) (kvstore_window_entries{{{NODES}}}) > 0", "{{instance}}"),
            (f"sum by (instance) (kvstore_directory_entries{{{NODES}}})", "directory {{instance}}"),
        ),
        width=8,
    ),
    Panel(
        "Window directories: keys", "A second. evicted, displaced: entries gone before their time.", "ops",
        (
            (
                f'sum by (what) (rate(kvstore_directory_keys_total{{{NODES},what=~"registered|located|touched"}}[$__rate_interval]))',
                "{{what}}",
            ),
            (
                f'sum by (reason) (rate(kvstore_directory_gone_entries_total{{{NODES},reason=~"evicted|displaced"}}[$__rate_interval]))',
                "{{reason}}",
            ),
        ),
        width=8,
    ),
    Panel(
        "Agents: workers", "Engine workers attached, of the agents that take work", "short",
        ((f"sum by (instance) (kvstore_agent_workers{{{NODES}}}) * on (instance) kvstore_agent_ready", "{{instance}}"),), width=8,
    ),
    Panel(
        "Agents: shared memory pinned", "What loads are staged in, against all there is", "percentunit",
        (
            (
                f'sum by (instance) (kvstore_agent_memory_bytes{{{NODES},kind="pinned"}})'
                f' / sum by (instance) (kvstore_agent_memory_bytes{{{NODES},kind="capacity"}})',
                "{{instance}}",
            ),
        ),
        width=8,
    ),
    Panel(
        "Agents: workers' requests not served", "By outcome. refused: asked for wrongly; gone: the worker was.", "ops",
        ((f'sum by (result) (rate(kvstore_agent_requests_total{{{NODES},result!="ok"}}[$__rate_interval]))', "{{result}}"),), width=8,
    ),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The same bytes every time."""
    panels: list[dict[str, Any]] = []
    x = y = row_height = 0
    for panel in (*NUMBERS, *PLOTS):
        if x + panel.width > COLUMNS:
            x, y, row_height = 0, y + row_height, 0
        panels.append(_panel(panel, len(panels) + 1, {"x": x, "y": y, "w": panel.width, "h": panel.height}))
        x, row_height = x + panel.width, max(row_height, panel.height)
    return {
        "title": "kvstore",
        "uid": "kvstore",
        "tags": ["kvstore"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair over all plots
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": _annotations()},
        "links": [],
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "noValue": panel.empty,
        "thresholds": {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in panel.steps]},
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
    }
    if panel.kind == "timeseries":
        defaults["min"] = 0
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 25 if panel.stacked else 0, "spanNulls": False}
        defaults["custom"]["stacking"] = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        options: dict[str, Any] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        calculation = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        options = {"reduceOptions": calculation, "colorMode": "value", "graphMode": "none", "textMode": "auto", "justifyMode": "auto"}
    limits = {"matcher": {"id": "byRegexp", "options": panel.dashed}, "properties": [_DASHED]}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": [limits] if panel.dashed else []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": expr, "legendFormat": legend or "__auto", "range": True}
            | ({"instant": True, "range": False} if panel.kind == "stat" else {})
            for at, (expr, legend) in enumerate(panel.targets)
        ],
    }


_DASHED: Final = {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}}


def _variables() -> list[dict[str, Any]]:
    everything = {"text": "All", "value": "$__all"}
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0},
        {
            "name": "cluster", "label": "Cluster", "type": "query", "datasource": SOURCE, "refresh": 2, "sort": 1, "hide": 0,
            "query": {"query": "label_values(kvstore_build_info, cluster)", "refId": "cluster"},
            "includeAll": True, "allValue": ".*", "multi": True, "current": everything,
        },
        {
            "name": "limit_GBps", "label": "Limit of loads, GB/s (0: none)", "type": "textbox", "query": "0", "hide": 0,
            "current": {"text": "0", "value": "0"},
        },
    ]  # fmt: skip


def _annotations() -> list[dict[str, Any]]:
    """Marks on every plot: nodes that started, maps that changed."""
    marks = (
        ("Node started", "yellow", f"changes(kvstore_node_start_timestamp_seconds{{{NODES}}}[1m]) > 0", "{{instance}} started"),
        ("New epoch", "blue", f"changes(kvstore_epoch{{{NODES}}}[1m]) > 0", "{{instance}} has a new map"),
    )
    return [
        {"name": name, "enable": True, "iconColor": color, "datasource": SOURCE, "expr": expr, "titleFormat": title, "step": "60s"}
        for name, color, expr, title in marks
    ]
