"""Changes to a chat that keep its prompt like earlier ones, so that more of it is reused from the cache.

    Current time: 2026-11-23T10:15:02Z        date_lines = "Current time: .*"       Current time: 2026-11-23
    x-request-id: 8f14e45f                    drop_lines = "x-request-id: .*"
    tools b, a                                sort_tools                            tools a, b; keys in one order

Each is a setting. Lines are changed only in what system, developer and user say: other messages repeat what the model
has written or what tools have returned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, core_schema

from raycache.api.attribution import without_attribution
from raycache.api.schema import ChatBody
from raycache.config import Config
from raycache.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]
ChangeLine = Callable[[str], str | None]
"""The line that takes the place of one; None: none."""

_ROLES = ("system", "developer", "user")
_FIRST_KEYS = ("type", "function", "name", "description", "parameters", "properties", "required")
"""In the order in which models have mostly seen them; other keys follow in that of the alphabet."""
_DAY_S = 86_400
_MOST_LINE_CHARS = 4096
"""Longer lines are not looked at."""
_CLOCK = re.compile(
    r"(?:(?<=\d)T|[ ,]{0,3}\bat {1,3}|[ ,]{1,3}|\b)(?<![\d:.])"
    r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d{1,9})?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?(?:Z\b|\s?[+-]\d\d:?\d\d\b)?(?![\d:])"
)
_SECONDS = re.compile(r"(?<![\w.])(1[5-9]\d{8})(\d{3}|\d{6}|\d{9})?(?:\.\d{1,9})?(?![\w.])")
"""Since 1970, also in thousandths, millionths and billionths; from 2017 to 2033."""


class Repairs:
    """The repairs of a service.

    Args:
        drop_attribution, drop_lines, date_lines, sort_tools: the settings.
    Raises:
        ConfigError: an expression cannot be used.
    """

    def __init__(
        self, *, drop_attribution: bool = True, drop_lines: str = "", date_lines: str = "", sort_tools: bool = False
    ) -> None:
        self._of_messages: dict[str, Callable[[Messages], Messages]] = {}
        if drop_attribution:
            self._of_messages["drop_attribution"] = without_attribution
        if drop_lines:
            self._of_messages["drop_lines"] = _Lines(_matcher("drop_lines", drop_lines), _dropped).repaired
        if date_lines:
            self._of_messages["date_lines"] = _Lines(_matcher("date_lines", date_lines), without_clock).repaired
        self._sorts_tools = sort_tools

    @classmethod
    def of(cls, config: Config) -> Repairs:
        """Those of a service.

        Raises:
            ConfigError: an expression cannot be used.
        """
        return cls(
            drop_attribution=config.drop_attribution,
            drop_lines=config.drop_lines,
            date_lines=config.date_lines,
            sort_tools=config.sort_tools,
        )

    @property
    def description(self) -> str:
        """Their names."""
        return ", ".join([*self._of_messages, *(["sort_tools"] if self._sorts_tools else [])]) or "none"

    def applied(self, body: ChatBody) -> tuple[ChatBody, tuple[str, ...]]:
        """Repair a chat.

        Returns:
            The chat, and the settings that have changed something.
        """
        names: list[str] = []
        if not body.cache_repairs:
            return body, ()
        messages: Messages = body.messages
        for name, repair in self._of_messages.items():
            repaired = repair(messages)
            if len(repaired) != len(messages) or any(
                one is not other for one, other in zip(repaired, messages, strict=True)
            ):
                messages = repaired
                names.append(name)
        changed: dict[str, Any] = {"messages": messages} if names else {}
        if self._sorts_tools and (tools := sorted_tools(body.tools)) is not body.tools:
            changed["tools"] = tools
            names.append("sort_tools")
        return (body.model_copy(update=changed) if changed else body), tuple(names)


class _Lines:
    """Changes the lines that match.

    Args:
        matches: whether a line does.
        change: makes the other line.
    """

    def __init__(self, matches: Callable[[str], bool], change: ChangeLine) -> None:
        self._matches, self._change = matches, change

    def repaired(self, messages: Messages) -> Messages:
        """The messages, and those that are not changed as the same objects."""
        found = [self._message(message) for message in messages]
        return [message for message in found if message is not None]

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if message.get("role") not in _ROLES:
            return message
        content = message.get("content")
        repaired = self._parts(content) if isinstance(content, list) else self._text(content)
        if repaired is content:
            return message
        # A turn of the user stays even if nothing is left: templates expect turns to alternate.
        return {**message, "content": repaired or ""} if repaired or message["role"] == "user" else None

    def _parts(self, parts: list[Any]) -> list[Any]:
        found = [self._part(part) for part in parts]
        if all(one is other for one, other in zip(found, parts, strict=True)):
            return parts
        return [part for part in found if part is not None]

    def _part(self, part: Any) -> Any:
        text = part.get("text") if isinstance(part, Mapping) else None
        repaired = self._text(text)
        return part if repaired is text else {**part, "text": repaired} if repaired else None

    def _text(self, text: Any) -> Any:
        if not isinstance(text, str):
            return text
        lines = text.split("\n")
        is_chosen = (len(line) <= _MOST_LINE_CHARS and self._matches(line) for line in lines)
        changed = [self._change(line) if chosen else line for line, chosen in zip(lines, is_chosen, strict=True)]
        return text if changed == lines else "\n".join(line for line in changed if line is not None)


def sorted_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools by name, and the keys of each in one order; the same list if it is so already."""
    ordered = [_ordered(tool) for tool in tools]
    ordered.sort(key=_name)
    return tools if all(one is other for one, other in zip(ordered, tools, strict=True)) else ordered


def without_clock(line: str) -> str:
    """A line without times of day; seconds since 1970 become those of the beginning of their day, in UTC.

    A line that is nothing but a time stays, empty.
    """
    return _SECONDS.sub(_day, _CLOCK.sub("", line))


def _day(found: re.Match[str]) -> str:
    return str(int(found[1]) // _DAY_S * _DAY_S) + "0" * len(found[2] or "")


def _dropped(line: str) -> None:
    return None


def _name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function", tool)
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def _ordered(value: Any) -> Any:
    """JSON with the keys of all its objects in order; the same object if they are."""
    if isinstance(value, dict):
        keys = sorted(value, key=_rank)
        items = {key: _ordered(value[key]) for key in keys}
        is_same = keys == list(value) and all(items[key] is value[key] for key in keys)
        return value if is_same else items
    if isinstance(value, list):
        found = [_ordered(item) for item in value]
        return value if all(one is other for one, other in zip(found, value, strict=True)) else found
    return value


def _rank(key: str) -> tuple[int, str]:
    return (_FIRST_KEYS.index(key) if key in _FIRST_KEYS else len(_FIRST_KEYS), key)


def _matcher(setting: str, pattern: str) -> Callable[[str], bool]:
    """Whether a line matches, blanks around it aside. Rust's regular expressions take time in proportion to the line.

    Raises:
        ConfigError: the expression is malformed, or matches the empty line.
    """
    try:
        SchemaValidator(core_schema.str_schema(pattern=pattern))
        matches = SchemaValidator(core_schema.str_schema(pattern=rf"\A[ \t]*(?:{pattern})[ \t\r]*\z")).isinstance_python
    except SchemaError as error:
        reason = " ".join(str(error).partition("SchemaError: ")[2].split())
        raise ConfigError(
            f"{setting}={pattern!r} is not a regular expression: {reason}; write one that matches whole lines, such as "
            "'Current time: .*'; look-around and back-references are not supported"
        ) from error
    if matches(""):
        raise ConfigError(f"{setting}={pattern!r} matches every empty line; write one that needs some text")
    return matches
