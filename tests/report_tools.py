"""Access logs for tests, written by pyarrow as docs/ACCESS_LOG.md says, and independent of what reads them."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from cli_tool import Ran

from kvstore.cli.main import main

MISSES = ("unknown", "expired", "evicted", "lost_shards", "fidelity", "window", "tail", "deadline")
AGES = ("1m", "5m", "1h", "6h", "12h", "1d", "2d", "3d", "5d", "7d", "14d", "more")
NUMBERS = ("input_tokens", "hit_tokens", *(f"miss_{name}" for name in MISSES), *(f"age_{name}" for name in AGES))
NOON = datetime.datetime(2026, 11, 20, 12, tzinfo=datetime.UTC)
DICTIONARY = pa.dictionary(pa.int32(), pa.string())
FIELDS = [
    pa.field("time", pa.timestamp("ms", tz="UTC")),
    *(pa.field(name, DICTIONARY) for name in ("tenant", "model", "retention_class")),
    *(pa.field(name, pa.uint32()) for name in NUMBERS),
    pa.field("lookup_seconds", pa.float32()),
    pa.field("blocks", pa.list_(pa.uint64())),
]


def row(
    days: float = 0.0, tenant: str = "acme", model: str = "m", cls: str = "chat", seconds: float = 0.002, **numbers: int
) -> dict[str, Any]:
    """One request `days` after NOON: `hit`, `expired=`, `unknown=` ... and `age_1d=` in tokens; the input is their sum unless given."""
    found: dict[str, Any] = {"time": NOON + datetime.timedelta(days=days), "tenant": tenant, "model": model, "retention_class": cls}
    found |= dict.fromkeys(NUMBERS, 0) | {"lookup_seconds": seconds, "blocks": [1, 2**64 - 1]}
    for name, value in numbers.items():
        found["hit_tokens" if name == "hit" else f"miss_{name}" if name in MISSES else name] = value
    if "input_tokens" not in numbers:
        found["input_tokens"] = found["hit_tokens"] + sum(found[f"miss_{name}"] for name in MISSES)
    return found


def write(
    path: Path, rows: Sequence[Mapping[str, Any]], schema_name: str = "kvstore.access/1", fields: Sequence[pa.Field] = FIELDS
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {"schema": schema_name, "block_tokens": 128, "sample": 1.0, "version": "0.1.0"}
    schema = pa.schema(list(fields), metadata={"kvstore": json.dumps(told)})
    pq.write_table(pa.Table.from_pylist([dict(each) for each in rows], schema=schema), path, compression="zstd")
    return path


class Here:
    """As `Cli`, but in this process: the same code without a start of the interpreter each time. Paths are below `home`."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def run(self, *arguments: str | Path) -> Ran:
        stdout, stderr = io.StringIO(), io.StringIO()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "XDG_"))}
        before, environ = Path.cwd(), dict(os.environ)
        os.environ.clear()
        os.environ.update(kept, HOME=str(self.home))
        os.chdir(self.home)
        try:
            with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
                code = main([str(each) for each in arguments])
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(environ)
        return Ran(code, stdout.getvalue(), stderr.getvalue())
