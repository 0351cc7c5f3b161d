"""Calls as JSON objects with the name among the keys: {"name": "now", "arguments": {}}."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from raycache.api.formats.arguments import well_formed
from raycache.api.formats.calls import Calls, broken
from raycache.api.formats.grammar import GrammarText, literal, many
from raycache.api.formats.parts import Content
from raycache.api.formats.unread import Reading, Unread

_ARGUMENTS = ("arguments", "parameters")
_ID = re.compile(r"[\w.:-]{0,64}")


@dataclass(frozen=True)
class JsonCalls:
    """Objects between marks, alone, in a list or one after the other.

    Attributes:
        open: text before the objects; "" if an output that begins with an object is calls.
        close: text behind them, or "".
        arguments: key of the arguments, where calls are written.
        is_list: the objects are in a JSON list, where calls are written.
        also_opens: other texts before the objects.
        separator: between objects where calls are written; "" if there is one behind each mark.
    """

    open: str
    close: str = ""
    arguments: str = "arguments"
    is_list: bool = False
    also_opens: tuple[str, ...] = ()
    separator: str = ""

    @property
    def opens(self) -> tuple[str, ...]:
        """Texts with which calls begin."""
        return tuple(filter(None, (self.open, *self.also_opens)))

    @property
    def closes(self) -> tuple[str, ...]:
        """The text that ends them."""
        return (self.close,) if self.close else ()

    @property
    def texts(self) -> tuple[str, ...]:
        """All marks."""
        return (*self.opens, *self.closes)

    def read(self, mark: str, unread: Unread, calls: Calls) -> Reading[None]:
        """Read the calls behind an opening mark."""
        yield from unread.space()
        yield from unread.literal("[")
        yield from unread.space()
        if (yield from unread.next()) != "{":
            yield broken(unread)
            return
        while (yield from unread.next()) == "{":
            is_whole = yield from _Object(unread, calls, is_marked=bool(self.open)).read()
            unread.keep("")
            if not is_whole:
                break
            yield from unread.space()
            if (yield from unread.literal(",", ";")):
                yield from unread.space()
        # Models write a bracket too many, too.
        while (yield from unread.literal("]", "}")):
            pass
        yield from unread.space()
        is_closed = bool(self.close) and bool((yield from unread.literal(self.close)))
        rest = unread.kept()
        if not is_closed:
            yield Content(rest.lstrip("]"))

    def lark(self, write: GrammarText, *, is_parallel: bool) -> tuple[str, str]:
        """The opening mark, and an expression for objects behind it."""
        calls = []
        for name, schema in write.tools.items():
            head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.arguments}": '
            calls.append(f'{literal(head)} {write.json(schema)} "}}"')
        separator = ", " if self.is_list else self.separator
        written = many(write.one_of(calls), literal(separator), is_parallel=is_parallel and bool(separator))
        if self.is_list:
            written = f'"[" {written} "]"'
        return self.open, f"SPACE {written} SPACE {write.mark(self.close)}" if self.close else f"SPACE {written}"

    @property
    def starts(self) -> str:
        """The character with which an output of calls begins that has no mark."""
        return "" if self.open else "{"


class _Object:
    """One object while it is read."""

    def __init__(self, unread: Unread, calls: Calls, *, is_marked: bool) -> None:
        self._unread, self._calls, self._is_marked = unread, calls, is_marked
        self._name = self._call_id = ""
        self._early = ""  # arguments that come before the name
        self._is_started = self._has_arguments = False

    def read(self) -> Reading[bool]:
        """Read it; returns whether it is whole. What is no call is content."""
        is_whole = yield from self._members()
        if is_whole and not self._is_started and self._is_call():
            yield from self._start()
        if not self._is_started or not is_whole:
            yield broken(self._unread)
            return False
        if not self._has_arguments:
            yield self._calls.arguments(self._early or "{}")
        return True

    def _members(self) -> Reading[bool]:
        yield from self._unread.literal("{")
        while True:
            if self._is_started:
                self._unread.keep("")
            yield from self._unread.space()
            if (yield from self._unread.literal("}")):
                return True
            if (yield from self._unread.literal(",")):
                continue
            key = yield from self._string()
            yield from self._unread.space()
            if key is None or not (yield from self._unread.literal(":")):
                return False
            yield from self._unread.space()
            if not (yield from self._member(key)):
                return False

    def _member(self, key: str) -> Reading[bool]:
        if key in _ARGUMENTS and not self._has_arguments and not self._early:
            if self._is_call():
                yield from self._start()
            return (yield from self._read_arguments())
        if key not in ("name", "id", "type") or (key == "name" and self._name):
            return False
        text = yield from self._string()
        if key == "name":
            self._name = text or ""
        elif key == "id":
            self._call_id = text or ""
            return text is not None and _ID.fullmatch(text) is not None
        else:
            return text == "function"
        return text is not None

    def _is_call(self) -> bool:
        return bool(self._name) and (self._is_marked or self._name in self._calls.tools)

    def _start(self) -> Reading[None]:
        if not self._is_started:
            self._is_started = True
            self._unread.kept()
            yield self._calls.start(self._name, self._call_id)

    def _read_arguments(self) -> Reading[bool]:
        if self._is_started:
            self._has_arguments = True
            self._unread.kept()
            if (yield from self._unread.next()) == "{":
                return (yield from self._unread.json(self._calls.arguments))
        found: list[str] = []
        is_whole = yield from self._unread.json(found.append)
        text = "".join(found)
        self._early = _object_text(text) if is_whole else text
        if self._is_started and text:
            yield self._calls.arguments(self._early)
        return is_whole

    def _string(self) -> Reading[str | None]:
        found: list[str] = []
        if (yield from self._unread.next()) != '"' or not (yield from self._unread.json(found.append)):
            return None
        try:
            value = json.loads("".join(found), strict=False)
        except (ValueError, RecursionError):
            return None
        return well_formed(value) if isinstance(value, str) else None


def _object_text(text: str) -> str:
    """Arguments as JSON text of an object, where the model wrote null or the text of an object as a string."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text
    if value is None:
        return "{}"
    return well_formed(value) if isinstance(value, str) and value.lstrip().startswith("{") else text
