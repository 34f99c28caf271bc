"""A ticket: the result of a lookup. Any agent that knows the ticket key can redeem it, without a second lookup.

    magic "KVT1" | u32 extents | u32 blocks | u32 block_tokens | u8 flags[4] (zero) | i64 expires (unix ms) | u64 map epoch
    owner 16 B | cluster tag 16 B | u64 layout tag | keys blocks x 32 B | extents x { extent key 32 B, u64 write id, u64 write epoch,
    u64 absent shards, u32 first block in the extent, u32 blocks to read, u16 depth, u8 fidelity, 5 x zero } | BLAKE2b-256 MAC

All integers little-endian. The MAC covers all before it and is keyed with the agents' ticket key. A ticket names blocks of one cluster and
layout, and is good for about ten seconds; the nodes keep what it names for a minute.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvstore.client.native import U8, U64, Records
from kvstore.client.values import Fidelity, FidelityKind
from kvstore.errors import MisuseError, ProtocolError

_MAGIC: Final = b"KVT1"
_HEAD: Final = struct.Struct("<4sIII4xqQ16s16sQ")
_MAC_BYTES: Final = 32
_BLOCKS_MAX: Final = 1 << 20

EXTENT: Final = np.dtype(
    [
        ("extent_key", "u1", (32,)), ("write_id", "<u8"), ("write_epoch", "<u8"), ("absent", "<u8"),
        ("first_block", "<u4"), ("count", "<u4"), ("depth", "<u2"), ("fidelity", "u1"), ("zero", "u1", (5,)),
    ]
)  # fmt: skip
assert EXTENT.itemsize == 72
assert _HEAD.size == 76


@dataclass(frozen=True, eq=False)
class Ticket:
    """What is there of a prompt, promised for a while. Blocks [0, hit_blocks) of the chain; extent i follows extent i - 1."""

    keys: U8  # (hit_blocks, 32)
    extents: Records  # of dtype EXTENT
    block_tokens: int
    asked_blocks: int  # of the prompt; hit_blocks after from_bytes
    owner: bytes
    cluster: bytes
    layout_tag: int
    epoch: int
    expires_unix_ms: int
    ticket_key: bytes = field(repr=False)
    retention_class: str = "other"

    @property
    def hit_blocks(self) -> int:
        return len(self.keys)

    @property
    def hit_tokens(self) -> int:
        return len(self.keys) * self.block_tokens

    @property
    def fidelity(self) -> Fidelity:
        """The weakest of its extents: what a continuation of this prompt rests on."""
        kinds, depths = self.extents["fidelity"], self.extents["depth"]
        if (kinds == FidelityKind.APPROX).any():
            return Fidelity.approx(int(depths.max()))
        return Fidelity(FidelityKind(int(kinds.max(initial=0))))

    def expired(self, wall_time: float) -> bool:
        return wall_time * 1000 > self.expires_unix_ms

    @property
    def write_ids(self) -> U64:
        ids: U64 = self.extents["write_id"]
        return ids

    def to_bytes(self) -> bytes:
        head = _HEAD.pack(
            _MAGIC, len(self.extents), len(self.keys), self.block_tokens, self.expires_unix_ms, self.epoch,
            self.owner, self.cluster, self.layout_tag,
        )  # fmt: skip
        body = head + self.keys.tobytes() + self.extents.tobytes()
        return body + _mac(body, self.ticket_key)

    @classmethod
    def from_bytes(cls, data: bytes, ticket_key: bytes) -> Ticket:
        """Raises ProtocolError E611 for bytes that no holder of the key made."""
        if not isinstance(data, bytes):
            raise MisuseError("E562", "ticket", f"got {type(data).__name__}", "pass bytes")
        body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        if len(body) < _HEAD.size or not hmac.compare_digest(mac, _mac(body, ticket_key)):
            raise ProtocolError("E611", "ticket", "was not made with this ticket key, or was changed")
        magic, extents, blocks, block_tokens, expires, epoch, owner, cluster, layout_tag = _HEAD.unpack_from(body)
        if magic != _MAGIC or blocks > _BLOCKS_MAX or len(body) != _HEAD.size + 32 * blocks + EXTENT.itemsize * extents:
            raise ProtocolError("E611", "ticket", "is of another version")
        keys = np.frombuffer(body, np.uint8, 32 * blocks, _HEAD.size).reshape(blocks, 32)
        table = np.frombuffer(body, EXTENT, extents, _HEAD.size + 32 * blocks)
        if int(table["count"].sum()) != blocks:
            raise ProtocolError("E611", "ticket", "its extents are not its blocks")
        return cls(keys, table, block_tokens, blocks, owner, cluster, layout_tag, epoch, expires, ticket_key)


def _mac(body: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_MAC_BYTES, key=key, person=b"kvstore.ticket").digest()
