"""Builds records and asks stores, for the tests of the storage of a node."""

from __future__ import annotations

import random
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.kernels import _native
from kvstore.record import Record, plane_digest, shard_bytes_of

OWNER = bytes(range(16))
OK, NOT_FOUND, BUSY, NO_SPACE, EXISTS = 0, 1, 2, 3, 4
BAD_REQUEST, BAD_VERSION, TOMBSTONED, TOO_MANY_WRITINGS, CORRUPT, IO_ERROR = 20, 22, 24, 25, 40, 41

Store = _native.Store


def key_of(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def record_of(number: int, *, blocks: int | None = None, **changes: Any) -> Record:
    """A small record whose bytes follow from `number`, then changed as asked."""
    rng = random.Random(number)
    base: dict[str, Any] = {
        "owner": OWNER,
        "extent_key": rng.randbytes(32),
        "write_id": rng.getrandbits(64),
        "shard": 0,
        "k": 10,
        "m": 2,
        "plane_bytes": (640, 330),
        "start_block": rng.randrange(1000),
    }
    drawn = rng.randrange(1, 9)
    base |= changes
    blocks = blocks or drawn
    keys = [base["extent_key"]] + [rng.randbytes(32) for _ in range(blocks - 1)]
    base.setdefault("tags", [int.from_bytes(each[8:16], "little") for each in keys])
    pieces = [[rng.randbytes(shard_bytes_of(n, base["k"])) for _ in range(blocks)] for n in base["plane_bytes"]]
    digests = [[plane_digest(each, base["write_id"], [p] * base["k"]) for each in keys] for p in range(len(pieces))]
    return Record(pieces=pieces, digests=digests, **base)


def keys_of(*records: Record | bytes) -> np.ndarray:
    raw = b"".join(r if isinstance(r, bytes) else r.extent_key for r in records)
    return np.frombuffer(raw, np.uint8).reshape(-1, 32).copy()


def ids_of(*records: Record) -> np.ndarray:
    return np.array([r.write_id for r in records], np.uint64)


def read(store: Store, r: Record) -> tuple[int, bytes]:
    return store.read(r.owner, r.extent_key, r.write_id, r.shard)


def until_ahead_is_back(segment: Path) -> None:
    """Waits until no blocks are allocated beyond the records of the segment file that is being filled."""
    end, pause = time.monotonic() + 10, threading.Event()
    while segment.stat().st_blocks * 512 > segment.stat().st_size + 4096:
        assert time.monotonic() < end, "blocks asked for ahead were not given back"
        pause.wait(0.05)


def reasons(store: Store, owner: bytes, keys: np.ndarray) -> list[int]:
    """Of each key, why the newest writing that is gone went; 0: no writing of it is known to be gone."""
    newest: dict[int, int] = {}
    for at, reason, *_ in store.ghosts(owner, keys):
        newest.setdefault(at, reason)
    return [newest.get(at, 0) for at in range(len(keys))]


def promise(store: Store, *records: Record, **how: object) -> list[tuple[int, int]]:
    return store.promise(records[0].owner, keys_of(*records), ids_of(*records), **how)


def withdraw(store: Store, *records: Record) -> list[int]:
    return store.withdraw(records[0].owner, keys_of(*records), ids_of(*records))


@dataclass(frozen=True)
class Found:
    write_id: int
    shard_mask: int
    key_ordinal: int
    start_block: int
    retention_class: int
    earlier: tuple[int, ...]
    tags: tuple[int, ...]


def discover(store: Store, owner: bytes, *keys: bytes) -> tuple[list[Found], bool]:
    """Writings found, and whether the store was too busy to look at all keys."""
    body = store.discover(owner, keys_of(*keys))
    writings, busy = struct.unpack_from("<II", body)
    at, out = 8, []
    for _ in range(writings):
        wid, mask, _epoch, ordinal, start, blocks, earlier, _fid, retention, *_ = struct.unpack_from("<QQQIIHHBBHIIIBBBBQ", body, at)
        at += 64
        starts = struct.unpack_from(f"<{earlier}I", body, at)
        at += -(-4 * earlier // 8) * 8
        tags = struct.unpack_from(f"<{blocks}Q", body, at)
        at += 8 * blocks
        out.append(Found(wid, mask, ordinal, start, retention, starts, tags))
    assert at == len(body)
    return out, bool(busy)
