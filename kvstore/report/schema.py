"""The access log as `kvstore report` reads it: the columns of docs/ACCESS_LOG.md, in order. `blocks` is never read here."""

from __future__ import annotations

import json
from typing import Any, Final

SCHEMA: Final = "kvstore.access/1"
METADATA_KEY: Final = b"kvstore"
MISS_REASONS: Final = ("unknown", "expired", "evicted", "lost_shards", "fidelity", "window", "tail", "deadline")
DAY: Final = 86400
# Age columns and their upper bounds in seconds, ascending; the last has none.
AGES: Final = {
    "1m": 60, "5m": 300, "1h": 3600, "6h": 6 * 3600, "12h": 12 * 3600, "1d": DAY, "2d": 2 * DAY, "3d": 3 * DAY, "5d": 5 * DAY,
    "7d": 7 * DAY, "14d": 14 * DAY, "more": None,
}  # fmt: skip
AGE_WORDS: Final = {
    "1m": "1 min", "5m": "5 min", "1h": "1 h", "6h": "6 h", "12h": "12 h", "1d": "1 d", "2d": "2 d", "3d": "3 d", "5d": "5 d",
    "7d": "7 d", "14d": "14 d", "more": "more",
}  # fmt: skip
LABELS: Final = ("tenant", "model", "retention_class")
MISS_COLUMNS: Final = tuple(f"miss_{reason}" for reason in MISS_REASONS)
AGE_COLUMNS: Final = tuple(f"age_{age}" for age in AGES)
TOKEN_COLUMNS: Final = ("input_tokens", "hit_tokens", *MISS_COLUMNS, *AGE_COLUMNS)
GHOST_DAYS: Final = 14  # what the nodes remember of what they dropped


def column_types() -> dict[str, Any]:
    """Name -> Arrow type of every column but `blocks`; the labels may be dictionaries or plain text."""
    import pyarrow as pa

    return {
        "time": pa.timestamp("ms", tz="UTC"),
        **dict.fromkeys(LABELS, pa.string()),
        **dict.fromkeys(TOKEN_COLUMNS, pa.uint32()),
        "lookup_seconds": pa.float32(),
    }


def problem_of(schema: Any) -> str:
    """Why a Parquet file with this Arrow schema is no access log that can be read here; "" where it is one."""
    import pyarrow as pa

    try:
        told = json.loads((schema.metadata or {}).get(METADATA_KEY, b"null"))
    except ValueError:
        told = None
    name = told.get("schema") if isinstance(told, dict) else None
    if not isinstance(name, str):
        return "a Parquet file, but no access log of kvstore"
    if name != SCHEMA:
        return f'has schema "{name[:60]}", known here is "{SCHEMA}"'
    for column, wanted in column_types().items():
        at = schema.get_field_index(column)
        if at < 0:
            return f"has no column {column}, or two"
        found = schema.field(at).type
        plain = found.value_type if pa.types.is_dictionary(found) else found
        if plain != wanted and not (wanted == pa.string() and plain == pa.large_string()):
            return f"column {column} is {found}, not {wanted}"
    return ""
