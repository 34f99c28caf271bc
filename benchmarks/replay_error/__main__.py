"""`python -m benchmarks.replay_error [--weights FILE] [--size smoke|small|full] [--minutes N] [--out DIRECTORY] [--report-only]`.

Measures what bounded replay changes and writes REPLAY_ERROR.md, replay_error*.svg and replay_error.json. A run adds its samples to those in
the file, if it is of the same weights and texts. Exit: 0, 2 bad usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import ROOT
from benchmarks.replay_error.texts import texts
from kvstore.errors import KvstoreError

MINUTES: Final = {"smoke": 0.0, "small": 10.0, "full": 120.0}
BUNDLED: Final = ROOT / "kvstore" / "engine_integration" / "model" / "mini.safetensors"
RANDOM: Final = "**random**: no training, so the figures say nothing about any model"
HELDOUT_BYTES: Final = 16_000  # of each text, that bits per byte are measured on: ten seconds of one core; `train evaluate` takes all


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay_error", description="Measures what bounded replay changes.")
    parser.add_argument("--weights", type=Path, help="file of weights, or a checkpoint (default: the bundled ones; without, random ones)")
    parser.add_argument("--model", choices=("mini", "tiny"), default="mini", help="size of the model (default: %(default)s)")
    parser.add_argument("--size", choices=MINUTES, default="small", help="one sample of each experiment, 10 minutes, 2 hours")
    parser.add_argument("--minutes", type=float, help="instead of a size: how long to add samples")
    parser.add_argument("--prose", type=Path, help="file of prose (default: the licence texts in /usr/share/common-licenses)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="directory to write to (default: docs)")
    parser.add_argument("--report-only", action="store_true", help="write text and plots from the file, measure nothing")
    asked = parser.parse_args(arguments)
    file = asked.out / "replay_error.json"
    try:
        from benchmarks.replay_error.report import write_report

        if not asked.report_only:
            _measure(asked, file)
        write_report(file, asked.out)
    except KvstoreError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{asked.out / 'REPLAY_ERROR.md'}", flush=True)
    return 0


def _measure(asked: argparse.Namespace, file: Path) -> None:
    import torch

    from benchmarks.replay_error.costs import trace_facts
    from benchmarks.replay_error.experiments import EXPERIMENTS
    from benchmarks.replay_error.probe import bits_per_byte
    from benchmarks.replay_error.study import Study
    from kvstore.engine_integration.model import SIZES
    from kvstore.engine_integration.model.blocks import Network
    from kvstore.engine_integration.model.model import Model

    torch.set_num_threads(1)
    config = SIZES[asked.model]
    weights = asked.weights or (BUNDLED if asked.model == "mini" and BUNDLED.exists() else None)
    if weights:
        model = Model(Network.load(config, weights))
    else:
        model = Model.random(config)
    read = texts(asked.prose)
    about: dict[str, Any] = {
        "model": asked.model,
        "weights": model.network.digest().hex()[:16],
        "origin": _origin(weights) if weights else RANDOM,
        "texts": {kind: f"{text.digest}, {len(text.raw):,} bytes" for kind, text in read.items()},
    }
    study = Study(model, read, about)
    if file.exists() and not study.load(file):
        _say(f"{file.name} is of other weights or texts: begun anew")
    if not study.bits_per_byte:
        heldout = {kind: list(text.raw[: 600 if asked.size == "smoke" else HELDOUT_BYTES]) for kind, text in read.items()}
        study.bits_per_byte = {kind: round(bits_per_byte(model, tokens), 4) for kind, tokens in heldout.items()}
    if not study.trace:
        study.trace = trace_facts(500 if asked.size == "smoke" else None)
    told = ", ".join(f"{bits:.3f} bits per byte of {kind}" for kind, bits in study.bits_per_byte.items())
    _say(f"weights  {about['weights']}, {about['origin']}; {told}")
    minutes = MINUTES[asked.size] if asked.minutes is None else asked.minutes
    asked.out.mkdir(parents=True, exist_ok=True)
    study.run(EXPERIMENTS, minutes * 60, file, _say)


def _origin(weights: Path) -> str:
    """What the file's metadata says of the training."""
    from kvstore.engine_integration.model.weights import load

    tokens = load(weights)[1].get("tokens")
    return f"trained on {int(tokens):,} tokens" if tokens else "trained, on how many tokens the file does not say"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
