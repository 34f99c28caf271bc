"""A writer process at work on a cluster (benchmarks/writer.py), and which of its prompts were acknowledged when."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import TracebackType
from typing import Self

from benchmarks.harness import ROOT
from kvstore.client import StoreOutcome
from kvstore.server.local import LocalCluster


class Pressure:
    """Runs while the context is open. Prompt `seed` is chain_keys(seed, blocks, "writer"), its bytes are made from its keys."""

    def __init__(self, cluster: LocalCluster, *, blocks: int, first_seed: int = 0, bytes_per_second: float = 0.0) -> None:
        words = ["--blocks", str(blocks), "--seed", str(first_seed), "--rate", str(bytes_per_second)]
        command = [sys.executable, "-m", "benchmarks.writer", str(cluster.map_path), *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self._reader = threading.Thread(target=self._read, name="writer-output", daemon=True)
        self._acknowledged: list[tuple[int, float]] = []
        self._changed = threading.Condition()

    def wait_for_more(self, count: int, timeout_seconds: float = 60.0) -> None:
        """Returns when `count` more prompts are stored than now."""
        with self._changed:
            target = len(self._acknowledged) + count
            if not self._changed.wait_for(lambda: len(self._acknowledged) >= target, timeout_seconds):
                raise RuntimeError(f"the writer stored fewer than {count} prompts in {timeout_seconds:g} s")

    def newest(self) -> int:
        """Seed of the prompt stored last."""
        with self._changed:
            return self._acknowledged[-1][0]

    def stored_before(self, moment: float, last: int) -> list[int]:
        """Seeds acknowledged before a time of the monotonic clock, the newest `last` of them (older ones may be evicted)."""
        with self._changed:
            return [seed for seed, at in self._acknowledged if at < moment][-last:]

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            seed, outcome, at = line.split()
            if StoreOutcome[outcome].readable:
                with self._changed:
                    self._acknowledged.append((int(seed), float(at)))
                    self._changed.notify_all()

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(60)
        self._reader.join(60)
        self._process.stdout.close()
