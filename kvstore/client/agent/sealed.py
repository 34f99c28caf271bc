"""A window entry as agents keep and send it: what it is, under a sum seeded with its key, then the engine's opaque bytes.

    magic "KVW1" | u8 fidelity | u8 zero | u16 depth | u64 entry bytes | xxh3-128 over (window key | the 16 bytes before | entry) | entry

The sum is made once, where the entry is kept, and checked where it is used with the reader's own key: whatever happened to the bytes
between, those of another prefix (a stale ring, a buffer that was filled again, a peer that mixes up its answers) never pass. Little-endian.

The window key at H tokens is the block key of the last block before H. Approximate entries have keys of their own, derived from it, so that
one never hides an exact entry, and a reader that takes only exact ones need not hear of them.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any, Final

import xxhash

from kvstore.client.values import Fidelity, FidelityKind

_HEAD: Final = struct.Struct("<4sBxHQ")
_MAGIC: Final = b"KVW1"
SUM_BYTES: Final = 16
HEAD_BYTES: Final = _HEAD.size + SUM_BYTES
assert HEAD_BYTES == 32


def window_key(block_key: bytes, approximate: bool = False) -> bytes:
    """The name of the entry that ends with this block."""
    return hashlib.blake2b(block_key, digest_size=32, person=b"kvstore.approx").digest() if approximate else block_key


def seal(key: bytes, entry: Any, fidelity: Fidelity) -> bytes:
    """What goes before `entry`, any contiguous buffer."""
    head = _HEAD.pack(_MAGIC, fidelity.kind, fidelity.depth, memoryview(entry).nbytes)
    return head + _sum(key, head, entry)


def unseal(key: bytes, sealed: memoryview) -> tuple[memoryview, Fidelity] | None:
    """The entry (a part of `sealed`) and how it was computed. None for bytes that were not sealed under `key`, or were changed."""
    if sealed.nbytes <= HEAD_BYTES:
        return None
    head, entry = bytes(sealed[: _HEAD.size]), sealed[HEAD_BYTES:]
    magic, kind, depth, size = _HEAD.unpack(head)
    if magic != _MAGIC or size != entry.nbytes or sealed[_HEAD.size : HEAD_BYTES] != _sum(key, head, entry):
        return None
    if kind > max(FidelityKind) or (depth > 0) != (kind == FidelityKind.APPROX):
        return None
    return entry, Fidelity(FidelityKind(kind), depth)


def _sum(key: bytes, head: bytes, entry: Any) -> bytes:
    whole = xxhash.xxh3_128(key)
    whole.update(head)
    whole.update(entry)
    return whole.digest()
