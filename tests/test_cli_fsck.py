"""fsck from the command line: sound, damaged, repaired; and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_tool import Cli

from kvstore.server.local import LocalCluster


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


@pytest.fixture
def filled(cli: Cli, tmp_path: Path) -> Iterator[LocalCluster]:
    """Two nodes with a file in them, running."""
    (tmp_path / "in").write_bytes(os.urandom(2_000_000))
    with LocalCluster(tmp_path / "dev", 2, capacity_bytes=128 << 20) as cluster:
        assert cli.run("put", "in", "--map", cluster.map_path).code == 0
        yield cluster


def test_damage_is_found_repaired_only_when_told_and_then_gone(cli: Cli, filled: LocalCluster, tmp_path: Path) -> None:
    cli.run("fsck", filled.node_directory(0)).refused(2, "E120", f"in use by pid {filled.pid(0)}")
    filled.stop()
    sound = cli.run("fsck", tmp_path / "dev")
    assert sound.code == 0 and sound.stdout.count(" ok ") == 2 and "ERR" not in sound.stdout
    segment = next(path for path in sorted(filled.node_directory(1).glob("segments/*.seg")))
    with segment.open("r+b") as file:
        file.seek(100_000)
        byte = file.read(1)[0]
        file.seek(100_000)
        file.write(bytes([byte ^ 0x40]))
    bad = cli.run("fsck", tmp_path / "dev")
    assert bad.code == 1 and "node-01" in bad.stdout and "fails its checks" in bad.stdout and "--repair" in bad.stderr
    envelope = cli.run("fsck", tmp_path / "dev", "--json").json
    assert envelope["ok"] is False and [d["ok"] for d in envelope["data"]["directories"]] == [True, False]
    assert envelope["data"]["directories"][1]["records_bad"] == 1
    refused = cli.run("fsck", filled.node_directory(1), "--repair")
    assert refused.code == 4 and "error[E303]" in refused.stderr and "--yes" in refused.stderr
    repaired = cli.run("fsck", filled.node_directory(1), "--repair", "--yes")
    assert repaired.code == 0 and "repaired" in repaired.stdout and "--repair" not in repaired.stderr
    assert cli.run("fsck", tmp_path / "dev").code == 0


def test_wrong_directories_are_one_line(cli: Cli, tmp_path: Path) -> None:
    cli.run("fsck").refused(2, "E122", "does not exist")
    cli.run("fsck", "nowhere").refused(2, "nowhere", "does not exist")
    (tmp_path / "file").write_text("")
    cli.run("fsck", "file").refused(2, "is not a directory")
    (tmp_path / "empty").mkdir()
    cli.run("fsck", "empty").refused(2, "empty", "no kvstore data in it")
