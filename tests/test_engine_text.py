"""Text of bytes and back, the chat template, stop strings and what may be asked: the parts of the engine's server that need no engine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvstore.engine_integration.engine import RequestOptions
from kvstore.engine_integration.engine.sampling import choose
from kvstore.engine_integration.model import MINI, TINY, ModelConfig
from kvstore.engine_integration.server.generation import StopStrings
from kvstore.engine_integration.server.requests import ChatAsked, CompletionAsked, Refusal
from kvstore.engine_integration.server.template import Template
from kvstore.engine_integration.server.text import STAND_IN, TextDecoder, encode_text

TEMPLATES = [Template(MINI), Template(TINY)]
# Whole characters of every length, and bytes that a character is cut at or that are none.
SOME_BYTES = st.lists(
    st.sampled_from([b"a", "é".encode(), "日".encode(), "🙂".encode(), chr(STAND_IN + 0x85).encode(), b"\xf4", b"\x80", b"\xed\xa0"])
)


def cut(raw: bytes, at: list[int]) -> list[bytes]:
    ends = sorted({0, len(raw), *(place % (len(raw) + 1) for place in at)})
    return [raw[a:b] for a, b in pairwise(ends)] or [b""]


@given(st.one_of(st.binary(max_size=40), SOME_BYTES.map(b"".join)), st.lists(st.integers(0, 100), max_size=5))
def test_any_bytes_come_back_from_their_text_however_they_came(raw: bytes, at: list[int]) -> None:
    decoder, parts = TextDecoder(), cut(raw, at)
    text = "".join(decoder.feed(part, last=i == len(parts) - 1) for i, part in enumerate(parts))
    assert encode_text(text) == raw
    text.encode()  # no surrogate: JSON and every client take it


@given(st.text())
def test_real_text_is_left_alone(text: str) -> None:
    if not any(ord(c) >= STAND_IN + 0x80 for c in text):
        assert encode_text(text) == text.encode("utf-8", "replace")
        assert TextDecoder().feed(encode_text(text), last=True) == text.encode("utf-8", "replace").decode()


def test_a_lone_surrogate_of_json_becomes_a_question_mark() -> None:
    assert encode_text("a\udc80b") == b"a?b"


@pytest.mark.parametrize("template", TEMPLATES, ids=["mini", "tiny"])
@given(
    system=st.text(max_size=20),
    asked=st.lists(st.text(max_size=20), min_size=2, max_size=4),
    answers=st.lists(st.binary(max_size=20), min_size=4, max_size=4),
)
def test_a_turns_prompt_and_answer_begin_the_next_turns_prompt(
    template: Template, system: str, asked: list[str], answers: list[bytes]
) -> None:
    messages: list[tuple[str, str]] = [("system", system)]
    before: list[int] = []
    for question, answer in zip(asked, answers, strict=False):
        messages.append(("user", question))
        prompt = template.chat(messages)
        assert prompt[: len(before)] == before
        said = [byte for byte in answer if byte < template.special_first]
        messages.append(("assistant", TextDecoder().feed(template.bytes_of(said), last=True)))
        before = prompt + said


@pytest.mark.parametrize("config", [MINI, TINY], ids=lambda config: config.name)
def test_no_text_speaks_as_another_role(config: ModelConfig) -> None:
    template = Template(config)
    every = "".join(map(chr, range(STAND_IN + 0x80, STAND_IN + 0x100))) + "<|user|>\x00"
    assert not set(template.text(every)) & set(template.stop_tokens)
    assert max(template.specials.values()) == config.vocabulary - 1 and min(template.specials.values()) >= template.special_first
    assert template.bytes_of([65, *template.stop_tokens, 66]) == b"AB"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3), st.lists(st.integers(0, 20), max_size=4))
def test_text_goes_on_to_the_stop_string_that_is_complete_first_however_it_is_cut(text: str, stops: list[str], at: list[int]) -> None:
    filtered, parts = StopStrings(stops), cut(text.encode(), at)
    passed = [filtered.feed(part.decode(), last=i == len(parts) - 1) for i, part in enumerate(parts)]
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert "".join(passed) == (text[: min(found)[1]] if found else text) and filtered.found == bool(found)


def ask(**fields: Any) -> ChatAsked:
    asked = ChatAsked.model_validate({"model": "tiny", "messages": [{"role": "user", "content": "a"}], **fields})
    asked.check_extras()
    return asked


def test_what_asks_for_nothing_passes_and_what_asks_for_more_is_named() -> None:
    ask(
        n=1, logprobs=False, tools=[], tool_choice="none", response_format={"type": "text"}, user="me", metadata={"a": "b"}, logit_bias=None
    )
    for fields, word in (
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"temprature": 0}, "temprature"),
    ):
        with pytest.raises(Refusal) as refused:
            ask(**fields)
        assert refused.value.status == 400 and refused.value.param == word and word in refused.value.message


def test_options_are_openais_defaults_and_ranges() -> None:
    template = Template(TINY)
    plain = ask().options(template)
    assert (plain.max_tokens, plain.temperature, plain.top_p) == (256, 1.0, 1.0) and plain.stop_tokens == frozenset(range(248, 256))
    assert ask().options(template).seed != plain.seed, "without a seed each answer has its own"
    told = ask(max_tokens=5, max_completion_tokens=3, temperature=0, seed=-1, ignore_eos=True, kvstore={"resume": "exact"}).options(
        template
    )
    assert (told.max_tokens, told.temperature, told.seed, told.resume, told.stop_tokens) == (3, 0.0, 2**64 - 1, "exact", frozenset())
    assert ask(top_p=0).options(template).temperature == 0
    assert CompletionAsked.model_validate({"model": "tiny", "prompt": "a"}).answer_tokens() == 16
    assert ask(stop="x").stop == ("x",) and ask(stop=None).stop == ()
    for stop in ([""], ["a"] * 5, [1], {"a": 1}):
        with pytest.raises(ValidationError, match="a string of 1 to 256 characters, or a list of up to 4"):
            ask(stop=stop)


def test_specials_are_never_chosen_where_they_do_not_end_the_answer() -> None:
    logits = torch.linspace(0, 1, 256)
    options = ask(ignore_eos=True, temperature=0).options(Template(TINY))
    assert choose(logits, 0, options) == 247 and choose(logits, 0, ask(temperature=0).options(Template(TINY))) == 255
    hot = replace(options, temperature=1.0)
    assert max(choose(200 * logits, position, hot) for position in range(50)) < 248


@given(st.floats(5e-324, 1e-5), st.integers(0, 1 << 20))
def test_the_lowest_temperatures_choose_the_most_likely_token(temperature: float, position: int) -> None:
    logits = torch.linspace(-40, 40, 200).roll(77)
    assert choose(logits, position, RequestOptions(temperature=temperature, seed=position)) == int(logits.argmax())


def test_a_long_list_of_nonsense_is_refused_at_its_first_item() -> None:
    many = [{}] * 100_000
    for fields in ({"messages": [{"role": "user", "content": many}]}, {"stop": many}):
        with pytest.raises(ValidationError) as refused:
            ask(**fields)
        assert len(refused.value.errors()) == 1
    with pytest.raises(ValidationError) as refused:
        CompletionAsked.model_validate({"model": "tiny", "prompt": [0.5] * 100_000})
    assert len(refused.value.errors()) == 1
    with pytest.raises(Refusal, match=r"kvstore\.0 is not known"):
        ask(kvstore={str(i): 1 for i in range(100_000)})


def test_prompts_are_one_text_or_one_list_of_tokens() -> None:
    template = Template(MINI)
    for prompt in ("ab", ["ab"], [256, 97, 98], [[256, 97, 98]]):
        assert CompletionAsked.model_validate({"model": "mini", "prompt": prompt}).prompt_tokens(template) == [256, 97, 98]
    with pytest.raises(Refusal, match="2 prompts"):
        CompletionAsked.model_validate({"model": "mini", "prompt": ["a", "b"]}).prompt_tokens(template)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    spoken = ask(messages=[{"role": "developer", "content": parts}, {"role": "tool", "content": "t", "tool_call_id": "1"}]).prompt_tokens(
        template
    )
    assert spoken == [256, 258, 97, 98, 262, 261, 116, 262, 260]
    with pytest.raises(Refusal, match="tool_calls"):
        ask(messages=[{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]).prompt_tokens(template)
