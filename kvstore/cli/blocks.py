"""A file as a chain of blocks: what `put` stores and `get` restores, and the handle that names it.

The key of a block is made from a chain of digests over the file's bytes, so equal files share all blocks and files with an equal beginning
share that. A handle is a small JSON file that holds the chain; whoever has it can get the file back from the cluster.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.config import xdg
from kvstore.errors import InputError
from kvstore.keys import Namespace, external_keys
from kvstore.layout import BLOCK_BYTES_MAX, PRESETS, Layout
from kvstore.wholefile import write_whole

SCHEMA: Final = "kvstore.file/1"
HANDLE_BYTES_MAX: Final = 1 << 30
WINDOW_BYTES: Final = 64 << 20  # read, stored and loaded at once


@dataclass(frozen=True)
class Handle:
    """Everything needed to get a file back. `hashes` is the chain, one digest of 32 bytes a block."""

    name: str
    cluster: str
    file_bytes: int
    block_bytes: int
    digest: str  # BLAKE2b-256 of the whole file, hexadecimal
    hashes: tuple[bytes, ...]

    @property
    def layout(self) -> Layout:
        return layout_of(self.block_bytes)

    def keys(self) -> NDArray[np.uint8]:
        """Block keys (n, 32)."""
        namespace = Namespace(weights="kvstore put", kv_dtype="opaque", layout_digest=self.layout.digest())
        return external_keys(namespace, b"", self.hashes)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = {**vars(self), "schema": SCHEMA, "hashes": [each.hex() for each in self.hashes]}
        write_whole(path, json.dumps(fields))

    @classmethod
    def load(cls, path: Path) -> Handle:
        """Raises InputError where it is no handle."""
        try:
            if path.stat().st_size > HANDLE_BYTES_MAX:
                raise ValueError("too long")
            given: Any = json.loads(path.read_bytes())
            if given.pop("schema") != SCHEMA:
                raise ValueError("another schema")
            hashes = tuple(bytes.fromhex(each) for each in given.pop("hashes"))
            handle = cls(**given, hashes=hashes)
            texts, numbers = (handle.name, handle.cluster, handle.digest), (handle.file_bytes, handle.block_bytes)
            if {type(text) for text in texts} != {str} or {type(number) for number in numbers} != {int}:
                raise ValueError("fields of another type")
            handle_path(handle.name)  # it may come from elsewhere, and `get` writes to it
            blocks = -(-handle.file_bytes // handle.block_bytes)
            if not 1 <= handle.block_bytes <= BLOCK_BYTES_MAX or blocks != len(hashes) or any(len(each) != 32 for each in hashes):
                raise ValueError("fields do not fit")
        except OSError as error:
            raise InputError("E142", f"cannot read {path}", (error.strerror or "").lower(), "check the path") from None
        except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, RecursionError):
            raise InputError(
                "E142", f"{path} is not a handle of kvstore put", fix="give the JSON file that put wrote, or the name"
            ) from None
        return handle


def layout_of(block_bytes: int) -> Layout:
    """The layout with planes that has this size, else one opaque section."""
    return PRESETS["v41"] if block_bytes == PRESETS["v41"].block_bytes else Layout.single(block_bytes)


def handles_directory() -> Path:
    return xdg("state") / "files"


def handle_path(name: str) -> Path:
    """Where the handle of `name` lies. Raises InputError for names that could leave the directory."""
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_. +=@-]{0,199}", name) is None:
        raise InputError("E106", f'name "{name}"', fix="use letters, digits, blanks and ._+=@- (up to 200), as in --name model.bin")
    return handles_directory() / f"{name}.json"


def scan(file: IO[bytes], name: str, cluster: str, block_bytes: int) -> Handle:
    """Reads a file once, from its beginning, for its handle."""
    whole, chain = hashlib.blake2b(digest_size=32), b""
    hashes: list[bytes] = []
    count = 0
    while chunk := _read_exactly(file, block_bytes):
        whole.update(chunk)
        chain = _link(chain, chunk)
        hashes.append(chain)
        count += len(chunk)
    return Handle(name, cluster, count, block_bytes, whole.hexdigest(), tuple(hashes))


def windows(file: IO[bytes], handle: Handle, first_block: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(ordinal of the first block, blocks (n, block_bytes)) from `first_block` to the end; the last block is padded with zeros. Raises
    InputError where the bytes are no longer those of the scan: they would be stored under the keys of others."""
    step = max(1, WINDOW_BYTES // handle.block_bytes)
    file.seek(first_block * handle.block_bytes)
    chain = handle.hashes[first_block - 1] if first_block else b""
    for at in range(first_block, len(handle.hashes), step):
        count = min(step, len(handle.hashes) - at)
        blocks = np.zeros((count, handle.block_bytes), np.uint8)
        raw = _read_exactly(file, min(count * handle.block_bytes, handle.file_bytes - at * handle.block_bytes))
        for block in range(count):
            chain = _link(chain, raw[block * handle.block_bytes : (block + 1) * handle.block_bytes])
            if chain != handle.hashes[at + block]:
                raise InputError("E142", f"{handle.name} changed while it was read", fix="put it when nobody writes to it, or a copy of it")
        blocks.reshape(-1)[: len(raw)] = np.frombuffer(raw, np.uint8)
        yield at, blocks


def _link(chain: bytes, chunk: bytes) -> bytes:
    """The chain's next digest: what stands for a block and all before it."""
    return hashlib.blake2b(chain + len(chunk).to_bytes(8, "little") + chunk, digest_size=32).digest()


def _read_exactly(file: IO[bytes], count: int) -> bytes:
    """`count` bytes, fewer only at the end of the file."""
    parts = []
    while count and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
