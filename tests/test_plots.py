"""Plots: the same data gives the same file, and a plot that cannot be written says so in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import UsageError
from kvstore.plots import Series, bars, format_of, lines, render, save, svg

CURVE = Series("lru", [1, 10, 100], [10, 40, 60], low=[9, 38, 59], high=[11, 42, 61])


def test_equal_data_gives_equal_bytes() -> None:
    def drawn(kind: str) -> bytes:
        return render(lines([CURVE], title="hit rate", x_label="capacity", y_label="%", x_log=True, marks={"here": 10}), kind)

    assert drawn("svg") == drawn("svg")
    assert drawn("png") == drawn("png")


def test_svg_stands_alone_inside_a_page() -> None:
    text = svg(bars(["mon", "tue"], {"hit": [60, 62], "expired": [3, 2]}, title="by day", y_label="% of tokens"))
    assert text.startswith("<svg")
    assert "by day" in text  # text stays text: it can be searched and read aloud
    assert 'href="http' not in text


def test_the_names_end_decides_the_format(tmp_path: Path) -> None:
    save(lines([CURVE], title="", x_label="", y_label=""), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    save(lines([CURVE], title="", x_label="", y_label=""), tmp_path / "a.svg")
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()
    with pytest.raises(UsageError, match="E140"):
        format_of(tmp_path / "a.pdf")
