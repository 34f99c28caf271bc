"""A conversation as tokens.

    begin  (role text end_of_turn) ...  assistant            the model goes on from here; it ends its answer with end_of_turn

`role`, `begin` and `end_of_turn` are single tokens that no text can contain, so a message cannot speak as another role, and nothing is
trimmed or joined: what a client sends back as the assistant's message is, byte for byte, what the model said. Hence turn n's prompt and
answer are a prefix of turn n+1's prompt. `mini` has the specials as tokens 256 to 263; `tiny` has 256 tokens, and takes for them the bytes
0xF8 to 0xFF, which UTF-8 never uses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvstore.engine_integration.model.config import ModelConfig
from kvstore.engine_integration.model.tokenizer import SPECIALS
from kvstore.engine_integration.server.text import encode_text

ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Template:
    """Of one model size. Stateless."""

    def __init__(self, config: ModelConfig) -> None:
        self.special_first = min(256, config.vocabulary - len(SPECIALS))
        self.specials = {name: self.special_first + i for i, name in enumerate(SPECIALS)}
        self.stop_tokens = tuple(self.specials.values())  # an answer holds none: whatever special comes ends it

    def text(self, text: str) -> list[int]:
        """Tokens of a text alone, as no special."""
        return list(encode_text(text, self.special_first - 1))

    def document(self, text: str) -> list[int]:
        """A text to be continued, as the model was trained: begin, text."""
        return [self.specials["begin"], *self.text(text)]

    def chat(self, messages: Iterable[tuple[str, str]]) -> list[int]:
        """Of (role, text) pairs; roles are the keys of ROLES."""
        tokens = [self.specials["begin"]]
        for role, text in messages:
            tokens += [self.specials[ROLES[role]], *self.text(text), self.specials["end_of_turn"]]
        tokens.append(self.specials["assistant"])
        return tokens

    def bytes_of(self, tokens: Iterable[int]) -> bytes:
        """What of an answer is text."""
        return bytes(token for token in tokens if token < self.special_first)
