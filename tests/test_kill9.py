"""Killing daemons under write load loses nothing settled and never gives wrong bytes; `make bench` runs the same code 100 times over."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bench_kill9 import run_kills
from benchmarks.harness import SCALES, Bench


def test_daemons_killed_under_write_load_restart_by_themselves_and_no_byte_is_wrong(tmp_path: Path) -> None:
    tally = run_kills(Bench(SCALES["smoke"], tmp_path), kills=4)
    assert (tally.kills, tally.restarts, tally.wrong) == (4, 4, 0)
    assert tally.checked > 0
    assert tally.missing <= tally.checked // 100
