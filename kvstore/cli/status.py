"""`kvstore status`: is the cluster well; what is wrong, worst first; what to do; may one more host go."""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvstore.cli.cluster import NodeReport, ask_nodes, find_map, map_path, require_some
from kvstore.cli.directories import DirectoryReport, ask_directories, directories_line, directory_address
from kvstore.cli.health import age_words, evaluate, overall
from kvstore.cli.health_memory import HealthMemory, muted_words
from kvstore.cli.output import STYLES, Output, rfc3339_now
from kvstore.cluster_view import ClassRetention, Space, quantile, retention, space
from kvstore.clustermap import ClusterMap, Node
from kvstore.errors import Refused
from kvstore.live.scrape import ask_clients, client_url
from kvstore.live.window_rows import agents_line, agents_since_start
from kvstore.placement import Losses, Placement
from kvstore.units import format_bytes, format_seconds
from kvstore.version import version

ALIKE_MAX: Final = 4  # lines of one code and severity


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "status",
        help="is the cluster well, and if not, what to do",
        description="Asks every node and says what is wrong, worst first. Exit 0 for OK and WARN, 1 for ERR, 3 where no node answers.",
        epilog="""\
examples:
  kvstore status
  kvstore status --nodes                 a row for every node
  kvstore status --without node-07       may I take this node, or host, away? exit 4: no
  kvstore status --json | jq .data.space
  kvstore status --nagios                one line, exit 0/1/2/3
""",
    )
    parser.add_argument("--nodes", dest="rows", action="store_true", help="a row for every node, not only for those that are unwell")
    parser.add_argument(
        "--without", metavar="NODE", action="append", default=[], help="judge as if this node or host were gone (repeatable)"
    )
    parser.add_argument(
        "--client", metavar="URL", action="append", default=[], help="look at this client's or agent's /metrics, too (repeatable)"
    )
    text = "look at this window directory, too (repeatable; those of the map are asked in any case)"
    parser.add_argument("--directory", metavar="ADDRESS", action="append", default=[], help=text)
    parser.add_argument("--fail-on", choices=("warn", "err"), default="err", help="from which severity on the exit code is 1 (default err)")
    parser.add_argument("--nagios", action="store_true", help="one line; exit 0 OK, 1 WARN, 2 ERR, 3 unreachable")


def run(args: argparse.Namespace) -> int:
    cluster_map = find_map(args)
    without = {node.ordinal for name in args.without for node in _taken(cluster_map, name)}
    clients = [client_url(text) for text in args.client]
    named = [directory_address(text) for text in args.directory]
    reports = ask_nodes(cluster_map, args.settings["timeout"])
    require_some(reports, cluster_map)
    asked = ask_clients(clients, args.settings["timeout"])
    for silent in asked:
        if not silent.up:
            args.out.warn(f"client {silent.url} does not answer: {silent.error}")
    directories = ask_directories(cluster_map, list(dict.fromkeys([*cluster_map.directories, *named])), args.settings["timeout"])
    path = map_path(args)
    age = max(0.0, time.time() - path.stat().st_mtime)
    found = evaluate(cluster_map, reports, clients=asked, directories=directories, map_age_seconds=age)
    memory = HealthMemory(path)
    health = memory.settle(found)
    memory.save()
    for mute in memory.ended:
        args.out.warn(f"the mute of {mute.code} has ended: there is more of it than when it was muted")
    word = overall(health)
    placement = Placement(cluster_map)
    lost = {report.node.ordinal for report in reports if not report.up}
    losses = placement.losses_survived(lost)
    kept = retention(cluster_map, reports)
    data = _data(cluster_map, reports, losses, word, kept)
    data["directories"] = [each.data() for each in directories]
    data["agents"] = agents = agents_since_start(asked)
    data["mutes"] = [mute.data() for mute in memory.live_mutes()]
    args.out.result(data, health=health, cluster=cluster_map.cluster_id, epoch=cluster_map.epoch)
    if args.nagios:
        return _nagios(args.out, word, health, reports)
    muted, rows = muted_words(memory, health), args.rows or args.verbose
    _show(args.out, cluster_map, reports, health, word, losses, kept, directories, agents, muted, rows)
    if without:
        _judge(args.out, cluster_map, placement, lost, without, args.without)
    return int(word == "ERR" or (word == "WARN" and args.fail_on == "warn"))


def _show(
    out: Output,
    cluster_map: ClusterMap,
    reports: Sequence[NodeReport],
    health: Sequence[Any],
    word: str,
    losses: Losses,
    kept: Sequence[ClassRetention],
    directories: Sequence[DirectoryReport],
    agents: Sequence[Mapping[str, Any]],
    muted: str,
    rows: bool,
) -> None:
    there = space(reports)
    up = [report for report in reports if report.up]
    out.line(f"cluster  {cluster_map.cluster_id}   epoch {cluster_map.epoch}   {version()}   {rfc3339_now()}")
    shown = [check for check in health if check.muted_until is None]
    count = sum(check.severity != "INFO" for check in shown)
    checks = f"  {count} check{'s' if count != 1 else ''}" if count else ""
    out.line(f"health   {word}{checks}{muted}", style=STYLES.get(word, "green"))
    width = max((len(check.code) for check in shown), default=0)
    alike = Counter((check.severity, check.code) for check in shown)
    told: Counter[tuple[str, str]] = Counter()
    for check in shown:
        kind = check.severity, check.code
        told[kind] += 1
        if alike[kind] > ALIKE_MAX and told[kind] >= ALIKE_MAX:  # one rack down must not push the rest off the screen
            if told[kind] == ALIKE_MAX:
                more = f"and {alike[kind] - ALIKE_MAX + 1} more, all in --json"
                out.line(f"  {check.severity:<4} {check.code:<{width}}  {more}", STYLES.get(check.severity))
            continue
        subject = "" if check.subject == "cluster" else f"{check.subject} "
        out.line(
            f"  {check.severity:<4} {check.code:<{width}}  {subject}{check.summary}     kvstore explain {check.code}",
            STYLES.get(check.severity),
        )
    out.line(f"nodes    {len(up)} of {len(reports)} up   {cluster_map.k}+{cluster_map.m}   {losses}")
    share = cluster_map.k / (cluster_map.k + cluster_map.m)
    percent = f" ({100 * there.used_bytes / there.capacity_bytes:.0f} %)" if there.capacity_bytes else ""
    raw = f"{format_bytes(there.used_bytes)} of {format_bytes(there.capacity_bytes)} raw{percent}"
    out.line(f"space    {raw} = {format_bytes(there.used_bytes * share)} of cache   {_outlook(there)}".rstrip())
    out.line("traffic  " + _traffic_line(_traffic(up)))
    if kept:
        out.line("kept     " + "   ".join(_kept_words(each) for each in kept) + _reached(kept))
    if len(there.by_class) > 1:
        sizes = sorted(there.by_class.items(), key=lambda each: -each[1])
        out.line("classes  " + "   ".join(f"{name} {format_bytes(size)}" for name, size in sizes))
    if len(owners := _owners(up)) > 1 or any(each["floor_bytes"] or each["cap_bytes"] for each in owners):
        out.line("owners   " + "   ".join(_owner(each) for each in owners))
    if directories:
        out.line("windows  " + directories_line(directories))
    if agents:
        out.line("agents   " + agents_line(agents))
    if rows:
        columns = ("node", "state", "address", "pid", "used", "of", "shards", "epoch", "up", "io")
        out.table(columns, [_row(report) for report in sorted(reports, key=lambda report: (report.up, report.node.id))])


def _traffic(up: Sequence[NodeReport]) -> dict[str, Any]:
    """Rates on the nodes' data connections, parity included; None: nobody says, or no reads. Hits are counted by clients alone."""
    from kvstore.metrics import LATENCY_BOUNDS_SECONDS  # Prometheus takes 50 ms to import

    moved = [report.traffic for report in up if report.traffic is not None]
    counts = [sum(column) for column in zip(*(each.read_counts for each in moved), strict=False)]
    bounds = (*LATENCY_BOUNDS_SECONDS, float("inf"))
    return {
        "seconds": max((each.seconds for each in moved), default=None),
        "requests": sum(each.requests for each in moved) if moved else None,
        "load_bytes_per_second": sum(each.bytes_out / each.seconds for each in moved) if moved else None,
        "save_bytes_per_second": sum(each.bytes_in / each.seconds for each in moved) if moved else None,
        "read_p99_seconds": quantile(list(zip(bounds, itertools.accumulate(counts), strict=True)), 0.99) if counts else None,
    }


def _traffic_line(traffic: Mapping[str, Any]) -> str:
    if traffic["requests"] is None:
        return "-"
    span = f"({format_seconds(traffic['seconds'])}, with parity)"
    if not traffic["requests"]:
        return f"none   {span}"
    p99 = traffic["read_p99_seconds"]
    load, save = (f"{word} {format_bytes(traffic[f'{word}_bytes_per_second'])}/s" for word in ("load", "save"))
    return f"{load}   {save}   read p99 {'-' if p99 is None else format_seconds(p99)}   {span}"


def _kept_words(each: ClassRetention) -> str:
    """ "all" where nothing that matters was dropped for room: what has outlived its class is gone either way."""
    contract = "" if each.contract_seconds is None else f" of {format_seconds(each.contract_seconds)}"
    if each.attained_seconds is None:
        return f"{each.retention_class} all, oldest {format_seconds(each.oldest_seconds)}{contract}"
    return f"{each.retention_class} {age_words(each.attained_seconds)}{contract}"


def _reached(kept: Sequence[ClassRetention]) -> str:
    evicted, reached = sum(each.evicted_bytes for each in kept), sum(each.reached_bytes for each in kept)
    return f"   ({100 * reached / evicted:.1f} % of dropped bytes had reached their time)" if evicted else ""


def _outlook(there: Space) -> str:
    if there.evicting:
        return "dropping the oldest for room"
    if there.seconds_until_full is not None:
        return f"full in {format_seconds(there.seconds_until_full)} at this pace"
    return ""


def _owners(up: Sequence[NodeReport]) -> list[dict[str, Any]]:
    """Of all nodes that answered, with parity, the largest first. Owners with neither bytes nor limits are left out."""
    metrics = {"used_bytes": "kvstore_owner_used_bytes", "floor_bytes": "kvstore_owner_floor_bytes", "cap_bytes": "kvstore_owner_cap_bytes"}
    found: dict[str, dict[str, Any]] = {}
    for field, metric in metrics.items():
        for report in up:
            for name, value in report.by_label(metric, "owner").items():
                each = found.setdefault(name, {"owner": name, **dict.fromkeys(metrics, 0)})
                each[field] += int(value)
    known = [each for each in found.values() if any(each[field] for field in metrics)]
    return sorted(known, key=lambda each: (-each["used_bytes"], each["owner"]))


def _owner(each: dict[str, Any]) -> str:
    limits = [f"{word} {format_bytes(each[f'{word}_bytes'])}" for word in ("floor", "cap") if each[f"{word}_bytes"]]
    return f"{each['owner']} {format_bytes(each['used_bytes'])}" + (f" ({', '.join(limits)})" if limits else "")


def _row(report: NodeReport) -> list[Any]:
    if not report.up:
        return [report.node.id, "down", report.node.address, *[None] * 7]
    return [
        report.node.id,
        report.state,
        report.node.address,
        report.pid,
        format_bytes(report.used_bytes),
        format_bytes(report.capacity_bytes),
        report.extents,
        report.epoch,
        format_seconds(report.uptime_seconds),
        report.io,
    ]


def _taken(cluster_map: ClusterMap, name: str) -> list[Node]:
    """The node of that id, else all nodes of the host of that name. Raises ConfigError."""
    if any(node.id == name for node in cluster_map.nodes):
        return [cluster_map.node(name)]
    return [node for node in cluster_map.nodes if node.host == name] or [cluster_map.node(name)]


def _judge(out: Output, cluster_map: ClusterMap, placement: Placement, lost: set[int], without: set[int], names: Sequence[str]) -> None:
    """Refuses where taking these away would make some extent unreadable."""
    rest = placement.losses_survived(lost | without)
    if not rest.readable:
        what = f"without {', '.join(names)} some extents cannot be read"
        raise Refused("E302", what, f"{len(lost)} down already" if lost else "", "bring the others back first")
    needed, hosts = cluster_map.k + cluster_map.m, {node.host for node in cluster_map.newest.nodes}
    left = {node.host for node in cluster_map.newest.nodes if node.ordinal not in lost | without}
    stores = f"; {len(left)} hosts left, whole writes need {needed}" if len(left) < needed <= len(hosts) else ""
    out.line(f"without  {', '.join(names)}: everything can still be read; then {rest}{stores}")


def _nagios(out: Output, word: str, health: Sequence[Any], reports: Sequence[NodeReport]) -> int:
    health = [check for check in health if check.muted_until is None]
    worst = f"; {health[0].code} {health[0].subject}: {health[0].summary}" if word != "OK" else ""
    up = sum(report.up for report in reports)
    out.line(f"KVSTORE {word} - {up} of {len(reports)} nodes up{worst} | nodes_up={up} checks={len(health)}")
    return {"OK": 0, "WARN": 1, "ERR": 2}[word]


def _data(
    cluster_map: ClusterMap, reports: Sequence[NodeReport], losses: Losses, word: str, kept: Sequence[ClassRetention]
) -> dict[str, Any]:
    up = [report for report in reports if report.up]
    return {
        "status": word,
        "k": cluster_map.k,
        "m": cluster_map.m,
        "nodes_up": len(up),
        "nodes_total": len(reports),
        "hosts_losable": losses.hosts,
        "nodes_losable": losses.nodes,
        "readable": losses.readable,
        "space": space(reports).data(),
        "traffic": {**_traffic(up), "hit_ratio": None},
        "kept": [each.data() for each in kept],
        "owners": [{**each, "cap_bytes": each["cap_bytes"] or None} for each in _owners(up)],
        "nodes": [
            {
                "id": r.node.id,
                "host": r.node.host,
                "address": r.node.address,
                "admin_address": r.node.admin_address,
                "http_address": r.node.metrics_address or None,
                "state": r.state,
                "error": r.error or None,
                "pid": r.pid or None,
                "epoch": r.epoch if r.up else None,
                "version": r.version or None,
                "io": r.io or None,
                "used_bytes": r.used_bytes if r.up else None,
                "capacity_bytes": r.capacity_bytes if r.up else None,
                "disk_free_bytes": int(r.values["kvstore_disk_free_bytes"]) if "kvstore_disk_free_bytes" in r.values else None,
                "extents": r.extents if r.up else None,
                "uptime_seconds": r.uptime_seconds if r.up else None,
                "clock_offset_seconds": r.clock_offset_seconds,
            }
            for r in reports
        ],
    }
