"""Sizes and times as people write them ("4.8TB", "16GiB", "7d"), read and written. The grammar is closed: what does not fit is an error."""

from __future__ import annotations

import re

from kvstore.errors import ConfigError

_BYTES = {
    "": 1, "B": 1,
    "K": 10**3, "KB": 10**3, "KIB": 2**10,
    "M": 10**6, "MB": 10**6, "MIB": 2**20,
    "G": 10**9, "GB": 10**9, "GIB": 2**30,
    "T": 10**12, "TB": 10**12, "TIB": 2**40,
    "P": 10**15, "PB": 10**15, "PIB": 2**50,
}  # fmt: skip
_SECONDS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int, what: str = "size") -> int:
    """Bytes of "4.8TB" (powers of 1000), "16GiB" (powers of 1024) or a plain number. Raises ConfigError E102."""
    match = _NUMBER.fullmatch(str(text))
    if match is None or match[2].upper() not in _BYTES:
        raise ConfigError("E102", f'{what} "{text}" is not a size', fix="write it as 4.8TB or 4.8TiB")
    return int(float(match[1]) * _BYTES[match[2].upper()] + 0.5) if "." in match[1] else int(match[1]) * _BYTES[match[2].upper()]


def parse_seconds(text: str | int | float, what: str = "time") -> float:
    """Seconds of "250ms", "10s", "5m", "3h", "7d" or a plain number. Raises ConfigError E102."""
    match = _NUMBER.fullmatch(str(text))
    if match is None or match[2].lower() not in _SECONDS:
        raise ConfigError("E102", f'{what} "{text}" is not a time', fix="write it as 250ms, 10s, 5m, 3h or 7d")
    return float(match[1]) * _SECONDS[match[2].lower()]


def parse_long_seconds(text: str, what: str = "time") -> float:
    """As parse_seconds, for hours and days, where who writes "4" has not meant seconds. Raises ConfigError E102."""
    if text.strip().replace(".", "", 1).isdecimal():
        raise ConfigError("E102", f'{what} "{text}" has no unit', fix="write it as 30m, 4h or 2d")
    return parse_seconds(text, what)


def format_bytes(count: float) -> str:
    """ "113.9 kB", "4.0 GB": powers of 1000, three or four digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PB"


def format_seconds(seconds: float) -> str:
    """ "1.8 ms", "4.2 s", "12 min", "3.5 h", "6.9 d"."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    for limit, unit, name in ((100, 1, "s"), (3597, 60, "min"), (86220, 3600, "h")):  # what would round to 60.0 min is an hour
        if seconds < limit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds / 86400:.1f} d"
