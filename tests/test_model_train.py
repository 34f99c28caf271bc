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
from kvstore.engine_integration.model.attention import compressed_mask, rope_tables, window_mask
from kvstore.engine_integration.model.blocks import Network
from kvstore.engine_integration.model.codecs import CODECS
from kvstore.engine_integration.model.model import Model
from kvstore.engine_integration.model.speculate import DraftLayer
from kvstore.engine_integration.train import corpus, forward, muon, ngram, plan
from kvstore.engine_integration.train.evaluate import bits_of_bytes, bits_per_byte, draft_acceptance
from kvstore.engine_integration.train.plan import Recipe
from kvstore.engine_integration.train.sleep import wake
from kvstore.engine_integration.train.trainer import Trainer
from kvstore.errors import InputError

pytestmark = pytest.mark.usefixtures("one_torch_thread")
HELDOUT = corpus.HELDOUT.read_bytes()
TEXT = np.frombuffer(HELDOUT, np.uint8).astype(np.uint16)  # any text will do to see a loss fall
RECIPE = Recipe(tokens=128 * 24, long_tokens=128, short_tokens=32, step_tokens=128, warmup_steps=4)


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


def _plain(network: Network, tokens: torch.Tensor, start: int) -> torch.Tensor:
    """The decoder's output by the layers that serve, block by block, rows kept as they are."""
    config, size = network.config, network.config.block
    blocks, compressed = list(network.embedding(tokens).chunk(tokens.shape[1] // size, 1)), []
    tables = [rope_tables(config, b) for b in range(len(blocks))]
    for number in range(config.layers):
        source = config.source_of(number)
        if source is not None and config.sources[source][0] == number:
            compressed.append(torch.cat([network.source(source)(x, *at)[0] for x, at in zip(blocks, tables, strict=True)], 1))
        layer, outputs = network.layer(number), []
        begin = start if number >= config.encoder_layers else 0
        rows = [layer.attention.window_rows(x, *at) for x, at in zip(blocks, tables, strict=True)]
        for b, x in enumerate(blocks):
            keys = [rows[b - 1] if b else torch.zeros_like(rows[0]), rows[b]]
            mask = [window_mask(config, b, begin)]
            if source is not None:
                ratio = config.sources[source][1]
                keys.append(compressed[source][:, : (b + 1) * size // ratio])
                mask.append(compressed_mask(config, b, ratio))
            outputs.append(layer(x, *tables[b], torch.cat(keys, 1), torch.cat(mask, 2)) if (b + 1) * size > begin else x)
        blocks = outputs
    return torch.cat(blocks, 1)


@pytest.mark.parametrize("start", [0, 50])
def test_gradients_are_those_of_the_layers_that_serve(start: int) -> None:
    network = Model.random(TINY).network
    rows = torch.from_numpy(TEXT[:258].astype(np.int64)).view(2, 129)
    found = []
    for outputs in (_plain(network, rows[:, :128], start), forward.hidden(network, CODECS["f32"], rows[:, :128], start)):
        network.zero_grad()
        logits = network.logits(outputs)[:, start:].flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, rows[:, start + 1 :].flatten()).backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        found.append({name: weight.grad.clone() for name, weight in network.named_parameters() if weight.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 50
    for name, want in found[0].items():
        assert torch.allclose(found[1][name], want, atol=1e-6, rtol=1e-3), name


def test_products_in_bf16_are_close_to_those_in_f32() -> None:
    network = Model.random(TINY).network
    tokens = torch.from_numpy(TEXT[:128].astype(np.int64))[None]
    with torch.no_grad():
        exact, rough = (forward.hidden(network, CODECS["v41"], tokens, 0, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert 0 < (rough - exact).norm() / exact.norm() < 0.3  # a few rows go to another expert


def test_muon_makes_steps_orthogonal_each_expert_for_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 8, 24), (2, 24, 8)):
        singular = torch.linalg.svdvals(muon.orthogonal(torch.randn(shape, generator=generator)))
        assert singular.min() > 0.5 and singular.max() < 1.3
    assert not muon.orthogonal(torch.zeros(1, 4, 4)).any()
    network = Model.random(TINY).network
    matrices, others = plan.split(network)
    assert len(matrices) + len(others) == len(list(network.parameters()))
    down = network.layer(0).moe.down.weight
    (view,) = (view(weight) for weight, view in matrices if weight is down)
    assert view.shape == (TINY.experts + 1, TINY.d, TINY.inter) and torch.equal(view[1], down[:, TINY.inter : 2 * TINY.inter])
    down.grad = torch.randn(down.shape, generator=generator)
    before = down.detach().clone()
    muon.Muon(matrices, lr=0.5).step()
    moved = (before - down.detach())[:, : TINY.inter] / 0.5
    assert torch.linalg.svdvals(moved).min() > 0.5 and torch.linalg.svdvals(moved).max() < 1.3


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


def test_mini_trains_and_later_its_draft_layer_too(tmp_path: Path) -> None:
    recipe = replace(RECIPE, long_tokens=256, short_tokens=256, step_tokens=256, tokens=512, draft_from=0.5)
    trainer = Trainer(MINI, "v41", recipe, TEXT, tmp_path)
    draft = trainer.network.draft
    assert draft is not None
    assert 5.0 < trainer.train_step() < 8.0  # ln 264 = 5.6
    assert draft.join.weight.grad is None
    trainer.train_step()
    assert draft.join.weight.grad is not None and draft.join.weight.grad.abs().sum() > 0


def test_a_quarter_of_the_tokens_are_long_and_a_share_of_decoders_begin_late(tmp_path: Path) -> None:
    recipe = replace(RECIPE, tokens=128 * 400, truncated_share=0.25)
    trainer = Trainer(TINY, "v41", recipe, TEXT, tmp_path)
    batches = [trainer.batch(step) for step in range(400)]
    long = [rows.shape == (1, 129) for rows, _ in batches]
    assert 98 <= sum(long) <= 102 and not any(long[:133]) and sum(long[:266]) < 60
    assert all(rows[:, :-1].numel() == 128 for rows, _ in batches)
    assert batches[0][0].shape == (8, 17) and batches[100][0].shape == (4, 33)
    assert 60 < sum(start > 0 for _, start in batches) < 140


def test_texts_of_one_length_do_not_overlap_until_all_was_seen() -> None:
    texts = plan.Plan(replace(RECIPE, tokens=1 << 30), 1_000)
    count = (1_000 - 1) // 32 - 1
    first = np.concatenate([texts.texts(step)[0] for step in range(count // 4)])
    assert len(set(first.tolist())) == len(first) == 8 * (count // 4) and not (np.diff(np.sort(first)) % 16).any()
    assert first.min() >= 0 and first.max() + 17 <= 1_000
    late = [texts.texts(step)[0] for step in (0, count, 2 * count)]
    assert not np.array_equal(np.sort(late[0]), np.sort(late[1]))


def test_half_of_the_layers_sleep_at_first_and_wake_without_a_jump(tmp_path: Path) -> None:
    trainer = Trainer(TINY, "v41", replace(RECIPE, wake_at=0.25), TEXT, tmp_path / "first")
    assert trainer.asleep == {2, 3, 5, 7}
    for _ in range(6):
        assert trainer.asleep
        trainer.train_step()
    sleeping = trainer.network.layer(2)
    assert sleeping.attention.q.weight.grad is None and not sleeping.attention.out.weight.any() and not sleeping.moe.down.weight.any()
    trainer.save()
    again = Trainer(TINY, "v41", replace(RECIPE, wake_at=0.25), TEXT, tmp_path / "first")
    assert again.asleep == trainer.asleep
    before = bits_per_byte(trainer.network, "v41", HELDOUT[:200], 128)
    wake(trainer.network, trainer.asleep)
    assert bits_per_byte(trainer.network, "v41", HELDOUT[:200], 128) == before
    for one in (trainer, again):
        one.train_step()
    assert not again.asleep and again.network.digest() == trainer.network.digest()
    assert again.network.layer(2).attention.out.weight.any()


def test_the_clock_can_end_a_run_and_weights_can_begin_another(tmp_path: Path) -> None:
    first = Trainer(TINY, "v41", RECIPE, TEXT, tmp_path / "first")
    first.run(HELDOUT[:200], finish_seconds=1e-9, say=lambda line: None)
    assert first.step == 1 and first.progress == 1.0
    assert RECIPE.rate_at(100, 0.5) == 1.0 and math.isclose(RECIPE.rate_at(100, 0.8), 0.5) and RECIPE.rate_at(100, 1.0) == 0.0
    assert RECIPE.rate_at(0, 0.0) == 0.25
    again = Trainer(TINY, "v41", RECIPE, TEXT, tmp_path / "again", begin=first.checkpoint_path)
    assert again.step == 0 and again.network.digest() == first.network.digest()


def test_every_byte_is_counted_once_with_what_was_before_it() -> None:
    network = Model.random(TINY).network
    bits = bits_of_bytes(network, "f32", HELDOUT[:300], 128)
    assert bits.shape == (299,)
    whole = bits_of_bytes(network, "f32", HELDOUT[:300], 304)
    assert torch.allclose(bits[:128], whole[:128], atol=1e-3) and (bits - whole).abs().max() < 6


def test_draft_acceptance_is_that_of_a_guesser_that_knows_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.random(replace(MINI, encoder_layers=2, decoder_layers=1, sources=((1, 2), (2, 1)), index_sources=()), "f32")
    accepted, made = draft_acceptance(model, HELDOUT[:900], probes=4)
    assert made == 20 and 0 <= accepted <= made
    asked: list[int] = []

    def first_right(self: DraftLayer, position: int, output: torch.Tensor, token: int, count: int) -> list[int]:
        assert token == HELDOUT[position + 1]
        asked.append(position)
        text = list(HELDOUT[: position + 2])
        right = int(model.feed(model.begin(len(text)), text)[-1].argmax())
        return [right, *[-1 % 256] * (count - 1)]

    monkeypatch.setattr(DraftLayer, "guess", first_right)
    assert draft_acceptance(model, HELDOUT[:900], probes=4) >= (4, 20)
    assert len(asked) == 4 and np.ptp(np.diff(asked)) == 0


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


def test_the_weights_that_come_with_the_package_read_text_they_never_saw() -> None:
    model = Model.mini()
    assert bits_per_byte(model.network, "v41", HELDOUT[:20_000], 1_024) <= 1.95  # in short texts, which is faster


def test_text_cannot_spell_a_special() -> None:
    assert MINI.vocabulary == tokenizer.VOCABULARY
    assert tokenizer.encode("é<end>") == [0xC3, 0xA9, *b"<end>"]
    assert tokenizer.decode([tokenizer.SPECIAL_IDS["user"], 0xC3, 0xA9, 0xFF, tokenizer.SPECIAL_IDS["end"]]) == "é\ufffd"
