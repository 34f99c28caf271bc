"""The last hour of an access log, by tenant and by model. Files are read once: they appear whole and never change (docs/ACCESS_LOG.md).

Ages are told by files, which hold five minutes at most: the hour begins at the first file with a request of it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

WINDOW_SECONDS: Final = 3600.0
LOOK_SECONDS: Final = 10.0  # between two looks into the directory
FILES_MAX: Final = 500  # the newest; an hour of forty clients
ROWS_SHOWN: Final = 8
_LABELS: Final = ("tenant", "model")
_TOKENS: Final = ("input_tokens", "hit_tokens")

Sums = dict[str, tuple[int, int, int]]  # label -> requests, input tokens, hit tokens


@dataclass(frozen=True, slots=True)
class _File:
    newest_seconds: float  # Unix time of its last request; 0: none, or no access log
    by_label: dict[str, Sums]


class RecentLog:
    """Of the directory that ClientConfig.access_log or `replay --access-log` names. For one thread."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._clock = clock
        self._files: dict[Path, _File] = {}
        self._looked_at = float("-inf")
        self._data: dict[str, Any] = {}

    def data(self) -> dict[str, Any]:
        """Most tokens first; `error` where the directory cannot be read."""
        now = self._clock()
        if not 0 <= now - self._looked_at < LOOK_SECONDS:
            self._looked_at = now
            self._data = self._look(now)
        return self._data

    def _look(self, now: float) -> dict[str, Any]:
        found: dict[str, Any] = {"directory": str(self._directory), "window_seconds": WINDOW_SECONDS, "error": None}
        try:
            newest = sorted((path for path in self._directory.iterdir() if path.suffix == ".parquet"), key=lambda path: path.name)[
                -FILES_MAX:
            ]
            recent = [path for path in newest if now - path.stat().st_mtime <= WINDOW_SECONDS]
        except OSError as error:
            return {**found, "error": f"{self._directory}: {(error.strerror or str(error)).lower()}", "files": 0, "rows": 0}
        self._files = {path: self._files.get(path) or _read(path) for path in recent}
        counted = [each for each in self._files.values() if now - each.newest_seconds <= WINDOW_SECONDS]
        rows = {label: _rows(label, [each.by_label[label] for each in counted]) for label in _LABELS}
        requests = sum(row["requests"] for row in rows["tenant"])
        shown = {f"{label}s": rows[label][:ROWS_SHOWN] for label in _LABELS}
        return {**found, "files": len(counted), "rows": requests, **shown}


def _rows(label: str, parts: list[Sums]) -> list[dict[str, Any]]:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for part in parts:
        for name, counts in part.items():
            sums[name] = [a + b for a, b in zip(sums[name], counts, strict=True)]
    rows = [
        {label: name, "requests": n, "input_tokens": asked, "hit_tokens": hit, "hit_ratio": hit / asked if asked else None}
        for name, (n, asked, hit) in sums.items()
    ]
    return sorted(rows, key=lambda row: (-row["input_tokens"], row[label]))


def _read(path: Path) -> _File:
    """A file that is no access log, or damaged, counts as empty: this is a view, `kvstore report` tells of such files."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=["time", *_LABELS, *_TOKENS])
        newest = pc.max(table["time"]).as_py()
        by_label: dict[str, Sums] = {}
        for label in _LABELS:
            plain = table.set_column(0, "name", pc.cast(table[label], pa.string()))
            grouped = plain.group_by("name").aggregate([("input_tokens", "count"), ("input_tokens", "sum"), ("hit_tokens", "sum")])
            columns = ("name", "input_tokens_count", "input_tokens_sum", "hit_tokens_sum")
            by_label[label] = {
                str(name): (n, asked or 0, hit or 0) for name, n, asked, hit in zip(*(grouped[c].to_pylist() for c in columns), strict=True)
            }
        return _File(newest.timestamp() if newest is not None else 0.0, by_label)
    except (OSError, KeyError, pa.ArrowException):
        return _File(0.0, {label: {} for label in _LABELS})
