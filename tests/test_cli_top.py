"""`kvstore top` in a real terminal (a pty, its screen as a terminal would show it) against real daemons; and off a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pyte
import pytest
from cli_tool import Cli

from kvstore.clustermap import ClusterMap, Node
from kvstore.live.view import Screen, View, printable, screen_lines
from kvstore.server.local import LocalCluster

WAIT_SECONDS = 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("top"), 4, k=2, m=2, capacity_bytes=128 << 20, directories=1) as running:
        yield running


@pytest.fixture
def cli(tmp_path: Path, cluster: LocalCluster) -> Cli:
    return Cli(tmp_path, KVSTORE_MAP=str(cluster.map_path), TERM="xterm-256color", LC_ALL="C.UTF-8", COLUMNS="80", LINES="24")


def _own_terminal() -> None:
    """In the child: its standard input is the terminal whose Ctrl-C it hears."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A command on a terminal of its own, and what is on its screen."""

    def __init__(self, cli: Cli, *arguments: str, rows: int = 24, columns: int = 110) -> None:
        self.master, slave = pty.openpty()
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self._resized(rows, columns)
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = bytearray()
        command = cli.command(*arguments)
        options: dict[str, Any] = {"env": dict(cli.environ), "cwd": cli.home, "start_new_session": True, "preexec_fn": _own_terminal}
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:  # a test that failed
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.slave)
        os.close(self.master)

    def _resized(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, rows: int, columns: int) -> None:
        self._resized(rows, columns)
        self.screen.resize(rows, columns)
        os.killpg(self.process.pid, signal.SIGWINCH)

    def _read(self) -> None:
        if select.select([self.master], [], [], 0.05)[0]:
            data = os.read(self.master, 65536)
            self.raw += data
            self._stream.feed(data)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def until(self, true: Callable[[str], bool]) -> str:
        deadline = time.monotonic() + WAIT_SECONDS
        while not true(self.text):
            assert time.monotonic() < deadline and self.process.poll() is None, self.text
            self._read()
        return self.text

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def ended(self) -> int:
        """Its exit code, once the terminal is as it was: its modes, the first screen, the cursor."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
            self._read()
        self._read()
        assert termios.tcgetattr(self.slave) == self.before, "modes"
        assert self.raw.count(b"\x1b[?1049h") == self.raw.count(b"\x1b[?1049l") == 1, "screen"
        assert self.raw.rfind(b"\x1b[?25h") > self.raw.rfind(b"\x1b[?25l") >= 0, "cursor"
        return self.process.returncode


def rows(text: str) -> list[list[str]]:
    """Name and state of the nodes shown."""
    return [line.split()[:2] for line in text.splitlines() if line.startswith("node-")]


def test_top_shows_nodes_worst_first_and_obeys_its_keys(cli: Cli, cluster: LocalCluster) -> None:
    with Terminal(cli, "top", "--interval", "200ms") as terminal:
        shown = terminal.until(lambda text: "node-03" in text and "q quit" in text)
        assert shown.startswith("dev  OK   load ") and "P99 ms v" in shown and "nodes 4 of 4" in shown
        cluster.kill(2)
        try:
            wanted = ("NODE_DOWN  node-02 does not answer", "dev  WARN ", "kvstore explain NODE_DOWN")
            terminal.until(lambda text: all(words in text for words in wanted) and rows(text)[:1] == [["node-02", "down"]])
            terminal.until(lambda text: len(rows(text)) == 4)
        finally:
            cluster.restart(2)
        terminal.until(lambda text: "dev  OK" in text)
        terminal.press("?")
        terminal.until(lambda text: "show only rows with this text" in text)
        terminal.press("?/node-03\r")
        terminal.until(lambda text: 'only rows with "node-03"' in text and [name for name, _ in rows(text)] == ["node-03"])
        terminal.press("\x1b")
        terminal.until(lambda text: "node-00" in text)
        terminal.press("<")
        terminal.until(lambda text: "READS /s v" in text)
        terminal.press("r")
        terminal.until(lambda text: "READS /s ^" in text)
        terminal.press("c")
        terminal.until(lambda text: "no client is watched: --client http://HOST:PORT" in text)
        terminal.press("a")
        terminal.until(lambda text: "none of the watched clients is an agent" in text)
        terminal.press("d")
        address = cluster.map.directories[0]
        terminal.until(lambda text: any(line.split()[:3] == [address, "up", "0"] for line in text.splitlines()))
        terminal.press("n")
        terminal.press("p")
        shown = terminal.until(lambda text: "PAUSED" in text and "node-00" in text)
        terminal.press("p")
        terminal.until(lambda text: "PAUSED" not in text and text.splitlines()[0] != shown.splitlines()[0])
        terminal.press("q")
        assert terminal.ended() == 0


def test_top_fits_the_terminal_also_after_it_was_resized(cli: Cli) -> None:
    with Terminal(cli, "top", "--interval", "200ms", rows=40, columns=140) as terminal:
        terminal.until(lambda text: "node-03" in text and "? help" in text)
        terminal.resize(7, 50)
        terminal.until(
            lambda text: "1 to 1 of 4 (up, down)" in text and "q quit" in text and [name for name, _ in rows(text)] == ["node-00"]
        )
        terminal.press("\x1b[B" * 3)
        terminal.until(lambda text: "node-03" in text)
        terminal.press("q")
        assert terminal.ended() == 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGHUP, 130)])
def test_top_leaves_the_terminal_as_it_was_whatever_ends_it(cli: Cli, signum: signal.Signals, code: int) -> None:
    with Terminal(cli, "top", "--interval", "200ms") as terminal:
        terminal.until(lambda text: "node-03" in text)
        if signum is signal.SIGINT:
            terminal.press("\x03")
        else:
            terminal.process.send_signal(signum)
        assert terminal.ended() == code and b"interrupted" in terminal.raw


def test_off_a_terminal_top_prints_one_plain_frame(cli: Cli) -> None:
    ran = cli.run("top", "--interval", "200ms")
    assert ran.code == 0 and ran.stderr == "" and "\x1b" not in ran.stdout
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("dev  OK   load 0 B/s  save 0 B/s  hit -  nodes 4 of 4") and lines[0].endswith("every 0.2 s")
    assert lines[2].split()[:2] == ["NODE", "STATE"] and [line.split()[0] for line in lines[3:7]] == [f"node-{i:02}" for i in range(4)]
    assert lines[3].split()[5] == "-", "no reads: no p99"


def test_json_is_a_frame_a_line_until_ctrl_c(cli: Cli) -> None:
    once = cli.run("top", "--once", "--json", "--interval", "200ms").json
    assert once["schema"] == "kvstore.top/1" and once["health"] == [] and once["data"]["hits"]["hit_ratio"] is None
    assert once["cluster"] == "dev" and once["data"]["traffic"]["load_bytes_per_second"] == 0
    process = cli.start("top", "--json", "--interval", "200ms")
    assert process.stdout is not None
    frames = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 130 and len({frame["data"]["unix_seconds"] for frame in frames}) == 3
    assert json.loads(rest.splitlines()[-1])["error"]["code"] == "E701"


def test_wrong_words_and_no_cluster_are_refused(cli: Cli, tmp_path: Path) -> None:
    cli.run("top", "--interval", "0").refused(2, "0.1s to 1h")
    cli.run("top", "--client", "somewhere").refused(2, "E140", "http://HOST:PORT")
    ClusterMap.local([Node("node-00", "host-a", "127.0.0.1:1", "127.0.0.1:2")]).save(tmp_path / "closed.toml")
    cli.run("top", "--map", "closed.toml").refused(3, "E202")


def test_what_others_say_cannot_steer_the_terminal(cli: Cli) -> None:
    assert printable("a\x1b[2Jb\x07c\u202e") == "a?[2Jb?c?"
    frame = cli.run("top", "--once", "--json", "--interval", "200ms").json["data"] | {"health": []}
    frame["nodes"][0] |= {"state": "down\x1b]0;x\x07"}
    lines = screen_lines(frame, "dev", 2.0, {}, View(), Screen(200, 40))
    assert all(text.isprintable() for text, _ in lines)
