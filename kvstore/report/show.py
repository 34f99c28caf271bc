"""A page as text for a terminal, as Markdown, or as one HTML file that needs nothing else and prints on A4."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Final

from kvstore.report.page import Page, Table

FORMATS: Final = ("text", "md", "html")
_STYLE: Final = """
@page { size: A4; margin: 14mm }
:root { color-scheme: light dark }
body { font: 14px/1.45 system-ui, sans-serif; max-width: 190mm; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em; margin: 0 0 .6em } h2 { font-size: 1.1em; margin: 1.6em 0 .3em }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15em 1.2em; margin: 0 }
dt { opacity: .7 } dd { margin: 0; white-space: pre-wrap }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .93em }
th, td { padding: .18em .7em; text-align: left; border-bottom: 1px solid #8884 } .n { text-align: right; white-space: nowrap }
p, li { opacity: .8; margin: .2em 0 } td:first-child { white-space: nowrap }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(84mm, 1fr)); gap: .6em; margin: 1em 0 }
figure { margin: 0; background: #fff } svg { max-width: 100%; height: auto }
@media print { body { margin: 0; max-width: none; font-size: 10.5px } table, figure { break-inside: avoid } }
"""


def as_text(page: Page) -> str:
    width = max((len(word) for word, _ in page.facts), default=0) + 2
    lines = [page.title, *(f"{word:<{width}}{text}" for word, text in page.facts)]
    for table in page.tables:
        lines += ["", table.title + (f"   ({table.note})" if table.note else ""), *_aligned(table)]
    if page.doubts:
        lines += ["", *(f"{'doubt' if not at else '':<{width}}{text}" for at, text in enumerate(page.doubts))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def as_markdown(page: Page) -> str:
    lines = [f"# {_cell(page.title)}", "", "| | |", "| --- | --- |", *(f"| {word} | {_cell(text)} |" for word, text in page.facts)]
    for table in page.tables:
        rule = ["---" if at < table.labels else "---:" for at in range(len(table.columns))]
        rows: list[Sequence[str]] = [[_cell(cell) for cell in table.columns], rule, *([_cell(cell) for cell in row] for row in table.rows)]
        lines += [
            "",
            f"## {_cell(table.title)}",
            "",
            *([table.note, ""] if table.note else []),
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    if page.doubts:
        lines += ["", "## Doubts", "", *(f"- {_cell(text)}" for text in page.doubts)]
    return "\n".join(lines) + "\n"


def as_html(page: Page, figures: Sequence[str] = ()) -> str:
    """`figures` are SVG elements of our own making, put in as they are."""
    escape = html.escape
    parts = [
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(page.title)}</title>\n<style>{_STYLE}</style>\n<h1>{escape(page.title)}</h1>\n<dl>",
        *(f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in page.facts),
        "</dl>",
        '<div class="figures">' + "".join(f"<figure>{figure}</figure>" for figure in figures) + "</div>" if figures else "",
    ]
    for table in page.tables:
        kinds = ["" if at < table.labels else ' class="n"' for at in range(len(table.columns))]
        head = "".join(f"<th{kind}>{escape(cell)}</th>" for kind, cell in zip(kinds, table.columns, strict=True))
        rows = ("".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) for row in table.rows)
        note = f"<p>{escape(table.note)}</p>" if table.note else ""
        body = "\n".join(f"<tr>{row}</tr>" for row in rows)
        parts.append(f'<h2>{escape(table.title)}</h2>{note}\n<div class="wide"><table>\n<tr>{head}</tr>\n{body}\n</table></div>')
    if page.doubts:
        parts.append("<h2>Doubts</h2>\n<ul>" + "".join(f"<li>{escape(text)}</li>" for text in page.doubts) + "</ul>")
    return "\n".join(parts) + "\n</html>\n"


def _aligned(table: Table) -> list[str]:
    rows = [table.columns, *table.rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(table.columns))]
    return [
        "  "
        + "  ".join(
            f"{cell:<{width}}" if at < table.labels else f"{cell:>{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _cell(text: str) -> str:
    """Text that Markdown shows as it is."""
    for letter in "\\`*_[]<>|#&":
        text = text.replace(letter, "\\" + letter)
    return text
