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
