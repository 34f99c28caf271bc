"""One way to hash several fields as one, for every identity in kvstore (keys, namespaces, layouts).

    message = field(0, domain) field(1, first) field(2, second) ...
    field(tag, bytes) = tag u8 | length u32 LE | bytes

Tags and lengths make the encoding unique: no two lists of fields, and no swap of two different fields, give the same message. The domain
names what is hashed and its version, so digests of different kinds never meet. Never changes: it decides every key ever stored.
`kernels/hash.cpp` writes the same messages natively.
"""

import hashlib
import struct
from collections.abc import Sequence

DIGEST_BYTES = 32
SECRET_BYTES_MAX = 64  # the longest key BLAKE2b takes


def message(domain: str, fields: Sequence[bytes]) -> bytes:
    """The bytes that are hashed."""
    parts = [domain.encode(), *fields]
    return b"".join(struct.pack("<BI", tag, len(part)) + part for tag, part in enumerate(parts))


def digest(domain: str, fields: Sequence[bytes], secret: bytes = b"") -> bytes:
    """BLAKE2b-256 of the message, keyed with `secret` (0 to 64 bytes)."""
    return hashlib.blake2b(message(domain, fields), key=secret, digest_size=DIGEST_BYTES).digest()
