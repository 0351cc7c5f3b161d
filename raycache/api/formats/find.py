"""Finds out how a model writes its answers, from its chat template and its vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from raycache.api.formats.chat_format import ChatFormat
from raycache.api.formats.declared import declared_format
from raycache.api.formats.families import FAMILIES, REASONING
from raycache.api.formats.probe import NAME, QUESTION, Template, rendered, with_calls


class Vocabulary(Protocol):
    """A tokenizer, as far as it is needed here."""

    @property
    def response_template(self) -> object:
        """What the checkpoint declares of its answers, or None."""
        ...

    def token_id(self, token: str) -> int | None:
        """Id of a token, or None."""
        ...


def find_format(template: Template, *, tokenizer: Vocabulary) -> ChatFormat:
    """The format of a model: what it declares, or that of the first family whose marks its template has.

    Marks are looked for in what the template writes for a conversation with a call, in its source, and in the
    vocabulary. A template that shows no tools gives a format without calls.
    """
    text = "\n".join([*template.sources.values(), rendered(template, with_calls("Zürich"))])

    def has(mark: str) -> bool:
        return mark in text or (mark.startswith(("<|", "<｜", "[")) and tokenizer.token_id(mark) is not None)

    def is_known(mark: str) -> bool:
        return mark in text or tokenizer.token_id(mark) is not None

    reasoning = next((marks for marks in REASONING if is_known(marks.open) and is_known(marks.close)), None)
    declared = declared_format(tokenizer.response_template)
    if declared and declared.calls and all(map(is_known, declared.calls.opens)):
        return declared if declared.reasoning else replace(declared, reasoning=reasoning)
    for family in FAMILIES:
        if all(map(has, family.needs)):
            found = family.format
            return found if found.reasoning or found.has_channels else replace(found, reasoning=reasoning)
    return ChatFormat("reasoning" if reasoning else "plain", reasoning)


def ignores_tools(template: Template) -> bool:
    """Whether a prompt with tools says nothing of them."""
    shown = rendered(template, [QUESTION]) or rendered(template, with_calls("Zürich"))
    return bool(shown) and NAME not in shown
