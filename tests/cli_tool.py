"""Runs the command `kvstore` as a user does: a process of its own, its exit code and both its outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Ran:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        found: dict[str, Any] = json.loads(self.stdout)
        return found

    def refused(self, code: int, *words: str) -> None:
        """Asserts the house form of an error: one line on stderr, its code, every word in it, a fix, and this exit code."""
        assert self.code == code, (self.code, self.stdout, self.stderr)
        lines = self.stderr.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("error[E") and ". Fix: " in lines[0], self.stderr
        assert "Traceback" not in self.stderr
        for word in words:
            assert word in self.stderr, (word, self.stderr)


class Cli:
    """The command with a home of its own below `home`: nothing of the user's is read or written."""

    def __init__(self, home: Path, **environ: str) -> None:
        self.home = home
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "XDG_")) and name != "FORCE_COLOR"}
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self.environ: Mapping[str, str] = {**kept, "HOME": str(home), "PYTHONPATH": python_path, **environ}

    def command(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "kvstore", *map(str, arguments)]

    def run(self, *arguments: str | Path, stdin: bytes = b"", timeout_seconds: float = 60, **environ: str) -> Ran:
        full = {**self.environ, **environ}
        done = subprocess.run(self.command(*arguments), input=stdin, capture_output=True, env=full, cwd=self.home, timeout=timeout_seconds)
        return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())

    def start(self, *arguments: str | Path, **environ: str) -> subprocess.Popen[str]:
        """A command that goes on: the caller ends it."""
        pipe, full = subprocess.PIPE, {**self.environ, **environ}
        command = self.command(*arguments)
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=full, cwd=self.home, text=True)
