"""The demo, end to end: what it promises is checked by the demo itself; here, that it says so, cleans up, and refuses what it must."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.main import main

HEAD = Path(__file__).parent / "data" / "mooncake_head.jsonl"
STEPS = ["nodes", "warm", "kill", "degraded", "restart", "recovering", "read back", "hits", "loads", "stores"]


def check(data: dict[str, Any], requests: int) -> None:
    steps, whole, phases, again = data["steps"], data["whole"], data["phases"], data["read_back"]
    assert [step["name"] for step in steps] == STEPS and all(step["ok"] for step in steps)
    assert whole["requests"] == requests == sum(phase["requests"] for phase in phases.values())
    assert whole["wrong_bytes"] == again["wrong_bytes"] == 0 < again["checked_bytes"]
    degraded = phases["degraded"]
    assert degraded["store_outcomes"]["degraded"] > 0 and degraded["decodes"] > 0
    assert data["disk_bytes"] < 4_000_000_000


def check_engine(data: dict[str, Any]) -> None:
    assert [step["name"] for step in data["steps"]] == ["engine", "cold", "warm", "exact", "bounded", "two down"]
    assert all(step["ok"] for step in data["steps"]) and data["weights"] == "random"
    turns = data["turns"]
    assert {name: len(script) for name, script in turns["warm"].items()} == {"chat 1": 3, "chat 2": 3, "chat 3": 3, "agent": 3}
    assert {script[-1]["window"] for script in turns["two down"].values()} == {"hit"}
    assert turns["warm"]["agent"][-1]["cached_tokens"] > 300 and turns["exact"]["agent"][-1]["replayed_tokens"] > 0


def test_a_python_without_torch_shows_the_store_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "few.jsonl").write_text("".join(HEAD.read_text().splitlines(keepends=True)[:5]))
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else real(name))
    assert main(["demo", "--trace", str(tmp_path / "few.jsonl"), "--data", str(tmp_path / "demo")]) == 0
    said = capsys.readouterr().out
    assert "skip  engine     torch is not installed: pip install 'kvstore[engine]'" in said and "every promise kept" in said


def test_a_short_demo_keeps_every_promise_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "demo"
    assert main(["demo", "--trace", str(HEAD), "--data", str(place), "--json", "--model", "tiny"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    check(data, 40)
    check_engine(data["engine"])
    assert not place.exists()


@pytest.mark.long
def test_the_demo_keeps_every_promise_and_its_table_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    said = capsys.readouterr().out
    assert "every promise kept" in said and "FAIL" not in said
    for row in ("requests", "hit tokens", "wrong bytes", "decodes", "degraded stores", "load p50 / p99 ms"):
        assert f"\n{row} " in said


def test_kept_data_is_named_and_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "few.jsonl").write_text("".join(HEAD.read_text().splitlines(keepends=True)[:5]))
    place = tmp_path / "demo"
    assert main(["demo", "--trace", str(tmp_path / "few.jsonl"), "--data", str(place), "--keep", "--no-engine"]) == 0
    assert f"data kept in {place}" in capsys.readouterr().out
    assert len(list(place.glob("node-*/*"))) >= 12


def test_a_directory_with_anything_in_it_is_refused_and_untouched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").write_text("data")
    assert main(["demo", "--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error[E143] ")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_demo_that_is_told_to_stop_stops_its_daemons_and_leaves_nothing(signum: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore", "demo", "--data", str(tmp_path / "demo")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if " ok  nodes " in line:
                break
        daemons = [int(path.read_text()) for path in (tmp_path / "demo").glob("node-*.pid")]
        assert len(daemons) == 12
        demo.send_signal(signum)
        _, said = demo.communicate(timeout=60)
    assert demo.returncode == 130 and "interrupted" in said
    assert not (tmp_path / "demo").exists()
    assert not [pid for pid in daemons if Path(f"/proc/{pid}").exists()]
