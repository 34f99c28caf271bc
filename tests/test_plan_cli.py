"""`kvstore plan`, typed as people type it: answers, JSON, plots, the document, and one clear line where the input is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.cli.main import main
from kvstore.plan.accesses import of_requests
from kvstore.plan.routing import conversations, decode_gain_blocks, local_hits, predecessors, random_hosts, sticky_hosts
from kvstore.replay.requests import Request, runs_of
from tests.plan_tools import CONVERSATION, WEKA, conversation, weka, write_log

Capture = pytest.CaptureFixture[str]


def answer(capsys: Capture, *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["schema"] == "kvstore.plan/1"
    return found


def test_the_first_screen_says_what_to_buy_and_why(capsys: Capture) -> None:
    assert main(["plan", str(CONVERSATION), "--requests", "3000", "--policy", "lru,s3fifo"]) == 0
    out = capsys.readouterr().out
    for words in ("of tokens repeat", "binding: stripe", "buy       13 nodes", "s3fifo", "NODES LOST"):
        assert words in out
    assert "COST" not in out, "nobody named a price"


def test_who_names_no_traffic_and_no_price_is_told_how(capsys: Capture) -> None:
    assert main(["plan", str(CONVERSATION), "--requests", "3000"]) == 0
    told = capsys.readouterr().err
    assert "the source's own pace" in told and "--tokens-a-day" in told and "--price tb_month" in told
    prices = [word for each in ("tb_month=20", "gpu_hour=2.5", "prefill_tokens_per_second=8000") for word in ("--price", each)]
    assert main(["plan", str(CONVERSATION), "--requests", "3000", "--tokens-a-day", "200G", *prices]) == 0
    found = capsys.readouterr()
    assert "hint" not in found.err and "COST" in found.out


def test_a_retention_without_a_unit_is_refused_not_taken_for_seconds(capsys: Capture) -> None:
    assert main(["plan", str(CONVERSATION), "--keep", "3"]) == 2
    assert 'error[E102] --keep "3" has no unit' in capsys.readouterr().err


def test_json_holds_the_published_figures(capsys: Capture) -> None:
    data = answer(capsys, str(CONVERSATION), "--block-tokens", "512", "--policy", "lru", "--capacity", "5%,10%")["data"]
    assert round(100 * data["ideal_hit_ratio"], 3) == 37.362
    assert [round(row["hit_ratio_by_retention_seconds"]["300"], 3) for row in data["grid"]] == [0.199, 0.284]
    assert [policy["hit_ratio"] for policy in data["policies"]] == pytest.approx([row["hit_ratio"] for row in data["grid"]])
    assert data["loss_points"]["2"]["at_once"] == 0
    assert data["window_hit_ratios"] == {}  # its ids end at multiples of 512 tokens


def test_window_entries_are_looked_for_where_ids_end_at_each_block(capsys: Capture) -> None:
    data = answer(capsys, str(WEKA), "--requests", "3000")["data"]
    assert 0.85 < data["window_hit_ratios"]["180"] < 1


def test_a_log_is_planned_like_its_trace_and_a_sampled_one_knows_its_limits(capsys: Capture, tmp_path: Path) -> None:
    trace = conversation(128)
    for name, sample in (("whole", 1.0), ("part", 0.3)):
        (tmp_path / name).mkdir()
        write_log(tmp_path / name, trace, sample=sample)
    whole, part = (answer(capsys, str(tmp_path / name))["data"] for name in ("whole", "part"))
    assert round(100 * whole["ideal_hit_ratio"], 3) == 37.356
    assert part["sample"] == 0.3
    assert part["ideal_hit_ratio"] == pytest.approx(whole["ideal_hit_ratio"], abs=0.01)
    assert [row["hit_ratio"] for row in part["grid"]] == pytest.approx([row["hit_ratio"] for row in whole["grid"]], abs=0.02)
    assert all(row["band_points"] > 0 for row in part["grid"][:-1])
    assert main(["plan", str(tmp_path / "part"), "--policy", "all"]) == 2
    assert "E140" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "whole"), "--explain", str(tmp_path / "a.md")]) == 2
    assert "E142" in capsys.readouterr().err


def test_the_smallest_sources_are_planned_or_refused(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"t": 5, "s": 1, "in": 130, "out": 1, "runs": [[7, 1]]}
    path.write_text(json.dumps(line) + "\n")
    assert answer(capsys, str(path), "--policy", "all")["data"]["ideal_hit_ratio"] == 0
    assert main(["plan", str(path), "--explain", str(tmp_path / "a.md")]) == 2
    assert "too few to explain" in capsys.readouterr().err
    path.write_text(json.dumps({**line, "in": 100, "runs": []}) + "\n")
    assert main(["plan", str(path)]) == 2
    assert "E111" in capsys.readouterr().err


def test_a_sample_shows_its_band(capsys: Capture) -> None:
    assert main(["plan", str(CONVERSATION), "--sample", "0.2"]) == 0
    out = capsys.readouterr().out
    assert "sampled at" in out
    assert "±" in out


def test_traffic_and_prices_scale_the_purchase(capsys: Capture, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text("tb_month = 20\ngpu_hour = 2\nprefill_tokens_per_second = 8000\n")
    words = (
        str(CONVERSATION),
        "--requests",
        "4000",
        "--tokens-a-day",
        "20T",
        "--prices",
        str(prices),
        "--plot",
        str(tmp_path / "plan.svg"),
    )
    data = answer(capsys, *words, "--nodes", "10x4TB+10x8TB")["data"]
    bought = next(choice for choice in data["choices"] if choice["name"] == "buy")
    assert bought["money"]["net"] == pytest.approx(bought["money"]["gpu_saved"] - bought["money"]["storage_cost"])
    assert bought["nodes"] > 13
    assert data["judged"]["weights as sizes"]["hit_ratio"] > 0
    assert (tmp_path / "plan.svg").read_text().count("LRU") >= 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([str(CONVERSATION), "--policy", "mru"], "E131"),
        ([str(CONVERSATION), "--sample", "2"], "E131"),
        ([str(CONVERSATION), "--capacity", "0%"], "E131"),
        ([str(CONVERSATION), "--capacity", "big"], "E102"),
        ([str(CONVERSATION), "--keep", "soon"], "E102"),
        ([str(CONVERSATION), "--tokens-a-day", "lots"], "E132"),
        ([str(CONVERSATION), "--tokens-a-day", "1T", "--scale", "2"], "E140"),
        ([str(CONVERSATION), "--plot", "a.pdf"], "E140"),
        ([str(CONVERSATION), "--plot", "nowhere/a.svg"], "E100"),
        ([str(CONVERSATION), "--nodes", "3x4TB"], "E103"),
        ([str(CONVERSATION), "--price", "gold=3"], "E101"),
        ([str(CONVERSATION), str(WEKA)], "E140"),
        ([str(CONVERSATION), "--variant", "busy1h"], "E111"),
        (["no-such-trace.jsonl"], "E111"),
    ],
)
def test_what_cannot_be_planned_is_told_in_one_line(words: list[str], code: str, capsys: Capture) -> None:
    assert main(["plan", *words]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert err[-1].startswith(f"error[{code}]")
    assert "Fix: " in err[-1]


def test_goals_that_no_number_of_nodes_reaches_exit_1(capsys: Capture) -> None:
    data = answer(capsys, str(CONVERSATION), "--requests", "2000", "--node-writes", "0", code=1)["data"]
    assert data["needed_nodes"]["wear"] is None


@pytest.mark.timeout(300)
def test_the_document_is_what_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(CONVERSATION.parent.parent)
    target = tmp_path / "HIT_RATE.md"
    sources = [str(path.relative_to(CONVERSATION.parent.parent)) for path in (CONVERSATION, WEKA)]
    assert main(["plan", *sources, "--explain", str(target)]) == 0
    kept = Path("docs/HIT_RATE.md")
    assert target.read_text().replace(str(target), str(kept)) == kept.read_text()
    for name in ("parts", "capacity", "retention"):
        assert (tmp_path / f"hit_rate_{name}.svg").read_bytes().startswith(b"<?xml")


def test_one_shared_cache_hits_no_less_than_many_of_single_hosts() -> None:
    accesses = conversation(512)
    shared, stored = local_hits(accesses, np.zeros(accesses.requests, np.int64), 1)
    assert int(accesses.hit_tokens(shared).sum()) == 54_098_411
    assert stored == accesses.unique
    for route in (random_hosts, sticky_hosts):
        hits, copies = local_hits(accesses, route(accesses, 8), 8)
        assert (hits <= shared).all()
        assert copies >= stored


def turn(now: int, ids: list[int], rest: int, out: int) -> Request:
    return Request(now, len(ids) * 128 + rest, out, runs_of(ids) if ids else ())


def test_turns_are_told_from_prompts_that_only_begin_alike() -> None:
    requests = [
        turn(0, [0], 0, 0),  # a system prompt alone
        turn(1, [0, 1, 2], 100, 300),  # goes on with it
        turn(2, [0, 5], 3, 10),  # begins alike
        turn(3, [0, 1, 2, 6, 7, 8, 9], 0, 10),  # the second one's next turn
        turn(4, [0, 5, 10], 0, 0),  # the third one's
    ]
    accesses = of_requests(requests, 128)
    assert predecessors(accesses).tolist() == [-1, 0, -1, 1, 2]
    assert conversations(accesses).tolist() == [0, 0, 2, 0, 2]
    # The answer of 300 tokens after 3 x 128 + 100 ends three blocks on; that of 10 tokens fills none.
    assert decode_gain_blocks(accesses, np.array([0, 1, 1, 3, 2])).tolist() == [0, 0, 0, 3, 0]


def test_a_trace_that_numbers_its_conversations_is_believed() -> None:
    accesses = weka()
    assert np.array_equal(conversations(accesses), accesses.sessions)
