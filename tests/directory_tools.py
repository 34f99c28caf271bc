"""What the tests of the window directory share: one in this process whose clock the test turns, and agents that speak to it in frames."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvstore import wire, wire_directory
from kvstore.client.agent.directory import Keys
from kvstore.kernels import _native
from kvstore.wire import Role, Status, Verb
from kvstore.wire_directory import Holder, Speaker

CLUSTER = bytes(16)
LIFETIME_SECONDS = 180.0
DEADLINE_SECONDS = 20.0


def keys_of(seed: int, count: int) -> Keys:
    return np.frombuffer(random.Random(seed).randbytes(32 * count), np.uint8).reshape(count, 32)


class Served:
    """A directory in this process. `now` is its time in seconds where its clock is virtual: requests carry it."""

    def __init__(self, **options: Any) -> None:
        self.server = _native.DirectoryServer("127.0.0.1", 0, cluster16=CLUSTER, **{"virtual_clock": True, **options})
        self.address = ("127.0.0.1", self.server.port)
        self.now = 1000.0
        self._open: list[wire.Connection] = []

    def connect(self, timeout_seconds: float = DEADLINE_SECONDS) -> wire.Connection:
        connection = wire.Connection(self.address, wire.Hello(Role.DIRECTORY, CLUSTER), timeout_seconds)
        self._open.append(connection)
        return connection

    def clock(self) -> float:
        return self.now

    @property
    def stats(self) -> dict[str, Any]:
        return self.server.stats()

    def status(self) -> wire_directory.DirectoryStatus:
        return wire_directory.decode_status(self.connect().ask(Verb.STATUS, b"").body)

    def close(self) -> None:
        while self._open:
            self._open.pop().close()
        self.server.stop()


@contextmanager
def served(**options: Any) -> Iterator[Served]:
    running = Served(**options)
    try:
        yield running
    finally:
        running.close()


class Peer:
    """An agent with a connection of its own, in plain frames."""

    def __init__(self, directory: Served, address: str, incarnation: int = 1, token: int | None = None) -> None:
        self.directory = directory
        self.speaker = Speaker(address, incarnation, incarnation ^ 0x5EC2E7 if token is None else token)
        self.connection = directory.connect()

    def ask(self, verb: Verb, keys: Keys | None = None, *, owner: bytes = wire.NO_OWNER, flags: int = 0) -> tuple[Status, int]:
        """Status, and how many keys were done."""
        joined = b"" if keys is None else keys.tobytes()
        body = wire_directory.encode_agent(self.speaker, joined, owner=owner, clock_ms=int(self.directory.now * 1000), flags=flags)
        answer = self.connection.ask(verb, body)
        return Status(answer.status), wire_directory.decode_agent_reply(answer.body)[0] if answer.status == Status.OK else 0

    def register(self, keys: Keys, **options: Any) -> int:
        status, done = self.ask(Verb.REGISTER, keys, **options)
        assert status == Status.OK
        return done

    def locate(self, keys: Keys, *, owner: bytes = wire.NO_OWNER) -> list[list[Holder]]:
        body = wire_directory.encode_locate(keys.tobytes(), owner=owner, clock_ms=int(self.directory.now * 1000))
        answer = self.connection.ask(Verb.LOCATE, body)
        assert answer.status == Status.OK
        return wire_directory.decode_locate_reply(answer.body, len(keys))

    def report(self, address: str, incarnation: int) -> bool:
        answer = self.connection.ask(Verb.REPORT, wire_directory.encode_report(address, incarnation))
        assert answer.status == Status.OK
        return wire_directory.decode_report_reply(answer.body)


def names(found: Sequence[Sequence[Holder]]) -> list[list[str]]:
    return [[holder.address for holder in held] for held in found]
