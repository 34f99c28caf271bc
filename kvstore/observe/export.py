"""Writes the Grafana dashboard, the Prometheus rules, and the list of a cluster's nodes for Prometheus to scrape."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from kvstore.clustermap import ClusterMap
from kvstore.observe.grafana import dashboard
from kvstore.wholefile import write_whole


def rules_text() -> str:
    return (files("kvstore.observe") / "rules.yml").read_text(encoding="utf-8")


def export(directory: Path, cluster_map: ClusterMap | None = None) -> list[Path]:
    """Makes `directory` where it is not there, replaces what an earlier export left, and gives the files written. Raises OSError.

    kvstore-dashboard.json   Grafana: Dashboards, New, Import
    kvstore-rules.yml        Prometheus: rule_files
    kvstore-nodes.json       Prometheus: file_sd_configs of the job kvstore-node; only where a map with metrics addresses is given
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = {
        "kvstore-dashboard.json": json.dumps(dashboard(), indent=1) + "\n",
        "kvstore-rules.yml": rules_text(),
    }
    if cluster_map is not None and any(node.metrics_address for node in cluster_map.newest.nodes):
        written["kvstore-nodes.json"] = json.dumps(targets(cluster_map), indent=1) + "\n"
    paths = []
    for name, text in written.items():
        paths.append(directory / name)
        write_whole(paths[-1], text)
    return paths


def targets(cluster_map: ClusterMap) -> list[dict[str, object]]:
    """Nodes of the newest epoch as Prometheus's file_sd reads them; `node` and `host` become labels of every series."""
    return [
        {"targets": [node.metrics_address], "labels": {"cluster": cluster_map.cluster_id, "node": node.id, "host": node.host}}
        for node in cluster_map.newest.nodes
        if node.metrics_address
    ]
