"""Finds out how a model writes its answers, from its chat template and its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from raycache.api.formats.chat_format import ChatFormat
from raycache.api.formats.families import FAMILIES, REASONING
from raycache.errors import RequestError

_NAME = "find_marigold"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Finds it.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
_QUESTION: Mapping[str, Any] = {"role": "user", "content": "Where?"}
_CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": _NAME, "arguments": {"place": "Zürich"}},
}
_WITH_CALL: Sequence[Mapping[str, Any]] = [
    _QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call00000", "name": _NAME, "content": "There."},
]


class Template(Protocol):
    """A chat template, as far as it is needed here."""

    @property
    def sources(self) -> Mapping[str, str]:
        """Name -> Jinja source."""
        ...

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Text of a prompt; raises RequestError where the template refuses."""
        ...


class Vocabulary(Protocol):
    """A tokenizer, as far as it is needed here."""

    def token_id(self, token: str) -> int | None:
        """Id of a token, or None."""
        ...


def find_format(template: Template, *, tokenizer: Vocabulary) -> ChatFormat:
    """The format of a model: that of the first family whose marks its template has.

    The marks are looked for in what the template writes for a conversation with a call, in its source, and in the
    vocabulary. A template that shows no tools gives a format without calls.
    """
    text = "\n".join([*template.sources.values(), _rendered(template, _WITH_CALL)])

    def has(mark: str) -> bool:
        return mark in text or (mark.startswith(("<|", "<｜", "[")) and tokenizer.token_id(mark) is not None)

    def is_known(mark: str) -> bool:
        return mark in text or tokenizer.token_id(mark) is not None

    reasoning = next((marks for marks in REASONING if is_known(marks.open) and is_known(marks.close)), None)
    for family in FAMILIES:
        if all(map(has, family.needs)):
            found = family.format
            return found if found.reasoning or found.has_channels else replace(found, reasoning=reasoning)
    return ChatFormat("reasoning" if reasoning else "plain", reasoning)


def ignores_tools(template: Template) -> bool:
    """Whether a prompt with tools says nothing of them."""
    shown = _rendered(template, [_QUESTION]) or _rendered(template, _WITH_CALL)
    return bool(shown) and _NAME not in shown


def _rendered(template: Template, messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt with a tool, or "" if the template refuses it."""
    try:
        return template.render(messages, tools=[_TOOL])
    except RequestError:
        return ""
