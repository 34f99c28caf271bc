"""Writers of one key with different bytes: a read is one writer's bytes, and the key is readable when they are done."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from client_tools import EMULATED, cluster_of

from benchmarks import bench_writers
from benchmarks.bench_writers import run_races
from benchmarks.harness import SCALES, Bench
from benchmarks.prompts import LAYOUT
from benchmarks.rig import Rig
from kvstore.client import Client


def test_reads_under_several_writers_of_one_key_never_mix_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if EMULATED:
        monkeypatch.setattr(bench_writers, "rig", servers_of_this_process)
    tally = run_races(Bench(SCALES["smoke"], tmp_path), rounds=40)
    assert tally.mixed == 0
    assert tally.reads > 0
    assert tally.readable == tally.rounds


def servers_of_this_process(bench: Bench, stack: ExitStack, name: str) -> Rig:
    cluster = stack.enter_context(cluster_of(bench.directory / name))
    client = Client(cluster.map, layout=LAYOUT)
    return Rig(cluster, stack.enter_context(client))  # type: ignore[arg-type]  # the races look at its map alone
