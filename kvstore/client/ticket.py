"""A ticket: the result of a lookup. Any agent that knows the ticket key can redeem it, without a second lookup.

    magic "KVT2" | u32 extents | u32 blocks | u32 block_tokens | u32 usable blocks | u32 window bytes | i64 expires (unix ms)
    u64 map epoch | owner 16 B | cluster tag 16 B | u64 layout tag | keys blocks x 32 B
    extents x { extent key 32 B, u64 write id, u64 write epoch, u64 absent shards, u32 first block in the extent, u32 blocks to read,
    u16 depth, u8 fidelity, 5 x zero }
    windows { u32 block, u8 approximate, u8 holders, holders x { u8 bytes, host:port } }... | BLAKE2b-256 MAC

All integers little-endian. The MAC covers all before it and is keyed with the agents' ticket key. A ticket names blocks of one cluster and
layout, and is good for about ten seconds; the nodes keep what it names for a minute. "KVT1" had neither usable blocks nor windows.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import numpy as np

from kvstore.client.native import NAME, U8, U64, Records
from kvstore.client.values import Fidelity, FidelityKind
from kvstore.errors import ConfigError, MisuseError, ProtocolError

TICKET_KEY_BYTES: Final = (16, 64)
_MAGIC: Final = b"KVT2"
_HEAD: Final = struct.Struct("<4sIIIIIqQ16s16sQ")
_WINDOW: Final = struct.Struct("<IBB")
_MAC_BYTES: Final = 32
_BLOCKS_MAX: Final = 1 << 20
WINDOWS_MAX: Final = 256
HOLDERS_MAX: Final = 8  # of one entry
ADDRESS_BYTES_MAX: Final = 255

EXTENT: Final = np.dtype(
    [
        ("extent_key", "u1", (32,)), ("write_id", "<u8"), ("write_epoch", "<u8"), ("absent", "<u8"),
        ("first_block", "<u4"), ("count", "<u4"), ("depth", "<u2"), ("fidelity", "u1"), ("zero", "u1", (5,)),
    ]
)  # fmt: skip
assert EXTENT.itemsize == 72
assert _HEAD.size == 80
assert _WINDOW.size == 6


@dataclass(frozen=True, slots=True)
class WindowAt:
    """A window entry that is said to be at hand: it ends at `block`, and these agents hold it."""

    block: int
    holders: tuple[str, ...]  # host:port
    approximate: bool = False


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
    usable_blocks: int = 0  # of the hit: what lies in front of the tokens that the engine computes in any case
    windows: tuple[WindowAt, ...] = ()  # at the end of the usable blocks and before it, the highest first; an Agent's lookup fills it

    @property
    def hit_blocks(self) -> int:
        return len(self.keys)

    @property
    def hit_tokens(self) -> int:
        return len(self.keys) * self.block_tokens

    @property
    def usable_tokens(self) -> int:
        return self.usable_blocks * self.block_tokens

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

    @property
    def names(self) -> list[bytes]:
        """Key and write id of each extent, as requests have them (NAME of kvstore/client/native.py)."""
        return [extent.tobytes()[: NAME.itemsize] for extent in self.extents]

    def to_bytes(self) -> bytes:
        windows = b"".join(_encode_window(window) for window in self.windows[:WINDOWS_MAX])
        head = _HEAD.pack(
            _MAGIC, len(self.extents), len(self.keys), self.block_tokens, self.usable_blocks, len(windows), self.expires_unix_ms,
            self.epoch, self.owner, self.cluster, self.layout_tag,
        )  # fmt: skip
        body = head + self.keys.tobytes() + self.extents.tobytes() + windows
        return body + _mac(body, self.ticket_key)

    @classmethod
    def from_bytes(cls, data: bytes, ticket_key: bytes) -> Ticket:
        """Raises ProtocolError E611 for bytes that no holder of the key made."""
        if not isinstance(data, bytes):
            raise MisuseError("E562", "ticket", f"got {type(data).__name__}", "pass bytes")
        body, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        if len(body) < 4 or not hmac.compare_digest(mac, _mac(body, ticket_key)):
            raise ProtocolError("E611", "ticket", "was not made with this ticket key, or was changed")
        return cls.unverified(data, ticket_key)

    @classmethod
    def unverified(cls, data: bytes, ticket_key: bytes) -> Self:
        """As from_bytes, for bytes from an agent of one's own whose ticket key is not known here. Raises ProtocolError E611."""
        body = data[:-_MAC_BYTES]
        if body[:4] != _MAGIC:
            cause = f"is of version {body[:4]!r}, this process reads {_MAGIC!r}"
            raise ProtocolError("E611", "ticket", cause, "run the same version of kvstore on all agents")
        if len(body) < _HEAD.size:
            raise ProtocolError("E611", "ticket", "is cut short")
        _, extents, blocks, block_tokens, usable, window_bytes, expires, epoch, owner, cluster, layout_tag = _HEAD.unpack_from(body)
        windows_at = _HEAD.size + 32 * blocks + EXTENT.itemsize * extents
        if blocks > _BLOCKS_MAX or usable > blocks or len(body) != windows_at + window_bytes:
            raise ProtocolError("E611", "ticket", "its lengths do not add up")
        keys = np.frombuffer(body, np.uint8, 32 * blocks, _HEAD.size).reshape(blocks, 32)
        table = np.frombuffer(body, EXTENT, extents, _HEAD.size + 32 * blocks)
        if int(table["count"].sum()) != blocks:
            raise ProtocolError("E611", "ticket", "its extents are not its blocks")
        windows = tuple(_decode_windows(body[windows_at:]))
        return cls(
            keys, table, block_tokens, blocks, owner, cluster, layout_tag, epoch, expires, ticket_key,
            usable_blocks=usable, windows=windows,
        )  # fmt: skip


def _encode_window(window: WindowAt) -> bytes:
    names = [name for holder in window.holders if 0 < len(name := holder.encode()) <= ADDRESS_BYTES_MAX][:HOLDERS_MAX]
    return _WINDOW.pack(window.block, window.approximate, len(names)) + b"".join(bytes([len(name)]) + name for name in names)


def _decode_windows(data: bytes) -> Iterator[WindowAt]:
    at = count = 0
    try:
        while at < len(data):
            block, approximate, holders = _WINDOW.unpack_from(data, at)
            at += _WINDOW.size
            names = []
            for _ in range(holders):
                end = at + 1 + data[at]
                names.append(data[at + 1 : end].decode())
                at = end
            count += 1
            if at > len(data) or holders > HOLDERS_MAX or count > WINDOWS_MAX or approximate > 1:
                raise ValueError
            yield WindowAt(block, tuple(names), bool(approximate))
    except (struct.error, IndexError, ValueError):
        raise ProtocolError("E611", "ticket", "its windows do not add up") from None


def _mac(body: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_MAC_BYTES, key=key, person=b"kvstore.ticket").digest()


def read_ticket_key(path: Path, code: str) -> bytes:
    """The ticket key that agents and lookup services share. Raises ConfigError: E100 for the file, `code` for its length."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError("E100", f"ticket key {path}", (error.strerror or str(error)).lower(), "name a file you may read") from None
    low, high = TICKET_KEY_BYTES
    if not low <= len(key) <= high:
        raise ConfigError(
            code, f"ticket key {path}", f"has {len(key)} bytes", f"write {low} to {high} random ones into it, for all agents the same"
        )
    return key
