"""Bodies of /v1/responses: the chats that they become, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycache.api.field_names import renamed
from raycache.api.responses_body import CHAT_NAMES, ResponsesRequest, parse_responses
from raycache.api.responses_items import decode_reasoning, encode_reasoning, flat_name
from raycache.errors import PromptTooLongError, RequestError

_CODEX = json.loads((Path(__file__).parents[1] / "data" / "codex_request.json").read_text())
_USER = {"role": "user", "content": "Hi"}
_TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


def parsed(items: Any, **fields: Any) -> ResponsesRequest:
    return parse_responses({"model": "tiny", "input": items, **fields})


def messages(items: Any, **fields: Any) -> list[dict[str, Any]]:
    return parsed(items, **fields).chat.messages


def call(name: str, number: int, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"call_{number}", "name": name, "arguments": "{}", **fields}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def chat_call(name: str, number: int) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_a_text_is_a_message_of_the_user_and_instructions_come_first() -> None:
    assert messages("Hi") == [_USER]
    assert messages("Hi", instructions="Be brief.") == [{"role": "system", "content": "Be brief."}, _USER]


def test_one_turn_of_the_model_is_one_message() -> None:
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    message = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "phase": "commentary",
        "content": [{"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}],
    }
    outputs = [{"type": "function_call_output", "call_id": f"call_{n}", "output": f"R{n}"} for n in (1, 2)]
    first, second = call("look", 1, id="fc_1", status="completed"), call("now", 2, namespace=None)
    turn = {"role": "assistant", "reasoning_content": "Hm.", "content": "Let me look."}
    assert messages([_USER, reasoning, message, first, second, *outputs, message, _USER]) == [
        _USER,
        {**turn, "tool_calls": [chat_call("look", 1), chat_call("now", 2)]},
        {"role": "tool", "tool_call_id": "call_1", "content": "R1"},
        {"role": "tool", "tool_call_id": "call_2", "content": "R2"},
        {"role": "assistant", "content": "Let me look."},
        _USER,
    ]


def test_system_and_developer_messages_at_the_beginning_are_one() -> None:
    parts = [{"type": "input_text", "text": "B"}, {"type": "input_text", "text": "C"}]
    begun = [{"type": "message", "role": "developer", "content": "A"}, {"role": "system", "content": parts}]
    late = {"role": "developer", "content": "Late."}
    assert messages([*begun, _USER, late], instructions="I") == [
        {"role": "system", "content": "I\n\nA\n\nB\nC"},
        _USER,
        {"role": "system", "content": "Late."},
    ]


def test_ids_of_items_change_nothing() -> None:
    first = parse_responses(_CODEX).chat
    changed = json.loads(json.dumps(_CODEX))
    for number, item in enumerate(changed["input"]):
        item["id"] = f"msg_{number}"
    assert parse_responses(changed).chat == first


def test_other_content_of_items() -> None:
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert messages([_USER, refusal])[1] == {"role": "assistant", "content": "No."}
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"}
    result = {"type": "custom_tool_call_output", "call_id": "c", "output": parts}
    _, turn, tool = messages([_USER, custom, result])
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"input": "*** Begin"}
    assert tool == {"role": "tool", "tool_call_id": "c", "content": "a\nb"}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", None),
        ('{"cmd": "ec', {"arguments": '{"cmd": "ec'}),
        ("[1]", {"arguments": "[1]"}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
    ],
)
def test_arguments_that_were_cut_off_do_not_end_a_conversation(arguments: str, shown: dict[str, Any] | None) -> None:
    item = {"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments}
    sent = messages([_USER, item])[1]["tool_calls"][0]["function"]["arguments"]
    assert sent == "" if shown is None else json.loads(sent) == shown


@pytest.mark.parametrize("text", ["", "I need weather.\n", "Grüße 東京 🎉"])
def test_encoded_reasoning_comes_back(text: str) -> None:
    assert decode_reasoning(encode_reasoning(text)) == text
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": encode_reasoning(text)}
    found = messages([_USER, sealed, {"role": "assistant", "content": "A"}])[1]
    assert found == {"role": "assistant", "content": "A"} | ({"reasoning_content": text} if text else {})


@pytest.mark.parametrize("sealed", ["gAAAAABm", "", None, "raycache:***", "raycache:/w==", 7])
def test_what_others_have_encrypted_is_left_out(sealed: Any) -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "S"}], "encrypted_content": sealed}
    assert messages([item, {"role": "assistant", "content": "A"}, _USER])[0] == {"role": "assistant", "content": "A"}


def test_namespaces_become_parts_of_names() -> None:
    tools = [
        _TOOL,
        {"type": "namespace", "name": "mcp__files__", "description": "Files.", "tools": [_TOOL]},
        {"type": "namespace", "name": "crm", "description": "", "tools": [_TOOL, {"type": "custom", "name": "x"}]},
        {"type": "web_search", "external_web_access": True},
    ]
    asked = parsed([_USER, call("look", 1, namespace="crm"), call("look", 2)], tools=tools)
    assert [tool["function"]["name"] for tool in asked.chat.tools] == [
        "look",
        "mcp__files__look",
        "crm__look",
        "crm__x",
    ]
    assert asked.chat.tools[0]["function"]["parameters"] == _TOOL["parameters"]
    assert asked.namespaces == {
        "mcp__files__look": ("mcp__files__", "look"),
        "crm__look": ("crm", "look"),
        "crm__x": ("crm", "x"),
    }
    assert asked.customs == {"crm__x"} and not asked.has_grammars
    assert asked.ignored_tools == ("web_search",)
    assert asked.chat.messages[1]["tool_calls"] == [chat_call("crm__look", 1), chat_call("look", 2)]
    assert asked.echo["tools"] == tools
    with pytest.raises(RequestError, match="look twice"):
        parsed("Hi", tools=[_TOOL, _TOOL])
    assert flat_name("", "look") == "look"


def test_settings_are_those_of_a_chat() -> None:
    chat = parsed(
        "Hi",
        tools=[_TOOL],
        tool_choice={"type": "function", "name": "look"},
        parallel_tool_calls=False,
        reasoning={"effort": "high", "summary": "auto"},
        max_output_tokens=9,
        temperature=0.5,
        top_p=None,
        cache_priority=3,
        stream=True,
        stream_options={"include_obfuscation": False},
        truncation="auto",
        surprise={"x": 1},
    ).chat
    assert chat.tool_choice == {"type": "function", "function": {"name": "look"}}
    assert (chat.parallel_tool_calls, chat.reasoning_effort, chat.max_tokens) == (False, "high", 9)
    assert (chat.temperature, chat.cache_priority, chat.stream) == (0.5, 3, True)
    assert "top_p" not in chat.model_fields_set


def test_what_is_repeated_may_be_nested() -> None:
    assert parsed("Hi", metadata=nested(128)).echo["metadata"] == nested(128)


def test_tool_choice_allowed_tools() -> None:
    allowed = [{"type": "function", "name": "look"}, {"type": "web_search"}]
    asked = parsed("Hi", tools=[_TOOL], tool_choice={"type": "allowed_tools", "mode": "required", "tools": allowed})
    found = asked.chat.choose_tools()
    assert ([tool.name for tool in found.tools], found.is_required) == (["look"], True)


def test_text_format() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    wanted = {"type": "json_schema", "name": "place", "schema": schema, "strict": True}
    asked = parsed("Hi", text={"format": wanted, "verbosity": "low"})
    assert asked.chat.output_form() == ("json", schema)
    assert asked.echo["text"] == {"format": wanted, "verbosity": "low"}
    assert parsed("Hi", text={"format": {"type": "json_object"}}).chat.output_form() == ("json_object", True)
    assert parsed("Hi", text={"format": {"type": "text"}}).chat.output_form() is None
    assert parsed("Hi", text={"verbosity": "low"}).echo["text"]["format"] == {"type": "text"}


def test_the_request_of_codex() -> None:
    asked = parse_responses(_CODEX)
    assert [message["role"] for message in asked.chat.messages] == ["system", "user", "user"]
    assert [tool["function"]["name"] for tool in asked.chat.tools] == ["exec_command", "write_stdin", "agents__spawn"]
    assert (asked.ignored_tools, asked.is_reasoning_sealed) == (("web_search",), True)


_PART = {"type": "input_image", "image_url": "data:image/png;base64,"}


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"store": True}, "store", "nothing is stored here"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "send the whole conversation"),
        ({"background": True}, "background", "leave it out"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "as instructions"),
        ({"input": []}, "input", "not empty"),
        ({"input": 7}, "input", "a string or a list of items"),
        ({"input": ["Hi"]}, "input", "a string or a list of items"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "none are stored"),
        ({"input": [_USER, {"type": "computer_call"}]}, "input[1]", "'computer_call', which is not supported"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0]", "call_id"),
        ({"input": [{"role": "user"}]}, "input[0]", "content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "developer"),
        ({"input": [{"role": "user", "content": [_PART]}]}, "input[0].content[0]", "only text"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]", "input_text"),
        ({"input": [call("x", 1, namespace=3)]}, "input[0].namespace", "string"),
        ({"tools": [{"type": "web_search"}] * 513}, "tools", "at most 512"),
        ({"tools": [{"name": "x"}]}, "tools[0]", "of the form"),
        ({"tools": [{"type": "namespace", "name": "x"}]}, "tools[0]", "name and tools"),
        ({"tools": [{"type": "custom"}]}, "tools[0]", "of the form .*custom"),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "xml"}}]}, "tools[0].format", "of the form"),
        ({"tools": [{"type": "custom", "name": "look"}, _TOOL]}, "tools", "different names"),
        ({"tool_choice": {"type": "custom", "name": "x"}}, "tool_choice", "'x'"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": ["y"]}]}, "tools[0].tools[0]", "of the form"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "'file_search'"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "'x'"),
        ({"tool_choice": "sometimes"}, "tool_choice", "'required'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "required"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least|greater"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"seed": "x"}, "seed", "integer"),
        ({"metadata": nested(129)}, "metadata", "more than 128 deep"),
        ({"text": {"x": nested(128)}}, "text", "more than 128 deep"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        parse_responses({"model": "tiny", "input": "Hi", **fields})
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "message", "expected"),
    [
        ("response_format", "response_format: the keyword 'not'", ("text.format", "text.format: the keyword 'not'")),
        ("max_tokens", "use max_tokens of at most 8", ("max_output_tokens", "use max_output_tokens of at most 8")),
        ("messages[3]", "messages[3].role is missing", ("input", "messages[3].role is missing")),
        ("messages", "messages has 300 tokens", ("input", "input has 300 tokens")),
        (
            "tool_choice",
            "response_format and a required tool exclude each other",
            ("tool_choice", "text.format and a required tool exclude each other"),
        ),
        ("tools", "at #/properties/max_tokens of messages", ("tools", "at #/properties/max_tokens of messages")),
        (None, "the body is not JSON", (None, "the body is not JSON")),
    ],
)
def test_errors_of_the_chat_name_the_fields_of_responses(
    field: str | None, message: str, expected: tuple[str | None, str]
) -> None:
    error = renamed(RequestError(message, field=field), CHAT_NAMES)
    assert (error.field, error.message) == expected
    assert str(error) == error.message


def test_a_renamed_error_keeps_what_else_it_says() -> None:
    error = renamed(PromptTooLongError("max_tokens=9", field="max_tokens", num_tokens=5, limit=7), CHAT_NAMES)
    assert isinstance(error, PromptTooLongError)
    assert (error.num_tokens, error.limit, error.message) == (5, 7, "max_output_tokens=9")


_PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}


def test_a_custom_tool_is_a_function_of_a_text() -> None:
    asked = parse_responses({"model": "tiny", "input": "Hi", "tools": [_PATCH, _TOOL]})
    function = asked.chat.tools[0]["function"]
    assert function["name"] == "apply_patch"
    assert function["description"] == (
        'Edits files.\n\nThe input must match this Lark grammar:\nstart: "*** Begin Patch"'
    )
    assert function["parameters"]["properties"] == {"input": {"type": "string"}}
    assert (asked.customs, asked.has_grammars, asked.ignored_tools) == ({"apply_patch"}, True, ())
    assert asked.echo["tools"] == [_PATCH, _TOOL]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "apply_patch"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]},
    ],
)
def test_a_custom_tool_can_be_required(choice: Any) -> None:
    asked = parse_responses({"model": "tiny", "input": "Hi", "tools": [_PATCH, _TOOL], "tool_choice": choice})
    chosen = asked.chat.choose_tools()
    assert chosen.is_required and [tool.name for tool in chosen.tools] == ["apply_patch"]
