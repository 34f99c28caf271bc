"""What the tests of the agent process share: an agent in a process of its own, workers likewise, and their words."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from server_tools import until

from kvstore.client.agent.attachment import control
from kvstore.client.agent.link import Kind
from kvstore.version import module_command

ROOT = Path(__file__).resolve().parent.parent
WAIT_SECONDS = 20.0
CHILD = Path(__file__).with_name("agent_child.py")


class Process:
    """A child whose stdout is read line by line. Killed when the test ends."""

    def __init__(self, command: list[str], log: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.log = log
        self._log = log.open("a")
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment, bufsize=1
        )
        self.pid = self.child.pid

    def line(self) -> str:
        """The next; pytest's own timeout stands."""
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, self.log.read_text()
        return line.strip()

    def tell(self, text: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(text + "\n")
        self.child.stdin.flush()

    def kill(self, signum: int = signal.SIGKILL) -> None:
        self.child.send_signal(signum)
        if signum == signal.SIGKILL:
            self.child.wait(WAIT_SECONDS)

    def end(self) -> int:
        """Its exit code."""
        return self.child.wait(WAIT_SECONDS)

    def close(self) -> None:
        for signum in (signal.SIGCONT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self.child.send_signal(signum)
        self.child.wait(WAIT_SECONDS)
        for stream in (self.child.stdin, self.child.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class AgentUnderTest(Process):
    """`kvstore agent`, serving."""

    def __init__(self, map_path: Path, socket: Path, *arguments: str) -> None:
        command = [*module_command("kvstore"), "agent", "--map", str(map_path), "--socket", str(socket), *arguments]
        super().__init__(command, socket.with_suffix(".log"))
        self.socket = socket
        word, _, facts = self.line().partition(" ")
        assert word == "ready"
        self.ready: dict[str, Any] = json.loads(facts)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(control(str(self.socket), Kind.STATUS, b"", WAIT_SECONDS))
        return found

    def until_free(self, seconds: float = 3.0) -> float:
        """Until nothing is pinned and nobody is attached but who still is; the seconds it took."""
        began = time.monotonic()
        until(lambda: not self.status()["pinned_bytes"], "all pins to be freed", seconds)
        return time.monotonic() - began

    def resources(self) -> tuple[int, int, int]:
        """Descriptors, threads, mappings of shared memory."""
        of = Path(f"/proc/{self.pid}")
        maps = sum("memfd:kvstore" in line for line in (of / "maps").read_text().splitlines())
        return len(list((of / "fd").iterdir())), len(list((of / "task").iterdir())), maps


@contextlib.contextmanager
def agent_of(map_path: Path, socket: Path, *arguments: str) -> Iterator[AgentUnderTest]:
    agent = AgentUnderTest(map_path, socket, *arguments)
    try:
        yield agent
    finally:
        agent.close()


@contextlib.contextmanager
def worker_of(socket: Path, verb: str, seed: int, blocks: int) -> Iterator[Process]:
    """A worker process that runs one verb of agent_child.py over the chain of `seed`."""
    child = Process([sys.executable, str(CHILD), str(socket), verb, str(seed), str(blocks)], socket.with_suffix(f".{verb}.log"))
    try:
        yield child
    finally:
        child.close()
