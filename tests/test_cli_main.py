"""The command's rules that hold for all commands: errors, exit codes, the envelope, settings, colour, crash files."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_tool import ROOT, Cli
from server_tools import until

from kvstore.cli import up
from kvstore.cli.codes import ERRORS, HEALTH, RANGES
from kvstore.cli.flags import fabric_of
from kvstore.cli.main import COMMANDS, main
from kvstore.cli.misses import MISSES
from kvstore.config import load_settings
from kvstore.errors import ConfigError
from kvstore.metrics import MISS_REASONS
from kvstore.server.config import NodeConfig
from kvstore.units import format_seconds
from kvstore.version import described


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def test_help_teaches_with_examples_and_lists_commands(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    ran = cli.run("--help")
    assert ran.code == 0 and "start here:" in ran.stdout and "exit codes:" in ran.stdout
    assert cli.run().stdout == ran.stdout, "no arguments: the same help"
    for command in COMMANDS:
        if f"\n    {command} " in ran.stdout:
            with pytest.raises(SystemExit) as ended:
                main([command, "--help"])  # in this process: thirty more starts would show nothing new
            assert not ended.value.code
            text = capsys.readouterr().out
            assert "examples:" in text and "--json" in text, command
    assert "\n    explain " in ran.stdout


def test_version_names_the_version(cli: Cli) -> None:
    assert cli.run("--version").stdout.startswith("kvstore 0.")
    for words in ("--version --json", "--json --version"):
        envelope = cli.run(*words.split()).json
        assert envelope["schema"] == "kvstore.version/1" and envelope["ok"] and envelope["data"]["version"] == envelope["version"]
        assert envelope["data"]["revision"]


def test_a_version_without_a_known_commit_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.version.revision", lambda: "unknown")
    assert re.fullmatch(r"kvstore [0-9.]+", described())


def test_a_wrong_command_or_flag_is_one_line_with_a_fix(cli: Cli) -> None:
    cli.run("explan").refused(2, 'no command "explan"', 'did you mean "explain"?')
    cli.run("plan", "x", "--foo").refused(2, "unrecognized arguments: --foo. Fix: kvstore plan --help")
    cli.run("stauts").refused(2, 'no command "stauts"', 'did you mean "status"?')
    cli.run("explain", "NODE_LOST").refused(2, 'no code "NODE_LOST"', "Fix: ")
    cli.run("explain", "node_lost").refused(2, 'no code "node_lost"', "Fix: ")
    cli.run("explain", "--bogus", "E101").refused(2, "--bogus")
    cli.run("explain").refused(2, "required")
    cli.run("explain", "a", "b", "c").refused(2, "3 arguments")


def test_a_failure_with_json_is_an_envelope_too(cli: Cli) -> None:
    for arguments in (["explain", "--json", "NOTHING"], ["--json", "explain", "NOTHING"]):
        ran = cli.run(*arguments)
        assert ran.code == 2 and ran.stderr == "" and ran.stdout.count("\n") == 1
        envelope = ran.json
        assert envelope["schema"] == "kvstore.explain/1" and envelope["ok"] is False and envelope["data"] is None
        assert envelope["error"]["code"] == "E140" and envelope["error"]["fix"].startswith("known here")
        assert envelope["time"].endswith("Z") and envelope["version"].startswith("0.")
    assert cli.run("--json", "explan").json["error"]["code"] == "E140"


def test_quiet_success_with_json_has_data_and_no_error(cli: Cli) -> None:
    envelope = cli.run("explain", "node_down", "--json").json
    assert set(envelope) == {"schema", "time", "version", "cluster", "epoch", "ok", "health", "data", "error"}
    assert envelope["ok"] is True and envelope["error"] is None and envelope["data"]["code"] == "NODE_DOWN"


def test_no_colour_off_a_terminal_unless_forced_and_the_flag_wins(cli: Cli) -> None:
    bold = "\x1b["
    assert bold not in cli.run("explain", "E107").stdout
    assert bold in cli.run("explain", "E107", FORCE_COLOR="1").stdout
    assert bold not in cli.run("explain", "E107", FORCE_COLOR="1", NO_COLOR="1").stdout
    assert bold in cli.run("explain", "E107", "--color", "always", NO_COLOR="1").stdout
    assert bold not in cli.run("explain", "E107", "--color", "never", FORCE_COLOR="1").stdout


def test_a_bug_of_ours_leaves_a_crash_file_and_exit_70(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import kvstore.cli.explain as e\ndef boom(args): raise RuntimeError('boom at last')\ne.run = boom\n"
    )
    ran = cli.run("explain", "E101", PYTHONPATH=f"{tmp_path}:{cli.environ['PYTHONPATH']}")
    ran.refused(70, "E999", "boom at last", "crash-")
    crash = next((tmp_path / ".local/state/kvstore").glob("crash-*.txt"))
    assert "Traceback" in crash.read_text() and "explain E101" in crash.read_text()


def test_a_reader_that_goes_away_is_no_error(cli: Cli) -> None:
    process = subprocess.Popen(cli.command("--help"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(cli.environ))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(30) in (0, 120)
    process.stderr.close()


def test_settings_come_from_flag_then_environment_then_file_then_default(tmp_path: Path) -> None:
    path = tmp_path / "kvstore" / "config.toml"
    path.parent.mkdir()
    path.write_text('nodes = 3\ntimeout = "2m"\ncapacity = "1GiB"\n')
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "KVSTORE_NODES": "4", "KVSTORE_IO": "direct"}
    got = load_settings({"io": "buffered"}, environ)
    assert (got["nodes"], got["timeout"], got["capacity"], got["io"], got["port"]) == (4, 120.0, 2**30, "buffered", 7400)
    origins = [got.origin(name) for name in ("nodes", "timeout", "io", "port")]
    assert origins == ["KVSTORE_NODES", f"{path}:2", "--io", "default"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("node = 3", ':1: unknown key "node". Fix: did you mean "nodes"?'),
        ("nodes = 0", ':1: "0". Fix: write a whole number from 1 to 128'),
        ('\ncapacity = "4T8"', ':2: size "4T8" is not a size. Fix: write it as 4.8TB or 4.8TiB'),
        ('io = "fast"', "write one of auto, buffered, direct"),
        ('class = "Chat Prod"', "use a-z, 0-9, -"),
        ("nodes = = 3", "is not TOML"),
        ("nodes = " + "9" * 5000, "number too long"),
        ("map = " + "[" * 5000 + "]" * 5000, "nested too deep"),
    ],
)
def test_a_bad_configuration_file_names_line_and_fix(cli: Cli, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    cli.run("explain", "E101", "--config", "c.toml").refused(2, says)
    cli.run("explain", "E101", KVSTORE_CONFIG="c.toml").refused(2, says)


def test_a_bad_flag_or_variable_names_itself(cli: Cli) -> None:
    cli.run("explain", "E101", KVSTORE_TIMEOUT="soon").refused(2, 'KVSTORE_TIMEOUT is "soon"', "250ms")
    cli.run("explain", "E101", "--timeout", "soon").refused(2, '--timeout "soon" not understood')
    cli.run("explain", "E101", "--config", "nowhere.toml").refused(2, "nowhere.toml", "no such file")
    ran = cli.run("explain", "E101", KVSTORE_TIMOUT="5s")
    assert ran.code == 0 and "did you mean KVSTORE_TIMEOUT?" in ran.stderr
    with pytest.raises(ConfigError):
        load_settings({"nodes": "12x"}, {})


def test_what_is_said_of_rdma_reaches_nodes_and_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flag, variable and file of `node`; of a client's command; of `up`, which passes it on."""
    file = tmp_path / "c.toml"
    file.write_text('rdma_traffic_class = 104\nrdma_gid_index = "auto"\n')
    environ = {"KVSTORE_CONFIG": str(file), "KVSTORE_RDMA_GID_INDEX": "3"}
    settings = load_settings({}, environ)
    assert fabric_of(settings) == {"rdma_traffic_class": 104, "rdma_gid_index": 3}
    assert up._fabric(settings) == ["--rdma-traffic-class", "104", "--rdma-gid-index", "3"]
    assert up._fabric(load_settings({}, {"HOME": "/nowhere"})) == []
    assert up._fabric(load_settings({}, {"KVSTORE_CONFIG": str(file)})) == ["--rdma-traffic-class", "104", "--rdma-gid-index", "auto"]
    ran: list[NodeConfig] = []
    monkeypatch.setattr("kvstore.server.node.run_node", lambda config: ran.append(config) or 0)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for flags in ([], ["--rdma-traffic-class", "8"]):
        assert main(["node", "--data", str(tmp_path), *flags]) == 0
    assert [(config.rdma_traffic_class, config.rdma_gid_index) for config in ran] == [(104, 3), (8, 3)]


OF_ANOTHER_MEANING = {  # flags that are named like a setting, and are not it
    "node": {"capacity", "port", "io", "policy"},
    "dashboard": {"port"},
    "plan": {"policy", "nodes"},
    "engine serve": {"nodes"},
}


def commands_below(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from commands_below(f"{name} {word}".strip(), below)


def test_a_flag_that_is_a_setting_is_read_as_one() -> None:
    """A command that has the flag and does not name it in `settings_flags` would take it and go on without."""
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    for name in COMMANDS:
        importlib.import_module(f"kvstore.cli.{name.replace('-', '_')}").add_parser(subparsers)
    settings = set(load_settings({}, {"HOME": "/nowhere"}).values) - {"map", "timeout", "color"}
    for name, command in commands_below("", parser):
        flags = {action.dest for action in command._actions} & settings - OF_ANOTHER_MEANING.get(name, set())
        assert flags <= set(command.get_default("settings_flags") or ()), name


@pytest.mark.parametrize("words", ["get a", "put a", "replay a", "agent", "engine serve"])
def test_a_transport_that_there_is_not_is_refused(cli: Cli, words: str) -> None:
    cli.run(*words.split(), "--transport", "ib").refused(2, '--transport "ib"', "auto, tcp, rdma")


def test_every_code_is_explained(cli: Cli) -> None:
    used = set()
    for path in (ROOT / "kvstore").rglob("*.py"):
        if path.name != "codes.py":
            used |= {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    codes = {text for text in used if re.fullmatch(r"E\d{3}", text)}
    assert {code for code in codes if code < "E500" or code > "E700"} <= set(ERRORS)
    assert set(ERRORS) <= codes, "no code is explained that nothing raises"
    assert {code[:2] for code in codes} <= set(RANGES)
    assert set(HEALTH) <= used, "every health code has its check"
    ran = cli.run("explain", "e107")
    assert ran.code == 0 and "a port is taken" in ran.stdout
    assert "interface" in cli.run("explain", "E599").stdout


def test_every_reason_of_misses_is_explained(cli: Cli) -> None:
    assert tuple(MISSES) == MISS_REASONS
    shown = cli.run("explain", "lost shards").stdout
    assert shown.startswith("lost_shards\n  meaning   ") and "  do        bring nodes back\n  commands  kvstore status\n" in shown
    assert cli.run("explain", "evicted", "--json").json["data"]["kind"] == "miss"


def test_bench_lists_its_figures_and_refuses_what_is_none(cli: Cli) -> None:
    figures = cli.run("bench", "--list", "--json").json["data"]["figures"]
    assert set(figures[0]) == {"id", "measured_by"} and len(figures) > 20
    name = figures[3]["id"]
    assert cli.run("bench", "--list", "--only", f"{name}.part").stdout.splitlines()[1].split()[0] == name
    cli.run("bench", "--only", name[:-1], "--smoke").refused(2, f'did you mean "{name}"?')
    assert cli.run("bench", "--only", "nope", "--json").json["error"]["code"] == "E140"


def test_explain_finds_the_first_differing_token(cli: Cli, tmp_path: Path) -> None:
    a = list(range(1000, 1700))
    b = [*a[:517], 9, *a[518:]]
    (tmp_path / "a.json").write_text(json.dumps(a))
    (tmp_path / "b.json").write_text(json.dumps({"tokens": b}))
    ran = cli.run("explain", "a.json", "b.json")
    assert ran.code == 0 and "token 517 (block 4, position 5): 1517 against 9" in ran.stdout and "4 blocks = 512 tokens" in ran.stdout
    data = cli.run("explain", "a.json", "b.json", "--json").json["data"]
    assert (data["first_differing_token"], data["first_differing_block"], data["shared_blocks"]) == (517, 4, 4)
    same = cli.run("explain", "a.json", "a.json", "--json").json["data"]
    assert same["first_differing_token"] is None and same["shared_blocks"] == 5


def test_explain_of_one_file_says_that_it_takes_two(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("[1]")
    for name in ("prompt", "c.json", "no/such/C.txt"):
        cli.run("explain", name).refused(2, f"E140] {name} alone: files are compared, two of them", "kvstore explain A.json B.json")


def test_explain_finds_the_differing_field_of_a_namespace(cli: Cli, tmp_path: Path) -> None:
    space = {"weights": "digest-1", "kv_dtype": "bf16", "layout": "v41"}
    (tmp_path / "a.json").write_text(json.dumps({"tokens": list(range(300)), "namespace": space}))
    (tmp_path / "b.json").write_text(json.dumps({"tokens": list(range(300)), "namespace": {**space, "rope": "yarn 4"}}))
    ran = cli.run("explain", "a.json", "b.json", "--json")
    assert ran.json["data"]["namespace_fields_differing"] == [{"field": "rope", "a": '""', "b": '"yarn 4"'}]
    assert ran.json["data"]["shared_blocks"] == 0
    (tmp_path / "n.json").write_text(json.dumps(space))
    assert cli.run("explain", "n.json", "n.json").code == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is not JSON"),
        (b'{"messages": []}', "neither a prompt nor a namespace"),
        (b"[1, -5]", "is not a list of token ids"),
        (b'{"tokens": [1], "namespace": {"weight": "x"}}', 'unknown field "weight"'),
        (b'{"tokens": [1], "namespace": {"weights": "x", "kv_dtype": "bf16", "layout": "v42"}}', 'did you mean "v41"?'),
        (b'{"tokens": [1], "namespace": {"weights": "x", "kv_dtype": "bf16"}}', "layout_digest"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deep"),
        (b"[" + b"9" * 5000 + b"]", "is not JSON"),
        (b'{"tokens": [1], "namespace": {"weights": "x", "kv_dtype": "bf16", "layout": []}}', 'no layout "[]"'),
    ],
)
def test_explain_refuses_wrong_files_in_one_line(cli: Cli, tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    cli.run("explain", "x.json", "x.json").refused(2, "x.json", says)
    cli.run("explain", "missing.json", "x.json").refused(2, "missing.json", "no such file")


@pytest.mark.parametrize("words", [("fsck", ""), ("up", "--fresh", "--dir", ""), ("node", "--data="), ("replay", "x", "--data", "")])
def test_an_empty_argument_is_no_directory(cli: Cli, words: tuple[str, ...]) -> None:
    cli.run(*words).refused(2, "E140", "is empty", "give a value")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_trace_and_no_file_of_ours(cli: Cli, tmp_path: Path, closed: str) -> None:
    """A file that took number 2 would get what is meant for a person."""
    look = f"exec {closed}; " + shlex.join(cli.command("explain", "E107"))
    done = subprocess.run(["bash", "-c", look], capture_output=True, env=dict(cli.environ), text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    data = tmp_path / "data"
    data.mkdir()
    closing = {"<&-": (0,), ">&-": (1,), "2>&-": (2,)}.get(closed, (0, 1, 2))
    serve = f"exec {closed}; exec " + shlex.join([sys.executable, "-m", "kvstore.server", "--data", str(data), "--capacity", "64MB"])
    process = subprocess.Popen(
        ["bash", "-c", serve], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(cli.environ)
    )
    try:
        until(lambda: (data / "state").exists() and (data / "index" / "data.mdb").exists(), "the daemon has opened its files")
        assert {str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in closing} == {"/dev/null"}
    finally:
        process.terminate()
        assert process.wait(30) == 0


def test_arguments_that_are_no_text_are_shown_and_not_a_bug(cli: Cli, tmp_path: Path) -> None:
    for where in ((), ("--json",)):
        done = subprocess.run(
            [*cli.command("up", "--nodes", "1", "--port", "0", "--capacity", "1", *where), "--dir", os.fsencode(tmp_path) + b"/\xff"],
            capture_output=True,
            env={**cli.environ, "LC_ALL": "C.UTF-8"},
            timeout=60,
        )
        assert done.returncode == 2 and b"E131" in done.stderr + done.stdout, done.stderr
        assert where or b"\\udcff" in done.stdout


def test_hours_and_days_are_said_as_such() -> None:
    spans = (59.9, 300, 3596, 3599.9, 3600, 5400, 86_399, 86_400, 604_800)
    assert [format_seconds(span) for span in spans] == [
        "59.9 s",
        "5.0 min",
        "59.9 min",
        "1.0 h",
        "1.0 h",
        "1.5 h",
        "1.0 d",
        "1.0 d",
        "7.0 d",
    ]
