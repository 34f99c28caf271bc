"""The embedded agent: window entries found in its own RAM, at other agents, or not; with real daemons, directories and connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from client_tools import NO_REUSE, SMALL, WAIT_SECONDS, chain, cluster_of, load, store, until

from kvstore.client import Accept, Client, ClientConfig, Fidelity, StoreOutcome
from kvstore.client.agent.activity import AgentActivity
from kvstore.client.agent.agent import Agent
from kvstore.client.agent.config import AgentConfig, reachable
from kvstore.client.agent.frames import PeerConfig
from kvstore.client.agent.metrics import agent_registry
from kvstore.client.agent.sealed import window_key
from kvstore.client.agent.teller import Word
from kvstore.client.agent.windows import ENTRY_OVERHEAD_BYTES
from kvstore.clustermap import ClusterMap
from kvstore.errors import Closed, ConfigError, MisuseError
from kvstore.kernels import _native
from kvstore.keys import Keys
from kvstore.metrics import flat_values
from kvstore.units import format_bytes

MIB = 1 << 20
TICKET_KEY = bytes(range(32))
PATIENT = {
    "directory_seconds": 5.0,
    "fetch_seconds": 5.0,
    "peer": PeerConfig(silence_seconds=5.0),
}  # the machine may be busy; the tests of deadlines set their own


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """One cluster, two directories whose time is `clock`, and as many agents as a test wants, each with a client of its own."""

    def __init__(self, cluster_map: ClusterMap) -> None:
        self.map = cluster_map
        self.clock = Clock()
        self._stack = ExitStack()
        self.directories = [self.directory(), self.directory()]

    def directory(self, port: int = 0) -> _native.DirectoryServer:
        server = _native.DirectoryServer("127.0.0.1", port, cluster16=self.map.tag, memory_bytes=16 << 20, virtual_clock=True)
        self._stack.callback(server.stop)
        return server

    def agent(self, **fields: object) -> Agent:
        client = self._stack.enter_context(Client(self.map, layout=SMALL, config=ClientConfig(ticket_key=TICKET_KEY)))
        addresses = tuple(f"127.0.0.1:{server.port}" for server in self.directories)
        settings = {"directories": addresses, "window_bytes": 1 << 20, **PATIENT, **fields}
        return self._stack.enter_context(Agent(client, config=AgentConfig(**settings), clock=self.clock))  # type: ignore[arg-type]  # passed through

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def cluster_map(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterMap]:
    with cluster_of(tmp_path_factory.mktemp("agents"), 3, k=2, m=1) as cluster:
        yield cluster.map


@pytest.fixture
def world(cluster_map: ClusterMap) -> Iterator[World]:
    world = World(cluster_map)
    yield world
    world.close()


def entry_of(keys: Keys, tokens: int) -> bytes:
    """What the engine would have: bytes that follow from the prefix."""
    return keys[tokens // 128 - 1].tobytes() * 40


def keep(agent: Agent, keys: Keys, *tokens: int) -> None:
    for count in tokens:
        assert agent.keep_window(keys, count, entry_of(keys, count))
    assert agent.flush(WAIT_SECONDS)


def stored(agent: Agent, blocks: int = 12) -> Keys:
    keys = chain(blocks, SMALL)
    store(agent.client, keys)
    return keys


# --- hits ---


def test_an_own_entry_is_found_at_lookup_and_taken_without_asking_anybody(world: World) -> None:
    agent = world.agent()
    keys = stored(agent)
    keep(agent, keys, 1280)
    asked = agent.directory.stats()["located"] if agent.directory else -1
    ticket = agent.lookup(keys, input_tokens=1500)  # 10 blocks and 134 tokens fit, 11 do not
    assert (ticket.hit_blocks, ticket.usable_blocks, ticket.usable_tokens) == (12, 10, 1280)
    assert [(window.block, window.holders) for window in ticket.windows] == [(10, (agent.address,))]
    window = agent.window(keys, 1280, ticket=ticket)
    assert window is not None and window.entry == entry_of(keys, 1280) and (window.tokens, window.where) == (1280, "own")
    assert window.fidelity == Fidelity.EXACT and window.entry.readonly
    assert agent.directory is not None and agent.directory.stats()["located"] == asked


def test_another_agents_entries_are_named_by_the_ticket_and_fetched(world: World) -> None:
    maker, reader = world.agent(), world.agent()
    keys = stored(maker)
    keep(maker, keys, 1280, 1152, 512)
    ticket = reader.lookup(keys, input_tokens=1500)
    assert [(window.block, window.holders) for window in ticket.windows] == [(block, (maker.address,)) for block in (10, 9, 4)]
    for tokens in (1280, 512):
        window = reader.window(keys, tokens, ticket=ticket)
        assert window is not None and window.entry == entry_of(keys, tokens) and window.where == "peer"
    assert reader.windows.stats().entries == 0, "one copy, at the host that made it"
    assert reader.window(keys, 1152) is not None, "without a ticket the directory is asked"
    assert reader.window(keys, 1024, ticket=ticket) is None


def test_a_third_process_redeems_the_ticket_without_a_directory(world: World) -> None:
    maker, router, decoder = world.agent(), world.agent(), world.agent(directories=())
    keys = stored(maker)
    keep(maker, keys, 1280)
    ticket = decoder.ticket(router.lookup(keys, input_tokens=1500).to_bytes())
    assert ticket.usable_blocks == 10
    window = decoder.window(keys, ticket.usable_tokens, ticket=ticket)
    assert window is not None and window.entry == entry_of(keys, 1280) and decoder.address == ""


def test_older_entries_are_named_only_as_far_back_as_they_are_of_use(world: World) -> None:
    maker, reader = world.agent(), world.agent(older_blocks_max=2)
    keys = stored(maker)
    keep(maker, keys, 1152, 1024, 896)
    assert [window.block for window in reader.lookup(keys, input_tokens=1500).windows] == [9, 8]


def test_places_of_entries_are_the_tickets_word_or_asked_anew_for_another_end(world: World) -> None:
    maker, reader = world.agent(), world.agent()
    keys = stored(maker)
    keep(maker, keys, 1280, 1024, 640)
    ticket = reader.lookup(keys, input_tokens=1500)
    maker.drop_window(keys, 1024)
    assert maker.flush(WAIT_SECONDS)
    assert reader.windows_at(keys, 1280, ticket) == {1280, 1024, 640}
    assert reader.windows_at(keys, 1024, ticket) == {640}, "a load that fell short"
    assert reader.windows_at(keys, 1280) == {1280, 640}
    with pytest.raises(MisuseError, match="E572"):
        reader.windows_at(keys, 0)


def test_blocks_load_through_the_agent_as_through_its_client(world: World) -> None:
    agent = world.agent()
    keys = chain(5, SMALL)
    data = store(agent.client, keys)
    ticket = agent.lookup(keys, input_tokens=5 * 128 + 134)
    place = np.zeros_like(data)
    assert agent.load(ticket, place).blocks == 5 and (place == data).all()
    for begin in (lambda: agent.planes(ticket, place), lambda: agent.planes_with(None, ticket, place)):
        place[:] = 0
        assert [ready.blocks for ready in begin()] == [5] * len(SMALL.planes(2)) and (place == data).all()
    assert agent.store(keys, data, first_block=0).result(WAIT_SECONDS).blocks == 5


def test_the_accounts_are_told_whether_the_entry_is_there(world: World) -> None:
    agent = world.agent()
    keys = stored(agent)
    agent.lookup(keys, input_tokens=1500)
    assert agent.client.accounts.flush(WAIT_SECONDS)
    stats = agent.client.stats()
    assert (stats["hit_tokens"], stats["missed_window_tokens"]) == (9 * 128, 128)
    keep(agent, keys, 1280)
    agent.lookup(keys, input_tokens=1500)
    assert agent.client.accounts.flush(WAIT_SECONDS)
    stats = agent.client.stats()
    assert (stats["hit_tokens"], stats["missed_window_tokens"]) == (19 * 128, 128)
    assert (agent.counters.lookups["own"], agent.counters.lookups["missing"]) == (1, 1)


def test_a_prompt_too_short_to_hit_asks_for_no_window(world: World) -> None:
    agent = world.agent()
    keys = stored(agent, 2)
    ticket = agent.lookup(keys[:1], input_tokens=261)
    assert (ticket.hit_blocks, ticket.usable_blocks, ticket.windows) == (1, 0, ())
    assert not agent.counters.lookups


# --- what is never given ---


def test_the_ring_of_another_request_never_passes(world: World) -> None:
    """A holder whose memory has the wrong entry under the key, sent with sums that hold: the reader's own key does not open it."""
    maker, reader = world.agent(), world.agent()
    keys, others = chain(12, SMALL), chain(12, SMALL)
    keep(maker, others, 1280)
    sealed = maker.windows.get(window_key(others[9].tobytes()))
    assert sealed is not None
    maker.windows.put(keys[9].tobytes(), sealed)
    ticketless = reader.window(others, 1280)
    assert ticketless is not None
    assert maker._teller is not None
    maker._teller.tell(keys[9].tobytes(), Word.KEPT)
    assert maker.flush(WAIT_SECONDS)
    for agent in (reader, maker):
        assert agent.window(keys, 1280) is None and agent.counters.faults["corrupt"] == 1
    assert maker.windows.holds([keys[9].tobytes()]) == [False], "it is not served again"


def test_approximate_entries_are_for_those_who_take_them(world: World) -> None:
    maker, reader = world.agent(), world.agent()
    keys = stored(maker)
    assert maker.keep_window(keys, 1280, b"approximate" * 9, fidelity=Fidelity.approx(3))
    assert maker.flush(WAIT_SECONDS)
    assert reader.window(keys, 1280) is None and reader.lookup(keys, input_tokens=1500).windows == ()
    assert reader.window(keys, 1280, accept=Accept(depth_max=2)) is None
    window = reader.window(keys, 1280, accept=Accept(depth_max=3))
    assert window is not None and window.entry == b"approximate" * 9 and window.fidelity == Fidelity.approx(3)
    ticket = reader.lookup(keys, input_tokens=1500, accept=Accept.ANY)
    assert [(window.block, window.approximate) for window in ticket.windows] == [(10, True)]
    assert reader.window(keys, 1280, ticket=ticket, accept=Accept.ANY) is not None
    keep(maker, keys, 1280)  # the exact one beside it
    for accept in (Accept.EXACT, Accept.ANY):
        window = reader.window(keys, 1280, accept=accept)
        assert window is not None and window.entry == entry_of(keys, 1280)


def test_misuse_raises_before_anything_is_done(world: World) -> None:
    agent = world.agent()
    keys = chain(3, SMALL)
    for tokens in (0, -128, 100, 512):
        with pytest.raises(MisuseError, match="E572"):
            agent.window(keys, tokens)
    with pytest.raises(MisuseError, match="E571"):
        agent.keep_window(keys, 128, b"")
    assert not agent.keep_window(keys, 128, bytes(2 << 20)), "larger than the store"
    assert agent.window(keys, 128) is None
    agent.close()
    agent.close()
    for verb in (lambda: agent.lookup(keys), lambda: agent.window(keys, 128), lambda: agent.keep_window(keys, 128, b"x")):
        with pytest.raises(Closed, match="E573"):
            verb()
    for fields in (
        {"window_bytes": -1},
        {"window_seconds": 0},
        {"slots": 0},
        {"older_blocks_max": 256},
        {"port": 65536},
        {"fetch_seconds": 61},
    ):
        with pytest.raises(ConfigError, match="E150"):
            AgentConfig(**fields)  # type: ignore[arg-type]  # wrong on purpose


# --- lifetimes ---


def test_entries_expire_180_seconds_after_their_last_use_here_and_at_the_directory(world: World) -> None:
    maker, reader = world.agent(), world.agent()
    keys = stored(maker)
    keep(maker, keys, 1280)
    world.clock.now += 170
    assert reader.window(keys, 1280) is not None  # a use: the holder tells the directory
    assert maker.flush(WAIT_SECONDS)
    world.clock.now += 170
    ticket = reader.lookup(keys, input_tokens=1500)
    assert [window.block for window in ticket.windows] == [10]
    world.clock.now += 11
    assert reader.lookup(keys, input_tokens=1500).windows == ()
    assert reader.window(keys, 1280, ticket=ticket) is None, "the ticket is older than the entry"
    assert maker.window(keys, 1280) is None


def test_what_is_driven_out_is_forgotten_at_the_directory(world: World) -> None:
    size = len(entry_of(chain(1, SMALL), 128)) + 32 + ENTRY_OVERHEAD_BYTES
    maker, reader = world.agent(window_bytes=2 * size), world.agent()
    keys = stored(maker)
    keep(maker, keys, 1280, 1152, 1024)
    assert [window.block for window in reader.lookup(keys, input_tokens=1500).windows] == [9, 8]
    maker.drop_window(keys, 1152)
    assert maker.flush(WAIT_SECONDS)
    assert [window.block for window in reader.lookup(keys, input_tokens=1500).windows] == [8]


def test_close_forgets_everything_at_the_directory(world: World) -> None:
    maker, reader = world.agent(), world.agent()
    keys = stored(maker)
    keep(maker, keys, 1280, 1152)
    assert len(reader.lookup(keys, input_tokens=1500).windows) == 2
    maker.close()
    assert reader.lookup(keys, input_tokens=1500).windows == ()
    assert maker.windows.stats().entries == 0


def test_one_request_keeps_two_of_its_prompt_and_the_last_three_of_its_answer(world: World) -> None:
    agent = world.agent()
    keys = chain(20, SMALL)
    kept = agent.request(1000)
    for tokens in range(128, 20 * 128 + 1, 128):
        assert kept.keep(keys, tokens, entry_of(keys, tokens)) == kept.wants(tokens)
    held = [number for number, there in enumerate(agent.windows.holds(key.tobytes() for key in keys), 1) if there]
    assert held == [6, 7, 18, 19, 20]


# --- failures ---


@contextmanager
def silent_peer() -> Iterator[str]:
    """Takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_dead_holder_costs_20_ms_once(world: World) -> None:
    with silent_peer() as address:
        maker, reader = world.agent(advertise=address), world.agent(peer=PeerConfig())
        keys = stored(maker)
        keep(maker, keys, 1280)
        ticket = reader.lookup(keys, input_tokens=1500)
        assert ticket.windows[0].holders == (address,)
        began = time.perf_counter()
        assert reader.window(keys, 1280, ticket=ticket) is None
        first = time.perf_counter() - began
        for _ in range(20):
            assert reader.window(keys, 1280, ticket=ticket) is None
        assert reader.lookup(keys, input_tokens=1500).windows == (), "the next request does not even count on it"
        stats = reader.peers.stats()
        assert (stats["dead"], stats["skipped"]) == (1, 20)
        assert 0.02 <= first < 1, "a busy machine adds to the 20 ms"


def test_another_holder_is_asked_where_the_first_is_dead(world: World) -> None:
    with silent_peer() as address:
        dead, alive = world.agent(advertise=address), world.agent()
        reader = world.agent(peer=PeerConfig(silence_seconds=0.3))
        keys = chain(12, SMALL)
        keep(dead, keys, 1280)
        keep(alive, keys, 1280)
        window = reader.window(keys, 1280)
        assert window is not None and window.entry == entry_of(keys, 1280)


def test_a_restarted_directory_costs_misses_only_and_learns_again_from_uses(world: World) -> None:
    maker, reader = world.agent(), world.agent()
    keys = stored(maker)
    keep(maker, keys, 1280)
    ports = [server.port for server in world.directories]
    for server in world.directories:
        server.stop()
    ticket = reader.lookup(keys, input_tokens=1500)
    assert (ticket.usable_blocks, ticket.windows) == (10, ())
    assert maker.window(keys, 1280) is not None, "its own RAM needs no directory"
    world.directories = [world.directory(port) for port in ports]

    def found() -> bool:
        maker.window(keys, 1280)
        maker.flush(WAIT_SECONDS)
        return bool(reader.lookup(keys, input_tokens=1500).windows)

    until(found, "the directory to learn of it")


def test_an_entry_that_goes_while_it_is_sent_arrives_whole(world: World) -> None:
    """Larger than a socket takes at once, dropped and its memory wanted again while it is on its way."""
    size = 8 << 20
    maker, reader = world.agent(window_bytes=size + 4096), world.agent()
    keys = chain(12, SMALL)
    data = np.arange(size // 8, dtype=np.uint64).tobytes()
    assert maker.keep_window(keys, 1280, data) and maker.flush(WAIT_SECONDS)
    wrong, ends = [], threading.Event()

    def churn() -> None:
        while not ends.is_set():
            maker.drop_window(keys, 1280)
            maker.keep_window(keys, 128, bytes(size))
            maker.drop_window(keys, 128)
            maker.keep_window(keys, 1280, data)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(12):
            window = reader.window(keys, 1280)
            wrong += [] if window is None or window.entry == data else [len(window.entry)]
    finally:
        ends.set()
        thread.join(WAIT_SECONDS)
    assert not wrong and reader.peers.stats().get("corrupt", 0) == 0 and reader.counters.faults["corrupt"] == 0


def test_what_directories_and_tickets_name_may_be_no_address(world: World) -> None:
    maker, reader = world.agent(advertise="nonsense"), world.agent()
    keys = stored(maker)
    keep(maker, keys, 1280)
    assert reader.window(keys, 1280) is None and reader.counters.faults["address"] == 1


def test_the_numbers_come_out(world: World) -> None:
    maker, reader = world.agent(), world.agent()
    keys = stored(maker)
    keep(maker, keys, 1280)
    ticket = reader.lookup(keys, input_tokens=1500)
    assert reader.window(keys, 1280, ticket=ticket) is not None and reader.window(keys, 128) is None
    assert maker.flush(WAIT_SECONDS)
    flat = flat_values(agent_registry(reader))
    size = len(entry_of(keys, 1280))
    expected: dict[str, float] = {
        'kvstore_window_lookups_total{where="peer"}': 1,
        'kvstore_window_takes_total{where="peer"}': 1,
        'kvstore_window_takes_total{where="missing"}': 1,
        "kvstore_window_fetch_duration_seconds_count": 1,
        "kvstore_window_fetched_bytes_total": size,
        'kvstore_window_fetches_total{result="hit"}': 1,
        "kvstore_window_entries": 0,
        'kvstore_window_bytes{kind="capacity"}': 1 << 20,
    }
    assert {name: flat[name] for name in expected} == expected
    flat = flat_values(agent_registry(maker))
    expected = {
        'kvstore_window_served_total{result="sent"}': 1,
        'kvstore_window_kept_total{result="kept"}': 1,
        "kvstore_window_entries": 1,
        'kvstore_window_bytes{kind="used"}': size + 32,
        'kvstore_window_directory_keys_total{event="registered"}': 1,
        'kvstore_window_directory_keys_total{event="touched"}': 1,
    }
    assert {name: flat[name] for name in expected} == expected


def test_directories_are_the_cluster_maps_by_default(world: World) -> None:
    addresses = tuple(f"127.0.0.1:{server.port}" for server in world.directories)
    world.map = replace(world.map, directories=addresses)
    maker, reader = world.agent(directories=()), world.agent()
    assert maker.directory is not None and maker.directory.addresses == addresses
    keys = stored(maker)
    keep(maker, keys, 1280)
    assert reader.window(keys, 1280) is not None


@pytest.mark.parametrize(
    ("address", "directories", "told"),
    [
        ("127.0.0.1:1", ["127.0.0.1:2", "[::1]:2", "localhost:2"], True),
        ("127.0.0.1:1", ["127.0.0.1:2", "10.0.0.1:2"], False),
        ("[::1]:1", ["directory-0:2"], False),
        ("0.0.0.0:1", ["10.0.0.1:2"], False),
        ("10.0.0.5:1", ["10.0.0.1:2", "127.0.0.1:2"], True),
        ("host-5:1", ["10.0.0.1:2"], True),
    ],
)
def test_loopback_addresses_are_told_to_directories_of_this_host_alone(address: str, directories: list[str], told: bool) -> None:
    assert reachable(address, directories) == told


def test_a_log_line_for_each_span_in_which_something_happened(tmp_path: Path) -> None:
    activity = AgentActivity()
    with cluster_of(tmp_path, 3, k=2, m=1) as cluster, Client(cluster.map, layout=SMALL, config=NO_REUSE) as client:

        def line() -> str:
            return activity.line({"a": client.stats()}, 3 * MIB, 12 * MIB, 10.0)

        assert line() == ""
        keys = chain(40, SMALL)
        data = store(client, keys)
        assert line() == f"load 0 B/s from nodes, save {format_bytes(data.nbytes / 10)}/s, queue 0, pinned 25 %"
        ticket = client.lookup(np.concatenate([keys, chain(40, SMALL)]))
        assert load(client, ticket)[0].blocks == 40
        read = f"load {format_bytes(data.nbytes / 10)}/s from nodes, delivered 512 tokens/s"
        assert line() == f"{read}, save 0 B/s, lookup 0.1/s, hit 50 %, queue 0, pinned 25 %"
        assert line() == ""
        for node in range(2):
            cluster.kill(node)
        assert client.store(keys, data, first_block=0).result(WAIT_SECONDS).outcome is StoreOutcome.FAILED
        assert line().endswith(f"not saved {format_bytes(data.nbytes)}")
        assert activity.line({}, 0, MIB, 10.0) == "", "a kind that is gone takes nothing back"
        with Client(cluster.map, layout=SMALL, config=NO_REUSE) as other:
            other.lookup(keys)
            assert "lookup 0.1/s, hit 0 %" in activity.line({"b": other.stats()}, 0, MIB, 10.0)
