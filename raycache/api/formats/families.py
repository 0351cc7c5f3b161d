"""The families of chat models whose calls and reasoning are known.

Facts about texts only; they come from the families' chat templates and are checked by tests/unit/test_chat_formats.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raycache.api.formats.chat_format import ChatFormat
from raycache.api.formats.json_calls import JsonCalls
from raycache.api.formats.parser import ReasoningMarks

REASONING = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
)
"""What templates and vocabularies are searched for, where a family's marks are not part of its format."""


@dataclass(frozen=True)
class Family:
    """One way to write calls, and how a template of it is recognised.

    Attributes:
        format: its reasoning marks are added when a template is recognised, unless they are given.
        needs: texts that are all in the template, or in the vocabulary.
    """

    format: ChatFormat
    needs: tuple[str, ...]

    def fits(self, has: Callable[[str], bool]) -> bool:
        """Whether all that it needs is there."""
        return all(map(has, self.needs))


# In this order: the first that fits is taken, so special marks come before those that several families share.
FAMILIES = (
    Family(ChatFormat("hermes", calls=JsonCalls("<tool_call>", "</tool_call>")), ("<tool_call>", "</tool_call>")),
)
