"""Daemons forked by a process that has imported all they need: twelve of them serve after the imports of one.

    this process ── Nursery ── socket ── `python -m kvstore.server.nursery FD` ── fork ── daemon, daemon, ...

    ->  one line {"arguments": [...], "environ": {...}, "directory": "/..."}, and with it three descriptors: the daemon's standard output,
        its standard error, and a pipe for its exit code
    <-  one line {"pid": 4711}, and with it the daemon's pidfd

The pipe brings the exit code, two bytes, when the daemon has ended, or nothing where the nursery is gone. A daemon never outlives this
process: the nursery ends when its socket does, and each daemon, which has it for a parent, waits for that end and then asks itself, once,
to drain and end. The kernel's own signal (PR_SET_PDEATHSIG) is SIGCONT, so that a daemon that stands still (SIGSTOP) goes on to its end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvstore.version import module_command, version

NEEDED: Final = (
    "kvstore.server.__main__",
    "kvstore.server.node",
    "kvstore.server.control",
    "kvstore.server.directory",
    "prometheus_client",
)
FIXED: Final = ("PYTHON", "LD_", "MALLOC_", "ASAN_", "UBSAN_", "TSAN_")  # variables that count when a program starts, not later
NAME_BYTES: Final = 15  # of a process, as `top` shows it: linux/sched.h
CLOSE_SECONDS: Final = 5.0
UNKNOWN: Final = 255  # exit code of a daemon whose nursery was gone when it ended
_CHUNK: Final = 64 << 10
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_PR_SET_NAME: Final = 15


class Forked:
    """One daemon, with the verbs of subprocess.Popen that its owner needs. Not safe for use by several threads at once."""

    def __init__(self, pid: int, handle: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._handle = handle
        self._ended = ended

    def poll(self) -> int | None:
        """The exit code, minus the signal's number where one ended it; None while it runs."""
        return self.returncode if self.returncode is not None or not self._is_over(0) else self._take_code()

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self.returncode is not None:
            return self.returncode
        if not self._is_over(timeout):
            raise subprocess.TimeoutExpired(f"daemon {self.pid}", timeout or 0.0)
        return self._take_code()

    def send_signal(self, signum: int) -> None:
        """Nothing where it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _is_over(self, seconds: float | None) -> bool:
        return bool(select.select([self._handle], [], [], seconds)[0])

    def _take_code(self) -> int:
        """Only when it is over: the nursery sees that in the same moment."""
        told = os.read(self._ended, 2)
        self._close()
        self.returncode = int.from_bytes(told, "big", signed=True) if told else UNKNOWN
        return self.returncode

    def _close(self) -> None:
        os.close(self._handle)
        os.close(self._ended)

    def __del__(self) -> None:
        if self.returncode is None:
            self._close()


class Nursery:
    """Forks daemons until it is closed or the process ends. `start` is safe for use by several threads at once."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [*module_command("kvstore.server.nursery"), str(theirs.fileno())]
        with theirs:
            # Its own process group: Ctrl-C on the terminal reaches this process alone, which then stops the daemons in order. Not its
            # own session: the kernel shares out processors by session, and low priorities would count within each daemon alone.
            null = subprocess.DEVNULL
            self._process = subprocess.Popen(command, stdin=null, stdout=null, pass_fds=[theirs.fileno()], process_group=0)
        self._socket = ours
        self._lock = threading.Lock()

    def start(self, arguments: Sequence[str], stdout: int, stderr: int) -> Forked:
        """Forks `kvstore.server ARGUMENTS` with this process's environment and current directory. The descriptors stay the caller's.
        Raises OSError where the nursery has gone or cannot fork."""
        ended, told = os.pipe()
        request = {"arguments": [*arguments], "environ": dict(os.environ), "directory": os.getcwd()}  # noqa: PTH109  a str for JSON
        try:
            with self._lock:
                _send(self._socket, request, [stdout, stderr, told])
                reply, handles = _receive(self._socket, 1)
            if "error" in reply:
                raise OSError(reply["errno"], reply["error"])
        except EOFError as error:
            os.close(ended)
            raise ConnectionError(str(error)) from None
        except BaseException:
            os.close(ended)
            raise
        finally:
            os.close(told)
        return Forked(reply["pid"], handles[0], ended)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Its daemons drain and end. Safe to call twice."""
        self._socket.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # somebody stopped it
            self._process.kill()
            self._process.wait()


def nursery() -> Nursery:
    """This process's own, made at the first call; another one where it has gone, or where variables changed that only a start reads."""
    key = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(FIXED)))
    with _made_lock:
        found = _made.get(key)
        if found is not None and not found.alive:
            found.close()
            found = None
        if found is None:
            _made[key] = found = Nursery()
        return found


_made: dict[tuple[tuple[str, str], ...], Nursery] = {}
_made_lock = threading.Lock()


@atexit.register
def _close_all() -> None:
    for each in _made.values():
        each.close()


# --- the nursery's own side ---


def serve(control: socket.socket) -> None:
    """Returns in a daemon that was just forked, ready to run; exits where the other end of `control` is closed."""
    ended: dict[int, tuple[int, int]] = {}  # by pidfd: pid, where its exit code goes
    while True:
        for readable in select.select([control.fileno(), *ended], [], [])[0]:
            if readable != control.fileno():
                _tell_end(readable, *ended.pop(readable))
                continue
            try:
                request, (stdout, stderr, told) = _receive(control, 3)
            except EOFError:
                raise SystemExit(0) from None
            try:
                pid = os.fork()
            except OSError as error:
                _send(control, {"errno": error.errno, "error": f"cannot fork: {error.strerror}"}, [])
                for each in (stdout, stderr, told):
                    os.close(each)
                continue
            if pid == 0:
                control.close()
                for each in (told, *ended, *(pipe for _, pipe in ended.values())):
                    os.close(each)
                _become(request, stdout, stderr)
                return
            with contextlib.suppress(OSError):  # the daemon does the same: whoever comes first
                os.setpgid(pid, pid)
            os.close(stdout)
            os.close(stderr)
            handle = os.pidfd_open(pid)
            ended[handle] = pid, told
            _send(control, {"pid": pid}, [handle])


def _tell_end(handle: int, pid: int, told: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(told, code.to_bytes(2, "big", signed=True))
    os.close(told)
    os.close(handle)


def _become(request: Mapping[str, Any], stdout: int, stderr: int) -> None:
    """In the new process: everything that a program of its own would have been started with."""
    nursery_pid = os.getppid()
    parent = os.pidfd_open(nursery_pid)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != nursery_pid or nursery_pid == 1:  # it ended before the call above
        raise SystemExit(1)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    # Anew: the nursery's own remember what they were opened on.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  for as long as the process
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115  the same
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["directory"])
    sys.argv[1:] = request["arguments"]
    arguments = request["arguments"]
    name = arguments[arguments.index("--id") + 1] if "--id" in arguments[:-1] else arguments[0] if arguments else ""
    libc.prctl(_PR_SET_NAME, f"kvstore/{name}".encode()[:NAME_BYTES], 0, 0, 0)
    threading.Thread(target=_end_with, args=(parent,), name="kvstore-parent", daemon=True).start()


def _end_with(parent: int) -> None:
    select.select([parent], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


def _main() -> int:
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in NEEDED:
        importlib.import_module(name)
    version()
    gc.freeze()  # what is here by now is never garbage, and stays shared
    serve(control)
    from kvstore.server.__main__ import main

    return main()


# --- lines with descriptors, both sides ---


def _send(peer: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    data = json.dumps(message).encode() + b"\n"
    sent = socket.send_fds(peer, [data], descriptors)
    peer.sendall(data[sent:])


def _receive(peer: socket.socket, count: int) -> tuple[dict[str, Any], list[int]]:
    """Raises EOFError where the other side is gone."""
    data, descriptors, _, _ = socket.recv_fds(peer, _CHUNK, count)
    while not data.endswith(b"\n"):
        more = peer.recv(_CHUNK) if data else b""
        if not more:
            raise EOFError("the nursery of daemons has ended")
        data += more
    message: dict[str, Any] = json.loads(data)
    return message, list(descriptors)


if __name__ == "__main__":
    sys.exit(_main())
