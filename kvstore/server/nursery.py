"""Daemons forked by a process that has imported all they need: twelve of them serve after the imports of one.

    this process ── Nursery ── socket ── `python -m kvstore.server.nursery FD` ── fork ── daemon, daemon, ...

    ->  on the socket, one byte, and with it four descriptors: the daemon's standard output, its standard error, its current directory,
        and a socket of its own, its wire; the rest goes over that, so that a call that is broken off disturbs no other
    ->  on the wire, one line {"arguments": [...], "environ": {...}, "processors": [...]}
    <-  on the wire, one line {"pid": 4711}, and with it the daemon's pidfd; or {"errno": 12, "error": "..."}
    <-  on the wire, two bytes when it has ended: the exit code, signed. Nothing, where the nursery has gone.

None outlives this process, nor the nursery, which ends with it: each daemon waits for the end of the nursery, its parent, and for whoever
started it to let go of the wire, and then asks itself, once, to drain and end. The kernel's own signal
(PR_SET_PDEATHSIG) is SIGCONT, so that a daemon that stands still (SIGSTOP) goes on to its end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import fcntl
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
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstore.streams import open_standard_streams
from kvstore.version import module_command, version

NEEDED: Final = (
    "kvstore.server.__main__",
    "kvstore.server.node",
    "kvstore.server.control",
    "kvstore.server.directory",
    "prometheus_client",
)
# Variables that count when a program starts, or when it imports: a nursery for each setting of them.
FIXED: Final = (
    *("PYTHON", "LD_", "GLIBC_TUNABLES", "MALLOC_", "ASAN_", "LSAN_", "UBSAN_", "TSAN_"),
    *("OPENBLAS_", "OMP_", "GRPC_", "LANG", "LC_"),
)
NAME_BYTES: Final = 15  # of a process, as `top` shows it: linux/sched.h
CLOSE_SECONDS: Final = 5.0
UNKNOWN: Final = 255  # exit code of a daemon whose nursery was gone when it ended
_CHUNK: Final = 64 << 10
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_PR_SET_NAME: Final = 15


class Forked:
    """One daemon, with the verbs of subprocess.Popen that its owner needs; unlike there, it ends when nobody has this any more.

    Not safe for use by several threads at once."""

    def __init__(self, pid: int, handle: int, wire: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._handle = handle
        self._wire = wire

    def poll(self) -> int | None:
        """The exit code, minus the signal's number where one ended it; None while it runs."""
        return self.returncode if self.returncode is not None or not _readable(self._handle, 0) else self._take_code()

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self.returncode is not None:
            return self.returncode
        if not _readable(self._handle, timeout):
            raise subprocess.TimeoutExpired(f"daemon {self.pid}", timeout or 0.0)
        return self._take_code()

    def send_signal(self, signum: int) -> None:
        """Nothing where it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _take_code(self) -> int:
        """Only when it is over: the nursery sees that in the same moment."""
        try:
            told = self._wire.recv(2)
        except ConnectionError:
            told = b""
        self._close()
        self.returncode = int.from_bytes(told, "big", signed=True) if told else UNKNOWN
        return self.returncode

    def _close(self) -> None:
        os.close(self._handle)
        self._wire.close()

    def __del__(self) -> None:
        if self.returncode is None:
            self._close()


class Nursery:
    """Forks daemons until it is closed or the process ends. `start` is safe for use by several threads at once."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # Above the standard streams, which may be closed here.
            given = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3)
        command = [*module_command("kvstore.server.nursery"), str(given)]
        null = subprocess.DEVNULL
        try:
            # Its own process group: Ctrl-C on the terminal reaches this process alone, which then stops the daemons in order. Not its
            # own session: the kernel shares out processors by session, and low priorities would count within each daemon alone.
            self._process = subprocess.Popen(command, stdin=null, stdout=null, pass_fds=[given], process_group=0)
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(given)
        self._socket = ours

    def start(self, arguments: Sequence[str], stdout: int, stderr: int) -> Forked:
        """Forks `kvstore.server ARGUMENTS` with this process's environment, current directory and processors. The descriptors stay the
        caller's. Raises OSError where the nursery has gone or cannot fork."""
        request = {"arguments": [*arguments], "environ": dict(os.environ), "processors": sorted(os.sched_getaffinity(0))}
        ours, theirs = socket.socketpair()
        try:
            with theirs, open_here() as here:
                socket.send_fds(self._socket, [b"+"], [stdout, stderr, here, theirs.fileno()])  # one byte: all of it, or nothing
            _send(ours, request)
            reply, handles = _receive(ours)
            if "error" in reply:
                raise OSError(reply["errno"], reply["error"])
        except EOFError as error:
            ours.close()
            raise ConnectionError(str(error)) from None
        except BaseException:
            ours.close()  # the nursery ends what it may have forked
            raise
        return Forked(reply["pid"], handles[0], ours)

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


@contextlib.contextmanager
def open_here() -> Iterator[int]:
    """The current directory as a descriptor, also where it has been removed."""
    here = os.open(".", os.O_PATH | os.O_DIRECTORY)
    try:
        yield here
    finally:
        os.close(here)


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


@dataclass(frozen=True)
class _Child:
    pid: int
    handle: int  # a pidfd
    wire: socket.socket


def serve(control: socket.socket, parent: int) -> None:
    """Returns in a daemon that was just forked, ready to run; exits when the other end of `control` is closed, or the process of the pidfd
    `parent` has ended."""
    children: dict[int, _Child] = {}  # by pidfd, and by the descriptor of the wire while somebody holds its other end
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(parent, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready == parent:
                raise SystemExit(0)
            if ready != control.fileno():
                if (child := children.pop(ready, None)) is None:
                    continue  # it ended, and was let go of, in the same moment
                poll.unregister(ready)
                if ready == child.handle:
                    if children.pop(child.wire.fileno(), None):
                        poll.unregister(child.wire)
                    _tell_end(child)
                else:  # nobody waits for it any more, which it sees itself unless it stands still
                    signal.pidfd_send_signal(child.handle, signal.SIGCONT)
                continue
            try:
                byte, descriptors, _, _ = socket.recv_fds(control, 1, 4)
            except ConnectionError:
                byte = b""
            if not byte:
                raise SystemExit(0)
            try:
                forked = _fork(control, parent, list(children.values()), descriptors)
            except (OSError, EOFError, ValueError) as error:
                _answer_failure(descriptors, error)
                continue
            if forked is None:
                return
            children[forked.handle] = children[forked.wire.fileno()] = forked
            poll.register(forked.handle, select.POLLIN)
            poll.register(forked.wire, select.POLLIN)  # it sends nothing more: closed


def _fork(control: socket.socket, parent: int, others: Sequence[_Child], descriptors: Sequence[int]) -> _Child | None:
    """A daemon; None in itself. Takes the descriptors, unless it raises."""
    stdout, stderr, here, wire_number = descriptors  # ValueError: the kernel had no room for all
    wire = socket.socket(fileno=os.dup(wire_number))
    try:
        request, _ = _receive(wire)
        pid = os.fork()
        if pid == 0:
            try:
                for each in {control, *(other.wire for other in others)}:
                    each.close()
                for handle in {parent, wire_number, *(other.handle for other in others)}:
                    os.close(handle)
                _become(request, stdout, stderr, here, wire)
            except BaseException:
                traceback.print_exc()
                os._exit(1)  # never the nursery's own loop
            return None
        try:
            with contextlib.suppress(OSError):  # the daemon does the same: whoever comes first
                os.setpgid(pid, pid)
            handle = os.pidfd_open(pid)
            with contextlib.suppress(ConnectionError):  # let go of meanwhile, which is seen next
                _send(wire, {"pid": pid}, [handle])
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
    except BaseException:
        wire.close()
        raise
    for each_number in descriptors:
        os.close(each_number)
    return _Child(pid, handle, wire)


def _answer_failure(descriptors: Sequence[int], error: Exception) -> None:
    if len(descriptors) == 4:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptors[3])) as wire:
            what = error.strerror if isinstance(error, OSError) else str(error)
            _send(wire, {"errno": getattr(error, "errno", None) or errno.EIO, "error": f"cannot fork: {what}"})
    for each in descriptors:
        os.close(each)


def _tell_end(child: _Child) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    with contextlib.suppress(ConnectionError):  # nobody waits for it any more
        child.wire.send(code.to_bytes(2, "big", signed=True))
    child.wire.close()
    os.close(child.handle)


def _become(request: Mapping[str, Any], stdout: int, stderr: int, here: int, wire: socket.socket) -> None:
    """In the new process: everything that a program of its own would have been started with."""
    nursery_pid = os.getppid()
    parent = os.pidfd_open(nursery_pid)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != nursery_pid or nursery_pid == 1:  # it ended before the call above
        os._exit(1)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.fchdir(here)
    for each in (stdout, stderr, here):
        os.close(each)
    # Anew: the nursery's own remember what they were opened on.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  for as long as the process
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115  the same
    os.environ.clear()
    os.environ.update(request["environ"])
    with contextlib.suppress(OSError):  # the starter's may have changed meanwhile
        os.sched_setaffinity(0, request["processors"])
    arguments = request["arguments"]
    sys.argv[1:] = arguments
    name = arguments[arguments.index("--id") + 1] if "--id" in arguments[:-1] else arguments[0] if arguments else ""
    libc.prctl(_PR_SET_NAME, f"kvstore/{name}".encode()[:NAME_BYTES], 0, 0, 0)
    threading.Thread(target=_end_with, args=(parent, wire), name="kvstore-parent", daemon=True).start()


def _end_with(parent: int, wire: socket.socket) -> None:
    """Once, whichever comes first, or both: a second SIGTERM would cut the drain short."""
    _readable(parent, None, wire.fileno())
    os.kill(os.getpid(), signal.SIGTERM)


def _main() -> int:
    open_standard_streams()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, which a start inherits, nobody's exit code would be known
    control = socket.socket(fileno=int(sys.argv[1]))
    parent = os.pidfd_open(os.getppid())  # of another than ours where that has ended: then its end of `control` is closed, too
    for name in NEEDED:
        importlib.import_module(name)
    version()
    gc.freeze()  # what is here by now is never garbage, and stays shared
    serve(control, parent)
    from kvstore.server.__main__ import main

    return main()


# --- both sides ---


def _readable(handle: int, seconds: float | None, *others: int) -> bool:
    """Of a pidfd: whether its process has ended. (select() knows no descriptor above 1,023.)"""
    poll = select.poll()
    for each in (handle, *others):
        poll.register(each, select.POLLIN)
    return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))


def _send(wire: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode() + b"\n"
    sent = socket.send_fds(wire, [data], descriptors)
    wire.sendall(data[sent:])


def _receive(wire: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Raises EOFError where the other side has gone."""
    data, descriptors = b"", []
    while not data.endswith(b"\n"):
        try:
            more, got, _, _ = socket.recv_fds(wire, _CHUNK, 1)
        except ConnectionError:
            more, got = b"", []
        descriptors += got
        if not more:
            raise EOFError("the nursery of daemons has ended")
        data += more
    message: dict[str, Any] = json.loads(data)
    return message, descriptors


if __name__ == "__main__":
    sys.exit(_main())
