"""The framed TCP protocol in plain Python: twin of kernels/wire.hpp, for tools, tests and as the oracle. docs/PROTOCOL.md is the text.

Nothing here moves bulk bytes in production; the native client and server do. Every integer is little-endian.

    frame    | magic u32 | version verb kind flags, u8 each | request id u64 | status u32 | body bytes u32 | check u32 | aux u32 | body
    HELLO    Hello                                           first on every connection, both ways; fixes its role
    DISCOVER DiscoverRequest | 32-byte keys               -> DiscoverReply | (Writing | earlier u32[] | pad to 8 | tags u64[])...
    PROMISE  PromiseRequest | WritingName...              -> PromiseAnswer...
    WITHDRAW WithdrawRequest | WritingName...             -> u32 status...
    ADMIT    AdmitRequest | 32-byte keys                  -> u32 vote...
    WHY      WhyRequest | 32-byte keys                    -> WhyReply | WhyGhost...
    SUSPECT  SuspectRequest | SuspectShard...             -> u32 status...
    READ     ReadRequest | ReadExtent... | ReadItem...    -> one ITEM frame per item: sums u64[] | digests 16 B[] | pieces
    WRITE    a record (kvstore/record.py)                 -> a bare reply
    VERBS_OPEN VerbsOpen                                  -> VerbsOpen, or bare: no RDMA here
    VERBS_READ VerbsRead | ReadExtent... | VerbsItem...   -> by RDMA WRITE, one immediate per item

Never changes: the first 8 bytes of a frame, the fixed part of HELLO, the numbers of Status, Verb, Kind and Role.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import xxhash

from kvstore.errors import ProtocolError

MAGIC: Final = 0x3146564B  # "KVF1"
VERSION: Final = 1
SMALL_BODY_MAX: Final = 1 << 20
READ_BODY_MAX: Final = 1 << 20
HELLO_BODY_MAX: Final = 48 + 4096
KEYS_MAX: Final = 8192
WHY_KEYS_MAX: Final = 512
SUSPECTS_MAX: Final = 64
READ_EXTENTS_MAX: Final = 4096
READ_ITEMS_MAX: Final = 65536
VERBS_CREDITS_MAX: Final = 65536
VERBS_ZONE_BYTES_MAX: Final = 1 << 30
RECORD_BYTES_MAX: Final = 80 << 20
KEY_BYTES: Final = 32
OWNER_BYTES: Final = 16
DIGEST_BYTES: Final = 16
NO_OWNER: Final = bytes(OWNER_BYTES)
PROMISE_PIN: Final = 1
PROMISE_TOUCH: Final = 2


class Status(IntEnum):
    """Outcomes, one table for all verbs: 0 done, 1-19 not now or not here, 20-39 refused, 40-59 faults."""

    OK = 0
    NOT_FOUND = 1
    BUSY = 2
    NO_SPACE = 3
    EXISTS = 4
    STALE_MAP = 5
    DRAINING = 6
    SUPERSEDED = 7
    BAD_REQUEST = 20
    TOO_LARGE = 21
    BAD_VERSION = 22
    WRONG_CLUSTER = 23
    TOMBSTONED = 24
    TOO_MANY_WRITINGS = 25
    UNAUTHORIZED = 26
    CORRUPT = 40
    IO_ERROR = 41
    INTERNAL = 42


class Verb(IntEnum):
    HELLO = 1
    DISCOVER = 2
    PROMISE = 3
    WITHDRAW = 4
    WHY = 5
    ADMIT = 6
    SUSPECT = 7
    READ = 16
    WRITE = 17
    VERBS_OPEN = 18
    VERBS_READ = 19
    REGISTER = 32  # of a window directory (kvstore/wire_directory.py)
    LOCATE = 33
    TOUCH = 34
    FORGET = 35
    REPORT = 36
    STATUS = 37


class Gone(IntEnum):
    """Why a writing is no longer here, as the ghost index keeps it and WHY tells it (kernels/ghosts.hpp)."""

    UNKNOWN = 0
    EXPIRED = 1
    EVICTED = 2
    WITHDRAWN = 3
    CORRUPT = 4


class Vote(IntEnum):
    """A node's answer to ADMIT for one key (kernels/store.hpp)."""

    YES = 0
    UNSEEN = 1  # not asked for before
    BUDGET = 2  # its write budget is used up


class Kind(IntEnum):
    REQUEST = 0
    REPLY = 1
    ITEM = 2


class Role(IntEnum):
    SMALL = 0
    BULK = 1
    DIRECTORY = 2


_HEADER = struct.Struct("<IBBBBQIIII")
_HELLO = struct.Struct("<BBBBI16sQQII")
_DISCOVER_REQUEST = struct.Struct("<16sQII")
_DISCOVER_REPLY = struct.Struct("<II")
_WRITING = struct.Struct("<QQQIIHHBBHIIIBBBBQ")
_PROMISE_REQUEST = struct.Struct("<16sQIIBBHI")
_WRITING_NAME = struct.Struct("<32sQ")
_PROMISE_ANSWER = struct.Struct("<IIQ")
_WITHDRAW_REQUEST = struct.Struct("<16sII")
_WHY_REQUEST = struct.Struct("<16sII")
_ADMIT_REQUEST = struct.Struct("<16sII")
_SUSPECT_REQUEST = struct.Struct("<16sII")
_SUSPECT_SHARD = struct.Struct("<32sQB7x")
_WHY_REPLY = struct.Struct("<II")
_WHY_GHOST = struct.Struct("<IIHBBI64s")
_READ_REQUEST = struct.Struct("<16sQII")
_READ_EXTENT = struct.Struct("<32sQBBHHH")
_READ_ITEM = struct.Struct("<HBB")
_VERBS_OPEN = struct.Struct("<16sIIBBHIQQII")
_VERBS_READ = struct.Struct("<16sQIIII")
_VERBS_ITEM = struct.Struct("<HBBII")
HEADER_BYTES: Final = _HEADER.size
assert (_HEADER.size, _HELLO.size, _DISCOVER_REQUEST.size, _DISCOVER_REPLY.size, _WRITING.size) == (32, 48, 32, 8, 64)
assert (_PROMISE_REQUEST.size, _WRITING_NAME.size, _PROMISE_ANSWER.size, _WITHDRAW_REQUEST.size) == (40, 40, 16, 24)
assert (_WHY_REQUEST.size, _WHY_REPLY.size, _WHY_GHOST.size) == (24, 8, 80)
assert (_SUSPECT_REQUEST.size, _SUSPECT_SHARD.size) == (24, 48)
assert (_READ_REQUEST.size, _READ_EXTENT.size, _READ_ITEM.size) == (32, 48, 4)
assert (_VERBS_OPEN.size, _VERBS_READ.size, _VERBS_ITEM.size) == (56, 40, 12)


def body_check(body: bytes) -> int:
    """Low 32 bits of xxh3-64: what a frame's check field holds on SMALL connections and in READ and VERBS requests."""
    return xxhash.xxh3_64_intdigest(body) & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. `check` is what stood in the header; decode_header does not compare it with the body."""

    verb: int
    kind: int
    request_id: int
    status: int = 0
    aux: int = 0
    body: bytes = b""
    version: int = VERSION
    flags: int = 0
    check: int = 0


def encode(verb: int, body: bytes = b"", *, request_id: int = 0, kind: int = Kind.REQUEST, status: int = 0, aux: int = 0) -> bytes:
    """A whole frame with the right check for its verb: zero for WRITE and for answers on BULK connections."""
    bulk = verb == Verb.WRITE or (verb in (Verb.READ, Verb.VERBS_READ) and kind != Kind.REQUEST)
    check = 0 if bulk else body_check(body)
    return _HEADER.pack(MAGIC, VERSION, verb, kind, 0, request_id, status, len(body), check, aux) + body


def encode_header(
    verb: int, body_bytes: int, check: int = 0, *, request_id: int = 0, kind: int = 0, status: int = 0, aux: int = 0,
    magic: int = MAGIC, version: int = VERSION, flags: int = 0,
) -> bytes:  # fmt: skip
    """A header with any field as told, for frames that are wrong on purpose."""
    return _HEADER.pack(magic, version, verb, kind, flags, request_id, status, body_bytes, check, aux)


def decode_header(header: bytes) -> tuple[Frame, int]:
    """A frame without its body, and the body's length. Raises ProtocolError for a foreign magic."""
    magic, version, verb, kind, flags, request_id, status, body_bytes, check, aux = _HEADER.unpack(header)
    if magic != MAGIC:
        raise ProtocolError("E601", "frame", f"magic is {magic:#010x}", "talk to a kvstore data port")
    return Frame(verb, kind, request_id, status, aux, version=version, flags=flags, check=check), body_bytes


# --- bodies ---


@dataclass(frozen=True, slots=True)
class Hello:
    """`cluster` is ClusterMap.tag; `boot_id`, `bucket_seconds` and `bucket` are zero from clients."""

    role: int
    cluster: bytes
    epoch: int = 0
    boot_id: int = 0
    bucket_seconds: int = 0
    bucket: int = 0
    version_min: int = VERSION
    version_max: int = VERSION
    capability: bytes = b""

    def encode(self) -> bytes:
        fixed = (self.version_min, self.version_max, self.role, 0, len(self.capability), self.cluster)
        return _HELLO.pack(*fixed, self.epoch, self.boot_id, self.bucket_seconds, self.bucket) + self.capability

    @classmethod
    def decode(cls, body: bytes) -> Hello:
        _need(len(body) >= _HELLO.size, "HELLO")
        low, high, role, _, capability_bytes, cluster, epoch, boot_id, bucket_seconds, bucket = _HELLO.unpack_from(body)
        _need(len(body) == _HELLO.size + capability_bytes, "HELLO")
        return cls(role, cluster, epoch, boot_id, bucket_seconds, bucket, low, high, body[_HELLO.size :])


@dataclass(frozen=True, slots=True)
class Writing:
    """One writing of an extent that a DISCOVER found: where it starts in its chain, what shards of it are there, its blocks' tags."""

    write_id: int
    shard_mask: int
    write_epoch: int
    key_ordinal: int
    start_block: int
    fidelity: int
    retention_class: int
    depth: int
    kv_group: int
    pg: int
    block_bytes: int
    k: int
    m: int
    cipher: int
    plane_count: int
    layout_tag: int
    earlier: tuple[int, ...]
    tags: tuple[int, ...]


def encode_discover(keys: Sequence[bytes], *, owner: bytes = NO_OWNER, epoch: int = 0) -> bytes:
    return _DISCOVER_REQUEST.pack(owner, epoch, len(keys), 0) + b"".join(keys)


def decode_discover_reply(body: bytes) -> tuple[list[Writing], bool]:
    """What was found, and whether some keys were not looked at (then a "no" means nothing)."""
    _need(len(body) >= _DISCOVER_REPLY.size, "DISCOVER")
    count, busy = _DISCOVER_REPLY.unpack_from(body)
    at = _DISCOVER_REPLY.size
    found = []
    for _ in range(count):
        _need(at + _WRITING.size <= len(body), "DISCOVER")
        (write_id, mask, epoch, ordinal, start, blocks, earlier, fidelity, retention_class, depth, kv_group, pg, block_bytes, k, m, cipher,
         planes, layout_tag) = _WRITING.unpack_from(body, at)  # fmt: skip
        tags_at = at + (_WRITING.size + 4 * earlier + 7) // 8 * 8
        _need(tags_at + 8 * blocks <= len(body), "DISCOVER")
        starts = struct.unpack_from(f"<{earlier}I", body, at + _WRITING.size)
        tags = struct.unpack_from(f"<{blocks}Q", body, tags_at)
        found.append(
            Writing(
                write_id, mask, epoch, ordinal, start, fidelity, retention_class, depth, kv_group, pg, block_bytes, k, m, cipher, planes,
                layout_tag, starts, tags,
            )
        )  # fmt: skip
        at = tags_at + 8 * blocks
    _need(at == len(body), "DISCOVER")
    return found, bool(busy)


def encode_discover_reply(found: Sequence[Writing], busy: bool = False) -> bytes:
    parts = [_DISCOVER_REPLY.pack(len(found), busy)]
    for w in found:
        parts.append(
            _WRITING.pack(
                w.write_id, w.shard_mask, w.write_epoch, w.key_ordinal, w.start_block, len(w.tags), len(w.earlier), w.fidelity,
                w.retention_class, w.depth, w.kv_group, w.pg, w.block_bytes, w.k, w.m, w.cipher, w.plane_count, w.layout_tag,
            )
        )  # fmt: skip
        parts.append(struct.pack(f"<{len(w.earlier)}I", *w.earlier) + bytes(4 * (len(w.earlier) % 2)))
        parts.append(struct.pack(f"<{len(w.tags)}Q", *w.tags))
    return b"".join(parts)


_VOTES: Final = frozenset(Vote)  # a number of a newer node is no reason not to write
Name = tuple[bytes, int]  # extent key, write id


def encode_promise(
    names: Sequence[Name], *, owner: bytes = NO_OWNER, epoch: int = 0, bucket: int = 0,
    flags: int = PROMISE_PIN | PROMISE_TOUCH, retention_class: int = 2, pin_seconds: int = 60,
) -> bytes:  # fmt: skip
    return _PROMISE_REQUEST.pack(owner, epoch, len(names), bucket, flags, retention_class, pin_seconds, 0) + _encode_names(names)


def decode_promise_reply(body: bytes) -> list[tuple[Status, int]]:
    """Per name: OK (held, pinned and touched as asked), NOT_FOUND or BUSY (held, not pinned); and the mask of its shards here."""
    _need(len(body) % _PROMISE_ANSWER.size == 0, "PROMISE")
    return [(Status(status), mask) for status, _, mask in _PROMISE_ANSWER.iter_unpack(body)]


def decode_last_buckets(body: bytes) -> list[int]:
    """Of a PROMISE reply, per name: time bucket of its last use before this touch; 0: not held."""
    _need(len(body) % _PROMISE_ANSWER.size == 0, "PROMISE")
    return [bucket for _, bucket, _ in _PROMISE_ANSWER.iter_unpack(body)]


def encode_withdraw(names: Sequence[Name], *, owner: bytes = NO_OWNER) -> bytes:
    return _WITHDRAW_REQUEST.pack(owner, len(names), 0) + _encode_names(names)


def decode_withdraw_reply(body: bytes) -> list[Status]:
    _need(len(body) % 4 == 0, "WITHDRAW")
    return [Status(status) for (status,) in struct.iter_unpack("<I", body)]


@dataclass(frozen=True, slots=True)
class Ghost:
    """A writing that is gone. `reason` is a Gone; `tags` has the lowest byte of each block's tag."""

    key_ordinal: int
    reason: int
    retention_class: int
    last_bucket: int
    tags: bytes


def encode_admit(keys: Sequence[bytes] | bytes, *, owner: bytes = NO_OWNER, bucket: int = 0) -> bytes:
    """Keys one by one, or joined."""
    joined = b"".join(keys) if not isinstance(keys, bytes) else keys
    return _ADMIT_REQUEST.pack(owner, len(joined) // KEY_BYTES, bucket) + joined


def decode_admit_reply(body: bytes) -> list[Vote]:
    """One vote per key."""
    _need(len(body) % 4 == 0, "ADMIT")
    return [Vote(vote) if vote in _VOTES else Vote.YES for (vote,) in struct.iter_unpack("<I", body)]


def encode_why(keys: Sequence[bytes] | bytes, *, owner: bytes = NO_OWNER) -> bytes:
    """Keys one by one, or joined."""
    joined = b"".join(keys) if not isinstance(keys, bytes) else keys
    return _WHY_REQUEST.pack(owner, len(joined) // KEY_BYTES, 0) + joined


def decode_why_reply(body: bytes) -> list[Ghost]:
    """Newest first for each key."""
    _need(len(body) >= _WHY_REPLY.size, "WHY")
    count, _ = _WHY_REPLY.unpack_from(body)
    _need(len(body) == _WHY_REPLY.size + count * _WHY_GHOST.size, "WHY")
    found = []
    for ordinal, bucket, blocks, reason, retention_class, _, tags in _WHY_GHOST.iter_unpack(body[_WHY_REPLY.size :]):
        _need(0 < blocks <= len(tags), "WHY")
        found.append(Ghost(ordinal, reason, retention_class, bucket, tags[:blocks]))
    return found


def encode_suspect(shards: Sequence[tuple[bytes, int, int]], *, owner: bytes = NO_OWNER) -> bytes:
    """Shards as (extent key, write id, number), at most SUSPECTS_MAX."""
    return _SUSPECT_REQUEST.pack(owner, len(shards), 0) + b"".join(_SUSPECT_SHARD.pack(*shard) for shard in shards)


def decode_suspect_reply(body: bytes) -> list[Status]:
    """Per shard: OK (it will be looked at), NOT_FOUND or BUSY."""
    _need(len(body) % 4 == 0, "SUSPECT")
    return [Status(status) for (status,) in struct.iter_unpack("<I", body)]


@dataclass(frozen=True, slots=True)
class ReadExtent:
    extent_key: bytes
    write_id: int
    shard: int
    first_block: int
    block_count: int


def encode_read(extents: Sequence[ReadExtent], items: Sequence[tuple[int, int]], *, owner: bytes = NO_OWNER, epoch: int = 0) -> bytes:
    """`items` are (ordinal of the extent, plane); answers come in that order."""
    parts = [_READ_REQUEST.pack(owner, epoch, len(extents), len(items))]
    parts += [_READ_EXTENT.pack(e.extent_key, e.write_id, e.shard, 0, e.first_block, e.block_count, 0) for e in extents]
    parts += [_READ_ITEM.pack(extent, plane, 0) for extent, plane in items]
    return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Item:
    """Body of an OK answer to one item: per block its sum and digest, then the pieces back to back."""

    sums: tuple[int, ...]
    digests: tuple[bytes, ...]
    pieces: bytes


def decode_item(body: bytes, block_count: int) -> Item:
    _need(len(body) >= 24 * block_count, "READ item")
    sums = struct.unpack_from(f"<{block_count}Q", body)
    digests = tuple(body[at : at + DIGEST_BYTES] for at in range(8 * block_count, 24 * block_count, DIGEST_BYTES))
    return Item(sums, digests, body[24 * block_count :])


@dataclass(frozen=True, slots=True)
class VerbsOpen:
    """One end of an RDMA connection; `credits` and the zone's fields are zero in replies. `mtu` is an ibv_mtu, 1 to 5."""

    gid: bytes
    qpn: int
    psn: int
    mtu: int
    credits: int = 0
    zone_addr: int = 0
    zone_bytes: int = 0
    rkey: int = 0
    lid: int = 0

    def encode(self) -> bytes:
        fixed = (self.gid, self.qpn, self.psn, self.mtu, 0, self.lid, self.credits, self.zone_addr, self.zone_bytes, self.rkey, 0)
        return _VERBS_OPEN.pack(*fixed)

    @classmethod
    def decode(cls, body: bytes) -> VerbsOpen:
        _need(len(body) == _VERBS_OPEN.size, "VERBS_OPEN")
        gid, qpn, psn, mtu, _, lid, credits_, zone_addr, zone_bytes, rkey, _ = _VERBS_OPEN.unpack(body)
        return cls(gid, qpn, psn, mtu, credits_, zone_addr, zone_bytes, rkey, lid)


@dataclass(frozen=True, slots=True)
class VerbsItem:
    """What is asked for and where it goes: `count` is the body's expected length, `offset` its place in the zone."""

    extent: int
    plane: int
    count: int
    offset: int


def encode_verbs_read(
    extents: Sequence[ReadExtent],
    items: Sequence[VerbsItem],
    *,
    credits_told: int = 0,
    round_: int = 0,
    owner: bytes = NO_OWNER,
    epoch: int = 0,
) -> bytes:
    parts = [_VERBS_READ.pack(owner, epoch, len(extents), len(items), credits_told, round_)]
    parts += [_READ_EXTENT.pack(e.extent_key, e.write_id, e.shard, 0, e.first_block, e.block_count, 0) for e in extents]
    parts += [_VERBS_ITEM.pack(i.extent, i.plane, 0, i.count, i.offset) for i in items]
    return b"".join(parts)


def decode_verbs_read(body: bytes) -> tuple[list[ReadExtent], list[VerbsItem], int, int]:
    """Extents, items, credits, round. For peers of tests."""
    _need(len(body) >= _VERBS_READ.size, "VERBS_READ")
    _, _, extents, items, credits_told, round_ = _VERBS_READ.unpack_from(body)
    at = _VERBS_READ.size
    items_at = at + extents * _READ_EXTENT.size
    _need(len(body) == items_at + items * _VERBS_ITEM.size, "VERBS_READ")
    asked = [
        ReadExtent(key, write_id, shard, first, count)
        for key, write_id, shard, _, first, count, _ in _READ_EXTENT.iter_unpack(body[at:items_at])
    ]
    return asked, [VerbsItem(e, p, n, o) for e, p, _, n, o in _VERBS_ITEM.iter_unpack(body[items_at:])], credits_told, round_


def verbs_immediate(status: int, round_: int, ordinal: int) -> int:
    """In host order; verbs wants it in network order."""
    return status << 24 | (round_ & 0xFF) << 16 | (ordinal & 0xFFFF)


def _encode_names(names: Sequence[Name]) -> bytes:
    return b"".join(_WRITING_NAME.pack(key, write_id) for key, write_id in names)


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ProtocolError("E602", f"{what} reply", "its lengths do not add up", "report it: the peer is not what it says")


# --- a plain blocking connection, for tools and tests ---


class Connection:
    """One connection, greeted. Frames go out as they are; `receive` gives the next one, whatever it is."""

    def __init__(self, address: tuple[str, int], hello: Hello | None, timeout_seconds: float = 10.0) -> None:
        """`hello` None: connect and send nothing. Raises ProtocolError if the greeting is refused, OSError if nobody answers."""
        self.socket = socket.create_connection(address, timeout_seconds)
        self.peer: Hello | None = None
        if hello is None:
            return
        try:
            self.send(encode(Verb.HELLO, hello.encode()))
            answer = self.receive()
            if answer.status != Status.OK:
                raise ProtocolError("E603", f"{address[0]}:{address[1]}", f"HELLO refused with {Status(answer.status).name}")
            self.peer = Hello.decode(answer.body)
        except BaseException:
            self.socket.close()
            raise

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> Frame:
        """The next frame. Raises EOFError at the peer's end, TimeoutError when nothing comes."""
        frame, body_bytes = decode_header(self._exactly(HEADER_BYTES))
        body = self._exactly(body_bytes)
        return Frame(frame.verb, frame.kind, frame.request_id, frame.status, frame.aux, body, frame.version, frame.flags, frame.check)

    def ask(self, verb: int, body: bytes, request_id: int = 1) -> Frame:
        """Sends one request and gives its one answer."""
        self.send(encode(verb, body, request_id=request_id))
        return self.receive()

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exactly(self, count: int) -> bytes:
        chunks = bytearray()
        while len(chunks) < count:
            got = self.socket.recv(min(count - len(chunks), 1 << 20))
            if not got:
                raise EOFError("peer closed the connection")
            chunks += got
        return bytes(chunks)
