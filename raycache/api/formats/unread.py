"""Text that has come from a model and has not been read yet.

Readers of a format are generators, so that they can be written from top to bottom although the text comes in pieces: a
reader yields the parts that it has found, and None where it needs more text. What it finds does not depend on how the
text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from raycache.api.formats.json_scan import JsonScan
from raycache.api.formats.parts import Part

T = TypeVar("T")
Reading = Generator[Part | None, None, T]

_NO_SPACE = re.compile(r"\S")


class Marks:
    """Texts to search for. Of those that begin at one place the longest is found."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted({text for text in texts if text}, key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._longest = max(map(len, self.texts), default=0)
        self._first = frozenset(text[0] for text in self.texts)

    def find(self, text: str, start: int, end: int, *, is_whole: bool) -> tuple[int, str | None]:
        """Where the first mark begins in text[start:end], and which it is.

        Without one: None, and where a mark may begin that the next piece completes, or the end.

        Args:
            is_whole: no text follows.
        """
        if not self.texts:
            return end, None
        found = self._pattern.search(text, start, end)
        begun = end if is_whole else self._begun(text, start, end)
        # A mark that is still incomplete may contain the one that was found.
        return (begun, None) if found is None or found.start() >= begun else (found.start(), found.group())

    def _begun(self, text: str, start: int, end: int) -> int:
        for position in range(max(start, end - self._longest + 1), end):
            if text[position] in self._first:
                tail = text[position:end]
                if any(mark.startswith(tail) and mark != tail for mark in self.texts):
                    return position
        return end


NO_MARKS = Marks(())


class Unread:
    """Text that is read from the front. Every character is looked at a bounded number of times."""

    def __init__(self) -> None:
        self._text = ""
        self._start = 0  # of what is unread
        self._is_whole = False
        self._kept: list[str] | None = None

    def add(self, text: str) -> None:
        """More text has come."""
        self._text, self._start = self._text[self._start :] + text, 0

    def end(self) -> None:
        """No more text comes."""
        self._is_whole = True

    def keep(self, text: str) -> None:
        """Keep what is read from here on. `text` has been read and belongs to it."""
        self._kept = [text]

    def kept(self) -> str:
        """What was read since `keep`; from here on nothing is kept."""
        kept, self._kept = "".join(self._kept or ()), None
        return kept

    def _take(self, end: int) -> str:
        taken, self._start = self._text[self._start : end], end
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def _find(self, marks: Marks, *, limit: int | None = None) -> tuple[int, str | None]:
        end, is_whole = len(self._text), self._is_whole
        if limit is not None and self._start + limit < end:
            end, is_whole = self._start + limit, True
        return marks.find(self._text, self._start, end, is_whole=is_whole)

    def copy(self, marks: Marks, make: Callable[[str], Part | None], *, takes_mark: bool = True) -> Reading[str]:
        """Read the text up to a mark, in pieces.

        Args:
            make: part of a piece; None collects it elsewhere.
            takes_mark: the mark is read too.
        Returns:
            The mark, or "" at the end of the text.
        """
        while True:
            end, mark = self._find(marks)
            if end > self._start:
                part = make(self._take(end))
                if part is not None:
                    yield part
            if mark is not None:
                return self._take(end + len(mark)) if takes_mark else mark
            if self._is_whole:
                return ""
            yield None

    def collect(self, marks: Marks, *, limit: int, takes_mark: bool = True) -> Reading[tuple[str, str]]:
        """Read the text up to a mark.

        Args:
            limit: give up after about so many characters.
        Returns:
            The text, and the mark, or "" at the end of the text or beyond `limit`.
        """
        while True:
            end, mark = self._find(marks, limit=limit)
            if mark is not None:
                text = self._take(end)
                return text, self._take(end + len(mark)) if takes_mark else mark
            if self._is_whole or end - self._start >= limit:
                return self._take(end), ""
            yield None

    def space(self) -> Reading[None]:
        """Read white space, if any."""
        while True:
            found = _NO_SPACE.search(self._text, self._start)
            self._take(found.start() if found else len(self._text))
            if found or self._is_whole:
                return
            yield None

    def next(self) -> Reading[str]:
        """The next character, which stays unread; "" at the end of the text."""
        while self._start == len(self._text) and not self._is_whole:
            yield None
        return self._text[self._start : self._start + 1]

    def literal(self, *texts: str) -> Reading[str]:
        """Read one of the texts if it is next; "" if none is."""
        longest = max(map(len, texts))
        while True:
            head = self._text[self._start : self._start + longest]
            is_open = not self._is_whole and any(text.startswith(head) and text != head for text in texts)
            if not is_open:
                found = [text for text in texts if text and head.startswith(text)]
                return self._take(self._start + len(max(found, key=len))) if found else ""
            yield None

    def json(self, make: Callable[[str], Part | None], *, stops: Marks = NO_MARKS) -> Reading[bool]:
        """Read one JSON value.

        Args:
            make: part of a piece of the value; None collects it elsewhere.
            stops: marks that cannot be inside of a value; they stay unread.
        Returns:
            Whether the value is complete. Otherwise what is unread is no part of a JSON value, or the text has ended.
        """
        scan = JsonScan()
        while True:
            stop, mark = self._find(stops)
            end = scan.feed(self._text, self._start, stop)
            if end > self._start:
                part = make(self._take(end))
                if part is not None:
                    yield part
            if scan.is_complete or scan.is_broken:
                return scan.is_complete
            if mark is not None or self._is_whole:
                return scan.is_complete_at_end
            yield None
