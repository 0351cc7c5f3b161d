"""Splits the text of one output into reasoning, content and tool calls while it comes."""

from __future__ import annotations

from dataclasses import dataclass

from raycache.api.formats.calls import Calls, CallSyntax
from raycache.api.formats.parts import Content, Part, Reasoning, merged
from raycache.api.formats.trim import Trim
from raycache.api.formats.unread import Marks, Reading, Unread


@dataclass(frozen=True)
class ReasoningMarks:
    """Texts around the reasoning.

    Attributes:
        open, close: as the model writes them.
        is_ended_by_calls: the mark of a call ends the reasoning too; it cannot be a part of it.
    """

    open: str
    close: str
    is_ended_by_calls: bool = False


class StreamParser:
    """Runs the reader of an output as text comes.

    Attributes:
        is_reasoning: the text so far ends inside the reasoning.
    """

    def __init__(self) -> None:
        self.is_reasoning = False
        self._unread = Unread()
        self._trim = Trim()
        self._reading = self._read()

    def feed(self, text: str) -> list[Part]:
        """The parts that a piece of text completes; a possible beginning of a mark is held back."""
        self._unread.add(text)
        return merged(self._parts())

    def finish(self) -> list[Part]:
        """The parts of what was held back. A call that is not complete is content."""
        self._unread.end()
        return merged([*self._parts(), *self._trim.finish()])

    def _parts(self) -> list[Part]:
        found: list[Part] = []
        for part in self._reading:
            if part is None:
                break
            found.extend(self._trim.push(part))
        return found

    def _read(self) -> Reading[None]:
        raise NotImplementedError


class OutputParser(StreamParser):
    """Parser of an output with marks around reasoning and calls.

    Args:
        reasoning: its marks, or None.
        syntax: of calls, or None if they are not looked for.
        calls: numbers them.
        frames: texts around the content that are not part of it.
        is_reasoning: the output begins inside of the reasoning.
    """

    def __init__(
        self,
        *,
        reasoning: ReasoningMarks | None,
        syntax: CallSyntax | None,
        calls: Calls,
        frames: tuple[str, ...],
        is_reasoning: bool,
    ) -> None:
        super().__init__()
        self._syntax, self._calls, self._frames, self._reasoning = syntax, calls, frames, reasoning
        self.is_reasoning = is_reasoning
        self._has_text = False  # content since the start, the reasoning or the last call

    def _read(self) -> Reading[None]:
        if self.is_reasoning:
            yield from self._read_reasoning()
        if self._syntax is not None and self._syntax.starts:
            yield from self._read_unmarked(self._syntax)
        opens = self._syntax.opens if self._syntax else ()
        closes = self._syntax.closes if self._syntax else ()
        reasoning = (self._reasoning.open, self._reasoning.close) if self._reasoning else ()
        marks = Marks([*opens, *closes, *self._frames, *reasoning])
        while mark := (yield from self._unread.copy(marks, self._content)):
            if self._syntax and mark in opens:
                self._unread.keep(mark)
                count = self._calls.count
                yield from self._syntax.read(mark, self._unread, self._calls)
                self._has_text = self._has_text and self._calls.count == count
            elif self._has_text and (mark in reasoning or (mark in closes and not self._calls.count)):
                yield Content(mark)
            elif reasoning and mark == reasoning[0]:
                yield from self._read_reasoning()

    def _content(self, text: str) -> Part:
        self._has_text = self._has_text or not text.isspace()
        return Content(text)

    def _read_reasoning(self) -> Reading[None]:
        assert self._reasoning is not None, "only a format with marks opens the reasoning"
        self.is_reasoning = True
        yield Reasoning("")
        ends = [self._reasoning.close]
        if self._syntax and self._reasoning.is_ended_by_calls:
            ends += self._syntax.opens
        mark = yield from self._unread.copy(Marks(ends), Reasoning, takes_mark=False)
        self.is_reasoning = not mark
        yield from self._unread.literal(self._reasoning.close)

    def _read_unmarked(self, syntax: CallSyntax) -> Reading[None]:
        self._unread.keep("")
        yield from self._unread.space()
        first = yield from self._unread.next()
        if first and first in syntax.starts:
            yield from syntax.read("", self._unread, self._calls)
        else:
            yield self._content(self._unread.kept())
