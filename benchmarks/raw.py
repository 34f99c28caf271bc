"""The programs of benchmarks/raw as objects that give one round when asked, so that rounds can be interleaved with ours."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.harness import ROOT

BUILD = ROOT / "build" / "raw"
DEPTHS = (1, 2, 4, 8, 16)


class _Program:
    def __init__(self, *words: str) -> None:
        if not (BUILD / words[0]).exists():
            subprocess.run([str(ROOT / "scripts" / "build-raw")], check=True)
        self._process = subprocess.Popen([str(BUILD / words[0]), *words[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line: str) -> tuple[float, int]:
        """One round: its seconds and bytes."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().split()
        if len(answer) != 2:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        return float(answer[0]), int(answer[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate()


class Loopback(_Program):
    """`senders` processes from a hot buffer to one receiving process with two threads; congestion control is the host's, or as named."""

    def __init__(self, senders: int, bytes_per_sender: int, congestion_control: str = "", *, each_to_its_place: bool = False) -> None:
        """`each_to_its_place`: the receiver writes every byte where it stays, not over and over into one buffer that its cache holds."""
        words = ["full" if each_to_its_place else "part", *filter(None, [congestion_control])]
        super().__init__("loopback", str(senders), str(bytes_per_sender), *words)

    def round_seconds(self) -> float:
        return self.ask("go")[0]

    def round_bytes_per_second(self) -> float:
        took, moved = self.ask("go")
        return moved / took


class Uring(_Program):
    """O_DIRECT reads of (path, offset, bytes) places by a bare io_uring loop."""

    def __init__(self, places: Iterable[tuple[Path, int, int]], list_path: Path) -> None:
        list_path.write_text("".join(f"{offset} {size} {path}\n" for path, offset, size in places))
        super().__init__("uring", str(list_path))

    def round_seconds(self, depth: int) -> float:
        return self.ask(str(depth))[0]
