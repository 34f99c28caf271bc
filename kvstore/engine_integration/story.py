"""The demo's second half: the bundled engine answers three conversations and an agent's loop, and a table tells what the cache saved.

    engine      the model, and twelve daemons as its cache
    cold        every turn computed whole, on an engine without a cache
    warm        every turn again, in order: each hits what the turn before stored, windows included
    exact       the last turns on another engine, which has the blocks and no window: it replays until every bit is right
    bounded     the same, replaying one window: quicker, and not quite exact
    two down    the last turns on the first engine, two daemons killed

Greedy answers, so the text of every run must be the cold one's; only bounded replay may differ, and says so. Prompts are counted in blocks,
so that the size `tiny` tells the same story in a twentieth of the time.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from kvstore.client import Client, ClientConfig
from kvstore.client.agent.agent import Agent
from kvstore.engine_integration.engine import Engine, EngineConfig, RequestOptions, Response
from kvstore.engine_integration.engine.host import agent_config
from kvstore.engine_integration.model import ModelConfig, hit_tokens_max
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.server.template import Template
from kvstore.replay.story import Step
from kvstore.server.local import LocalCluster
from kvstore.units import format_seconds

KILLED: Final = (3, 8)
ANSWER_TOKENS: Final = 8
WAIT_SECONDS: Final = 300.0
PATIENT: Final = EngineConfig(lookup_deadline_seconds=10.0, load_deadline_seconds=30.0)  # a busy machine must not turn hits into misses
WINDOW_SECONDS: Final = 3600.0  # and on a slow one the last step comes late
CAPACITY_BYTES: Final = 256 << 20
# Name, source of its text, role and blocks of each turn. The agent's first turn is the description of its tools; then come their results.
SCRIPTS: Final = (
    ("chat 1", "attention.py", (("user", 5), ("user", 1), ("user", 1))),
    ("chat 2", "moe.py", (("user", 4), ("user", 1), ("user", 1))),
    ("chat 3", "rings.py", (("user", 6), ("user", 1), ("user", 1))),
    ("agent", "model.py", (("system", 30), ("tool", 2), ("tool", 2))),
)
RUNS: Final = ("cold", "warm", "exact", "bounded", "two down")


@dataclass(frozen=True)
class EngineStory:
    """`turns`: of each run and script, every turn that it played; exact, bounded and two down play the last alone."""

    steps: list[Step]
    turns: dict[str, dict[str, list[Response]]]
    weights: str

    @property
    def ok(self) -> bool:
        return all(step.ok for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """For --json. Answers are left out: they are tokens, and equal where they must be."""
        told = {
            run: {name: [{k: v for k, v in asdict(turn).items() if k != "tokens"} for turn in turns] for name, turns in scripts.items()}
            for run, scripts in self.turns.items()
        }
        return {"steps": [asdict(step) for step in self.steps], "turns": told, "weights": self.weights}


def turns_count() -> int:
    """How often `progress` is called."""
    return sum(2 * len(turns) + len(RUNS) - 2 for _, _, turns in SCRIPTS)


def run_engine_story(
    directory: Path, model: Model, weights: str, tell: Callable[[Step], None], progress: Callable[[], None] = lambda: None
) -> EngineStory:
    """Plays it on a cluster in `directory`, where the data stays. Raises what the cluster's start and the engine raise."""
    began = time.perf_counter()
    config = ClientConfig(block_tokens=model.config.block, model_name=model.config.name)
    with (
        LocalCluster(directory, 12, capacity_bytes=CAPACITY_BYTES) as cluster,
        Client(cluster.map, layout=model.layout, config=config) as client,
        Client(cluster.map, layout=model.layout, config=config) as other,
        Agent(client, config=agent_config(model.config, serve=False, window_seconds=WINDOW_SECONDS)) as agent,
        Engine(model, None) as bare,
        Engine(model, agent, PATIENT) as first,
        Engine(model, other, PATIENT) as second,
    ):
        story = _Story(model, tell, progress, began)
        story.step("engine", f"{model.config.name}, weights {weights}; 12 of 12 nodes, {model.layout.block_bytes:,} bytes a block", True)
        story.play("cold", bare, client)
        story.play("warm", first, client)
        story.again("exact", second, RequestOptions(resume="exact", store=False, max_tokens=ANSWER_TOKENS))
        story.again("bounded", second, RequestOptions(resume="bounded", store=False, max_tokens=ANSWER_TOKENS))
        for node in KILLED:
            cluster.kill(node, signal.SIGKILL)
        story.again("two down", first, RequestOptions(store=False, max_tokens=ANSWER_TOKENS))
    return EngineStory(story.steps, story.turns, weights)


class _Story:
    def __init__(self, model: Model, tell: Callable[[Step], None], progress: Callable[[], None], began: float) -> None:
        self._config: ModelConfig = model.config
        self._template = Template(model.config)
        self._tell, self._progress, self._began = tell, progress, began
        self._prompts: dict[str, list[int]] = {}  # the last of each script
        self._before: dict[str, list[int]] = {}  # and tokens of each turn's prompt that were computed by the turn before
        self.steps: list[Step] = []
        self.turns: dict[str, dict[str, list[Response]]] = {run: {} for run in RUNS}

    def play(self, run: str, engine: Engine, client: Client) -> None:
        """Every turn of every script; each waits until the one before is stored, as a person would."""
        for name, source, turns in SCRIPTS:
            text = self._template.text(files("kvstore.engine_integration.model").joinpath(source).read_text())
            specials = self._template.specials
            prompt, at, computed = [specials["begin"]], 0, 0
            before = self._before[name] = []
            for role, blocks in turns:
                said = text[at : at + blocks * self._config.block]
                at += len(said)
                prompt += [specials[role], *said, specials["end_of_turn"], specials["assistant"]]
                self._prompts[name] = list(prompt)
                before.append(computed)
                answer = self._ask(run, name, engine, prompt, RequestOptions(max_tokens=ANSWER_TOKENS))
                computed = len(prompt) + len(answer.tokens) - 1
                prompt += [*answer.tokens, specials["end_of_turn"]]
                client.flush(WAIT_SECONDS)
        self._tell_run(run)

    def again(self, run: str, engine: Engine, options: RequestOptions) -> None:
        """The last turn of every script."""
        for name, prompt in self._prompts.items():
            self._ask(run, name, engine, prompt, options)
        self._tell_run(run)

    def step(self, name: str, text: str, ok: bool) -> None:
        now = time.perf_counter()
        self.steps.append(Step(name, text, ok, now - self._began))
        self._began = now
        self._tell(self.steps[-1])

    def _ask(self, run: str, name: str, engine: Engine, prompt: list[int], options: RequestOptions) -> Response:
        answer = engine.submit(prompt, options=options).result(WAIT_SECONDS)
        self.turns[run].setdefault(name, []).append(answer)
        self._progress()
        return answer

    def _tell_run(self, run: str) -> None:
        turns = [turn for script in self.turns[run].values() for turn in script]
        prompt, seconds = sum(turn.prompt_tokens for turn in turns), sum(turn.ttft_seconds for turn in turns)
        cached, replayed = sum(turn.cached_tokens for turn in turns), sum(turn.replayed_tokens for turn in turns)
        text = f"{len(turns)} turns, {prompt:,} prompt tokens, {format_seconds(seconds)} to first tokens"
        if run == "cold":
            self.step(run, text, cached == 0)
            return
        text += f"; {cached:,} cached" + (f", {replayed:,} replayed" if replayed else "")
        counts = {name: len(script) for name, script in self.turns[run].items()}
        cold = [turn for name, count in counts.items() for turn in self.turns["cold"][name][-count:]]
        equal = sum(a.tokens == b.tokens for a, b in zip(turns, cold, strict=True))
        hits = [hit_tokens_max(self._config, turn.prompt_tokens) for turn in turns]
        if run == "warm":  # the turn before has stored what it computed; the last turns come again when all of them is stored
            size = self._config.block
            hits = [min(hit, tokens // size * size) for hit, tokens in zip(hits, itertools.chain(*self._before.values()), strict=True)]
        use = {"warm": "hit", "two down": "hit"}.get(run, run)
        kept = all(
            turn.cached_tokens + turn.replayed_tokens == hit and turn.window == (use if hit else "none")
            for turn, hit in zip(turns, hits, strict=True)
        )
        self.step(run, f"{text}; {equal} of {len(turns)} texts as cold", kept and (equal == len(turns) or run == "bounded"))
