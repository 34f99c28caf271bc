"""The loopback mover on real verbs: the NIC brings rows into pages of host RAM, and nothing of a move that was cut off lands later."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from client_tools import NO_REUSE, V41, WAIT_SECONDS, chain, store, until_whole
from verbs.nodes import cluster

from kvstore.client import Client, LoadOutcome
from kvstore.client.movers import devices
from kvstore.client.movers.choose import Picked, pick
from kvstore.client.movers.interface import MoveOutcome
from kvstore.client.movers.loopback import LoopbackMover
from kvstore.client.streaming import stream_planes
from kvstore.doctor import rdma
from kvstore.doctor.finding import Word
from kvstore.errors import ConfigError, LayoutError, Unreachable
from kvstore.kernels._native import Loopback

WIDTH = 1017
PAGE = 32 << 10
BLOCKS = 20  # of the original's: 2.3 MB
LAYERS = [slice(0, 1), slice(1, 300), slice(300, 1000), slice(1000, WIDTH)]


def pages(count: int, width: int = WIDTH) -> np.ndarray:
    return np.full((count, width + 31), 0xAB, np.uint8)[:, :width]


def filled(mover: LoopbackMover, blocks: int, seed: int) -> np.ndarray:
    rows = mover.host_rows(blocks)
    rows[:] = np.random.default_rng(seed).integers(0, 256, rows.shape, dtype=np.uint8)
    return rows


def test_rows_come_layer_by_layer_and_go_back() -> None:
    there = pages(50)
    with LoopbackMover(there) as mover:
        assert mover.registration == "host"
        rows, table = filled(mover, 20, 1), np.random.default_rng(2).permutation(50)[:20]
        with mover.move(rows, table, LAYERS, deadline_seconds=30) as move:
            for moved in move:
                assert moved.event.wait(20) and moved.event.done()
                assert np.array_equal(there[table][:, : moved.columns.stop], rows[:, : moved.columns.stop])
        assert move.outcome is MoveOutcome.COMPLETE
        assert (there[np.setdiff1d(np.arange(50), table)] == 0xAB).all() and (there.base[:, WIDTH:] == 0xAB).all()
        back = mover.host_rows(20)
        with mover.move(back, table, [slice(2, WIDTH)], to_device=False, deadline_seconds=30) as move:
            list(move)
        assert move.outcome is MoveOutcome.COMPLETE
        assert np.array_equal(back[:, 2:], rows[:, 2:]) and not back[:, :2].any()


def test_more_pieces_than_the_queue_holds_go_in_turn_and_several_threads_may_move() -> None:
    there = pages(3000, 64)
    with LoopbackMover(there) as mover:
        rows = filled(mover, 3000, 3)
        halves = [np.arange(0, 1500), np.arange(1500, 3000)]
        outcomes: list[MoveOutcome] = []

        def move_half(half: np.ndarray) -> None:
            with mover.move(rows[half[0] : half[-1] + 1], half[::-1].copy(), [slice(0, 40), slice(40, 64)], deadline_seconds=60) as move:
                list(move)
            outcomes.append(move.finish())

        threads = [threading.Thread(target=move_half, args=(half,)) for half in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(70)
        assert outcomes == [MoveOutcome.COMPLETE] * 2
        for half in halves:
            assert np.array_equal(there[half[::-1]], rows[half])


def test_a_move_that_is_cut_off_has_ended_and_the_next_one_works() -> None:
    there = pages(64, PAGE)
    with LoopbackMover(there) as mover:
        rows = filled(mover, 64, 4)
        pieces = [[rows.ctypes.data + i * rows.strides[0], there.ctypes.data + i * there.strides[0], PAGE] for i in range(64)]
        number = mover._core.copy(mover._regions[0], mover._pages_region, np.array(pieces, np.uint64), 20.0)
        assert mover._core.settle(0.0)  # no time: both queue pairs are reset
        now = there.copy()
        try:
            whole = mover._core.wait(number, 0.0)  # a quick device was done before it could be cut off
        except Unreachable as error:
            whole = False
            assert error.code == "E148"
        assert np.array_equal(there, rows) if whole else np.array_equal(there, now)
        with mover.move(rows, range(64), [slice(0, PAGE)], deadline_seconds=60) as move:
            list(move)
        assert move.outcome is MoveOutcome.COMPLETE and np.array_equal(there, rows)


def test_a_piece_that_the_device_does_not_send_is_told_in_a_line() -> None:
    """A copy of its longest message and a byte: soft-RoCE's are of 8 MiB."""
    memory = np.zeros((8 << 20) + 1, np.uint8)
    core = Loopback("auto")
    one = core.add(int(memory.ctypes.data), memory.nbytes, True)
    piece = np.array([[memory.ctypes.data, memory.ctypes.data, memory.nbytes]], np.uint64)
    with pytest.raises(Unreachable, match=r"E148.*in one piece"):
        core.copy(one, one, piece, 1.0)
    core.remove(one)


def test_memory_that_was_not_registered_is_neither_read_nor_written() -> None:
    there = pages(4)
    with LoopbackMover(there) as mover:
        with pytest.raises(LayoutError, match="E517"):
            mover.move(np.zeros((2, WIDTH), np.uint8), [0, 1], LAYERS)
        rows = filled(mover, 4, 5)
        outside = np.array([[rows.ctypes.data, there.ctypes.data + 4 * there.strides[0], 8]], np.uint64)
        with pytest.raises(IndexError):
            mover._core.copy(mover._regions[0], mover._pages_region, outside, 1.0)
        fixed = np.frombuffer(bytes(8192), np.uint8)[:8136].reshape(8, WIDTH)  # read-only: registered for reading alone
        mover.adopt(fixed)
        with mover.move(fixed[:4], range(4), LAYERS, deadline_seconds=30) as move:
            list(move)
        assert move.outcome is MoveOutcome.COMPLETE and not there.any()


def test_what_is_no_dma_buf_or_no_device_is_refused_in_a_line() -> None:
    core = Loopback("auto")
    read, write = os.pipe()
    with pytest.raises(Unreachable, match=r"E148.*dma-buf"):
        core.add_dma_buf(read, 0, 4096, 0)
    os.close(read)
    os.close(write)
    with pytest.raises(ConfigError, match="E146"):
        Loopback("mlx5_77")


def test_doctor_sees_the_devices_and_has_them_write() -> None:
    findings = rdma.rdma()
    assert [(finding.check, finding.word) for finding in findings] == [("rdma", Word.OK), ("verbs", Word.OK)] * len(devices.rdma_devices())
    if devices.rdma_devices()[0].name == "rxe0":
        assert "rxe0 (soft): port 1 active, Ethernet" in findings[0].found and "10.77.0.1" in findings[0].found
    missing = rdma.writes_to_itself("mlx5_77")
    assert missing.word is Word.BAD and "no such device" in missing.found


def test_planes_come_from_nodes_into_pages_by_the_nic_alone(tmp_path: Path) -> None:
    """Read by RDMA into rows, moved on by RDMA into pages; also past a load that falls short."""
    with cluster(tmp_path) as (_, map_, _), Client(map_, layout=V41, config=NO_REUSE) as client:
        keys = chain(BLOCKS, V41)
        data = store(client, keys)
        until_whole(client, keys)
        there, table = pages(60, V41.block_bytes), np.random.default_rng(7).permutation(60)[:BLOCKS]
        with LoopbackMover(there) as mover:
            rows = mover.host_rows(BLOCKS)
            for blocks in (range(BLOCKS), range(10, 15)):
                there[:] = 0xAB
                with stream_planes(client, client.lookup(keys), mover, table, rows, blocks=blocks, deadline_seconds=WAIT_SECONDS) as stream:
                    for moved in stream:
                        assert moved.blocks == len(blocks) and moved.event.wait(WAIT_SECONDS)
                        right = data[blocks.start : blocks.stop, : moved.columns.stop]
                        assert np.array_equal(there[table[: len(blocks)]][:, : moved.columns.stop], right)
                assert (stream.outcome, stream.blocks) == (LoadOutcome.COMPLETE, len(blocks))
                assert (there[np.setdiff1d(np.arange(60), table[: len(blocks)])] == 0xAB).all()
            ticket = client.lookup(keys)
            with stream_planes(client, ticket, mover, table, rows, deadline_seconds=WAIT_SECONDS) as stream:
                stream.cancel()
                assert list(stream) == []
            assert (stream.outcome, stream.blocks, stream.lost) == (LoadOutcome.CANCELLED, 0, False)
        assert client.stats()["read_bytes_tcp"] == 0


@pytest.mark.long  # torch takes a minute to be imported there
def test_the_bundled_engine_fills_its_pages_by_the_nic(tmp_path: Path) -> None:
    import torch

    from kvstore.engine_integration.engine import Engine, EngineConfig, RequestOptions
    from kvstore.engine_integration.model import TINY
    from kvstore.engine_integration.model.model import Model

    torch.set_num_threads(1)
    assert pick("loopback") == Picked("loopback", "as it was set") and pick("auto").why.startswith("measured cpu ")
    model, prompt = Model.random(TINY), [11 * at % 251 for at in range(120)]
    config = replace(NO_REUSE, block_tokens=TINY.block)
    with cluster(tmp_path) as (_, map_, _), Client(map_, layout=model.layout, config=config) as client:
        answers = []
        with Engine(model, client, EngineConfig(mover="loopback", lookup_deadline_seconds=60.0, load_deadline_seconds=200.0)) as engine:
            for _ in range(2):
                answers.append(engine.submit(prompt, options=RequestOptions(max_tokens=3)).result(WAIT_SECONDS))
                assert client.flush(WAIT_SECONDS)
            assert engine.landing.mover.name == "loopback" and engine.landing.faults == 0
        cold, warm = answers
        assert (cold.cached_tokens, warm.window) == (0, "hit") and warm.cached_tokens >= 64 and warm.tokens == cold.tokens
        assert client.stats()["read_bytes_tcp"] == 0


def test_nothing_is_left_registered_or_open() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    LoopbackMover(pages(4)).close()
    gc.collect()  # what earlier tests left goes before it is counted
    before = count()
    for _ in range(20):
        mover = LoopbackMover(pages(4))
        mover.host_rows(2)
        core = mover._core
        mover.close()
        assert core.registered_bytes == 0
        del mover, core
    assert count() <= before
