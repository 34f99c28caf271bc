"""A frame as lines of text: the tables of `kvstore top`, for a terminal of any size or for one plain print."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstore.cli.output import STYLES
from kvstore.live.frame import Data
from kvstore.units import format_bytes, format_seconds

KEYS: Final = "q quit  ? help  n nodes  s classes  o owners  c clients  a agents  d directories  / filter  < > sort  r reverse  p pause"
HELP: Final = """\
n  nodes, worst first       s  retention classes      o  owners      c  watched clients
a  agents among them        d  window directories
<  >  sort by the column before or after    r  reverse    up, down, page  scroll
/  show only rows with this text (Enter keeps it, Esc drops it)
p  pause and go on          ?  this help              q, Ctrl-C  quit

READ, WRITE, P99: bytes on data connections with parity, and seconds of READ requests, of the last interval.
hit: tokens of five minutes, counted by the clients named with --client; -: unknown, or no traffic.
FOUND, WINDOWS FOUND: of window keys asked of a directory, of window entries asked of an agent, in five minutes."""
SPARKS: Final = "▁▂▃▄▅▆▇█"
SPARKS_ASCII: Final = "_.:-=+*#"
CHECKS_MAX: Final = 4
ORDER: Final = {"down": 0, "starting": 1, "draining": 2, "behind": 3}


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    field: str
    form: Callable[[Any], str] = str
    left: bool = False

    def cell(self, row: Mapping[str, Any]) -> str:
        value = row[self.field]
        return "-" if value is None else printable(self.form(value))


def scaled(factor: float, digits: int) -> Callable[[Any], str]:
    return lambda value: f"{value * factor:.{digits}f}"


MB, PERCENT, MS, PER_SECOND = scaled(1e-6, 1), scaled(100, 1), scaled(1000, 2), scaled(1, 1)
TOKENS: Final[Callable[[Any], str]] = lambda value: f"{value:,.0f}"  # noqa: E731  # a form like the others
TABLES: Final[Mapping[str, tuple[Column, ...]]] = {
    "nodes": (
        Column("NODE", "id", left=True),
        Column("STATE", "state", left=True),
        Column("READ MB/s", "load_bytes_per_second", MB),
        Column("WRITE MB/s", "save_bytes_per_second", MB),
        Column("READS /s", "reads_per_second", PER_SECOND),
        Column("P99 ms", "read_p99_seconds", MS),
        Column("QUEUE", "queued_requests", TOKENS),
        Column("ERR /s", "errors_per_second", scaled(1, 2)),
        Column("EVICT MB/s", "evicted_bytes_per_second", MB),
        Column("USED %", "used_ratio", PERCENT),
        Column("EPOCH", "epoch"),
    ),
    "classes": (
        Column("CLASS", "retention_class", left=True),
        Column("HIT %", "hit_ratio", PERCENT),
        Column("TOKENS", "lookup_tokens", TOKENS),
        Column("KEPT", "attained_seconds", format_seconds),
        Column("OLDEST", "oldest_seconds", format_seconds),
        Column("CONTRACT", "contract_seconds", format_seconds),
        Column("USED", "used_bytes", format_bytes),
    ),
    "owners": (
        Column("OWNER", "owner", left=True),
        Column("HIT %", "hit_ratio", PERCENT),
        Column("TOKENS", "lookup_tokens", TOKENS),
        Column("USED", "used_bytes", format_bytes),
        Column("FLOOR", "floor_bytes", format_bytes),
        Column("CAP", "cap_bytes", format_bytes),
    ),
    "clients": (
        Column("CLIENT", "url", left=True),
        Column("STATE", "state", left=True),
        Column("NODES", "connected_nodes", TOKENS),
        Column("QUEUE", "queued_requests", TOKENS),
        Column("AGE", "age_seconds", format_seconds),
        Column("ERROR", "error", left=True),
    ),
    "agents": (
        Column("AGENT", "url", left=True),
        Column("STATE", "state", left=True),
        Column("WORKERS", "workers", TOKENS),
        Column("PINNED", "pinned_bytes", format_bytes),
        Column("RAM", "ram_used_bytes", format_bytes),
        Column("RAM HIT %", "ram_hit_ratio", PERCENT),
        Column("WINDOWS", "window_entries", TOKENS),
        Column("BYTES", "window_bytes", format_bytes),
        Column("FOUND %", "window_hit_ratio", PERCENT),
        Column("ERROR", "error", left=True),
    ),
    "directories": (
        Column("DIRECTORY", "address", left=True),
        Column("STATE", "state", left=True),
        Column("ENTRIES", "entries", TOKENS),
        Column("AGENTS", "agents", TOKENS),
        Column("ASKED /s", "located_per_second", PER_SECOND),
        Column("FOUND %", "found_ratio", PERCENT),
        Column("LOST /s", "lost_per_second", PER_SECOND),
        Column("USED", "memory_bytes", format_bytes),
        Column("OF", "memory_max_bytes", format_bytes),
        Column("ERROR", "error", left=True),
    ),
}
SORTED_BY: Final = {
    "nodes": "read_p99_seconds", "classes": "lookup_tokens", "owners": "lookup_tokens", "clients": "url", "agents": "url",
    "directories": "address",
}  # fmt: skip
NONE: Final = {
    "clients": "no client is watched: --client http://HOST:PORT",
    "agents": "none of the watched clients is an agent: --client http://HOST:PORT, the address of its --http",
    "directories": "no window directory in the map: directories = [...], or --directory HOST:PORT",
}

Line = tuple[str, str]  # text, style


@dataclass
class View:
    """What the person chose."""

    table: str = "nodes"
    sort: str = "read_p99_seconds"
    descending: bool = True
    filter: str = ""
    typing: bool = False
    paused: bool = False
    help: bool = False
    offset: int = 0

    def show(self, table: str) -> None:
        self.table, self.sort, self.offset = table, SORTED_BY[table], 0
        self.descending = SORTED_BY[table] not in ("url", "address")

    def move_sort(self, step: int) -> None:
        fields = [column.field for column in TABLES[self.table]]
        self.sort = fields[(fields.index(self.sort) + step) % len(fields)]


def rows_of(frame: Data, view: View) -> list[Data]:
    """Filtered and sorted; what is unwell comes first, what is unknown last."""
    rows = [row for row in frame[view.table] if view.filter.lower() in " ".join(str(value) for value in row.values()).lower()]
    known = [row for row in rows if row[view.sort] is not None]
    known.sort(key=lambda row: row[view.sort], reverse=view.descending)
    ordered = known + [row for row in rows if row[view.sort] is None]
    return sorted(ordered, key=lambda row: ORDER.get(str(row.get("state")), 9))


def table_lines(frame: Data, view: View, *, mark: bool = False) -> list[Line]:
    """Header and rows. `mark`: say which column sorts."""
    columns, rows = TABLES[view.table], rows_of(frame, view)
    marked = [column.title + ((" v" if view.descending else " ^") if mark and column.field == view.sort else "") for column in columns]
    cells = [[column.cell(row) for column in columns] for row in rows]
    widths = [max(len(title), *(len(row[at]) for row in cells)) if cells else len(title) for at, title in enumerate(marked)]

    def line(words: Sequence[str]) -> str:
        pairs = zip(columns, words, widths, strict=True)
        return "  ".join(word.ljust(width) if column.left else word.rjust(width) for column, word, width in pairs).rstrip()

    styles = ["red" if row.get("state") == "down" else "yellow" if row.get("state") in ORDER or row.get("short") else "" for row in rows]
    body = [(line(words), style) for words, style in zip(cells, styles, strict=True)]
    if not body:
        none = NONE.get(view.table, f"no {view.table}")
        body = [(f'no row with "{view.filter}"' if view.filter else none, "dim")]
    return [(line(marked), "bold"), *body]


def head_lines(frame: Data, cluster: str, interval_seconds: float) -> list[Line]:
    """One line of the whole, then what fires."""
    checks = [check for check in frame["health"] if check["severity"] != "INFO" and check["muted_until"] is None]
    word, traffic, hits = frame["status"], frame["traffic"], frame["hits"]
    hit = "-" if not hits["clients_total"] else "no traffic" if hits["hit_ratio"] is None else f"{100 * hits['hit_ratio']:.1f} %"
    parts = [
        cluster,
        f"{word} {len(checks)}" if checks else word,
        f" load {_rate(traffic['load_bytes_per_second'])}",
        f"save {_rate(traffic['save_bytes_per_second'])}",
        f"hit {hit}",
        f"nodes {frame['nodes_up']} of {frame['nodes_total']}",
        f" {frame['time'][11:]}",
        f"every {interval_seconds:g} s",
    ]
    lines: list[Line] = [("  ".join(parts), STYLES.get(word, "bold"))]
    for check in checks[:CHECKS_MAX]:
        subject = "" if check["subject"] == "cluster" else f"{check['subject']} "
        text = f"  {check['severity']:<4} {check['code']}  {subject}{check['summary']}     kvstore explain {check['code']}"
        lines.append((printable(text), STYLES.get(check["severity"], "")))
    if len(checks) > CHECKS_MAX:
        lines.append((f"  and {len(checks) - CHECKS_MAX} more     kvstore status", ""))
    return lines


@dataclass(frozen=True, slots=True)
class Screen:
    """Where lines are shown. `ascii`: the terminal knows no others."""

    width: int
    height: int
    ascii: bool = False


def spark_line(history: Mapping[str, Sequence[float | None]], screen: Screen) -> Line:
    """Load, save and p99 of the last intervals as small plots, each against its own highest."""
    each = max(8, min(40, (screen.width - 60) // 3))
    parts = []
    for name, field, factor, unit in (
        ("load", "load_bytes_per_second", 1e-6, "MB/s"),
        ("save", "save_bytes_per_second", 1e-6, "MB/s"),
        ("p99", "read_p99_seconds", 1e3, "ms"),
    ):
        values = list(history.get(field, ()))[-each:]
        last = values[-1] if values else None
        shown = "-" if last is None else f"{last * factor:.1f}"
        parts.append(f"{name} {_spark(values, SPARKS_ASCII if screen.ascii else SPARKS)} {shown} {unit}")
    return ("   ".join(parts), "dim")


def _spark(values: Sequence[float | None], marks: str) -> str:
    highest = max((value for value in values if value is not None), default=0.0) or 1.0
    return "".join(" " if value is None else marks[min(len(marks) - 1, int(value / highest * (len(marks) - 1) + 0.5))] for value in values)


def _rate(bytes_per_second: float | None) -> str:
    return "-" if bytes_per_second is None else f"{format_bytes(bytes_per_second)}/s"


def plain_lines(frame: Data, cluster: str, interval_seconds: float) -> list[Line]:
    """Everything there is, once."""
    lines = head_lines(frame, cluster, interval_seconds)
    for name in TABLES:
        if frame[name]:
            view = View()
            view.show(name)
            lines += [("", ""), *table_lines(frame, view)]
    return lines


def screen_lines(
    frame: Data, cluster: str, interval_seconds: float, history: Mapping[str, Sequence[float | None]], view: View, screen: Screen
) -> list[Line]:
    """As many lines as the screen has, or fewer: head, small plots, the chosen table as far as there is room, keys."""
    top = [*head_lines(frame, cluster, interval_seconds), spark_line(history, screen), ("", "")]
    if view.paused:
        top[0] = (top[0][0] + "   PAUSED", top[0][1])
    foot: Line = (f"/{view.filter}_   Enter keeps, Esc drops", "bold") if view.typing else (KEYS, "dim")
    if view.filter and not view.typing:
        foot = (f'only rows with "{view.filter}"   {KEYS}', "dim")
    if view.help:
        body: list[Line] = [(line, "") for line in HELP.splitlines()]
        return _fitted([*top, *body], foot, screen)
    header, *rows = table_lines(frame, view, mark=True)
    room = max(1, screen.height - len(top) - 2)
    extra: list[Line] = []
    if view.table == "nodes" and frame["classes"]:
        classes = View()
        classes.show("classes")
        extra = [("", ""), *table_lines(frame, classes)]
        extra = extra if len(extra) + min(len(rows), 5) <= room else []
    room -= len(extra)
    visible = room if len(rows) <= room else max(1, room - 1)
    view.offset = max(0, min(view.offset, len(rows) - visible))
    shown = rows[view.offset : view.offset + visible]
    if len(rows) > room > 1:
        shown.append((f" ... {view.offset + 1} to {view.offset + len(shown)} of {len(rows)} (up, down)", "dim"))
    return _fitted([*top, header, *shown, *extra], foot, screen)


def _fitted(lines: Sequence[Line], foot: Line, screen: Screen) -> list[Line]:
    return [(text[: screen.width], style) for text, style in (*lines[: screen.height - 1], foot)]


def printable(text: str) -> str:
    """What nodes and clients say may hold anything; a terminal must not obey it."""
    return "".join(char if char.isprintable() else "?" for char in text)
