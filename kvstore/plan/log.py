"""Access logs (docs/ACCESS_LOG.md) as arrays: salted fingerprints of each prompt's blocks, all of them or a sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvstore.errors import InputError
from kvstore.plan.accesses import U64, Accesses, numbered

SCHEMA: Final = "kvstore.access/1"
COLUMNS: Final = ("time", "input_tokens", "blocks")


def is_log(path: Path) -> bool:
    return path.is_dir()


def read_log(directory: Path, *, rate: float = 1.0) -> Accesses:
    """All rows in time order; `rate` below the log's own sample drops blocks while reading, so that long logs fit in memory.

    Raises InputError: no files, another schema, files of different block sizes.
    """
    files = sorted(directory.glob("access-*.parquet"))
    if not files:
        raise InputError("E142", str(directory), "no access-*.parquet in it", "name the directory of an access log, or a trace file")
    heads = [_head(path) for path in files]
    block_tokens = int(heads[0]["block_tokens"])
    for path, head in zip(files, heads, strict=True):
        if int(head["block_tokens"]) != block_tokens:
            raise InputError("E142", str(path), f"blocks of {head['block_tokens']} tokens, others have {block_tokens}", "plan one of them")
    sample = min(rate, *(float(head["sample"]) for head in heads))
    parts = [_read(path, sample) for path in files]
    times, tokens, counts, blocks = (np.concatenate([part[at] for part in parts]) for at in range(4))
    if not len(times):
        raise InputError("E111", str(directory), "it has no request to plan from", "name another log")
    order = np.argsort(times, kind="stable")
    starts = np.cumsum(counts) - counts
    sorted_counts = counts[order]
    ends = np.cumsum(sorted_counts)
    picked = np.repeat(starts[order] - (ends - sorted_counts), sorted_counts) + np.arange(int(counts.sum()))
    if not len(blocks):
        raise InputError("E111", str(directory), "no blocks in its rows: nothing to plan from", "log them: docs/ACCESS_LOG.md, `blocks`")
    ids, fingerprints = numbered(blocks[picked])
    return Accesses(
        ids=ids,
        ends=ends.astype(np.uint64),
        times_ms=times[order].astype(np.uint64),
        input_tokens=tokens[order].astype(np.uint64),
        output_tokens=np.zeros(len(times), np.uint64),
        sessions=np.full(len(times), -1, np.int64),
        fingerprints=fingerprints,
        block_tokens=block_tokens,
        sample=sample,
    )


def _head(path: Path) -> dict[str, float]:
    try:
        schema = pq.read_schema(path)
    except (OSError, ValueError):
        raise InputError("E142", str(path), "not a Parquet file", "remove it from the log") from None
    try:
        head = json.loads((schema.metadata or {}).get(b"kvstore", b"null"))
    except ValueError:
        head = None
    if not isinstance(head, dict):
        head = {}
    cause = "" if head.get("schema") == SCHEMA else f"its schema is {head.get('schema')}, not {SCHEMA}"
    for name, wanted in zip(COLUMNS, (pa.timestamp("ms", "UTC"), pa.uint32(), pa.list_(pa.uint64())), strict=True):
        at = schema.get_field_index(name)
        if not cause and (at < 0 or schema.field(at).type != wanted):
            cause = f"column {name} is {schema.field(at).type}, not {wanted}" if at >= 0 else f"no column {name}"
    size, sample = head.get("block_tokens"), head.get("sample")
    if not cause and not (isinstance(size, int) and 0 < size < 2**32 and isinstance(sample, int | float) and 0 <= sample <= 1):
        cause = f"tells blocks of {size} tokens and a sample of {sample}"
    if cause:
        raise InputError("E142", str(path), cause, "name the directory of an access log")
    return dict(head)


def _read(path: Path, sample: float) -> Sequence[U64]:
    try:
        table = pq.read_table(path, columns=list(COLUMNS)).drop_null()  # a log has none, but a file that says it is one may
        stamps = table["time"].cast(pa.timestamp("ms", "UTC")).cast(pa.int64())
    except (OSError, ValueError) as error:
        cause = (str(error).splitlines() or ["damaged"])[0][:120]
        raise InputError("E142", str(path), f"cannot be read: {cause}", "remove it from the log") from None
    table, stamps = (each.filter(pc.greater_equal(stamps, 0)) for each in (table, stamps))
    times = stamps.to_numpy().astype(np.uint64)
    tokens = table["input_tokens"].to_numpy().astype(np.uint64)
    lists = table["blocks"].combine_chunks()
    lists = pa.concat_arrays(lists.chunks) if isinstance(lists, pa.ChunkedArray) else lists
    counts = np.diff(lists.offsets.to_numpy()).astype(np.int64)
    blocks = lists.flatten().to_numpy().astype(np.uint64)
    if sample < 1:
        kept = blocks < np.uint64(int(sample * 2**64))
        row = np.repeat(np.arange(len(counts)), counts)
        counts = np.bincount(row[kept], minlength=len(counts))
        blocks = blocks[kept]
    return times, tokens, counts.astype(np.int64), blocks
