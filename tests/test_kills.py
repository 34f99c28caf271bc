"""A daemon is killed under write load again and again: the measurement `kill9` with a hundred kills; of full size it has a thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_kill9 import run_kills
from benchmarks.harness import SCALES, Bench

KILLS = 100


@pytest.mark.timeout(600)
def test_a_hundred_kills_under_write_load_make_no_wrong_byte_and_every_daemon_comes_back(tmp_path: Path) -> None:
    tally = run_kills(Bench(SCALES["smoke"], tmp_path), KILLS, apart_seconds=0)
    assert (tally.kills, tally.restarts, tally.wrong) == (KILLS, KILLS, 0)
    # As fast as daemons come back, three may lose the same second: those prompts are gone, and few.
    assert tally.checked > KILLS and tally.missing <= tally.checked / 5, f"{tally.missing} of {tally.checked} settled prompts are short"
