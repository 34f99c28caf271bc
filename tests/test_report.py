"""`kvstore report` over logs: figures that can be counted by hand, and by an independent count over invented traffic."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_tool import ROOT, Cli
from report_tools import DICTIONARY, FIELDS, NOON, Here, row, write

from benchmarks.access_rows import CLASSES, MODELS, columns_of, table_of, write_log
from kvstore.metrics import MISS_REASONS
from kvstore.plots import svg
from kvstore.report.charts import charts
from kvstore.report.database import Period, opened
from kvstore.report.figures import BY, measure
from kvstore.report.files import find_logs
from kvstore.report.page import log_page
from kvstore.report.schema import AGES, TOKEN_COLUMNS, column_types
from kvstore.report.show import as_html, as_markdown, as_text

DAY_MS = 86_400_000


def measured(directory: Path, by: Sequence[Sequence[str]] = (("class",),), period: Period | None = None) -> dict[str, Any]:
    with opened(find_logs([directory]), period or Period()) as database:
        return measure(database, by)


def two_days(directory: Path) -> Path:
    """Three requests of two tenants in two files: 1000 tokens of input each."""
    write(directory / "access-a-1-0.parquet", [row(hit=600, evicted=200, unknown=100, tail=100, age_1h=500, age_2d=100, age_7d=200)])
    later = [row(1, "acme", hit=0, expired=500, unknown=500, age_14d=500), row(1.1, "beta", cls="agent", hit=900, tail=100, age_1m=900)]
    write(directory / "access-b-2-0.parquet", later)
    return directory


def test_the_columns_are_those_of_the_document() -> None:
    text = (ROOT / "docs" / "ACCESS_LOG.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ", text.split("| column | type")[1], re.MULTILINE)
    documented = [name for each in rows for name in re.findall(r"`(\w+)`", each)]
    assert documented == [*column_types(), "blocks"]


def test_hits_misses_and_labels_are_summed_over_files(tmp_path: Path) -> None:
    found = measured(two_days(tmp_path), [["day"], ["class", "tenant"]])
    assert found["log"]["requests"] == 3
    assert found["input_tokens"] == 3000
    assert found["hit_ratio"] == 0.5
    assert found["miss_tokens"] | {"unknown": 600, "expired": 500, "evicted": 200, "tail": 200} == found["miss_tokens"]
    assert [(each["day"], each["hit_ratio"]) for each in found["by"]["day"]] == [("2026-11-20", 0.6), ("2026-11-21", 0.45)]
    assert [(each["class"], each["tenant"], each["requests"]) for each in found["by"]["class,tenant"]] == [
        ("chat", "acme", 2),
        ("agent", "beta", 1),
    ]


def test_what_if_rates_are_prefix_sums_of_the_age_columns(tmp_path: Path) -> None:
    found = measured(two_days(tmp_path))
    assert [each["hit_tokens_at_least"] for each in found["what_if"]] == [1400, 1500, 1700, 2200]
    assert [round(each["hit_ratio_at_most"] * 3000) for each in found["what_if"]] == [2000, 2100, 2300, 2800]
    assert [each["retention_seconds"] for each in found["what_if"]] == [86400, 3 * 86400, 7 * 86400, 14 * 86400]
    ages = dict(zip(AGES, found["reuse_ages"], strict=True))
    assert ages["1h"]["cumulative_share_of_reuse"] == pytest.approx(1400 / 2200)
    assert ages["more"]["cumulative_share_of_reuse"] == 1
    assert ages["more"]["hit_ratio_at_least"] is None


def test_figures_equal_an_independent_count(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    parts = [columns_of(random, 5_000, 1_700_000_000_000 + number * DAY_MS, DAY_MS) for number in range(3)]
    for number, part in enumerate(parts):
        pq.write_table(table_of(part), tmp_path / f"access-{number}.parquet", row_group_size=700)
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    found = measured(tmp_path, [["model"], ["tenant"]])
    assert found["input_tokens"] == whole["input_tokens"].sum()
    assert found["hit_tokens"] + sum(found["miss_tokens"].values()) == found["input_tokens"]
    assert found["log"]["rows_that_do_not_add_up"] == 0
    assert found["age_unknown_tokens"] == 0
    for reason in MISS_REASONS:
        assert found["miss_tokens"][reason] == whole[f"miss_{reason}"].sum()
    for each in found["by"]["model"]:
        mine = whole["model"] == MODELS.index(each["model"])
        assert each["hit_tokens"] == whole["hit_tokens"][mine].sum()
    for number, name in enumerate(CLASSES):
        mine = whole["retention_class"] == number
        columns = [f"age_{age}" for age, bound in AGES.items() if bound and bound <= 3 * 86400]
        served = sum(int(whole[column][mine].sum()) for column in columns)
        assert found["by_class"][name]["what_if"][1]["hit_tokens_at_least"] == served
    tenants = found["by"]["tenant"]
    assert len(tenants) == 21
    assert sum(each["input_tokens"] for each in tenants) == found["input_tokens"]
    assert tenants[-1]["others"] == len(np.unique(whole["tenant"])) - 20
    for q, name in ((50, "lookup_p50_seconds"), (99, "lookup_p99_seconds")):
        assert found[name] == pytest.approx(float(np.percentile(whole["lookup_seconds"], q)), rel=0.03)


def test_a_period_counts_the_rows_that_lie_in_it(tmp_path: Path) -> None:
    noon = int(NOON.timestamp() * 1000)
    two_days(tmp_path)
    assert measured(tmp_path, period=Period(noon + DAY_MS))["log"]["requests"] == 2
    assert measured(tmp_path, period=Period(noon, noon + DAY_MS))["log"]["requests"] == 1
    empty = measured(tmp_path, period=Period(until_ms=noon))
    assert (empty["log"]["requests"], empty["hit_ratio"], empty["lookup_p99_seconds"]) == (0, None, None)
    assert "no request in this period" in as_text(log_page(empty, "report"))


def test_rows_that_do_not_add_up_and_ages_that_are_missing_are_told(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [row(hit=100, age_1m=40), row(input_tokens=500, hit=100, age_1m=100)])
    found = measured(tmp_path)
    assert found["log"]["rows_that_do_not_add_up"] == 1
    assert found["age_unknown_tokens"] == 60
    assert any("do not add up" in doubt for doubt in log_page(found, "report").doubts)


def test_labels_that_are_null_or_plain_text_are_taken(tmp_path: Path) -> None:
    plain = [pa.field(field.name, pa.string()) if field.type == DICTIONARY else field for field in FIELDS]
    write(tmp_path / "a.parquet", [row(hit=10) | {"tenant": None}], fields=plain)
    write(tmp_path / "b.parquet", [row(hit=10)])
    found = measured(tmp_path, [["tenant"]])
    assert {each["tenant"] for each in found["by"]["tenant"]} == {"", "acme"}
    assert "\n  -  " in as_text(log_page(found, "report")), "a name that is missing is seen to be"


def test_markdown_and_html_show_hostile_names_as_text_and_need_no_other_file(tmp_path: Path) -> None:
    evil = "</td><script>alert(1)</script> | x\x1b[2J"
    write(tmp_path / "a.parquet", [row(tenant=evil, hit=10)])
    page = log_page(measured(tmp_path, [["tenant"]]), "<report>")
    html = as_html(page)
    assert "<script" not in html and "\x1b" not in html
    assert "&lt;script&gt;" in html
    assert "size: A4" in html
    line = next(each for each in as_markdown(page).splitlines() if "script" in each)
    assert len(re.findall(r"(?<!\\)\|", line)) == len(page.tables[0].columns) + 1
    assert "\x1b" not in as_text(page)


def test_command_reports_as_text_and_as_json(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    two_days(tmp_path / "log")
    assert (
        cli.run("report", "log", "--offline").stdout.splitlines()[3:]
        == cli.run("report", "--log", "log", "--offline").stdout.splitlines()[3:]
    )
    ran = cli.run("report", "--log", "log", "--by", "class")
    assert ran.code == 0, ran.stderr
    assert "hit       50.0 % of 3,000 tokens" in ran.stdout
    assert "Hit rate by class" in ran.stdout and "Hit rate by day" not in ran.stdout
    data = cli.run("report", "--log", "log", "--json").json["data"]
    assert list(data["measured"]["by"]) == list(BY)
    ran = cli.run("report", "--log", "log", "--format", "html", "-o", "out.html")
    assert (ran.code, ran.stdout) == (0, "")
    html = (tmp_path / "out.html").read_text()
    assert html.startswith("<!doctype html>") and html.count("<svg") == 3


def test_plots_are_written_as_svg_and_png_and_nothing_of_a_name_is_markup(tmp_path: Path) -> None:
    cli = Here(tmp_path)
    write(tmp_path / "log" / "a.parquet", [row(cls="<b>&$\\bad$", hit=100, age_1m=100), row(cls="chat", hit=10, age_1d=10)])
    assert cli.run("report", "--log", "log", "--plots", "svg").code == 0
    assert cli.run("report", "--log", "log", "--plots", "png", "--plot-format", "png").code == 0
    names = {"days", "reuse_ages", "retention"}
    assert {path.name for path in (tmp_path / "svg").iterdir()} == {f"{name}.svg" for name in names}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "png").iterdir())
    drawn = (tmp_path / "svg" / "retention.svg").read_text()
    assert "<b>" not in drawn and ">&lt;b&gt;&amp;$\\bad$<" in drawn
    for path in (tmp_path / "svg").iterdir():
        assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)""", path.read_text())
    cli.run("report", "--log", "log", "--plots", "log/a.parquet").refused(2, "E100", "--plots")


def test_a_page_in_html_needs_nothing_from_outside(tmp_path: Path) -> None:
    two_days(tmp_path)
    found = measured(tmp_path, [["day"], ["class"]])
    html = as_html(log_page(found, "report"), [svg(each) for each in charts(found).values()])
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)|@import|url\((?!#)|<script|<link|<iframe""", html)
    assert charts(measured(tmp_path, period=Period(until_ms=1))) == {}


def test_since_is_understood_as_time_ago_and_as_date(tmp_path: Path) -> None:
    cli = Here(tmp_path)
    two_days(tmp_path / "log")
    assert cli.run("report", "--log", "log", "--since", "2026-11-21", "--json").json["data"]["measured"]["log"]["requests"] == 2
    assert cli.run("report", "--log", "log", "--since", "36500d", "--json").json["data"]["measured"]["log"]["requests"] == 3
    cli.run("report", "--log", "log", "--since", "last week").refused(2, "E102", "--since")
    cli.run("report", "--log", "log", "--since", "1d", "--until", "2d").refused(2, "E131", "before it begins")
    cli.run("report", "--log", "log", "--by", "day,colour").refused(2, "E132", "colour", "tenant")


def test_flags_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    cli = Here(tmp_path)
    write(tmp_path / "log" / "a.parquet", [row(hit=1)])
    for arguments, words in (
        (["--since", "1d"], "--since without --log"),
        (["--sql", "select 1"], "--sql without --log"),
        (["--log", "log", "--sql", "select 1", "-o", "x"], "--output with --sql"),
        (["--log", "log", "--sql", "select 1", "--format", "md"], "--format with --sql"),
        (["--log", "log", "--datasheet", "--plots", "x"], "--plots with --datasheet"),
        (["--log", "log", "--csv"], "--csv without --sql"),
    ):
        cli.run("report", *arguments).refused(2, "E140", words)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_invented_rows_add_up_and_are_the_same_each_time(tmp_path: Path) -> None:
    write_log(tmp_path / "a", 150_000, start_ms=1_700_000_000_000)
    write_log(tmp_path / "b", 150_000, start_ms=1_700_000_000_000)
    names = [sorted(path.name for path in (tmp_path / each).iterdir()) for each in "ab"]
    assert names[0] == names[1] and len(names[0]) == 2
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names[0])
    found = measured(tmp_path / "a")
    assert found["log"]["rows_that_do_not_add_up"] == 0
    assert found["log"]["requests"] == 150_000
    assert set(TOKEN_COLUMNS) <= set(column_types())
