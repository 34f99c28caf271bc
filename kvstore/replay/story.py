"""The demo: a real trace on a 12-node cluster that loses two nodes on the way, told in steps: what was promised, what happened.

    nodes       12 daemons serve
    warm        the first 120 requests, all well
    kill        kill -9 of two daemons while requests are running
    degraded    100 requests with 10 of 12 nodes: reads decode, stores go on
    restart     one of the two starts again on its directory
    recovering  the last 80 requests with 11 nodes
    read back   the last 60 prompts again: all there, all equal

Bytes are of true size (113,920 a block). The capacity keeps the disk below 4 GB with parity, so old blocks are evicted on the way.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore.layout import PRESETS
from kvstore.replay.capacity import shape_of
from kvstore.replay.local import local_cluster
from kvstore.replay.player import ReplayOptions, run_replay
from kvstore.replay.report import ReplayReport, RequestOutcome
from kvstore.replay.requests import Request
from kvstore.server.local import LocalCluster
from kvstore.units import format_bytes

LAYOUT = PRESETS["v41"]
REQUESTS = 300
KILL_AT, RESTART_AT, READ_BACK = 120, 220, 60
KILLED = (3, 8)
CAPACITY_BLOCKS = 24_000  # 2.73 GB of blocks, 3.3 GB with parity and heads
STORED = ("stored", "degraded")
LRU_BLOCKS = CAPACITY_BLOCKS * 9 // 10  # hits must reach exact LRU of this size: eviction takes whole extents, and before space runs out


@dataclass(frozen=True)
class Step:
    """One line of the story: what was promised held (`ok`) or not."""

    name: str
    text: str
    ok: bool
    seconds: float


@dataclass(frozen=True)
class StoryReport:
    """All of it. `phases` are the warm, degraded and recovering parts of `whole`; `read_back` is apart."""

    steps: list[Step]
    whole: ReplayReport
    phases: dict[str, ReplayReport]
    read_back: ReplayReport

    @property
    def ok(self) -> bool:
        return all(step.ok for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "steps": [asdict(step) for step in self.steps],
            "whole": self.whole.to_dict(),
            "phases": {name: report.to_dict() for name, report in self.phases.items()},
            "read_back": self.read_back.to_dict(),
        }


def run_story(
    directory: Path, requests: Sequence[Request], tell: Callable[[Step], None], progress: Callable[[], None] = lambda: None
) -> StoryReport:
    """Plays the story on a cluster in `directory`, where the data stays. `progress` is called after each request of the first pass.

    Requests beyond the 300th are not played; with fewer, kill and restart come at the same shares of them.
    Raises what the cluster's start and the client raise where the story cannot go on at all.
    """
    story = _Story(requests[:REQUESTS], tell, progress)
    shape = shape_of(story.requests, LAYOUT, 10)
    with local_cluster(directory, shape, CAPACITY_BLOCKS, layout=LAYOUT) as cluster:
        return story.play(cluster)


class _Story:
    def __init__(self, requests: Sequence[Request], tell: Callable[[Step], None], progress: Callable[[], None]) -> None:
        self.requests = requests
        self._kill_at, self._restart_at, self._read_back = (len(requests) * at // REQUESTS for at in (KILL_AT, RESTART_AT, READ_BACK))
        self._tell = tell
        self._progress = progress
        self._steps: list[Step] = []
        self._step_began = time.perf_counter()
        self._outcomes: list[RequestOutcome] = []

    def play(self, cluster: LocalCluster) -> StoryReport:
        room = format_bytes(CAPACITY_BLOCKS * LAYOUT.block_bytes)
        self._step("nodes", f"{cluster.nodes_count} of {cluster.nodes_count} serve, 10+2, room for {room} of blocks", True)
        hooks = ReplayOptions(
            concurrency=2,
            lru_capacity_blocks=LRU_BLOCKS,
            before_request=lambda number: self._before(number, cluster),
            after_request=self._after,
        )
        whole = run_replay(self.requests, cluster.map, hooks)
        phases = self._phases()
        self._tell_phase("recovering", phases["recovering"])
        again = run_replay(self.requests[len(self.requests) - self._read_back :], cluster.map, ReplayOptions(concurrency=2))
        self._tell_read_back(again)
        self._tell_promises(whole, phases)
        return StoryReport(self._steps, whole, phases, again)

    def _before(self, number: int, cluster: LocalCluster) -> None:
        names = [cluster.map.nodes[node].id for node in KILLED]
        if number == self._kill_at:
            self._tell_phase("warm", self._phase(0, number))
            for node in KILLED:
                cluster.kill(node, signal.SIGKILL)
            running = number - len(self._outcomes)
            self._step("kill", f"kill -9 of {' and '.join(names)}, {running} requests on their way", not any(map(cluster.alive, KILLED)))
        elif number == self._restart_at:
            self._tell_phase("degraded", self._phase(self._kill_at, number))
            cluster.restart(KILLED[0])
            self._step("restart", f"{names[0]} on its directory; {names[1]} stays down", cluster.alive(KILLED[0]))

    def _after(self, outcome: RequestOutcome) -> None:
        self._outcomes.append(outcome)
        self._progress()

    def _phases(self) -> dict[str, ReplayReport]:
        kill_at, restart_at = self._kill_at, self._restart_at
        bounds = {"warm": (0, kill_at), "degraded": (kill_at, restart_at), "recovering": (restart_at, len(self.requests))}
        return {name: self._phase(*bound) for name, bound in bounds.items()}

    def _phase(self, first: int, stop: int) -> ReplayReport:
        """Of what is done by now of requests [first, stop)."""
        outcomes = self._outcomes[first:stop]
        began = min((one.started_seconds for one in outcomes), default=0.0)
        ended = max((one.started_seconds + one.seconds for one in outcomes), default=0.0)
        return ReplayReport.of(outcomes, seconds=ended - began, lru_capacity_blocks=LRU_BLOCKS)

    def _step(self, name: str, text: str, ok: bool) -> None:
        now = time.perf_counter()
        self._steps.append(Step(name, text, ok, now - self._step_began))
        self._step_began = now
        self._tell(self._steps[-1])

    def _tell_phase(self, name: str, phase: ReplayReport) -> None:
        moved = f"{format_bytes(phase.stored_bytes)} stored, {format_bytes(phase.loaded_bytes)} loaded and checked"
        decoded = f", {phase.decodes} decodes" if phase.decodes else ""
        self._step(name, f"{phase.requests} requests, {moved}, {phase.wrong_bytes} wrong bytes{decoded}", not phase.wrong_bytes)

    def _tell_read_back(self, again: ReplayReport) -> None:
        whole_tokens = sum(request.block_count * 128 for request in self.requests[len(self.requests) - self._read_back :])
        text = f"the last {again.requests} prompts: {again.loaded_tokens:,} of {whole_tokens:,} tokens, {again.wrong_bytes} wrong bytes"
        self._step("read back", text, again.loaded_tokens == whole_tokens and not again.wrong_bytes)

    def _tell_promises(self, whole: ReplayReport, phases: dict[str, ReplayReport]) -> None:
        """What no single step can say."""
        expected = whole.lru_hit_tokens or 0
        text = f"{whole.hit_tokens:,} tokens, exact LRU in nine tenths of the room {expected:,}, infinite cache {whole.ideal_hit_tokens:,}"
        self._step("hits", text, whole.hit_tokens >= expected)
        self._step("loads", f"{whole.short_loads} came back shorter than promised", not whole.short_loads)
        kept = sum(count for name, count in whole.store_outcomes.items() if name in STORED)
        degraded = sum(phase.store_outcomes.get("degraded", 0) for phase in phases.values())
        total = sum(whole.store_outcomes.values())
        self._step("stores", f"{kept} of {total} acknowledged, {degraded} of them with 10 nodes", kept == total)
