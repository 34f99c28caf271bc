"""Names of blocks: 32 bytes that stand for a block of tokens, all tokens before it, and everything that decides its bytes.

    namespace  = BLAKE2b-256(                  "kvstore.namespace.v1" | the fields of Namespace, in order)
    key_i      = BLAKE2b-256(secret: "kvstore.block.v1" | namespace | key_{i-1} (empty for the first) | tokens as u32 LE)
    foreign    = BLAKE2b-256(secret: "kvstore.ext.v1"   | namespace | hash that an engine chained itself)

with every field tagged and length-prefixed (`tagged.py`). The secret is the tenant's and never leaves the client: nodes see opaque bytes,
and two tenants never share a key. `docs/KEYS.md` has golden vectors. Never changes: all of the above.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore import tagged
from kvstore.errors import KeyFormatError
from kvstore.kernels import _native

KEY_BYTES = 32
BLOCK_TOKENS = 128
KEY_FORMAT = 1
NAMESPACE_DOMAIN = "kvstore.namespace.v1"

Keys: TypeAlias = npt.NDArray[np.uint8]  # (n, 32)
Tokens: TypeAlias = npt.NDArray[np.integer] | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """All that must be equal, besides the tokens, for stored bytes to be reusable. Contents, not names: two models of one name differ.

    Text and bytes are the same thing here (text is taken as UTF-8). This project's version is no field: an upgrade must keep its hits.
    """

    weights: bytes | str  # digest of the model's weights
    kv_dtype: str  # "bf16", "fp8_e4m3", "v41", ...
    layout_digest: bytes  # Layout.digest()
    adapter: bytes | str = b""  # digest of the adapter's weights; empty: none
    rope: bytes | str = b""  # overrides of the rotary embedding, canonical text; empty: the model's own
    kv_scales: bytes | str = b""  # digest of static quantisation scales; empty: none
    kv_group: int = 0  # which of the engine's groups of KV layers
    rank: int = 0  # of a model sharded over rank_count devices
    rank_count: int = 1
    key_format: int = KEY_FORMAT

    def __post_init__(self) -> None:
        for name in ("weights", "kv_dtype", "layout_digest", "adapter", "rope", "kv_scales"):
            if not isinstance(getattr(self, name), bytes | str):
                raise KeyFormatError("E531", f"namespace field {name!r}", "neither bytes nor text")
        if not self.weights or not self.kv_dtype:
            raise KeyFormatError("E532", "namespace", "weights and kv_dtype must not be empty", "give a digest of the weights")
        if len(self.layout_digest) != tagged.DIGEST_BYTES:
            raise KeyFormatError("E533", "namespace", f"layout_digest has {len(self.layout_digest)} bytes", "pass Layout.digest()")
        for name in ("kv_group", "rank", "rank_count", "key_format"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < 1 << 32:
                raise KeyFormatError("E534", f"namespace field {name!r}", f"{value!r} is not an integer from 0 to 2^32 - 1")
        if self.rank >= self.rank_count:
            raise KeyFormatError("E535", "namespace", f"rank {self.rank} of {self.rank_count}", "ranks count from 0")
        if self.key_format != KEY_FORMAT:
            raise KeyFormatError("E536", "namespace", f"key format {self.key_format} is not known", f"use {KEY_FORMAT}")

    def fields(self) -> tuple[tuple[str, bytes], ...]:
        """Name and hashed bytes of each field, in the order that is hashed. Two namespaces differ where these differ."""
        contents = ("weights", "adapter", "rope", "kv_dtype", "kv_scales", "layout_digest")
        numbers = ("kv_group", "rank", "rank_count", "key_format")
        return tuple((name, _as_bytes(getattr(self, name))) for name in contents) + tuple(
            (name, struct.pack("<I", getattr(self, name))) for name in numbers
        )

    def digest(self) -> bytes:
        """32 bytes that stand for the namespace in every key."""
        return tagged.digest(NAMESPACE_DOMAIN, [value for _, value in self.fields()])


class KeyChain:
    """Block keys of one growing prompt. An appended turn hashes only its own blocks. Not for use from several threads at once."""

    def __init__(self, namespace: Namespace, secret: bytes = b"", *, block_tokens: int = BLOCK_TOKENS) -> None:
        if block_tokens < 1:
            raise KeyFormatError("E537", f"block of {block_tokens} tokens", "a block has at least 1 token")
        self._namespace_digest = namespace.digest()
        self._secret = _checked_secret(secret)
        self.block_tokens = block_tokens
        self._buffer: Keys = np.empty((64, KEY_BYTES), np.uint8)
        self._count = 0
        self._tail: npt.NDArray[np.uint32] = np.empty(0, np.uint32)

    def extend(self, tokens: Tokens) -> Keys:
        """Appends token ids (each 0 to 2^32 - 1). Returns the keys of the blocks this completed, (n, 32); the rest waits as the tail."""
        ids = _as_token_ids(tokens)
        if self._tail.size:
            ids = np.concatenate([self._tail, ids])
        new = ids.size // self.block_tokens
        self._tail = ids[new * self.block_tokens :].copy()
        if new == 0:
            return self.keys[self._count :]
        self._reserve(self._count + new)
        previous = self._buffer[self._count - 1].tobytes() if self._count else b""
        out = self._buffer[self._count : self._count + new]
        _native.block_keys(self._secret, self._namespace_digest, previous, ids[: new * self.block_tokens], self.block_tokens, out)
        self._count += new
        return self.keys[self._count - new :]

    @property
    def keys(self) -> Keys:
        """Keys of all whole blocks, (n, 32), read-only."""
        view = self._buffer[: self._count]
        view.flags.writeable = False
        return view

    @property
    def token_count(self) -> int:
        """Tokens appended so far, those of the tail included."""
        return self._count * self.block_tokens + self._tail.size

    def _reserve(self, count: int) -> None:
        if count > len(self._buffer):
            grown = np.empty((max(count, 2 * len(self._buffer)), KEY_BYTES), np.uint8)
            grown[: self._count] = self._buffer[: self._count]
            self._buffer = grown


def external_keys(namespace: Namespace, secret: bytes, engine_hashes: Sequence[bytes]) -> Keys:
    """Block keys (n, 32) from hashes that an engine chained itself; each at least 1 byte, together under 4 GiB."""
    lengths = np.fromiter((len(h) for h in engine_hashes), np.uint64, len(engine_hashes))
    if lengths.size and not lengths.all():
        raise KeyFormatError("E538", f"engine hash {int(np.argmin(lengths))}", "is empty")
    out: Keys = np.empty((len(engine_hashes), KEY_BYTES), np.uint8)
    joined = np.frombuffer(b"".join(engine_hashes), np.uint8)
    _native.external_keys(_checked_secret(secret), namespace.digest(), joined, np.cumsum(lengths, dtype=np.uint64), out)
    return out


def block_tags(keys: Keys) -> npt.NDArray[np.uint64]:
    """Bytes 8 to 16 of each key (n, 32) as u64 LE: what a record and a discover answer carry instead of whole keys."""
    checked = checked_keys(keys)
    return np.ascontiguousarray(checked[:, 8:16]).view(np.dtype("<u8")).reshape(len(checked))


def checked_keys(keys: Keys) -> Keys:
    """The same keys, C-contiguous; KeyFormatError unless uint8 of shape (n, 32)."""
    if not isinstance(keys, np.ndarray) or keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
        shape = f"{getattr(keys, 'dtype', type(keys).__name__)} {getattr(keys, 'shape', '')}".strip()
        raise KeyFormatError("E539", "keys", f"got {shape}", "pass a uint8 array of shape (n, 32)")
    return np.ascontiguousarray(keys)


def _as_bytes(content: bytes | str) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _checked_secret(secret: bytes) -> bytes:
    if not isinstance(secret, bytes) or len(secret) > tagged.SECRET_BYTES_MAX:
        raise KeyFormatError("E540", "secret", f"must be bytes, at most {tagged.SECRET_BYTES_MAX}", "pass 32 random bytes")
    return secret


def _as_token_ids(tokens: Tokens) -> npt.NDArray[np.uint32]:
    try:
        ids = np.asarray(tokens) if len(tokens) else np.empty(0, np.uint32)
    except (OverflowError, TypeError, ValueError) as fault:
        raise KeyFormatError("E541", "tokens", str(fault), "pass a flat list or array of integers") from fault
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise KeyFormatError("E541", "tokens", f"got {ids.dtype} {ids.shape}", "pass a flat list or array of integers")
    if ids.dtype != np.uint32 and ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 32:
        raise KeyFormatError("E542", "tokens", f"ids from {ids.min()} to {ids.max()}", "token ids are 0 to 2^32 - 1")
    return np.ascontiguousarray(ids, np.uint32)
