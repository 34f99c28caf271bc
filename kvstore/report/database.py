"""DuckDB over the log files: bounded memory, a temporary directory beyond it, and for people's own queries a fence.

The fence: one SELECT over the view `access`; no file but the log's, no host, no extension, no setting, no variable of this process.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstore.errors import InputError, KvstoreError, UsageError
from kvstore.report.files import LogFiles, damaged
from kvstore.report.schema import LABELS, TOKEN_COLUMNS

if TYPE_CHECKING:
    import duckdb

MEMORY_BYTES: Final = 1_000_000_000


@dataclass(frozen=True)
class Period:
    """[since, until) in Unix milliseconds; None: open."""

    since_ms: int | None = None
    until_ms: int | None = None

    @property
    def condition(self) -> str:
        parts = []
        if self.since_ms is not None:
            parts.append(f"time >= make_timestamptz({self.since_ms * 1000})")
        if self.until_ms is not None:
            parts.append(f"time < make_timestamptz({self.until_ms * 1000})")
        return " and ".join(parts) or "true"


class Database:
    """One connection over one set of files. `select` is for our own queries, `ask` for people's."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, files: LogFiles, period: Period) -> None:
        self._connection = connection
        self.files = files
        self.period = period
        self._attach()

    def _attach(self) -> None:
        listed = ", ".join(_quoted(_literal(str(path))) for path in self.files.paths)
        # A log has no nulls, but a file that says it is one may: tokens count as none, and such a row as one that does not add up.
        known = [f"coalesce({name}, 0::uinteger) as {name}" for name in TOKEN_COLUMNS] + [
            f"coalesce({name}, '') as {name}" for name in LABELS
        ]
        rows = f"select * replace ({', '.join(known)}) from read_parquet([{listed}]) where time is not null and {self.period.condition}"
        self._connection.execute(f"create or replace temp view rows_of_log as {rows}")
        self._connection.execute(
            "create or replace temp view access as select * replace (make_timestamp(epoch_us(time)) as time) from rows_of_log"
        )

    def select(self, query: str) -> list[tuple[Any, ...]]:
        """Runs a query over `rows_of_log`. Files that prove damaged are left out, and it is run again."""
        while True:
            try:
                return self._connection.execute(query).fetchall()
            except _errors() as error:
                bad = damaged(self.files.paths)
                if not bad:
                    raise _told(error) from None
                self.files = self.files.without(bad)
                self._attach()

    def ask(self, query: str) -> Answer:
        """A person's query. Raises UsageError E162 where it is refused or wrong."""
        import duckdb

        if not _is_text(query):
            raise UsageError("E162", "--sql", "holds bytes that are no text", "write it in UTF-8")
        try:
            statements = self._connection.extract_statements(query)
        except _errors() as error:
            raise _told(error, query) from None
        kinds = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
        if len(statements) != 1 or statements[0].type not in kinds:
            raise UsageError("E162", "--sql", "not one SELECT", 'for example --sql "select tenant, sum(hit_tokens) from access group by 1"')
        paths = dict.fromkeys(name for path in self.files.paths for name in (str(path), _literal(str(path))))
        listed = ", ".join(map(_quoted, paths))
        for setting in (f"allowed_paths = [{listed}]", "enable_external_access = false", "lock_configuration = true"):
            self._connection.execute(f"set {setting}")
        try:
            result = self._connection.execute(statements[0])
        except _errors() as error:
            raise _told(error, query) from None
        return Answer([str(column[0]) for column in result.description or ()], result, query)


@dataclass(frozen=True)
class Answer:
    columns: Sequence[str]
    _result: Any
    _query: str

    def rows(self, count_max: int | None = None) -> Iterator[tuple[Any, ...]]:
        """Rows as they come, plain values: text, numbers, None (NaN and infinity, too), and lists of them."""
        left = math.inf if count_max is None else count_max
        while left > 0:
            try:
                batch = self._result.fetchmany(int(min(left, 10_000)))
            except _errors() as error:
                raise _told(error, self._query) from None
            if not batch:
                return
            left -= len(batch)
            yield from (tuple(plain(cell) for cell in row) for row in batch)


@contextmanager
def opened(files: LogFiles, period: Period, memory_bytes: int = MEMORY_BYTES) -> Iterator[Database]:
    """A database over these files; what does not fit into memory goes to a temporary directory, removed after."""
    duckdb = _library()
    with tempfile.TemporaryDirectory(prefix="kvstore-report-") as scratch:
        config: dict[str, Any] = {
            "memory_limit": f"{memory_bytes}B",
            "temp_directory": scratch,
            "preserve_insertion_order": "false",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "python_enable_replacements": "false",  # or a query could name this process's variables
        }
        with duckdb.connect(":memory:", config=config) as connection:
            yield Database(connection, files, period)


def _library() -> Any:
    try:
        import duckdb
    except ImportError:
        raise UsageError("E160", "kvstore report", "needs DuckDB, which is not installed", "pip install 'kvstore[report]'") from None
    return duckdb


def _errors() -> Any:
    """What DuckDB raises for what a query asks and what files hold; MemoryError too: its limit is one of ours."""
    return (_library().Error, MemoryError)


def _told(error: BaseException, query: str = "") -> KvstoreError:
    text = str(error)
    if "Out of Memory" in text or isinstance(error, MemoryError):
        return UsageError(
            "E143", "the query", "does not fit into --memory and the temporary directory", "--memory 4GB, or TMPDIR on a larger disk"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    cause = re.sub(r"^[A-Z][A-Za-z ]*Error: ", "", lines[0] if lines else type(error).__name__)
    hint = next((line for line in lines[1:] if line.startswith(("Did you mean", "Candidate"))), "")
    if "disabled by configuration" in cause or "disabled through configuration" in cause:
        cause = "reads more than the log"
    if query:
        return UsageError(
            "E162", "--sql", f"{cause} {hint}".strip()[:300], "the view is named access; its columns are in docs/ACCESS_LOG.md"
        )
    return InputError("E161", "the log", cause[:300], "name another directory")


def plain(cell: Any) -> Any:
    """A cell as JSON can hold it."""
    if cell is None or isinstance(cell, bool | int | str):
        return cell
    if isinstance(cell, float):
        return cell if math.isfinite(cell) else None
    if isinstance(cell, list | tuple):
        return [plain(each) for each in cell]
    if isinstance(cell, dict):
        return {str(key): plain(value) for key, value in cell.items()}
    return cell.isoformat() if hasattr(cell, "isoformat") else str(cell)


def _is_text(argument: str) -> bool:
    """No bytes of a command line that are no UTF-8: Python keeps them as lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in argument)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _literal(path: str) -> str:
    """A path that DuckDB must not take for a pattern."""
    return re.sub(r"([\[*?])", r"[\1]", path)
