"""What a study's file says, in the terms the document asks in."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.replay_error.tally import Tally
from kvstore.engine_integration.model.config import SIZES, ModelConfig


class Found:
    def __init__(self, file: Mapping[str, Any]) -> None:
        self.file = file
        self.about: dict[str, Any] = file["about"]
        self.config: ModelConfig = SIZES[self.about["model"]]
        self.tallies = {name: Tally.from_json(tally) for name, tally in file["tallies"].items()}
        self.kinds = list(self.about["texts"])

    def tally(self, name: str) -> Tally:
        """An empty one where nothing of the name was measured."""
        return self.tallies.get(name, Tally())

    def by_number(self, name: str) -> dict[int, Tally]:
        """`name/N` by N."""
        numbers = {
            int(key.rsplit("/", 1)[1]): tally for key, tally in self.tallies.items() if key.rpartition("/")[0] == name and tally.tokens
        }
        return dict(sorted(numbers.items()))

    def by_word(self, name: str) -> dict[str, Tally]:
        return {key.rsplit("/", 1)[1]: tally for key, tally in self.tallies.items() if key.rpartition("/")[0] == name and tally.tokens}

    def seconds(self, way: str) -> dict[int, float]:
        """Median by tokens of context."""
        mine = {int(key.rsplit("/", 1)[1]): values for key, values in self.file["seconds"].items() if key.rpartition("/")[0] == way}
        return {tokens: statistics.median(values) for tokens, values in sorted(mine.items())}

    def checks(self, name: str) -> int:
        return int(self.file["counts"].get(name, 0))
