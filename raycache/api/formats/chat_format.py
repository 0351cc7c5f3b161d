"""How one family of chat models writes its answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raycache.api.formats import harmony
from raycache.api.formats.calls import Calls, CallSyntax, IdStyle
from raycache.api.formats.harmony import HarmonyParser
from raycache.api.formats.parser import OutputParser, ReasoningMarks
from raycache.api.formats.parts import PartsParser

# Special tokens inside of longer marks, such as <|open|> in "<|open|>think<|sep|>".
_TOKEN = re.compile(r"<\|[^|<>\s]*\|>|<｜[^｜<>\s]*｜>|<[^<>\s]+>|\[[A-Z_]+\]|｜[^｜]+｜")


@dataclass(frozen=True)
class ChatFormat:
    """How one family of chat models writes its answers.

    Attributes:
        name: for people, such as "hermes".
        reasoning: its marks, or None for a model that does not reason.
        calls: syntax of tool calls, or None for a model without.
        ids: form of the ids of calls.
        frames: texts around the content that are not part of it.
        has_channels: an output is a sequence of messages with channels, as gpt-oss writes them.
    """

    name: str
    reasoning: ReasoningMarks | None = None
    calls: CallSyntax | None = None
    ids: IdStyle = IdStyle.OPENAI
    frames: tuple[str, ...] = ()
    has_channels: bool = False

    @property
    def marks(self) -> frozenset[str]:
        """Texts that a parser must see. Where one is a special token of the tokenizer, it must not be hidden."""
        texts = [*self.frames, *(harmony.TEXTS if self.has_channels else ()), *(self.calls.texts if self.calls else ())]
        if self.reasoning:
            texts += [self.reasoning.open, self.reasoning.close]
        return frozenset(each for text in texts for each in (text, text.strip(), *_TOKEN.findall(text)) if each)

    def is_reasoning_open(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside of the reasoning: the template has opened it.

        Args:
            prompt: the rendered text, or the end of it.
        """
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.open.rstrip())

    def parser(
        self, *, prompt_tail: str, tools: Mapping[str, Mapping[str, Any]], num_earlier_calls: int = 0
    ) -> PartsParser:
        """A parser for one output.

        Args:
            prompt_tail: end of the rendered prompt; it says whether the output begins inside of the reasoning.
            tools: that may be called: name -> JSON schema of the arguments. Without any, calls are not looked for.
            num_earlier_calls: in the conversation, for formats that count them.
        """
        calls = Calls(self.ids, tools, num_earlier_calls)
        if self.has_channels:
            return HarmonyParser(calls, finds_calls=bool(tools))
        return OutputParser(
            reasoning=self.reasoning,
            syntax=self.calls if tools else None,
            calls=calls,
            frames=self.frames,
            is_reasoning=self.is_reasoning_open(prompt_tail),
        )
