"""`kvstore report` given what it should not be given: bad files, foreign files, files that go, and queries that reach too far."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_tool import Cli
from report_tools import FIELDS, Here, row, write

from benchmarks.access_rows import write_log
from kvstore.errors import InputError, UsageError
from kvstore.report.database import Database, Period, opened
from kvstore.report.figures import measure
from kvstore.report.files import find_logs


def test_places_without_a_log_are_one_clear_line(tmp_path: Path) -> None:
    cli = Here(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "salt").write_text("x")
    cli.run("report", "--log", "empty").refused(2, "E161", "no *.parquet file")
    cli.run("report", "--log", "nowhere").refused(2, "E161", "no such directory")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.parquet").write_text("no parquet")
    cli.run("report", "--log", "bad").refused(2, "E161", "1 Parquet files, none can be used", "a.parquet")
    cli.run("report").refused(2, "E140", "--log DIR")


def test_files_that_are_no_log_are_named_and_left_out(tmp_path: Path) -> None:
    good = write(tmp_path / "good.parquet", [row(hit=100)])
    whole = good.read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.parquet").write_bytes(b"")
    (tmp_path / "text.parquet").write_text("hello" * 100)
    (tmp_path / "folder.parquet").mkdir()
    (tmp_path / "gone.parquet").symlink_to(tmp_path / "nowhere")
    (tmp_path / ".open.parquet").write_bytes(b"a writer's file that is not whole yet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "foreign.parquet")
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"kvstore": "{"}), tmp_path / "odd.parquet")
    write(tmp_path / "later.parquet", [row(hit=1)], schema_name="kvstore.access/2")
    write(tmp_path / "short.parquet", [{"time": None}], fields=FIELDS[:3])
    signed = [pa.field(field.name, pa.int64()) if field.name == "hit_tokens" else field for field in FIELDS]
    write(tmp_path / "signed.parquet", [row(hit=1)], fields=signed)
    found = find_logs([tmp_path])
    assert found.paths == (good,) and found.rows == 1
    causes = {each.path.name: each.cause for each in found.skipped}
    words = {
        "cut": "cut short",
        "empty": "is empty",
        "text": "no whole Parquet",
        "folder": "no file",
        "gone": "is gone",
        "foreign": "no access log",
        "odd": "no access log",
        "later": "kvstore.access/2",
        "short": "no column retention_class",
        "signed": "hit_tokens is int64",
    }
    for name, word in words.items():
        assert word in causes.pop(f"{name}.parquet")
    assert not causes


def test_a_skipped_file_is_told_on_stderr_and_in_json(tmp_path: Path) -> None:
    write(tmp_path / "log" / "a.parquet", [row(hit=100)])
    (tmp_path / "log" / "b.parquet").write_bytes(b"PAR1")
    ran = Here(tmp_path).run("report", "--log", "log", "--json")
    assert ran.code == 0
    assert "b.parquet" in ran.stderr and "left out" in ran.stderr
    assert [Path(each["path"]).name for each in ran.json["data"]["measured"]["log"]["skipped"]] == ["b.parquet"]


def test_nulls_count_as_no_tokens_and_rows_without_a_time_as_none(tmp_path: Path) -> None:
    sound = row(hit=100)
    write(tmp_path / "log" / "a.parquet", [sound, dict.fromkeys(sound, None), sound | {"tenant": None, "hit_tokens": None}])
    cli = Here(tmp_path)
    assert "2 requests" in cli.run("report", "--log", "log", "--offline").stdout
    assert cli.run("report", "--log", "log", "--offline", "--format", "html", "-o", "r.html").code == 0
    assert cli.run("report", "--log", "log", "--sql", "select sum(hit_tokens), count(*) from access", "--csv").stdout.endswith("\n100,2\n")


def test_a_file_named_twice_counts_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [row(hit=100)])
    assert find_logs([tmp_path, path, tmp_path]).rows == 1


def test_a_file_whose_pages_are_damaged_is_found_and_left_out(tmp_path: Path) -> None:
    write_log(tmp_path, 20_000, start_ms=1_700_000_000_000)
    bad = next(tmp_path.iterdir()).rename(tmp_path / "bad.parquet")
    write(tmp_path / "good.parquet", [row(hit=100)])
    raw = bytearray(bad.read_bytes())
    raw[1_000 : len(raw) // 2] = bytes(len(raw) // 2 - 1_000)
    bad.write_bytes(raw)
    with opened(find_logs([tmp_path]), Period()) as database:
        found = measure(database, [["class"]])
    assert (found["log"]["requests"], found["log"]["files"]) == (1, 1)
    assert [Path(each["path"]).name for each in found["log"]["skipped"]] == ["bad.parquet"]
    assert "damaged" in found["log"]["skipped"][0]["cause"]


def test_a_file_that_rotation_takes_away_meanwhile_is_left_out(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", [row(hit=100)])
    write(tmp_path / "b.parquet", [row(hit=50)])
    with opened(find_logs([tmp_path]), Period()) as database:
        first.unlink()
        found = measure(database, [["class"]])
    assert found["input_tokens"] == 50
    assert "is gone" in found["log"]["skipped"][0]["cause"]


def test_a_log_that_is_all_taken_away_is_one_clear_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [row(hit=100)])
    with pytest.raises(InputError, match="E161"), opened(find_logs([tmp_path]), Period()) as database:
        path.unlink()
        measure(database, [["class"]])


def test_directories_with_odd_names_are_read(tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s a [log] *? "x" %20 ü'
    write(odd / "a[1].parquet", [row(hit=100)])
    with opened(find_logs([odd]), Period()) as database:
        assert measure(database, [["class"]])["input_tokens"] == 100
        assert list(database.ask("select hit_tokens from access").rows()) == [(100,)]


def asked(tmp_path: Path, query: str) -> list[tuple[object, ...]]:
    write(tmp_path / "log" / "a.parquet", [row(hit=100, tail=28), row(1, tenant="beta", hit=5)])
    with opened(find_logs([tmp_path / "log"]), Period()) as database:
        return list(database.ask(query).rows())


def test_a_query_sees_the_columns_of_the_log_with_time_in_utc(tmp_path: Path) -> None:
    assert asked(tmp_path, "select tenant, hit_tokens, time, blocks from access where miss_tail > 0") == [
        ("acme", 100, "2026-11-20T12:00:00", [1, 2**64 - 1])
    ]
    assert asked(tmp_path, "with a as (select * from access) select count(*) from a;") == [(2,)]
    assert asked(tmp_path, "select 1 / 0.0, null, 'nan'::double") == [(None, None, None)]
    assert asked(tmp_path, "from access select sum(input_tokens)") == [(133,)]


secret_of_this_process = pa.table({"a": [1]})


@pytest.mark.parametrize(
    "query",
    [
        "select * from read_text('{salt}')",
        "select * from read_csv('{salt}')",
        "select * from '{salt}'",
        "select * from read_blob('/etc/hostname')",
        "select * from glob('/etc/*')",
        "select * from read_parquet('{log}/*.parquet')",
        "select * from read_parquet('http://127.0.0.1:9/x.parquet')",
        "select * from secret_of_this_process",
        "select * from query('select * from read_text(''{salt}'')')",
        "copy (select 1) to '{log}/a.parquet' (format parquet)",
        "copy access to '{log}/new.csv'",
        "export database '{log}/out'",
        "attach '{log}/new.db'",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "reset all",
        "pragma disable_checkpoint_on_shutdown",
        "call pragma_version()",
        "create table t as select 1",
        "insert into access values (1)",
        "drop view access",
        "select 1; select 2",
        "",
        ";",
        "-- nothing",
        "select",
        "select nope from access",
        "select * from nowhere",
        "select cast('x' as integer) from access",
        "select error('x')",
        "explain analyze copy access to '{log}/new.csv'",
        "select '\udcff'",
    ],
)
def test_a_query_that_is_wrong_or_reaches_beyond_the_log_is_refused(tmp_path: Path, query: str) -> None:
    salt = tmp_path / "log" / "salt"
    salt.parent.mkdir()
    salt.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError) as raised:
        asked(tmp_path, query.format(salt=salt, log=tmp_path / "log"))
    assert raised.value.code == "E162"
    assert "\n" not in str(raised.value)
    assert sorted(path.name for path in salt.parent.iterdir()) == ["a.parquet", "salt"]


def test_the_fence_holds_for_every_setting_that_opens_files(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [row(hit=1)])
    with opened(find_logs([tmp_path]), Period()) as database:
        names = "('enable_external_access', 'lock_configuration', 'autoload_known_extensions', 'python_enable_replacements')"
        query = f"select name, value from duckdb_settings() where name in {names}"
        flags = {name: str(value).lower() for name, value in database.ask(query).rows()}
    assert flags == {
        "enable_external_access": "false",
        "lock_configuration": "true",
        "autoload_known_extensions": "false",
        "python_enable_replacements": "false",
    }


def test_query_results_as_table_csv_and_json(tmp_path: Path) -> None:
    cli = Here(tmp_path)
    write(tmp_path / "log" / "a.parquet", [row(hit=100, tenant="x\x1b[2J,y")])
    query = "select tenant, hit_tokens, null as nothing from access"
    ran = cli.run("report", "--log", "log", "--sql", query)
    assert ran.code == 0 and "\x1b" not in ran.stdout
    assert cli.run("report", "--log", "log", "--sql", query, "--csv").stdout == 'tenant,hit_tokens,nothing\n"x\x1b[2J,y",100,\n'
    data = json.loads(cli.run("report", "--log", "log", "--sql", query, "--json").stdout)["data"]
    assert data == {"columns": ["tenant", "hit_tokens", "nothing"], "rows": [["x\x1b[2J,y", 100, None]], "more_rows": False}
    many = cli.run("report", "--log", "log", "--sql", "select range from range(10001)")
    assert "--csv gives all" in many.stderr and len(many.stdout.splitlines()) == 10_001
    cli.run("report", "--log", "log", "--sql", "select nope").refused(2, "E162", "nope")


def test_a_query_larger_than_its_memory_uses_the_temporary_directory(tmp_path: Path) -> None:
    write_log(tmp_path, 300_000, start_ms=1_700_000_000_000)
    with opened(find_logs([tmp_path]), Period(), memory_bytes=100_000_000) as database:
        sort = "select count(*) from (select *, row_number() over (order by lookup_seconds, hit_tokens) as r from access) where r % 2 = 0"
        assert list(database.ask(sort).rows()) == [(150_000,)]


def test_a_query_too_large_for_memory_and_disk_is_one_clear_line(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [row(hit=1)])
    with opened(find_logs([tmp_path]), Period(), memory_bytes=100_000_000) as database, pytest.raises(UsageError) as raised:
        list(database.ask("select length(list(range)) from range(50000000)").rows())
    assert raised.value.code == "E143" and "--memory" in str(raised.value)


def test_too_little_memory_and_a_place_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    cli = Here(tmp_path)
    write(tmp_path / "log" / "a.parquet", [row(hit=100)])
    cli.run("report", "--log", "log", "--memory", "1MB").refused(2, "E131", "--memory")
    cli.run("report", "--log", "log", "-o", "no/such/file").refused(2, "E100", "no/such/file")


def test_without_duckdb_the_error_names_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "duckdb.py").write_text("raise ImportError('not here')")
    write(tmp_path / "log" / "a.parquet", [row(hit=100)])
    cli = Cli(tmp_path)
    path = f"{tmp_path / 'shadow'}:{cli.environ['PYTHONPATH']}"
    cli.run("report", "--log", "log", PYTHONPATH=path).refused(2, "E160", "pip install 'kvstore[report]'")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_report_that_is_stopped_leaves_no_temporary_directory(tmp_path: Path, number: signal.Signals) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    write(tmp_path / "log" / "a.parquet", [row(hit=100)])
    endless = "select range from range(1000000000000)"
    running = Cli(tmp_path).start("report", "--log", "log", "--csv", "--sql", endless, TMPDIR=str(scratch))
    try:
        assert running.stdout is not None and running.stdout.readline() == "range\n"
        assert list(scratch.iterdir())
        running.send_signal(number)
        _, stderr = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 130 and "E701" in stderr
    assert not list(scratch.iterdir())


def test_a_database_keeps_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    write(tmp_path / "log" / "a.parquet", [row(hit=100)])
    with opened(find_logs([tmp_path / "log"]), Period()) as database:
        assert isinstance(database, Database) and list(scratch.iterdir())
    assert not list(scratch.iterdir())
