"""The access log as `kvstore report` reads it: the columns that kvstore/client/access_log.py writes, but `blocks`, which is never read."""

from __future__ import annotations

import json
from typing import Any, Final

from kvstore.metrics import MISS_REASONS, REUSE_AGE_BOUNDS_SECONDS, REUSE_AGE_NAMES

METADATA_KEY: Final = b"kvstore"
DAY: Final = 86400
# Age columns and their upper bounds in seconds, ascending; the last has none.
AGES: Final[dict[str, float | None]] = dict(zip(REUSE_AGE_NAMES, (*REUSE_AGE_BOUNDS_SECONDS, None), strict=True))
AGE_WORDS: Final = {name: name if name == "more" else f"{name[:-1]} {'min' if name[-1] == 'm' else name[-1]}" for name in AGES}
LABELS: Final = ("tenant", "model", "retention_class")
MISS_COLUMNS: Final = tuple(f"miss_{reason}" for reason in MISS_REASONS)
AGE_COLUMNS: Final = tuple(f"age_{age}" for age in AGES)
TOKEN_COLUMNS: Final = ("input_tokens", "hit_tokens", *MISS_COLUMNS, *AGE_COLUMNS)
GHOST_DAYS: Final = 14  # what the nodes remember of what they dropped


def column_types() -> dict[str, Any]:
    """Name -> Arrow type of every column but `blocks`; of the labels, of what their dictionaries hold."""
    from kvstore.client.access_log import schema

    return {field.name: getattr(field.type, "value_type", field.type) for field in schema() if field.name != "blocks"}


def problem_of(schema: Any) -> str:
    """Why a Parquet file with this Arrow schema is no access log that can be read here; "" where it is one."""
    import pyarrow as pa

    from kvstore.client.access_log import SCHEMA_NAME

    try:
        told = json.loads((schema.metadata or {}).get(METADATA_KEY, b"null"))
    except ValueError:
        told = None
    name = told.get("schema") if isinstance(told, dict) else None
    if not isinstance(name, str):
        return "a Parquet file, but no access log of kvstore"
    if name != SCHEMA_NAME:
        return f'has schema "{name[:60]}", known here is "{SCHEMA_NAME}"'
    for column, wanted in column_types().items():
        at = schema.get_field_index(column)
        if at < 0:
            return f"has no column {column}, or two"
        found = schema.field(at).type
        plain = found.value_type if pa.types.is_dictionary(found) else found
        if plain != wanted and not (wanted == pa.string() and plain == pa.large_string()):
            return f"column {column} is {found}, not {wanted}"
    return ""
