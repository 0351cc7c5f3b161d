"""Finding the format of a model from its chat template."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

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

    def __init__(self, words: Collection[str] = ()) -> None:
        self._words = words

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
