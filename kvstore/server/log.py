"""Lines of a daemon on stderr: text on a terminal, one JSON object a line elsewhere. Never prompts, never keys."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

from kvstore.config import LOG_LEVELS
from kvstore.errors import KvstoreError


class LogHandler(logging.Handler):
    """Writes what other modules tell the standard logger: one line each, the exception's own line appended, no trace."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        cause = f": {record.exc_info[1]!r}" if record.exc_info else ""
        write = self._log.error if record.levelno >= logging.ERROR else self._log.warn
        write(f"{record.getMessage()}{cause}", logger=record.name)


def follow_level(level: Callable[[], str]) -> None:
    """Takes the level of all logs of this process from `level` (one of LOG_LEVELS), now and at each `reread_level`. Raises ConfigError."""
    _Level.source, _Level.number = level, LOG_LEVELS.index(level())


class _Level:
    number = 0  # in LOG_LEVELS; what is below is not written
    source: Callable[[], str] = staticmethod(lambda: LOG_LEVELS[0])


class Log:
    """Safe for all threads. A message repeated within `repeat_seconds` is dropped and counted in the next one."""

    def __init__(self, node_id: str, stream: TextIO | None = None, repeat_seconds: float = 10.0) -> None:
        self.node_id = node_id
        self.stream = sys.stderr if stream is None else stream
        self.repeat_seconds = repeat_seconds
        self.text = self.stream.isatty()
        self._lock = threading.Lock()
        self._last: dict[str, tuple[datetime, int]] = {}  # message -> when it was written, how often dropped since

    def reread_level(self) -> None:
        """On SIGHUP. Where the configuration is bad, the level stays."""
        before = LOG_LEVELS[_Level.number]
        try:
            _Level.number = LOG_LEVELS.index(now := _Level.source())
        except KvstoreError as error:
            self.error(f"log level {before} stays: {error}")
            return
        if now != before:
            self._write("warn", f"log level {now}, was {before}", {}, always=True)

    def info(self, message: str, **fields: object) -> None:
        self._write("info", message, fields)

    def warn(self, message: str, **fields: object) -> None:
        self._write("warn", message, fields)

    def error(self, message: str, **fields: object) -> None:
        self._write("error", message, fields)

    def _write(self, level: str, message: str, fields: dict[str, object], *, always: bool = False) -> None:
        if LOG_LEVELS.index(level) < _Level.number and not always:
            return
        now = datetime.now(UTC)
        with self._lock:
            when, dropped = self._last.get(message, (None, 0))
            if level != "info" and when is not None and (now - when).total_seconds() < self.repeat_seconds:
                self._last[message] = (when, dropped + 1)
                return
            if level != "info":
                self._last[message] = (now, 0)
                while len(self._last) > 256:
                    self._last.pop(next(iter(self._last)))
            if dropped:
                fields = {**fields, "repeated": dropped}
            stamp = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            if self.text:
                extra = "".join(f"  {key}={value}" for key, value in fields.items())
                line = f"{stamp} {self.node_id} {'' if level == 'info' else level + ' '}{message}{extra}"
            else:
                line = json.dumps({"time": stamp, "level": level, "node": self.node_id, "msg": message, **fields})
            print(line, file=self.stream, flush=True)
