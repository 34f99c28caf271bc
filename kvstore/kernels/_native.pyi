"""Types of the native core. One section per source file in kernels/; arrays are C-contiguous unless said otherwise."""

from typing import Any

import numpy as np
import numpy.typing as npt

_U8 = npt.NDArray[np.uint8]
_U32 = npt.NDArray[np.uint32]
_U64 = npt.NDArray[np.uint64]

# --- hash.cpp: plain reference in hash_reference.py. ValueError for sizes that do not fit.

def block_keys(secret: bytes, namespace_digest: bytes, previous: bytes, tokens: _U32, block_tokens: int, out: _U8) -> None:
    """Fills out (n, 32) with the chained keys of n blocks; tokens has n x block_tokens ids, previous is the key before them or empty."""

def external_keys(secret: bytes, namespace_digest: bytes, hashes: _U8, ends: _U64, out: _U8) -> None:
    """Fills out (n, 32); hash i is hashes[ends[i - 1] : ends[i]]."""

def shard_seed(owner: bytes, extent_key: bytes, write_id: int, shard: int, plane: int, block: int) -> int:
    """xxh3-64 of the identity of one shard of one (plane, block)."""

def shard_sum(bytes: _U8 | bytes, seed: int) -> int:
    """xxh3-64 of one piece, seeded with its identity."""

def plane_digest(block_key: bytes, write_id: int, data_sums: _U64) -> tuple[int, int]:
    """Low and high half of the xxh3-128 over the sums of the k data shards of one (block, plane)."""

def block_tag(block_key: bytes) -> int:
    """Bytes 8 to 16 of a key as u64 LE."""

# --- generate.cpp: plain reference in generate_reference.py. Rows may lie any distance apart. ValueError for sizes that do not fit.

def generate_blocks(keys: _U8, block_bytes: int, out: _U8, salt: int = 0) -> None:
    """Fills the rows of out (n, block_bytes) with bytes made from keys (n, 32) and the writer's salt."""

def verify_blocks(keys: _U8, block_bytes: int, blocks: _U8, salt: int = 0) -> int:
    """Index of the first row that differs from what generate_blocks makes, or -1."""

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
        connection_bytes_max: int = ...,
        read_head_bytes_max: int = ...,
        read_arena_bytes: int = ...,
        read_cache_bytes: int = ...,
        read_depth: int = 2,
        idle_timeout_seconds: float = 300.0,
        progress_timeout_seconds: float = 3.0,
    ) -> None: ...
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

    def set_epoch(self, epoch: int) -> None:
        """WRITEs of an older epoch are answered STALE_MAP from now on."""

    def drain(self, timeout_seconds: float) -> bool:
        """Closes the port, refuses new work but READs, waits until nothing is in flight. False: the time was over first."""

    def stop(self) -> None:
        """Closes every connection and ends the threads; harmless twice."""

    def stats(self) -> dict[str, Any]:
        """Counters and gauges: kernels/server_stats.hpp. By op and by status number where they have those."""
