"""The access log of a client: one row a lookup, in Parquet files that appear whole. docs/ACCESS_LOG.md lists the columns; names are API.

Invariants: a file is written beside its name and renamed; all files of a folder together stay below `bytes_max`, the oldest go first;
fingerprints are keyed with DIR/salt, which never leaves the folder. A disk that is full or stands still loses rows, counted: nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import secrets
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.client.native import U8
from kvstore.client.reasons import Split
from kvstore.errors import ConfigError
from kvstore.kernels import _native
from kvstore.metrics import MISS_REASONS, REUSE_AGE_NAMES
from kvstore.version import version

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_NAME: Final = "kvstore.access/1"
SALT_BYTES: Final = 16
ROWS_MAX: Final = 100_000  # of a file
PRINTS_MAX: Final = 8_000_000  # of a file: fingerprints, 64 MB in memory
TOKENS_MAX: Final = 2**32 - 1  # of a column
log = logging.getLogger(__name__)
_numbers = itertools.count()
_own = secrets.token_hex(4)  # hosts may share a folder, and pids


def schema() -> pa.Schema:
    import pyarrow as pa  # late: only those who log pay for it

    names = pa.dictionary(pa.int32(), pa.string())
    tokens = [("input_tokens", pa.uint32()), ("hit_tokens", pa.uint32())]
    tokens += [(f"miss_{reason}", pa.uint32()) for reason in MISS_REASONS] + [(f"age_{name}", pa.uint32()) for name in REUSE_AGE_NAMES]
    return pa.schema(
        [
            ("time", pa.timestamp("ms", "UTC")),
            ("tenant", names),
            ("model", names),
            ("retention_class", names),
            *tokens,
            ("lookup_seconds", pa.float32()),
            ("blocks", pa.list_(pa.uint64())),
        ]
    )


def fingerprints(keys: U8, salt: bytes) -> npt.NDArray[np.uint64]:
    """(n,) from keys (n, 32): SipHash-2-4, so that only who has the salt (16 bytes) can tell which key it was."""
    out = np.empty(len(keys), np.uint64)
    _native.fingerprints(salt, np.ascontiguousarray(keys), out)
    return out


class AccessLog:
    """`append` and `roll` come from one thread at a time each; both may."""

    def __init__(
        self, directory: Path, *, tenant: str, model: str, block_tokens: int, sample: float, bytes_max: int, file_seconds: float
    ) -> None:
        """Makes the folder and its salt where they are not there. Raises ConfigError E152."""
        self._directory = directory
        self._tenant, self._model = tenant, model
        self._block_tokens, self._sample = block_tokens, sample
        self._limit = np.uint64(min(int(sample * 2**64), 2**64 - 1))
        self._bytes_max, self._file_seconds = bytes_max, file_seconds
        self._lock = threading.Lock()  # of what waits: never held while a disk is waited for
        self._writing = threading.Lock()
        self._rows: list[tuple[Any, ...]] = []
        self._prints = 0  # in them
        self._closed = False
        self._opened = 0.0
        self.written = self.dropped = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._salt = _salt(directory / "salt")
        except OSError as error:
            cause = (error.strerror or str(error)).lower()
            raise ConfigError("E152", f"access log {directory}", cause, "name a folder that this process may write to") from None

    def append(self, unix_ms: int, retention_class: str, parts: Split, lookup_seconds: float, keys: U8) -> None:
        prints = fingerprints(keys, self._salt)
        if self._sample < 1:
            prints = prints[prints < self._limit]
        if parts.input_tokens > TOKENS_MAX:  # a caller's mistake that would cost the whole file
            raise ValueError(f"{parts.input_tokens} tokens in one lookup")
        row = (unix_ms, retention_class, parts.input_tokens, parts.hit_tokens, *parts.missed, *parts.ages, lookup_seconds, prints)
        with self._lock:
            if self._closed or len(self._rows) >= 2 * ROWS_MAX or self._prints >= 2 * PRINTS_MAX:  # a disk that stands still
                self.dropped += 1
                return
            if not self._rows:
                self._opened = time.monotonic()
            self._rows.append(row)
            self._prints += len(prints)

    def due_seconds(self) -> float | None:
        """Until the file should be closed; 0: now; None: there is nothing in it."""
        with self._lock:
            if not self._rows:
                return None
            full = len(self._rows) >= ROWS_MAX or self._prints >= PRINTS_MAX
            return 0 if full else max(0.0, self._opened + self._file_seconds - time.monotonic())

    def roll(self) -> None:
        """Writes what is there as one file."""
        with self._writing:
            with self._lock:
                rows, self._rows, self._prints = self._rows, [], 0
            if not rows:
                return
            try:
                self._write(rows)
                self.written += len(rows)
                self._bound()
            except Exception as error:  # the disk's, or of what Parquet cannot hold
                with self._lock:
                    self.dropped += len(rows)
                log.warning("%d rows of the access log in %s are lost: %s", len(rows), self._directory, error)

    def close(self) -> None:
        """What comes later is lost, and counted."""
        with self._lock:
            self._closed = True
        self.roll()

    def _write(self, rows: list[tuple[Any, ...]]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        fields = schema()
        times, classes, *numbers, seconds, prints = zip(*rows, strict=True)
        lengths = np.array([0, *(len(each) for each in prints)], np.int32).cumsum(dtype=np.int32)
        columns = [
            pa.array(times, pa.int64()).cast(pa.timestamp("ms", "UTC")),
            _names([self._tenant] * len(rows)),
            _names([self._model] * len(rows)),
            _names(classes),
            *(pa.array(np.array(column, np.uint32)) for column in numbers),
            pa.array(np.array(seconds, np.float32)),
            pa.ListArray.from_arrays(pa.array(lengths), pa.array(np.concatenate(prints))),
        ]
        about = {"schema": SCHEMA_NAME, "block_tokens": self._block_tokens, "sample": self._sample, "version": version()}
        table = pa.Table.from_arrays(columns, schema=fields.with_metadata({"kvstore": json.dumps(about)}))
        name = f"access-{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}-{_own}-{next(_numbers)}.parquet"
        part = self._directory / f".{name}.part"
        try:
            pq.write_table(table, part, compression="zstd", use_dictionary=["tenant", "model", "retention_class"])
            part.replace(self._directory / name)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _bound(self) -> None:
        """The oldest files go, whichever process wrote them; one file always stays."""
        found = sorted(self._directory.glob("access-*.parquet"))
        sizes = []
        for path in found:
            with contextlib.suppress(FileNotFoundError):  # another process was here first
                sizes.append((path, path.stat().st_size))
        total = sum(size for _, size in sizes)
        for path, size in sizes[:-1]:
            if total <= self._bytes_max:
                return
            path.unlink(missing_ok=True)
            total -= size


def _names(values: Any) -> Any:
    import pyarrow as pa

    return pa.array(values, pa.string()).dictionary_encode()


def _salt(path: Path) -> bytes:
    """Made once by whoever comes first, whole from the first moment."""
    if not path.exists():
        part = path.with_name(f".salt-{os.getpid()}-{secrets.token_hex(4)}")
        part.touch(mode=0o600)
        part.write_bytes(secrets.token_bytes(SALT_BYTES))
        try:
            os.link(part, path)
        except FileExistsError:
            pass
        finally:
            part.unlink()
    salt = path.read_bytes()
    if len(salt) != SALT_BYTES:
        raise OSError(f"{path.name} has {len(salt)} bytes, not {SALT_BYTES}: remove it to begin anew")
    return salt
