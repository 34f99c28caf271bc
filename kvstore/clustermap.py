"""The cluster map: which nodes there are, what fails together, and how blocks are cut and placed. docs/CLUSTER.md is the text to this.

A map lists every node once, in an order that never changes: a node's position is its *ordinal*, the number that placement, clients and
logs use. Each *epoch* lists the ids of its members. Epochs are only ever added: a record remembers the epoch it was written in, and
readers place it by *that* epoch's list for as long as it lives. What all processes must agree on (k, m, group bits, bucket length,
retention classes) stands in the map and nowhere else. Addresses may change without a new epoch: they do not enter placement.

    cluster = "dev"                      [[node]]                          [[epoch]]
    k = 10                               id = "node-00"                    number = 1
    m = 2                                host = "host-a"                   nodes = ["node-00", "node-01"]
    bucket_seconds = 60                  address = "10.0.0.1:7400"         pg_bits = 10
    directories = ["10.0.0.1:7399"]      admin = "10.0.0.1:7401"
                                         weight = 1.0
    [classes.chat]                       disk = "nvme0"
    id = 2
    keep = "7d"
    share = 1.0
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError
from kvstore.tomlfile import Table, TomlFile
from kvstore.units import parse_bytes, parse_seconds
from kvstore.wholefile import write_whole

K_MAX: Final = 32
M_MAX: Final = 4
NODES_MAX: Final = 65_536
DIRECTORIES_MAX: Final = 64
PG_BITS_MAX: Final = 24
GROUPS_PER_NODE: Final = 1000  # shards of 1,000 groups: standard deviation 3.2%, the fullest of thousands under +12%
CLASSES_MAX: Final = 16
EARLY_REASONS: Final = ("lru", "share")  # of evictions that bound what a class keeps: for room; "expired" and an owner's "quota" do not
_NAME: Final = r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?"
_NAME_FORM: Final = "a-z, 0-9, - and ., up to 63 characters"


@dataclass(frozen=True, slots=True)
class RetentionClass:
    """How long what is asked for under this name is kept after its last use. `id` is what stands in records and on the wire."""

    name: str
    id: int
    keep_seconds: float  # 0: dropped first, kept only while there is room
    share: float = 1.0  # of a node's capacity; past it this class loses its own oldest first, and only when room is needed


ADMISSIONS: Final = ("all", "second-touch")  # what is written at all (kvstore/client/admission.py)
POLICIES: Final = ("lru", "s3fifo", "sieve")  # what goes when room is needed (kvstore/gc/replacement.py)


@dataclass(frozen=True, slots=True)
class Rules:
    """What all nodes and clients have to do alike, lest some of an extent's shards be kept and others not."""

    policy: str = "lru"
    admit: str = "all"
    write_budget_bytes: int = 0  # of one node in a day; 0: none

    @property
    def asks_first(self) -> bool:
        """A writer asks the nodes before it writes."""
        return self.admit != "all" or self.write_budget_bytes > 0


NO_RULES: Final = Rules()

DEFAULT_CLASSES: Final = (
    RetentionClass("none", 0, 0.0),
    RetentionClass("batch", 1, 3600.0, 0.02),
    RetentionClass("chat", 2, 7 * 86400.0),
    RetentionClass("agent", 3, 3 * 86400.0),
)


@dataclass(frozen=True, slots=True)
class Node:
    """One storage daemon: one disk of one host. Unit of failure: `host`, then the disk."""

    id: str
    host: str
    address: str  # "ip:port" of the data protocol
    admin_address: str = ""  # "ip:port" of gRPC
    metrics_address: str = ""  # "ip:port" of HTTP: /metrics, /livez, /readyz
    weight: float = 1.0  # share of placement; usually the disk's size in TB
    disk: str = ""
    ordinal: int = 0  # position in the map's list of nodes, the same in every epoch


@dataclass(frozen=True, slots=True)
class Epoch:
    """One version of the membership. `nodes` are in map order; their `ordinal` is the map's, not the position in this tuple."""

    number: int
    nodes: tuple[Node, ...]
    pg_bits: int


@dataclass(frozen=True)
class ClusterMap:
    """A valid map. Build it with load, parse or local: they check everything and complain with file, line and field."""

    cluster_id: str
    k: int
    m: int
    nodes: tuple[Node, ...]
    epochs: Mapping[int, Epoch]
    bucket_seconds: int = 60
    classes: Mapping[str, RetentionClass] = field(default_factory=lambda: {c.name: c for c in DEFAULT_CLASSES})
    rules: Rules = NO_RULES
    directories: tuple[str, ...] = ()  # "ip:port" of the window directories, the same texts everywhere: keys are spread by them
    path: Path | None = field(default=None, compare=False)  # the file that it was loaded from, which may get a newer epoch

    @cached_property
    def epoch(self) -> int:
        """The newest epoch's number: new extents are placed by it."""
        return max(self.epochs)

    @property
    def pg_bits(self) -> int:
        """Of the newest epoch."""
        return self.epochs[self.epoch].pg_bits

    @property
    def newest(self) -> Epoch:
        return self.epochs[self.epoch]

    @cached_property
    def tag(self) -> bytes:
        """16 bytes that name the cluster in a HELLO: the front of BLAKE2b-256 of its id."""
        return hashlib.blake2b(self.cluster_id.encode(), digest_size=32).digest()[:16]

    def node(self, node_id: str) -> Node:
        """Raises ConfigError E130 when the map has no such node."""
        for node in self.nodes:
            if node.id == node_id:
                return node
        what = f'node "{node_id}" is not in the map of cluster {self.cluster_id}'
        raise ConfigError("E135", what, fix="add a [[node]] for it, or correct the id")

    @classmethod
    def load(cls, path: str | Path) -> ClusterMap:
        """Reads and checks a map file. Raises ConfigError, with file and line."""
        return replace(_read(TomlFile.load(path)), path=Path(path))

    @classmethod
    def parse(cls, text: str, name: str = "map") -> ClusterMap:
        return _read(TomlFile(text, name))

    @classmethod
    def local(
        cls,
        nodes: Sequence[Node],
        *,
        cluster_id: str = "dev",
        k: int = 10,
        m: int = 2,
        bucket_seconds: int = 60,
        classes: Sequence[RetentionClass] = DEFAULT_CLASSES,
        rules: Rules = NO_RULES,
    ) -> ClusterMap:
        """A map of one epoch over `nodes`, checked like a file."""
        listed = tuple(replace(node, ordinal=i) for i, node in enumerate(nodes))
        epochs = {1: Epoch(1, listed, pg_bits_for(len(listed), k + m))}
        return cls.parse(cls(cluster_id, k, m, listed, epochs, bucket_seconds, {c.name: c for c in classes}, rules).to_toml())

    def with_epoch(self, nodes: Sequence[Node], member_ids: Sequence[str]) -> ClusterMap:
        """The next epoch: `nodes` are appended to the list, `member_ids` are its members. What was there stays."""
        listed = self.nodes + tuple(replace(node, ordinal=len(self.nodes) + i) for i, node in enumerate(nodes))
        wanted = set(member_ids)
        members = tuple(node for node in listed if node.id in wanted)
        if missing := wanted - {node.id for node in members}:
            what = f'node "{min(missing)}" is not in the map of cluster {self.cluster_id}'
            raise ConfigError("E135", what, fix="give it among the new nodes")
        number = self.epoch + 1
        epoch = Epoch(number, members, pg_bits_for(len(members), self.k + self.m))
        return ClusterMap.parse(replace(self, nodes=listed, epochs={**self.epochs, number: epoch}).to_toml())

    def check_successor(self, new: ClusterMap) -> None:
        """Raises ConfigError E133 where `new` changes what records were placed by: those would no longer be found."""
        fixed = ("cluster_id", "k", "m", "bucket_seconds")
        changed = [name.removesuffix("_id") for name in fixed if getattr(self, name) != getattr(new, name)]
        mine, theirs = ([(n.id, n.host, n.weight) for n in found.nodes] for found in (self, new))
        if theirs[: len(mine)] != mine:
            changed.append("nodes")
        for number, old in self.epochs.items():
            found = new.epochs.get(number, old)
            if ([n.id for n in found.nodes], found.pg_bits) != ([n.id for n in old.nodes], old.pg_bits):
                changed.append(f"epoch {number}")
        if changed:
            what = f"the new map changes {', '.join(changed)} of the map in use"
            raise ConfigError("E133", what, fix="put that back, and append a [[node]] or a new [[epoch]] instead")

    def to_toml(self) -> str:
        """Text that parse reads back to an equal map."""
        lines = [f"cluster = {_quote(self.cluster_id)}", f"k = {self.k}", f"m = {self.m}", f"bucket_seconds = {self.bucket_seconds}"]
        lines += [f"policy = {_quote(self.rules.policy)}"] if self.rules.policy != "lru" else []
        lines += [f"admit = {_quote(self.rules.admit)}"] if self.rules.admit != "all" else []
        lines += [f"write_budget = {self.rules.write_budget_bytes}"] if self.rules.write_budget_bytes else []
        lines += [f"directories = [{', '.join(map(_quote, self.directories))}]"] if self.directories else []
        for c in sorted(self.classes.values(), key=lambda c: c.id):
            lines += ["", f"[classes.{c.name}]", f"id = {c.id}", f"keep = {c.keep_seconds!r}"]
            default = next((known.share for known in DEFAULT_CLASSES if known.name == c.name), 1.0)
            lines += [f"share = {c.share!r}"] if c.share != default else []
        for n in self.nodes:
            lines += ["", "[[node]]", f"id = {_quote(n.id)}", f"host = {_quote(n.host)}", f"address = {_quote(n.address)}"]
            optional = (("admin", n.admin_address), ("metrics", n.metrics_address), ("disk", n.disk))
            lines += [f"{key} = {_quote(value)}" for key, value in optional if value]
            lines += [f"weight = {n.weight!r}"]
        for number in sorted(self.epochs):
            epoch = self.epochs[number]
            members = ",\n".join(f"  {_quote(n.id)}" for n in epoch.nodes)
            lines += ["", "[[epoch]]", f"number = {number}", f"pg_bits = {epoch.pg_bits}", f"nodes = [\n{members},\n]"]
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        """Writes the map so that a reader sees the old one or the new one, never a part."""
        write_whole(Path(path), self.to_toml())


def pg_bits_for(nodes_count: int, shards_count: int) -> int:
    """Bits of a placement group number such that a node is in about GROUPS_PER_NODE groups or more, up to twice that."""
    groups = GROUPS_PER_NODE * max(nodes_count, 1) / shards_count
    return min(PG_BITS_MAX, max(1, math.ceil(math.log2(groups)))) if groups > 1 else 1


def _read(file: TomlFile) -> ClusterMap:
    top = file.table()
    cluster_id = top.text("cluster", pattern=_NAME, form=_NAME_FORM)
    k = top.integer("k", 1, K_MAX, 10)
    m = top.integer("m", 0, M_MAX, 2)
    bucket_seconds = top.integer("bucket_seconds", 1, 3600, 60)
    classes = _read_classes(top)
    nodes = _read_nodes(top.tables("node"), file)
    epochs = _read_epochs(top.tables("epoch"), {node.id: node for node in nodes}, k + m, file)
    rules = Rules(
        top.text("policy", "lru", pattern="|".join(POLICIES), form=", ".join(POLICIES)),
        top.text("admit", "all", pattern="|".join(ADMISSIONS), form=", ".join(ADMISSIONS)),
        top.parsed("write_budget", parse_bytes, 0),
    )
    directories = _read_directories(top)
    top.done()
    return ClusterMap(cluster_id, k, m, nodes, epochs, bucket_seconds, classes, rules, directories)


def _read_directories(top: Table) -> tuple[str, ...]:
    found = tuple(top.texts("directories", []))
    for address in found:
        _check_address(top, "directories", address, optional=False)
    if len(set(found)) != len(found):
        raise top.fail("E133", "directories", "a directory is listed twice", "list each once")
    if len(found) > DIRECTORIES_MAX:
        raise top.fail("E131", "directories", f"{len(found)} directories", f"at most {DIRECTORIES_MAX} in one cluster")
    return found


def _read_classes(top: Table) -> dict[str, RetentionClass]:
    classes = {c.name: c for c in DEFAULT_CLASSES}
    for name, table in top.subtables("classes").items():
        default = classes.get(name)
        number = table.integer("id", 0, CLASSES_MAX - 1, default.id if default else ...)
        keep = table.parsed("keep", parse_seconds, default.keep_seconds if default else ...)
        share = table.number("share", 0.0, 1.0, default.share if default else 1.0)
        table.done()
        classes[name] = RetentionClass(name, number, keep, share)
        for other in classes.values():
            if other.id == number and other.name != name:
                raise table.fail("E134", "id", f'classes "{other.name}" and "{name}" share id {number}', "give each class its own id")
    return classes


def _read_nodes(tables: list[Table], file: TomlFile) -> tuple[Node, ...]:
    nodes: list[Node] = []
    taken: dict[str, str] = {}
    for table in tables:
        node_id = table.text("id", pattern=_NAME, form=_NAME_FORM)
        node = Node(
            id=node_id,
            host=table.text("host", node_id, pattern=_NAME, form=_NAME_FORM),
            address=_address(table, "address", ...),
            admin_address=_address(table, "admin", ""),
            metrics_address=_address(table, "metrics", ""),
            weight=table.number("weight", 1e-6, 1e6, 1.0),
            disk=table.text("disk", ""),
            ordinal=len(nodes),
        )
        table.done()
        for key, value in (("id", node.id), ("address", node.address), ("admin", node.admin_address), ("metrics", node.metrics_address)):
            slot = value if key != "id" else f"id {value}"
            if value and slot in taken:
                raise table.fail("E133", key, f'"{key}" {value} is taken by node {taken[slot]}', "give each node its own")
            taken[slot] = node.id
        nodes.append(node)
    if not nodes:
        raise file.fail("E130", "no [[node]]", "list at least one node")
    if len(nodes) > NODES_MAX:
        raise file.fail("E131", f"{len(nodes)} nodes", f"at most {NODES_MAX} in one cluster")
    return tuple(nodes)


def _read_epochs(tables: list[Table], nodes: Mapping[str, Node], shards_count: int, file: TomlFile) -> dict[int, Epoch]:
    epochs: dict[int, Epoch] = {}
    for table in tables:
        number = table.integer("number", 1, 2**31 - 1)
        ids = table.texts("nodes")
        wanted: set[str] = set()
        for node_id in ids:
            if node_id not in nodes:
                what = f'epoch {number} lists "{node_id}", which is no [[node]]'
                raise table.fail("E133", "nodes", what, "add the node, or correct the id")
            if node_id in wanted:
                raise table.fail("E133", "nodes", f'epoch {number} lists "{node_id}" twice', "list each member once")
            wanted.add(node_id)
        if not ids:
            raise table.fail("E133", "nodes", f"epoch {number} has no members", "list at least one node")
        pg_bits = table.integer("pg_bits", 1, PG_BITS_MAX, pg_bits_for(len(ids), shards_count))
        table.done()
        if epochs and number <= max(epochs):
            what = f"epoch {number} stands after epoch {max(epochs)}"
            raise table.fail("E133", "number", what, "number epochs upwards; add new ones at the end")
        epochs[number] = Epoch(number, tuple(node for node in nodes.values() if node.id in wanted), pg_bits)
    if not epochs:
        raise file.fail("E130", "no [[epoch]]", "add [[epoch]] with number = 1 and nodes = [...]")
    return epochs


_ADDRESS: Final = r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):\d{1,5}"
_ADDRESS_FORM: Final = "ip:port, as in 10.0.0.1:7400"


def _address(table: Table, key: str, default: object) -> str:
    """ "ip:port" or "[ipv6]:port"; "" only where the default says so."""
    value = table.text(key, default, pattern=rf"|{_ADDRESS}", form=_ADDRESS_FORM)
    _check_address(table, key, value, optional=default is not ...)
    return value


def _check_address(table: Table, key: str, value: str, *, optional: bool) -> None:
    fits = re.fullmatch(_ADDRESS, value) is not None and 0 < int(value.rpartition(":")[2]) < 65536
    if not (fits or (optional and not value)):
        raise table.fail("E132", key, f'"{key}" is "{value}"', f"write {_ADDRESS_FORM}")


def _quote(text: str) -> str:
    return json.dumps(text)  # a JSON string of printable characters is a TOML basic string
