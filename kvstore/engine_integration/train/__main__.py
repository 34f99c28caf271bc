"""Command line of the training: run, evaluate, export, pin. Data on stdout, talk on stderr."""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

from kvstore.errors import KvstoreError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvstore.engine_integration.train", description="Train the bundled model.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="train, going on from OUT/checkpoint.safetensors where there is one")
    run.add_argument("--out", type=Path, required=True, help="directory of checkpoint and log")
    run.add_argument("--size", choices=("mini", "tiny"), default="mini")
    run.add_argument("--codec", choices=("v41", "bf16", "f32"), default="v41", help="what cached rows go through while training")
    run.add_argument("--tokens", type=int, default=20_000_000, help="to train on in all (default: %(default)s)")
    run.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; run again to go on")
    run.add_argument("--finish-seconds", type=float, default=None, help="let the clock decide when rates fall, so that all is done then")
    run.add_argument("--from", dest="begin", type=Path, default=None, help="weights to begin with, where OUT has no checkpoint")
    run.add_argument("--bf16", action="store_true", help="products in bf16, for processors with avx512_bf16 or AMX")
    run.add_argument(
        "--eval-steps", type=int, default=500, help="steps from one look at the held-out text to the next (default: %(default)s)"
    )
    run.add_argument("--seed", type=int, default=0)
    evaluate = verbs.add_parser("evaluate", help="held-out bits per byte of weights, beside a Witten-Bell 5-gram; guesses accepted")
    evaluate.add_argument("weights", type=Path)
    evaluate.add_argument("--size", choices=("mini", "tiny"), default="mini")
    evaluate.add_argument("--codec", choices=("v41", "bf16", "f32"), default="v41")
    evaluate.add_argument("--bytes", type=int, default=None, help="of the held-out text, from its beginning (default: all)")
    export = verbs.add_parser("export", help="weights of a checkpoint as bf16, to be committed")
    export.add_argument("checkpoint", type=Path)
    export.add_argument("file", type=Path)
    pin = verbs.add_parser("pin", help="write corpus.txt and heldout.txt for a library")
    pin.add_argument("--into", type=Path, required=True)
    for verb in (run, evaluate):
        verb.add_argument("--threads", type=int, default=0, help="of torch; 0: as many as it likes")
    for verb in (run, evaluate, pin):
        verb.add_argument(
            "--corpus", type=Path, default=None, help="the library's folder (default: /usr/lib/python3.11, else this interpreter's)"
        )
    asked = parser.parse_args(arguments)
    try:
        return {"run": _run, "evaluate": _evaluate, "export": _export, "pin": _pin}[asked.verb](asked)
    except KvstoreError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _run(asked: argparse.Namespace) -> int:
    from kvstore.engine_integration.model import SIZES
    from kvstore.engine_integration.train import corpus
    from kvstore.engine_integration.train.plan import Recipe
    from kvstore.engine_integration.train.trainer import Trainer

    _threads(asked.threads)
    config = SIZES[asked.size]
    sizes = {"long_tokens": 32 * config.block, "short_tokens": 4 * config.block, "step_tokens": 16 * config.block}
    recipe = Recipe(tokens=asked.tokens, seed=asked.seed, bf16=asked.bf16, **sizes)
    text = corpus.tokens(asked.corpus)
    trainer = Trainer(config, asked.codec, recipe, text[text < config.vocabulary], asked.out, asked.begin)
    print(f"step {trainer.step}, {trainer.progress:.1%} done; checkpoint and log in {asked.out}", file=sys.stderr)
    trainer.run(
        corpus.HELDOUT.read_bytes(),
        seconds=asked.seconds,
        finish_seconds=asked.finish_seconds,
        eval_steps=asked.eval_steps,
        say=partial(print, flush=True),
    )
    return 0


def _evaluate(asked: argparse.Namespace) -> int:
    from kvstore.engine_integration.model import SIZES
    from kvstore.engine_integration.model.blocks import Network
    from kvstore.engine_integration.model.model import Model
    from kvstore.engine_integration.train import corpus, evaluate, ngram

    _threads(asked.threads)
    heldout = corpus.HELDOUT.read_bytes()[: asked.bytes]
    text = corpus.tokens(asked.corpus)
    network = Network.load(SIZES[asked.size], asked.weights)
    found = {
        "heldout_bits_per_byte": evaluate.bits_per_byte(network, asked.codec, heldout, 32 * network.config.block),
        "witten_bell_5gram": ngram.bits_per_byte(text[text < 256].astype("u1").tobytes(), heldout, 5),
        "heldout_bytes": len(heldout),
    }
    if network.draft is not None:
        accepted, made = evaluate.draft_acceptance(Model(network, asked.codec), heldout)
        found |= {"draft_guesses_accepted": accepted / made, "draft_guesses": made}
    print(json.dumps(found))
    return 0


def _export(asked: argparse.Namespace) -> int:
    import torch

    from kvstore.engine_integration.model import weights

    tensors, meta = weights.load(asked.checkpoint)
    kept = {name.removeprefix("weight."): t.to(torch.bfloat16) for name, t in tensors.items() if name.startswith("weight.")}
    weights.save(asked.file, kept, meta)
    return 0


def _pin(asked: argparse.Namespace) -> int:
    from kvstore.engine_integration.train import corpus

    manifest, heldout = corpus.pin(asked.corpus or corpus.library())
    asked.into.mkdir(parents=True, exist_ok=True)
    (asked.into / corpus.MANIFEST.name).write_text(manifest)
    (asked.into / corpus.HELDOUT.name).write_bytes(heldout)
    return 0


def _threads(count: int) -> None:
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")  # a text of 4,096 has more shapes of products than are kept by default
    import torch

    if count:
        torch.set_num_threads(count)


if __name__ == "__main__":
    sys.exit(main())
