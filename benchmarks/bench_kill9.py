"""kill9: `kill -9` of a daemon under write load, again and again; every acknowledged prompt that is read must be right.

Counted: loads with wrong bytes (0), kills without a restart (0), prompts acknowledged over 5 s before the kill that do not read (under 1%).
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import Bench, Figure, at_least, at_most, measures
from benchmarks.pressure import Pressure
from benchmarks.prompts import are_bytes_of, chain_keys, pretouched
from benchmarks.rig import NODES, Rig, rig

BLOCKS = 8
SETTLED_SECONDS = 5.0  # the index is synced each second: what is older than this must survive
# Each kill loses up to a second of what its daemon took: three of them in one would lose prompts for good, which is no fault.
APART_SECONDS = 0.75
WRITE_BYTES_PER_SECOND = 60e6
CHECKS_PER_KILL = 10


@dataclass
class Tally:
    kills: int = 0
    restarts: int = 0
    wrong: int = 0
    checked: int = 0
    missing: int = 0  # of those checked: settled, not read in full


def check(made: Rig, seed: int, place: np.ndarray, tally: Tally) -> None:
    keys = chain_keys(seed, BLOCKS, "writer")
    loaded = made.client.load(made.client.lookup(keys), place).blocks
    tally.checked += 1
    tally.missing += loaded < BLOCKS
    tally.wrong += not are_bytes_of(keys[:loaded], place[:loaded])


def run_kills(bench: Bench, kills: int, seed: int = 9, apart_seconds: float = APART_SECONDS) -> Tally:
    """Kills random daemons under write load, at most one in `apart_seconds`; prints nothing, raises if the writer or a restart gives up."""
    rng = random.Random(seed)
    tally = Tally()
    with ExitStack() as stack:
        made = rig(bench, stack, "kill9", capacity_bytes=1 << 30)
        written = stack.enter_context(Pressure(made.cluster, blocks=BLOCKS, bytes_per_second=WRITE_BYTES_PER_SECOND))
        place = pretouched(BLOCKS)
        moment = 0.0
        for _ in range(kills):
            written.wait_for_more(rng.randint(1, 20))
            while time.monotonic() < moment + apart_seconds:
                written.wait_for_more(1)
            node = rng.randrange(NODES)
            moment = time.monotonic()
            made.cluster.kill(node)
            tally.kills += 1
            made.cluster.restart(node)
            tally.restarts += 1
            settled = written.stored_before(moment - SETTLED_SECONDS, last=2_000)
            for prompt in rng.sample(settled, min(CHECKS_PER_KILL, len(settled))):
                check(made, prompt, place, tally)
        for prompt in written.stored_before(time.monotonic(), last=100):
            check(made, prompt, place, tally)
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
