"""One study: a model, its texts, what was found so far, and the file this is kept in.

The file belongs to one set of weights: with others, or other texts, it is begun anew. Sample n of an experiment is the same sample in every
run, so a run of N minutes more goes on where the last one ended. It is written whole, beside and renamed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from benchmarks.harness import commit, machine
from benchmarks.replay_error.probe import Passage, read_passage
from benchmarks.replay_error.tally import Tally
from benchmarks.replay_error.texts import Text
from kvstore.engine_integration.model.model import Model

FORMAT: Final = 1
PASSAGE_BLOCKS: Final = 32
PASSAGES_KEPT: Final = 32  # 2 MB each of `mini`
SAVE_SECONDS: Final = 60.0
Experiments: TypeAlias = "dict[str, tuple[float, Callable[[Study, int], None]]]"
"""Name -> share of the time, and what takes one sample of it."""


@dataclass
class Study:
    model: Model
    texts: dict[str, Text]
    about: dict[str, Any]  # which weights, which texts: what a file must be of to be gone on with
    tallies: dict[str, Tally] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # "way/context tokens" -> processor seconds of each sample
    counts: dict[str, int] = field(default_factory=dict)  # samples of each experiment, and checks that held
    spent: dict[str, float] = field(default_factory=dict)  # seconds of each experiment
    runs: list[dict[str, Any]] = field(default_factory=list)
    bits_per_byte: dict[str, float] = field(default_factory=dict)  # of each kind of text
    trace: dict[str, Any] = field(default_factory=dict)  # costs.trace_facts
    _passages: dict[tuple[str, int], Passage] = field(default_factory=dict)
    _models: dict[str, Model] = field(default_factory=dict)

    def kind(self, number: int) -> str:
        """Kinds take turns."""
        return list(self.texts)[number % len(self.texts)]

    def tally(self, name: str) -> Tally:
        return self.tallies.setdefault(name, Tally())

    def passage(self, kind: str, number: int) -> Passage:
        """PASSAGE_BLOCKS blocks of text, read cold. The last ones used are kept: the experiments go through the same passages."""
        key = (kind, number)
        if key in self._passages:
            self._passages[key] = self._passages.pop(key)
        else:
            for oldest in list(self._passages)[: 1 - PASSAGES_KEPT]:
                del self._passages[oldest]
            self._passages[key] = read_passage(self.model, self.texts[kind].passage(number, PASSAGE_BLOCKS * self.model.config.block))
        return self._passages[key]

    def in_codec(self, codec: str) -> Model:
        """The same network with its cache in another form."""
        if codec not in self._models:
            self._models[codec] = Model(self.model.network, codec)
        return self._models[codec]

    def check(self, name: str, held: bool) -> None:
        """Counts a claim of equality; RuntimeError where it does not hold: then no figure here means anything."""
        if not held:
            raise RuntimeError(f"{name}: bits differ where the engine promises equal ones")
        self.counts[name] = self.counts.get(name, 0) + 1

    # --- running ---

    def run(self, experiments: Experiments, seconds: float, path: Path, say: Callable[[str], None]) -> None:
        """Samples in turn, so that each experiment gets its share of the time; at least one of each. Saved every minute, and at the end."""
        began = told = time.monotonic()
        before = dict(self.counts)
        while True:
            name = min(experiments, key=lambda one: (self.counts.get(one, 0) > 0, self.spent.get(one, 0.0) / experiments[one][0]))
            if self.counts.get(name, 0) > 0 and time.monotonic() - began >= seconds:
                break
            start = time.monotonic()
            experiments[name][1](self, self.counts.get(name, 0))
            self.spent[name] = self.spent.get(name, 0.0) + time.monotonic() - start
            self.counts[name] = self.counts.get(name, 0) + 1
            if time.monotonic() - told > SAVE_SECONDS:
                told = time.monotonic()
                self._save(path, before, began, experiments)
                say(f"{(told - began) / 60:.0f} min  " + ", ".join(f"{one} {self.counts.get(one, 0)}" for one in experiments))
        self._save(path, before, began, experiments)

    # --- file ---

    def _save(self, path: Path, before: dict[str, int], began: float, experiments: Experiments) -> None:
        new = {name: self.counts.get(name, 0) - before.get(name, 0) for name in experiments}
        run = {"minutes": round((time.monotonic() - began) / 60, 1), "samples": new, "machine": machine(), "commit": commit()}
        found = {"format": FORMAT, "about": self.about, "runs": [*self.runs, run | {"torch": torch.__version__}], "counts": self.counts}
        found |= {"bits_per_byte": self.bits_per_byte, "trace": self.trace}
        found |= {"spent": {name: round(value, 1) for name, value in self.spent.items()}, "seconds": self.seconds}
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
        tallies = ",\n".join(f"{json.dumps(name)}: {json.dumps(tally.to_json())}" for name, tally in sorted(self.tallies.items()))
        scratch = path.with_suffix(".new")
        scratch.write_text("{\n" + ",\n".join([*lines, f'"tallies": {{\n{tallies}\n}}']) + "\n}\n")
        scratch.replace(path)

    def load(self, path: Path) -> bool:
        """Takes what the file has, if it is of these weights and texts."""
        found = json.loads(path.read_text())
        if found.get("format") != FORMAT or found.get("about") != self.about:
            return False
        self.runs, self.counts, self.spent, self.seconds = found["runs"], found["counts"], found["spent"], found["seconds"]
        self.bits_per_byte, self.trace = found["bits_per_byte"], found["trace"]
        self.tallies = {name: Tally.from_json(tally) for name, tally in found["tallies"].items()}
        return True


def chosen(name: str, number: int) -> np.random.Generator:
    """Of one sample: the same in every run."""
    return np.random.default_rng([int.from_bytes(name.encode()[:8], "little"), number])
