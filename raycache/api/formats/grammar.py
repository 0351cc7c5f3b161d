"""Grammars for calls, in llguidance's dialect of Lark: a family's syntax with the schemas of the tools in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from raycache.api.formats.arguments import schema_types
from raycache.errors import RequestError

# Special tokens inside of longer marks, such as <|open|> in "<|open|>think<|sep|>".
TOKEN = re.compile(r'<\|[^|<>\s]*\|>|<｜[^｜<>\s]*｜>|<\|"\|>|<[^<>\s]+>|\[/?[A-Z_]+\]|｜[^｜]+｜')

MAX_SHARED = 20_000
"""Properties of the arguments times definitions."""

_SHARED = ("$defs", "definitions")

Tools = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> JSON schema of its arguments."""


class Words(Protocol):
    """How a model's vocabulary stands in a grammar."""

    def token(self, text: str) -> str:
        """Expression for a special token, or "" if the text is none."""
        ...

    def json(self, schema: Mapping[str, Any]) -> str:
        """Expression for JSON texts that are valid under a schema."""
        ...


class GrammarText:
    """A grammar while it is written.

    Args:
        tools: that may be called.
    """

    def __init__(self, tools: Tools, words: Words) -> None:
        self.tools = tools
        self._words = words
        self._rules = ["TEXT: /(?s:.*)/", "SPACE: /[ \\n]{0,4}/"]

    def __str__(self) -> str:
        return "\n".join(self._rules) + "\n"

    def rule(self, expression: str, *, name: str = "", options: str = "") -> str:
        """Write a rule; returns its name."""
        name = name or f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def mark(self, text: str) -> str:
        """Expression for a mark: its special tokens, and the text between them."""
        found: list[str] = []
        end = 0
        for match in TOKEN.finditer(text):
            token = self._words.token(match[0])
            if token:
                found += [literal(text[end : match.start()]), token]
                end = match.end()
        return " ".join(filter(None, (*found, literal(text[end:])))) or '""'

    def until(self, mark: str) -> str:
        """Expression for any text and then the mark."""
        written = self.mark(mark)
        return f"TEXT {written}" if written.startswith("<[") else self.rule(f"TEXT {written}", options="[lazy]")

    def json(self, schema: Mapping[str, Any]) -> str:
        """Rule for JSON texts that are valid under a schema."""
        return self.rule(self._words.json(schema))

    def one_of(self, expressions: Sequence[str]) -> str:
        """Rule for one of several expressions."""
        return self.rule(" | ".join(expressions))


def literal(text: str) -> str:
    """A text as an expression, or "" for none."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def many(expression: str, between: str, *, is_parallel: bool) -> str:
    """The expression once, or several times with something between."""
    return f"{expression} ({between} {expression})*" if is_parallel else expression


def properties(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]] | None:
    """Name, schema and whether it must be there, of an object's properties; None if any are allowed."""
    found = schema.get("properties")
    if not isinstance(found, Mapping):
        return None
    shared = sum(len(schema[name]) for name in _SHARED if isinstance(schema.get(name), Mapping))
    if len(found) * shared > MAX_SHARED:
        raise RequestError(
            f"tools has a schema with {len(found)} arguments and {shared} definitions, which each of them carries; "
            f"their product must be at most {MAX_SHARED}",
            field="tools",
        )
    listed = schema.get("required")
    required = listed if isinstance(listed, list) else []
    return [(name, _whole(one, schema), name in required) for name, one in found.items()]


def _whole(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a schema with the definitions that it refers to."""
    part = schema if isinstance(schema, Mapping) else {}
    return {**part, **{name: root[name] for name in _SHARED if name in root}}


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value may be a string, so that it is written as any text."""
    types = schema_types(schema)
    return not types or "string" in types


def texts_of(schema: Mapping[str, Any]) -> list[str]:
    """The strings that a schema lists; none if it lists none."""
    return [value for value in _values(schema) if isinstance(value, str)]


def without_texts(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A schema of the values that one lists and that are no strings; None if it lists none."""
    values = [value for value in _values(schema) if not isinstance(value, str)]
    return {**schema, "enum": values} if values else None


def _values(schema: Mapping[str, Any]) -> list[Any]:
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return values if isinstance(values, list) else []


def separated(parts: Sequence[tuple[str, bool]], write: GrammarText, *, separator: str) -> str:
    """Rule for a list in a fixed order, some of whose parts may be missing.

    Args:
        parts: expression, and whether it must be there.
    """
    first, later = '""', '""'
    for expression, is_required in reversed(parts):
        options = [f"{expression} {later}"] + ([] if is_required else [first])
        begun = [f"{literal(separator)} {expression} {later}"] + ([] if is_required else [later])
        first, later = write.one_of(options), write.one_of(begun)
    return first
