"""What a chat model says, split into reasoning, content and tool calls.

The pieces of one output, in order. Joined, the arguments of a call are the text of one JSON object.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins.

    Attributes:
        index: number of the call in this output, from 0.
        call_id: what its result refers to.
        name: of the tool.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments, as JSON text."""

    index: int
    text: str


Part = Reasoning | Content | ToolCallStart | ToolCallArguments


class PartsParser(Protocol):
    """Splits the text of one output while it is generated."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        ...

    def feed(self, text: str) -> list[Part]:
        """The parts that a piece of text completes; a possible beginning of a mark is held back."""
        ...

    def finish(self) -> list[Part]:
        """The parts of what was held back. A call that is not complete is content."""
        ...


class ContentOnly:
    """The parser of a model without reasoning and tools."""

    is_reasoning = False

    def feed(self, text: str) -> list[Part]:
        """The text, unchanged."""
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        """Nothing: no text is held back."""
        return []


@dataclass
class ToolCall:
    """One whole tool call; the arguments are JSON text."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """One whole output."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Message:
        """The parts, joined."""
        reasoning, content, calls = [], [], []
        arguments: list[list[str]] = []
        for part in parts:
            match part:
                case Reasoning(text):
                    reasoning.append(text)
                case Content(text):
                    content.append(text)
                case ToolCallStart(_, call_id, name):
                    calls.append((call_id, name))
                    arguments.append([])
                case ToolCallArguments(index, text):
                    arguments[index].append(text)
        whole = [ToolCall(*call, "".join(pieces)) for call, pieces in zip(calls, arguments, strict=True)]
        return cls("".join(reasoning), "".join(content), whole)


def merged(parts: Iterable[Part]) -> list[Part]:
    """The parts, with neighbours of one kind joined."""
    return [_joined(list(some)) for _, some in groupby(parts, key=_kind)]


def _kind(part: Part) -> tuple[type, object]:
    """Equal for neighbours that are joined."""
    match part:
        case ToolCallStart():
            return ToolCallStart, part.call_id
        case ToolCallArguments(index):
            return ToolCallArguments, index
    return type(part), None


def _joined(parts: Sequence[Part]) -> Part:
    match first := parts[0]:
        case ToolCallStart():
            return first
    return replace(first, text="".join(part.text for part in parts if not isinstance(part, ToolCallStart)))
