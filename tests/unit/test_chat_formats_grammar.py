"""Grammars for calls, checked with llguidance: what each family writes is allowed, what is no valid call is not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from raycache.api.formats.chat_format import ChatFormat
from tests.unit.chat_outputs import OUTPUTS, TOOLS, Output
from tests.unit.test_chat_formats import FORMATS, format_of

_SPECIAL = sorted(
    {
        mark
        for found in FORMATS.values()
        for mark in found.marks
        if re.fullmatch(r"""<\|[^|\s]*\|>|<\|"\|>|<｜[^｜\s]*｜>|\[/?[A-Z_]+\]|<\|tool_call>|<tool_call\|>""", mark)
    },
    key=len,
    reverse=True,
)
_SPLIT = re.compile("(" + "|".join(map(re.escape, _SPECIAL)) + ")")
_FIRST = 257  # bytes, the end, and then the special tokens


class _Tokens:
    is_tokenizer_wrapper = True
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = range(256, _FIRST + len(_SPECIAL))

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>"] + [mark.encode() for mark in _SPECIAL]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class _Words:
    """Every token that looks like a special one is one."""

    def token(self, text: str) -> str:
        return f"<[{_FIRST + _SPECIAL.index(text)}]>" if text in _SPECIAL else ""

    def json(self, schema: Mapping[str, Any]) -> str:
        return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": " ?"}}, ensure_ascii=False)


@cache
def tokens() -> LLTokenizer:
    return LLTokenizer(_Tokens())


def encode(text: str) -> list[int]:
    ids: list[int] = []
    for piece in _SPLIT.split(text):
        ids += [_FIRST + _SPECIAL.index(piece)] if piece in _SPECIAL else list(piece.encode())
    return ids


def allows(grammar: str, text: str) -> bool:
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokens())
    assert not is_wrong, messages
    matcher = LLMatcher(tokens(), grammar)
    ids = encode(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def grammar_of(output: Output, **options: Any) -> str:
    found: ChatFormat = format_of(output)
    tools = options.pop("tools", TOOLS)
    return found.grammar(tools, words=_Words(), prompt_tail=output.prompt_tail, **options)


# An output of several messages that are no reasoning; more than one call in an output; an order of keys of its own.
_NOT_HELD = {"harmony", "granite 3.1", "qwen3-coder without the outer mark", "llama-3, python tag", "llama-4"}
_NOT_HELD |= {"harmony, recipient first", "mistral nemo", "deepseek-v3.1, thoughts not closed"}
_HELD = [name for name in OUTPUTS if name not in _NOT_HELD]


def written(output: Output, *, is_required: bool) -> str:
    """The text, without the content where only calls are allowed."""
    text = output.text.rstrip("\n")
    return text.replace(output.content, "", 1) if is_required and "response" not in text else text


@pytest.mark.parametrize("name", _HELD)
@pytest.mark.parametrize("is_required", [False, True])
def test_what_a_family_writes_is_allowed(name: str, is_required: bool) -> None:
    output = OUTPUTS[name]
    assert allows(grammar_of(output, is_required=is_required), written(output, is_required=is_required))


@pytest.mark.parametrize("name", _HELD)
@pytest.mark.parametrize("is_required", [False, True])
def test_an_unknown_tool_and_a_missing_argument_are_not_allowed(name: str, is_required: bool) -> None:
    output = OUTPUTS[name]
    text = written(output, is_required=is_required)
    other = {"get_news": TOOLS["get_weather"], "now": TOOLS["now"]}
    assert not allows(grammar_of(output, tools=other, is_required=is_required), text)
    needs = {**TOOLS["get_weather"], "required": ["city", "hour"]}
    needs["properties"] = {**needs["properties"], "hour": {"type": "integer"}}
    more = {"get_weather": needs, "now": TOOLS["now"]}
    assert not allows(grammar_of(output, tools=more, is_required=is_required), text)


@pytest.mark.parametrize("name", _HELD)
def test_a_required_call_is_there(name: str) -> None:
    output = OUTPUTS[name]
    reasoning = f"{output.reasoning}</think>" if output.prompt_tail.rstrip().endswith("<think>") else ""
    assert not allows(grammar_of(output, is_required=True), reasoning + "It is sunny.")
    if output.family != "kimi-k3":
        assert allows(grammar_of(output, is_required=False), reasoning + "It is sunny.")


@pytest.mark.parametrize("name", _HELD)
def test_arguments_of_a_tool_without_a_schema_are_free(name: str) -> None:
    output = OUTPUTS[name]
    free = {"get_weather": {"type": "object"}, "now": {"type": "object"}}
    assert allows(grammar_of(output, tools=free, is_required=False), written(output, is_required=False))


@pytest.mark.parametrize("name", [name for name in _HELD if len(OUTPUTS[name].calls) > 1])
def test_one_call_at_a_time(name: str) -> None:
    output = OUTPUTS[name]
    for is_required in (False, True):
        grammar = grammar_of(output, is_required=is_required, is_parallel=False)
        assert not allows(grammar, written(output, is_required=is_required))


def test_values_without_quotes_are_held_to_their_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 1},
            "where": {"$ref": "#/$defs/place"},
            "note": {"type": ["string", "null"]},
        },
        "required": ["unit"],
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    }
    whole = {"unit": "C", "days": "2", "where": '{"x": 1.5}', "note": "</b> & more"}

    def is_allowed(**values: str) -> bool:
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        text = f"<tool_call>\n<function=go>\n{inner}</function>\n</tool_call>"
        grammar = FORMATS["qwen3-coder"].grammar({"go": schema}, words=_Words(), prompt_tail="", is_required=True)
        return allows(grammar, text)

    assert is_allowed(**whole) and is_allowed(unit="F") and is_allowed(unit="F", where='{"x": 2}')
    assert not is_allowed(**{**whole, "unit": "K"})
    assert not is_allowed(**{**whole, "days": "0"})
    assert not is_allowed(**{**whole, "where": '{"y": 1}'})
    assert not is_allowed(days="2")
    assert not is_allowed(unit="C", colour="red")


_LISTED = ["auto", "1", 1, 2.5, True, None]


@pytest.mark.parametrize("name", ["qwen3-coder", "glm-4.5", "deepseek-v3.2", "kimi-k3", "minimax-m2"])
@pytest.mark.parametrize("value", ["auto", "1", 1, 2.5, True, None, "2.5", "other", 2, False])
def test_texts_and_other_values_of_one_list_are_allowed(name: str, value: object) -> None:
    is_string = isinstance(value, str)
    plain = value if isinstance(value, str) else json.dumps(value)
    kind = "null" if value is None else {str: "string", bool: "boolean"}.get(type(value), "number")
    text = {
        "qwen3-coder": f"<tool_call>\n<function=go>\n<parameter=a>\n{plain}\n</parameter>\n</function>\n</tool_call>",
        "glm-4.5": f"<tool_call>go\n<arg_key>a</arg_key>\n<arg_value>{plain}</arg_value>\n</tool_call>",
        "deepseek-v3.2": f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="go">\n<｜DSML｜parameter name="a" '
        f'string="{"true" if is_string else "false"}">{plain}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "kimi-k3": '<|open|>tools<|sep|><|open|>call tool="go" index="1"<|sep|><|open|>argument key="a" '
        f'type="{kind}"<|sep|>{plain}<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        "minimax-m2": f'<minimax:tool_call>\n<invoke name="go">\n<parameter name="a">{plain}</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
    }[name]
    schema = {
        "type": "object",
        "properties": {"a": {"enum": _LISTED}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tail = "<|open|>response<|sep|><|close|>response<|sep|>" if name == "kimi-k3" else ""
    grammar = FORMATS[name].grammar({"go": schema}, words=_Words(), prompt_tail=tail, is_required=True)
    is_listed = any(type(each) is type(value) and each == value for each in _LISTED)
    # Without an attribute nothing tells the text 2.5 from the number.
    is_same = name not in ("deepseek-v3.2", "kimi-k3") and value == "2.5"
    assert allows(grammar, text) == (is_listed or is_same)


_ANALYSIS = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
_CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
_FINAL = "<|channel|>final<|message|>It rains."


@pytest.mark.parametrize(
    ("text", "when_required", "when_free"),
    [
        (_ANALYSIS + _CALL + '{"city": "Oslo"}', True, True),
        (_CALL + '{"city": "Oslo", "days": 3}', True, True),
        (
            _ANALYSIS + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + _CALL + '{"city": "O"}',
            *(True, True),
        ),
        (_ANALYSIS + _FINAL, False, True),
        (_FINAL, False, True),
        ("It rains.", False, False),
        (_CALL + '{"days": 3}', False, False),
        (_CALL.replace("get_weather", "get_news") + '{"city": "Oslo"}', False, False),
        (_ANALYSIS, False, False),
    ],
)
def test_messages_of_harmony(text: str, when_required: bool, when_free: bool) -> None:
    output = OUTPUTS["harmony"]
    assert allows(grammar_of(output, is_required=True), text) is when_required
    assert allows(grammar_of(output, is_required=False), text) is when_free
