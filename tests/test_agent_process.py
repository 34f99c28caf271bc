"""`kvstore agent` with real workers: bytes through shared memory, who may have how much, and what is left when either end is killed."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from agent_tools import AgentUnderTest, agent_of, worker_of
from cli_tool import Cli
from client_tools import SMALL, V41, Blocks, bytes_of, chain, cluster_of, until
from leaks import at_rest, until_no_more
from mover_tools import Given

from kvstore.client import Client, LoadOutcome, StoreOutcome
from kvstore.client.agent.attachment import control
from kvstore.client.agent.directory import DirectoryClient
from kvstore.client.agent.handoff import HandoffOutcome
from kvstore.client.agent.link import HEADER, MAGIC, VERSION, Kind
from kvstore.client.agent.process import AgentProcess
from kvstore.client.agent.process_config import ProcessConfig
from kvstore.client.agent.teller import presence_key
from kvstore.client.agent.worker import WorkerAgent
from kvstore.client.streaming import stream_planes
from kvstore.errors import ConfigError, LayoutError, MisuseError, ProtocolError, Unreachable
from kvstore.kernels import _native
from kvstore.keys import Keys
from kvstore.server.local import LocalCluster

MIB = 1 << 20
BLOCKS = 48  # of the prompts here: 5.5 MB


@dataclass
class Site:
    cluster: LocalCluster
    agent: AgentUnderTest
    directory: Path
    prompts: dict[int, Blocks]  # by seed of their chain: stored, 48 blocks each

    @property
    def path(self) -> Path:
        return self.agent.socket

    def stopped(self) -> Stopped:
        return Stopped(self.cluster)


class Stopped:
    """Two of three nodes stand still: a load gets a part of its bytes and waits for the rest."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster

    def __enter__(self) -> None:
        for node in (0, 1):
            self.cluster.kill(node, signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        for node in (0, 1):
            self.cluster.kill(node, signal.SIGCONT)


LIMITS = ("--memory", "16MiB", "--quota", "8MiB", "--worker-memory", "8MiB", "--ram", "0B", "--workers", "4", "--windows", "8MiB")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    with cluster_of(directory / "cluster", 3, k=2, m=1) as cluster:
        prompts = {}
        with Client(cluster.map, layout=V41) as client:
            for seed in (1001, 1002):
                keys = chain(BLOCKS, V41, seed)
                prompts[seed] = bytes_of(keys, V41)
                assert client.store(keys, prompts[seed], first_block=0).result(20).blocks == BLOCKS
        with agent_of(cluster.map_path, directory / "agent.sock", *LIMITS) as agent:
            yield Site(cluster, agent, directory, prompts)


def prompt(seed: int) -> Keys:
    return chain(BLOCKS, V41, seed)


# --- bytes ---


def test_a_staged_load_shows_each_plane_when_it_is_whole_and_copies_nothing(site: Site) -> None:
    with WorkerAgent(site.path, layout=V41, name="one") as agent:
        ticket = agent.lookup(prompt(1001))
        assert ticket.hit_blocks == BLOCKS
        with agent.stage(ticket) as staged:
            seen = []
            for ready in staged.planes():
                columns = staged.columns(ready.plane)
                assert np.array_equal(staged.rows[: ready.blocks, columns], site.prompts[1001][: ready.blocks, columns])
                seen.append((ready.plane, ready.blocks))
            result = staged.finish()
            assert seen == [(plane, BLOCKS) for plane in range(len(V41.planes(2)))]
            assert result.outcome is LoadOutcome.COMPLETE and result.blocks == BLOCKS and staged.finish() is result
            with pytest.raises(ValueError, match="read-only"):
                staged.rows[0, 0] = 1
            with pytest.raises(ValueError):
                staged.rows.flags.writeable = True
            assert site.agent.status()["pinned_bytes"] == 5_468_160 + (-5_468_160 % 4096)
        site.agent.until_free()


def test_a_mover_takes_planes_from_the_agents_memory_without_a_copy(site: Site) -> None:
    with (
        WorkerAgent(site.path, layout=V41) as agent,
        WorkerAgent(site.path, layout=V41) as other,
        Given(np.full((60, V41.block_bytes), 0xAB, np.uint8)) as mover,
    ):
        assert agent.memory is not None and len(agent.memory) == 16 * MIB and not agent.memory.flags.writeable
        ticket, table = agent.lookup(prompt(1001)), np.random.default_rng(6).permutation(60)[:BLOCKS]
        with pytest.raises(LayoutError, match="E517"):  # not adopted yet
            stream_planes(agent, ticket, mover, table)
        site.agent.until_free()  # what was staged for it
        mover.adopt(agent.memory)
        with stream_planes(agent, ticket, mover, table) as stream:
            taken = [(moved.plane, moved.blocks) for moved in stream]
            assert site.agent.status()["pinned_bytes"] > 0
        assert taken == [(plane, BLOCKS) for plane in range(len(V41.planes(2)))]
        assert (stream.outcome, stream.blocks) == (LoadOutcome.COMPLETE, BLOCKS)
        assert np.array_equal(mover.pages[table], site.prompts[1001])
        site.agent.until_free()
        mover.pages[:] = 0xAB
        with agent.stage(ticket, blocks=range(30)), stream_planes(agent, ticket, mover, table) as stream:  # what is left of its quota
            list(stream)
        part = stream.blocks
        assert stream.outcome is LoadOutcome.BUSY and 0 < part < BLOCKS
        assert np.array_equal(mover.pages[table[:part]], site.prompts[1001][:part]) and (mover.pages[table[part:]] == 0xAB).all()
        rows = mover.host_rows(BLOCKS)
        with stream_planes(other, other.lookup(prompt(1002)), mover, table, rows) as stream:  # or into memory of its own
            list(stream)
        assert stream.blocks == BLOCKS and np.array_equal(mover.pages[table], site.prompts[1002])
        site.agent.until_free()
        ticket = agent.lookup(prompt(1002))
        with site.stopped(), stream_planes(agent, ticket, mover, table, deadline_seconds=0.5) as stream:
            assert list(stream) == []
        assert (stream.outcome, stream.blocks) == (LoadOutcome.TIMEOUT, 0)
        site.agent.until_free()


def test_without_an_agent_nothing_is_moved(tmp_path: Path) -> None:
    with WorkerAgent(tmp_path / "nobody", layout=V41, wait_seconds=0.0) as agent, Given(np.zeros((2, V41.block_bytes), np.uint8)) as mover:
        assert agent.memory is None
        ticket = agent.lookup(prompt(1001))
        for rows in (None, mover.host_rows(1)):
            with stream_planes(agent, ticket, mover, [], rows) as stream:
                assert list(stream) == []
            assert (stream.outcome, stream.blocks) == (LoadOutcome.COMPLETE, 0)


def test_loads_into_memory_of_the_callers_own_equal_what_was_stored(site: Site) -> None:
    with WorkerAgent(site.path, layout=V41) as agent:
        for seed, data in site.prompts.items():
            ticket = agent.lookup(prompt(seed))
            place = np.full((BLOCKS, V41.block_bytes + 7), 0xEE, np.uint8)[:, : V41.block_bytes]
            assert agent.load(ticket, place).outcome is LoadOutcome.COMPLETE
            assert np.array_equal(place, data)
            place[:] = 0
            assert [ready.blocks for ready in agent.planes(ticket, place, blocks=range(5, 30))] == [25] * len(V41.planes(2))
            assert np.array_equal(place[:25], data[5:30]) and not place[25:].any()
        site.agent.until_free()


def test_a_prompt_larger_than_the_quota_is_loaded_in_parts_and_staged_as_far_as_it_fits(site: Site) -> None:
    keys = chain(100, V41, 1003)  # 11.4 MB against 8 MiB
    data = bytes_of(keys, V41)
    with WorkerAgent(site.path, layout=V41) as agent:
        for first, end in ((0, 50), (50, 100)):
            assert agent.store(keys, data[first:end], first_block=first).result(20).outcome is StoreOutcome.STORED
        ticket = agent.lookup(keys)
        place = np.empty_like(data)
        assert agent.load(ticket, place).blocks == 100 and np.array_equal(place, data)
        with agent.stage(ticket) as staged:
            result = staged.finish()
            fits = 8 * MIB // V41.block_bytes
            assert (result.outcome, result.blocks, len(staged.rows)) == (LoadOutcome.BUSY, fits, fits)
            assert np.array_equal(staged.rows, data[:fits])


def test_stores_from_shared_memory_and_from_elsewhere(site: Site) -> None:
    keys = chain(60, V41)
    data = bytes_of(keys, V41)
    with WorkerAgent(site.path, layout=V41) as agent:
        rows = agent.buffer(30)
        rows[:] = data[:30]
        before = agent.stats()["buffer_bytes"]
        one = agent.store(keys, rows, first_block=0)
        assert agent.stats()["buffer_bytes"] == before, "no copy"
        two = agent.store(keys, data[30:], first_block=30)
        assert agent.stats()["buffer_bytes"] > before, "a copy"
        assert one.result(20).blocks == two.result(20).blocks == 30
        del rows
        until(lambda: agent.stats()["buffer_bytes"] == 0, "both to be free")
        assert agent.flush(5)
        ticket = agent.lookup(keys)
        assert ticket.hit_blocks == 60
        place = np.empty_like(data)
        assert agent.load(ticket, place).blocks == 60 and np.array_equal(place, data)
        big = np.zeros((80, V41.block_bytes), np.uint8)  # more than a worker's memory
        assert agent.store(chain(80, V41), big, first_block=0).result(5).outcome is StoreOutcome.DROPPED
        assert agent.store(keys, data[:0], first_block=60).result(5).blocks == 0


def test_windows_are_kept_by_the_agent_and_seen_by_the_other_worker(site: Site) -> None:
    keys = chain(8, V41)
    entry = os.urandom(1_415_040)
    with WorkerAgent(site.path, layout=V41) as one, WorkerAgent(site.path, layout=V41) as two:
        assert two.window(keys, 512) is None
        assert one.keep_window(keys, 512, entry)
        found = two.window(keys, 512)
        assert found is not None and found.entry == entry and (found.tokens, found.where) == (512, "own")
        part = found.entry[10:20]
        del found
        assert site.agent.status()["pinned_bytes"], "a view of it is left"
        assert part == entry[10:20]
        del part
        site.agent.until_free()
        ticket = two.lookup(keys)
        assert two.window(keys, 512, ticket=ticket) is not None
        one.drop_window(keys, 512)
        assert two.window(keys, 512) is None
        with pytest.raises(MisuseError, match="E572"):
            one.window(keys, 500)


# --- limits ---


def test_a_worker_that_never_releases_is_told_busy_and_the_others_go_on(site: Site) -> None:
    with WorkerAgent(site.path, layout=V41) as greedy, WorkerAgent(site.path, layout=V41) as other:
        ticket = greedy.lookup(prompt(1001))
        held = greedy.stage(ticket)
        assert held.finish().blocks == BLOCKS
        more = greedy.stage(ticket)
        assert more.finish().outcome is LoadOutcome.BUSY and more.finish().blocks < BLOCKS, "the rest of its quota"
        assert greedy.stage(ticket).finish().blocks == 0
        assert other.load(other.lookup(prompt(1002))).blocks == BLOCKS
        assert np.array_equal(held.rows, site.prompts[1001]), "what is pinned stays as it is"
        del held, more
        site.agent.until_free()


def test_no_more_workers_and_no_other_kind_than_the_agent_was_told(site: Site) -> None:
    with WorkerAgent(site.path, layout=V41), pytest.raises(ProtocolError, match="E639"):
        WorkerAgent(site.path, layout=SMALL)
    until(lambda: not site.agent.status()["workers"], "it to be gone")
    with WorkerAgent(site.path, layout=SMALL) as other:
        assert other.lookup(chain(3, SMALL)).hit_blocks == 0, "a kind that nobody uses gives way"
    until(lambda: not site.agent.status()["workers"], "it to be gone")
    attached = [WorkerAgent(site.path, layout=V41) for _ in range(4)]
    try:
        with pytest.raises(Unreachable, match="has its 4 workers"):
            WorkerAgent(site.path, layout=V41)
    finally:
        for worker in attached:
            worker.close()
    until(lambda: not site.agent.status()["workers"], "all to be gone")


def test_misuse_is_told_to_the_caller(site: Site) -> None:
    with WorkerAgent(site.path, layout=V41) as agent:
        with pytest.raises(MisuseError, match="E568"):
            agent.lookup(prompt(1001), retention_class="forever")
        with pytest.raises(LayoutError, match="E524"):
            agent.store(prompt(1001), np.zeros((3, V41.block_bytes), np.uint8), first_block=47)
        with pytest.raises(MisuseError, match="E564"):
            agent.stage(agent.lookup(prompt(1001)), blocks=range(40, 49))
        child = os.fork()
        if child == 0:
            try:
                agent.lookup(prompt(1001))
            except MisuseError as error:
                os._exit(0 if error.code == "E548" else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(MisuseError, match="E573"):
        agent.lookup(prompt(1001))


def test_a_forked_child_lets_go_of_nothing_of_its_parents(site: Site) -> None:
    with WorkerAgent(site.path, layout=V41) as agent:
        staged = agent.stage(agent.lookup(prompt(1001)))
        assert staged.finish().blocks == BLOCKS
        child = os.fork()
        if child == 0:
            staged.release()
            agent.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert site.agent.status()["pinned_bytes"] and agent.attached
        assert agent.lookup(prompt(1001)).hit_blocks == BLOCKS and np.array_equal(staged.rows, site.prompts[1001])
        staged.release()
        site.agent.until_free()


def test_a_worker_may_be_closed_by_who_is_told_of_a_store(site: Site) -> None:
    agent = WorkerAgent(site.path, layout=V41)
    keys = chain(4, V41)
    closed = threading.Event()
    future = agent.store(keys, bytes_of(keys, V41), first_block=0)
    future.add_done_callback(lambda _: (agent.close(), closed.set()))
    assert closed.wait(20)


def test_a_prompt_of_no_whole_block_is_an_empty_ticket(site: Site) -> None:
    with WorkerAgent(site.path, layout=V41) as agent:
        ticket = agent.lookup(prompt(1001)[:0], input_tokens=100)
        assert ticket.hit_blocks == 0 and agent.stage(ticket).finish().outcome is LoadOutcome.COMPLETE
        assert agent.load(ticket).blocks == 0 and list(agent.planes(ticket, None)) == []


# --- a worker is killed ---


def test_a_worker_killed_in_mid_load_leaves_no_pin_and_no_late_write(site: Site) -> None:
    with worker_of(site.path, "stage", 1001, BLOCKS) as worker, worker_of(site.path, "load", 1002, BLOCKS) as other:
        assert worker.line() == other.line() == f"hit {BLOCKS}"
        with site.stopped():
            worker.tell("go")
            assert worker.line() == f"staged {BLOCKS}"
            (busy,) = [w for w in site.agent.status()["workers"] if w["name"] == "stage"]
            assert busy["loads"] == 1 and busy["pinned_bytes"]
            worker.kill()
            assert site.agent.until_free() < 3
        # What the nodes still send of the dead load must not land where the next one is.
        other.tell("go")
        for _ in range(5):
            assert other.line() == f"complete {BLOCKS}"
            other.tell("again")
        assert other.line() == f"complete {BLOCKS}"


def test_a_worker_killed_in_mid_store_leaves_the_others_alone(site: Site) -> None:
    """Its store goes on to its end, if the agent had begun it: one that was still in the socket is lost."""
    with WorkerAgent(site.path, layout=V41) as agent:

        def goes_on(seed: int) -> bool:
            with worker_of(site.path, "store", seed, BLOCKS) as worker:
                worker.line()
                worker.tell("go")
                assert worker.line() == "asked"
                worker.kill()
                until(lambda: len(site.agent.status()["workers"]) == 1, "the dead worker to be forgotten", 3)
            end = time.monotonic() + 3
            while agent.lookup(prompt(seed)).hit_blocks < BLOCKS:
                if time.monotonic() > end:
                    return False
            place = np.empty((BLOCKS, V41.block_bytes), np.uint8)
            assert agent.load(agent.lookup(prompt(seed)), place).blocks == BLOCKS
            assert np.array_equal(place, bytes_of(prompt(seed), V41))
            return True

        assert any(goes_on(seed) for seed in range(2000, 2005))


def test_a_worker_whose_child_holds_the_socket_is_still_seen_to_die(site: Site) -> None:
    with worker_of(site.path, "stage", 1001, BLOCKS) as worker:
        worker.line()
        worker.tell("go")
        worker.line()
        (fd,) = [entry for entry in Path(f"/proc/{worker.pid}/fd").iterdir() if str(entry.readlink()).startswith("socket:")]
        held = _copy_of_descriptor(worker.pid, int(fd.name))
        try:
            worker.kill()
            assert site.agent.until_free() < 3
        finally:
            os.close(held)


def _copy_of_descriptor(pid: int, fd: int) -> int:
    """As a forked child would have it: pidfd_getfd."""
    import ctypes

    handle = os.pidfd_open(pid)
    try:
        held = ctypes.CDLL(None, use_errno=True).syscall(438, handle, fd, 0)
        assert held >= 0, os.strerror(ctypes.get_errno())
        return int(held)
    finally:
        os.close(handle)


def test_a_load_can_be_cancelled_and_released_in_mid_way(site: Site) -> None:
    with WorkerAgent(site.path, layout=V41) as agent:
        ticket = agent.lookup(prompt(1001))
        with site.stopped():
            staged = agent.stage(ticket)
            staged.cancel()
            began = time.monotonic()
            assert staged.finish().outcome is LoadOutcome.CANCELLED and time.monotonic() - began < 2
            assert site.agent.status()["pinned_bytes"] >= staged.rows.nbytes, "a plane may have been told of: ours until released"
            staged.release()
            with agent.stage(ticket):
                pass  # let go of while it runs
            site.agent.until_free()
            assert agent.stage(ticket, deadline_seconds=0.2).finish().outcome is LoadOutcome.TIMEOUT


# --- the agent is killed ---


def test_rows_that_are_seen_stay_their_workers_where_the_agent_is_late(site: Site) -> None:
    with WorkerAgent(site.path, layout=V41) as agent:
        ticket = agent.lookup(prompt(1001))
        with site.stopped():
            staged = agent.stage(ticket, deadline_seconds=20)
            staged._end = time.monotonic()  # what it would be if the agent, too, stood still
            assert not list(staged.planes()) and staged.finish().outcome is LoadOutcome.UNREACHABLE
            until(lambda: not any(worker["loads"] for worker in site.agent.status()["workers"]), "the load to be cancelled")
        rows = staged.rows
        assert len(rows) == BLOCKS and site.agent.status()["pinned_bytes"] >= rows.nbytes
        staged.release()
        site.agent.until_free()


def test_an_agent_killed_in_mid_load_is_a_miss_at_once_and_is_found_again(
    site: Site, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.WARNING, "kvstore")
    path = tmp_path / "a.sock"
    first = AgentUnderTest(site.cluster.map_path, path, *LIMITS)
    with WorkerAgent(path, layout=V41) as agent:
        ticket = agent.lookup(prompt(1001))
        kept = agent.stage(ticket)
        assert kept.finish().blocks == BLOCKS
        with site.stopped():
            staged = agent.stage(agent.lookup(prompt(1001)))  # promised a moment ago: no node is asked
            store = agent.store(prompt(1002), site.prompts[1002], first_block=0)
            first.kill()
            began = time.monotonic()
            assert len(list(staged.planes())) < len(V41.planes(2))
            assert staged.finish().outcome in (LoadOutcome.UNREACHABLE, LoadOutcome.BUSY)
            assert store.result(5).outcome in (StoreOutcome.FAILED, StoreOutcome.DROPPED)
            assert agent.lookup(prompt(1001)).hit_blocks == 0 and agent.window(prompt(1001), 512) is None
            assert not agent.keep_window(prompt(1001), 512, b"entry")
            assert time.monotonic() - began < 1
        first.close()
        assert np.array_equal(kept.rows, site.prompts[1001]), "what was seen stays mapped"
        assert agent.load(ticket).outcome is LoadOutcome.UNREACHABLE
        with agent_of(site.cluster.map_path, path, *LIMITS) as second:
            assert agent.wait_attached(10) and agent.stats()["attachments"] == 2
            assert agent.load(ticket).outcome is LoadOutcome.EXPIRED, "a ticket under the dead agent's key"
            place = np.empty((BLOCKS, V41.block_bytes), np.uint8)
            assert agent.load(agent.lookup(prompt(1001)), place).blocks == BLOCKS
            assert np.array_equal(place, site.prompts[1001])
            del kept
            second.until_free()
            texts = [record.getMessage().split(" (")[0].removeprefix(f"agent at {path} ") for record in caplog.records]
            assert texts == ["is not there", "is back"], "one line each"


def test_an_agent_that_hangs_costs_the_deadline_and_no_more(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with agent_of(site.cluster.map_path, path, *LIMITS) as hung, WorkerAgent(path, layout=V41) as agent:
        ticket = agent.lookup(prompt(1001))
        assert agent.keep_window(prompt(1001), 512, bytes(1_415_040))
        hung.kill(signal.SIGSTOP)
        began = time.monotonic()
        assert agent.lookup(prompt(1001), deadline_seconds=0.1).hit_blocks == 0
        assert agent.stage(ticket, deadline_seconds=0.1).finish().outcome is LoadOutcome.UNREACHABLE
        assert agent.window(prompt(1001), 512, deadline_seconds=0.1) is None
        assert time.monotonic() - began < 3
        hung.kill(signal.SIGCONT)
        until(lambda: agent.lookup(prompt(1001)).hit_blocks == BLOCKS, "it to go on")
        hung.until_free()  # what it staged for nobody was let go of


def test_a_worker_may_start_before_its_agent(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with WorkerAgent(path, layout=V41, wait_seconds=0.05) as agent:
        assert not agent.attached and agent.lookup(prompt(1001)).hit_blocks == 0
        assert agent.buffer(2).shape == (2, V41.block_bytes)
        with agent_of(site.cluster.map_path, path, *LIMITS):
            assert agent.wait_attached(10)
            assert agent.lookup(prompt(1001)).hit_blocks == BLOCKS


# --- leaks, and hostile peers ---


def test_descriptors_threads_and_memory_are_flat_over_many_workers(site: Site) -> None:
    def cycle() -> None:
        with WorkerAgent(site.path, layout=V41) as agent:
            ticket = agent.lookup(prompt(1001))
            staged = agent.stage(ticket)  # never released
            next(staged.planes())
        del staged

    own = at_rest()
    for _ in range(4):
        cycle()
    until(lambda: not site.agent.status()["workers"], "all to be gone")
    before = at_rest(site.agent.resources)
    for _ in range(16):
        cycle()
    until(lambda: not site.agent.status()["workers"], "all to be gone")
    site.agent.until_free()
    until_no_more(before, site.agent.resources, spare=4)  # its pools and gRPC start threads as they first need them
    until_no_more(own)
    assert not [thread for thread in threading.enumerate() if thread.name in ("kvstore-worker", "kvstore-told")]


def hello_body() -> bytes:
    from kvstore.client.agent.bodies import Hello

    return Hello(V41).encode()


@pytest.mark.parametrize("seed", range(6))
def test_random_and_broken_messages_cost_their_sender_its_connection_only(site: Site, seed: int) -> None:
    """Not covered: DRAIN, which ends the agent; descriptors beside the bytes; a worker's memory changed while it is read."""
    dice = random.Random(seed)
    with WorkerAgent(site.path, layout=V41) as first:  # what it connects and starts for the first of all workers it keeps
        assert first.lookup(prompt(1001)).hit_blocks == BLOCKS
    before = at_rest(site.agent.resources)
    with WorkerAgent(site.path, layout=V41) as good:
        for _ in range(12):
            with socket.socket(socket.AF_UNIX) as bad:
                bad.connect(str(site.path))
                bad.settimeout(5)
                try:
                    if dice.random() < 0.7:
                        bad.sendall(HEADER.pack(MAGIC, VERSION, Kind.HELLO, len(hello_body()), 0) + hello_body())
                        bad.recv(1024)
                    for _ in range(dice.randint(1, 6)):
                        body = dice.randbytes(dice.choice((0, 1, 9, 40, 200, 3000)))
                        kind = dice.choice((*(k for k in Kind if k != Kind.DRAIN), dice.randrange(34, 256)))
                        length = dice.choice((len(body), len(body), len(body), len(body) + 1, 1 << 31))
                        magic = dice.choice((MAGIC,) * 8 + (0x1234,))
                        bad.sendall(HEADER.pack(magic, dice.choice((VERSION,) * 9 + (9,)), kind, length, dice.getrandbits(64)) + body)
                except OSError:
                    pass  # it has had enough of us
        assert good.lookup(prompt(1001)).hit_blocks == BLOCKS
    until(lambda: not site.agent.status()["workers"], "all to be gone")
    until_no_more(before, site.agent.resources, spare=4)
    site.agent.until_free()


def test_requests_that_lie_about_memory_are_refused(site: Site) -> None:
    from kvstore.client.agent import bodies
    from kvstore.client.agent.attachment import attach
    from kvstore.client.values import Fidelity

    attachment = attach(str(site.path), bodies.Hello(V41))
    thread = threading.Thread(target=attachment.serve)
    thread.start()
    try:
        keys = prompt(1001)
        for offset in (8 * MIB, (1 << 64) - 1, 8 * MIB - 4096):
            asked = bodies.StoreAsked(keys, offset, 0, BLOCKS, Fidelity.EXACT, "chat")
            with pytest.raises(LayoutError, match="E547"):
                attachment.ask(Kind.STORE, asked.encode()).next(time.monotonic() + 5)
            with pytest.raises(LayoutError, match="E547"):
                attachment.ask(Kind.KEEP, bodies.KeepAsked(keys, offset, 4097).encode()).next(time.monotonic() + 5)
        with pytest.raises(ProtocolError, match="E611"):
            load = bodies.LoadAsked(b"KVT2" + bytes(200), 0, 4, False, True, None, "chat")
            attachment.ask(Kind.LOAD, load.encode()).next(time.monotonic() + 5)
        site.agent.until_free()
    finally:
        attachment.close()
        thread.join()


def test_what_is_released_while_it_is_filled_is_nobody_elses_until_then(site: Site, tmp_path: Path) -> None:
    """A worker lets go of a window before the agent has copied it: else the copy would go on into what another was given meanwhile."""
    process = AgentProcess(ProcessConfig(map_path=site.cluster.map_path, socket_path=tmp_path / "own.sock", memory_bytes=MIB))
    process.start()
    taken: list[int | None] = []

    class Memory(np.ndarray):  # type: ignore[type-arg]  # only its name is needed
        def __setitem__(self, where: object, value: object) -> None:
            (session,) = process.sessions
            (number,) = session._pins
            session._release(number)
            taken.append(process.arena.take(MIB))  # there is room for this only once the pin is gone
            super().__setitem__(where, value)

    try:
        with WorkerAgent(tmp_path / "own.sock", layout=SMALL, slots=1) as worker:
            keys = chain(1, SMALL, 9)
            assert worker.keep_window(keys, 128, bytes(5000))
            process.memory = process.memory.view(Memory)
            worker.window(keys, 128)
            assert taken == [None]
            until(lambda: not process.arena.taken_bytes, "the pin to go once it is filled")
    finally:
        process.close()


def test_a_drain_that_cannot_be_meant_is_refused(site: Site) -> None:
    for body in (b'{"seconds": 1%s}' % (b"0" * 400), b"[" * 100_000, b'{"seconds": [1]}', b'{"to": "nowhere"}', b"\xff", b"3"):
        with pytest.raises((ProtocolError, MisuseError)):
            control(str(site.path), Kind.DRAIN, body, 10)
    assert site.agent.status()["state"] == "ready"
    assert "Traceback" not in site.agent.log.read_text()


def test_of_two_agents_that_start_at_once_on_one_socket_one_is_refused(site: Site, tmp_path: Path) -> None:
    first, second = (
        AgentProcess(ProcessConfig(map_path=site.cluster.map_path, socket_path=tmp_path / "one.sock", memory_bytes=MIB)) for _ in range(2)
    )
    listen, refused = first._listen, []

    def late() -> None:  # the other comes when the first has looked and is not there yet
        with pytest.raises(ConfigError, match="E188") as told:
            second.start()
        refused.append(told.value)
        listen()

    first._listen = late  # type: ignore[method-assign]  # see above
    try:
        first.start()
        assert refused and control(str(tmp_path / "one.sock"), Kind.STATUS, b"", 10)
    finally:
        first.close()


def test_a_peer_that_says_nothing_or_takes_nothing_is_cut(site: Site) -> None:
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as deaf:
        silent.connect(str(site.path))
        deaf.connect(str(site.path))
        deaf.settimeout(10)
        deaf.sendall(HEADER.pack(MAGIC, VERSION, Kind.HELLO, len(hello_body()), 0) + hello_body())
        until(lambda: len(site.agent.status()["workers"]) == 1, "it to be attached")
        from kvstore.client import Accept
        from kvstore.client.agent.bodies import LookupAsked

        lookup = LookupAsked(prompt(1001), Accept.EXACT, "chat", None, None).encode()
        try:
            for number in range(1, 400):  # answers of 2 kB each, which it never takes
                deaf.sendall(HEADER.pack(MAGIC, VERSION, Kind.LOOKUP, len(lookup), number) + lookup)
        except OSError:
            pass
        until(lambda: not site.agent.status()["workers"], "it to be cut", 15)
        silent.settimeout(15)
        head = silent.recv(HEADER.size)
        assert head == b"" or struct.unpack_from("<HBB", head)[2] == Kind.REFUSED


def test_another_version_is_refused_by_name(site: Site) -> None:
    with socket.socket(socket.AF_UNIX) as old:
        old.connect(str(site.path))
        old.settimeout(5)
        old.sendall(HEADER.pack(MAGIC, VERSION + 1, Kind.HELLO, 0, 0))
        assert HEADER.unpack(old.recv(HEADER.size))[2] == Kind.REFUSED
        assert b"version" in old.recv(4096)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_even_where_the_file_lets_it(site: Site) -> None:
    assert site.path.stat().st_mode & 0o777 == 0o600
    child = os.fork()
    if child == 0:
        try:
            fd = os.open(site.path.parent, os.O_PATH)
            os.setuid(65534)
            try:
                with socket.socket(socket.AF_UNIX) as stranger:
                    stranger.connect(f"/proc/self/fd/{fd}/{site.path.name}")
                os._exit(1)
            except PermissionError:
                os._exit(0)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


# --- faces and end ---


def test_status_and_metrics_tell_pins_and_workers(site: Site) -> None:
    with WorkerAgent(site.path, layout=V41, name="seen") as agent, agent.stage(agent.lookup(prompt(1001))) as staged:
        staged.finish()
        status = site.agent.status()
        (worker,) = status["workers"]
        assert (worker["name"], worker["pid"], worker["pins"]) == ("seen", os.getpid(), 1)
        assert status["state"] == "ready" and status["counts"]["load_ok"] >= 1
    with urllib.request.urlopen(f"http://{site.agent.ready['http']}/readyz", timeout=5) as answer:
        assert answer.status == 200


def test_a_second_agent_on_the_same_socket_is_refused_and_a_stale_socket_is_not(site: Site, tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    cli.run("agent", "--map", str(site.cluster.map_path), "--socket", str(site.path)).refused(2, "an agent answers there")
    stale = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))
    with agent_of(site.cluster.map_path, stale, *LIMITS) as agent:
        assert agent.status()["state"] == "ready"


def test_an_agent_that_must_read_by_rdma_and_cannot_does_not_start(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_RDMA_DEVICE", "no_such_device")
    path = tmp_path / "rdma.sock"
    config = ProcessConfig(map_path=site.cluster.map_path, socket_path=path, memory_bytes=MIB, transport="rdma")
    with pytest.raises(ConfigError) as refused:
        AgentProcess(config).start()
    assert refused.value.code in ("E145", "E146") and not path.exists()  # no library, or no such device


def test_drain_waits_for_what_runs_refuses_what_is_new_and_exits_0(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with agent_of(site.cluster.map_path, path, *LIMITS) as agent, WorkerAgent(path, layout=V41) as worker:
        ticket = worker.lookup(prompt(1001))
        told: dict[str, object] = {}
        with site.stopped():
            staged = worker.stage(ticket)
            drain = threading.Thread(
                target=lambda: told.update(json.loads(control(str(path), Kind.DRAIN, b'{"seconds": 20}', 30)))
            )  # fmt: skip
            drain.start()
            until(lambda: agent.status()["state"] == "draining", "the drain to begin")
            assert worker.lookup(prompt(1002)).hit_blocks == 0
            assert worker.stage(ticket).finish().outcome is LoadOutcome.BUSY
            with pytest.raises(Unreachable, match="is draining"):
                WorkerAgent(path, layout=V41)
        result = staged.finish()
        assert result.blocks == BLOCKS and np.array_equal(staged.rows, site.prompts[1001])
        drain.join(30)
        assert told["finished"] is True and told["loads_cut"] == 0
        assert agent.end() == 0 and not path.exists()
        until(lambda: not worker.attached, "the worker to see it")
        assert np.array_equal(staged.rows, site.prompts[1001])


def test_sigterm_drains_within_its_bound_and_says_what_was_cut(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with agent_of(site.cluster.map_path, path, *LIMITS, "--within", "300ms") as agent, WorkerAgent(path, layout=V41) as worker:
        until(lambda: worker.lookup(prompt(1001)).hit_blocks == BLOCKS, "no node to be late")
        ticket = worker.lookup(prompt(1001))
        assert ticket.hit_blocks == BLOCKS
        with site.stopped():
            staged = worker.stage(ticket)
            began = time.monotonic()
            agent.kill(signal.SIGTERM)
            assert agent.end() == 1 and time.monotonic() - began < 8
            assert staged.finish().blocks < BLOCKS
        assert "1 loads and 0 stores were cut off" in agent.log.read_text()
    with agent_of(site.cluster.map_path, path, *LIMITS) as agent:
        agent.kill(signal.SIGTERM)
        assert agent.end() == 0


@pytest.fixture
def directory(site: Site) -> Iterator[str]:
    server = _native.DirectoryServer("127.0.0.1", 0, cluster16=site.cluster.map.tag, memory_bytes=16 << 20)
    yield f"127.0.0.1:{server.port}"
    server.stop()


def test_a_drain_gives_the_windows_to_another_agent_and_the_directory_follows(site: Site, tmp_path: Path, directory: str) -> None:
    keys = chain(12, V41)
    entries = {block * 128: os.urandom(1_415_040) for block in (3, 4, 7, 12)}
    one, two = tmp_path / "one.sock", tmp_path / "two.sock"
    asked = np.stack([keys[tokens // 128 - 1] for tokens in entries])
    with (
        agent_of(site.cluster.map_path, one, *LIMITS, "--directory", directory) as ending,
        agent_of(site.cluster.map_path, two, *LIMITS, "--directory", directory) as taking,
        WorkerAgent(two, layout=V41) as other,
        DirectoryClient((directory,), cluster=site.cluster.map.tag, deadline_seconds=5) as asks,
    ):

        def holders() -> set[str]:
            return {holder.address for places in asks.locate(asked) for holder in places}

        with WorkerAgent(one, layout=V41) as worker:
            for tokens, entry in entries.items():
                assert worker.keep_window(keys, tokens, entry)
            assert worker.windows_at(keys, 512) == {384, 512}
            until(lambda: holders() == set(ending.status()["addresses"]), "the directory to be told")
        (address,) = taking.status()["addresses"]
        told = json.loads(control(str(one), Kind.DRAIN, json.dumps({"seconds": 20, "to": address}).encode(), 30))
        assert (told["finished"], told["windows_moved"], told["windows_left"]) == (True, 4, 0)
        assert ending.end() == 0
        until(lambda: holders() == {address}, "the directory to follow")
        for tokens, entry in entries.items():
            found = other.window(keys, tokens)
            assert found is not None and found.entry == entry and found.where == "own"
            del found


def test_a_drain_to_nobody_ends_all_the_same(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with agent_of(site.cluster.map_path, path, *LIMITS, "--to", "127.0.0.1:1") as agent:
        with WorkerAgent(path, layout=V41) as worker:
            assert worker.keep_window(chain(2, V41), 256, b"entry")
        agent.kill(signal.SIGTERM)
        assert agent.end() == 0
        assert "1 window entries and 0 handoffs are lost, not moved to 127.0.0.1:1: unreachable" in agent.log.read_text()


def test_an_agent_that_is_to_give_to_itself_knows_nobody(site: Site, tmp_path: Path) -> None:
    with agent_of(site.cluster.map_path, tmp_path / "a.sock", *LIMITS, "--handoffs", "1MiB") as agent:
        with WorkerAgent(agent.socket, layout=V41) as worker:
            assert worker.keep_window(chain(2, V41), 256, b"entry")
            own = json.dumps({"seconds": 30, "to": agent.status()["addresses"][0]}).encode()
            told = json.loads(control(str(agent.socket), Kind.DRAIN, own, 40))
        assert (told["windows_left"], told["windows_why"]) == (1, "no other agent is known")
        assert agent.end() == 0


def test_a_drain_finds_a_living_agent_by_itself_or_says_what_is_lost(site: Site, tmp_path: Path, directory: str) -> None:
    """Of three one is killed: the directory may still name it. The last one has nobody to give to."""
    keys = chain(2, V41)
    paths = [tmp_path / f"{name}.sock" for name in ("one", "dead", "last")]
    with (
        agent_of(site.cluster.map_path, paths[0], *LIMITS, "--directory", directory) as ending,
        agent_of(site.cluster.map_path, paths[1], *LIMITS, "--directory", directory) as dead,
        agent_of(site.cluster.map_path, paths[2], *LIMITS, "--directory", directory) as last,
        DirectoryClient((directory,), cluster=site.cluster.map.tag, deadline_seconds=5) as asks,
    ):
        presence = np.frombuffer(presence_key(V41.digest()), np.uint8)[None]
        with WorkerAgent(paths[0], layout=V41) as worker, WorkerAgent(paths[1], layout=V41), WorkerAgent(paths[2], layout=V41) as other:
            addresses = [agent.status()["addresses"][0] for agent in (ending, dead, last)]
            until(lambda: {holder.address for holder in asks.locate(presence)[0]} == set(addresses), "each to be known")
            assert worker.keep_window(keys, 256, b"entry")
            dead.kill(signal.SIGKILL)
            until(lambda: asks.locate(presence)[0][-1].address == addresses[1], "the directory to hear it no more")
            told = json.loads(control(str(paths[0]), Kind.DRAIN, b'{"seconds": 20}', 30))
            assert (told["windows_moved"], told["windows_left"], told["finished"]) == (1, 0, True) and ending.end() == 0
            assert addresses[2] in told["windows_to"].split(", ")
            until(lambda: (found := other.window(keys, 256)) is not None and found.entry == b"entry", "the entry there")
        cli = Cli(tmp_path)
        drained = cli.run("agent", "drain", "--socket", str(paths[2]))
        assert drained.code == 0 and "lost: 1 window entries and 0 handoffs" in drained.stdout and last.end() == 0


def flat_page(address: str) -> dict[str, float]:
    """Series of an HTTP address as they are written, and their numbers."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {series: float(number) for series, _, number in lines}


def test_handoffs_wait_at_the_agent_for_a_worker_and_move_when_it_drains(site: Site, tmp_path: Path) -> None:
    one, two, three = (tmp_path / f"{name}.sock" for name in ("one", "two", "three"))
    sections = {"rows": os.urandom(3_000_001), "ring": os.urandom(70_000), "state": b"", "token": b"7"}
    room = ("--handoffs", "16MiB")
    with (
        agent_of(site.cluster.map_path, one, *LIMITS) as giving,
        agent_of(site.cluster.map_path, two, *LIMITS, *room) as taking,
        agent_of(site.cluster.map_path, three, *LIMITS, *room) as last,
        WorkerAgent(one, layout=V41) as prefill,
        WorkerAgent(three, layout=V41) as other,
    ):
        with WorkerAgent(two, layout=V41) as decode:
            (address,) = taking.status()["addresses"]
            (own_address,) = giving.status()["addresses"]
            assert decode.take_handoff() is None
            assert prefill.give_handoff(address, sections, note=b"request 1") is HandoffOutcome.DONE
            found = decode.take_handoff(deadline_seconds=10)
            assert found is not None and found.note == b"request 1"
            assert {name: bytes(data) for name, data in found.sections.items()} == sections
            assert taking.status()["pinned_bytes"] > 3_000_000
            del found
            taking.until_free()
            assert decode.give_handoff(own_address, sections) is HandoffOutcome.BUSY, "that one takes none"
            assert decode.give_handoff(address, {"rows": bytes(17 * MIB)}) is HandoffOutcome.FULL, "more than a worker's memory"
            assert decode.give_handoff("127.0.0.1:1", sections, deadline_seconds=1) is HandoffOutcome.UNREACHABLE
            with pytest.raises(MisuseError):
                decode.give_handoff("nowhere", sections)
            assert prefill.give_handoff(address, sections, note=b"request 2") is HandoffOutcome.DONE
            gave, took = (flat_page(agent.status()["http"]) for agent in (giving, taking))
            whole = 2 * sum(map(len, sections.values()))
            assert (gave['kvstore_handoffs_sent_total{outcome="done"}'], gave["kvstore_handoff_sent_bytes_total"]) == (2, whole)
            assert took['kvstore_handoffs_received_total{event="committed"}'] == took["kvstore_handoff_arrivals"] + 1 == 2
            assert took["kvstore_handoff_received_bytes_total"] == whole
            assert took['kvstore_handoffs_sent_total{outcome="unreachable"}'] == 1 == took['kvstore_handoffs_sent_total{outcome="busy"}']
        (next_address,) = last.status()["addresses"]
        told = json.loads(control(str(two), Kind.DRAIN, json.dumps({"seconds": 20, "to": next_address}).encode(), 30))
        assert (told["finished"], told["handoffs_moved"], told["handoffs_left"]) == (True, 1, 0) and taking.end() == 0
        moved = other.take_handoff(deadline_seconds=10)
        assert moved is not None and moved.note == b"request 2" and moved.sections["rows"] == sections["rows"]


def test_status_and_drain_as_commands(site: Site, tmp_path: Path) -> None:
    cli, path = Cli(tmp_path), tmp_path / "a.sock"
    cli.run("agent", "status", "--socket", str(path)).refused(3, "E214", "no such file")
    with agent_of(site.cluster.map_path, path, *LIMITS) as agent, WorkerAgent(path, layout=V41, name="vllm-0"):
        shown = cli.run("agent", "status", "--socket", str(path))
        assert shown.code == 0 and "agent    ready" in shown.stdout and "vllm-0" in shown.stdout and "0 B of" in shown.stdout
        data = cli.run("agent", "status", "--socket", str(path), "--json").json
        assert data["schema"] == "kvstore.agent/1" and data["data"]["workers"][0]["name"] == "vllm-0" and data["cluster"] == "dev"
        drained = cli.run("agent", "drain", "--socket", str(path), "--within", "5s", "--json").json
        assert drained["ok"] and drained["data"]["finished"] and agent.end() == 0
