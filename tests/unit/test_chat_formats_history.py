"""Earlier turns are brought into the form that a template shows, which is found out by rendering."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from raycache.api.chat import ChatTemplate
from raycache.api.formats.calls import IdStyle
from raycache.api.formats.history import History, find_history

_TURN = "{{ '<' ~ message.role ~ '>' ~ (message.content or '') }}"
_CALLS = (
    "{% for call in message.tool_calls or [] %}{{ '[' ~ call.id ~ ' ' ~ call.function.name ~ ' ' }}"
    "{{ call.function.arguments | tojson }}{{ ']' }}{% endfor %}"
)
_PLAIN = "{% for message in messages %}" + _TURN + _CALLS + "{% endfor %}"


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special_tokens={})


def in_turns(first: str) -> ChatTemplate:
    """A template that does something of its own with each message first."""
    return template_of("{% for message in messages %}" + first + _TURN + _CALLS + "{% endfor %}")


def render(template: ChatTemplate, messages: list[dict[str, Any]], ids: IdStyle = IdStyle.OPENAI) -> str:
    return template.render(messages, adapt=find_history(template, ids=ids).adapted)


def call(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def called(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


USER = {"role": "user", "content": "Q"}


def test_a_template_that_shows_all_gets_what_the_client_sent() -> None:
    template = template_of(_PLAIN)
    assert find_history(template, ids=IdStyle.OPENAI) == History()
    messages = [{"role": "developer", "content": "D"}, USER, {"role": "system", "content": "S"}, USER]
    assert render(template, messages) == template.render(messages) == "<developer>D<user>Q<system>S<user>Q"


def test_a_developer_whose_role_gets_lost_or_is_refused_becomes_system() -> None:
    messages = [{"role": "developer", "content": "D"}, USER]
    lost = in_turns("{% if message.role == 'developer' %}{% continue %}{% endif %}")
    refused = in_turns("{% if message.role == 'developer' %}{{ raise_exception('no') }}{% endif %}")
    assert render(lost, messages) == render(refused, messages) == "<system>D<user>Q"


@pytest.mark.parametrize(
    "first",
    [
        "{% if message.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}",
        "{% if message.role == 'system' and not loop.first %}{% continue %}{% endif %}",
    ],
)
def test_a_system_message_that_comes_late_becomes_text_of_the_user(first: str) -> None:
    answer = {"role": "assistant", "content": "A"}
    late = {"role": "system", "content": "S"}
    template = in_turns(first)
    shown = render(template, [late, USER, answer, USER, late])
    assert shown == "<system>S<user>Q<assistant>A<user>Q\n\nSystem message: S"
    assert render(template, [late, late, USER, answer, late]).endswith("<assistant>A<user>System message: S")
    assert render(template, [late, late, USER]) == "<system>S\n\nS<user>Q"


def test_a_system_message_that_moves_to_the_top_would_end_every_prefix() -> None:
    moved = template_of(
        "{% for message in messages if message.role == 'system' %}{{ message.content }}{% endfor %}"
        "{% for message in messages if message.role != 'system' %}" + _TURN + "{% endfor %}"
    )
    assert render(moved, [USER, {"role": "system", "content": "S"}]) == "<user>Q\n\nSystem message: S"


def test_users_in_a_row_are_joined_where_they_are_refused() -> None:
    strict = in_turns(
        "{% if loop.previtem is defined and loop.previtem.role == message.role == 'user' %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
    )
    assert render(strict, [USER, {"role": "user", "content": "R"}]) == "<user>Q\n\nR"


def test_arguments_are_text_where_the_template_joins_them_to_text() -> None:
    joins = template_of("{% for message in messages %}" + _TURN + _CALLS.replace(" | tojson", " + ''") + "{% endfor %}")
    shown = render(joins, [USER, called(call("a", "go", place="Zürich"))])
    assert shown == '<user>Q<assistant>[a go {"place": "Zürich"}]'


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_stands_under_the_name_that_the_template_reads(key: str) -> None:
    template = in_turns("{{ message." + key + " }}")
    for sent in ("reasoning_content", "reasoning", "thinking"):
        shown = render(template, [USER, {"role": "assistant", "content": "A", sent: "T"}])
        assert shown == "<user>QT<assistant>A"


def test_content_beside_reasoning_joins_it_where_the_template_has_place_for_one() -> None:
    template = in_turns(
        "{% if message.tool_calls and message.content and message.thinking %}{{ raise_exception('no') }}{% endif %}"
        "{{ message.thinking }}"
    )
    shown = render(template, [USER, called(call("a", "go"), reasoning="T") | {"content": "C"}])
    assert shown == "<user>QT\n\nC<assistant>[a go {}]"


@pytest.mark.parametrize(
    "first",
    [
        "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}",
        "{% set message = dict(message, tool_calls=message.tool_calls[:1]) if message.tool_calls else message %}",
    ],
)
def test_parallel_calls_become_turns_where_the_template_shows_one(first: str) -> None:
    template = in_turns(first)
    turn = called(call("a", "go", n=1), call("b", "stop"), reasoning_content="T") | {"content": "C"}
    shown = render(template, [USER, turn, result("b", "B"), result("a", "A"), USER])
    assert shown == '<user>Q<assistant>[b stop {}]<tool>B<assistant>C[a go {"n": 1}]<tool>A<user>Q'
    alone = render(template, [USER, turn])
    assert alone == '<user>Q<assistant>C[a go {"n": 1}]<assistant>[b stop {}]'


def test_ids_of_the_kimi_family_are_counted_over_the_conversation() -> None:
    template = in_turns("{{ message.tool_call_id }}")
    turns = [called(call("x", "go"), call("y", "stop")), result("x", "X"), result("y", "Y")]
    shown = render(template, [USER, *turns, called(call("x", "go")), result("x", "Z")], IdStyle.KIMI)
    ids = re.findall(r"functions\.\w+:\d+", shown)
    assert ids[:4] == ["functions.go:0", "functions.stop:1", "functions.go:0", "functions.stop:1"]
    assert ids[4:] == ["functions.go:2", "functions.go:2"]


def test_ids_of_the_mistral_family_have_nine_letters_and_digits() -> None:
    template = in_turns("{{ message.tool_call_id }}")
    messages = [USER, called(call("toolu_01", "go"), call("abcdefgh1", "stop")), result("toolu_01", "X")]
    shown = render(template, messages, IdStyle.MISTRAL)
    first, second = re.findall(r"\[(\S+) ", shown)
    assert re.fullmatch(r"[a-zA-Z0-9]{9}", first) and second == "abcdefgh1"
    assert shown.count(first) == 2 and shown == render(template, messages, IdStyle.MISTRAL)


def test_the_clients_messages_are_left_alone() -> None:
    template = in_turns("{% if message.tool_calls | length > 1 %}{{ raise_exception('no') }}{% endif %}")
    messages = [USER, called(call("a", "go"), call("b", "go"), thinking="T"), result("a", "A")]
    before = json.dumps(messages)
    render(template, messages, IdStyle.KIMI)
    assert json.dumps(messages) == before


def test_what_is_changed_is_told() -> None:
    assert History().notes() == []
    told = History(shows_developer=False, shows_late_system=False, joins_users=True, splits_calls=True).notes()
    assert len(told) == 4
