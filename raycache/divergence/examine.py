"""Looks at the place where a prompt left a known one: its text, where it comes from, and the cause."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from raycache.divergence.cause import Cause, Sides, Verdict, classify, order_kind
from raycache.divergence.compare import LEAST_SHARED, Rejoin, rejoin
from raycache.divergence.place import Asked, Place, place_of, tools_end
from raycache.divergence.seen import Match, Tokens
from raycache.divergence.text import TokenText

_LINE_TOKENS = 256
"""Looked at on each side for the line that differs."""
_SEGMENT_TOKENS = 4096
"""Most tokens of a differing part that are read."""
_BEFORE_CHARS, _SHOWN_CHARS = 80, 160
_HEAD_CHARS = 400
LEAST_SHARE = 16
"""Unless the client asks, losses of less than this part of a prompt are not looked for."""
_TAIL_WORD = re.compile(r'"?\w*$')


@dataclass(frozen=True, slots=True)
class Examined:
    """Result of a look.

    Attributes:
        place: None: not looked for.
        shared: tokens behind the place that would have been reused without the cause.
        before, this, other: text before the place, and behind it on both sides.
    """

    verdict: Verdict
    place: Place | None
    shared: int
    before: str = ""
    this: str = ""
    other: str = ""

    def without_texts(self) -> Examined:
        """The same without what prompts say."""
        return replace(self, before="", this="", other="")


class Examiner:
    """Examines divergences.

    Args:
        text: of the model's tokens.
    """

    def __init__(self, text: TokenText) -> None:
        self._text = text

    def examine(
        self, prompt: Tokens, match: Match, rest: Sequence[Tokens], asked: Asked, *, is_wanted: bool
    ) -> Examined:
        """Look at a prompt that leaves a known one.

        Args:
            rest: how the known one goes on, in pieces.
            is_wanted: read the texts, even if both share nothing behind the place where they part.
        """
        at = match.length
        other = rest[0] if len(rest) == 1 else np.concatenate(rest)
        this = prompt[at:]
        if not is_wanted and rejoin(this, other, least=max(LEAST_SHARED, len(prompt) // LEAST_SHARE)) is None:
            return Examined(Verdict(Cause.NEW), None, 0)
        found = rejoin(this, other)
        tail, other_tail = self._text.decode(this[:_LINE_TOKENS]), self._text.decode(other[:_LINE_TOKENS])
        whole, offset = self._whole(prompt, at, asked, tail)
        # Texts that differ in tokens may go on alike for some characters.
        place = place_of(offset + _num_alike(tail, other_tail), whole, asked)
        if lines := self._lines_before(prompt, at, asked):
            place = replace(place, line=place.line + lines)
        head = whole[max(0, offset - _HEAD_CHARS) : offset]
        ordered = self._order(this, other, whole=whole, offset=offset, asked=asked, place=place)
        if ordered is not None:
            verdict, shared = ordered
        else:
            sides = self._sides(head, this, other, found, asked=asked)
            verdict = classify(replace(sides, is_resent=_is_resent(match, asked, place)), place)
            shared = found.length if found else 0
        before, shown, other_shown = head[-_BEFORE_CHARS:], tail[:_SHOWN_CHARS], other_tail[:_SHOWN_CHARS]
        return Examined(verdict, place, shared, before, shown, other_shown)

    def _whole(self, prompt: Tokens, at: int, asked: Asked, tail: str) -> tuple[str, int]:
        """The text of the prompt, and the character at which the token `at` begins."""
        if asked.text:
            # Counted from the end: tokens that a tokenizer puts before a text are not in it.
            offset = len(asked.text) - self._text.num_chars(prompt[at:])
            if offset >= 0 and asked.text.startswith(tail[:_BEFORE_CHARS].rstrip("\ufffd"), offset):
                return asked.text, offset
        begin, end = self._read(prompt, at, asked)
        head = self._text.decode(prompt[begin:at])
        return head + self._text.decode(prompt[at:end]), len(head)

    def _read(self, prompt: Tokens, at: int, asked: Asked) -> tuple[int, int]:
        """The tokens that are decoded: of a plain prompt, those around the place."""
        return (0, len(prompt)) if asked.messages else (max(0, at - _HEAD_CHARS), at + _SEGMENT_TOKENS)

    def _lines_before(self, prompt: Tokens, at: int, asked: Asked) -> int:
        """Lines that end before what is decoded of a plain prompt."""
        return 0 if asked.messages or asked.text else self._text.num_lines(prompt[: self._read(prompt, at, asked)[0]])

    def _sides(self, head: str, this: Tokens, other: Tokens, found: Rejoin | None, *, asked: Asked) -> Sides:
        here, there = (found.here, found.there) if found else (_LINE_TOKENS, _LINE_TOKENS)
        line_head = head[head.rfind("\n") + 1 :]
        segment = other[: min(there, _SEGMENT_TOKENS)]
        return Sides(
            line=self._line(line_head, this, here),
            other_line=self._line(line_head, other, there),
            this=self._text.decode(this[: min(here, _SEGMENT_TOKENS)]),
            other=self._text.decode(segment),
            shared=found.length if found else 0,
            other_marks=self._text.num_special(segment),
            sends_reasoning=any(one.get("reasoning_content") or one.get("reasoning") for one in asked.messages),
        )

    def _line(self, head: str, tokens: Tokens, segment: int) -> str:
        """The line that differs, whole if the difference lies in it."""
        return head + self._text.decode(tokens[: min(segment + LEAST_SHARED, _LINE_TOKENS)]).partition("\n")[0]

    def _order(
        self, this: Tokens, other: Tokens, *, whole: str, offset: int, asked: Asked, place: Place
    ) -> tuple[Verdict, int] | None:
        """The verdict if tools or keys are the same in another order, and the tokens that stay reusable then."""
        tail = whole[offset:]
        size = len(tail.partition("\n")[0])
        if place.tool:
            size = max(size, tools_end(whole, asked.tools) - offset)
        num_here = self._text.num_tokens(this, size)
        num_there = self._text.num_tokens(other, size)
        other_text = self._text.decode(other[: num_there + 1])[:size]
        word = _TAIL_WORD.search(whole[max(0, offset - _BEFORE_CHARS) : offset])
        begun = word[0] if word else ""  # the prompts may part inside of a word
        names = asked.tool_names if place.tool else ()
        kind = order_kind(begun + tail[:size], begun + other_text, tools=names)
        if not kind:
            return None
        behind = rejoin(this[num_here:], other[max(0, num_there - LEAST_SHARED) :])
        return Verdict(Cause.ORDER, kind), num_here + (behind.length if behind else 0)


def _is_resent(match: Match, asked: Asked, place: Place) -> bool:
    """Whether a message has the length that it had before; its text is not kept."""
    if match.source is None or match.source.sizes is None or place.message is None or not place.line:
        return False
    size = match.source.sizes.get(place.message)
    return size is not None and size == asked.size(place.message)


def _num_alike(one: str, other: str) -> int:
    """Characters at the beginning that two texts share."""
    length = min(len(one), len(other))
    return next((index for index in range(length) if one[index] != other[index]), length)
