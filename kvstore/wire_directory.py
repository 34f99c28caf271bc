"""Bodies of a window directory's verbs: twin of kernels/directory_wire.hpp. docs/PROTOCOL.md is the text; all integers little-endian.

    REGISTER, TOUCH, FORGET  AgentRequest | address | 32-byte keys  -> AgentReply
    LOCATE                   LocateRequest | 32-byte keys           -> LocateReply | (AgentName | address)... | u8 a key | Holder...
    REPORT                   AgentName | address                    -> ReportReply
    STATUS                   nothing                                -> DirectoryStatus

An address is padded with zeros to a multiple of 8, as are the counts of holders. Never changes: all of the above.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from typing import Final

from kvstore.errors import ProtocolError
from kvstore.wire import KEY_BYTES, NO_OWNER

LOCATE_KEYS_MAX: Final = 1024
AGENT_ADDRESS_MAX: Final = 128
HOLDERS_MAX: Final = 4
FORGET_ALL: Final = 1

_AGENT_REQUEST: Final = struct.Struct("<16sQQQIHH")
_AGENT_REPLY: Final = struct.Struct("<II")
_LOCATE_REQUEST: Final = struct.Struct("<16sQII")
_LOCATE_REPLY: Final = struct.Struct("<II")
_AGENT_NAME: Final = struct.Struct("<QHHI")
_HOLDER: Final = struct.Struct("<IHH")
_REPORT_REPLY: Final = struct.Struct("<II")
_STATUS: Final = struct.Struct("<14Q")
assert (_AGENT_REQUEST.size, _AGENT_REPLY.size, _LOCATE_REQUEST.size, _LOCATE_REPLY.size) == (48, 8, 32, 8)
assert (_AGENT_NAME.size, _HOLDER.size, _REPORT_REPLY.size, _STATUS.size) == (16, 8, 8, 112)


@dataclass(frozen=True, slots=True)
class Speaker:
    """Who speaks: an agent's address, and which start of it. `token` is its secret."""

    address: str
    incarnation: int
    token: int


@dataclass(frozen=True, slots=True)
class Holder:
    """An agent that holds the window entry of a key. A restart of the agent has another incarnation."""

    address: str  # "host:port" of its data transport
    incarnation: int
    left_seconds: float  # until the entry expires there, unless it is used


@dataclass(frozen=True, slots=True)
class DirectoryStatus:
    """`entries` are (key, agent) pairs, those expired and not yet swept included; the last eight are totals since the start."""

    entries: int
    agents: int
    memory_bytes: int
    memory_max_bytes: int
    lifetime_ms: int
    uptime_ms: int
    keys_registered: int
    keys_located: int
    keys_found: int
    keys_touched: int
    keys_forgotten: int
    expired: int
    evicted: int
    displaced: int


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def encode_agent(speaker: Speaker, keys: bytes, *, owner: bytes = NO_OWNER, clock_ms: int = 0, flags: int = 0) -> bytes:
    """Body of a REGISTER, TOUCH or FORGET; `keys` joined."""
    address = speaker.address.encode()
    fixed = (owner, speaker.incarnation, speaker.token, clock_ms, len(keys) // KEY_BYTES, len(address), flags)
    return _AGENT_REQUEST.pack(*fixed) + _padded(address) + keys


def decode_agent_reply(body: bytes) -> tuple[int, float]:
    """Keys that were registered, touched or forgotten; and the lifetime of an entry there, in seconds."""
    _need(len(body) == _AGENT_REPLY.size, "REGISTER")
    done, lifetime_ms = _AGENT_REPLY.unpack(body)
    return done, lifetime_ms / 1000


def encode_locate(keys: bytes, *, owner: bytes = NO_OWNER, clock_ms: int = 0) -> bytes:
    """`keys` joined, at most LOCATE_KEYS_MAX."""
    return _LOCATE_REQUEST.pack(owner, clock_ms, len(keys) // KEY_BYTES, 0) + keys


def decode_locate_reply(body: bytes, keys_count: int) -> list[list[Holder]]:
    """Holders of each key, the best first."""
    _need(len(body) >= _LOCATE_REPLY.size, "LOCATE")
    agents_count, holders_count = _LOCATE_REPLY.unpack_from(body)
    _need(agents_count <= holders_count <= HOLDERS_MAX * keys_count, "LOCATE")
    at, agents = _LOCATE_REPLY.size, []
    for _ in range(agents_count):
        _need(at + _AGENT_NAME.size <= len(body), "LOCATE")
        incarnation, size, _, _ = _AGENT_NAME.unpack_from(body, at)
        at += _AGENT_NAME.size
        _need(0 < size <= AGENT_ADDRESS_MAX and at + size <= len(body) and body[at : at + size].isascii(), "LOCATE")
        agents.append((body[at : at + size].decode(), incarnation))
        at += (size + 7) // 8 * 8
    counts = body[at : at + keys_count]
    at += (keys_count + 7) // 8 * 8
    _need(len(counts) == keys_count and sum(counts) == holders_count and len(body) == at + holders_count * _HOLDER.size, "LOCATE")
    rows = list(_HOLDER.iter_unpack(body[at:]))
    _need(all(agent < agents_count for _, agent, _ in rows), "LOCATE")
    holders = iter([Holder(agents[agent][0], agents[agent][1], left_ms / 1000) for left_ms, agent, _ in rows])
    return [list(itertools.islice(holders, count)) for count in counts]


def encode_report(address: str, incarnation: int) -> bytes:
    raw = address.encode()
    return _AGENT_NAME.pack(incarnation, len(raw), 0, 0) + _padded(raw)


def decode_report_reply(body: bytes) -> bool:
    """Whether the agent is left out of answers now."""
    _need(len(body) == _REPORT_REPLY.size, "REPORT")
    return bool(_REPORT_REPLY.unpack(body)[0])


def decode_status(body: bytes) -> DirectoryStatus:
    _need(len(body) == _STATUS.size, "STATUS")
    return DirectoryStatus(*_STATUS.unpack(body))


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ProtocolError("E620", f"{what} reply of a directory", "its lengths do not add up", "report it: the peer is not what it says")
