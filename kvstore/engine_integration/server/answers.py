"""Objects and chunks of answers, in OpenAI's fields; what the cache did is under `kvstore`."""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from typing import Any, Final

from kvstore.engine_integration.engine import Response
from kvstore.engine_integration.server.generation import Generation

DONE: Final = b"data: [DONE]\n\n"


def usage_of(response: Response) -> dict[str, Any]:
    return {
        "prompt_tokens": response.prompt_tokens,
        "completion_tokens": len(response.tokens),
        "total_tokens": response.prompt_tokens + len(response.tokens),
        "prompt_tokens_details": {"cached_tokens": response.cached_tokens},
    }


def extension_of(response: Response) -> dict[str, Any]:
    """docs/SERVER.md tells each field."""
    told = {name.name: getattr(response, name.name) for name in dataclasses.fields(response) if name.name != "tokens"}
    return {"hit": response.cached_tokens > 0, **told}


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


class Form:
    """How one answer is written: of /v1/chat/completions (`chat`) or /v1/completions."""

    def __init__(self, chat: bool, model: str, include_usage: bool = False) -> None:
        self._chat, self._include_usage = chat, include_usage
        self._fixed = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, text: str, generation: Generation) -> dict[str, Any]:
        response = generation.response
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": generation.finish_reason}
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._fixed, "object": kind, "choices": [choice], "usage": usage_of(response), "kvstore": extension_of(response)}

    def first(self) -> bytes:
        return self._chunk({"delta": {"role": "assistant", "content": ""}}) if self._chat else b""

    def part(self, text: str) -> bytes:
        return self._chunk({"delta": {"content": text}} if self._chat else {"text": text})

    def last(self, generation: Generation) -> bytes:
        """Why it ended and what the cache did; then the usage where it is wanted; then the end of the stream."""
        response = generation.response
        ended = self._chunk({"delta": {}} if self._chat else {"text": ""}, generation.finish_reason, kvstore=extension_of(response))
        if self._include_usage:
            ended += event({**self._fixed, "object": self._chunk_kind, "choices": [], "usage": usage_of(response)})
        return ended + DONE

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _chunk(self, said: dict[str, Any], finish_reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self._include_usage else {}
        return event({**self._fixed, "object": self._chunk_kind, "choices": [choice], **usage, **more})
