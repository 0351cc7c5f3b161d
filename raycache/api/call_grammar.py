"""The grammar of an answer with tool calls, for one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raycache.api.constraint import json_rule, mark
from raycache.api.formats.chat_format import ChatFormat
from raycache.api.json_schemas import checked_schema
from raycache.api.tokenizer import Tokenizer
from raycache.api.tools import Tool, ToolChoice
from raycache.errors import RequestError

_ANY: Mapping[str, Any] = {"type": "object"}


def call_grammar(chat_format: ChatFormat, choice: ToolChoice, *, tokenizer: Tokenizer, prompt_tail: str) -> str:
    """A grammar that holds the model to the tools, or "" if it is free in everything.

    Calls that are not required are held to schemas of strict tools only.

    Args:
        prompt_tail: end of the rendered prompt; it says whether the output begins inside of the reasoning.
    Raises:
        RequestError: a strict tool has a schema that cannot be enforced.
    """
    if not choice.tools or not (choice.is_required or any(tool.is_strict for tool in choice.tools)):
        return ""
    return chat_format.grammar(
        {tool.name: _schema(tool, is_required=choice.is_required) for tool in choice.tools},
        words=_Words(tokenizer),
        prompt_tail=prompt_tail,
        is_required=choice.is_required,
        is_parallel=choice.is_parallel,
    )


def _schema(tool: Tool, *, is_required: bool) -> Mapping[str, Any]:
    if not tool.is_strict and not is_required:
        return _ANY
    try:
        return checked_schema(tool.parameters, field=f"the parameters of the tool {tool.name!r}")
    except RequestError:
        if tool.is_strict:
            raise
        return _ANY


@dataclass(frozen=True)
class _Words:
    """Special tokens and schemas as llguidance reads them."""

    tokenizer: Tokenizer

    def token(self, text: str) -> str:
        return "" if self.tokenizer.token_id(text) is None else mark(text, self.tokenizer)

    def json(self, schema: Mapping[str, Any]) -> str:
        return json_rule(schema, field="tools")
