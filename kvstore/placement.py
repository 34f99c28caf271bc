"""Placement: which k+m nodes hold the shards of a key. docs/CLUSTER.md is the text to this.

A key's top `pg_bits` bits name its placement group. A group's list is a two-level weighted rendezvous: hosts are ranked by score, then the
disks inside each host; hosts take turns in rank order, each giving its next best disk, until k+m are chosen. With k+m hosts or more every
shard is on its own host; with fewer, hosts carry shards as evenly as their disks allow, and no disk carries a second shard before every
disk carries one.

Set in stone (a client and a node that disagree find nothing): the score. seed = xxh3-64(id of host or node); h = xxh3-64 of the group as
u64 LE, seeded; u = (top 53 bits of h + 1/2) / 2^53; score = -ln(u) / weight, the lowest wins, ties go to the lower position.
Only IEEE +, -, *, / on float64 are used (the logarithm too), so every machine computes the same bits; tests hold golden vectors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.clustermap import ClusterMap, Node

_U64 = NDArray[np.uint64]
_F64 = NDArray[np.float64]

_PRIME: Final = np.uint64(0x9FB21C651E98DF25)  # of XXH3's rrmxmx step
_BITFLIP: Final = np.uint64(0x1CAD21F72C81017C ^ 0xDB979083E96DD4DE)  # the default secret's words for inputs of 4 to 8 bytes
_SQRT_HALF: Final = 0.7071067811865476
_LN2: Final = 0.6931471805599453
_TABLE_GROUPS_QUICK: Final = 1 << 16
_CHUNK_SCORES: Final = 1 << 19  # scores computed at once: 4 MB of float64, about the size of a cache


def xxh3_64_u64(values: _U64, seeds: _U64) -> _U64:
    """xxh3-64 of each value as 8 little-endian bytes, with a seed each; shapes broadcast. Equal to the xxhash library's."""
    with np.errstate(over="ignore"):
        low = seeds & np.uint64(0xFFFFFFFF)
        seeds = seeds ^ (low.astype(np.uint32).byteswap().astype(np.uint64) << np.uint64(32))
        h = ((values << np.uint64(32)) | (values >> np.uint64(32))) ^ (_BITFLIP - seeds)
        h = h ^ _rotate(h, 49) ^ _rotate(h, 24)
        h *= _PRIME
        h ^= (h >> np.uint64(35)) + np.uint64(8)
        h *= _PRIME
        mixed: _U64 = h ^ (h >> np.uint64(28))
        return mixed


def scores(groups: _U64, seeds: _U64, weights: _F64) -> _F64:
    """-ln(u) / weight for each (group, member): shape (groups, members). The lowest scores win."""
    return _score(xxh3_64_u64(groups[:, None], seeds[None, :]), weights[None, :])


def _score(h: _U64, weights: _F64) -> _F64:
    u = ((h >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -_ln(u) / weights


def _ln(u: _F64) -> _F64:
    """Natural logarithm to 1e-15, from basic operations only: libraries' own logarithms differ in the last bit between machines."""
    mantissa, exponent = np.frexp(u)
    small = mantissa < _SQRT_HALF
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)  # |s| <= 0.172: s^19 / 19 is below 1e-15
    z = s * s
    series = np.full_like(z, 1.0 / 17.0)
    for odd in (15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = series * z + 1.0 / odd
    return 2.0 * s * series + (exponent - small) * _LN2


def _rotate(h: _U64, bits: int) -> _U64:
    return (h << np.uint64(bits)) | (h >> np.uint64(64 - bits))


def _seed(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())


@dataclass(frozen=True, slots=True)
class Losses:
    """The worst case over all groups: this many may be lost, whichever they are, and every extent can still be read."""

    hosts: int
    nodes: int
    shards_per_host_max: int
    shards_per_node_max: int
    m: int
    lost: int = 0  # nodes taken as gone already
    readable: bool = True  # False: more is lost already than the code survives, so some extents cannot be read

    @property
    def full(self) -> bool:
        """True where the code's whole strength is there: any m hosts."""
        return self.hosts >= self.m

    def __str__(self) -> str:
        more = "more " if self.lost else ""

        def phrase(count: int, noun: str) -> str:
            return f"NO {more}{noun}" if count == 0 else f"any {count} {more}{noun}{'s' if count > 1 else ''}"

        if not self.readable:
            return "some extents cannot be read: more shards are lost than the code survives"
        if self.shards_per_host_max == 1:
            return f"reads survive {phrase(self.hosts, 'host')} lost"
        return (
            f"reads survive {phrase(self.hosts, 'host')} lost, {phrase(self.nodes, 'node')} lost: "
            f"up to {self.shards_per_host_max} shards of an extent are on one host, {self.shards_per_node_max} on one node"
        )


class Placement:
    """The ordered lists of one epoch. Groups are placed when first asked for; `table()` places them all. Safe to share between threads."""

    def __init__(self, cluster_map: ClusterMap, epoch: int | None = None) -> None:
        self.epoch = cluster_map.epoch if epoch is None else epoch
        members = cluster_map.epochs[self.epoch]
        self.k, self.m = cluster_map.k, cluster_map.m
        self.shards_count = self.k + self.m
        self.pg_bits = members.pg_bits
        self.pg_count = 1 << members.pg_bits
        self._map_nodes = cluster_map.nodes
        by_host: dict[str, list[Node]] = {}
        for node in members.nodes:
            by_host.setdefault(node.host, []).append(node)
        hosts = sorted(by_host)  # by name: the order of a map's nodes must not matter
        self._disks = [sorted(by_host[host], key=lambda node: node.id) for host in hosts]
        self._host_seeds = np.array([_seed(host) for host in hosts], np.uint64)
        self._host_weights = np.array([sum(node.weight for node in disks) for disks in self._disks], np.float64)
        # All disks of all hosts as one row, host after host: the second level for any choice of hosts is a gather.
        flat = [node for disks in self._disks for node in disks]
        self._ordinals = np.array([node.ordinal for node in flat], np.int32)
        self._disk_seeds = np.array([_seed(node.id) for node in flat], np.uint64)
        self._disk_weights = np.array([node.weight for node in flat], np.float64)
        counts = np.array([len(disks) for disks in self._disks], np.int64)
        self._first_disk = np.concatenate([[0], np.cumsum(counts)[:-1]])
        self._disk_counts = counts
        self._lists: dict[int, tuple[int, ...]] = {}
        self._table: NDArray[np.int32] | None = None

    def pg_of(self, keys: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """Group of each key (n, 32): the top pg_bits of its first 4 bytes, big-endian."""
        return _fronts(keys) >> np.uint32(32 - self.pg_bits)

    def nodes_of(self, pg: int) -> tuple[int, ...]:
        """k+m node ordinals (positions in the map's list of nodes); the i-th holds shard i. Distinct where there are k+m nodes or more."""
        if not 0 <= pg < self.pg_count:
            raise ValueError(f"placement group {pg} is not below {self.pg_count}")
        found = self._lists.get(pg)
        if found is None:
            row = self._table[pg] if self._table is not None else self._place(np.array([pg], np.uint64))[0]
            found = self._lists[pg] = tuple(int(ordinal) for ordinal in row)
        return found

    def table(self) -> NDArray[np.int32]:
        """Every group's list: (2^pg_bits, k+m) node ordinals. Computed once; read-only."""
        if self._table is None:
            table = self.lists_of(np.arange(self.pg_count, dtype=np.uint64))
            table.flags.writeable = False
            self._table = table
        return self._table

    def lists_of(self, groups: _U64) -> NDArray[np.int32]:
        """The lists of some groups, computed anew: (groups, k+m) node ordinals."""
        step = max(1, _CHUNK_SCORES // max(len(self._disks), self.shards_count * int(self._disk_counts.max())))
        lists = np.empty((len(groups), self.shards_count), np.int32)
        for at in range(0, len(groups), step):
            lists[at : at + step] = self._place(groups[at : at + step])
        return lists

    def shares(self) -> dict[int, float]:
        """Shards of each member, by ordinal, divided by what its weight entitles it to: 1.0 is even."""
        counts = np.bincount(self.table().ravel(), minlength=len(self._map_nodes))
        fair = self.pg_count * self.shards_count / float(self._disk_weights.sum())
        return {int(o): float(counts[o] / (fair * w)) for o, w in zip(self._ordinals, self._disk_weights, strict=True)}

    def losses_survived(self, lost: Collection[int] = ()) -> Losses:
        """How many hosts and nodes more may fail, whichever they are, before some extent cannot be read; `lost` nodes (ordinals) are gone
        already."""
        if len(self._disks) >= self.shards_count:
            if not lost:
                return Losses(self.m, self.m, 1, 1, self.m)
            if len(lost) <= self.m and self.pg_count > _TABLE_GROUPS_QUICK:
                # No more than m can be lost of any group: take the worst case rather than half a minute for the whole table.
                return Losses(self.m - len(lost), self.m - len(lost), 1, 1, self.m, len(lost))
        table = self.table()
        gone = np.isin(table, np.fromiter(lost, np.int32, len(lost)))
        spare = self.m - gone.sum(axis=1)
        if len(self._disks) >= self.shards_count:  # one shard a host: every host lost costs at most one
            left = int(spare.min())
            return Losses(max(left, 0), max(left, 0), 1, 1, self.m, len(lost), left >= 0)
        host_of = {int(o): h for h, disks in enumerate(self._disks) for o in (node.ordinal for node in disks)}
        hosts, nodes, per_host_max, per_node_max = self.m, self.m, 1, 1
        for row, spent in {(tuple(row), int(left)) for row, left in zip(table.tolist(), spare, strict=True)}:
            held = [o for o in row if o not in lost]
            by_host, by_node = Counter(host_of[o] for o in held), Counter(held)
            hosts = min(hosts, _losable(sorted(by_host.values(), reverse=True), spent))
            nodes = min(nodes, _losable(sorted(by_node.values(), reverse=True), spent))
            per_host_max = max(per_host_max, *by_host.values(), 1)
            per_node_max = max(per_node_max, *by_node.values(), 1)
        return Losses(hosts, nodes, per_host_max, per_node_max, self.m, len(lost), int(spare.min()) >= 0)

    def _place(self, groups: _U64) -> NDArray[np.int32]:
        host_scores = scores(groups, self._host_seeds, self._host_weights)
        if len(self._disks) >= self.shards_count:
            return self._place_on_hosts(groups, _lowest(host_scores, self.shards_count))
        return self._place_in_turns(groups, np.argsort(host_scores, axis=1, kind="stable"))

    def _place_on_hosts(self, groups: _U64, hosts: NDArray[np.int64]) -> NDArray[np.int32]:
        """The best disk of each chosen host: (groups, k+m) ordinals."""
        place = np.arange(int(self._disk_counts.max()))
        at = np.minimum(self._first_disk[hosts][:, :, None] + place, len(self._ordinals) - 1)
        score = _score(xxh3_64_u64(groups[:, None, None], self._disk_seeds[at]), self._disk_weights[at])
        score[place >= self._disk_counts[hosts][:, :, None]] = np.inf
        chosen = np.take_along_axis(at, score.argmin(axis=2)[:, :, None], axis=2)
        ordinals: NDArray[np.int32] = self._ordinals[chosen[:, :, 0]]
        return ordinals

    def _place_in_turns(self, groups: _U64, host_ranks: NDArray[np.int64]) -> NDArray[np.int32]:
        """Fewer hosts than shards: hosts take turns with their next best disk; when no disk is left, all may be used again."""
        disk_ranks = [
            np.argsort(scores(groups, self._disk_seeds[at : at + n], self._disk_weights[at : at + n]), axis=1, kind="stable") + at
            for at, n in zip(self._first_disk, self._disk_counts, strict=True)
        ]
        out = np.empty((len(groups), self.shards_count), np.int32)
        for row, ranks in enumerate(host_ranks):
            order = self._turns([disk_ranks[h][row] for h in ranks])
            out[row] = self._ordinals[order]
        return out

    def _turns(self, queues: list[Any]) -> list[int]:
        order: list[int] = []
        turn = 0
        while len(order) < self.shards_count:
            taken = [int(queue[turn]) for queue in queues if turn < len(queue)]
            order += taken
            turn = turn + 1 if taken else 0
        return order[: self.shards_count]


def _lowest(score: _F64, count: int) -> NDArray[np.int64]:
    """Columns of the `count` lowest scores of each row, lowest first, ties to the lower column."""
    if score.shape[1] > 4 * count:
        some = np.sort(np.argpartition(score, count, axis=1)[:, : count + 1], axis=1)
        near = np.take_along_axis(score, some, axis=1)
        order = np.argsort(near, axis=1, kind="stable")[:, :count]
        return np.take_along_axis(some, order, axis=1)
    return np.argsort(score, axis=1, kind="stable")[:, :count]


def _losable(counts: list[int], spare: int) -> int:
    """How many of the fullest may go before more than `spare` shards are lost."""
    lost = 0
    for done, count in enumerate(counts):
        lost += count
        if lost > spare:
            return done
    return len(counts)


def _fronts(keys: NDArray[np.uint8]) -> NDArray[np.uint32]:
    fronts: NDArray[np.uint32] = np.ascontiguousarray(keys[:, :4]).view(">u4").reshape(-1).astype(np.uint32)
    return fronts


def lists_by_epoch(placements: Mapping[int, Placement], keys: NDArray[np.uint8]) -> NDArray[np.int32]:
    """(epochs, n, k+m) ordinals: the lists of `keys` (n, 32) in each epoch, the newest epoch first."""
    newest_first = [placements[epoch] for epoch in sorted(placements, reverse=True)]
    lists = np.empty((len(newest_first), len(keys), newest_first[0].shards_count), np.int32)
    fronts = _fronts(keys)
    for placement, into in zip(newest_first, lists, strict=True):
        placement.table().take(fronts >> np.uint32(32 - placement.pg_bits), axis=0, out=into, mode="clip")  # none is beyond: a quicker path
    return lists


def nodes_of_writings(placements: Mapping[int, Placement], keys: NDArray[np.uint8], epochs: _U64) -> NDArray[np.int32]:
    """(n, k+m) ordinals: who holds which shard of each of `keys`, by the lists of the epoch it was written in; -1 where nobody does."""
    written = set(epochs.tolist())
    if len(written) == 1 and (only := placements.get(*written)):  # nearly always: spares a load's first byte 50 us
        nodes: NDArray[np.int32] = only.table()[only.pg_of(keys)]
        return nodes
    known = [(epoch, placements[epoch]) for epoch in written if epoch in placements]  # else of a map not known here: lost
    nodes = np.full((len(keys), next(iter(placements.values())).shards_count), -1, np.int32)
    for epoch, placement in known:
        mine = epochs == epoch
        nodes[mine] = placement.table()[placement.pg_of(keys[mine])]
    return nodes
