"""The table for people, and the same as one object. Every cost is a share of one core of this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.scale.costs import Costs
from benchmarks.scale.derive import Hot, Rates, Stored, Windows
from benchmarks.scale.parameters import SHARDS, Parameters
from benchmarks.scale.placed import Busiest, Connections, Messages
from kvstore.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Shares:
    """Of one core, and of what else it takes: 1.0 is all of it, above does not fit."""

    read_core: float
    read_ssd: float
    write_core: float
    write_ssd: float
    nic: float  # of a server's, all its daemons, the fuller direction
    discovery_core: float
    promise_core: float
    core: float  # all of these together


def shares(given: Parameters, rates: Rates, sent: Messages, costs: Costs) -> Shares:
    """One daemon's, at `rates`. Messages carry as many keys as those of a prompt, spread over all nodes, do."""
    first = rates.discovery_keys * costs.discover.per_key_us(given.prompt_blocks / sent.discover)
    checked = rates.discovery_keys * sent.checked_keys / given.prompt_blocks
    again = checked * costs.discover.per_key_us(sent.checked_keys / sent.checks) if sent.checks else 0.0
    promised = rates.promises * costs.promise.per_key_us(names_a_message(given, sent))
    read, write = rates.read_bytes * costs.read_us_per_mb / 1e6, rates.write_bytes * costs.write_us_per_mb / 1e6
    moved = max(rates.read_bytes, rates.write_bytes) * given.ssds * 8
    return Shares(
        read / 1e6, rates.read_bytes / given.ssd_read_bytes_per_second, write / 1e6, rates.write_bytes / given.ssd_write_bytes_per_second,
        moved / given.nic_bits_per_second, (first + again) / 1e6, promised / 1e6, (read + write + first + again + promised) / 1e6,
    )  # fmt: skip


def names_a_message(given: Parameters, sent: Messages) -> float:
    """Extents that one PROMISE names, where all that a prompt reads are promised."""
    return len(given.extent_lengths) * SHARDS / sent.promise if sent.promise else 1.0


@dataclass(frozen=True)
class Found:
    """All that one run found."""

    given: Parameters
    costs: Costs
    rates: dict[str, Rates]  # by column
    shares: dict[str, Shares]
    stored: Stored
    messages: dict[str, Messages]  # by shape
    connections: Connections
    windows: Windows
    hot: Hot
    busiest: dict[str, Busiest]  # by kind of load
    groups: int  # that were placed
    groups_in_all: int

    def as_object(self) -> dict[str, Any]:
        """Numbers by their names here; `parameters` in place of `given`."""
        found = asdict(self)
        found["parameters"] = found.pop("given")
        found["daemons"] = self.given.daemons
        return found


def show(console: Console, found: Found) -> None:
    given = found.given
    console.print(
        f"\n{given.servers:,} servers x {given.ssds} SSD = {given.daemons:,} daemons, {format_bytes(given.stored_bytes)}; {given.shape}s' "
        f"prompts of {given.prompt_blocks} blocks in {len(given.extent_lengths)} extents\n"
        f"mean: {given.day_tokens / 1e12:g} T tokens a day = {given.prompts_per_second:,.0f} prompts/s, {given.hit_rate:.0%} hit; "
        f"peak: {given.peak_read_bytes_per_second / 1e12:g} TB/s read, {given.peak_write_bytes_per_second / 1e12:g} TB/s written",
        highlight=False,
    )
    _per_daemon(console, found)
    _derived(console, found)
    _costs(console, found)


def _table(console: Console, headings: list[str], rows: list[list[str]]) -> None:
    table = Table(box=None, pad_edge=False)
    for at, heading in enumerate(headings):
        table.add_column(heading, justify="left" if at in (0, len(headings) - 1) else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)


def _per_daemon(console: Console, found: Found) -> None:
    mean, peak = (found.rates[name] for name in ("mean", "peak"))
    m, p = (found.shares[name] for name in ("mean", "peak"))

    def row(name: str, low: str, low_share: float | None, high: str, high_share: float | None, note: str = "") -> list[str]:
        return [name, low, _percent(low_share), high, _percent(high_share), note]

    def rate(value: float) -> str:
        return f"{value:,.0f}/s" if value >= 10 else f"{value:.2f}/s"

    def size(value: float) -> str:
        return f"{format_bytes(value)}/s"

    kept, names = found.stored, names_a_message(found.given, found.messages[found.given.shape])
    rows = [
        row("reads", size(mean.read_bytes), m.read_core, size(peak.read_bytes), p.read_core, "from the disk, one extent a READ"),
        row("  of the SSD", "", m.read_ssd, "", p.read_ssd, f"assumed {size(found.given.ssd_read_bytes_per_second)}"),
        row("  were blocks objects", rate(mean.block_reads), None, rate(peak.block_reads), None, "shard reads"),
        row("  extent reads", rate(mean.extent_reads), None, rate(peak.extent_reads), None, f"of {found.given.extent_blocks:.1f} blocks"),
        row("writes", size(mean.write_bytes), m.write_core, size(peak.write_bytes), p.write_core, "parity included"),
        row("  of the SSD", "", m.write_ssd, "", p.write_ssd, f"assumed {size(found.given.ssd_write_bytes_per_second)}"),
        row("  extent writes", rate(mean.extent_writes), None, rate(peak.extent_writes), None),
        row("discovery keys", rate(mean.discovery_keys), m.discovery_core, rate(peak.discovery_keys), p.discovery_core, "share: + checks"),
        row("promises", rate(mean.promises), m.promise_core, rate(peak.promises), p.promise_core, f"with touch, {names:.1f} a message"),
        row("together", "", m.core, "", p.core, "of one core; pages written back not counted"),
        row(
            "server's cores",
            f"{m.core * found.given.ssds:.1f}",
            None,
            f"{p.core * found.given.ssds:.1f}",
            None,
            f"{found.given.ssds} daemons",
        ),
        row("server's NIC", "", m.nic, "", p.nic, f"{found.given.ssds} daemons, assumed {found.given.nic_bits_per_second / 1e9:g} Gbit/s"),
        row(
            "index",
            format_bytes(kept.index_bytes),
            None,
            "same",
            None,
            f"{kept.index_share:.2%} of {format_bytes(kept.bytes)}; earlier starts, 1 to 3 B each, on top",
        ),
        row("filter RAM", format_bytes(kept.filter_bytes), None, "same", None, f"{kept.extents / 1e6:.1f} M extents"),
    ]
    _table(console, ["A DAEMON", "MEAN", "CORE", "PEAK", "CORE", "NOTE"], rows)


def _percent(share: float | None) -> str:
    if share is None:
        return ""
    return f"{share:.1%}" + (" !" if share > 1 else "")


def _derived(console: Console, found: Found) -> None:
    given, linked, windows, costs = found.given, found.connections, found.windows, found.costs
    rows = []
    for shape, limit in (("chat", 500), ("agent", 1000)):
        sent = found.messages[shape]
        rows.append(
            [
                f"messages of a prompt, {shape}", f"{sent.total:,.0f}", _against(sent.total, limit),
                f"discover {sent.discover:.0f}, check {sent.checks:.0f}, promise {sent.promise:.0f}, read {sent.read:.0f}, "
                f"write {sent.write:.0f}; read plane by plane {sent.read_by_plane:,.0f}",
            ]
        )  # fmt: skip
    rows += [
        ["connections of a client", f"{linked.client_small:,.0f} + {linked.client_bulk:,.0f}", "", f"small + bulk, {given.hosts:,} hosts"],
        ["connections of a daemon", f"{linked.daemon:,.0f}", "", "refused past --connections, 4,096 by default"],
        ["window RAM per entry kept", format_bytes(windows.ram_bytes_per_kept), "", "of all hosts, each prompt keeping one for 180 s"],
        ["directory entries per entry kept", f"{windows.entries_per_kept / 1e6:.1f} M", "", "a prompt keeps 2 to 5"],
        ["directory messages", f"{windows.messages:,.0f}/s", "", "four a prompt, were none put together"],
        [
            "directory operations", f"{windows.operations:,.0f}/s", "",
            f"keys; {windows.operations / costs.directory_operations_per_core:.1f} cores at {costs.directory_operations_per_core:,.0f}/s",
        ],
        [
            "index rebuilt, a TB", format_seconds(costs.rebuild_seconds_per_gb * 1000), "",
            f"{format_seconds(costs.rebuild_seconds_per_gb * found.stored.bytes / 1e9)} a full daemon; "
            f"from {format_bytes(costs.rebuilt_bytes)} of records",
        ],
    ]  # fmt: skip
    all_placed = found.groups == found.groups_in_all  # of fewer, the busiest is an upper bound, which may miss where the truth does not
    names = {"discovery": "asked", "promises": "promised", "reads_tier": "read, agents with RAM tier", "reads_no_tier": "read, without"}
    for kind, name in names.items():
        at = found.busiest[kind]
        rows.append(
            [
                f"hottest extent, {name}",
                f"{at.worst:.2f} x mean",
                _against(at.worst, 2) if all_placed or at.worst <= 2 else "<= 2 ?",
                f"median group {at.median:.2f}",
            ]
        )
    placed = "all" if all_placed else f"an upper bound: {found.groups:,} of"
    plain = found.busiest["discovery"].plain
    rows.append(["busiest daemon without it", f"{plain:.2f} x mean", "", f"{placed} {found.groups_in_all:,} groups"])
    _table(console, ["DERIVED", "", "BOUND", "NOTE"], rows)


def _against(value: float, limit: float) -> str:
    return f"<= {limit:,.0f}" + ("" if value <= limit else " NOT MET")


def _costs(console: Console, found: Found) -> None:
    costs, given = found.costs, found.given
    sent = found.messages[given.shape]
    keys, names = given.prompt_blocks / sent.discover, names_a_message(given, sent)
    rows = [
        ["discovery", f"{costs.discover.per_key_us(keys):.1f} us a key", f"{costs.discover.message_us:.1f} a message + "
         f"{costs.discover.key_us:.2f} a key, {keys:.1f} keys a message"],
        ["promise with touch", f"{costs.promise.per_key_us(names):.1f} us", f"{costs.promise.message_us:.1f} a message + "
         f"{costs.promise.key_us:.2f} a name"],
        ["read", f"{costs.read_us_per_mb:.0f} us a MB", f"from the disk; {costs.read_warm_us_per_mb:.0f} from memory; engine {costs.io}"],
        ["write", f"{costs.write_us_per_mb:.0f} us a MB", ""],
        ["index, filter", f"{costs.index_bytes_per_extent:.0f}, {costs.filter_bytes_per_extent:.2f} B", "an extent of "
         f"{given.stored_extent_blocks} blocks, {format_bytes(costs.record_bytes)} on a disk"],
    ]  # fmt: skip
    _table(console, ["MEASURED HERE", "DAEMON", "NOTE"], rows)
