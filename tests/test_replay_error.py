"""The measurement of docs/REPLAY_ERROR.md: its runs are those the engine plans, its sums are right, and it runs to a document."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.replay_error.__main__ import main
from benchmarks.replay_error.format import flowed, nats
from benchmarks.replay_error.probe import answer_logits, begin, deviation, read_passage
from benchmarks.replay_error.tally import Tally, interval
from kvstore.engine_integration.model import TINY, plan_resume
from kvstore.engine_integration.model.model import Model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TEXT = [int(token) for token in np.random.default_rng(0).integers(0, 256, 400)]


def test_runs_are_those_the_engine_plans() -> None:
    model = Model.random(TINY)
    passage = read_passage(model, TEXT)
    prompt = 300
    for entries, mode, windows in [(set(passage.entries), "exact", 1), ((), "exact", 1), ((), "bounded", 1), ((), "bounded", 2)]:
        plan = plan_resume(TINY, prompt, len(passage.blocks), entries, mode=mode, bounded_windows=windows)  # type: ignore[arg-type]  # one of the two
        planned = model.begin(prompt, plan, passage.blocks, passage.entries.get(plan.start_tokens))
        ours = begin(model, passage, prompt, plan.blocks_end_tokens, plan.start_tokens, entry=plan.entry)
        want = answer_logits(model, planned, TEXT, prompt, 20)
        assert torch.equal(answer_logits(model, ours, TEXT, prompt, 20), want)
        cold = answer_logits(model, model.begin(prompt), TEXT, prompt, 20)
        assert torch.equal(want, cold) is not plan.approximate


def test_a_passage_read_from_the_middle_is_the_passage_read_from_the_start() -> None:
    model = Model.random(TINY)
    base = read_passage(model, TEXT)
    changed = TEXT[:150] + TEXT[:50] + TEXT[200:]
    again, fresh = read_passage(model, changed, base, 150), read_passage(model, changed)
    assert np.array_equal(again.blocks, fresh.blocks) and again.entries == fresh.entries


def test_nats_are_those_of_the_definition() -> None:
    exact, other = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    found = deviation(exact, other, [1, 0])
    p = np.exp(exact[0].double().numpy()) / np.exp(exact[0].double().numpy()).sum()
    assert found.nats[0] == pytest.approx((p * np.log(p / p[::-1])).sum()) and found.nats[1] == 0
    assert found.nll[0] == pytest.approx(1.0) and list(found.same_top) == [False, True] and found.first_difference == 0


def test_tallies_keep_tails_and_add_up_over_runs() -> None:
    tally = Tally()
    logits = torch.zeros(200, 8, dtype=torch.float64)
    for sample in range(5):
        moved = logits.clone()
        moved[:10, 0] = 1e-3 * (sample + 1)
        tally.add(deviation(logits, moved, [0] * 200))
        tally = Tally.from_json(json.loads(json.dumps(tally.to_json())))
    assert (tally.tokens, tally.samples, tally.zeros) == (1000, 5, 950)
    assert tally.percentile(90) == 0 and 0 < tally.percentile(99) <= tally.percentile(99.9) == tally.greatest
    assert tally.greatest == pytest.approx(max(tally.lists["nats_max"]), rel=1e-3)
    low, high = interval(tally.lists["nats"])
    assert min(tally.lists["nats"]) <= low < tally.mean_nats < high <= max(tally.lists["nats"])
    assert tally.exceeding()[1][0] == 0.05


@pytest.mark.timeout(300)
def test_a_study_is_gone_on_with_and_written_as_a_document(tmp_path: Path) -> None:
    arguments = ["--model", "tiny", "--size", "smoke", "--out", str(tmp_path)]
    assert main(arguments) == 0
    first = json.loads((tmp_path / "replay_error.json").read_text())
    assert min(first["counts"].values()) == 1 and first["tallies"]["replay/code/16"]["greatest"] > 0
    text = (tmp_path / "REPLAY_ERROR.md").read_text()
    assert "**random**: no training" in text and "nan" not in text.lower().replace("finance", "")
    for picture in ("length", "tails", "suffix", "depth"):
        assert f"replay_error_{picture}.svg" in text and (tmp_path / f"replay_error_{picture}.svg").stat().st_size > 5_000
    assert main([*arguments, "--minutes", "0.001"]) == 0
    second = json.loads((tmp_path / "replay_error.json").read_text())
    assert len(second["runs"]) == 2 and sum(second["counts"].values()) > sum(first["counts"].values())


def test_numbers_and_paragraphs_read_well() -> None:
    assert [nats(value) for value in (0, 3.14e-7, 0.1234, 2.0)] == ["0", "3.1e-7", "0.12", "2"]
    assert (
        flowed("# A\n\none\ntwo\n\n- three\n  four\n- five\n\n| a |\n| b |") == "# A\n\none two\n\n- three four\n- five\n\n| a |\n| b |\n"
    )
