"""A model by the name of its size: with the weights that came with kvstore, with a file's, or with random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from kvstore.engine_integration.model import SIZES
from kvstore.engine_integration.model.blocks import Network
from kvstore.engine_integration.model.model import Model

TRAINED: Final = Path(__file__).parent / "model" / "mini.safetensors"


def load_model(size: str, weights: Path | None = None, threads: int = 1) -> tuple[Model, str]:
    """The model, and where its weights come from: a file's name, or "random", whose text is noise and whose cache is as good.

    `threads` is set for the whole process: torch has one number. Raises InputError for a file that is none, or of another size."""
    torch.set_num_threads(threads)
    config = SIZES[size]
    if weights is None and size == "mini" and TRAINED.exists():
        weights = TRAINED
    if weights is None:
        return Model.random(config), "random"
    return Model(Network.load(config, weights)), weights.name
