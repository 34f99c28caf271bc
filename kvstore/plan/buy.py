"""How many nodes to buy: the most that any limit asks for, and two cheaper and two dearer choices beside it.

Limits: `stripe` (k+m hosts), `hit` (within so many points of an infinite cache), `retention` (the contract, at the worst moment), `network`
and `disk` (the busiest minute), `wear` (drive writes a day). Traffic `scale` times the source's needs `scale` times the room for the same
hit rate; its busiest hour grows with it, what a minute rises above that with the root of it, as of sources that know nothing of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Final

import numpy as np

from kvstore.layout import Layout
from kvstore.plan.accesses import F64, I64
from kvstore.plan.cluster import Extents, even_rooms, extents_of, hit_ratio_in, usable_bytes
from kvstore.plan.curve import Curve
from kvstore.plan.prices import MONTH_SECONDS, Money, Prices
from kvstore.plan.reuse import Reuse

PEAK_SECONDS: Final = 60
RHYTHM_SECONDS: Final = 3600
NODES_MOST: Final = 1 << 20
SMALLER: Final = (0.5, 0.75)  # of the nodes bought, or of the disk where the stripe allows no fewer nodes
LARGER: Final = (1.5, 2.0)


@dataclass(frozen=True)
class Spec:
    """What one node is, and what is wanted of all."""

    size_bytes: int = 3_840_000_000_000
    drive_writes_a_day: float = 1.0
    network_bytes_per_second: float = 25e9 / 8
    disk_bytes_per_second: float = 3e9
    k: int = 10
    m: int = 2
    spare_nodes: int = 1
    within_points: float = 1.0  # of an infinite cache's hit rate
    keep_seconds: float | None = None
    scale: float = 1.0
    layout: Layout = field(default_factory=lambda: Layout.single(113_920))


@dataclass(frozen=True)
class Demand:
    """What the scaled traffic asks of all nodes together, record bytes. Reads are those of an infinite cache: no cache serves more."""

    read_bytes_per_second_peak: float
    written_bytes_per_second_peak: float
    written_bytes_a_day: float


@dataclass(frozen=True)
class Choice:
    """One row: what is bought and what to expect of it. Shares are 0..1 of one node at the busiest minute."""

    name: str
    nodes: int
    raw_bytes: float
    logical_bytes: float
    hit_ratio: float
    kept_seconds: float | None  # None: nothing has to go within the source's time
    drive_writes_a_day: float
    network_share: float
    disk_share: float
    money: Money
    short_of: tuple[str, ...]  # limits that are not met


@dataclass(frozen=True)
class Purchase:
    needed: dict[str, int | None]  # nodes by limit; None: no number is enough
    binding: str
    choices: tuple[Choice, ...]  # ascending; one is named "buy"
    ideal_hit_ratio: float


class Planner:
    """Everything about one source and spec that rows share."""

    def __init__(self, reuse: Reuse, curve: Curve, spec: Spec, prices: Prices) -> None:
        self.reuse, self.curve, self.spec, self.prices = reuse, curve, spec, prices
        self.extents: Extents = extents_of(reuse, spec.layout, spec.k)
        self.ideal = curve.hit_ratio(curve.unique)
        self.source_seconds = max(reuse.accesses.seconds, 1.0)

    @property
    def stored_bytes_per_block(self) -> float:
        """Of all k+m records together."""
        return self.extents.bytes_per_block * (self.spec.k + self.spec.m)

    def blocks_of(self, sizes: list[int]) -> float:
        """Logical blocks of the *source's* traffic that these disks hold."""
        return sum(map(usable_bytes, sizes)) / self.stored_bytes_per_block / self.spec.scale

    def hit_ratio(self, blocks: float, factors: F64 | None = None) -> float:
        factors = even_rooms(self.spec.k, self.spec.m) if factors is None else factors
        return hit_ratio_in(self.curve.hit_ratio, blocks, factors)

    def demand(self, blocks: float | None) -> Demand:
        """Writes depend on what is kept: what does not hit is written again."""
        accesses, spec = self.reuse.accesses, self.spec
        at_seconds = ((accesses.times_ms - accesses.times_ms[0]) // np.uint64(1000)).astype(np.int64)
        reads, misses = self.reuse.hit_blocks(), accesses.counts - self.reuse.hit_blocks(blocks)
        of_all = spec.scale / accesses.sample * self.extents.bytes_per_block
        return Demand(
            _peak(at_seconds, reads, spec.scale) * of_all * spec.k,
            _peak(at_seconds, misses, spec.scale) * of_all * (spec.k + spec.m),
            float(misses.sum()) * of_all * (spec.k + spec.m) / self.source_seconds * 86_400,
        )

    def choice(self, name: str, sizes: list[int], factors: F64 | None = None) -> Choice:
        spec, nodes = self.spec, len(sizes)
        blocks = self.blocks_of(sizes)
        tightest = float((even_rooms(spec.k, spec.m) if factors is None else factors)[0])
        demand = self.demand(blocks * tightest)
        hit, kept = self.hit_ratio(blocks, factors), self.reuse.kept_seconds(blocks * tightest)
        network = max(demand.read_bytes_per_second_peak, demand.written_bytes_per_second_peak) / nodes / spec.network_bytes_per_second
        disk = (demand.read_bytes_per_second_peak + demand.written_bytes_per_second_peak) / nodes / spec.disk_bytes_per_second
        wear = demand.written_bytes_a_day / sum(sizes)
        tokens = self.reuse.accesses.total_input_tokens * spec.scale * MONTH_SECONDS / self.source_seconds
        money = Money.of(self.prices, nodes=nodes, raw_bytes=sum(sizes), input_tokens=tokens, hit_tokens=hit * tokens)
        logical = blocks * spec.scale * spec.layout.block_bytes
        checks = {
            "stripe": nodes < spec.k + spec.m + spec.spare_nodes,
            "hit": hit < self.ideal - spec.within_points / 100 - 1e-9,
            "retention": kept is not None and spec.keep_seconds is not None and kept < spec.keep_seconds,
            "network": network > 1,
            "disk": disk > 1,
            "wear": wear > spec.drive_writes_a_day,
        }
        short = tuple(limit for limit, missed in checks.items() if missed)
        return Choice(name, nodes, float(sum(sizes)), logical, hit, kept, wear, network, disk, money, short)

    def needed(self) -> dict[str, int | None]:
        """Nodes that each limit asks for, spare ones not counted."""
        spec = self.spec
        one = self.blocks_of([spec.size_bytes])
        wanted = self.ideal - spec.within_points / 100
        full = self.curve.unique * 2
        blocks = least(lambda value: self.hit_ratio(value) >= wanted - 1e-12, full)
        need: dict[str, int | None] = {"stripe": spec.k + spec.m, "hit": math.ceil(blocks / one)}
        if spec.keep_seconds is not None:
            room = float(self.reuse.working_set(spec.keep_seconds).max(initial=0)) / float(even_rooms(spec.k, spec.m)[0])
            need["retention"] = math.ceil(room / one)
        demand = cache(lambda nodes: self.demand(self.blocks_of([spec.size_bytes]) * nodes))
        busy = (
            ("network", spec.network_bytes_per_second, lambda d: max(d.read_bytes_per_second_peak, d.written_bytes_per_second_peak)),
            ("disk", spec.disk_bytes_per_second, lambda d: d.read_bytes_per_second_peak + d.written_bytes_per_second_peak),
            ("wear", spec.drive_writes_a_day * spec.size_bytes, lambda d: d.written_bytes_a_day),
        )
        for limit, each, asked in busy:
            need[limit] = _fewest(demand, asked, each) if each else None
        return need

    def purchase(self) -> Purchase:
        need = self.needed()
        numbers = {limit: count for limit, count in need.items() if count is not None}
        binding = max(numbers, key=lambda limit: numbers[limit])
        nodes = numbers[binding] + self.spec.spare_nodes
        fewest = self.spec.k + self.spec.m + self.spec.spare_nodes
        size = self.spec.size_bytes
        rows = [self._row("cheaper", nodes, size, factor, fewest) for factor in SMALLER]
        rows.append(self.choice("buy", [size] * nodes))
        rows += [self._row("dearer", nodes, size, factor, fewest) for factor in LARGER]
        return Purchase(need, binding, tuple(rows), self.ideal)

    def _row(self, name: str, nodes: int, size: int, factor: float, fewest: int) -> Choice:
        fewer = math.ceil(nodes * factor)
        if fewer >= fewest and fewer != nodes:
            return self.choice(name, [size] * fewer)
        return self.choice(name, [int(size * factor)] * nodes)  # as many nodes, smaller disks


def least(reaches: Callable[[float], bool], high: float) -> float:
    """The least value, to a thousandth, at which a rising condition holds; `high` where it never does."""
    low = 0.0
    while high - low > max(1.0, high * 1e-3):
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def _fewest(demand: Callable[[int], Demand], asked: Callable[[Demand], float], each: float) -> int | None:
    """The least number of nodes that give what is asked: more keep more, so they are asked to write less. None: a million are too few."""

    def enough(nodes: int) -> bool:
        return asked(demand(nodes)) <= nodes * each

    high = 1
    while not enough(high):
        high *= 2
        if high > NODES_MOST:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _peak(at_seconds: I64, values: I64, scale: float) -> float:
    """Per second and unit of scale, at the busiest minute."""
    minute, hour = (float(np.bincount(at_seconds // long, values).max(initial=0)) / long for long in (PEAK_SECONDS, RHYTHM_SECONDS))
    return hour + max(0.0, minute - hour) / math.sqrt(max(1.0, scale))


def as_dict(choice: Choice) -> dict[str, Any]:
    return asdict(choice)
