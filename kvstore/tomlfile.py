"""TOML read strictly: every complaint names file, line and field, and says what to write instead. Unknown keys are errors.

`tomllib` gives no positions, so a line-by-line scan finds the line of a key afterwards, for messages only: never for values.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from kvstore.errors import ConfigError

TOML_BYTES_MAX: Final = 64 << 20  # 7,360 nodes in 20 epochs are ~15 MB


class TomlFile:
    """One parsed file and the name it is complained about with."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self._text = text
        try:
            self.data: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError("E100", f"{name} is not TOML", str(error), "correct that line") from None
        except (ValueError, RecursionError):  # thousands of digits, or of brackets
            raise ConfigError("E100", f"{name} is no kvstore file", "a number too long, or nested too deep", "name another file") from None

    @classmethod
    def load(cls, path: str | Path) -> TomlFile:
        path = Path(path)
        try:
            with path.open("rb") as file:
                raw = file.read(TOML_BYTES_MAX + 1)
        except OSError as error:
            raise ConfigError("E100", f"cannot read {path}", (error.strerror or str(error)).lower(), "check the path") from None
        if len(raw) > TOML_BYTES_MAX:
            raise ConfigError("E100", f"{path} is longer than {TOML_BYTES_MAX} bytes", fix="this is not a kvstore file")
        try:
            return cls(raw.decode(), str(path))
        except UnicodeDecodeError:
            raise ConfigError("E100", f"{path} is not text", "not UTF-8", "give a TOML file") from None

    def line_of(self, table: str, index: int | None, key: str | None) -> int | None:
        """Line of `key` in `[table]` (or the index-th `[[table]]`; "" is the top), or of the header where key is None."""
        current, seen = "", 0
        for number, line in enumerate(self._text.splitlines(), 1):
            stripped = line.strip()
            if header := re.match(r"\[\[?\s*([^\]]+?)\s*\]", stripped):
                current = header[1]
                seen += current == table
                if key is None and current == table and (index is None or seen == index + 1):
                    return number
            elif (
                key is not None
                and current == table
                and (index is None or seen == index + 1)
                and re.match(rf"[\"']?{re.escape(key)}[\"']?\s*=", stripped)
            ):
                return number
        return None

    def at(self, table: str = "", index: int | None = None, key: str | None = None) -> str:
        """ "map.toml:12" or, where the line is not found, "map.toml"."""
        line = self.line_of(table, index, key)
        return self.name if line is None else f"{self.name}:{line}"

    def fail(self, code: str, what: str, fix: str, *, table: str = "", index: int | None = None, key: str | None = None) -> ConfigError:
        """The exception to raise: `what` with its place in front."""
        return ConfigError(code, f"{self.at(table, index, key)}: {what}", fix=fix)

    def table(self, name: str = "", index: int | None = None, values: dict[str, Any] | None = None) -> Table:
        """A view over one table whose keys are taken one by one; `done()` complains about what is left."""
        return Table(self, name, index, self.data if values is None else values)


class Table:
    """Takes fields out of a table with their types checked; what nobody took is an unknown key."""

    def __init__(self, file: TomlFile, name: str, index: int | None, values: dict[str, Any]) -> None:
        self.file, self.name, self.index = file, name, index
        self._values = dict(values)
        self._known: list[str] = []

    def fail(self, code: str, key: str | None, what: str, fix: str) -> ConfigError:
        return self.file.fail(code, what, fix, table=self.name, index=self.index, key=key)

    def _take(self, key: str, default: Any) -> Any:
        self._known.append(key)
        if key in self._values:
            return self._values.pop(key)
        if default is ...:
            where = f"[[{self.name}]]" if self.index is not None else f"[{self.name}]" if self.name else "the file"
            raise self.fail("E130", None, f'{where} has no "{key}"', f"add {key} = ...")
        return default

    def integer(self, key: str, low: int, high: int, default: Any = ...) -> int:
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail("E131", key, f'"{key}" is {_shown(value)}', f"write a whole number from {low} to {high}")
        if not low <= value <= high:
            raise self.fail("E131", key, f'"{key}" is {value}', f"write a whole number from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: Any = ...) -> float:
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.fail("E131", key, f'"{key}" is {_shown(value)}', f"write a number from {low:g} to {high:g}")
        return float(value)

    def text(self, key: str, default: Any = ..., *, pattern: str = r".{0,255}", form: str = "up to 255 characters") -> str:
        value = self._take(key, default)
        if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
            raise self.fail("E132", key, f'"{key}" is {_shown(value)}', f"write {form}")
        return value

    def parsed(self, key: str, parse: Callable[[Any], Any], default: Any = ...) -> Any:
        """A field that a function reads ("7d", "4TB"); its complaint gets the place."""
        value = self._take(key, default)
        if value is default:
            return value
        try:
            return parse(value)
        except ConfigError as error:
            raise self.fail(error.code, key, error.what, error.fix) from None

    def texts(self, key: str, default: Any = ...) -> list[str]:
        value = self._take(key, default)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail("E132", key, f'"{key}" is {_shown(value)}', 'write a list of texts, as in ["node-00", "node-01"]')
        return list(value)

    def tables(self, key: str) -> list[Table]:
        """The `[[key]]` tables (top level only)."""
        value = self._take(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.fail("E132", key, f'"{key}" is not a list of tables', f"write [[{key}]] before each")
        return [Table(self.file, key, index, item) for index, item in enumerate(value)]

    def subtables(self, key: str) -> dict[str, Table]:
        """The `[key.NAME]` tables, by name."""
        value = self._take(key, {})
        if not isinstance(value, dict) or not all(isinstance(item, dict) for item in value.values()):
            raise self.fail("E132", key, f'"{key}" is not a table of tables', f"write [{key}.NAME] before each")
        return {name: Table(self.file, f"{key}.{name}", None, item) for name, item in value.items()}

    def done(self) -> None:
        """Raises E101 for the first key that nobody took."""
        for key in self._values:
            raise self.fail("E101", key, f'unknown key "{key}"', suggestion(key, self._known))


def suggestion(word: str, known: Sequence[str] | Iterable[str]) -> str:
    """ "did you mean ...?" where something is near, else the list of what exists."""
    names = list(known)
    near = [name for name in names if sorted(name) == sorted(word)] or difflib.get_close_matches(word, names, n=1)
    return f'did you mean "{near[0]}"?' if near else f"known here: {', '.join(names)}"


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value) if not isinstance(value, bool) else str(value).lower()
