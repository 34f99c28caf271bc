"""What stands in the messages of link.py, for both ends: a class for each, `encode` and `decode`. docs/AGENT.md is the text; little-endian.

Decoding takes whatever a hostile peer sends: ProtocolError E637 for lengths that do not add up, counts past their limits, no text.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from kvstore.client.agent.frames import ID_BYTES
from kvstore.client.values import DEPTH_MAX, Accept, Fidelity, FidelityKind, LoadOutcome, LoadResult, StoreOutcome, StoreResult
from kvstore.errors import KvstoreError, LayoutError, ProtocolError
from kvstore.keys import KEY_BYTES, Keys
from kvstore.layout import Layout, Section

KEYS_MAX: Final = 1 << 15  # blocks of one prompt: 4 M tokens
SECTIONS_MAX: Final = 1024
TEXT_BYTES_MAX: Final = 1024
SECONDS_MAX: Final = 3600.0


class _Reader:
    """Takes a body apart, front to back."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def take(self, shape: struct.Struct) -> tuple[int | float | bytes, ...]:
        if self._at + shape.size > len(self._body):
            raise wrong("cut short")
        values = shape.unpack_from(self._body, self._at)
        self._at += shape.size
        return values

    def number(self, shape: struct.Struct) -> int:
        (value,) = self.take(shape)
        assert isinstance(value, int)
        return value

    def seconds(self) -> float | None:
        """None where a negative number stands."""
        (value,) = self.take(_F64)
        assert isinstance(value, float)
        if math.isnan(value):
            raise wrong("a time that is no number")
        return None if value < 0 else min(value, SECONDS_MAX)

    def some(self, size: int) -> bytes:
        if not 0 <= size <= len(self._body) - self._at:
            raise wrong("cut short")
        self._at += size
        return self._body[self._at - size : self._at]

    def text(self) -> str:
        size = self.number(_U16)
        if size > TEXT_BYTES_MAX:
            raise wrong("a text that is too long")
        try:
            return self.some(size).decode()
        except UnicodeDecodeError:
            raise wrong("a text that is none") from None

    def keys(self) -> Keys:
        """To the end of the body."""
        rest = self.rest()
        if len(rest) % KEY_BYTES or len(rest) > KEY_BYTES * KEYS_MAX:
            raise wrong(f"{len(rest)} bytes of keys")
        return np.frombuffer(rest, np.uint8).reshape(-1, KEY_BYTES)

    def rest(self) -> bytes:
        return self.some(len(self._body) - self._at)

    def end(self) -> None:
        if self._at != len(self._body):
            raise wrong("more bytes than it says")


_U8, _U16, _U32, _I64, _F64 = (struct.Struct(f"<{code}") for code in "BHIqd")
_HELLO: Final = struct.Struct("<16sIIIH")
_STORE: Final = struct.Struct("<QIIBH")
_KEEP: Final = struct.Struct("<QIBH")
_RESULT: Final = struct.Struct("<BIQdIIIIII")
_STORED: Final = struct.Struct("<BIQIIIII")
_WELCOME: Final = struct.Struct("<QQQI16sB")
_RANGE: Final = struct.Struct("<QQ")
_STAGED: Final = struct.Struct("<QI")
_PLANE: Final = struct.Struct("<HI")
_ENTRY: Final = struct.Struct("<QIIBHB")
_LOAD_OUTCOMES: Final = tuple(LoadOutcome)
_STORE_OUTCOMES: Final = tuple(StoreOutcome)
WHERE: Final = ("", "own", "peer")  # of an entry; "": there is none


def wrong(cause: str) -> ProtocolError:
    return ProtocolError("E637", "message between agent and worker", cause, "run the same version of kvstore for both")


def text(value: str) -> bytes:
    data = value.encode(errors="replace")[:TEXT_BYTES_MAX]
    return _U16.pack(len(data)) + data


def seconds(value: float | None) -> bytes:
    return _F64.pack(-1.0 if value is None else max(0.0, value))


def accept_bytes(accept: Accept) -> bytes:
    return struct.pack("<iB", accept.depth_max, accept.decode)


def _accept(reader: _Reader) -> Accept:
    depth, decode = reader.take(_ACCEPT)
    assert isinstance(depth, int)
    if not -1 <= depth <= DEPTH_MAX:
        raise wrong(f"an accepted depth of {depth}")
    return Accept(depth, bool(decode))


_ACCEPT: Final = struct.Struct("<iB")


def fidelity_of(kind: int, depth: int) -> Fidelity:
    try:
        return Fidelity(FidelityKind(kind), depth)
    except (ValueError, KvstoreError):
        raise wrong(f"fidelity {kind} of depth {depth}") from None


@dataclass(frozen=True, slots=True)
class Hello:
    """What kind of engine attaches. Agents have one client for each kind."""

    layout: Layout
    owner: bytes = bytes(16)
    kv_group: int = 0
    block_tokens: int = 128
    slots: int = 134  # AgentConfig.slots
    name: str = ""

    def encode(self) -> bytes:
        sections = self.layout.sections
        head = _HELLO.pack(self.owner, self.kv_group, self.block_tokens, self.slots, len(sections))
        return head + text(self.name) + b"".join(_U32.pack(section.bytes) + text(section.name) for section in sections)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = _Reader(body)
        owner, group, tokens, slots, count = reader.take(_HELLO)
        assert isinstance(owner, bytes) and isinstance(group, int) and isinstance(tokens, int) and isinstance(slots, int)
        assert isinstance(count, int)
        if not 0 < count <= SECTIONS_MAX or not 0 < tokens <= 1 << 20 or not 0 < slots <= 1 << 20:
            raise wrong(f"{count} sections, blocks of {tokens} tokens")
        name = reader.text()
        sections = []
        for _ in range(count):
            size = reader.number(_U32)
            sections.append(Section(reader.text(), size))
        reader.end()
        try:
            return cls(Layout(tuple(sections)), owner, group, tokens, slots, name)
        except LayoutError as error:
            raise wrong(str(error)) from None


@dataclass(frozen=True, slots=True)
class Welcome:
    """What comes with the two descriptors: the memory that the agent writes, then the one that this worker writes."""

    arena_bytes: int
    own_bytes: int
    quota_bytes: int  # of the arena, that this worker may have pinned at once
    k: int  # of the cluster: what planes are cut by
    cluster: bytes
    classes: tuple[str, ...]  # of the cluster map

    def encode(self) -> bytes:
        head = _WELCOME.pack(self.arena_bytes, self.own_bytes, self.quota_bytes, self.k, self.cluster, len(self.classes))
        return head + b"".join(text(name) for name in self.classes)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = _Reader(body)
        arena, own, quota, k, cluster, count = reader.take(_WELCOME)
        classes = tuple(reader.text() for _ in range(int(count)))
        reader.end()
        assert isinstance(cluster, bytes)
        return cls(int(arena), int(own), int(quota), int(k), cluster, classes)


@dataclass(frozen=True, slots=True)
class LookupAsked:
    keys: Keys
    accept: Accept
    retention_class: str
    deadline_seconds: float | None
    input_tokens: int | None

    def encode(self) -> bytes:
        tokens = -1 if self.input_tokens is None else self.input_tokens
        head = accept_bytes(self.accept) + seconds(self.deadline_seconds) + _I64.pack(tokens) + text(self.retention_class)
        return head + self.keys.tobytes()

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = _Reader(body)
        accept, deadline, tokens = _accept(reader), reader.seconds(), reader.number(_I64)
        name = reader.text()
        return cls(reader.keys(), accept, name, deadline, None if tokens < 0 else tokens)


@dataclass(frozen=True, slots=True)
class LoadAsked:
    """`first` and `count`: blocks of the ticket's hit."""

    ticket: bytes
    first: int
    count: int
    eager: bool
    by_plane: bool
    deadline_seconds: float | None
    retention_class: str

    def encode(self) -> bytes:
        head = struct.pack("<IIB", self.first, self.count, self.eager | self.by_plane << 1)
        return head + seconds(self.deadline_seconds) + text(self.retention_class) + self.ticket

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = _Reader(body)
        first, count, flags = reader.number(_U32), reader.number(_U32), reader.number(_U8)
        deadline, name = reader.seconds(), reader.text()
        if not 0 < count <= KEYS_MAX or first > KEYS_MAX or flags > 3:
            raise wrong(f"a load of {count} blocks")
        return cls(reader.rest(), first, count, bool(flags & 1), bool(flags & 2), deadline, name)


@dataclass(frozen=True, slots=True)
class StoreAsked:
    """`blocks` rows of the worker's own memory from `offset` on."""

    keys: Keys
    offset: int
    first_block: int
    blocks: int
    fidelity: Fidelity
    retention_class: str

    def encode(self) -> bytes:
        head = _STORE.pack(self.offset, self.first_block, self.blocks, self.fidelity.kind, self.fidelity.depth)
        return head + text(self.retention_class) + self.keys.tobytes()

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = _Reader(body)
        offset, first, blocks, kind, depth = (int(value) for value in reader.take(_STORE))
        name = reader.text()
        return cls(reader.keys(), offset, first, blocks, fidelity_of(kind, depth), name)


@dataclass(frozen=True, slots=True)
class WindowAsked:
    keys: Keys  # of the blocks before the entry's end
    ticket: bytes  # b"": none
    accept: Accept
    deadline_seconds: float | None

    def encode(self) -> bytes:
        head = accept_bytes(self.accept) + seconds(self.deadline_seconds)
        return head + _U32.pack(len(self.ticket)) + self.ticket + self.keys.tobytes()

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = _Reader(body)
        accept, deadline = _accept(reader), reader.seconds()
        ticket = reader.some(reader.number(_U32))
        return cls(reader.keys(), ticket, accept, deadline)


@dataclass(frozen=True, slots=True)
class KeepAsked:
    """`size` bytes of the worker's own memory are the entry that ends with the last of `keys`. Of a DROP: 0 bytes."""

    keys: Keys
    offset: int
    size: int
    fidelity: Fidelity = Fidelity.EXACT

    def encode(self) -> bytes:
        return _KEEP.pack(self.offset, self.size, self.fidelity.kind, self.fidelity.depth) + self.keys.tobytes()

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = _Reader(body)
        offset, size, kind, depth = (int(value) for value in reader.take(_KEEP))
        return cls(reader.keys(), offset, size, fidelity_of(kind, depth))


@dataclass(frozen=True, slots=True)
class Entry:
    """A window entry in the agent's memory; pinned until it is released. `where` "": none."""

    offset: int = 0
    size: int = 0
    tokens: int = 0
    fidelity: Fidelity = Fidelity.EXACT
    where: str = ""

    def encode(self) -> bytes:
        kind, depth = self.fidelity.kind, self.fidelity.depth
        return _ENTRY.pack(self.offset, self.size, self.tokens, kind, depth, WHERE.index(self.where))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = _Reader(body)
        offset, size, tokens, kind, depth, where = (int(value) for value in reader.take(_ENTRY))
        reader.end()
        if where >= len(WHERE):
            raise wrong("an entry from nowhere")
        return cls(offset, size, tokens, fidelity_of(kind, depth), WHERE[where])


def encode_places(tokens: Iterable[int]) -> bytes:
    return b"".join(_U32.pack(place) for place in tokens)


def decode_places(body: bytes) -> set[int]:
    """Token counts at which there may be an entry."""
    if len(body) % _U32.size:
        raise wrong("places cut short")
    return {place for (place,) in _U32.iter_unpack(body)}


@dataclass(frozen=True, slots=True)
class GiveAsked:
    """A handoff for the agent at `address`: sections (name, offset in the worker's own memory, bytes)."""

    address: str
    sections: tuple[tuple[str, int, int], ...]
    note: bytes
    deadline_seconds: float | None

    def encode(self) -> bytes:
        head = seconds(self.deadline_seconds) + text(self.address) + _U16.pack(len(self.sections))
        return head + b"".join(text(name) + _RANGE.pack(offset, size) for name, offset, size in self.sections) + self.note

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = _Reader(body)
        deadline, address = reader.seconds(), reader.text()
        sections = []
        for _ in range(reader.number(_U16)):
            name = reader.text()
            offset, size = (int(value) for value in reader.take(_RANGE))
            sections.append((name, offset, size))
        return cls(address, tuple(sections), reader.rest(), deadline)


@dataclass(frozen=True, slots=True)
class TakeAsked:
    """`id` all zeros: whichever came first."""

    id: bytes
    deadline_seconds: float | None

    def encode(self) -> bytes:
        return self.id + seconds(self.deadline_seconds)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        reader = _Reader(body)
        found = cls(reader.some(ID_BYTES), reader.seconds())
        reader.end()
        return found


@dataclass(frozen=True, slots=True)
class Arrived:
    """A handoff in the agent's memory, pinned: sections (name, bytes) one behind the other from `offset` on. No id: there is none."""

    id: bytes = b""
    offset: int = 0
    sections: tuple[tuple[str, int], ...] = ()
    note: bytes = b""

    @property
    def size(self) -> int:
        return sum(size for _, size in self.sections)

    def encode(self) -> bytes:
        if not self.id:
            return b""
        head = self.id + _RANGE.pack(self.offset, len(self.sections))
        return head + b"".join(text(name) + _RANGE.pack(size, 0) for name, size in self.sections) + self.note

    @classmethod
    def decode(cls, body: bytes) -> Self:
        if not body:
            return cls()
        reader = _Reader(body)
        name = reader.some(ID_BYTES)
        offset, count = (int(value) for value in reader.take(_RANGE))
        sections = []
        for _ in range(count):
            section = reader.text()
            sections.append((section, int(reader.take(_RANGE)[0])))
        return cls(name, offset, tuple(sections), reader.rest())


def encode_staged(offset: int, blocks: int) -> bytes:
    return _STAGED.pack(offset, blocks)


def decode_staged(body: bytes) -> tuple[int, int]:
    """Offset in the arena, and for how many blocks there is room."""
    return _pair(body, _STAGED)


def encode_plane(plane: int, blocks: int) -> bytes:
    return _PLANE.pack(plane, blocks)


def decode_plane(body: bytes) -> tuple[int, int]:
    return _pair(body, _PLANE)


def _pair(body: bytes, shape: struct.Struct) -> tuple[int, int]:
    reader = _Reader(body)
    first, second = (int(value) for value in reader.take(shape))
    reader.end()
    return first, second


def encode_load_result(r: LoadResult) -> bytes:
    return _RESULT.pack(
        _LOAD_OUTCOMES.index(r.outcome), r.blocks, r.bytes, r.seconds, r.decoded, r.late12, r.bad_shards, r.missing_shards,
        r.lagging_shards, r.shards_asked,
    )  # fmt: skip


def decode_load_result(body: bytes) -> LoadResult:
    reader = _Reader(body)
    outcome, *values = reader.take(_RESULT)
    reader.end()
    if not isinstance(outcome, int) or outcome >= len(_LOAD_OUTCOMES):
        raise wrong(f"load outcome {outcome!r}")
    return LoadResult(_LOAD_OUTCOMES[outcome], *values)  # type: ignore[arg-type]  # as the struct says


def encode_store_result(r: StoreResult) -> bytes:
    head = _STORED.pack(
        _STORE_OUTCOMES.index(r.outcome), r.blocks, r.bytes, r.extents_stored, r.extents_degraded, r.extents_failed, r.extents_dropped,
        r.extents_declined,
    )  # fmt: skip
    return head + bytes(min(count, 255) for count in r.acks)


def decode_store_result(body: bytes) -> StoreResult:
    reader = _Reader(body)
    outcome, blocks, size, stored, degraded, failed, dropped, declined = (int(value) for value in reader.take(_STORED))
    if outcome >= len(_STORE_OUTCOMES):
        raise wrong(f"store outcome {outcome}")
    acks = tuple(reader.rest())
    return StoreResult(_STORE_OUTCOMES[outcome], blocks, size, stored, degraded, failed, dropped, acks, declined)


def encode_error(error: KvstoreError) -> bytes:
    return text(type(error).__name__) + b"".join(text(part) for part in (error.code, error.what, error.cause, error.fix))


def decode_error(body: bytes) -> tuple[str, str, str, str, str]:
    """Class, code, what, cause, fix."""
    reader = _Reader(body)
    return reader.text(), reader.text(), reader.text(), reader.text(), reader.text()
