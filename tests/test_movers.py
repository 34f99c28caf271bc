"""Movers bring rows into pages layer by layer: the right bytes in the right places, in order, and nothing after the end.

Here in host RAM; tests marked `gpu` need a GPU, and tests/verbs/test_loopback.py an RDMA device (a guest has one). The kernel of
`cuda-kernel` runs in Triton's interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gpu_tools import kernels_run
from verbs.guest import has_devices

from kvstore.client.movers import choose
from kvstore.client.movers.choose import NAMES, Measured, Picked, chosen, make_mover, measure, pick
from kvstore.client.movers.cpu import CpuMover
from kvstore.client.movers.interface import _HELD, DoneEvent, Event, Move, MoveOutcome, Mover, refuse_encrypted, runs_of
from kvstore.client.movers.kernel import move_columns, tensor_of
from kvstore.errors import Closed, ConfigError, LayoutError
from kvstore.kernels.gpu import PageTable
from kvstore.layout import Layout, Section

__all__ = ["kernels_run"]
WIDTH = 1017  # odd on purpose
LAYERS = [slice(0, 1), slice(1, 300), slice(300, 1000), slice(1000, WIDTH)]
SMALL = Layout((Section("a", 700), Section("b", 317)))


def filled(mover: Mover, blocks: int, seed: int) -> np.ndarray:
    rows = mover.host_rows(blocks)
    rows[:] = np.random.default_rng(seed).integers(0, 256, rows.shape, dtype=np.uint8)
    return rows


def bytes_of(pages: torch.Tensor) -> np.ndarray:
    return pages.cpu().numpy()


def pages_on(device: str, count: int = 50, width: int = WIDTH) -> torch.Tensor:
    """Rows lie further apart than they are long, over canaries."""
    return torch.full((count, width + 31), 0xAB, dtype=torch.uint8, device=device)[:, :width]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cuda-kernel", marks=pytest.mark.gpu)])
def mover(request: pytest.FixtureRequest) -> Iterator[Mover]:
    with make_mover(request.param, pages_on("cpu" if request.param == "cpu" else "cuda")) as made:
        yield made


@pytest.mark.parametrize("kind", ["permuted", "in order", "runs", "one", "none"])
def test_layers_come_in_order_and_only_into_their_pages(mover: Mover, kind: str) -> None:
    rng = np.random.default_rng(7)
    table = {
        "permuted": rng.permutation(50)[:20],
        "in order": np.arange(11, 31),
        "runs": np.concatenate([np.arange(40, 50), np.arange(10)]),
        "one": np.array([49]),
        "none": np.array([], np.int64),
    }[kind]
    rows = filled(mover, len(table), 1)
    before = bytes_of(mover.pages).copy()
    with mover.move(rows, table, LAYERS) as move:
        for number, moved in enumerate(move):
            assert moved.layer == number and moved.columns == LAYERS[number]
            assert moved.event.wait(5) and moved.event.done()
            there = bytes_of(mover.pages)
            assert np.array_equal(there[table][:, : moved.columns.stop], rows[:, : moved.columns.stop])
    assert move.outcome is MoveOutcome.COMPLETE
    others = np.setdiff1d(np.arange(50), table)
    assert np.array_equal(bytes_of(mover.pages)[others], before[others])
    again = mover.host_rows(len(table))
    with mover.move(again, table, [slice(0, WIDTH)], to_device=False) as move:
        pass
    assert move.outcome is MoveOutcome.CANCELLED and not again.any()  # nobody took the layer
    with mover.move(again, table, [slice(3, WIDTH)], to_device=False) as move:
        list(move)
    assert move.outcome is MoveOutcome.COMPLETE
    assert np.array_equal(again[:, 3:], rows[:, 3:]) and not again[:, :3].any()


def test_rows_may_lie_apart_and_be_read_only(mover: Mover) -> None:
    wide = np.zeros((10, WIDTH + 50), np.uint8)
    wide[:] = np.random.default_rng(2).integers(0, 256, wide.shape, dtype=np.uint8)
    wide.flags.writeable = False
    mover.adopt(wide)
    rows = wide[::2, 20 : 20 + WIDTH]
    with mover.move(rows, [5, 4, 3, 2, 1], LAYERS) as move:
        list(move)
    assert np.array_equal(bytes_of(mover.pages)[[5, 4, 3, 2, 1]], rows)
    with pytest.raises(LayoutError, match="E514"):
        mover.move(rows, [5, 4, 3, 2, 1], LAYERS, to_device=False)


def test_a_layer_may_still_be_loading_and_a_cancelled_move_begins_no_more(mover: Mover) -> None:
    rows, loaded, taken = filled(mover, 8, 3), threading.Event(), []

    def arriving() -> Iterator[slice]:
        yield LAYERS[0]
        assert loaded.wait(10)
        yield from LAYERS[1:]

    with mover.move(rows, range(8), arriving()) as move:
        taken.append(next(move))
        thread = threading.Thread(target=lambda: (move.cancel(), loaded.set()))
        thread.start()
        taken += move
        thread.join(10)
    assert move.outcome is MoveOutcome.CANCELLED and [moved.layer for moved in taken] == [0]
    there = bytes_of(mover.pages)[:8]
    assert np.array_equal(there[:, :1], rows[:, :1]) and (there[:, 1:] == 0xAB).all()


def test_past_the_deadline_nothing_is_begun(mover: Mover) -> None:
    rows = filled(mover, 4, 4)
    with mover.move(rows, range(4), LAYERS, deadline_seconds=0.0) as move:
        assert list(move) == []
    assert move.outcome is MoveOutcome.TIMEOUT
    assert (bytes_of(mover.pages) == 0xAB).all()


def test_an_error_of_who_feeds_it_ends_it_in_order(mover: Mover) -> None:
    def failing() -> Iterator[slice]:
        yield LAYERS[0]
        raise RuntimeError("the load failed")

    rows = filled(mover, 4, 5)
    with pytest.raises(RuntimeError, match="the load failed"), mover.move(rows, range(4), failing()) as move:
        list(move)
    assert move.outcome is MoveOutcome.CANCELLED


@pytest.mark.parametrize(
    ("table", "rows", "code"),
    [
        ([0, 0], np.zeros((2, WIDTH), np.uint8), "E514"),
        ([0, 50], np.zeros((2, WIDTH), np.uint8), "E514"),
        ([0, -1], np.zeros((2, WIDTH), np.uint8), "E514"),
        ([0], np.zeros((2, WIDTH), np.uint8), "E514"),
        ([0, 1], np.zeros((2, WIDTH - 1), np.uint8), "E514"),
        ([0, 1], np.zeros((2, WIDTH), np.int8), "E514"),
        ([0, 1], np.zeros((2, 2 * WIDTH), np.uint8)[:, ::2], "E514"),
        ([0, 1], np.zeros((2, WIDTH), np.uint8)[::-1], "E514"),
        ([0, 1], bytes(2 * WIDTH), "E514"),
        ([0.9, 1.9], np.zeros((2, WIDTH), np.uint8), "E514"),  # was taken as 0 and 1
        ([True, False], np.zeros((2, WIDTH), np.uint8), "E514"),
        (["0", "1"], np.zeros((2, WIDTH), np.uint8), "E514"),
        ([0, float("nan")], np.zeros((2, WIDTH), np.uint8), "E514"),
        ([0, 1 << 64], np.zeros((2, WIDTH), np.uint8), "E514"),
        ([[0], [0, 1]], np.zeros((2, WIDTH), np.uint8), "E514"),
        (None, np.zeros((2, WIDTH), np.uint8), "E514"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_byte_moves(table: Any, rows: Any, code: str) -> None:
    with CpuMover(pages_on("cpu")) as mover:
        with pytest.raises(LayoutError, match=code):
            mover.move(rows, table, LAYERS)
        with pytest.raises(LayoutError, match="deadline_seconds"):
            mover.move(np.zeros((1, WIDTH), np.uint8), [0], LAYERS, deadline_seconds=float("nan"))  # would never be over
        wrong: list[Any] = [slice(0, WIDTH + 1), slice(5, 5), slice(-1, 4), slice(0, 8, 2), slice(None, 5), slice(0), slice(0.0, 3.5), 3]
        for columns in wrong:
            with pytest.raises(LayoutError, match="E515"), mover.move(np.zeros((1, WIDTH), np.uint8), [0], [columns]) as move:
                list(move)
        assert (bytes_of(mover.pages) == 0xAB).all()
    with pytest.raises(Closed, match="E519"):
        mover.move(np.zeros((1, WIDTH), np.uint8), [0], LAYERS)


def test_pages_that_may_not_be_written_are_read_only() -> None:
    pages = np.zeros((4, WIDTH), np.uint8)
    pages.flags.writeable = False
    rows = np.ones((1, WIDTH), np.uint8)
    with CpuMover(pages) as mover:
        with pytest.raises(LayoutError, match="read-only"):
            mover.move(rows, [2], LAYERS)
        with mover.move(rows, [2], LAYERS, to_device=False) as move:
            list(move)
    assert not rows.any()


def test_pages_that_are_none_and_movers_that_cannot_run_here_are_refused() -> None:
    for pages in (
        torch.zeros(4, 8),
        torch.zeros(4, dtype=torch.uint8),
        torch.zeros(4, 16, dtype=torch.uint8)[:, ::2],
        np.zeros((0, 4), np.uint8),
    ):
        with pytest.raises(LayoutError, match="E513"):
            CpuMover(pages)
    with pytest.raises(ConfigError, match="E157"):
        make_mover("teleport", pages_on("cpu"))
    for name in ("cuda", "cuda-kernel"):
        with pytest.raises(ConfigError, match="E156"):
            make_mover(name, pages_on("cpu"))


def test_encrypted_blocks_do_not_land_in_a_gpu() -> None:
    refuse_encrypted(0)
    with pytest.raises(ConfigError, match=r"E158.*cipher 3.*through host RAM") as caught:
        refuse_encrypted(3)
    assert "\n" not in str(caught.value)


class _Stuck:
    """A device that takes a layer and never says that it is done."""

    def start(self, columns: slice, end: float) -> Event:
        return self

    def done(self) -> bool:
        return False

    def wait(self, seconds: float) -> bool:
        return False

    def before(self, stream: object) -> None: ...

    def settle(self, seconds: float) -> bool:
        return False


def test_memory_that_a_device_does_not_let_go_is_never_freed() -> None:
    held, memory = len(_HELD), np.zeros(8, np.uint8)
    with Move(_Stuck(), [slice(0, 8)], 0.0 + 1e9, 8, memory) as move:
        next(move)
    assert move.outcome is MoveOutcome.TIMEOUT
    assert len(_HELD) == held + 1 and _HELD[-1][0] is memory
    _HELD.pop()


def test_runs_are_what_one_copy_can_take() -> None:
    assert runs_of(np.array([3, 4, 5, 9, 10, 2])) == [(0, 3, 3), (3, 9, 2), (5, 2, 1)]
    assert runs_of(np.array([], np.int64)) == []
    assert DoneEvent().done()


# --- choosing ---


def test_what_can_run_here_is_measured_and_the_fastest_is_chosen() -> None:
    measured = measure(blocks=8, rounds=1, layout=SMALL)
    assert [each.name for each in measured] == list(NAMES)
    cpu = measured[0]
    assert cpu.bytes_per_second and cpu.of_copy
    for each in measured[1:3]:
        assert each.bytes_per_second is None and "host RAM" in each.why
    assert chosen(measured) in ("cpu", "loopback")  # the latter only where there is an RDMA device
    assert chosen([Measured("cpu", 1e9), Measured("cuda", 3e9), Measured("loopback", None)]) == "cuda"
    assert chosen([Measured("cpu", None)]) == ""


def test_auto_picks_the_fastest_of_several_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(device: str) -> None:
        raise ConfigError("E145", "RDMA", "no device is up")

    monkeypatch.setattr(choose, "Loopback", none)
    assert pick("auto") == Picked("cpu", "pages are in host RAM, and loopback cannot run (no device is up)")
    assert make_mover("auto", pages_on("cpu")).name == "cpu"
    monkeypatch.setattr(choose, "Loopback", lambda device: None)
    found = [Measured("cpu", 2e9), Measured("cuda", None, why="no GPU"), Measured("loopback", 3.5e9)]
    monkeypatch.setattr(choose, "measure", lambda device, **_: found)
    assert pick("auto") == Picked("loopback", "measured cpu 2.00 GB/s, loopback 3.50 GB/s")
    assert pick("cpu") == Picked("cpu", "as it was set")
    del found[0], found[1]
    with pytest.raises(ConfigError, match=r"E156.*cuda: no GPU") as caught:
        pick("auto")
    assert "\n" not in str(caught.value)
    for name, code in (("cuda", "E156"), ("cuda-kernel", "E156"), ("loopback", "E156"), ("teleport", "E157")):
        if name == "loopback" and has_devices():
            continue
        with pytest.raises(ConfigError, match=code):
            pick(name)


def test_a_mover_that_brings_wrong_bytes_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar(CpuMover):
        def _way(self, rows, places, to_device):  # type: ignore[no-untyped-def]  # as the one it stands for
            return super()._way(rows, places[::-1].copy(), to_device)

    monkeypatch.setattr(choose, "CpuMover", Liar)
    (cpu,) = (each for each in measure(blocks=4, rounds=1, layout=SMALL) if each.name == "cpu")
    assert cpu.bytes_per_second is None and "differ" in cpu.why


# --- the kernel, in Triton's interpreter ---


@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("width", [64, 61])
def test_the_kernel_moves_columns_as_a_plain_copy_does(width: int) -> None:
    rng = np.random.default_rng(9)
    rows = rng.integers(0, 256, (5, width), dtype=np.uint8)
    table, pages = rng.permutation(9)[:5], pages_on("cpu", 9, width)
    places = PageTable(table.tolist(), 9, "cpu")
    rows.flags.writeable = False
    move_columns(tensor_of(rows), pages, places, slice(8, 56), True)
    there = bytes_of(pages)
    assert np.array_equal(there[table][:, 8:56], rows[:, 8:56])
    assert (there[:, :8] == 0xAB).all() and (there[:, 56:] == 0xAB).all()
    back = np.zeros((5, width), np.uint8)
    move_columns(tensor_of(back), pages, places, slice(8, 56), False)
    assert np.array_equal(back[:, 8:56], rows[:, 8:56]) and not back[:, :8].any()


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "cuda-kernel"])
def test_a_stream_that_was_told_before_sees_the_layer_and_pages_in_use_are_waited_for(name: str) -> None:
    pages = pages_on("cuda", 512, 1 << 16)
    with make_mover(name, pages) as mover:
        rows = filled(mover, 256, 11)
        compute = torch.cuda.current_stream()
        seen = torch.empty_like(pages)
        seen.copy_(pages)  # still reading when the move begins
        with mover.move(rows, np.random.default_rng(1).permutation(512)[:256], [slice(0, 1 << 16)]) as move:
            for moved in move:
                moved.event.before(compute)
                after = pages.clone()
        torch.cuda.synchronize()
        assert bool((seen == 0xAB).all())
        assert after.cpu().numpy().sum() == bytes_of(pages).sum() and move.outcome is MoveOutcome.COMPLETE


@pytest.mark.gpu
def test_memory_that_is_not_pinned_is_refused_on_a_gpu() -> None:
    with make_mover("cuda", pages_on("cuda")) as mover, pytest.raises(LayoutError, match="E517"):
        mover.move(np.zeros((2, WIDTH), np.uint8), [0, 1], LAYERS)


@pytest.mark.gpu
def test_the_movers_of_a_gpu_are_measured() -> None:
    measured = {each.name: each for each in measure("cuda:0", blocks=64, rounds=3)}
    assert measured["cuda"].bytes_per_second and measured["cuda-kernel"].bytes_per_second
