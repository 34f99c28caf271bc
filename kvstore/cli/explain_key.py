"""`kvstore explain KEY`: where the shards of a block are, or why they are nowhere."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from kvstore.cli.cluster import find_map
from kvstore.errors import Unreachable, UsageError
from kvstore.units import format_seconds
from kvstore.wire import Gone

if TYPE_CHECKING:
    from kvstore.client.inspect import KeyView
    from kvstore.clustermap import ClusterMap


def explain_key(text: str, args: argparse.Namespace) -> int:
    """`text` is 64 hexadecimal digits. Exit 0: it can be read, or nobody knows it; 1: it was here and cannot be read any more."""
    from kvstore.client import Client
    from kvstore.client.inspect import group_of, views_of
    from kvstore.layout import PRESETS

    key, cluster_map, out = bytes.fromhex(text), find_map(args), args.out
    with Client(cluster_map, layout=PRESETS["v41"]) as client:
        views = views_of(client, key, args.settings["timeout"])
        group = group_of(client, key)
    if not any(view.answered for view in views):
        raise Unreachable("E202", f"no node of placement group {group} answers ({len(views)} asked)", fix="kvstore status")
    summary, readable = _summary(cluster_map, views)
    out.line(f"key      {text[:16]}...  placement group {group}", style="bold")
    for view in views:
        out.line(f"{view.node.id:<10} {'  '.join(_facts(view, cluster_map))}")
    out.line(f"so       {summary}")
    out.result({"key": text, "placement_group": group, "readable": readable, "summary": summary, "nodes": [_data(view) for view in views]})
    return int(readable is False)


def is_key(text: str) -> bool:
    return len(text) == 64 and all(letter in "0123456789abcdefABCDEF" for letter in text)


def check_not_almost_a_key(text: str) -> None:
    """Raises UsageError for what was meant as a key and is none."""
    if len(text) > 16 and all(letter in "0123456789abcdefABCDEF" for letter in text):
        raise UsageError("E140", f"a key of {len(text)} hexadecimal digits", "a block key has 64", "give it whole")


def _facts(view: KeyView, cluster_map: ClusterMap) -> list[str]:
    if not view.answered:
        return ["no answer: down, or too slow"]
    told = []
    for w in view.writings:
        shards = ", ".join(map(str, _shards(w.shard_mask)))
        noun = "shards" if w.shard_mask.bit_count() > 1 else "shard"
        told.append(f"{noun} {shards} of writing {w.write_id:016x}, {len(w.tags)} blocks")
    for ghost in view.ghosts:
        age = max(0.0, time.time() - ghost.last_bucket * cluster_map.bucket_seconds)
        told.append(f"{Gone(ghost.reason).name.lower()}: {len(ghost.tags)} blocks, last used {format_seconds(age)} ago")
    return told or ["knows nothing of it"]


def _shards(mask: int) -> list[int]:
    return [shard for shard in range(64) if mask >> shard & 1]


def _summary(cluster_map: ClusterMap, views: list[KeyView]) -> tuple[str, bool | None]:
    """The sentence, and whether it can be read; None: nobody knows it."""
    shards: dict[int, int] = {}
    for view in views:
        for writing in view.writings:
            shards[writing.write_id] = shards.get(writing.write_id, 0) | writing.shard_mask
    whole = cluster_map.k + cluster_map.m
    if shards:
        write_id, mask = max(shards.items(), key=lambda item: item[1].bit_count())
        count = mask.bit_count()
        if count >= cluster_map.k:
            return f"readable: {count} of {whole} shards of writing {write_id:016x} are there, {cluster_map.k} are needed", True
        silent = sum(not view.answered for view in views)
        why = f", {silent} nodes do not answer" if silent else ""
        return f"not readable: {count} of {whole} shards are left, {cluster_map.k} are needed{why}", False
    gone = Counter(Gone(view.ghosts[0].reason).name.lower() for view in views if view.ghosts)
    if gone:
        reason, count = gone.most_common(1)[0]
        return f"not there: {reason} on {count} of {len(views)} nodes", False
    return (
        "no extent begins with this block, as far as anybody remembers (14 days); one inside an extent is found by the first one's key",
        None,
    )


def _data(view: KeyView) -> dict[str, Any]:
    return {
        "id": view.node.id,
        "answered": view.answered,
        "held": [{"write_id": f"{w.write_id:016x}", "shards": _shards(w.shard_mask), "blocks": len(w.tags)} for w in view.writings],
        "gone": [{"reason": Gone(g.reason).name.lower(), "blocks": len(g.tags), "last_bucket": g.last_bucket} for g in view.ghosts],
    }
