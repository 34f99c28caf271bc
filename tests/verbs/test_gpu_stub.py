"""Path B and the mover `loopback` as with a GPU, its memory host RAM and its driver a stub (tests/native/libcuda_stub.cpp): when which
flush is done, and which streams are waited for. Soft-RoCE takes no dma-buf, so memory is registered by its address.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from client_tools import SMALL, Blocks, ticket_of_all
from cuda_stub import Driver, FakeCuda, HostTensor, Stream, host_as_gpu
from faultpeer import PeerCluster
from verbs.nodes import CLIENT_DEVICE
from verbs.test_direct import WAIT_SECONDS, assert_bodies, peers, zone_of
from verbs.test_loopback import LAYERS, filled, pages

from kvstore.client import Client, LoadOutcome
from kvstore.client.direct import DirectMemory
from kvstore.client.movers.interface import MoveOutcome
from kvstore.client.movers.loopback import LoopbackMover
from kvstore.errors import Closed, MisuseError, Unreachable
from kvstore.keys import Keys
from kvstore.wire import Verb

__all__ = ["peers"]
STUB = os.environ.get("KVSTORE_CUDA_STUB", "")  # built by the host's test
NEVER = float("inf")
FLUSH = "cuFlushGPUDirectRDMAWrites(0, 100) in 1"
pytestmark = pytest.mark.skipif(not STUB, reason="tests/test_verbs_guest.py builds it")
Peers = tuple[PeerCluster, Client, Keys, Blocks]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[Driver, FakeCuda]:
    """Two, of the kind that orders writes by itself."""
    return host_as_gpu(monkeypatch, Path(STUB), ordering=100)


def gpu_zone() -> HostTensor:
    return HostTensor(zone_of(20, SMALL))


def test_what_nodes_wrote_is_read_back_and_flushed_always(peers: Peers, gpu: tuple[Driver, FakeCuda]) -> None:
    _, client, keys, data = peers
    driver, fake = gpu
    with DirectMemory(gpu_zone(), CLIENT_DEVICE) as memory:  # type: ignore[arg-type]  # stands for a tensor
        assert memory.registration == "nvidia-peermem" and fake.synchronized == ["cuda:1"]
        assert memory._core.queue_pairs == 2  # what reads back; nobody else may write through it
        assert driver.flushes() == [FLUSH]  # tried at the start
        with memory.read(client, ticket_of_all(client, keys), deadline_seconds=WAIT_SECONDS) as arrived:
            assert arrived.outcome is LoadOutcome.COMPLETE and memory._core.queue_pairs == 2
            assert driver.flushes() == [FLUSH]
            assert_bodies(arrived, data)
        driver.fail("cuFlushGPUDirectRDMAWrites", 999)
        with pytest.raises(Unreachable, match=r"E221.*cuFlush"):
            memory.read(client, ticket_of_all(client, keys), deadline_seconds=WAIT_SECONDS)
        driver.library.stub_reset()
        with memory.read(client, ticket_of_all(client, keys), deadline_seconds=WAIT_SECONDS):
            pass  # the failed one has let go of the zone
    assert driver.retained == 0 and driver.current == -1


def test_no_node_is_asked_while_the_gpu_may_still_use_the_zone(peers: Peers, gpu: tuple[Driver, FakeCuda]) -> None:
    made, client, keys, data = peers
    _, fake = gpu

    def asked() -> int:
        return sum(peer.asked[Verb.VERBS_OPEN] for peer in made.peers)

    with DirectMemory(gpu_zone(), CLIENT_DEVICE) as memory:  # type: ignore[arg-type]  # stands for a tensor
        before, fake.stream = asked(), Stream(NEVER)
        ticket = ticket_of_all(client, keys)
        with pytest.raises(Closed), memory.read(client, ticket, deadline_seconds=0.5) as arrived:
            assert arrived.outcome is LoadOutcome.TIMEOUT and asked() == before
            assert not any(shards for planes in arrived.shards for shards in planes)
            fake.stream.looks = 0
            arrived.close()
            arrived.close()
            with arrived.using():
                raise AssertionError("a scatter out of a zone that may belong to the next read")
        fake.stream = Stream(5)
        with memory.read(client, ticket, deadline_seconds=WAIT_SECONDS) as arrived:
            assert fake.stream.looks < 0 and arrived.outcome is LoadOutcome.COMPLETE
            assert_bodies(arrived, data)


def test_a_closed_read_has_waited_for_every_stream_that_used_it(peers: Peers, gpu: tuple[Driver, FakeCuda]) -> None:
    """It waited for the closing thread's stream alone."""
    _, client, keys, _ = peers
    _, fake = gpu
    with DirectMemory(gpu_zone(), CLIENT_DEVICE) as memory:  # type: ignore[arg-type]  # stands for a tensor
        arrived = memory.read(client, ticket_of_all(client, keys), deadline_seconds=WAIT_SECONDS)
        mine, sides = fake.stream, [Stream(7), Stream(3)]
        for fake.stream in sides:
            with arrived.using():
                pass
        with pytest.raises(ValueError, match="of the caller"), arrived.using():
            raise ValueError("of the caller: some of it may have been launched")
        fake.stream = mine
        with pytest.raises(MisuseError, match="E518"):
            memory.read(client, ticket_of_all(client, keys))
        arrived.close()
        assert all(stream.looks < 0 for stream in sides)
        assert memory._users == []


@pytest.mark.parametrize(("ordering", "flushed"), [(0, 4), (100, 0)])
def test_layers_of_a_move_into_a_gpu_are_flushed_where_it_wants_that(monkeypatch: pytest.MonkeyPatch, ordering: int, flushed: int) -> None:
    driver, fake = host_as_gpu(monkeypatch, Path(STUB), ordering=ordering)
    there = pages(50)
    with LoopbackMover(HostTensor(there), CLIENT_DEVICE) as mover:  # type: ignore[arg-type]  # stands for a tensor
        assert mover.registration == "nvidia-peermem"
        rows, table = filled(mover, 20, 1), np.random.default_rng(2).permutation(50)[:20]
        fake.stream = Stream(5)
        with mover.move(rows, table, LAYERS, deadline_seconds=WAIT_SECONDS) as move:
            for number, moved in enumerate(move, 1):
                assert fake.stream.looks < 0 and driver.flushes() == []
                assert moved.event.wait(WAIT_SECONDS) and moved.event.done()
                assert driver.flushes() == [FLUSH] * (flushed * number // 4 - flushed * (number - 1) // 4)
                assert np.array_equal(there[table][:, : moved.columns.stop], rows[:, : moved.columns.stop])
        assert move.outcome is MoveOutcome.COMPLETE
        back = mover.host_rows(20)
        with mover.move(back, table, LAYERS, to_device=False, deadline_seconds=WAIT_SECONDS) as move:
            list(move)
        assert np.array_equal(back, rows) and driver.flushes() == []  # nothing was written into the GPU
        fake.stream = Stream(NEVER)
        with mover.move(rows, table, LAYERS, deadline_seconds=0.2) as move:
            assert list(move) == []
        assert move.outcome is MoveOutcome.TIMEOUT
