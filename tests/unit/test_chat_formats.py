"""Reading what chat models write: calls and reasoning of every family, in any cut, whole and broken."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from raycache.api.formats.chat_format import ChatFormat
from raycache.api.formats.families import FAMILIES, REASONING
from raycache.api.formats.parts import Message, PartsParser, ToolCallArguments, ToolCallStart
from tests.unit.chat_outputs import OUTPUTS, TOOLS, Output

FORMATS = {family.format.name: family.format for family in FAMILIES}


def format_of(output: Output) -> ChatFormat:
    found = FORMATS[output.family]
    return found if found.reasoning or found.has_channels else replace(found, reasoning=REASONING[0])


def parser_of(output: Output) -> PartsParser:
    return format_of(output).parser(prompt_tail=output.prompt_tail, tools=TOOLS)


def read(parser: PartsParser, pieces: Sequence[str]) -> Message:
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    begun = -1
    for part in parts:
        match part:
            case ToolCallStart(index):
                begun += 1
                assert index == begun
            case ToolCallArguments(index, text):
                assert index == begun and text
    return Message.of(parts)


def facts(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    return message.reasoning, message.content, [(call.name, call.arguments) for call in message.calls]


@pytest.mark.parametrize("name", OUTPUTS)
def test_calls_and_reasoning_are_split_from_the_content(name: str) -> None:
    output = OUTPUTS[name]
    message = read(parser_of(output), [output.text])
    assert message.reasoning == output.reasoning
    assert message.content == output.content
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == list(output.calls)
    assert all(type(json.loads(call.arguments)) is dict for call in message.calls)
    ids = [call.call_id for call in message.calls]
    assert len(set(ids)) == len(ids)
    assert not output.ids or tuple(ids) == output.ids


@pytest.mark.parametrize("name", OUTPUTS)
def test_any_cut_gives_the_same(name: str) -> None:
    output = OUTPUTS[name]
    text, whole = output.text, facts(read(parser_of(output), [output.text]))
    for cut in range(len(text)):
        assert facts(read(parser_of(output), [text[:cut], text[cut:]])) == whole
    for width in (1, 2, 3, 7):
        pieces = [text[start : start + width] for start in range(0, len(text), width)]
        assert facts(read(parser_of(output), pieces)) == whole


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_broken_output_loses_nothing(name: str) -> None:
    output = OUTPUTS[name]
    draw = random.Random(name)
    words = [
        "<",
        ">",
        "{",
        "}",
        '"',
        "\\",
        "[",
        "]",
        "\n",
        " ",
        ",",
        ":",
        "word",
        *sorted(format_of(output).marks - {"[CALL_ID]"}),
    ]
    for _ in range(200):
        text = list(output.text)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(text))
            match draw.randrange(3):
                case 0:
                    del text[place : place + draw.randint(1, 12)]
                case 1:
                    text.insert(place, draw.choice(words))
                case 2:
                    text[place:place] = text[place : place + draw.randint(1, 30)]
            text = text or ["x"]
        whole = "".join(text)
        message = read(parser_of(output), [whole])
        cut = draw.randrange(len(whole))
        assert facts(read(parser_of(output), [whole[:cut], whole[cut:]])) == facts(message)
        got = message.reasoning + message.content + "".join(call.name + call.arguments for call in message.calls)
        for word in ("weather", "Let me", "look", "Zürich", "units", "tags"):
            assert got.count(word) >= _outside_marks(whole, output).count(word)


def _outside_marks(text: str, output: Output) -> str:
    for mark in sorted(format_of(output).marks, key=len, reverse=True):
        text = text.replace(mark, "\0")
    return text


@pytest.mark.parametrize("name", [name for name in OUTPUTS if name != "granite 3.1"])  # its names come last
def test_a_call_is_given_as_it_comes(name: str) -> None:
    output = OUTPUTS[name]
    parser = parser_of(output)
    seen = [part for character in output.text[: output.text.index("days")] for part in parser.feed(character)]
    assert any(isinstance(part, ToolCallStart) and part.name == "get_weather" for part in seen)


@pytest.mark.parametrize("name", OUTPUTS)
def test_without_tools_no_call_is_looked_for(name: str) -> None:
    output = OUTPUTS[name]
    parser = format_of(output).parser(prompt_tail=output.prompt_tail, tools={})
    message = read(parser, [output.text])
    assert not message.calls and "get_weather" in message.reasoning + message.content


@pytest.mark.parametrize("family", FORMATS)
def test_plain_text_stays_as_it_is(family: str) -> None:
    for text in (
        "",
        " ",
        "\n\n  Yes.\n ",
        "a < b and [c] or {d}",
        "<b>bold</b> </think",
        '{"answer": [1, 2]}',
        "[1, 2]",
    ):
        parser = format_of(Output(family, text)).parser(prompt_tail="assistant\n", tools=TOOLS)
        message = read(parser, list(text))
        assert (message.reasoning, message.content, message.calls) == ("", text, [])


def test_white_space_between_the_parts_belongs_to_the_format() -> None:
    one = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for text, content in {
        f"<think>\n\n</think>\n\n  indented\n\n{one}\n": "  indented",
        f"Before. \n{one}\n{one}\nAfter.\n": "Before. \nAfter.\n",
        f"\n{one}\nAfter.": "After.",
        f" {one}\n\n": "",
        "<think>a\n</think>\n\n": "",
        "<think></think>\n\n": "",
        "<think></think>\n\nYes.\n": "Yes.\n",
    }.items():
        assert read(parser_of(Output("hermes", text)), list(text)).content == content


def test_an_unknown_tool_and_other_forms_of_arguments_are_calls_too() -> None:
    for written, expected in {
        '{"name": "other", "arguments": {"x": 1}}': {"x": 1},
        '{"name": "other"}': {},
        '{"name": "other", "arguments": null}': {},
        '{"name": "other", "parameters": "{\\"x\\": 1}"}': {"x": 1},
        '{"arguments": {"x": 1}, "name": "other", "id": "a"}': {"x": 1},
        '{"type": "function", "name": "other", "arguments": {"x": "</tool_call>"}}': {"x": "</tool_call>"},
    }.items():
        message = read(parser_of(Output("hermes", "")), [f"<tool_call>{written}</tool_call>"])
        assert not message.content
        assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [("other", expected)]


def test_values_without_quotes_have_the_types_of_the_schema() -> None:
    properties = {
        "zip": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "is_new": {"type": "boolean"},
        "list": {"type": "array"},
        "place": {"$ref": "#/$defs/place"},
        "unit": {"enum": ["1", "2"]},
    }
    schema = {"type": "object", "properties": properties, "$defs": {"place": {"type": "object"}}}
    written = {"zip": "75001", "count": "three", "share": "None", "is_new": "True", "list": "['a', None]"}
    written |= {"place": '{"x": 1}', "unit": "1", "other": '{"y": 2}'}
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
    parser = FORMATS["qwen3-coder"].parser(prompt_tail="", tools={"go": schema})
    (call,) = read(parser, [f"<tool_call>\n<function=go>\n{inner}</function>\n</tool_call>"]).calls
    assert json.loads(call.arguments) == {
        "zip": "75001",
        "count": "three",
        "share": None,
        "is_new": True,
        "list": ["a", None],
        "place": {"x": 1},
        "unit": "1",
        "other": {"y": 2},
    }


def test_arguments_that_are_cut_do_not_look_whole() -> None:
    for name, output in OUTPUTS.items():
        if output.family in ("gemma-4", "pythonic", "lfm2"):
            continue
        text = output.text[: output.text.index('"b"')]
        for call in read(parser_of(output), [text]).calls:
            with pytest.raises(ValueError):
                json.loads(call.arguments)
            assert "Zürich" in call.arguments, name
