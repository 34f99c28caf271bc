"""Text to tokens: its UTF-8 bytes, 0 to 255, and for models with room for them eight specials that no text can contain."""

from __future__ import annotations

from typing import Final

SPECIALS: Final = ("begin", "end", "system", "user", "assistant", "tool", "end_of_turn", "pad")
SPECIAL_IDS: Final = {name: 256 + i for i, name in enumerate(SPECIALS)}
VOCABULARY: Final = 256 + len(SPECIALS)


def encode(text: str | bytes) -> list[int]:
    """One token a byte. Specials are never made of text: a prompt cannot speak as another role."""
    return list(text.encode() if isinstance(text, str) else text)


def decode(tokens: list[int]) -> str:
    """Specials say nothing; bytes that are not UTF-8 become the replacement character."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")
