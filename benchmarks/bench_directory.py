"""What a window directory with 10^7 entries costs: operations a second of its processor time, through its real socket, and RAM.

One operation is one key located, touched or registered. The directory is a process of its own; its processor time, user and kernel, is read
before and after, so what the asking side costs is not in it, nor is waiting. `one_key`: 32 agents, each with one message of one key on its
way at a time. `64_keys`: one agent, messages of 64 keys (a prompt's candidates, what was used in a second), one at a time.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Final

import numpy as np

from benchmarks.harness import Bench, Figure, at_least, at_most, measures
from kvstore import wire, wire_directory
from kvstore.clustermap import ClusterMap, Node
from kvstore.version import module_command
from kvstore.wire import Role, Verb
from kvstore.wire_directory import Speaker

AGENTS: Final = 32
BATCH_KEYS: Final = 64
CLUSTER: Final = ClusterMap.local([Node("node-00", "node-00", "127.0.0.1:1")], k=1, m=0).tag
ENTRIES: Final = 10_000_000


@contextmanager
def directory() -> Iterator[tuple[int, tuple[str, int]]]:
    """A directory process: pid, address."""
    command = [*module_command("kvstore.server"), "directory", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            host, _, port = str(_ready(process.stdout)["address"]).rpartition(":")
            yield process.pid, (host, int(port))
        finally:
            process.terminate()


def _ready(stdout: IO[bytes]) -> dict[str, object]:
    line = stdout.readline()
    if not line.startswith(b"ready "):
        raise RuntimeError("the directory did not start")
    found: dict[str, object] = json.loads(line[6:])
    return found


def processor_seconds(pid: int) -> float:
    """User and kernel time of all its threads, to the nanosecond: its CPU clock (clock_getcpuclockid)."""
    return time.clock_gettime(~pid << 3 | 2)


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:  # noqa: PTH123  a file of the kernel
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Asker:
    """An agent with a connection, and frames of its own made beforehand."""

    def __init__(self, address: tuple[str, int], number: int) -> None:
        self.speaker = Speaker(f"10.0.0.{number}:7600", 1, number)
        self.connection = wire.Connection(address, wire.Hello(Role.DIRECTORY, CLUSTER), 60.0)

    def frame(self, verb: Verb, keys: bytes) -> bytes:
        body = wire_directory.encode_locate(keys) if verb == Verb.LOCATE else wire_directory.encode_agent(self.speaker, keys)
        return wire.encode(verb, body)

    def receive(self) -> None:
        if (answer := self.connection.receive()).status:
            raise RuntimeError(f"answered with {answer.status}")


def fill(pid: int, askers: Sequence[Asker], count: int) -> tuple[list[bytes], float, float]:
    """Registers `count` random keys. Some of them; the directory's processor time for all; and the most for one message of 8,192 keys:
    whatever the table does to grow is in it."""
    dice, some, spent, longest = np.random.default_rng(1), [], 0.0, 0.0
    for at, first in enumerate(range(0, count, wire.KEYS_MAX)):
        keys = dice.bytes(32 * min(wire.KEYS_MAX, count - first))
        asker = askers[at % len(askers)]
        frame, before = asker.frame(Verb.REGISTER, keys), processor_seconds(pid)
        asker.connection.send(frame)
        asker.receive()
        took = processor_seconds(pid) - before
        spent, longest = spent + took, max(longest, took)
        some.append(keys[: 32 * 256])
    return some, spent, longest


def mixed(askers: Sequence[Asker], some: Sequence[bytes], keys_each: int, frames_each: int) -> list[list[bytes]]:
    """Frames by asker: half are LOCATEs, a quarter each TOUCH and REGISTER; of the keys, half are held and half were never seen."""
    dice = random.Random(2)
    verbs = (Verb.LOCATE, Verb.LOCATE, Verb.TOUCH, Verb.REGISTER)

    def key() -> bytes:
        part = dice.choice(some)
        at = 32 * dice.randrange(len(part) // 32)
        return part[at : at + 32] if dice.random() < 0.5 else dice.randbytes(32)

    return [[asker.frame(verbs[n % 4], b"".join(key() for _ in range(keys_each))) for n in range(frames_each)] for asker in askers]


def operations_per_core(pid: int, askers: Sequence[Asker], frames: Sequence[Sequence[bytes]], keys_each: int) -> float:
    """Each asker has one frame on its way at a time."""
    before = processor_seconds(pid)
    for turn in zip(*frames, strict=True):
        for asker, frame in zip(askers, turn, strict=True):
            asker.connection.send(frame)
        for asker in askers:
            asker.receive()
    spent = processor_seconds(pid) - before
    return keys_each * sum(map(len, frames)) / spent


@measures("directory_ops_per_core", "directory_ram_gb")
def window_directory(bench: Bench) -> dict[str, Figure]:
    smoke = bench.scale.name == "smoke"
    entries, rounds = (20_000, 20) if smoke else (ENTRIES, 2_000)
    with directory() as (pid, address):
        askers = [Asker(address, number) for number in range(AGENTS)]
        some, spent, longest = fill(pid, askers, entries)
        resident = resident_bytes(pid)
        status = wire_directory.decode_status(askers[0].connection.ask(Verb.STATUS, b"").body)
        if status.entries != entries:
            raise RuntimeError(f"{status.entries} entries of {entries}")
        one_key = operations_per_core(pid, askers, mixed(askers, some, 1, rounds), 1)
        batches = operations_per_core(pid, askers[:1], mixed(askers[:1], some, BATCH_KEYS, rounds * 10), BATCH_KEYS)
        for asker in askers:
            asker.connection.close()
    held = f"{entries:,} entries"
    filled = f"filled at {entries / spent / 1e6:.1f} M a core and second, {longest * 1e3:.0f} ms for the slowest 8,192"
    return {
        "directory_ops_per_core.one_key": Figure(one_key, at_least(50_000), f"{held}; {AGENTS} agents, a key a message"),
        "directory_ops_per_core.64_keys": Figure(batches, at_least(500_000), f"{held}; {BATCH_KEYS} keys a message"),
        "directory_ram_gb": Figure(resident / 1e9, at_most(1.5), f"{held}, {status.memory_bytes / entries:.0f} B each; {filled}"),
    }
