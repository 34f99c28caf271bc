"""Bytes of answers as text, such that the text sent back in the next turn is the same bytes: else that turn would not hit them.

A model of bytes may say what is no UTF-8. Each such byte b becomes the private-use character U+10FF00 + b, and that character in a prompt
becomes the byte again. So decoding and then encoding gives the same bytes for every sequence of bytes, and all real text is left alone.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

STAND_IN: Final = 0x10FF00  # + 0x80 to 0xFF: the last code points of all, for private use
_STAND_INS: Final = re.compile(f"[{chr(STAND_IN + 0x80)}-{chr(STAND_IN + 0xFF)}]")
_ENCODED: Final = re.compile(rb"\xf4\x8f[\xbe\xbf][\x80-\xbf]")  # the same characters in UTF-8
_UNDECODED: Final = {0xDC00 + byte: chr(STAND_IN + byte) for byte in range(0x80, 0x100)}  # what surrogateescape makes of a byte


class TextDecoder:
    """Text out of bytes as they come. A character cut in two is held back until the rest is there, or until it cannot be one."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def feed(self, raw: bytes, *, last: bool = False) -> str:
        """`last`: nothing follows, so nothing is held back."""
        text = _STAND_INS.sub(_spelt_out, self._decoder.decode(raw, last))
        return text.translate(_UNDECODED)


def encode_text(text: str, bytes_max: int = 0xFF) -> bytes:
    """UTF-8, with the stand-ins of bytes up to `bytes_max` as those bytes. A lone surrogate, which JSON can carry, becomes "?"."""

    def byte_of(match: re.Match[bytes]) -> bytes:
        byte = ord(match[0].decode()) - STAND_IN
        return bytes([byte]) if byte <= bytes_max else match[0]

    return _ENCODED.sub(byte_of, text.encode("utf-8", "replace"))


def _spelt_out(match: re.Match[str]) -> str:
    """A stand-in that the model said itself, byte for byte: it must not be taken for one byte when it comes back."""
    return "".join(chr(STAND_IN + byte) for byte in match[0].encode())
