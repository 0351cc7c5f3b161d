"""Bodies of /v1/messages against the same conversation written for /v1/chat/completions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from raycache.api.attribution import without_attribution
from raycache.api.chat import ChatTemplate
from raycache.api.chat_model import ChatModel
from raycache.api.defaults import Defaults
from raycache.api.messages_body import Conversation, CountTokensBody, MessagesBody, conversation
from raycache.api.prepare import Served, chat_prompt
from raycache.api.schema import ChatBody, parse_body
from raycache.api.tokenizer import Tokenizer
from raycache.errors import RequestError
from raycache.types import EngineInfo
from tests.oracle import tiny_tokenizers

SHOWS_ALL = (
    "{{ {'thinks': enable_thinking, 'effort': reasoning_effort} if enable_thinking is defined else 'default' }}\n"
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message | tojson }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SCHEMA = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {"city": {}}}
LINE = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))
    template = ChatTemplate({"default": SHOWS_ALL}, special_tokens={})
    info = EngineInfo("tiny", "", tokenizer.vocab_size, (0,), 8192, 16, 64, 8)
    chat = ChatModel(template, tokenizer=tokenizer)
    return Served(tokenizer, chat, info, None, Defaults())


def asked(has_priorities: bool = False, **body: Any) -> Conversation:
    whole = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **body}
    return conversation(parse_body(MessagesBody, whole), has_priorities=has_priorities)


def prompt(served: Served, chat: ChatBody) -> str:
    return served.tokenizer.decode(chat_prompt(chat, served), skip_special_tokens=False)


def chat_of(**body: Any) -> ChatBody:
    return parse_body(ChatBody, {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **body})


def call(call_id: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "weather", "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def test_a_tool_loop_is_the_same_prompt_as_in_a_chat(served: Served) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}, {"type": "text", "text": "Say.", **mark}]},
        {"role": "system", "content": "Agents: none."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I must look.", "signature": "whatever"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Zürich", "days": 3}},
                {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {}},
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Well?"},
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "wet", **mark}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such city", "is_error": True},
                {"type": "tool_result", "tool_use_id": "toolu_3"},
            ],
        },
        {"role": "user", "content": "Now?"},
    ]
    tools = [
        {"name": "weather", "description": "Asks.", "input_schema": SCHEMA, **mark, "type": "custom"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "bash_20250124", "name": "bash"},
    ]
    found = asked(system=[{"type": "text", "text": "Be brief.", **mark}], messages=messages, tools=tools)
    expected = chat_of(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Rain?\nSay."},
            {"role": "system", "content": "Agents: none."},
            {
                "role": "assistant",
                "content": "Let me look.",
                "reasoning_content": "I must look.",
                "tool_calls": [call("toolu_1", {"city": "Zürich", "days": 3}), call("toolu_2", {})],
            },
            {"role": "tool", "tool_call_id": "toolu_1", "content": "wet"},
            {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no such city"},
            {"role": "tool", "tool_call_id": "toolu_3", "content": ""},
            {"role": "user", "content": "Well?\nNow?"},
        ],
        tools=[{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "description": "Asks."}}],
    )
    assert prompt(served, found.chat) == prompt(served, expected)
    assert found.ignored == {"web_search_20250305", "bash_20250124", "server_tool_use"}
    assert "cache_control" not in prompt(served, found.chat)


@pytest.mark.parametrize(
    ("thinking", "switch", "budget"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, True, 2048),
        ({"type": "adaptive", "display": "summarized"}, True, None),
        ({"type": "disabled"}, False, None),
        (None, None, None),
    ],
)
def test_thinking_is_switched_in_the_template(
    served: Served, thinking: dict[str, Any] | None, switch: bool | None, budget: int | None
) -> None:
    chat = asked(thinking=thinking, output_config={"effort": "high"}).chat
    assert chat.chat_template_kwargs.get("enable_thinking") is switch
    assert chat.chat_template_kwargs.get("thinking") is switch
    assert (chat.thinking_token_budget, chat.reasoning_effort) == (budget, "high")
    first = prompt(served, chat).partition("\n")[0]
    assert first == ("default" if switch is None else str({"thinks": switch, "effort": "high"}))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: Any) -> None:
    tools = [{"name": "weather", "input_schema": SCHEMA, "strict": True}]
    chat = asked(tools=tools, tool_choice=choice | {"disable_parallel_tool_use": True}).chat
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, False)
    assert chat.tools[0]["function"] == {"name": "weather", "parameters": SCHEMA, "strict": True}
    assert asked(tools=tools, tool_choice=choice).chat.parallel_tool_calls


@pytest.mark.parametrize("fields", [{"output_config": {"format": {}}}, {"output_format": {}}])
def test_an_output_format_is_a_response_format(fields: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    fields = {name: {"format": wanted} if value else wanted for name, value in fields.items()}
    assert asked(**fields).chat.output_form() == ("json", SCHEMA)


def test_sampling_and_own_fields_are_passed_on() -> None:
    chat = asked(
        stop_sequences=["END"], temperature=0.5, top_p=0.9, top_k=7, stream=True, seed=3, cache_salt="s", priority=2
    ).chat
    assert (chat.stop, chat.temperature, chat.top_p, chat.top_k, chat.max_tokens) == (["END"], 0.5, 0.9, 7, 9)
    assert (chat.stream, chat.seed, chat.cache_salt, chat.priority) == (True, 3, "s", 2)


def test_unknown_fields_and_betas_are_ignored() -> None:
    found = asked(
        metadata={"user_id": "u"}, context_management={"edits": []}, speed="fast", mcp_servers=[], container=None, x=1
    )
    assert found == asked()


def test_cache_marks_are_a_priority_where_the_cache_evicts_by_it() -> None:
    def retention(**body: Any) -> tuple[int, float]:
        chat = asked(has_priorities=True, **body).chat
        return chat.cache_priority, chat.cache_ttl_s

    mark: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
    hour: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    text = {"type": "text", "text": "Hi"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text | hour]}
    assert retention() == (0, 0.0)
    assert retention(**mark) == (1, 300.0)
    assert retention(system=[text | mark]) == (1, 300.0)
    assert retention(tools=[{"name": "weather", "input_schema": SCHEMA, **hour}], **mark) == (1, 3600.0)
    assert retention(messages=[{"role": "user", "content": [text | mark]}]) == (1, 300.0)
    assert retention(messages=[{"role": "user", "content": [result]}]) == (1, 3600.0)
    assert retention(cache_priority=5, cache_ttl_s=9.0, **mark) == (5, 9.0)
    assert asked(**mark).chat.cache_priority == 0


def test_a_last_message_of_the_assistant_is_continued(served: Served) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is"}]
    template = ChatTemplate({"default": tiny_tokenizers.CHATML}, special_tokens={})
    found = prompt(
        replace(served, chat=ChatModel(template, tokenizer=served.tokenizer)),
        asked(messages=turns).chat,
    )
    assert found.endswith("<|im_start|>assistant\nThe answer is")


def test_documents_of_text_are_text(served: Served) -> None:
    inner = [{"type": "text", "text": "two"}]
    blocks = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "one"}},
        {"type": "document", "source": {"type": "content", "content": inner}},
        {"type": "search_result", "source": "s", "title": "t", "content": inner},
    ]
    chat = asked(messages=[{"role": "user", "content": blocks}]).chat
    assert prompt(served, chat) == prompt(served, chat_of(messages=[{"role": "user", "content": "one\ntwo\ntwo"}]))


_REQUIRED = {"tools": [{"name": "n", "input_schema": {}}], "tool_choice": {"type": "any"}}


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"messages": "Hi"}, "messages", "a valid list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'user', 'assistant' or 'system'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "a string or a list of blocks"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0]", "an object with a type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]", "valid text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]", "only text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages[0].content[0].tool_use_id",
            "must be a string",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "n"}]}]},
            "messages[0].content[0]",
            "not a valid tool_use",
        ),
        ({"tools": [{"name": "n"}]}, "tools[0]", "an input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type", "'auto', 'any', 'tool' or 'none'"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens", "valid integer"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "required"),
        ({"stop_sequences": "END"}, "stop_sequences", "a valid list"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences", "^stop_sequences must contain at most 16"),
        (
            {"output_format": {"type": "json_schema", "schema": {}}, **_REQUIRED},
            "tool_choice",
            "^output_format and a required tool",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}, **_REQUIRED},
            "tool_choice",
            "^output_config.format and a required tool",
        ),
        ({"system": 5}, "system", "valid string"),
    ],
)
def test_what_has_an_effect_is_checked(body: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        asked(**body)
    assert refused.value.field is not None and refused.value.field.startswith(field)


def test_a_body_to_count_needs_no_max_tokens() -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": 5}
    chat = conversation(parse_body(CountTokensBody, body), has_priorities=True).chat
    assert chat.messages == asked().chat.messages and not chat.stream


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (LINE, None),
        (f"{LINE}\nBe brief.", "Be brief."),
        ("Be brief.", "Be brief."),
        (f"Be brief. {LINE}", f"Be brief. {LINE}"),
        ([{"type": "text", "text": LINE}], None),
        ([{"type": "text", "text": LINE}, {"type": "text", "text": "A"}], [{"type": "text", "text": "A"}]),
        ([{"type": "text", "text": f"{LINE}\nA"}], [{"type": "text", "text": "A"}]),
        ([5, {"type": "text"}], [5, {"type": "text"}]),
        (None, None),
    ],
)
def test_the_attribution_line_is_left_out_of_system_messages(content: Any, kept: Any) -> None:
    message = {"role": "system", "content": content}
    expected = [{"role": "system", "content": kept}] if kept is not None or content is None else []
    assert without_attribution([message]) == expected
    theirs = {"role": "user", "content": content}
    assert without_attribution([theirs]) == [theirs]


def test_a_chat_and_a_message_with_that_line_are_prompts_without_it(served: Served) -> None:
    blocks = [{"type": "text", "text": LINE}, {"type": "text", "text": "Be brief."}]
    user = {"role": "user", "content": "Hi"}
    plain = prompt(served, chat_of(messages=[{"role": "system", "content": "Be brief."}, user]))
    assert prompt(served, asked(system=blocks).chat) == plain
    assert prompt(served, asked(system=f"{LINE}\nBe brief.").chat) == plain
    assert prompt(served, chat_of(messages=[{"role": "system", "content": blocks}, user])) == plain
