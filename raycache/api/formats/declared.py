r"""The format that a checkpoint declares itself: `response_template` in tokenizer_config.json.

    {"fields": {"reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
                "tool_calls": {"open_pattern": "\\s*<tool_call>", "close": "</tool_call>", "content": "json", ...}}}

Its marks are taken where they are texts, perhaps with white space and a name between them; its patterns are not run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from raycache.api.formats.calls import CallSyntax
from raycache.api.formats.chat_format import ChatFormat
from raycache.api.formats.json_calls import JsonCalls
from raycache.api.formats.literal_calls import GemmaCalls
from raycache.api.formats.named_calls import NamedCalls
from raycache.api.formats.parser import ReasoningMarks
from raycache.api.formats.xml_calls import XmlCalls

_SPACE = "\n"
_GROUP = "\0"
_PATTERN = re.compile(
    r"""
    (?P<space> (\\s|\\n) [*+?]{0,2} )
    | \(\?P<\w+> (\[ (\\.|[^\]\\])* \] | \\. | [^()\[\]\\])* \) (?P<group>)
    | \\(?P<escaped> [^\w\s] )
    | (?P<plain> [^\\.^$*+?{}\[\]|()] )
    """,
    re.VERBOSE,
)


def declared_format(template: object) -> ChatFormat | None:
    """The format that a response template declares, or None if it declares no calls that can be read here."""
    match template:
        case {"fields": {"tool_calls": dict(field), **fields}}:
            calls = _calls(field)
        case _:
            return None
    reasoning = _reasoning(fields.get("reasoning_content") or fields.get("thinking"))
    return ChatFormat("declared", reasoning, calls) if calls else None


def _reasoning(field: object) -> ReasoningMarks | None:
    match field:
        case {"open": str(opening), "close": str(closing)}:
            return ReasoningMarks(opening, closing)
    return None


def _calls(field: Mapping[str, Any]) -> CallSyntax | None:
    opening, closing = _pieces(field, "open"), _pieces(field, "close")
    arguments = field.get("content_args") or {}
    match opening, closing, field.get("content"):
        case [str(mark)], [str(close)], "json" if not arguments:
            return JsonCalls(mark, close)
        case [str(mark), behind], [str(close)], "json" if behind and not arguments:
            return NamedCalls(mark, behind.strip(), close)
        case ["<|tool_call>call:", ""], [str(close)], "json" if arguments.get("unquoted_keys"):
            return GemmaCalls(close=close)
        case [str(before), behind], [str(close)], "xml-inline":
            return _elements(before, behind, close, str(arguments.get("tag_pattern", "")))
    return None


def _elements(before: str, behind: str, close: str, tag_pattern: str) -> CallSyntax | None:
    marks, ends, tag = before.split(_SPACE), close.split(_SPACE), _split(tag_pattern)
    if tag is None or len(tag) != 3 or not all(each.strip() for each in tag):
        return None
    pad = "\n" if tag[1].endswith(_SPACE) and tag[2].startswith(_SPACE) else ""
    parameter = (tag[0].strip(), tag[1].strip(), tag[2].strip())
    match marks, ends:
        case [call], [end]:
            return XmlCalls((call, behind.strip(), end), parameter, value_pad=pad)
        case [section, call], [end, section_end]:
            return XmlCalls((call, behind.strip(), end), parameter, (section, section_end), value_pad=pad)
    return None


def _pieces(field: Mapping[str, Any], key: str) -> list[str] | None:
    """The texts around the named groups of a mark, or None if it is no text."""
    match field.get(key), field.get(f"{key}_pattern"):
        case str(text), None:
            return [text]
        case None, str(pattern):
            found = _split(pattern)
            return found and [found[0].lstrip(_SPACE), *found[1:]]
    return None


def _split(pattern: str) -> list[str] | None:
    """Texts around the named groups of a regular expression, white space as a line end; None if there is more to it."""
    found, position = "", 0
    while position < len(pattern):
        match = _PATTERN.match(pattern, position)
        if match is None:
            return None
        if match["space"]:
            found += _SPACE
        elif match["group"] is not None:
            found += _GROUP
        else:
            found += match["escaped"] or match["plain"]
        position = match.end()
    return found.split(_GROUP)
