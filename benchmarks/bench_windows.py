"""window_hit_rate_trace: window entries of the weka trace (7 days, not packed) through real directories, agents and storage daemons.

Requests go to agents at random, as a balancer that knows nothing sends them, one after the other in the trace's time: entries age by it at
agents and directories alike. Each looks up its prompt, takes the window entry at the end of its usable hit, compares every byte with what
the key stands for, keeps the entries that the rules say, and stores what was missing. Entries and blocks are small: bytes do not change who
has what.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice

import numpy as np

from benchmarks.harness import ROOT, Bench, Figure, at_least, measures
from kvstore.client import Client, ClientConfig
from kvstore.client.agent.agent import Agent
from kvstore.client.agent.config import AgentConfig
from kvstore.client.agent.frames import PeerConfig
from kvstore.client.agent.keeps import WINDOW_SLOTS, prefill_keeps
from kvstore.client.agent.windows import LIFETIME_SECONDS
from kvstore.clustermap import ClusterMap
from kvstore.kernels import _native
from kvstore.keys import Keys
from kvstore.layout import Layout
from kvstore.replay import ReplayOptions, Request, open_trace
from kvstore.replay.player import block_keys
from kvstore.replay.requests import BLOCK_TOKENS
from kvstore.server.local import LocalCluster
from kvstore.version import module_command

TRACE = ROOT / "traces" / "weka_v6_dev.b128.jsonl.zst"
LAYOUT = Layout.single(64)  # two nodes' worth of one 32-byte unit
AGENTS = 4
DIRECTORIES = 2
ENTRY_REPEATS = 8  # an entry is its key so often
WAIT_SECONDS = 30.0


class TraceTime:
    """Seconds of the trace; starts above 0, which directories take for no time at all."""

    def __init__(self) -> None:
        self.seconds = 1.0

    def __call__(self) -> float:
        return self.seconds


@contextmanager
def directory_process(cluster_map: str) -> Iterator[str]:
    """A `kvstore directory` whose time is its clients'; gives its address."""
    command = [*module_command("kvstore"), "directory", "--listen", "127.0.0.1:0", "--virtual-clock", "--map", cluster_map]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            word, _, facts = process.stdout.readline().partition(" ")
            if word != "ready":
                raise RuntimeError("a directory did not start")
            yield str(json.loads(facts)["address"])
        finally:
            process.terminate()


def expected_hits(requests: Sequence[Request], keep_missed: bool = True) -> tuple[int, int]:
    """Window hits and requests that need one, by a model of the rules: no processes, no messages. `keep_missed`: also where a hit ended
    without an entry."""
    left: dict[int, int] = {}
    seen: set[int] = set()
    hits = needed = 0
    for request in requests:
        ids = request.ids().tolist()
        leading = next((at for at, one in enumerate(ids) if one not in seen), len(ids))
        seen.update(ids[leading:])
        usable = min(leading, max(0, request.input_tokens - WINDOW_SLOTS) // BLOCK_TOKENS)
        missed = 0
        if usable:
            needed += 1
            then = left.get(ids[usable - 1])
            if then is not None and request.time_ms - then <= LIFETIME_SECONDS * 1000:
                hits += 1
                left[ids[usable - 1]] = request.time_ms
            elif keep_missed:
                missed = usable * BLOCK_TOKENS
        for tokens in prefill_keeps(request.input_tokens, missed):
            left[ids[tokens // BLOCK_TOKENS - 1]] = request.time_ms
    return hits, needed


class Player:
    """Plays requests over agents; counts by where the window entry was found. Patient: a busy machine is no reason for a miss here."""

    def __init__(self, cluster_map: ClusterMap, directories: Sequence[str], stack: ExitStack) -> None:
        self.time = TraceTime()
        self.found: Counter[str] = Counter()
        self.promised = 0
        config = AgentConfig(
            directories=tuple(directories), window_bytes=64 << 20, directory_seconds=WAIT_SECONDS, fetch_seconds=WAIT_SECONDS,
            peer=PeerConfig(silence_seconds=WAIT_SECONDS),
        )  # fmt: skip
        self.agents = []
        for _ in range(AGENTS):
            client = stack.enter_context(Client(cluster_map, layout=LAYOUT, config=ClientConfig(accounting=False)))
            self.agents.append(stack.enter_context(Agent(client, config=config, clock=self.time)))
        self._rng = np.random.default_rng(1)
        self._options = ReplayOptions(layout=LAYOUT)

    def play(self, request: Request) -> None:
        self.time.seconds = max(self.time.seconds, 1 + request.time_ms / 1000)
        agent = self.agents[self._rng.integers(len(self.agents))]
        ids = request.ids()
        if not len(ids):
            return
        keys = block_keys(self._options, ids)
        ticket = agent.lookup(keys, input_tokens=request.input_tokens, deadline_seconds=WAIT_SECONDS)
        end = ticket.usable_tokens
        window = agent.window(keys, end, ticket=ticket) if end else None
        if end:
            self.found[window.where if window else "missing"] += 1
            self.promised += bool(ticket.windows) and ticket.windows[0].block == ticket.usable_blocks
        if window is not None and window.entry != entry_at(keys, end):
            raise RuntimeError("an entry of another prefix, or a torn one")
        kept = agent.request(request.input_tokens, 0 if window else end)
        for tokens in sorted(prefill_keeps(request.input_tokens, 0 if window else end)):
            kept.keep(keys, tokens, entry_at(keys, tokens))
        if ticket.hit_blocks < len(keys):
            rest = np.empty((len(keys) - ticket.hit_blocks, LAYOUT.block_bytes), np.uint8)
            _native.generate_blocks(keys[ticket.hit_blocks :], LAYOUT.block_bytes, rest)
            agent.store(keys, rest, first_block=ticket.hit_blocks)
        for one in self.agents:  # the serving one has uses to tell, too
            one.flush(WAIT_SECONDS)


def entry_at(keys: Keys, tokens: int) -> bytes:
    key: bytes = keys[tokens // BLOCK_TOKENS - 1].tobytes()
    return key * ENTRY_REPEATS


@measures("window_hit_rate_trace")
def window_hit_rate_trace(bench: Bench) -> dict[str, Figure]:
    requests = list(islice(open_trace(TRACE), bench.scale.trace_requests or None))
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(bench.directory / "windows", 3, capacity_bytes=1 << 30, k=2, m=1))
        directories = [stack.enter_context(directory_process(str(cluster.map_path))) for _ in range(DIRECTORIES)]
        player = Player(cluster.map, directories, stack)
        for request in requests:
            player.play(request)
    found, needed = player.found, player.found.total()
    hits = found["own"] + found["peer"]
    model_hits, model_needed = expected_hits(requests)
    if needed != model_needed or abs(hits - model_hits) > max(2, needed // 1000) or abs(player.promised - hits) > max(2, needed // 1000):
        raise RuntimeError(f"{hits} hits of {needed}, {player.promised} promised; the model says {model_hits} of {model_needed}")
    two_rules, _ = expected_hits(requests, keep_missed=False)
    note = f"{hits} of {needed}; own {found['own']}, peer {found['peer']}; the model says {model_hits}, {two_rules} by prompts' ends alone"
    return {"window_hit_rate_trace": Figure(hits / needed, at_least(0.93), note)}
