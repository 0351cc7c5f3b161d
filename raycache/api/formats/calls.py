"""Tool calls of one output: their numbers, ids and parts."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from raycache.api.formats.grammar import GrammarText
from raycache.api.formats.parts import Content, ToolCallArguments, ToolCallStart
from raycache.api.formats.unread import Reading, Unread

LONGEST_HEAD = 512
"""Characters between two marks that can be the name of a tool or of a parameter."""

_ALPHANUMERIC = string.ascii_letters + string.digits


class IdStyle(Enum):
    """The ids of calls that a family's templates accept."""

    OPENAI = "call_ and 24 letters and digits"
    MISTRAL = "9 letters and digits"
    KIMI = "functions.NAME:NUMBER, counted over the conversation"

    def made(self, name: str, number: int) -> str:
        """A new id.

        Args:
            name: of the tool.
            number: of the call in the conversation, from 0.
        """
        match self:
            case IdStyle.MISTRAL:
                return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
            case IdStyle.KIMI:
                return f"functions.{name}:{number}"
        return "call_" + "".join(secrets.choice(_ALPHANUMERIC) for _ in range(24))

    def accepts(self, call_id: str) -> bool:
        """Whether templates of the family take the id as it is."""
        match self:
            case IdStyle.MISTRAL:
                return re.fullmatch(r"[a-zA-Z0-9]{9}", call_id) is not None
            case IdStyle.KIMI:
                return re.fullmatch(r"functions\.[^:\s]+:\d+", call_id) is not None
        return True


@dataclass
class Calls:
    """The calls of one output.

    Attributes:
        ids: how they are made.
        tools: name -> JSON schema of its arguments.
        num_earlier: calls in the conversation before this output.
        count: those that have begun.
    """

    ids: IdStyle = IdStyle.OPENAI
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    num_earlier: int = 0
    count: int = 0

    def start(self, name: str, call_id: str = "") -> ToolCallStart:
        """The next call begins. An id that the model has written is kept if it is of the family's form."""
        index, self.count = self.count, self.count + 1
        if not call_id or self.ids is IdStyle.OPENAI or not self.ids.accepts(call_id):
            call_id = self.ids.made(name, self.num_earlier + index)
        return ToolCallStart(index, call_id, name)

    def arguments(self, text: str) -> ToolCallArguments:
        """A piece of the arguments of the call that began last."""
        return ToolCallArguments(self.count - 1, text)


class CallSyntax(Protocol):
    """How a family writes tool calls."""

    @property
    def opens(self) -> tuple[str, ...]:
        """Texts with which calls begin."""
        ...

    @property
    def starts(self) -> str:
        """Characters with which an output of calls begins that has no mark; the name must be that of a tool."""
        ...

    @property
    def closes(self) -> tuple[str, ...]:
        """Texts that end calls, and mean nothing elsewhere."""
        ...

    @property
    def texts(self) -> tuple[str, ...]:
        """All marks."""
        ...

    def read(self, mark: str, unread: Unread, calls: Calls) -> Reading[None]:
        """Read the calls behind `mark`, one of `opens` or "", which is kept. What is no call is content again."""
        ...

    def lark(self, write: GrammarText, *, is_parallel: bool) -> tuple[str, str]:
        """The mark of one call, or of several, and an expression for what follows it.

        Args:
            write: takes the rules; its tools may be called.
            is_parallel: several calls may be made, where the syntax has several behind one mark.
        """
        ...


def broken(unread: Unread) -> Content:
    """What was read is no call."""
    return Content(unread.kept())
