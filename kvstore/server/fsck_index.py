"""Reads the index of a stopped node and writes its places to stdout, for fsck: a process of its own, for a damaged index may kill it.

Row: u8 kind | 57-byte extents key | u32 segment | u32 offset / 4096 | u32 bytes; the first has u64 stop, u64 last
txn for a key. Exit 1 with one line on stderr for damage it noticed.
"""

from __future__ import annotations

import struct
import sys
from typing import Final

import lmdb

from kvstore.entry import decode, recency_key, recency_sound
from kvstore.filter import STOP_KEY
from kvstore.record import ALIGN

ROW: Final = struct.Struct("<B57sIII")
ENTRY: Final = 0
FREED: Final = 1
STATE: Final = 2
_TABLES: Final = (b"extents", b"recency", b"freed")


def read_index(path: str) -> str:
    """Writes the rows; returns what is wrong, "" for nothing."""
    out = sys.stdout.buffer
    # No lock file: fsck holds the directory. The map is as large as the file.
    with lmdb.open(path, readonly=True, lock=False, max_dbs=8) as env, env.begin() as txn:
        extents, recency, freed = (env.open_db(name, txn=txn, create=False) for name in _TABLES)
        stop = (txn.get(STOP_KEY) or b"").ljust(8, b"\0")[:8]
        out.write(ROW.pack(STATE, stop + struct.pack("<Q", env.info()["last_txnid"]), 0, 0, 0))
        count = 0
        for key, value in txn.cursor(extents):
            entry = decode(key, value)
            if entry is None:
                return f"entry {count} of the index is damaged"
            row = txn.get(recency_key(key, entry.retention_class, entry.bucket, entry.start_block, entry.reused), db=recency)
            if row is None:
                return f"entry {count} of the index has no recency row"
            out.write(ROW.pack(ENTRY, key, entry.segment, entry.offset_bytes // ALIGN, entry.record_bytes))
            count += 1
        if count != txn.stat(extents)["entries"] or count != txn.stat(recency)["entries"]:
            return f"{count} entries can be reached of {txn.stat(extents)['entries']}, with {txn.stat(recency)['entries']} recency rows"
        if not all(recency_sound(key, value) for key, value in txn.cursor(recency)):
            return "a recency row is damaged"
        for key, value in txn.cursor(freed):
            segment, offset_4k = struct.unpack(">II", key)
            out.write(ROW.pack(FREED, bytes(57), segment, offset_4k, struct.unpack("<I", value)[0] * ALIGN))
    return ""


def main() -> int:
    try:
        problem = read_index(sys.argv[1])
    except (lmdb.Error, struct.error) as error:
        problem = f"the index cannot be read: {error}"
    sys.stdout.buffer.flush()
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
