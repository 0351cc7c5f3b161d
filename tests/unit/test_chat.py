"""Chat templates, compared with what transformers renders."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from openai.types.chat import ChatCompletionRole
from transformers import PreTrainedTokenizerFast

from raycache.api import chat as chat_module
from raycache.api.chat import ChatTemplate
from raycache.api.tokenizer import Tokenizer
from raycache.errors import ConfigError, RequestError
from tests.oracle import tiny_tokenizers

_LLAMA = (
    "{{- bos_token }}\n"
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {%- set system_message = messages[0]['content']|trim %}\n"
    "    {%- set messages = messages[1:] %}\n"
    "{%- else %}\n"
    '    {%- set system_message = "" %}\n'
    "{%- endif %}\n"
    "{{- '<|start|>system<|stop|>\\n\\n' + system_message + '<|eot|>' }}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role not in ['user', 'assistant', 'tool'] %}\n"
    "        {{- raise_exception('Unknown role: ' + message.role) }}\n"
    "    {%- endif %}\n"
    "    {{- '<|start|>' + message['role'] + '<|stop|>\\n\\n' + message['content'] | trim + '<|eot|>' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|start|>assistant<|stop|>\\n\\n' }}\n"
    "{%- endif %}\n"
)
_TOOLS = (
    "{%- if tools %}{{- 'Tools:\\n' }}{%- for tool in tools %}{{- tool | tojson(indent=2) }}{%- endfor %}{%- endif %}\n"
    "{%- set ns = namespace(count=0) %}\n"
    "{%- for message in messages %}\n"
    "{%- if message.role == 'skip' %}{%- continue %}{%- endif %}\n"
    "{%- set ns.count = ns.count + 1 %}\n"
    "{%- if message.tool_calls %}\n"
    "  {%- for call in message.tool_calls %}{{- call.function.name }}({{- call.function.arguments | tojson }})"
    "{%- endfor %}\n"
    "{%- elif message.role == 'assistant' %}{% generation %}{{- message.content }}{% endgeneration %}\n"
    "{%- else %}{{- message.role ~ ': ' ~ message.content ~ '\\n' }}\n"
    "{%- endif %}{%- endfor %}{{- ns.count }}{% if thinking %}<think>{% endif %}"
)
_CONVERSATION = [
    {"role": "system", "content": " Be <brief> & 'exact'. "},
    {"role": "user", "content": "Grüße, 東京 🎉\n\nWhat is 1 < 2?"},
    {"role": "assistant", "content": "True, of course"},
    {"role": "user", "content": "Why?  "},
]
_CALLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "skip", "content": "-"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "n": 2}}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]
_TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "a<b": "é"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer"))


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("source", [tiny_tokenizers.CHATML, _LLAMA, _TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", [_CONVERSATION, _CALLS])
def test_a_rendered_chat_is_that_of_transformers(
    folder: Path, source: str, add_generation_prompt: bool, messages: list[dict[str, Any]]
) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = ChatTemplate({"default": source}, special_tokens=Tokenizer(folder).special_tokens)
    settings = {"tools": [_TOOL], "add_generation_prompt": add_generation_prompt}

    def render_theirs() -> str:
        text = theirs.apply_chat_template(messages, chat_template=source, tokenize=False, thinking=True, **settings)
        assert isinstance(text, str)
        return text

    if source != _TOOLS and messages is _CALLS:  # a role that they do not know
        with pytest.raises(RequestError, match="role must be one of .*, got 'skip'"):
            ours.render(messages, variables={"thinking": True}, **settings)
    else:
        assert ours.render(messages, variables={"thinking": True}, **settings) == render_theirs()


@pytest.mark.parametrize("source", [tiny_tokenizers.CHATML, _LLAMA])
def test_a_continued_message_is_left_open_as_in_transformers(folder: Path, source: str) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = ChatTemplate({"default": source}, special_tokens=Tokenizer(folder).special_tokens)
    text = ours.render(_CONVERSATION[:3], add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("True, of course")
    assert text == theirs.apply_chat_template(
        _CONVERSATION[:3], chat_template=source, tokenize=False, continue_final_message=True
    )


def test_text_parts_are_joined_and_arguments_become_objects() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "a\nb"
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    source = "{{ messages[0].tool_calls[0].function.arguments.x }}"
    assert template(source).render([{"role": "assistant", "tool_calls": [call]}]) == "1"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": 1, "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
    ],
)
def test_a_malformed_message_is_named(message: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as error:
        template(tiny_tokenizers.CHATML).render([message])
    assert error.value.field == field


@pytest.mark.parametrize("source", [tiny_tokenizers.CHATML, _LLAMA, _TOOLS])
def test_a_role_that_neither_the_api_nor_the_template_knows_is_refused(source: str) -> None:
    for role in get_args(ChatCompletionRole) if source != _LLAMA else ():  # _LLAMA refuses some itself
        template(source).render([{"role": role, "content": "x"}])
    with pytest.raises(RequestError, match="got 'usr'; did you mean 'user'") as error:
        template(source).render([*_CONVERSATION, {"role": "usr", "content": "x"}])
    assert error.value.field == "messages[4].role"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ 'a' + messages }}",
        "{{ messages[5].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_refuses_the_request(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template refuses these messages") as error:
        template(source).render(_CONVERSATION)
    assert error.value.field == "messages"


def test_rendering_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(RequestError, match="more than 1000 characters"):
        template("{% for i in range(99999) %}text{{ i }}{% endfor %}").render(_CONVERSATION)
    monkeypatch.setattr(chat_module, "MAX_RENDER_S", 0.0)
    with pytest.raises(RequestError, match="takes more than"):
        template("{% for i in range(99) %}{{ i }}{% endfor %}").render(_CONVERSATION)


def test_a_model_without_template_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(tmp_path, chat_template=None))
    with pytest.raises(RequestError, match="/v1/completions.*--chat-template"):
        ChatTemplate.load(tokenizer).render(_CONVERSATION)
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].role }}")
    assert ChatTemplate.load(tokenizer, path=str(path)).render(_CONVERSATION) == "system"


def test_templates_that_cannot_be_used_are_refused_at_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match="not a Jinja template"):
        template("{% if %}")
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatTemplate.load(Tokenizer(folder), path=str(folder / "none.jinja"))


def test_variables_of_the_server_cannot_be_replaced() -> None:
    for name in ("messages", "bos_token"):
        with pytest.raises(RequestError, match=name):
            template("").render(_CONVERSATION, variables={name: "x"})
    with pytest.raises(RequestError, match="add_generation_prompt=false"):
        template("").render(_CONVERSATION, continue_final_message=True)


def test_the_tool_template_is_taken_when_there_are_tools() -> None:
    both = ChatTemplate({"default": "plain", "tool_use": "tools"}, special_tokens={})
    assert both.render(_CONVERSATION) == "plain"
    assert both.render(_CONVERSATION, tools=[_TOOL]) == "tools"
