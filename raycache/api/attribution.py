"""The line with which Claude Code says who asks.

    x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;

It is the first thing in the system prompt and changes with each request, so nothing behind it could be reused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_PREFIX = "x-anthropic-billing-header:"


def without_attribution(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave that line out of the system messages, and what is then empty."""
    return [kept for message in messages if (kept := _without(message)) is not None]


def _without(message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if message.get("role") not in ("system", "developer"):
        return message
    match message.get("content"):
        case str(text) if text.startswith(_PREFIX):
            rest = _rest(text)
            return {**message, "content": rest} if rest else None
        case list(parts) if any(_has_line(part) for part in parts):
            kept = [part for part in map(_without_line, parts) if part is not None]
            return {**message, "content": kept} if kept else None
    return message


def _has_line(part: object) -> bool:
    return isinstance(part, dict) and isinstance(text := part.get("text"), str) and text.startswith(_PREFIX)


def _without_line(part: Any) -> Any:
    if not _has_line(part):
        return part
    rest = _rest(part["text"])
    return {**part, "text": rest} if rest else None


def _rest(text: str) -> str:
    return text.partition("\n")[2]
