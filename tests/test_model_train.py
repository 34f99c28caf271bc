"""The training: the network that the model runs, resumable, and it learns. Few steps of `tiny`; real runs take hours (docs/ENGINE.md)."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstore.engine_integration.model import MINI, TINY, tokenizer, weights
from kvstore.engine_integration.model.blocks import Network
from kvstore.engine_integration.model.codecs import CODECS
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.train import corpus, forward, ngram
from kvstore.engine_integration.train.trainer import Recipe, Trainer, bits_per_byte
from kvstore.errors import InputError

pytestmark = pytest.mark.usefixtures("one_torch_thread")
HELDOUT = corpus.HELDOUT.read_bytes()
TEXT = np.frombuffer(HELDOUT, np.uint8).astype(np.uint16)  # any text will do to see a loss fall
RECIPE = Recipe(tokens=128 * 24, long_tokens=128, short_tokens=32, warmup_steps=4, rate=4e-3)


@pytest.mark.parametrize("codec", ["f32", "v41"])
@pytest.mark.parametrize("length, asked", [(16, 16), (80, 80), (128, 100)])
def test_training_sees_the_model_that_serves(codec: str, length: int, asked: int) -> None:
    """Two ways through the network, by layer and by block, and the decoder's start of a prompt: the same logits."""
    model = Model.random(TINY, codec)
    tokens = torch.from_numpy(TEXT[:length].astype(np.int64))[None]
    state = model.begin(asked)
    want = model.feed(state, tokens[0, :asked].tolist())
    with torch.no_grad():
        got = model.network.logits(forward.hidden(model.network, CODECS[codec], tokens, state.decoder_start))[
            0, state.decoder_start : asked
        ]
    assert torch.allclose(got, want, atol=1e-4), (got - want).abs().max()


def test_texts_computed_again_on_the_way_back_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Model.random(TINY).network
    rows = torch.from_numpy(TEXT[:129].astype(np.int64))[None]
    found = []
    for kept in (1024, 64):
        monkeypatch.setattr(forward, "CHECKPOINT_TOKENS", kept)
        network.zero_grad()
        out = network.logits(forward.hidden(network, CODECS["v41"], rows[:, :128], 50))[0, 50:]
        torch.nn.functional.cross_entropy(out, rows[0, 51:]).backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        found.append({name: weight.grad.clone() for name, weight in network.named_parameters() if weight.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 50
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-6) for name in found[0])


def test_a_few_steps_lower_the_loss_and_leave_checkpoint_and_log(tmp_path: Path) -> None:
    trainer = Trainer(TINY, "v41", RECIPE, TEXT, tmp_path)
    before = bits_per_byte(trainer.network, "v41", HELDOUT[:600], 128)
    trainer.run(HELDOUT[:600], log_steps=8, say=lambda line: None)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [8, 16, 24]
    assert lines[-1]["heldout_bits_per_byte"] < before - 1
    served = Network.load(TINY, trainer.checkpoint_path)
    assert math.isclose(bits_per_byte(served, "v41", HELDOUT[:600], 128), lines[-1]["heldout_bits_per_byte"])


def test_a_run_in_two_sittings_is_the_run_in_one(tmp_path: Path) -> None:
    whole = Trainer(TINY, "v41", RECIPE, TEXT, tmp_path / "whole")
    for _ in range(6):
        whole.train_step()
    first = Trainer(TINY, "v41", RECIPE, TEXT, tmp_path / "parts")
    for _ in range(3):
        first.train_step()
    first.save()
    (tmp_path / "parts" / "log.jsonl").write_text('{"step": 3}\n{"step": 4}\n')
    second = Trainer(TINY, "v41", RECIPE, TEXT, tmp_path / "parts")
    assert (tmp_path / "parts" / "log.jsonl").read_text() == '{"step": 3}\n'
    for _ in range(3):
        second.train_step()
    assert second.step == 6 and second.network.digest() == whole.network.digest()
    with pytest.raises(InputError, match="E173"):
        Trainer(TINY, "v41", replace(RECIPE, seed=1), TEXT, tmp_path / "parts")


def test_mini_trains_with_its_draft_layer(tmp_path: Path) -> None:
    trainer = Trainer(MINI, "v41", replace(RECIPE, long_tokens=512, short_tokens=256, tokens=512), TEXT, tmp_path)
    assert 5.0 < trainer.train_step() < 9.0  # ln 264 = 5.6, and a tenth of it again
    draft = trainer.network.draft
    assert draft is not None and draft.join.weight.grad is not None and draft.join.weight.grad.abs().sum() > 0


def test_a_quarter_of_the_tokens_are_long_and_a_share_of_decoders_begin_late(tmp_path: Path) -> None:
    trainer = Trainer(TINY, "v41", RECIPE, TEXT, tmp_path)
    batches = [trainer.batch(step) for step in range(400)]
    assert sum(rows.shape == (1, 129) for rows, _ in batches) == 100
    assert all(rows[:, :-1].numel() == RECIPE.long_tokens for rows, _ in batches)
    assert 60 < sum(start > 0 for _, start in batches) < 140


def test_the_corpus_is_pinned_and_the_held_out_text_is_not_in_it(tmp_path: Path) -> None:
    lines = corpus.MANIFEST.read_text().splitlines()
    paths = [line.split("  ", 1)[1] for line in lines]
    assert paths == sorted(paths) and len(paths) > 450
    assert 150_000 < len(HELDOUT) <= corpus.HELDOUT_BYTES_MAX
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "b.py").write_text("b = 1\n")
    manifest, heldout = corpus.pin(tmp_path)
    assert manifest.endswith("  a.py\n") and manifest.count("\n") == 1 and heldout == b""
    (tmp_path / "pinned").write_text(manifest)
    begin, end = tokenizer.SPECIAL_IDS["begin"], tokenizer.SPECIAL_IDS["end"]
    assert corpus.tokens(tmp_path, tmp_path / "pinned").tolist() == [begin, *b"a = 1\n", end]
    (tmp_path / "a.py").write_text("a = 2\n")
    with pytest.raises(InputError, match=r"E172.*1 files are not those of pinned, the first a.py"):
        corpus.tokens(tmp_path, tmp_path / "pinned")


def test_the_n_gram_is_witten_bells() -> None:
    """Against the formula written out, byte by byte."""
    train, heldout = HELDOUT[:3_000], HELDOUT[3_000:3_400]

    def chance(history: bytes, byte: int) -> float:
        shorter = chance(history[1:], byte) if history else 1 / 256
        after = [train[i + len(history)] for i in range(len(train) - len(history)) if train.startswith(history, i)]
        return (after.count(byte) + len(set(after)) * shorter) / (len(after) + len(set(after))) if after else shorter

    want = sum(-math.log2(chance(heldout[max(0, i - 2) : i], byte)) for i, byte in enumerate(heldout)) / len(heldout)
    assert math.isclose(ngram.bits_per_byte(train, heldout, 3), want)


def test_a_file_of_weights_comes_back_and_a_damaged_one_is_refused_in_a_line(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    weights.save(tmp_path / "w", tensors, {"step": "7"})
    got, meta = weights.load(tmp_path / "w")
    assert meta == {"step": "7"} and all(torch.equal(got[name], tensors[name]) for name in tensors)
    raw = (tmp_path / "w").read_bytes()
    for damaged in (raw[:-1], raw[:5], b"\xff" * 40, raw[:8] + b"{]" + raw[10:], b""):
        (tmp_path / "bad").write_bytes(damaged)
        with pytest.raises(InputError, match="E171"):
            weights.load(tmp_path / "bad")
    with pytest.raises(InputError, match="E170"):
        weights.load(tmp_path / "absent")
    with pytest.raises(InputError, match=r"E174.*'mini'"):
        Network.load(MINI, tmp_path / "w")


def test_the_command_trains_exports_and_says_what_is_wrong(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "a.py").write_text("a = 1\n")
    command = [sys.executable, "-m", "kvstore.engine_integration.train"]
    refused = subprocess.run(
        [*command, "run", "--out", str(tmp_path), "--corpus", str(library)], capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 2 and refused.stdout == "" and refused.stderr.startswith("error[E172] corpus")
    trainer = Trainer(TINY, "v41", RECIPE, TEXT, tmp_path)
    trainer.save()
    from kvstore.engine_integration.train.__main__ import main

    assert main(["export", str(trainer.checkpoint_path), str(tmp_path / "tiny.safetensors")]) == 0
    served = Network.load(TINY, tmp_path / "tiny.safetensors")
    assert torch.allclose(served.head.weight, trainer.network.head.weight, rtol=1e-2)


def test_text_cannot_spell_a_special() -> None:
    assert MINI.vocabulary == tokenizer.VOCABULARY
    assert tokenizer.encode("é<end>") == [0xC3, 0xA9, *b"<end>"]
    assert tokenizer.decode([tokenizer.SPECIAL_IDS["user"], 0xC3, 0xA9, 0xFF, tokenizer.SPECIAL_IDS["end"]]) == "é\ufffd"
