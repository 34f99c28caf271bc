"""Rows come into the engine's pages by the mover that was chosen; where it fails they are copied; pages it holds on to are not reused."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from kvstore.client.movers.choose import NAMES
from kvstore.client.movers.cpu import CpuMover
from kvstore.client.movers.interface import _HELD
from kvstore.config import load_settings
from kvstore.engine_integration.engine import landing
from kvstore.engine_integration.engine.landing import Landing
from kvstore.engine_integration.model.codecs import codec_of
from kvstore.engine_integration.model.config import TINY
from kvstore.engine_integration.model.pages import Pages
from kvstore.engine_integration.model.state import RequestState
from kvstore.errors import ConfigError, Unreachable

BLOCKS = 3
CODEC = codec_of("v41")


class Other(CpuMover):
    """As a mover that needs memory of its own kind: rows are staged in what it was given."""

    name = "other"
    moves = 0

    def _way(self, rows, places, to_device):  # type: ignore[no-untyped-def]  # as the one it stands for
        self.moves += 1
        return super()._way(rows, places, to_device)


class Failing(Other):
    lets_go = True

    def _way(self, rows, places, to_device):  # type: ignore[no-untyped-def]  # as the one it stands for
        way = super()._way(rows, places, to_device)
        way.start = self._fails
        way.settle = lambda seconds: self.lets_go
        return way

    def _fails(self, columns: slice, end: float) -> None:
        raise Unreachable("E221", "gpu", "fell off the bus")


def landed(monkeypatch: pytest.MonkeyPatch, kind: type[CpuMover] | None) -> tuple[Landing, RequestState, np.ndarray]:
    if kind is not None:
        monkeypatch.setattr(landing, "make_mover", lambda name, pages: kind(pages))
    pages = Pages(TINY, CODEC, 8)
    here = Landing(pages, "auto", 1 << 16)
    state = RequestState(TINY, CODEC, BLOCKS * TINY.block, pages)
    assert state.reserve(BLOCKS)
    rows = here.rows(BLOCKS, pages.codes.shape[1])
    rows[:] = np.random.default_rng(1).integers(0, 256, rows.shape, dtype=np.uint8)
    return here, state, rows


def all_bytes(state: RequestState) -> list[bytes]:
    at = torch.tensor(state.table)
    return [state.pages.codes[at].numpy().tobytes(), *(values[at].numpy().tobytes() for values in state.pages.values.values())]


@pytest.mark.parametrize("kind", [None, Other, Failing])
def test_pages_hold_the_same_whichever_way_the_rows_came(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[CpuMover] | None
) -> None:
    here, state, rows = landed(monkeypatch, kind)
    with caplog.at_level(logging.WARNING, logger="kvstore"):
        for source in range(len(TINY.sources)):
            here.land(state, source, rows)
    plain = RequestState(TINY, CODEC, BLOCKS * TINY.block)
    plain.import_blocks(rows)
    assert all_bytes(state) == all_bytes(plain)
    sources = len(TINY.sources)
    assert getattr(here.mover, "moves", 0) == (0 if kind is None else sources)
    assert here.faults == (sources if kind is Failing else 0)
    assert sum("rows are copied instead" in record.message for record in caplog.records) == int(kind is Failing)
    kept = here.give(rows)
    assert np.array_equal(kept, rows) and (kind is None) == (kept is rows)
    here.close()


def test_memory_goes_round_and_where_it_is_full_others_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    here, _, rows = landed(monkeypatch, Other)
    row_bytes = rows.shape[1]
    more = [here.rows(40, row_bytes) for _ in range(6)]  # 64 KiB hold a few
    outside = [each for each in more if not here._is_staged(each)]
    assert outside and len(outside) < len(more)
    assert all(here.give(each) is each for each in outside)
    for each in [rows, *(each for each in more if here._is_staged(each))]:
        here.give(each)
    assert here._arena.taken_bytes == 0 and not here._taken


def test_pages_that_a_device_holds_on_to_are_never_given_to_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    here, state, rows = landed(monkeypatch, Failing)
    monkeypatch.setattr(Failing, "lets_go", False)
    free = state.pages.free
    with pytest.raises(Unreachable, match="E221"):
        here.land(state, 0, rows)
    state.release()
    assert state.pages.free == free
    _HELD.pop()


def test_a_mover_of_that_name_is_a_setting_and_one_that_cannot_run_here_is_said_at_the_start() -> None:
    for name in ("auto", *NAMES):
        assert load_settings({"mover": name}, {})["mover"] == name
    with pytest.raises(ConfigError):
        load_settings({"mover": "teleport"}, {})
    with pytest.raises(ConfigError, match="E156"):
        Landing(Pages(TINY, CODEC, 8), "cuda", 1 << 16)
