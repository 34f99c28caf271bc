"""Access logs of invented but plausible traffic, written as docs/ACCESS_LOG.md says, by numpy: seeded, about a million rows a second.

`blocks` stays empty: `kvstore report` never reads it, and fingerprints would be nine tenths of the bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvstore.client.access_log import ROWS_MAX, SCHEMA_NAME, schema
from kvstore.report.schema import AGE_COLUMNS, LABELS, TOKEN_COLUMNS

BLOCK: Final = 128
CLASSES: Final = ("agent", "chat", "batch", "none")
MODELS: Final = ("large-1", "large-2", "small-1", "coder-1")
TENANTS: Final = 400
# Share of reuse in each age column, by class: agents come back soon, conversations over days.
_AGE_SHARES: Final = np.array(
    [
        [0.30, 0.28, 0.22, 0.08, 0.04, 0.03, 0.02, 0.02, 0.01, 0.0, 0.0, 0.0],
        [0.08, 0.14, 0.22, 0.16, 0.12, 0.10, 0.07, 0.04, 0.03, 0.02, 0.015, 0.005],
        [0.40, 0.35, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    ]
)


def file_schema() -> pa.Schema:
    """The writer's, with a file's metadata."""
    told = {"schema": SCHEMA_NAME, "block_tokens": BLOCK, "sample": 1.0, "version": "0.1.0"}
    return schema().with_metadata({"kvstore": json.dumps(told)})


def columns_of(random: np.random.Generator, rows: int, start_ms: int, span_ms: int) -> dict[str, Any]:
    """Rows whose parts add up: input = hit + misses, ages = hit + expired + evicted."""
    classes = random.choice(len(CLASSES), rows, p=[0.45, 0.4, 0.13, 0.02]).astype(np.int32)
    tenants = np.minimum(random.zipf(1.4, rows) - 1, TENANTS - 1).astype(np.int32)
    tokens = np.clip(random.lognormal(9.0, 1.2, rows), 16, 400_000).astype(np.int64)
    tail = np.minimum(tokens, tokens % BLOCK + BLOCK)
    whole = (tokens - tail) // BLOCK
    reused = (whole * np.clip(random.beta(2.0, 0.8, rows) * (random.random(rows) < 0.85), 0, 1)).astype(np.int64)
    kept = (reused * np.where(random.random(rows) < 0.9, 1.0, random.random(rows))).astype(np.int64)
    columns: dict[str, Any] = {name: np.zeros(rows, np.int64) for name in TOKEN_COLUMNS}
    columns["input_tokens"], columns["hit_tokens"], columns["miss_tail"] = tokens, kept * BLOCK, tail
    lost = (reused - kept) * BLOCK
    reason = random.random(rows)
    for name, low, high in (("expired", 0, 0.5), ("evicted", 0.5, 0.97), ("lost_shards", 0.97, 0.985), ("deadline", 0.985, 1.01)):
        columns[f"miss_{name}"] = np.where((reason >= low) & (reason < high), lost, 0)
    columns["miss_unknown"] = (whole - reused) * BLOCK
    edges = np.cumsum(_AGE_SHARES, axis=1)
    first = (random.random(rows)[:, None] > edges[classes]).sum(axis=1).clip(0, len(AGE_COLUMNS) - 1)
    later = np.minimum(first + random.integers(0, 3, rows), len(AGE_COLUMNS) - 1)
    young = (kept * random.random(rows)).astype(np.int64) * BLOCK
    dropped = columns["miss_expired"] + columns["miss_evicted"]
    for at, name in enumerate(AGE_COLUMNS):
        columns[name] = np.where(first == at, young, 0) + np.where(later == at, columns["hit_tokens"] - young + dropped, 0)
    columns["lookup_seconds"] = random.lognormal(-6.2, 0.6, rows).astype(np.float32)
    columns["time"] = start_ms + np.sort(random.integers(0, span_ms, rows))
    columns["tenant"], columns["retention_class"] = tenants, classes
    columns["model"] = ((tenants + random.integers(0, 2, rows)) % len(MODELS)).astype(np.int32)
    return columns


def table_of(columns: dict[str, Any]) -> pa.Table:
    fields = file_schema()
    words = {"tenant": [f"tenant-{n:03}" for n in range(TENANTS)], "model": MODELS, "retention_class": CLASSES}
    rows = len(columns["time"])
    arrays: list[Any] = []
    for field in fields:
        if field.name in words:
            arrays.append(pa.DictionaryArray.from_arrays(columns[field.name], pa.array(words[field.name])))
        elif field.name == "blocks":
            arrays.append(pa.ListArray.from_arrays(pa.array(np.zeros(rows + 1, np.int32)), pa.array([], pa.uint64())))
        else:
            arrays.append(pa.array(columns[field.name]).cast(field.type))
    return pa.table(arrays, schema=fields)


def write_log(directory: Path, rows_count: int, *, start_ms: int, days: float = 7.0, seed: int = 5) -> int:
    """Writes `rows_count` rows as files of 100,000, named as the writer names them; returns the bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    files = -(-rows_count // ROWS_MAX)
    span = int(days * 86_400_000 / files)
    total = 0
    for number in range(files):
        count = min(ROWS_MAX, rows_count - number * ROWS_MAX)
        begin = start_ms + number * span
        stamp = np.datetime_as_string(np.datetime64(begin, "ms"), unit="s").replace("-", "").replace(":", "")
        path = directory / f"access-{stamp}-{1000 + number % 4}-{number}.parquet"
        rows = table_of(columns_of(np.random.default_rng([seed, number]), count, begin, span))
        pq.write_table(rows, path, compression="zstd", use_dictionary=list(LABELS))  # as the writer does
        total += path.stat().st_size
    return total
