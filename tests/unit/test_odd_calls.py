"""Calls, schemas and conversations that no careful client or model writes: they cost little and break nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raycache.api import constraint
from raycache.api.chat import plain_messages
from raycache.api.formats.arguments import python_json, types_of
from raycache.api.formats.calls import Calls, IdStyle
from raycache.api.formats.grammar import properties, texts_of
from raycache.api.formats.history import History
from raycache.api.formats.json_calls import JsonCalls
from raycache.api.formats.parser import OutputParser
from raycache.api.formats.parts import Content, Message, Part, Reasoning, ToolCallArguments, ToolCallStart, merged
from raycache.api.messages_body import MessagesBody
from raycache.api.messages_form import _input
from raycache.api.responses_body import ResponsesBody
from raycache.api.responses_items import messages_of
from raycache.api.schema import ChatBody, CompletionBody, StrictBody, parse_body
from raycache.errors import RequestError


def test_definitions_that_refer_to_themselves_are_looked_at_once() -> None:
    itself = {"anyOf": [{"$ref": "#/$defs/x"}] * 1000}
    assert types_of({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": itself}}, "a") == frozenset()
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    assert types_of({"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": chain}, "a") == frozenset()
    twice = {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}, {"type": "null"}]}
    schema = {"properties": {"a": twice}, "$defs": {"x": {"type": "integer"}}}
    assert types_of(schema, "a") == {"integer", "null"}


def test_many_arguments_with_many_definitions_are_refused() -> None:
    many = {"properties": {f"p{i}": {} for i in range(200)}, "$defs": {f"d{i}": {} for i in range(200)}}
    with pytest.raises(RequestError, match="definitions"):
        properties(many)


def test_grammars_that_would_overflow_the_compilers_stack_are_refused() -> None:
    rules = "\n".join(f"r{i}: (((((r{i + 1})))))" for i in range(990))
    with pytest.raises(RequestError, match="rules and groups"):
        constraint.lark(f'start: r0\n{rules}\nr990: "a"\n')


def test_schemas_of_wrong_types_have_no_required_properties_and_no_texts() -> None:
    assert properties({"properties": {"a": {}}, "required": True}) == [("a", {}, False)]
    assert texts_of({"enum": 5}) == []


def test_python_literals_become_text_that_can_be_sent() -> None:
    assert json.loads(python_json("'\\ud83d\\ude00'")) == "😀"
    python_json("['\\ud83d']").encode("utf-8")


@pytest.mark.parametrize("arguments", ['{"a": True}', '{"a": 1,}', '{"a": "\\ud83d"}', '{"a": NaN}', '"x"', "[" * 5000])
def test_arguments_that_are_no_json_object_are_kept_as_text(arguments: str) -> None:
    found = _input(arguments)
    assert isinstance(found, dict)
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode("utf-8")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    earlier = plain_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert isinstance(earlier[0]["tool_calls"][0]["function"]["arguments"], dict)


def test_arguments_within_a_text_that_is_nested_deeply_are_read() -> None:
    nested = json.dumps("[" * 50_000 + "]" * 50_000)
    parser = OutputParser(
        reasoning=None,
        syntax=JsonCalls("<tool_call>", "</tool_call>"),
        calls=Calls(IdStyle.OPENAI, {"f": {}}, 0),
        frames=(),
        is_reasoning=False,
    )
    text = '<tool_call>{"name": "f", "arguments": ' + nested + "}</tool_call>"
    parts = [*parser.feed(text), *parser.finish()]
    assert Message.of(parts).calls[0].name == "f"


@pytest.mark.parametrize(
    ("kind", "field", "instead"),
    [
        (MessagesBody, "structured_outputs", "output_config.format"),
        (ResponsesBody, "max_tokens", "max_output_tokens"),
        (ResponsesBody, "response_format", "text.format"),
        (ResponsesBody, "guided_json", "text.format"),
        (MessagesBody, "guided_json", "output_config.format"),
        (ChatBody, "guided_json", "structured_outputs.json"),
        (CompletionBody, "guided_regex", "structured_outputs.regex"),
        (CompletionBody, "guided_choice", "structured_outputs.choice"),
        (ChatBody, "guided_grammar", "structured_outputs.grammar"),
        (ChatBody, "functions", "tools"),
        (ChatBody, "function_call", "tool_choice"),
    ],
)
def test_fields_of_other_apis_are_not_ignored(kind: type[StrictBody], field: str, instead: str) -> None:
    with pytest.raises(RequestError, match=instead) as refused:
        parse_body(kind, {"model": "m", field: {"a": 1}})
    assert refused.value.field == field


def test_an_item_of_a_type_that_is_no_text_is_refused() -> None:
    with pytest.raises(RequestError, match="must be of the form"):
        messages_of([{"type": [1]}], instructions="")


def test_results_in_any_order_follow_their_own_calls() -> None:
    calls: list[dict[str, Any]] = [{"id": str(i), "function": {"name": "f", "arguments": {}}} for i in range(4)]
    turn = {"role": "assistant", "content": "c", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": str(i), "content": str(i)} for i in (3, 1, 0, 2)]
    found = History(splits_calls=True).adapted([turn, *results])
    pairs = [(found[i]["tool_calls"][0]["id"], found[i + 1]["content"]) for i in range(0, 8, 2)]
    assert pairs == [(i, i) for i in "3102"]


def test_parts_of_one_kind_are_joined_and_others_kept_apart() -> None:
    parts: list[Part] = [
        *(Reasoning("r"), Reasoning("s"), Content("a"), Content("b")),
        *(ToolCallStart(0, "x", "f"), ToolCallArguments(0, "{"), ToolCallArguments(0, "}")),
        *(ToolCallStart(1, "y", "f"), ToolCallStart(2, "z", "f"), ToolCallArguments(2, "{}"), Content("c")),
    ]
    assert merged(parts) == [
        *(Reasoning("rs"), Content("ab"), ToolCallStart(0, "x", "f"), ToolCallArguments(0, "{}")),
        *(ToolCallStart(1, "y", "f"), ToolCallStart(2, "z", "f"), ToolCallArguments(2, "{}"), Content("c")),
    ]
    whole = Message.of(parts)
    assert (whole.reasoning, whole.content, [call.arguments for call in whole.calls]) == ("rs", "abc", ["{}", "", "{}"])
