"""One mover fills an engine's tensors, one a layer, whatever their page size: each row where the block table says, and nothing else."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from client_tools import NO_REUSE, Blocks, chain, cluster_of, store, until
from gpu_tools import kernels_run

from kvstore.client import Client, LoadOutcome
from kvstore.client.movers.cuda import CudaWay
from kvstore.client.movers.interface import DoneEvent, MoveOutcome
from kvstore.client.movers.paged import LayerPages, PagedMover, _Copies, move_layer
from kvstore.client.streaming import store_pages, stream_planes
from kvstore.errors import ConfigError, DeadlineExceeded, LayoutError
from kvstore.kernels.gpu import PageTable, Part
from kvstore.layout import Layout, Section

__all__ = ["kernels_run"]
# Two layers of keys and values, 64 rows of a block each, and one of an index with half as many rows; the last byte is nobody's.
PARTS = [Part(0, 64, 24), Part(64 * 24, 64, 24), Part(2 * 64 * 24, 64, 40), Part(2 * 64 * 24 + 64 * 40, 64, 40), Part(8192, 32, 17)]
BLOCK_BYTES = 8192 + 32 * 17 + 1
PAGE_ROWS = [8, 64, 128, 48, 2]  # of 64 rows a block; of the index half as many
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cuda-kernel", marks=pytest.mark.gpu)]


def tensors_of(page_rows: int, blocks: int, device: str) -> list[LayerPages]:
    """Room for twice the blocks, over canaries; keys and values of a layer lie side by side in one tensor."""
    pages = 2 * -(-blocks * 64 // page_rows) + 1
    layers = [
        torch.full((pages, 2, page_rows, 24), 0xAB, dtype=torch.uint8, device=device),
        torch.full((pages, 2, page_rows, 40), 0xAB, dtype=torch.uint8, device=device),
    ]
    index = torch.full((pages, page_rows // 2, 17), 0xAB, dtype=torch.uint8, device=device)
    return [LayerPages(part, layers[at // 2][:, at % 2] if at < 4 else index) for at, part in enumerate(PARTS)]


def expected(layer: LayerPages, blocks: Blocks, table: Any) -> np.ndarray:
    """Row by row."""
    part, page_rows = layer.part, layer.pages.shape[1]
    out = np.full(tuple(layer.pages.shape), 0xAB, np.uint8)
    rows = blocks[:, layer.columns].reshape(-1, part.row_bytes)
    for number, row in enumerate(rows):
        out[table[number // page_rows], number % page_rows] = row
    return out


def bytes_of(layer: LayerPages) -> np.ndarray:
    return np.asarray(layer.pages.cpu() if isinstance(layer.pages, torch.Tensor) else layer.pages)


def blocks_of(count: int) -> Blocks:
    return np.random.default_rng(3).integers(0, 256, (count, BLOCK_BYTES), dtype=np.uint8)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("page_rows", PAGE_ROWS)
@pytest.mark.parametrize("count", [1, 7, 0])
def test_every_row_comes_to_its_page_and_back(name: str, page_rows: int, count: int) -> None:
    tensors, blocks = tensors_of(page_rows, 8, "cpu" if name == "cpu" else "cuda"), blocks_of(count)
    with PagedMover(name, tensors, BLOCK_BYTES) as mover:
        table = np.random.default_rng(4).permutation(mover.pages_count)[: mover.pages_for(count)]
        rows = mover.host_rows(count)
        rows[:] = blocks
        with mover.move(rows, table, mover.layers) as move:
            for moved in move:
                assert moved.event.wait(5)
                for number, layer in enumerate(tensors):
                    want = blocks if number <= moved.layer else blocks[:0]
                    assert np.array_equal(bytes_of(layer), expected(layer, want, table)), (moved.layer, number)
        assert move.outcome is MoveOutcome.COMPLETE
        back = mover.host_rows(count)
        back[:] = 0x5A
        with mover.move(back, table, [slice(0, BLOCK_BYTES)], to_device=False) as move:
            list(move)
        assert np.array_equal(back[:, : BLOCK_BYTES - 1], blocks[:, : BLOCK_BYTES - 1]) and (back[:, -1] == 0x5A).all()


@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("page_rows", PAGE_ROWS)
def test_the_kernel_fills_the_same_tensors(page_rows: int) -> None:
    tensors, blocks = tensors_of(page_rows, 3, "cpu"), blocks_of(3)
    pages = len(tensors[0].pages)
    with PagedMover("cpu", tensors, BLOCK_BYTES) as mover:
        table = np.random.default_rng(4).permutation(pages)[: mover.pages_for(3)]
        for layer in tensors:
            move_layer(torch.from_numpy(blocks), layer, PageTable(table.tolist(), pages, "cpu"), True)
            assert np.array_equal(bytes_of(layer), expected(layer, blocks, table))
        back = np.zeros_like(blocks)
        for layer in tensors:
            move_layer(torch.from_numpy(back), layer, PageTable(table.tolist(), pages, "cpu"), False)
    assert np.array_equal(back[:, :-1], blocks[:, :-1])


class Runtime:
    """What the copy engine is told, done by the processor."""

    def __init__(self, batches: bool) -> None:
        self.batches = batches

    def copy_batch(self, to: np.ndarray, sources: np.ndarray, width: int, stream: int) -> None:
        for at, source in zip(to.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(at, source, width)

    def copy_2d(self, to: int, to_pitch: int, source: int, pitch: int, width: int, height: int, kind: int, stream: int) -> None:
        assert height == 1
        ctypes.memmove(to, source, width)


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("page_rows", PAGE_ROWS)
def test_the_copy_engine_is_told_the_same(monkeypatch: pytest.MonkeyPatch, page_rows: int, batches: bool) -> None:
    """Its addresses, without a GPU."""

    def begin(way: Any, mover: Any, rows: Any, to_device: bool) -> None:
        way.mover = SimpleNamespace(runtime=Runtime(batches))
        way.rows, way.to_device, way.stream = rows, to_device, SimpleNamespace(cuda_stream=0)

    monkeypatch.setattr(CudaWay, "__init__", begin)
    tensors, wide = tensors_of(page_rows, 3, "cpu"), np.zeros((6, BLOCK_BYTES + 5), np.uint8)
    blocks, back = wide[:3, 5:], wide[3:, 5:]  # blocks that lie apart
    blocks[:] = blocks_of(3)
    with PagedMover("cpu", tensors, BLOCK_BYTES) as mover:
        table = np.random.default_rng(4).permutation(mover.pages_count)[: mover.pages_for(3)]
        for rows, to_device in ((blocks, True), (back, False)):
            way: Any = _Copies(mover, mover.inner, rows, table, to_device)  # type: ignore[arg-type]  # a mover without a GPU
            for columns in mover.layers:
                way.put(columns)
    assert all(np.array_equal(bytes_of(layer), expected(layer, blocks, table)) for layer in tensors)
    assert np.array_equal(back[:, :-1], blocks[:, :-1]) and not wide[:, :5].any()


@pytest.mark.parametrize(("layers", "row_bytes", "planes"), [(2, 512, 2), (6, 4, 3), (4, 2, 1)])
def test_planes_come_from_nodes_into_their_layers_and_go_back(tmp_path: Path, layers: int, row_bytes: int, planes: int) -> None:
    """Layers of which each is a plane, or several are one; pages of an eighth of a block. Each tensor has its event, in order."""
    rows, blocks = 128, 40
    layout = Layout(tuple(Section(f"layer-{i}", rows * 2 * row_bytes) for i in range(layers)))
    assert len(layout.planes(2)) == planes
    kv = [np.full((2, 400, 16, row_bytes), 0xAB, np.uint8) for _ in range(layers)]  # keys and values apart
    tensors = [LayerPages(Part((2 * i + of) * rows * row_bytes, rows, row_bytes), kv[i][of]) for i in range(layers) for of in range(2)]
    with (
        cluster_of(tmp_path, 3, k=2, m=1) as cluster,
        Client(cluster.map, layout=layout, config=NO_REUSE) as client,
        PagedMover("auto", tensors, layout.block_bytes) as mover,
    ):
        assert mover.inner.name == "cpu"
        keys = chain(blocks, layout)
        data, memory = store(client, keys), mover.host_rows(blocks)
        table = np.random.default_rng(4).permutation(400)
        with stream_planes(client, client.lookup(keys), mover, table, memory) as stream:
            for number, moved in enumerate(stream):
                assert moved.event.wait(5) and mover.ends_in(moved.columns) == [number]
                assert moved.plane == number * planes // len(tensors)
                assert np.array_equal(bytes_of(tensors[number]), expected(tensors[number], data, table))
        assert (stream.outcome, stream.blocks) == (LoadOutcome.COMPLETE, blocks)
        memory[:] = 0
        again = chain(blocks, layout)  # what lies in the pages becomes another prompt
        future = store_pages(client, again, mover, table[: mover.pages_for(blocks)], memory, first_block=0)
        assert future.result(20).blocks == blocks and np.array_equal(memory, data)
        until(lambda: client.lookup(again).hit_blocks == blocks, "the last shards")
        place = np.empty_like(data)
        assert client.load(client.lookup(again), place).blocks == blocks and np.array_equal(place, data)


def test_what_begins_in_the_middle_of_a_page_is_refused(tmp_path: Path) -> None:
    """It would be taken from the wrong slots: another block's bytes under this block's key."""
    layout = Layout((Section("block", BLOCK_BYTES),))
    with (
        cluster_of(tmp_path, 3, k=2, m=1) as cluster,
        Client(cluster.map, layout=layout, config=NO_REUSE) as client,
        PagedMover("cpu", tensors_of(128, 8, "cpu"), BLOCK_BYTES) as mover,  # two blocks a page
    ):
        keys, rows = chain(6, layout), mover.host_rows(3)
        for first in (1, 3):
            with pytest.raises(LayoutError, match=f"E514.*block {first}: lies in the middle of a page"):
                store_pages(client, keys, mover, range(1, 3), rows, first_block=first)
        assert store_pages(client, keys, mover, range(1, 3), rows, first_block=2).result(20).blocks == 3
        assert store_pages(client, keys, mover, range(1), rows[:2], first_block=0).result(20).blocks == 2
        until(lambda: client.lookup(keys).hit_blocks == 5, "the last shards")
        ticket = client.lookup(keys)
        with pytest.raises(LayoutError, match="E514"):
            stream_planes(client, ticket, mover, range(1, 3), rows, blocks=range(1, 4))
        with stream_planes(client, ticket, mover, range(1, 3), rows, blocks=range(2, 5)) as stream:
            for moved in stream:
                assert moved.event.wait(5)
        assert stream.blocks == 3


def test_pages_that_do_not_come_in_time_are_not_stored(tmp_path: Path) -> None:
    tensors = tensors_of(8, 4, "cpu")
    layout = Layout((Section("block", BLOCK_BYTES),))
    with (
        cluster_of(tmp_path, 3, k=2, m=1) as cluster,
        Client(cluster.map, layout=layout, config=NO_REUSE) as client,
        PagedMover("cpu", tensors, BLOCK_BYTES) as mover,
    ):
        keys, table = chain(4, layout), range(mover.pages_for(4))
        with pytest.raises(DeadlineExceeded, match="E220"):
            store_pages(client, keys, mover, table, mover.host_rows(4), first_block=0, deadline_seconds=0)
        with pytest.raises(LayoutError, match="E514"):
            store_pages(client, keys, mover, table[1:], mover.host_rows(4), first_block=0)
        assert client.stats()["extents_stored"] == 0 and client.lookup(keys).hit_blocks == 0


def test_tensors_that_one_table_does_not_serve_are_refused() -> None:
    def pages(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.uint8)

    part = Part(0, 64, 24)
    right = LayerPages(part, pages(9, 16, 24))
    wrong: list[list[LayerPages]] = [
        [],
        [LayerPages(part, pages(9, 16, 25))],
        [LayerPages(part, pages(9, 16 * 24))],
        [LayerPages(part, pages(9, 16, 48)[:, :, ::2])],
        [LayerPages(part, pages(9, 32, 24)[:, ::2])],  # the rows of a page lie apart
        [LayerPages(part, pages(9, 0, 24))],
        [LayerPages(part, np.zeros((9, 16, 24), np.int8))],
        [right, LayerPages(part, pages(8, 16, 24))],
        [right, LayerPages(part, pages(9, 32, 24))],
        [right, LayerPages(Part(BLOCK_BYTES - 1, 64, 24), pages(9, 16, 24))],
    ]
    for tensors in wrong:
        with pytest.raises(LayoutError, match="E513"):
            PagedMover("cpu", tensors, BLOCK_BYTES)
    for name in ("cuda", "cuda-kernel", "loopback"):
        with pytest.raises(ConfigError):
            PagedMover(name, [right], BLOCK_BYTES)
    with PagedMover("cpu", [right], BLOCK_BYTES) as mover:
        rows = mover.host_rows(2)
        for table in (range(7), range(9), [0] * 8, [*range(7), 9]):
            with pytest.raises(LayoutError, match="E514"):
                mover.move(rows, table, mover.layers)
        with mover.move(rows, range(8), [slice(0, 5)]) as move:  # no tensor ends there
            assert isinstance(next(move).event, DoneEvent)
    assert not right.pages.any()
