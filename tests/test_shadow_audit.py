"""The shadow audit finds what a bounded replay changed, within its bounds of memory and time, and tells it to Prometheus."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from client_tools import WAIT_SECONDS, cluster_of
from prometheus_client import generate_latest

from benchmarks.replay_error.probe import answer_logits, begin, deviation, read_passage
from kvstore.client import Client, ClientConfig
from kvstore.engine_integration.engine import Engine, EngineConfig, RequestOptions
from kvstore.engine_integration.engine.audit import Recording, ShadowAudit
from kvstore.engine_integration.model import TINY
from kvstore.engine_integration.model.model import Model
from kvstore.metrics import AUDIT, flat_values, registry_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")
PROMPT, ANSWER = 160, 24
TEXT = [int(token) for token in np.random.default_rng(0).integers(0, 256, PROMPT + ANSWER)]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.random(TINY)


@pytest.fixture(scope="module")
def logits(model: Model) -> dict[str, torch.Tensor]:
    """Of the answer: exact, and after a hit of 128 with its window missed and one replayed."""
    passage = read_passage(model, TEXT)
    starts = {"exact": (128, True), "bounded": (112, False)}
    return {
        name: answer_logits(model, begin(model, passage, PROMPT, 128, start, entry=entry), TEXT, PROMPT, ANSWER)
        for name, (start, entry) in starts.items()
    }


def recorded(audit: ShadowAudit, rows: torch.Tensor, depth: int = 1) -> Recording:
    recording = audit.begin(TEXT[:PROMPT], depth)
    assert recording is not None
    for token, row in zip(TEXT[PROMPT:], rows, strict=True):
        recording.add(token, row)
    return recording


def page(audit: ShadowAudit) -> dict[str, float]:
    return flat_values(registry_of(AUDIT, audit.read))


def test_what_a_bounded_replay_changed_is_measured_in_the_background(model: Model, logits: dict[str, torch.Tensor]) -> None:
    audit = ShadowAudit(model, 1, share=1.0)
    audit.submit(recorded(audit, logits["bounded"], depth=2))
    assert audit.wait(30)
    want = deviation(logits["exact"], logits["bounded"], TEXT[PROMPT:])
    found = page(audit)
    assert found['kvstore_replay_audits_total{result="done"}'] == 1
    assert found['kvstore_replay_error_nats_count{depth="2"}'] == ANSWER
    assert found['kvstore_replay_error_nats_sum{depth="2"}'] == pytest.approx(want.nats.sum()) and want.nats.sum() > 0
    assert found['kvstore_replay_audited_tokens_total{top="changed"}'] == (~want.same_top).sum()
    audit.close()


def test_an_exact_answer_has_no_error_at_all(model: Model, logits: dict[str, torch.Tensor]) -> None:
    audit = ShadowAudit(model, 1, share=1.0)
    audit.submit(recorded(audit, logits["exact"], depth=7))
    assert audit.wait(30)
    found = page(audit)
    assert found['kvstore_replay_error_nats_sum{depth="more"}'] == 0
    assert found['kvstore_replay_error_nats_bucket{depth="more",le="1e-09"}'] == ANSWER
    audit.close()


def test_one_answer_of_n_is_recorded_and_exact_ones_never(model: Model) -> None:
    audit = ShadowAudit(model, 3)
    assert [audit.begin([1], 1) is not None for _ in range(7)] == [True, False, False, True, False, False, True]
    assert audit.begin([1], 0) is None
    assert ShadowAudit(model, 0).begin([1], 1) is None


def test_memory_is_bounded(model: Model, logits: dict[str, torch.Tensor]) -> None:
    audit = ShadowAudit(
        model, 1, share=1e-6, waiting_max=2, tokens_max=5, prompt_tokens_max=PROMPT
    )  # rests for minutes after its first block
    assert audit.begin(TEXT, 1) is None
    for _ in range(5):
        audit.submit(recorded(audit, logits["bounded"]))
    found = page(audit)
    assert found['kvstore_replay_audits_total{result="long"}'] == 1
    assert found['kvstore_replay_audits_total{result="dropped"}'] >= 2  # one is computed, two wait
    assert len(recorded(audit, logits["bounded"]).logits) == 5
    audit.close()
    assert page(audit)['kvstore_replay_audits_total{result="dropped"}'] == 5
    audit.submit(recorded(audit, logits["bounded"]))
    assert page(audit)['kvstore_replay_audits_total{result="dropped"}'] == 6


def test_an_audit_that_fails_is_counted_and_the_next_is_done(model: Model, logits: dict[str, torch.Tensor]) -> None:
    audit = ShadowAudit(model, 1, share=1.0)
    broken = recorded(audit, logits["bounded"])
    broken.prompt[3] = 999
    audit.submit(broken)
    audit.submit(recorded(audit, logits["bounded"]))
    assert audit.wait(30)
    found = page(audit)
    assert (found['kvstore_replay_audits_total{result="failed"}'], found['kvstore_replay_audits_total{result="done"}']) == (1, 1)
    audit.close()


def test_every_series_is_there_before_the_first_audit(model: Model) -> None:
    text = generate_latest(registry_of(AUDIT, ShadowAudit(model, 100).read)).decode()
    assert 'kvstore_replay_error_nats_count{depth="1"} 0.0' in text and 'kvstore_replay_audits_total{result="done"} 0.0' in text


def test_an_engine_audits_what_it_answered_over_a_bounded_replay_and_nothing_else(tmp_path: Path) -> None:
    of = Model.random(replace(TINY, name="drafting", draft_tokens=5))  # with guesses: rows of those that were wrong are not recorded
    config = EngineConfig(audit_every=1, audit_share=1.0)
    with (
        cluster_of(tmp_path) as cluster,
        Client(cluster.map, layout=of.layout, config=ClientConfig(block_tokens=TINY.block, promise_reuse_seconds=0)) as client,
    ):
        with Engine(of, client) as engine:
            engine.submit(TEXT, options=RequestOptions(max_tokens=2)).result(WAIT_SECONDS)
            assert client.flush(WAIT_SECONDS)
        with Engine(of, client, config) as engine:  # a new engine has no window entry
            asked = {
                mode: engine.submit(TEXT, options=RequestOptions(max_tokens=20, resume=mode, store=False)).result(WAIT_SECONDS)
                for mode in ("exact", "bounded", "off")
            }
            assert asked["bounded"].depth == 1 and asked["exact"].depth == 0 and asked["exact"].tokens == asked["off"].tokens
            assert engine.audit.wait(WAIT_SECONDS)
            found = page(engine.audit)
    assert found['kvstore_replay_audits_total{result="done"}'] == 1
    assert found['kvstore_replay_error_nats_count{depth="1"}'] == 20
    passage = read_passage(of, TEXT + asked["bounded"].tokens)
    start = asked["bounded"].cached_tokens
    hit = start + asked["bounded"].replayed_tokens
    told, exact = (
        answer_logits(of, begin(of, passage, len(TEXT), hit, at, entry=at == hit), passage.tokens, len(TEXT), 20) for at in (start, hit)
    )
    want = deviation(exact, told, asked["bounded"].tokens).nats.sum()
    assert found['kvstore_replay_error_nats_sum{depth="1"}'] == pytest.approx(want) and want > 0
