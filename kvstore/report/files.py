"""Which files are access logs that can be read: each one's footer is looked at; what cannot be used is named, with the cause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import InputError
from kvstore.report.schema import problem_of


@dataclass(frozen=True)
class Skipped:
    path: Path
    cause: str

    def __str__(self) -> str:
        return f"{self.path}: {self.cause}; left out"


@dataclass(frozen=True)
class LogFiles:
    """`paths` in order; `rows` and `bytes` are of them, by their footers and sizes."""

    paths: Sequence[Path]
    skipped: Sequence[Skipped]
    rows: int
    bytes: int

    def without(self, bad: Sequence[Skipped]) -> LogFiles:
        gone = {each.path for each in bad}
        return find_logs([path for path in self.paths if path not in gone], [*self.skipped, *bad])


def find_logs(places: Iterable[Path], skipped: Sequence[Skipped] = ()) -> LogFiles:
    """The logs in these directories or files. Raises InputError E161 where not one can be used."""
    places = list(places)
    paths: dict[Path, None] = {}
    bad = list(skipped)
    rows = size = 0
    for place in places:
        for path in _candidates(place):
            if path in paths:
                continue
            count, cause = _rows_of(path)
            if cause:
                bad.append(Skipped(path, cause))
                continue
            paths[path] = None
            rows += count
            size += path.stat().st_size
    if not paths:
        what = ", ".join(map(str, places)) or str(bad[0].path if bad else "the log")
        cause = f"{len(bad)} Parquet files, none can be used; {bad[0].path.name} {bad[0].cause}" if bad else "no *.parquet file in it"
        raise InputError("E161", what, cause, "name the directory that ClientConfig.access_log or replay --access-log wrote")
    return LogFiles(tuple(paths), tuple(bad), rows, size)


def damaged(paths: Iterable[Path]) -> list[Skipped]:
    """Files whose pages do not read, each read to its end: slow, for when a query failed on one of many."""
    import pyarrow.parquet as pq

    found = []
    for path in paths:
        _, cause = _rows_of(path)
        try:
            if not cause:
                with pq.ParquetFile(path, page_checksum_verification=True) as file:
                    for _ in file.iter_batches():
                        pass
        except (OSError, ValueError) as error:
            cause = f"is damaged ({_first_line(error)})"
        if cause:
            found.append(Skipped(path, cause))
    return found


def _candidates(place: Path) -> list[Path]:
    try:
        if place.is_dir():
            return sorted(path.absolute() for path in place.iterdir() if path.suffix == ".parquet" and not path.name.startswith("."))
    except OSError as error:
        raise InputError("E161", f"cannot read {place}", (error.strerror or str(error)).lower(), "check the path") from None
    if not place.exists():
        raise InputError("E161", str(place), "no such directory", "name the directory that ClientConfig.access_log names")
    return [place.absolute()]


def _rows_of(path: Path) -> tuple[int, str]:
    """Rows by the footer, and why the file cannot be used ("" where it can)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if not path.is_file():
            return 0, "is no file" if path.exists() else "is gone"
        with pq.ParquetFile(path) as file:
            return int(file.metadata.num_rows), problem_of(file.schema_arrow)
    except pa.ArrowInvalid:
        size = path.stat().st_size if path.exists() else 0
        return 0, "is empty" if not size else "is no whole Parquet file: cut short or damaged"
    except (OSError, ValueError) as error:
        return 0, f"cannot be read ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120].lower()
