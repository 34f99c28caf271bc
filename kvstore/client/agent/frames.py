"""What agents send each other: the framing of kvstore/wire.py with verbs of its own. docs/PROTOCOL.md is the text; all little-endian.

    HELLO   as a daemon's, role AGENT                                       -> in kind
    WINDOW  owner 16 | window key 32                                        -> sum 16 | the entry
    OFFER   id 16 | owner 16 | total u64 | sections u32 | part bytes u32 | idle seconds u32 | note bytes u32
            | { bytes u64, name bytes u16, name }... | note                 -> bare
    PART    id 16 | section u32 | part u32 | sum u64 | bytes of the section -> bare
    COMMIT  id 16 | digest 16                                               -> bare
    ABORT   id 16                                                           -> bare

Sums. Of an entry: xxh3-128 seeded with owner and key; of a part: xxh3-64 seeded with id, section and part: bytes of another place never
pass. The digest of a handoff is xxh3-128 over its id and the sums of all its parts, section by section. Never changes: all of the above.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

import numpy as np
import xxhash

from kvstore import tcp, wire
from kvstore.errors import ConfigError, MisuseError, ProtocolError
from kvstore.wire import Frame, Hello, Kind, Status

Buffer: TypeAlias = bytes | bytearray | memoryview

ROLE_AGENT: Final = 4
KEY_BYTES: Final = wire.KEY_BYTES
OWNER_BYTES: Final = wire.OWNER_BYTES
ID_BYTES: Final = 16
SUM_BYTES: Final = 16
BODY_MAX: Final = 1 << 20  # of everything but entries and parts
WINDOW_BYTES_MAX: Final = 64 << 20  # of an entry; the largest known has 1.4 MB
PART_BYTES_MIN: Final = 4 << 10
PART_BYTES_MAX: Final = 4 << 20
SECTIONS_MAX: Final = 4096
SECTION_NAME_MAX: Final = 128
NOTE_BYTES_MAX: Final = 64 << 10
HANDOFF_BYTES_MAX: Final = 1 << 40  # what the format can say; an inbox has a cap of its own
IDLE_SECONDS_MAX: Final = 600


class Verb(IntEnum):
    HELLO = wire.Verb.HELLO
    WINDOW = 48
    OFFER = 49
    PART = 50
    COMMIT = 51
    ABORT = 52


_WINDOW: Final = struct.Struct("<16s32s")
_OFFER: Final = struct.Struct("<16s16sQIIII")
_SECTION: Final = struct.Struct("<QH")
PART: Final = struct.Struct("<16sIIQ")
_COMMIT: Final = struct.Struct("<16s16s")
_PART_NAME: Final = struct.Struct("<16sII")
assert (_WINDOW.size, _OFFER.size, _SECTION.size, PART.size, _COMMIT.size) == (48, 56, 10, 32, 32)


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """Limits of one agent towards others. A value outside its range raises ConfigError E196."""

    threads: int = 2  # that serve others, 1 to 16; each holds any number of connections
    connections_max: int = 256  # taken from others; past it they are told BUSY
    bytes_out_max: int = 256 << 20  # entries on their way to others; past it they are told BUSY
    progress_seconds: float = 3.0  # a peer that moves less than 16 KiB in that time while it owes something is cut
    idle_seconds: float = 60.0  # a connection without requests, on which no handoff is on its way
    silence_seconds: float = 0.02  # a holder that has not begun to answer by then counts as dead ...
    pause_seconds: float = 5.0  # ... and is not asked for so long
    connections_per_peer: int = 8  # kept open towards one agent for the next call
    open_max: int = 128  # towards all agents, those in use included; past it a fetch finds nothing
    bytes_in_max: int = 256 << 20  # entries on their way here; past it a fetch finds nothing
    congestion_control: str = "cubic"

    def __post_init__(self) -> None:
        self._need("threads", 1 <= self.threads <= 16, "1 to 16")
        for name in ("connections_max", "connections_per_peer", "open_max"):
            self._need(name, 1 <= getattr(self, name) <= 65536, "1 to 65536")
        for name in ("bytes_out_max", "bytes_in_max"):
            self._need(name, getattr(self, name) >= 1 << 20, "at least 1 MiB")
        for name in ("progress_seconds", "idle_seconds", "silence_seconds", "pause_seconds"):
            self._need(name, 0 < getattr(self, name) <= 3600, "above 0, at most 3600")
        self._need("congestion_control", tcp.is_name(self.congestion_control), tcp.NAME_TEXT)

    def _need(self, name: str, fine: bool, range_text: str) -> None:
        if not fine:
            raise ConfigError("E196", f"agent {name} = {getattr(self, name)}", f"must be {range_text}")


def address_of(text: str) -> tuple[str, int]:
    """`host:port`, an IPv6 host in brackets. Raises MisuseError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise MisuseError("E575", f"agent address {text!r}", "is not host:port")
    return host.strip("[]"), int(port)


# --- sums ---


def window_sum(owner: bytes, key: bytes, entry: Buffer) -> bytes:
    return xxhash.xxh3_128_digest(entry, seed=xxhash.xxh3_64_intdigest(_WINDOW.pack(owner, key)))


def part_sum(handoff_id: bytes, section: int, part: int, data: Buffer) -> int:
    return xxhash.xxh3_64_intdigest(data, seed=xxhash.xxh3_64_intdigest(_PART_NAME.pack(handoff_id, section, part)))


def handoff_digest(handoff_id: bytes, sums: Iterable[Sequence[int]]) -> bytes:
    """`sums`: per section those of its parts."""
    whole = xxhash.xxh3_128(handoff_id)
    for section in sums:
        whole.update(np.asarray(section, "<u8").tobytes())
    return whole.digest()


# --- frames ---


def request(verb: Verb, body: bytes, request_id: int = 1) -> bytes:
    """A whole frame; not for PART, whose bulk goes beside it."""
    return wire.encode(verb, body, request_id=request_id)


def part_head(handoff_id: bytes, section: int, part: int, check: int, data_bytes: int, request_id: int = 1) -> bytes:
    """All of a PART but the bytes of the section."""
    head = wire.encode_header(Verb.PART, PART.size + data_bytes, request_id=request_id)
    return head + PART.pack(handoff_id, section, part, check)


def bare(frame: Frame, status: Status, aux: int = 0) -> bytes:
    """The answer to `frame` without a body."""
    return wire.encode(frame.verb, request_id=frame.request_id, kind=Kind.REPLY, status=status, aux=aux)


def window_reply_head(frame: Frame, check: bytes, entry_bytes: int) -> bytes:
    """What goes before the entry. The frame's own check stays 0: the sum covers the body."""
    return wire.encode_header(frame.verb, SUM_BYTES + entry_bytes, request_id=frame.request_id, kind=Kind.REPLY) + check


def hello(cluster: bytes, boot_id: int = 0) -> bytes:
    return Hello(ROLE_AGENT, cluster, boot_id=boot_id).encode()


def encode_window(owner: bytes, key: bytes) -> bytes:
    if len(owner) != OWNER_BYTES or len(key) != KEY_BYTES:
        raise MisuseError("E575", "window key", f"owner of {len(owner)}, key of {len(key)} bytes", "pass 16 and 32 bytes")
    return _WINDOW.pack(owner, key)


def decode_window(body: bytes) -> tuple[bytes, bytes]:
    """Owner and key. Raises ProtocolError."""
    _need(len(body) == _WINDOW.size, "WINDOW")
    owner, key = _WINDOW.unpack(body)
    return owner, key


@dataclass(frozen=True, slots=True)
class Offer:
    """A handoff before its bytes: what it will be. `note` is for who decides whether to take it."""

    id: bytes
    owner: bytes
    sections: tuple[tuple[str, int], ...]  # name, bytes
    part_bytes: int
    idle_seconds: int  # without a new part, the receiver forgets it
    note: bytes = b""

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.sections)

    def parts(self, section: int) -> int:
        return -(-self.sections[section][1] // self.part_bytes)

    def part_range(self, section: int, part: int) -> tuple[int, int]:
        """Where the part lies in its section: first byte, and one past the last."""
        first = part * self.part_bytes
        return first, min(first + self.part_bytes, self.sections[section][1])

    def fault(self) -> str:
        """Why this cannot be an offer; "" where it can."""
        names = [name for name, _ in self.sections]
        if len(self.id) != ID_BYTES or len(self.owner) != OWNER_BYTES:
            return f"id of {len(self.id)}, owner of {len(self.owner)} bytes, not 16 and 16"
        if not 0 < len(names) <= SECTIONS_MAX or len(set(names)) != len(names):
            return f"{len(names)} sections, of {len(set(names))} names; 1 to {SECTIONS_MAX}, all different"
        if any(not 0 < len(name.encode()) <= SECTION_NAME_MAX for name in names) or any(size < 0 for _, size in self.sections):
            return f"a section's name is empty or over {SECTION_NAME_MAX} bytes, or its length is negative"
        if not PART_BYTES_MIN <= self.part_bytes <= PART_BYTES_MAX or not 1 <= self.idle_seconds <= IDLE_SECONDS_MAX:
            return f"parts of {self.part_bytes} bytes, {self.idle_seconds} idle seconds"
        if self.total_bytes > HANDOFF_BYTES_MAX or len(self.note) > NOTE_BYTES_MAX:
            return f"{self.total_bytes} bytes, a note of {len(self.note)}"
        return ""

    def encode(self) -> bytes:
        """Raises MisuseError for what no receiver could read."""
        fault = self.fault()
        head = _OFFER.pack(
            self.id, self.owner, self.total_bytes, len(self.sections), self.part_bytes, self.idle_seconds, len(self.note)
        ) if not fault else b""  # fmt: skip
        table = [_SECTION.pack(size, len(name.encode())) + name.encode() for name, size in self.sections] if not fault else []
        body = head + b"".join(table) + self.note
        if fault or len(body) > BODY_MAX:
            raise MisuseError("E577", "handoff", fault or f"a table of {len(body)} bytes", "see the limits in docs/PROTOCOL.md")
        return body

    @classmethod
    def decode(cls, body: bytes) -> Offer:
        """Raises ProtocolError for what breaks a rule."""
        _need(len(body) >= _OFFER.size, "OFFER")
        handoff_id, owner, total, count, part_bytes, idle_seconds, note_bytes = _OFFER.unpack_from(body)
        _need(count <= SECTIONS_MAX and note_bytes <= NOTE_BYTES_MAX, "OFFER")
        at, sections = _OFFER.size, []
        for _ in range(count):
            _need(at + _SECTION.size <= len(body), "OFFER")
            size, name_bytes = _SECTION.unpack_from(body, at)
            at += _SECTION.size
            _need(at + name_bytes <= len(body), "OFFER")
            try:
                sections.append((body[at : at + name_bytes].decode(), size))
            except UnicodeDecodeError:
                _need(False, "OFFER")
            at += name_bytes
        offer = cls(handoff_id, owner, tuple(sections), part_bytes, idle_seconds, body[at:])
        _need(len(offer.note) == note_bytes and offer.total_bytes == total and not offer.fault(), "OFFER")
        return offer


def encode_commit(handoff_id: bytes, digest: bytes) -> bytes:
    return _COMMIT.pack(handoff_id, digest)


def decode_commit(body: bytes) -> tuple[bytes, bytes]:
    """Id and digest. Raises ProtocolError."""
    _need(len(body) == _COMMIT.size, "COMMIT")
    handoff_id, digest = _COMMIT.unpack(body)
    return handoff_id, digest


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ProtocolError("E625", f"{what} of an agent", "its lengths do not add up", "report it: the peer is not what it says")
