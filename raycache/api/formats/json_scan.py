"""Where a JSON value ends, in a text that comes in pieces."""

from __future__ import annotations

import re

_STRUCTURE = re.compile(r'["{}\[\]]|[^\s,:\w.+-]')  # outside of strings: what changes the state, or cannot stand there
_IN_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[^\w.+-]")


class JsonScan:
    """Follows strings and brackets; whether the value is well-formed otherwise is not checked.

    Attributes:
        is_complete: the value has ended.
        is_broken: what came next is no part of a JSON value.
    """

    def __init__(self) -> None:
        self.is_complete = self.is_broken = False
        self._depth = 0
        self._in_string = self._is_escaped = self._is_scalar = False

    @property
    def is_complete_at_end(self) -> bool:
        """Whether the value is complete if the text ends here. A number has no mark of its own."""
        return self.is_complete or (self._is_scalar and not self.is_broken)

    def feed(self, text: str, position: int, end: int) -> int:
        """Read text[position:end]; returns where in it the value ends, or `end`."""
        while position < end and not (self.is_complete or self.is_broken):
            if self._in_string:
                position = self._string(text, position, end)
            elif self._depth:
                position = self._inside(text, position, end)
            else:
                position = self._outside(text, position, end)
        return position

    def _string(self, text: str, position: int, end: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return position + 1
        found = _IN_STRING.search(text, position, end)
        if found is None:
            return end
        if found.group() == "\\":
            self._is_escaped = True
        else:
            self._in_string = False
            self.is_complete = self._depth == 0
        return found.end()

    def _inside(self, text: str, position: int, end: int) -> int:
        found = _STRUCTURE.search(text, position, end)
        if found is None:
            return end
        match found.group():
            case '"':
                self._in_string = True
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
                self.is_complete = self._depth == 0
            case _:
                self.is_broken = True
                return found.start()
        return found.end()

    def _outside(self, text: str, position: int, end: int) -> int:
        if self._is_scalar:
            found = _SCALAR_END.search(text, position, end)
            self.is_complete = found is not None
            return end if found is None else found.start()
        match text[position]:
            case '"':
                self._in_string = True
            case "{" | "[":
                self._depth = 1
            case character if character.isalnum() or character == "-":
                self._is_scalar = True
            case _:
                self.is_broken = True
                return position
        return position + 1
