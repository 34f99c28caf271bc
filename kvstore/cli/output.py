"""What commands say: data on stdout, talk on stderr; text for people or, with --json, one object for programs.

A command gets this as `args.out`. It prints with `line`, `table` and `step`, talks with `note` and `warn`, shows `progress`, and hands its
result to `result(...)`; main prints the envelope. A command that goes on for long calls `frame(...)` once a line instead.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from kvstore.errors import KvstoreError

if TYPE_CHECKING:  # rich costs a tenth of a second: it is imported by what prints with it, never for --json
    from rich.console import Console
    from rich.progress import Progress

_WIDE: Final = 400  # off a terminal nothing is wrapped: lines are for grep
STYLES: Final = {"ok": "green", "WARN": "yellow", "warn": "yellow", "ERR": "bold red", "FAIL": "bold red", "skip": "dim", "INFO": "cyan"}


@dataclass
class Health:
    """One firing check of the catalogue in kvstore/cli/codes.py."""

    code: str
    severity: str  # ERR, WARN or INFO
    subject: str
    summary: str
    fix: str
    since: str | None = None
    muted_until: str | None = None
    count: int = 1  # how much of it there is: a mute ends where it grows
    lasted_seconds: float = 0.0  # as far as the nodes tell; what was seen earlier is in kvstore/cli/health_memory.py


@dataclass
class Result:
    """What goes into the envelope."""

    data: Mapping[str, Any] | None = None
    health: Sequence[Health] = ()
    cluster: str | None = None
    epoch: int | None = None


@dataclass
class Output:
    """Where a command speaks. `command` names the schema: "kvstore.status/1"."""

    command: str = ""
    json: bool = False
    quiet: bool = False
    verbose: bool = False
    color: str = "auto"
    returned: Result = field(default_factory=Result)
    framed: bool = False

    @cached_property
    def stdout(self) -> Console:
        return _console(sys.stdout, self.color)

    @cached_property
    def stderr(self) -> Console:
        return _console(sys.stderr, self.color)

    # --- for people ---

    def line(self, text: str = "", style: str | None = None) -> None:
        """One line of data on stdout, as it is: no markup, no wrapping."""
        if not self.json:
            self.stdout.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def step(self, word: str, name: str, text: str = "") -> None:
        """ " ok  checks     61 GB free": how start-ups, demos and doctors tick their list."""
        if not self.json:
            from rich.markup import escape

            style = STYLES.get(word, "")
            head = f"[{style}]{escape(f'{word:>4}')}[/]" if style else escape(f"{word:>4}")
            self.stdout.print(f"{head}  {escape(f'{name:<10}')} {escape(text)}".rstrip(), highlight=False, soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str | None = None) -> None:
        """Plain columns: names left, numbers right, no lines. A column is right-aligned if its first cell is a number."""
        if self.json:
            return
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=None, title=title, title_justify="left", pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for at, column in enumerate(columns):
            number = bool(rows) and _is_number(rows[0][at])
            table.add_column(column, justify="right" if number else "left", no_wrap=True)
        for row in rows:
            cells = ("-" if cell is None else str(cell) for cell in row)
            table.add_row(*(f"[{STYLES[cell]}]{cell}[/]" if cell in STYLES else escape(cell) for cell in cells))
        self.stdout.print(table)

    # --- talk ---

    def note(self, text: str) -> None:
        """For the person, on stderr; -q silences it."""
        if not self.quiet:
            self.stderr.print(text, markup=False, highlight=False, soft_wrap=True)

    def detail(self, text: str) -> None:
        """Only with -v."""
        if self.verbose:
            self.stderr.print(text, markup=False, highlight=False, soft_wrap=True, style="dim")

    def warn(self, text: str) -> None:
        """Always shown, on stderr."""
        from rich.markup import escape

        self.stderr.print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def progress(self, label: str, total: float | None, *, unit: str = "") -> Iterator[Bar]:
        """A bar on stderr while the block runs; nothing off a terminal, with --json or -q."""
        if self.json or self.quiet or os.environ.get("TERM") == "dumb" or not self.stderr.is_terminal:
            yield Bar(None, None)
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
        with Progress(*columns, console=self.stderr, transient=True) as bars:
            yield Bar(bars, bars.add_task(label, total=total))

    # --- for programs ---

    def result(
        self, data: Mapping[str, Any], *, health: Sequence[Health] = (), cluster: str | None = None, epoch: int | None = None
    ) -> None:
        """The command's answer: what --json prints as `data`, when the command ends."""
        self.returned = Result(data, tuple(health), cluster, epoch)

    def frame(
        self, data: Mapping[str, Any], *, health: Sequence[Health] = (), cluster: str | None = None, epoch: int | None = None
    ) -> None:
        """One object of a stream, printed at once."""
        self.framed = True
        if self.json:
            print(json.dumps(self._envelope(Result(data, tuple(health), cluster, epoch), None, True)), flush=True)

    def finish(self, exit_code: int, error: KvstoreError | None = None) -> None:
        """Prints what is due at the end: the envelope, or the error's one line on stderr. Main calls it."""
        if self.json and (error is not None or not self.framed):
            print(json.dumps(self._envelope(self.returned, error, exit_code == 0 and error is None)), flush=True)
        if error is not None and not self.json:
            self.stderr.print(str(error), markup=False, highlight=False, soft_wrap=True, style="red" if self.stderr.is_terminal else None)

    def _envelope(self, result: Result, error: KvstoreError | None, ok: bool) -> dict[str, Any]:
        from kvstore.version import version

        return {
            "schema": f"kvstore.{self.command or 'kvstore'}/1",
            "time": rfc3339_now(),
            "version": version(),
            "cluster": result.cluster,
            "epoch": result.epoch,
            "ok": ok,
            "health": [vars(check) for check in result.health],
            "data": result.data,
            "error": None
            if error is None
            else {"code": error.code, "message": error.what, "cause": error.cause or None, "fix": error.fix or None},
        }


class Bar:
    """A progress bar's handle; None: one that is not shown."""

    def __init__(self, bars: Progress | None, task: Any) -> None:
        self._bars, self._task = bars, task

    def advance(self, count: float = 1, label: str | None = None) -> None:
        if self._bars is not None:
            self._bars.update(self._task, advance=count, description=label)


def rfc3339_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _is_number(cell: Any) -> bool:
    text = str(cell).split(" ")[0].replace(",", "").removesuffix("%").lstrip("-")
    return text.replace(".", "", 1).isdigit()


def _console(stream: Any, color: str) -> Console:
    """Colour: the flag beats NO_COLOR beats FORCE_COLOR; none off a terminal."""
    from rich.console import Console

    terminal = bool(stream.isatty())
    plain = color == "never" or (color == "auto" and ("NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"))
    forced = color == "always" or (color == "auto" and not plain and "FORCE_COLOR" in os.environ)
    return Console(
        file=stream,
        force_terminal=True if forced else terminal,
        no_color=plain,
        color_system=None if plain else "standard" if forced else "auto",
        width=None if terminal else _WIDE,
        emoji=False,
    )
