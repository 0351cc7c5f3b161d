"""Finds out how a model writes its answers, from its chat template and its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from raycache.api.formats.chat_format import ChatFormat
from raycache.api.formats.families import FAMILIES, REASONING
from raycache.errors import RequestError

_TOOL = {
    "type": "function",
    "function": {
        "name": "find_marigold",
        "description": "Finds it.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


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
    """The format of a model.

    A template that shows no tools gives a format without calls.
    """
    text = "\n".join(template.sources.values())

    def has(mark: str) -> bool:
        return mark in text or tokenizer.token_id(mark) is not None

    reasoning = next((marks for marks in REASONING if has(marks.open) and has(marks.close)), None)
    for family in FAMILIES:
        if family.fits(has):
            found = family.format
            return found if found.reasoning else replace(found, reasoning=reasoning)
    return ChatFormat("reasoning" if reasoning else "plain", reasoning)


def ignores_tools(template: Template) -> bool:
    """Whether a prompt with tools says nothing of them."""
    try:
        shown = template.render([{"role": "user", "content": "Where?"}], tools=[_TOOL])
    except RequestError:
        return False
    name = _TOOL["function"]["name"]  # type: ignore[index]
    return name not in shown
