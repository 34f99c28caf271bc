"""What every daemon does with signals, whatever its main thread is doing."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli_tool import ROOT

WAIT_SECONDS = 20.0
# Its main thread has the signals blocked, so that others take them and it is not woken: what happens to any main thread now and then that
# is about to wait for a lock when one comes.
SLEEPER = """
import signal, sys, threading
from kvstore.daemon import run_daemon

class Log:
    def reread_level(self):
        print("level", flush=True)

class Sleeper:
    log, stopping = Log(), False
    stop, never = threading.Event(), threading.Event()
    def start(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    def facts(self):
        return {}
    def request_stop(self):
        print("stop", flush=True)
        self.stop.set()
    def serve_until_stopped(self):
        (self.never if "deaf" in sys.argv else self.stop).wait()
        return 7

code = run_daemon(Sleeper(), lambda: print("reload", flush=True))
if "slow" in sys.argv:
    print("over", flush=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT])
    while True:
        signal.pause()
sys.exit(code)
"""


@contextmanager
def sleeper(*words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SLEEPER, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(ROOT)}, cwd=Path(ROOT))
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready {}\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_signals_are_heard_while_the_main_thread_waits_for_good() -> None:
    with sleeper() as process:
        assert process.stdout is not None
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
            assert [process.stdout.readline(), process.stdout.readline()] == ["reload\n", "level\n"]
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stop\n"
        assert process.wait(WAIT_SECONDS) == 7


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_daemon_that_does_not_stop(second: signal.Signals) -> None:
    with sleeper("deaf") as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "stop\n"
        process.send_signal(signal.SIGHUP)  # is no second one
        assert process.stdout.readline() == "reload\n"
        process.send_signal(second)
        assert process.wait(WAIT_SECONDS) == 128 + second


def test_a_second_signal_ends_a_daemon_whose_end_hangs() -> None:
    with sleeper("slow") as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGTERM)
        assert [process.stdout.readline(), process.stdout.readline()] == ["stop\n", "over\n"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 128 + signal.SIGTERM
