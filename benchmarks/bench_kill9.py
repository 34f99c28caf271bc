"""kill9: `kill -9` of a daemon under write load, again and again; every acknowledged prompt that is read must be right.

Counted: loads with wrong bytes (0), kills without a restart (0), prompts acknowledged over 5 s before the kill that do not read (under 1%).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import Bench, Figure, at_least, at_most, measures
from benchmarks.prompts import bytes_of, chain_keys, pretouched
from benchmarks.rig import NODES, Rig, rig, writer

BLOCKS = 8
SETTLED_SECONDS = 5.0  # the index is synced each second: what is older than this must survive
WRITE_BYTES_PER_SECOND = 60e6
CHECKS_PER_KILL = 10


@dataclass
class Tally:
    kills: int = 0
    restarts: int = 0
    wrong: int = 0
    checked: int = 0
    missing: int = 0  # of those checked: settled, not read in full


class Acknowledged:
    """Prompts that a writer process said were stored, with the time; filled by a thread from its output."""

    def __init__(self) -> None:
        self._stored: list[tuple[int, float]] = []
        self._changed = threading.Condition()

    def feed(self, lines: Iterable[str]) -> None:
        for line in lines:
            seed, outcome, at = line.split()
            if outcome.startswith("STORED") or outcome == "DEGRADED":
                with self._changed:
                    self._stored.append((int(seed), float(at)))
                    self._changed.notify_all()

    def wait_for_more(self, count: int, timeout_seconds: float = 60.0) -> None:
        """Returns when `count` more prompts are stored than now."""
        with self._changed:
            target = len(self._stored) + count
            if not self._changed.wait_for(lambda: len(self._stored) >= target, timeout_seconds):
                raise RuntimeError(f"the writer stored fewer than {count} prompts in {timeout_seconds:g} s")

    def newest(self) -> int:
        """Seed of the prompt stored last."""
        with self._changed:
            return self._stored[-1][0]

    def settled_before(self, moment: float, last: int) -> list[int]:
        """Seeds acknowledged over SETTLED_SECONDS before, the newest `last` of them (older ones may be evicted)."""
        with self._changed:
            return [seed for seed, at in self._stored if at < moment - SETTLED_SECONDS][-last:]


def check(made: Rig, seed: int, place: np.ndarray, tally: Tally) -> None:
    keys = chain_keys(seed, BLOCKS, "writer")
    loaded = made.client.load(made.client.lookup(keys), place).blocks
    tally.checked += 1
    tally.missing += loaded < BLOCKS
    tally.wrong += not np.array_equal(place[:loaded], bytes_of(keys[:loaded]))


def run_kills(bench: Bench, kills: int, seed: int = 9) -> Tally:
    """Kills random daemons under write load; prints nothing, raises if the writer or a restart gives up."""
    rng = random.Random(seed)
    tally = Tally()
    with ExitStack() as stack:
        made = rig(bench, stack, "kill9", capacity_bytes=1 << 30)
        process = writer(made.cluster, "--blocks", str(BLOCKS), "--rate", str(WRITE_BYTES_PER_SECOND))
        acknowledged = Acknowledged()
        feeder = threading.Thread(target=acknowledged.feed, args=(process.stdout,), daemon=True)
        feeder.start()
        place = pretouched(BLOCKS)
        try:
            for _ in range(kills):
                acknowledged.wait_for_more(rng.randint(1, 20))
                node = rng.randrange(NODES)
                moment = time.monotonic()
                made.cluster.kill(node)
                tally.kills += 1
                made.cluster.restart(node)
                tally.restarts += 1
                settled = acknowledged.settled_before(moment, last=2_000)
                for prompt in rng.sample(settled, min(CHECKS_PER_KILL, len(settled))):
                    check(made, prompt, place, tally)
            for prompt in acknowledged.settled_before(time.monotonic() + SETTLED_SECONDS, last=500):
                check(made, prompt, place, tally)
        finally:
            assert process.stdin
            process.stdin.close()
            process.wait(60)
            feeder.join(60)
    return tally


@measures("kill9")
def kill9(bench: Bench) -> dict[str, Figure]:
    tally = run_kills(bench, bench.scale.kills)
    note = f"{tally.kills} kills, {tally.checked} prompts checked"
    return {
        "kill9.wrong": Figure(tally.wrong, at_most(0), note),
        "kill9.not_restarted": Figure(tally.kills - tally.restarts, at_most(0), note),
        "kill9.settled_readable": Figure(1 - tally.missing / max(1, tally.checked), at_least(0.99), note),
    }
