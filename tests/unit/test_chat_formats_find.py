"""Finding the format of a model from its chat template."""

from __future__ import annotations

from collections.abc import Collection

from raycache.api.chat import ChatTemplate
from raycache.api.formats.find import find_format, ignores_tools

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
