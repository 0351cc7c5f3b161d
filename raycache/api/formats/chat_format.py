"""How one family of chat models writes its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raycache.api.formats import harmony
from raycache.api.formats.calls import Calls, CallSyntax, IdStyle
from raycache.api.formats.grammar import TOKEN, GrammarText, Tools, Words, many
from raycache.api.formats.harmony import HarmonyParser
from raycache.api.formats.parser import OutputParser, ReasoningMarks
from raycache.api.formats.parts import PartsParser


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
        return frozenset(each for text in texts for each in (text, text.strip(), *TOKEN.findall(text)) if each)

    def __str__(self) -> str:
        if self.has_channels:
            return f"{self.name}: reasoning and calls in channels"
        marks = f"reasoning between {self.reasoning.open.strip()} and {self.reasoning.close}" if self.reasoning else ""
        if self.calls is None:
            return f"{self.name}: {marks or 'neither reasoning nor tool calls'}"
        opens = self.calls.opens[0] if self.calls.opens and not self.calls.starts else "the start of an answer"
        return f"{self.name}: {marks or 'no reasoning'}, tool calls from {opens} on"

    @property
    def has_calls(self) -> bool:
        """Whether it is known how calls are written."""
        return self.calls is not None or self.has_channels

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

    def grammar(
        self, tools: Tools, *, words: Words, prompt_tail: str, is_required: bool, is_parallel: bool = True
    ) -> str:
        """A grammar for outputs whose calls are valid: reasoning as the model likes, then text and calls.

        Args:
            tools: that may be called.
            words: of the model's vocabulary.
            prompt_tail: end of the rendered prompt; it says whether the output begins inside of the reasoning.
            is_required: calls and nothing else.
            is_parallel: there may be several calls.
        Raises:
            RequestError: a schema cannot be enforced.
        """
        write = GrammarText(tools, words)
        if self.has_channels:
            return harmony.grammar(write, is_required=is_required)
        assert self.calls is not None, "the format has calls"
        mark, call = self.calls.lark(write, is_parallel=is_parallel)
        call = write.rule(call)
        written = write.mark(mark) if mark else ""
        before, behind = self._around(write, prompt_tail)
        if is_required:
            one = f"{written} {call}"
            answer = many(one, "SPACE", is_parallel=is_parallel and bool(mark))
            answer = f"SPACE {answer}"
        elif not mark:
            answer = f'{call} | /[^{{\\[\\s](?s:.*)/ | ""'
        elif is_parallel:
            answer = f"({write.until(mark)} {call})* TEXT"
        else:
            answer = f"({write.until(mark)} {call} SPACE) | TEXT"
        write.rule(f"{before} ({answer}) {behind}", name="start")
        return str(write)

    def _around(self, write: GrammarText, prompt_tail: str) -> tuple[str, str]:
        """What stands before the answer and behind it: reasoning and frames."""
        behind = f"({write.mark(self.frames[-1])})?" if self.frames else ""
        before = ""
        if self.reasoning and self.is_reasoning_open(prompt_tail):
            before = write.until(self.reasoning.close)
        elif self.reasoning and not self.frames:
            thinks = f"{write.mark(self.reasoning.open)} {write.until(self.reasoning.close)}"
            before = f"(SPACE {thinks})?"
        if self.frames:
            open_frame, close_frame = self.frames[0], self.frames[1]
            content = f"{write.until(close_frame)}"
            is_open = prompt_tail.endswith(open_frame)
            before += f" {content}" if is_open else f" ({write.mark(open_frame)} {content})?"
        return before, behind
