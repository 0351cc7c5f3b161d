"""Finding the format of a model from its chat template."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from raycache.api import chat
from raycache.api.chat import ChatTemplate
from raycache.api.formats.find import find_format, ignores_tools
from raycache.api.formats.parts import Message
from tests.unit.chat_outputs import CALLS, CONTENT, OUTPUTS, THOUGHTS, TOOLS

_HERMES = (
    "{% if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ 'Answer as <tool_call>...</tool_call>' }}{% endif %}"
    "{% for message in messages %}{{ '<' ~ message.role ~ '>' ~ (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>\n' ~ (call.function | tojson) ~ '\n</tool_call>' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
_NO_TOOLS = "{% for message in messages %}{{ '<' ~ message.role ~ '>' ~ message.content }}{% endfor %}"


class Words:
    """A vocabulary."""

    def __init__(self, words: Collection[str] = (), *, response_template: object = None) -> None:
        self._words, self.response_template = words, response_template

    def token_id(self, token: str) -> int | None:
        return 7 if token in self._words else None


def _template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special_tokens={})


def test_a_template_is_recognised_by_its_marks() -> None:
    found = find_format(_template(_HERMES), tokenizer=Words())
    assert found.name == "hermes" and found.reasoning is None
    assert {"<tool_call>", "</tool_call>"} <= found.marks


def test_reasoning_is_seen_in_the_template_or_the_vocabulary() -> None:
    in_template = find_format(_template(_HERMES + "{# <think> </think> #}"), tokenizer=Words())
    in_vocabulary = find_format(_template(_HERMES), tokenizer=Words({"<think>", "</think>"}))
    assert in_template.reasoning == in_vocabulary.reasoning is not None
    assert find_format(_template(_NO_TOOLS), tokenizer=Words({"<think>", "</think>"})).name == "reasoning"
    assert find_format(_template(_NO_TOOLS), tokenizer=Words()).name == "plain"


def test_a_template_that_shows_no_tools_is_told() -> None:
    assert ignores_tools(_template(_NO_TOOLS))
    assert not ignores_tools(_template(_HERMES))


@pytest.mark.parametrize("name", [name for name in OUTPUTS if OUTPUTS[name].family not in ("llama-3", "pythonic")])
def test_every_family_is_recognised_by_what_its_template_writes(name: str) -> None:
    output = OUTPUTS[name]
    told = "{{ tools | tojson }}{% for message in messages if message.tool_calls %}{{ text }}{% endfor %}"
    template = ChatTemplate({"default": told}, special_tokens={"text": output.text})
    tokens = {"<|tool_call|>"} if name == "granite 3.1" else {"[ARGS]"} if "v11" in output.family else set()
    assert find_format(template, tokenizer=Words(tokens)).name == output.family


def test_calls_without_marks_are_recognised_by_the_instruction() -> None:
    llama = 'Environment: ipython. Answer {"name": function name, "parameters": arguments}.'
    python = "Answer [func_name1(params_name1=params_value1), func_name2(params)]"
    for told, family in ((llama, "llama-3"), (python, "pythonic")):
        source = "{{ told }}{{ tools | tojson }}" + f"{{# {told} #}}"
        assert find_format(_template(source), tokenizer=Words()).name == family


_BUILT_IN = {"deepseek_v32": "deepseek-v3.2", "kimi_k3": "kimi-k3"}


@pytest.mark.parametrize("name", _BUILT_IN)
@pytest.mark.parametrize("thinks", [False, True])
def test_a_turn_that_a_built_in_template_writes_is_read_back(name: str, thinks: bool) -> None:
    source = Path(chat.__file__).with_name("chat_templates") / f"{name}.jinja"
    template = _template(source.read_text())
    found = find_format(template, tokenizer=Words())
    assert found.name == _BUILT_IN[name] and not ignores_tools(template)
    tools = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
    calls: list[dict[str, Any]] = [
        {"id": f"call{index}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments) in enumerate(CALLS)
    ]
    question = [{"role": "user", "content": "How is it?"}]
    answer = {"role": "assistant", "content": CONTENT, "tool_calls": calls, "reasoning_content": THOUGHTS}
    variables = {"thinking": thinks}
    prompt = template.render(question, tools=tools, variables=variables)
    whole = template.render([*question, answer], tools=tools, variables=variables, add_generation_prompt=False)
    assert whole.startswith(prompt)
    parser = found.parser(prompt_tail=prompt[-200:], tools=TOOLS)
    assert parser.is_reasoning == thinks
    text = whole.removeprefix(prompt).removesuffix("<｜end▁of▁sentence｜>").removesuffix("<|end_of_msg|>")
    message = Message.of([*parser.feed(text), *parser.finish()])
    assert (message.reasoning, message.content) == (THOUGHTS if thinks else "", CONTENT)
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == CALLS


def _declares(**tool_calls: Any) -> dict[str, Any]:
    thoughts = {"open": "<thought>", "close": "</thought>", "content": "text"}
    tool_calls = {"repeats": True, "transform": {"type": "function", "function": "{content}"}, **tool_calls}
    return {"start_anchor": "<model>", "fields": {"thinking": thoughts, "tool_calls": tool_calls, "content": {}}}


_BY_NAME = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_JSON = json.dumps(CALLS[0][1], ensure_ascii=False)
_DECLARED = {
    "objects": (
        _declares(open_pattern=r"\s*<use>", close="</use>", content="json"),
        f'<use>{{"name": "get_weather", "arguments": {_JSON}}}</use>\n<use>{{"name": "now", "arguments": {{}}}}</use>',
    ),
    "names before arguments": (
        _declares(open_pattern=r"<use>(?P<name>\w+):", close="</use>", content="json", transform=_BY_NAME),
        f"<use>get_weather:{_JSON}</use><use>now:{{}}</use>",
    ),
    "elements": (
        _declares(
            open_pattern=r"\s*<use>\s*<fn=(?P<name>[^>\n]+)>",
            close_pattern=r"</fn>\s*</use>",
            content="xml-inline",
            content_args={"tag_pattern": r"<arg=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</arg>"},
            transform=_BY_NAME,
        ),
        "<use>\n<fn=get_weather>\n<arg=city>\nZürich\n</arg>\n<arg=days>\n3\n</arg>\n"
        '<arg=opts>\n{"units": "C", "tags": ["a", "b"]}\n</arg>\n</fn>\n</use>\n<use>\n<fn=now>\n</fn>\n</use>',
    ),
}


@pytest.mark.parametrize("name", _DECLARED)
def test_what_a_checkpoint_declares_is_read_as_transformers_reads_it(name: str) -> None:
    declared, calls = _DECLARED[name]
    declared["fields"]["content"] = {"content": "text"}
    tools = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
    text = f"<thought>{THOUGHTS}</thought>{CONTENT}{calls}"
    expected = parse_response(text, {"version": 1, **declared}, prefix="<user>Q<model>", tools=tools)
    template = _template(_NO_TOOLS + "{# <use> <fn= #}")
    found = find_format(template, tokenizer=Words(response_template=declared))
    assert found.name == "declared"
    parser = found.parser(prompt_tail="<user>Q<model>", tools=TOOLS)
    message = Message.of([*parser.feed(text), *parser.finish()])
    assert (message.reasoning, message.content) == (expected["thinking"], expected["content"])
    functions = [call["function"] for call in expected["tool_calls"]]
    assert [{"name": call.name, "arguments": json.loads(call.arguments)} for call in message.calls] == functions


@pytest.mark.parametrize(
    "declared",
    [
        None,
        {"fields": {}},
        _declares(open_pattern=r"<(use|call)>", close="</use>", content="json"),
        _declares(open="<use>", close=["</use>", "</call>"], content="json"),
        _declares(open="<use>", close="</use>", content="kv-lines"),
        _declares(open="<unheard>", close="</unheard>", content="json"),
    ],
)
def test_without_a_declaration_that_can_be_read_the_template_tells(declared: Any) -> None:
    assert find_format(_template(_HERMES), tokenizer=Words(response_template=declared)).name == "hermes"
