"""Writers of one key with different bytes: a read is one writer's bytes, and the key is readable when they are done."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bench_writers import run_races
from benchmarks.harness import SCALES, Bench


def test_reads_under_several_writers_of_one_key_never_mix_them(tmp_path: Path) -> None:
    tally = run_races(Bench(SCALES["smoke"], tmp_path), rounds=40)
    assert tally.mixed == 0
    assert tally.reads > 0
    assert tally.readable == tally.rounds
