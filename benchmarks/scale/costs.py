"""Unit costs of this machine: processor time of real daemons, asked over real sockets in the shapes that a large cluster would see.

In a cluster of thousands a message carries one or two keys and a READ or WRITE one extent, so that is what is sent here: a cost per key
taken from twelve daemons, each asked for fifty keys at once, would be far too good. Processor time is user and kernel time of the daemon's
process (its CPU clock) until it rests again, so that what it does later (touches into the index, seals) counts; what the kernel does in
threads of its own (writing pages back) and what the asking side spends does not.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.bench_directory import AGENTS, Asker, directory, mixed, operations_per_core, processor_seconds
from benchmarks.bench_directory import fill as fill_directory
from benchmarks.harness import interleaved
from benchmarks.prompts import LAYOUT, Blocks, are_bytes_of, bytes_of, chain_keys, pretouched
from benchmarks.rig import forget_pages
from benchmarks.scale.derive import SHARD_BYTES
from benchmarks.scale.parameters import SHARDS, K, M, Parameters
from kvstore import wire
from kvstore.client import Client, ClientConfig
from kvstore.client.ticket import Ticket
from kvstore.kernels import _native
from kvstore.record import Record, build, head_bytes_of, padded_bytes
from kvstore.server.local import LocalCluster
from kvstore.wire import Role, Verb

OWNER: Final = bytes(16)
BUCKET_SECONDS: Final = 60
CONNECTIONS: Final = 16  # each with one message on its way: how many a daemon takes up at once is up to it
AT_ONCE: Final = 8  # stores and loads: a daemon that is busy wakes up less often for each
REST_SECONDS: Final = 0.25
REST_SHARE_MAX: Final = 0.04  # of a core, all daemons together: what an idle daemon's own clocks take
REST_TIMEOUT_SECONDS: Final = 15.0
CAPACITY_BYTES: Final = 1 << 40
MAP_BYTES: Final = 4 << 30


@dataclass(frozen=True)
class Size:
    """How much is measured. Counts, but for what is named otherwise."""

    index_extents: int
    rounds: int  # of CONNECTIONS messages each
    stored_blocks: int  # stored and loaded, in extents of the shape that is asked for
    segments: int  # of an index that is rebuilt
    segment_bytes: int
    directory_entries: int
    prompts: int  # whose messages are counted
    passes: int  # of reading from the disk and from memory, in turn
    idle_seconds: float  # for which daemons that nobody asks are looked at
    later_seconds: float  # 1.2 or more: a daemon brings touches into its index, and syncs, each second


DEFAULT: Final = Size(100_000, 150, 1_000, 2, 256 << 20, 200_000, 8, 3, 2.0, 1.2)
SMALL: Final = Size(8_000, 40, 200, 1, 4 << 20, 16_384, 2, 1, 0.5, 0.1)


@dataclass(frozen=True)
class Message:
    """Processor time of one message with n keys: message_us + n x key_us. Microseconds."""

    message_us: float
    key_us: float

    def per_key_us(self, keys: float) -> float:
        """Of each key, where a message carries `keys`, 1 or more."""
        return self.message_us / max(keys, 1.0) + self.key_us


@dataclass(frozen=True)
class Costs:
    """All of one run. MB are 10^6 bytes that daemons sent or took in, parity included where it was."""

    discover: Message
    promise: Message
    read_us_per_mb: float  # from the disk: pages dropped before
    read_warm_us_per_mb: float
    write_us_per_mb: float
    index_bytes_per_extent: float
    filter_bytes_per_extent: float
    record_bytes: float  # of a mean stored extent
    rebuild_seconds_per_gb: float  # of records, their pages dropped before
    rebuilt_bytes: float
    directory_operations_per_core: float  # a second, one key a message
    io: str  # engine that the daemons chose


Say = Callable[[str], None]


def measure(given: Parameters, size: Size, scratch: Path, say: Say) -> Costs:
    """Takes some 40 s by DEFAULT and about 2 GB in `scratch`. Raises what the cluster raises: Unreachable, ConfigError, StorageError."""
    say("messages: one daemon with a full index")
    discover, promise, index_bytes, filter_bytes = message_costs(given, size, scratch / "messages")
    say("reads and writes: 12 daemons, an extent a message")
    io, written, cold, warm = byte_costs(given, size, scratch / "bytes")
    say("rebuilding an index from true-sized records")
    rebuilt_bytes, rebuild_seconds = rebuilding(given, size, scratch / "rebuild")
    say("window directory")
    operations = directory_operations(size)
    return Costs(
        discover, promise, cold, warm, written, index_bytes, filter_bytes, record_bytes_of(given.stored_extent_blocks),
        rebuild_seconds / (rebuilt_bytes / 1e9), rebuilt_bytes, operations, io,
    )  # fmt: skip


def record_bytes_of(blocks: int) -> int:
    """Bytes on disk of one shard of an extent of so many blocks: head, checks, shards, padding."""
    planes = len(LAYOUT.planes(K))
    return padded_bytes(head_bytes_of(planes, 0, blocks) + blocks * planes * (8 + 16) + blocks * SHARD_BYTES)


# --- messages ---


def message_costs(given: Parameters, size: Size, folder: Path) -> tuple[Message, Message, float, float]:
    """Discovery, promise with touch; index and filter bytes of an extent."""
    rng = np.random.default_rng(7)
    keys = rng.integers(0, 256, (size.index_extents, 32), dtype=np.uint8)
    ids = rng.integers(1, 1 << 63, size.index_extents, dtype=np.uint64)
    cluster = LocalCluster(folder, 1, k=1, m=0, capacity_bytes=CAPACITY_BYTES, bucket_seconds=BUCKET_SECONDS)
    cluster.node_directory(0).mkdir(parents=True)
    index_bytes, filter_bytes = _fill_index(cluster.node_directory(0), keys, ids, given.stored_extent_blocks)
    with cluster, ExitStack() as stack:
        pid, address = cluster.pid(0), cluster.map.nodes[0].address
        assert pid is not None
        host, _, port = address.rpartition(":")
        hello = wire.Hello(Role.SMALL, cluster.map.tag, cluster.map.epoch)
        open_ones = [stack.enter_context(wire.Connection((host, int(port)), hello, 60.0)) for _ in range(CONNECTIONS)]
        meter = _Meter([pid], size)
        # Of a prompt's keys those that begin an extent are there; of a hit's they are, and nothing else is asked for.
        there = given.extent_blocks**-1

        def discovery(count: int) -> bytes:
            asked = [keys[rng.integers(size.index_extents)].tobytes() if rng.random() < there else rng.bytes(32) for _ in range(count)]
            return wire.encode(Verb.DISCOVER, wire.encode_discover(asked, epoch=cluster.map.epoch))

        untouched = iter(rng.permutation(size.index_extents).tolist())
        bucket = int(time.time()) // BUCKET_SECONDS

        def promise(count: int) -> bytes:
            names = [(keys[at].tobytes(), int(ids[at])) for at in (next(untouched) for _ in range(count))]
            return wire.encode(Verb.PROMISE, wire.encode_promise(names, epoch=cluster.map.epoch, bucket=bucket))

        return _line(open_ones, meter, size, discovery), _line(open_ones, meter, size, promise), index_bytes, filter_bytes


MANY_KEYS: Final = 32


def _line(open_ones: Sequence[wire.Connection], meter: _Meter, size: Size, make: Callable[[int], bytes]) -> Message:
    """The line through the costs of messages of one key and of MANY_KEYS."""
    one, many = (_message_us(open_ones, meter, rounds, make, n) for rounds, n in ((size.rounds, 1), (max(2, size.rounds // 6), MANY_KEYS)))
    key = max(0.0, (many - one) / (MANY_KEYS - 1))
    return Message(max(0.0, one - key), key)


def _message_us(open_ones: Sequence[wire.Connection], meter: _Meter, rounds: int, make: Callable[[int], bytes], keys: int) -> float:
    frames = [[make(keys) for _ in open_ones] for _ in range(rounds + 1)]

    def turn(row: Sequence[bytes]) -> None:
        for connection, frame in zip(open_ones, row, strict=True):
            connection.send(frame)
        for connection in open_ones:
            if (answer := connection.receive()).status:
                raise RuntimeError(f"answered with {answer.status}")

    turn(frames[0])
    with meter.spent() as spent:
        for row in frames[1:]:
            turn(row)
    return spent[0] / (rounds * len(open_ones)) * 1e6


def _fill_index(folder: Path, keys: Blocks, ids: np.ndarray, blocks: int) -> tuple[float, float]:
    """Index and filter bytes of an extent of `blocks` blocks."""
    store = _native.Store(str(folder), capacity_bytes=CAPACITY_BYTES, index_map_bytes=MAP_BYTES, bucket_seconds=BUCKET_SECONDS)
    if not store.wait_started(60):
        raise RuntimeError("the store did not start")
    empty_filter_bytes = store.stats()["filter_bytes"]
    bucket = store.bucket_now() - 1  # a touch has something to do
    store.bulk_index(OWNER, keys, ids, block_count=blocks, block_bytes=LAYOUT.block_bytes, bucket=bucket)
    index_bytes = store.stats()["index_bytes"]
    store.close(clean=True)
    (folder / "filter").unlink(missing_ok=True)  # a saved one is as large as it has grown; without, it is made anew
    store = _native.Store(str(folder), capacity_bytes=CAPACITY_BYTES, index_map_bytes=MAP_BYTES, bucket_seconds=BUCKET_SECONDS)
    store.wait_started(60)
    filter_bytes = store.stats()["filter_bytes"] - empty_filter_bytes  # sized for what is there, as after a start
    store.close(clean=True)
    return index_bytes / len(keys), filter_bytes / len(keys)


# --- bytes ---


def byte_costs(given: Parameters, size: Size, folder: Path) -> tuple[str, float, float, float]:
    """Engine; microseconds of all daemons together per MB that they took in, sent from the disk, sent from memory."""
    blocks = round(given.extent_blocks)
    extents = max(1, size.stored_blocks // blocks)
    stored_mb = extents * blocks * SHARD_BYTES * SHARDS / 1e6
    read_mb = (extents + AT_ONCE) * blocks * SHARD_BYTES * K / 1e6
    config = ClientConfig(ticket_seconds=60)
    with (
        LocalCluster(folder, SHARDS, k=K, m=M, capacity_bytes=4 << 30) as cluster,
        Client(cluster.map, layout=LAYOUT, config=config) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        meter = _Meter([pid for node in range(SHARDS) if (pid := cluster.pid(node)) is not None], size)
        chains = [chain_keys(seed, blocks) for seed in range(1, extents + AT_ONCE + 1)]
        list(pool.map(lambda keys: _store(client, keys), chains[:AT_ONCE]))  # opens the connections
        made = [(keys, bytes_of(keys)) for keys in chains[AT_ONCE:]]
        with meter.spent() as writing:
            list(pool.map(lambda each: _store(client, *each), made))
        del made
        places = [pretouched(blocks) for _ in range(AT_ONCE)]

        def reading(drop: bool) -> float:
            os.sync()
            if drop:
                forget_pages(folder)
            tickets = [client.lookup(keys) for keys in chains]  # promises are priced apart
            with meter.spent() as spent:
                list(pool.map(lambda at: _load(client, tickets[at::AT_ONCE], chains[at::AT_ONCE], places[at]), range(AT_ONCE)))
            return spent[0]

        cold, warm = (
            statistics.median(each) for each in interleaved(size.passes, lambda: reading(True), lambda: reading(False), warm_up=0)
        )
        io = str(cluster.ready[0].get("io", "unknown"))
    shutil.rmtree(folder)
    return io, writing[0] / stored_mb * 1e6, cold / read_mb * 1e6, warm / read_mb * 1e6


def _store(client: Client, keys: Blocks, rows: Blocks | None = None) -> None:
    result = client.store(keys, bytes_of(keys) if rows is None else rows, first_block=0).result(60)
    if not result.outcome.readable:
        raise RuntimeError(f"a store gave {result.outcome}")


def _load(client: Client, tickets: Sequence[Ticket], chains: Sequence[Blocks], place: Blocks) -> None:
    for ticket, keys in zip(tickets, chains, strict=True):
        if client.load(ticket, place).blocks != len(keys):
            raise RuntimeError("a load came back shorter than what was stored")
    if chains and not are_bytes_of(chains[-1], place):
        raise RuntimeError("wrong bytes")


# --- processor time ---


class _Meter:
    """Processor time of some processes, less what they take while nobody asks them anything: measured once, before anything is asked."""

    def __init__(self, pids: Sequence[int], size: Size) -> None:
        self._pids, self._later_seconds = pids, size.later_seconds
        time.sleep(self._later_seconds)
        self._rest()
        before, begun = self._seconds(), time.monotonic()
        time.sleep(size.idle_seconds)
        self._idle_share = (self._seconds() - before) / (time.monotonic() - begun)

    @contextmanager
    def spent(self) -> Iterator[list[float]]:
        """Seconds from here until they rest after the body: one number, there when the body is left."""
        found: list[float] = []
        self._rest()
        before, begun = self._seconds(), time.monotonic()
        yield found
        time.sleep(self._later_seconds)
        self._rest()
        found.append(max(0.0, self._seconds() - before - self._idle_share * (time.monotonic() - begun)))

    def _seconds(self) -> float:
        return sum(map(processor_seconds, self._pids))

    def _rest(self) -> None:
        """Returns when they have done next to nothing for a moment."""
        deadline = time.monotonic() + REST_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            before, begun = self._seconds(), time.monotonic()
            time.sleep(REST_SECONDS)
            if self._seconds() - before <= REST_SHARE_MAX * (time.monotonic() - begun):
                return


# --- rebuilding, directory ---


def rebuilding(given: Parameters, size: Size, folder: Path) -> tuple[float, float]:
    """Bytes of records on one daemon's disk, and the seconds until a store that lost its index has it again, read from the disk."""
    folder.mkdir()

    def opened() -> _native.Store:
        return _native.Store(
            str(folder), capacity_bytes=CAPACITY_BYTES, index_map_bytes=MAP_BYTES, segment_bytes=size.segment_bytes, bucket_seconds=60
        )

    store = opened()
    records = 0
    for record in _records(given.stored_extent_blocks):
        if store.stats()["segments"] > size.segments:
            break  # all but one record lie in full segments, as nearly all of a full disk do
        if status := store.put(record):
            raise RuntimeError(f"a put gave {status}")
        records += 1
    store.close(clean=True)  # seals what is full
    shutil.rmtree(folder / "index")
    os.sync()
    forget_pages(folder)
    begin = time.monotonic()
    store = opened()
    if not store.wait_started(120):
        raise RuntimeError("the store did not start again")
    took = time.monotonic() - begin
    stats = store.stats()
    store.close(clean=True)
    if stats["start_mode"] != "rebuild" or stats["entries"] != records:
        raise RuntimeError(f"start {stats['start_mode']}, {stats['entries']} of {records} records found again")
    shutil.rmtree(folder)
    return records * float(record_bytes_of(given.stored_extent_blocks)), took


def _records(blocks: int) -> Iterator[bytes]:
    """True-sized records of extents of `blocks` blocks, each under another key. Their bytes are alike: a start does not look at them."""
    rng = np.random.default_rng(11)
    planes = LAYOUT.planes(K)
    pieces = [[rng.bytes(plane.shard_bytes)] * blocks for plane in planes]
    digests = [[bytes(16)] * blocks] * len(planes)
    tags = rng.integers(1, 1 << 63, blocks, dtype=np.uint64).tolist()
    while True:
        key = rng.bytes(32)
        yield build(
            Record(
                owner=OWNER, extent_key=key, write_id=int(rng.integers(1, 1 << 63)), shard=0, k=K, m=M,
                plane_bytes=[plane.bytes for plane in planes], tags=[int.from_bytes(key[8:16], "little"), *tags[1:]],
                pieces=pieces, digests=digests,
            )
        )  # fmt: skip


def directory_operations(size: Size) -> float:
    """Keys located, touched and registered per second of a directory's processor time, one key a message."""
    with directory() as (pid, address):
        askers = [Asker(address, number) for number in range(AGENTS)]
        some, _, _ = fill_directory(pid, askers, size.directory_entries)
        found = operations_per_core(pid, askers, mixed(askers, some, 1, max(4, size.rounds)), 1)
        for asker in askers:
            asker.connection.close()
    return found
