"""What may be asked, in OpenAI's fields and a few of ours; and refusals in OpenAI's form.

Fields that would change the answer and that this model does not have are refused where they ask for anything (`NEUTRAL`); fields that are
for OpenAI's own books are taken without effect (`IGNORED`); any other is refused by name, for it is likely misspelt.

Lists without a limit are checked here, not by pydantic: it notes every fault of every item, for each way a union could be meant, and a body
of 300 KB held up the server for 15 s.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, StrictStr
from pydantic_core import PydanticCustomError

from kvstore.engine_integration.engine import RequestOptions
from kvstore.engine_integration.server.template import Template

CHAT_TOKENS: Final = 256  # of an answer where nothing is asked; a model of this size does not know when to stop
COMPLETION_TOKENS: Final = 16  # as OpenAI has it
STOPS_MAX: Final = 4
STOP_CHARS_MAX: Final = 256
MESSAGES_MAX: Final = 2048
TOLD_CHARS_MAX: Final = 500  # of a message: what was asked may be in it

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
IGNORED: Final = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "reasoning_effort", "verbosity",
})  # fmt: skip


class Refusal(Exception):
    """What a request is refused with: an HTTP status, and the body that OpenAI's clients know."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = {404: "not_found_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        kind = kind if self.status < 500 else "server_error"
        return {"error": {"message": _told(self.message), "type": kind, "param": self.param and _told(self.param), "code": self.code}}


def _told(text: str) -> str:
    """Bounded, and without lone surrogates, which JSON can ask with and no answer can be written with."""
    return text[:TOLD_CHARS_MAX].encode("utf-8", "replace").decode()


def _content(given: Any) -> str:
    """Of a message: a text, or the texts of its parts."""
    if given is None:
        return ""
    if isinstance(given, str):
        return given
    if isinstance(given, list) and all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in given):
        return "".join(part["text"] for part in given)
    raise PydanticCustomError("content", 'a text, or a list of {"type": "text", "text": ...}')


def _prompt(given: Any) -> str | list[int]:
    """One prompt: text or tokens. Raises Refusal for several."""
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        if len(given) != 1:
            raise Refusal(400, f"{len(given)} prompts in one request: send one", param="prompt", code="unsupported_parameter")
        given = given[0]
    if isinstance(given, str) or (isinstance(given, list) and all(type(token) is int for token in given)):
        return given
    raise PydanticCustomError("prompt", "a text, a list of token numbers, or a list of one of these")


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else [] if given is None else given
    if isinstance(stops, list) and len(stops) <= STOPS_MAX and all(isinstance(s, str) and 1 <= len(s) <= STOP_CHARS_MAX for s in stops):
        return tuple(stops)
    raise PydanticCustomError("stop", f"a string of 1 to {STOP_CHARS_MAX} characters, or a list of up to {STOPS_MAX}")


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    include_usage: bool = False


class Extension(BaseModel):
    """Our own fields, under `kvstore`."""

    model_config = ConfigDict(extra="allow")  # check_extras refuses them, the first one
    resume: Literal["auto", "exact", "bounded", "off"] | None = None
    retention_class: Annotated[StrictStr, Field(max_length=64)] = "chat"


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, AfterValidator(_content)] = ""


Tokens = Annotated[StrictInt, Field(ge=1, lt=1 << 31)]


class Asked(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(extra="allow")
    model: StrictStr
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: StrictInt | None = None
    stop: Annotated[Any, AfterValidator(_stops)] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False  # as vLLM has it: the answer ends at its length alone
    kvstore: Extension = Extension()

    @property
    def tokens_default(self) -> int:
        return COMPLETION_TOKENS

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def answer_tokens(self) -> int:
        return self.max_tokens or self.tokens_default

    def options(self, template: Template) -> RequestOptions:
        """For the engine. Without a seed each request has its own; a top_p of 0 leaves the most likely token alone."""
        greedy, specials = self.top_p == 0, frozenset(template.stop_tokens)
        return RequestOptions(
            max_tokens=self.answer_tokens(),
            temperature=0.0 if greedy else 1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            seed=secrets.randbits(64) if self.seed is None else self.seed % (1 << 64),
            stop_tokens=frozenset() if self.ignore_eos else specials,
            banned_tokens=specials if self.ignore_eos else frozenset(),  # else the text would not be all that was said
            resume=self.kvstore.resume,
            retention_class=self.kvstore.retention_class,
        )

    def check_extras(self) -> None:
        """Raises Refusal for what is asked beyond what there is."""
        for name in self.kvstore.model_extra or ():
            raise Refusal(400, f"kvstore.{name[:64]} is not known", param=f"kvstore.{name[:64]}", code="unknown_parameter")
        for name, value in (self.model_extra or {}).items():
            neutral = NEUTRAL.get(name)
            if name in IGNORED or value is None or (neutral is not None and value in neutral):
                continue
            if neutral is None:
                raise Refusal(400, f"Unrecognized request argument supplied: {name[:64]}", param=name[:64], code="unknown_parameter")
            only = f"; only {' or '.join(map(repr, neutral))} is" if neutral else ""
            raise Refusal(
                400, f"{name} = {repr(value)[:80]} is not supported by this server{only}", param=name, code="unsupported_parameter"
            )


class ChatAsked(Asked):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: Tokens | None = None

    @property
    def tokens_default(self) -> int:
        return self.max_completion_tokens or CHAT_TOKENS

    def answer_tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or CHAT_TOKENS

    def prompt_tokens(self, template: Template) -> list[int]:
        for at, message in enumerate(self.messages):
            if (message.model_extra or {}).get("tool_calls"):
                raise Refusal(
                    400, "tool_calls are not supported: put what was called into the text", param=f"messages[{at}].tool_calls",
                    code="unsupported_parameter",
                )  # fmt: skip
        return template.chat((message.role, message.content) for message in self.messages)


class CompletionAsked(Asked):
    prompt: Annotated[Any, AfterValidator(_prompt)]

    def prompt_tokens(self, template: Template) -> list[int]:
        """Of a text: begin and its bytes. Of a list of tokens: these."""
        prompt: str | list[int] = self.prompt
        return template.document(prompt) if isinstance(prompt, str) else prompt
