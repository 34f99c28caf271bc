"""What a node remembers of what it dropped: over restarts, over kills, and where the file is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_tools import daemon
from test_owners import BOUND, ZETA, bound_at_rest, metrics, put, records

from kvstore.server.dropped import FILE, Dropped


def test_the_latest_use_of_what_was_dropped_outlives_the_process(tmp_path: Path) -> None:
    first = Dropped(tmp_path, 1000.0)
    for used in (3000.0, 2000.0):
        first.note("chat", used)
    again = Dropped(tmp_path, 9000.0)
    assert (again.born, again.until) == (1000.0, {"chat": 3000.0})


@pytest.mark.parametrize("text", ["", "chat 1", "born x", "born 1 2\n", "\0\0", "born"])
def test_a_damaged_file_costs_the_memory_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    found = Dropped(tmp_path, 5.0)
    assert (found.born, found.until) == (0.0, {})
    assert Dropped(tmp_path, 5.0).until == {}
    (tmp_path / FILE).write_bytes(b"\xff\xfe")
    assert Dropped(tmp_path, 5.0).until == {}


def test_a_real_node_tells_the_same_bound_after_a_restart(tmp_path: Path) -> None:
    arguments = ("--virtual-clock", "--capacity", "8MB")
    with daemon(tmp_path, *arguments) as server:
        stored = records(ZETA, 1000, 240, 100)
        put(server, stored)
        before = bound_at_rest(server, stored)
        assert 0 < before < 240 * 60
    with daemon(tmp_path, *arguments) as server:
        assert metrics(server)[BOUND] == before
