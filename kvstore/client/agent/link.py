"""Messages between an agent and the workers of its host, over a Unix socket. docs/AGENT.md is the text; the bulk is in shared memory.

    u16 magic 0x4B41 | u8 version | u8 kind | u32 body bytes | u64 number | body          little-endian

A worker numbers its requests; answers carry the number of what they answer. What answers a HELLO carries descriptors (SCM_RIGHTS).
Never changes: the header, HELLO's first field, REFUSED. Everything else is of one version, and both ends are of one host.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from kvstore.errors import ProtocolError

MAGIC: Final = 0x4B41
VERSION: Final = 1
HEADER: Final = struct.Struct("<HBBIQ")
assert HEADER.size == 16
BODY_BYTES_MAX: Final = 4 << 20  # a lookup of 32,768 blocks has 1 MiB of keys, its ticket at worst 3.4 MiB
FRAME_SECONDS: Final = 5.0  # from the first byte of a message to its last
SEND_SECONDS: Final = 2.0  # a peer that does not take what is sent to it is cut
FDS: Final = 2  # in a WELCOME


class Kind(IntEnum):
    # from a worker
    HELLO = 1
    LOOKUP = 2
    LOAD = 3
    CANCEL = 4  # of the load or the GIVE of this number
    RELEASE = 5  # what the request of this number pinned
    STORE = 6
    WINDOW = 7
    KEEP = 8
    DROP = 9
    PLACES = 10
    GIVE = 11
    TAKE = 12
    # from `kvstore agent status` and `drain`
    STATUS = 32
    DRAIN = 33
    # answers
    WELCOME = 64
    TICKET = 65
    STAGED = 66  # where the rows of a load are, before they come
    PLANE = 67
    LOADED = 68  # the last of a load
    STORED = 69
    ENTRY = 70  # a window entry, or that there is none
    KEPT = 71
    TOLD = 72  # JSON
    FOUND = 73  # where there are entries
    GIVEN = 74
    ARRIVED = 75
    BUSY = 96  # not now
    REFUSED = 97  # not at all: code, what, cause, fix


@dataclass(frozen=True, slots=True)
class Message:
    kind: int
    number: int
    body: bytes


class Link:
    """One connection. One thread receives; any may send. `close` from any thread ends both."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._socket = connection
        self._sending = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: Kind, number: int, *parts: Any, fds: Sequence[int] = ()) -> None:
        """Raises OSError where the peer is gone or does not take it, and closes: a message cut short cannot be followed by another."""
        body = b"".join(parts)
        data = memoryview(HEADER.pack(MAGIC, VERSION, kind, len(body), number) + body)
        end = time.monotonic() + SEND_SECONDS
        with self._sending:
            try:
                if fds:
                    data = data[socket.send_fds(self._socket, [data], list(fds)) :]
                while data:
                    try:
                        data = data[self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
                    except BlockingIOError:
                        if not _wait(self._socket.fileno(), select.POLLOUT, end):
                            raise TimeoutError("the peer does not take what is sent to it") from None
            except (OSError, ValueError) as error:  # ValueError: closed by another thread
                self.close()
                raise error if isinstance(error, OSError) else OSError(str(error)) from None

    def receive(self, *, fds: int = 0, within_seconds: float | None = None) -> tuple[Message, list[int]]:
        """The next message, when it comes; one that has begun has FRAME_SECONDS to be whole. `fds`: descriptors that may come with it;
        where none may, the kernel throws them away. `within_seconds`: of its first byte; None: however long it takes.

        Raises EOFError at the peer's end, OSError, TimeoutError, ProtocolError E635 for what is no message.
        """
        head, got = self._read(HEADER.size, None if within_seconds is None else time.monotonic() + within_seconds, fds)
        try:
            magic, version, kind, size, number = HEADER.unpack(head)
            if magic != MAGIC:
                raise ProtocolError("E635", "agent socket", "what came is no message", "give agent and worker the same socket")
            if version != VERSION and kind not in (Kind.HELLO, Kind.REFUSED):
                raise ProtocolError("E636", "agent socket", f"the other end speaks version {version}, this one {VERSION}", _SAME)
            if size > BODY_BYTES_MAX:
                raise ProtocolError("E635", "agent socket", f"a message of {size} bytes", "report it: this is more than any request has")
            return Message(kind, number, self._read(size, time.monotonic() + FRAME_SECONDS, 0)[0]), got
        except BaseException:
            close_all(got)
            raise

    def _read(self, size: int, end: float | None, fds: int) -> tuple[bytes, list[int]]:
        data = bytearray(size)
        at, got = 0, list[int]()
        with memoryview(data) as place:
            while at < size:
                try:
                    if end is not None and not _wait(self._socket.fileno(), select.POLLIN, end):
                        raise TimeoutError("a message did not come, or not to its end")
                    if fds:
                        count, ancillary, _, _ = self._socket.recvmsg_into(
                            [place[at:]], socket.CMSG_SPACE(4 * fds), socket.MSG_CMSG_CLOEXEC
                        )
                        got += _descriptors(ancillary)
                    else:
                        count = self._socket.recv_into(place[at:])
                    if not count:
                        raise EOFError("the other end has closed the socket")
                except (OSError, EOFError, ValueError) as error:
                    close_all(got)
                    raise EOFError("closed") if isinstance(error, ValueError) else error from None
                at += count
                end = end or time.monotonic() + FRAME_SECONDS
        return bytes(data), got

    def close(self) -> None:
        """Wakes whoever receives. A second call does nothing."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def dispose(self) -> None:
        """Gives the descriptor back: by the thread that receives, when it is done."""
        self.close()
        self._socket.close()


_SAME: Final = "run the same version of kvstore for both"


def _wait(descriptor: int, event: int, end: float) -> bool:
    """Until it can be read or written, or has failed; False when the time has passed first."""
    if descriptor < 0:
        raise ValueError("closed")
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(max(0.0, end - time.monotonic()) * 1000))


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found += [fd for (fd,) in struct.iter_unpack("i", data[: len(data) // 4 * 4])]
    return found


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process id (0: of another namespace) and user id of who connected, as the kernel knows them."""
    pid, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII")))
    return pid, uid


def check_peer(connection: socket.socket) -> None:
    """Raises ProtocolError E638 unless the other end is of this user or root: both ends believe each other's bytes."""
    pid, uid = peer_of(connection)
    if uid not in (os.geteuid(), 0):
        cause = f"is of user {uid}, this process of user {os.geteuid()}"
        raise ProtocolError("E638", f"process {pid} at the agent's socket", cause, "run agent and workers as one user")
