"""The parts of an answer; they belong to the formats that they are read from."""

from __future__ import annotations

from raycache.api.formats.parts import (
    Content,
    ContentOnly,
    Message,
    Part,
    PartsParser,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    merged,
)

__all__ = [
    "Content",
    "ContentOnly",
    "Message",
    "Part",
    "PartsParser",
    "Reasoning",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallStart",
    "merged",
]
