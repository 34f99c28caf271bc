"""Types of the native core. One section per source file in kernels/; arrays are C-contiguous unless said otherwise.

Over 600 lines because a stub is one file a module.
"""

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

_U8 = npt.NDArray[np.uint8]
_U32 = npt.NDArray[np.uint32]
_U64 = npt.NDArray[np.uint64]
_I32 = npt.NDArray[np.int32]

# --- hash.cpp: plain reference in hash_reference.py. ValueError for sizes that do not fit.

def block_keys(secret: bytes, namespace_digest: bytes, previous: bytes, tokens: _U32, block_tokens: int, out: _U8) -> None:
    """Fills out (n, 32) with the chained keys of n blocks; tokens has n x block_tokens ids, previous is the key before them or empty."""

def external_keys(secret: bytes, namespace_digest: bytes, hashes: _U8, ends: _U64, out: _U8) -> None:
    """Fills out (n, 32); hash i is hashes[ends[i - 1] : ends[i]]."""

def fingerprints(salt: bytes, keys: _U8, out: _U64) -> None:
    """Fills out (n,) with SipHash-2-4 of keys (n, 32) under a salt of 16 bytes."""

def shard_seed(owner: bytes, extent_key: bytes, write_id: int, shard: int, plane: int, block: int) -> int:
    """xxh3-64 of the identity of one shard of one (plane, block)."""

def shard_sum(bytes: _U8 | bytes, seed: int) -> int:
    """xxh3-64 of one piece, seeded with its identity."""

def plane_digest(block_key: bytes, write_id: int, data_sums: _U64) -> tuple[int, int]:
    """Low and high half of the xxh3-128 over the sums of the k data shards of one (block, plane)."""

def block_tag(block_key: bytes) -> int:
    """Bytes 8 to 16 of a key as u64 LE."""

# --- pages.cpp

def pinned_pages(size_bytes: int) -> _U8:
    """Zeros for a device to know, from the start of a page: on huge ones of the host's pool where it has enough, else transparent ones are
    wished for; a forked child does not have them. MemoryError."""

# --- generate.cpp: plain reference in generate_reference.py. Rows may lie any distance apart. ValueError for sizes that do not fit.

def generate_blocks(keys: _U8, block_bytes: int, out: _U8, salt: int = 0) -> None:
    """Fills the rows of out (n, block_bytes) with bytes made from keys (n, 32) and the writer's salt."""

def verify_blocks(keys: _U8, block_bytes: int, blocks: _U8, salt: int = 0) -> int:
    """Index of the first row that differs from what generate_blocks makes, or -1."""

# --- plan_curve.cpp, plan_policy.cpp: plain reference in plan_reference.py. ValueError for arrays that do not fit.
# A trace is dense block ids (0 .. unique - 1) of all prompts back to back and, for each request, where its ids end.

def plan_reuse_histogram(ids: _U32, ends: _U64, last_tokens: _U32, unique: int, block_tokens: int, blocks: _U64, tokens: _U64) -> None:
    """Adds each access to its reuse depth in blocks and tokens (unique + 1): LRU of c blocks holds depths 1 to c; 0: first touches."""

def plan_reuse_depths(ids: _U32, ends: _U64, unique: int, depth: _U32, previous: _U32) -> None:
    """Fills for each access its depth and the request that touched the block before; 2^32 - 1 for first touches."""

def plan_sample_accesses(
    ids: _U32, ends: _U64, last_tokens: _U32, keep: _U32, block_tokens: int, out: _U32, out_ends: _U64, out_last: _U32
) -> int:
    """Number of accesses kept: those with keep[id] > 0, under the new id keep[id] - 1. out has eight places more than ids."""

def plan_simulate(
    eviction: str,
    admission: str,
    ids: _U32,
    ends: _U64,
    times_ms: _U64,
    unique: int,
    capacity: int,
    tail_first: bool,
    limit: float,
    hits: _U32,
    written: _U32,
    held: _U32,
) -> None:
    """Fills for each request its leading hits, blocks written, and blocks that were there when they were touched.

    eviction: lru, sieve, s3fifo. admission: always, second-touch (limit: notes kept), write-budget (limit: blocks a day).
    """

# --- codec.hpp through codec_bind.cpp: use kvstore.erasure, which checks arguments and has a plain twin (zfec). CodecError for misuse.

class Codec:
    """Thread-safe. Shard numbers: 0 to k - 1 data, k to k + m - 1 parity."""

    def __init__(self, k: int, m: int) -> None: ...
    @property
    def k(self) -> int: ...
    @property
    def m(self) -> int: ...
    def matrix(self) -> bytes:
        """The generator matrix, (k + m) x k coefficients, row-major."""

    def encode(self, data: _U8, parity: _U8) -> None:
        """Fills parity (m, bytes) from data (k, bytes)."""

    def decode(self, have_ids: list[int], have: list[_U8], want_ids: list[int], out: list[_U8]) -> None:
        """Fills out[j] (bytes) with shard want_ids[j], data or parity, from k shards have[i] (bytes) numbered have_ids[i]."""

    def encode_plane(self, blocks: _U8, offset_bytes: int, plane_bytes: int, parity: _U8) -> None:
        """Fills parity (m, n, shard_bytes) from one plane of blocks (n, block_bytes), read in place; rows may lie any distance apart."""

    def rebuild_plane(
        self, blocks: _U8, offset_bytes: int, plane_bytes: int, shard_bytes: int, have_ids: list[int], parity: list[_U8]
    ) -> None:
        """Writes the data shards not in have_ids into blocks (n, block_bytes); parity: (n, shard_bytes) for each parity number in it."""

    def bare_isal(self, have_ids: list[int], want_ids: list[int], have: _U8, out: _U8) -> None:
        """For benchmarks: nothing but ISA-L, from have (n, k, bytes) to out (n, wanted, bytes); both lists of numbers ascending."""

# --- server.cpp: the data port of a storage daemon (kernels/server.hpp, docs/PROTOCOL.md).

class Server:
    """Serves `store` from construction to stop(). OSError with the errno of bind where the port cannot be had; the store is kept alive."""

    def __init__(
        self,
        store: Store,
        host: str,
        port: int,
        *,
        cluster16: bytes,
        epoch: int,
        bucket_seconds: int = 60,
        io: str = "buffered",
        bulk_threads: int = 2,
        write_threads: int = 2,
        connections_max: int = 4096,
        write_arena_bytes: int = ...,
        read_head_bytes_max: int = ...,
        read_arena_bytes: int = ...,
        read_cache_bytes: int = ...,
        read_depth: int = 8,
        idle_timeout_seconds: float = 300.0,
        progress_timeout_seconds: float = 3.0,
        congestion_control: str = "",
        rdma_device: str = "off",
        rdma_pool_bytes: int = ...,
        rdma_pairs_max: int = 1024,
        rdma_traffic_class: int = 0,
        rdma_gid_index: int = -1,
    ) -> None:
        """`rdma_device` "off", "auto" or a name; ConfigError E145 to E148 where a named one cannot be had, E149 where there is a device
        without a GID of that index (-1: its best)."""

    @property
    def port(self) -> int: ...
    @property
    def boot_id(self) -> int:
        """Random, never zero; another one after each start."""

    @property
    def io(self) -> str:
        """The read engine in use."""

    @property
    def io_note(self) -> str:
        """Why it is not the one asked for; else empty."""

    @property
    def rdma(self) -> str:
        """The RDMA device in use; "" for none."""

    @property
    def rdma_note(self) -> str:
        """Why none, its error code first, where "auto" found none; else empty."""

    def set_epoch(self, epoch: int) -> None:
        """WRITEs of an older epoch are answered STALE_MAP from now on."""

    def drain(self, timeout_seconds: float) -> bool:
        """Closes the port, refuses new work but READs, waits until nothing is in flight. False: the time was over first."""

    def stop(self) -> None:
        """Closes every connection and ends the threads; harmless twice."""

    def stats(self) -> dict[str, Any]:
        """Counters and gauges: kernels/server_stats.hpp. By op and by status number where they have those."""

# --- directory_server.cpp: a window directory on its port (kernels/directory*.hpp, docs/WINDOWS.md).

class DirectoryServer:
    """Serves from construction to stop(). OSError with the errno of bind where the port cannot be had, of mmap where the memory cannot."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        cluster16: bytes,
        memory_bytes: int = 1_000_000_000,
        lifetime_seconds: float = 180.0,
        virtual_clock: bool = False,
        connections_max: int = 4096,
        idle_timeout_seconds: float = 300.0,
        progress_timeout_seconds: float = 3.0,
        congestion_control: str = "",
    ) -> None: ...
    @property
    def port(self) -> int: ...
    @property
    def boot_id(self) -> int:
        """Random, never zero; another one after each start."""

    def stop(self) -> None:
        """Closes every connection and ends the thread; harmless twice."""

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the front, as Server.stats() has them, and of the table (DirectoryStatus of directory_wire.hpp)."""

# --- store_bind.cpp: the storage of one node (kernels/store.hpp), and record.cpp (plain twin: kvstore/record.py). Statuses are the numbers
# of kernels/common.hpp. `owner` is 16 bytes, keys (n, 32), write_ids (n,); arrays of an extent key and its writing go in pairs.

def check_record(record: bytes) -> int:
    """Status of a whole record: head, checks, every piece."""

def index_rows(record: bytes, segment: int, offset_bytes: int, bucket: int, reused: bool = False) -> tuple[bytes, bytes, bytes, bytes]:
    """Keys and values of the extents and the recency row of a record at a place (plain twin: kvstore/entry.py)."""

def segment_footer(segment: int, data_end_bytes: int, created_unix_ms: int, entries: list[tuple[int, bytes]]) -> bytes:
    """The footer over (offset, head) of each record (plain twin: kvstore/segment.py)."""

class ReadRef:
    """A shard held open for reading; its bytes stay where they are until close(). Must not outlive its store."""

    @property
    def segment(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def record_bytes(self) -> int: ...
    @property
    def shard_bytes(self) -> list[int]:
        """Bytes of one piece, by plane."""

    def read(self) -> bytes: ...
    def close(self) -> None: ...

class Store:
    """Thread-safe. Raises DirectoryInUse, or ConfigError for a directory that cannot be used; every other outcome is a status."""

    def __init__(
        self,
        dir: str,
        *,
        capacity_bytes: int = 0,
        segment_bytes: int = 268435456,
        index_map_bytes: int = 0,
        strict_sync: bool = False,
        bucket_seconds: int = 60,
        pins_max: int = 1048576,
        virtual_clock: bool = False,
        disk_reserve_bytes: int = 33554432,
        retention_seconds: list[int] | None = None,
    ) -> None: ...
    def discover(self, owner: bytes, keys: _U8) -> bytes:
        """The body of a DISCOVER reply (kernels/wire.hpp)."""

    def promise(
        self,
        owner: bytes,
        keys: _U8,
        write_ids: _U64,
        *,
        bucket: int = 0,
        pin_seconds: int = 0,
        touch: bool = False,
        retention_class: int = 255,
    ) -> list[tuple[int, int]]:
        """(status, mask of the shards held) of each; class 255 leaves the class as it is."""

    def withdraw(self, owner: bytes, keys: _U8, write_ids: _U64) -> list[int]: ...
    def put(self, record: bytes) -> int: ...
    def read(self, owner: bytes, extent_key: bytes, write_id: int, shard: int) -> tuple[int, bytes]:
        """Status and the whole record as it lies on disk, unchecked."""

    def open_read(self, owner: bytes, extent_key: bytes, write_id: int, shard: int) -> ReadRef | int: ...
    def report_corrupt(self, owner: bytes, extent_key: bytes, write_id: int, shard: int) -> None:
        """Reads the record again, from the disk; deletes its entry if it is bad."""

    def suspect(self, owner: bytes, shards: list[tuple[bytes, int, int]]) -> list[int]:
        """Of each (extent key, write id, shard): OK (a thread will look at it), NOT_FOUND or BUSY."""

    def scrub(self, after: bytes, bytes_max: int) -> tuple[bytes, int, int]:
        """Looks at records in the order of the index, past the page cache; bad ones are dropped. `after`: b"" for the first, else what this
        gave last: (where to go on, b"" at the end; bytes looked at, about `bytes_max`, one record at least; damaged records)."""

    def take_damages(self) -> tuple[list[tuple[int, int, int, int, bool]], int]:
        """(segment, offset, record bytes, shard, could be read) of bad records dropped since the last call, 16 at most; and of how many."""

    def bucket_now(self) -> int: ...
    def close(self, clean: bool = True) -> None: ...
    def queues(self) -> list[tuple[int, bytes, int, int]]:
        """(queue, owner, rows, bytes) of what is stored; right once the start scan is over. Queue: class, + 16 for what was used again."""

    def peek(self, queue: int, owner: bytes, limit: int, after: bytes = b"") -> list[tuple[int, bytes, int]]:
        """(bucket of last use, recency row, bytes), those that go first first, past the row `after`."""

    def evict(self, rows: list[bytes], reason: int) -> list[tuple[int, int, int, int]]:
        """(ordinal in rows, class, bytes, age in seconds) of those that went; what was touched or promised since the peek stays."""

    def ghosts(self, owner: bytes, keys: _U8) -> list[tuple[int, int, int, int, bytes]]:
        """Why each key is not here: 0 unknown, 1 expired, 2 evicted, 3 withdrawn, 4 corrupt. Reads files: not for a hot path."""

    def set_pressure_at(self, bytes: int) -> None: ...
    def wait_pressure(self, timeout_seconds: float) -> int:
        """Bytes that puts found no room for; 1: above set_pressure_at, or poked; 0: timed out."""

    def poke(self) -> None: ...
    def usage(self) -> tuple[int, int, int, int, float]:
        """Bytes used, deleted but not given back, capacity, free on the disk; share of the index's map in use."""

    def set_second_chance(self, on: bool) -> None:
        """Whether what was evicted unused is remembered, and of the reused from the start when it is written again."""

    def set_admission(self, second_touch: bool, budget_bytes_per_day: int) -> None:
        """What admit() votes by; 0: no budget."""

    def admit(self, owner: bytes, keys: _U8, bucket: int) -> list[int]:
        """For each extent key: 0 yes, 1 not asked for before, 2 over the budget. Marks them as asked for."""

    def set_retentions(self, seconds: list[int]) -> None:
        """How long each of the 16 classes is kept: a touch moves an extent to the longest-lived."""

    def wait_started(self, timeout_seconds: float) -> bool:
        """Whether the start scan is over: totals and filter are right, and no byte is left that nobody owns."""

    def flush(self) -> None:
        """Waiting touches into the index, everything synced, free places punched."""

    def check_integrity(self, deep: bool = False) -> list[str]:
        """What is wrong, as sentences; `deep` reads every byte. Writers wait meanwhile."""

    def bulk_index(
        self,
        owner: bytes,
        keys: _U8,
        write_ids: _U64,
        *,
        block_count: int = 27,
        block_bytes: int = 113920,
        start_block: int = 0,
        bucket: int = 0,
        k: int = 10,
        m: int = 2,
        shard: int = 0,
        retention_class: int = 2,
    ) -> int:
        """For benchmarks: entries without bytes, which every lookup finds and no read does. Returns how many are new."""

    def stats(self) -> dict[str, Any]:
        """Gauges and counters (kernels/store_check.cpp), numbers; and start_mode, start_reason, last_fault, texts."""

# --- client.cpp: use kvstore.client, which checks arguments. ValueError for shapes that do not fit; Closed; MisuseError after a fork.

FOUND_BYTES: int
PIECE_BYTES: int
BAD_SHARD_BYTES: int

def cover(candidates: _U32) -> _U8:
    """The walk (kernels/walk.hpp). `candidates` (n, 3): start, end, row. Its pieces, in order; kvstore.client.native.PIECE."""

class ClientReadable:
    """What a writing must be for its bytes to be read by a client."""

    def __init__(self, layout_tag: int, block_bytes: int, plane_count: int, k: int, m: int, kv_group: int) -> None: ...
    @property
    def layout_tag(self) -> int: ...
    @property
    def k(self) -> int: ...

class ClientDiscover:
    """One discovery; struct Found of client_small.hpp, here as bytes, is kvstore.client.native.FOUND."""

    def ask(self, indices: _I32, nodes: _I32, counted: bool) -> None:
        """Asks nodes[i] for key indices[i]; counted: wait() expects one more answer for each."""

    def wait(self, timeout_seconds: float) -> bool:
        """True when every key has its answers, something failed, or nobody owes an answer."""

    def found(self) -> _U8:
        """The writings that can be read. Rows stay; later answers add some."""

    def earlier(self) -> _U32:
        """Starts of earlier extents that some writing names."""

    def starts(self) -> _U32:
        """Those, and where what was found starts; in order, each once."""

    def walk(self, rows: int, epochs: _U64, refused: _U32) -> tuple[_U8, _U32]:
        """(pieces of the longest prefix, starts of the writings it chose from): of the first `rows` that were found, those written in
        `epochs`, without `refused`."""

    def names(self, rows: _U32) -> _U8:
        """(n * 40): extent key and write id of these rows of what was found."""

    def extents(self, pieces: _U8, absent: _U64) -> _U8:
        """Of a ticket (kvstore.client.ticket.EXTENT). `absent`: by piece, the shards that its nodes do not have."""

    def answers(self) -> _U8:
        """By key: nodes that looked at it."""

    def take_failed(self) -> _I32:
        """Keys of requests that failed since the last call."""

    def unsettled(self) -> _I32:
        """Keys that still want answers."""

    def owing(self, age_seconds: float) -> _U32:
        """Nodes that have owed an answer for so long."""

    def pending(self) -> int: ...

class ClientPromise:
    def wait(self, timeout_seconds: float) -> bool:
        """True when every extent has enough shards, or nobody owes an answer."""

    def masks(self) -> _U64:
        """By extent: shards promised."""

    def answered(self) -> _U64:
        """By extent: shards whose node has answered or failed."""

    def last_buckets(self) -> _U32:
        """By extent: time bucket of its last use before this touch, the newest that a node tells; 0 where none does."""

    def owing(self, age_seconds: float) -> _U32: ...
    def pending(self) -> int: ...

class ClientLoad:
    """Ends when it is let go of."""

    def wait_plane(self, plane: int, timeout_seconds: float) -> bool: ...
    def wait_all(self, timeout_seconds: float) -> bool: ...
    def rows_of_plane(self, plane: int) -> int: ...
    def rows(self) -> int: ...
    def end(self) -> None:
        """Afterwards nothing writes to the destination."""

    def cancel(self) -> None:
        """Waiters return; end() is still due."""

    def times(self) -> npt.NDArray[np.int64]:
        """Of each extent and plane: first bytes, all checked, decoding from, to; nanoseconds of CLOCK_MONOTONIC, 0: it did not happen."""

    def stats(self) -> dict[str, int]: ...

class ClientCore:
    def __init__(
        self,
        addresses: list[str],
        cluster: bytes,
        epoch: int,
        k: int,
        m: int,
        threads: int = 2,
        bulk_connections_max: int = 2048,
        queue_bytes_max: int = ...,
        connect_timeout_seconds: float = 1.0,
        stall_timeout_seconds: float = 3.0,
        drain_timeout_seconds: float = 1.0,
        plane_wait_seconds: float = 0.002,
        idle_timeout_seconds: float = 60.0,
        store_deadline_seconds: float = 10.0,
        congestion_control: str = "",
        directories: bool = False,
        transport: str = "tcp",
        rdma_device: str = "auto",
        rdma_zone_bytes: int = ...,
        rdma_pool_bytes: int = ...,
        rdma_windows: bool = True,
        rdma_traffic_class: int = 0,
        rdma_gid_index: int = -1,
    ) -> None:
        """`directories`: the addresses are window directories, of which call_many alone is understood. `transport`: of reads: tcp, auto or
        rdma; with rdma ConfigError E145 to E148 where there is none here; E149 where the device has no GID of that index (-1: its best)."""

    def discover(self, owner: bytes, epoch: int, keys: _U8, readable: ClientReadable) -> ClientDiscover: ...
    def promise(
        self,
        owner: bytes,
        epoch: int,
        bucket: int,
        flags: int,
        retention_class: int,
        pin_seconds: int,
        names: _U8,
        nodes: _I32,
        enough: int,
    ) -> ClientPromise:
        """Names (n, 40), nodes (n, k + m)."""

    def load(
        self,
        owner: bytes,
        epoch: int,
        names: _U8,
        spans: _U32,
        nodes: _I32,
        doubtful: _U64,
        planes: _U32,
        block_keys: _U8,
        destination: _U8,
        eager: bool,
        by_plane: bool,
    ) -> ClientLoad:
        """Spans (n, 3): first block in the extent, blocks, row. Planes (p, 3): offset, bytes, shard bytes. Rows lie any distance apart."""

    def store(
        self,
        owner: bytes,
        write_epoch: int,
        write_ids: _U64,
        spans: _U32,
        nodes: _I32,
        planes: _U32,
        block_keys: _U8,
        blocks: _U8,
        earlier: _U32,
        fields: dict[str, int],
    ) -> int:
        """Spans (n, 3): start block, blocks, placement group. The number that wait_done will name; blocks must stay until then."""

    def wait_done(self, timeout_seconds: float) -> list[tuple[int, bytes, bytes, int]]:
        """(store, outcome of each extent, acknowledgements of each, newer epoch for which nodes refused some or 0); empty when the time has
        passed or all is over."""

    @property
    def newest_epoch(self) -> int:
        """Of the cluster map, that any node has named; 0: none yet."""

    def call_many(self, requests: list[tuple[int, int, bytes]], timeout_seconds: float, enough: int = 0) -> list[tuple[int, bytes]]:
        """(node, verb, body) each; answers (status or fault, -1: none yet; body) in the same order."""

    def mark_late(self, nodes: _U32) -> None: ...
    def retry_down(self) -> None: ...
    def health(self) -> _U8:
        """By node: 0 healthy, 1 owes an answer that is late, 2 has for half a second, 3 held for down."""

    @property
    def discover_delay_seconds(self) -> float: ...
    @property
    def promise_delay_seconds(self) -> float: ...
    def stats(self) -> dict[str, int | float]: ...
    def take_bad_shards(self) -> _U8:
        """Rows of kvstore.client.native.BAD_SHARD: shards whose bytes failed a check since the last call."""

    def take_notices(self) -> list[tuple[bool, str]]:
        """What the log should say of RDMA, once for each kind: is it a warning, the text."""

    def close(self) -> None: ...

# --- asking.cpp: plain reference of its rule in asking_reference.py. ValueError for arrays that do not fit.

class Asking:
    """Whom a lookup asks about which key. Not shared between threads."""

    @overload
    def __init__(self, lists: _I32, health: _U8, seed: int) -> None:
        """Lists (epochs, n, k + m): nodes of each key; health as ClientCore.health(); other seeds choose others."""

    @overload
    def __init__(self, tables: Sequence[_I32], keys: _U8, health: _U8, seed: int) -> None:
        """Of each epoch the lists of all placement groups (2^pg_bits, k + m), which must stay as they are; keys (n, 32)."""

    def lists_of(self, keys: _U32, epochs: _U32) -> _I32:
        """(len(keys) * (k + m)): the list of each of these keys in an epoch, by its position."""

    def first(self) -> tuple[_I32, _I32]:
        """(keys, nodes): so that of each list one node is asked."""

    def elsewhere(self, indices: _I32, times: int) -> tuple[_I32, _I32]:
        """(keys, nodes): of each list of these keys up to `times` nodes more that are up."""

    def avoid(self, late: _U32) -> None:
        """Takes these nodes last from now on."""

# --- loopback.cpp: RDMA from this host to itself. ConfigError E145 to E147, Unreachable E148; IndexError for pieces outside of a region.

class Loopback:
    """Any thread. `device`: a name, or "auto"; `gid_index`: of its port, -1: its best."""

    def __init__(self, device: str = "auto", gid_index: int = -1) -> None: ...
    def add(self, address: int, size_bytes: int, writable: bool) -> int:
        """Registers memory until `remove`; the number that `copy` calls it by. A GPU's address works where nvidia-peermem is loaded."""

    def add_dma_buf(self, descriptor: int, offset_bytes: int, size_bytes: int, address: int) -> int:
        """The same of a part of a dma-buf, whose first byte `copy` calls `address`; both at the same place within a page."""

    def remove(self, region: int) -> None: ...
    def copy(self, source: int, target: int, pieces: _U64, seconds: float) -> int:
        """Begins to copy pieces (n, 3): address in source, address in target, bytes. A number to wait for; 0: there was no room in time."""

    def wait(self, number: int, seconds: float) -> bool:
        """Whether all up to `number` is in place: the receiving queue pair was told so."""

    def settle(self, seconds: float) -> bool:
        """Nothing posted so far touches memory any more when True; what is not done in time is cut off. False: the device refuses."""

    @property
    def device_name(self) -> str: ...
    @property
    def gid_index(self) -> int: ...
    @property
    def registered_bytes(self) -> int: ...

# --- direct.cpp: memory of others that nodes write to. ConfigError E145 to E147, Unreachable E148; IndexError for a part outside of it.

class DirectZone:
    """Any thread. `device`: a name, or "auto". `add` or `add_dma_buf` once."""

    def __init__(self, device: str = "auto", traffic_class: int = 0, gid_index: int = -1) -> None: ...
    def add(self, address: int, size_bytes: int) -> None:
        """Registers it. A GPU's address works where nvidia-peermem is loaded."""

    def add_dma_buf(self, descriptor: int, offset_bytes: int, size_bytes: int, address: int) -> None:
        """The same of a part of a dma-buf, whose first byte others know by `address`; both at the same place within a page."""

    def link(self, address: int, size_bytes: int, credits: int) -> DirectLink:
        """A queue pair whose peer may write to that part of it, and tell of `credits` items. E148: an earlier one could not be fenced."""

    def read_back(self, seconds: float) -> None:
        """After the fence, for a GPU's: what the device wrote is no longer on its way over PCIe. E148: the zone is lost."""

    def close(self) -> bool:
        """Lets the memory go. False: links are left, or the device refuses."""

    @property
    def device_name(self) -> str: ...
    @property
    def registered_bytes(self) -> int: ...
    @property
    def queue_pairs(self) -> int: ...

class DirectLink:
    """One thread at a time."""

    def address(self) -> bytes:
        """The body of a VERBS_OPEN."""

    def connect(self, peer: bytes) -> None:
        """`peer`: the body of its answer. From here on the node may write."""

    def take(self, seconds: float) -> list[int]:
        """Immediates that have come, in host order; waits `seconds` for the first. E148: the queue pair is at its end."""

    def fence(self) -> bool:
        """Nothing more is written through it when this is True. False: the device refuses, and the memory is lost."""
