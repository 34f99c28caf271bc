"""Owners (tenants) as a node is told of them: a name for people, the tag that stands in records, and how many bytes are theirs.

    [owners.default]                            --owner name=default,floor=100GB
    floor = "100GB"
    [owners.acme]                               --owner name=acme,tag=9f86d081884c7d659a2feaa0c55ad015,cap=400GB
    tag = "9f86d081884c7d659a2feaa0c55ad015"
    cap = "400GB"

"default" is the owner of all zeros. Owners that nobody names share the label "other" and have no limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.errors import ConfigError
from kvstore.tomlfile import Table, suggestion
from kvstore.units import format_bytes, parse_bytes

DEFAULT: Final = "default"
OTHER: Final = "other"
NAMES_MAX: Final = 64  # each is a label value
TAG_BYTES: Final = 16
_NAME: Final = r"[a-z0-9][a-z0-9.-]{0,62}"
_TAG: Final = r"[0-9a-f]{32}"
_KEYS: Final = ("tag", "floor", "cap")


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """Bytes of records on one node. Under its floor an owner loses nothing to others; over its cap it loses its own oldest."""

    floor_bytes: int = 0
    cap_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.floor_bytes < 0 or (self.cap_bytes is not None and self.cap_bytes < self.floor_bytes):
            raise ConfigError(
                "E132", f"floor {self.floor_bytes}, cap {self.cap_bytes}", fix="a floor is 0 or more, a cap no less than the floor"
            )

    def __str__(self) -> str:
        return f"floor {format_bytes(self.floor_bytes)}, " + ("no cap" if self.cap_bytes is None else f"cap {format_bytes(self.cap_bytes)}")


@dataclass(frozen=True, slots=True)
class Owner:
    name: str
    tag: bytes
    limits: OwnerLimits

    @classmethod
    def of(cls, name: str, fields: Mapping[str, str]) -> Owner:
        """From texts by key: tag, floor, cap. Raises ConfigError, without the place."""
        if re.fullmatch(_NAME, name) is None or name == OTHER:
            raise ConfigError("E106", f'owner "{name}"', fix=f'use a-z, 0-9, - and up to 63 characters, and not "{OTHER}"')
        tag = fields.get("tag", "0" * 2 * TAG_BYTES if name == DEFAULT else "")
        if re.fullmatch(_TAG, tag) is None or (name == DEFAULT) != (int(tag, 16) == 0):
            what = f'owner "{name}" has ' + (f'tag "{tag}"' if tag else "no tag")
            raise ConfigError("E132", what, fix='write the 32 hex digits that its clients give; only "default" is all zeros')
        floor, cap = (parse_bytes(fields[key], f'owner "{name}": {key}') if key in fields else None for key in ("floor", "cap"))
        return cls(name, bytes.fromhex(tag), OwnerLimits(floor or 0, cap))

    @property
    def argument(self) -> str:
        """What `--owner` reads."""
        parts = [f"name={self.name}", f"tag={self.tag.hex()}", f"floor={self.limits.floor_bytes}"]
        return ",".join(parts + ([] if self.limits.cap_bytes is None else [f"cap={self.limits.cap_bytes}"]))


def owner_of_table(name: str, table: Table) -> Owner:
    """From one `[owners.NAME]` table. Raises ConfigError with file and line."""
    fields = {key: str(value) for key in ("floor", "cap") if (value := table.parsed(key, parse_bytes, None)) is not None}
    if tag := table.text("tag", ""):
        fields["tag"] = tag
    table.done()
    try:
        return Owner.of(name, fields)
    except ConfigError as error:
        raise table.fail(error.code, None, error.what, error.fix) from None


def owner_of_argument(text: str) -> Owner:
    """From the text of one `--owner`. Raises ConfigError."""
    fields: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key in fields or key not in ("name", *_KEYS):
            fix = suggestion(key, ("name", *_KEYS)) if equals and key not in fields else "write name=NAME,tag=HEX,floor=SIZE,cap=SIZE"
            raise ConfigError("E132", f'--owner "{text}": "{part}" not understood', fix=fix)
        fields[key] = value
    try:
        return Owner.of(fields.pop("name", DEFAULT), fields)
    except ConfigError as error:
        raise ConfigError(error.code, f'--owner "{text}": {error.what}', fix=error.fix) from None


def merged(file: Iterable[Owner], arguments: Iterable[Owner]) -> tuple[Owner, ...]:
    """An argument replaces what the file says of that name. Raises ConfigError where two have one tag, or there are too many."""
    given = list(arguments)
    names = [owner.name for owner in given]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError("E132", f'--owner names "{twice}" twice', fix="give it once")
    found = [owner for owner in file if owner.name not in names] + given
    for at, owner in enumerate(found):
        if twin := next((other for other in found[:at] if other.tag == owner.tag), None):
            raise ConfigError("E132", f'owners "{twin.name}" and "{owner.name}" have the same tag', fix="give each its own")
    if len(found) > NAMES_MAX:
        raise ConfigError("E131", f"{len(found)} owners", fix=f"name at most {NAMES_MAX}; the others share the label {OTHER}")
    return tuple(found)
