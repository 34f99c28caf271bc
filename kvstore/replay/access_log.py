"""The access log: one Parquet row a request. No keys, no ids: it can be handed on without telling what was asked.

Written beside its final name and moved there on close, so a reader never sees half a log.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from kvstore.errors import UsageError

ROWS_PER_GROUP = 8192

SCHEMA = pa.schema(
    [
        ("request", pa.uint64()),  # ordinal in the replay
        ("trace_time_ms", pa.uint64()),
        ("input_tokens", pa.uint64()),
        ("hit_tokens", pa.uint64()),  # promised by the lookup
        ("loaded_tokens", pa.uint64()),  # delivered
        ("ideal_hit_tokens", pa.uint64()),  # of an infinite cache
        ("blocks", pa.uint32()),
        ("extents", pa.uint32()),  # on the walk
        ("decodes", pa.uint32()),  # (extent, plane) pieces with a data shard rebuilt
        ("late_requests", pa.uint32()),  # 12th requests
        ("bad_shards", pa.uint32()),
        ("loaded_bytes", pa.uint64()),
        ("checked_bytes", pa.uint64()),
        ("wrong_bytes", pa.uint64()),
        ("stored_bytes", pa.uint64()),  # acknowledged, logical
        ("lookup_seconds", pa.float64()),
        ("load_seconds", pa.float64()),  # null: nothing to load
        ("store_seconds", pa.float64()),  # null: nothing to store
        ("store_outcome", pa.string()),  # null: nothing to store
    ]
)


class AccessLog:
    """Use as a context manager; rows are dicts with exactly the columns of SCHEMA. Left by an exception, no file appears."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(path.name + ".part")
        self._rows: list[dict[str, Any]] = []
        try:
            self._writer = pq.ParquetWriter(self._part, SCHEMA, compression="zstd")
        except OSError as error:
            raise UsageError("E100", f"--log {path}", error.strerror or str(error), "name a file in a folder you may write to") from None

    def append(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) >= ROWS_PER_GROUP:
            self._write()

    def _write(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, SCHEMA))
            self._rows.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._write()
        self._writer.close()
        if kind is None:
            self._part.replace(self._path)
        else:
            self._part.unlink(missing_ok=True)
