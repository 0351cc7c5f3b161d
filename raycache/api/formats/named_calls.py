"""Calls as the name of the tool and then its arguments as JSON, between marks: <call>now<args>{}</call>."""

from __future__ import annotations

import re
from dataclasses import dataclass

from raycache.api.formats.calls import LONGEST_HEAD, Calls, broken
from raycache.api.formats.grammar import GrammarText, literal, many
from raycache.api.formats.parts import Content
from raycache.api.formats.unread import Marks, Reading, Unread

_NUMBERED = re.compile(r"(?:functions\.)?(?P<name>[^\s:]+)(?::\d+)?")
_ID = re.compile(r"[\w.:-]*")


@dataclass(frozen=True)
class NamedCalls:
    """Name and arguments between marks.

    Attributes:
        open: text before the name.
        middle: text between name and arguments.
        close: text behind the arguments, or "".
        section: texts around all calls, or two empty ones.
        id_mark: text between the name and an id before `middle`, where models write one, or "".
        is_numbered: the name is written as functions.NAME:NUMBER, which is the id.
        line: white space, as templates write it, behind the name and around the arguments.
    """

    open: str
    middle: str
    close: str = ""
    section: tuple[str, str] = ("", "")
    id_mark: str = ""
    is_numbered: bool = False
    line: str = ""

    @property
    def opens(self) -> tuple[str, ...]:
        """Texts with which calls begin."""
        return tuple(filter(None, (self.section[0], self.open)))

    @property
    def closes(self) -> tuple[str, ...]:
        """Texts that end calls."""
        return tuple(filter(None, (self.section[1], self.close)))

    @property
    def texts(self) -> tuple[str, ...]:
        """All marks."""
        return tuple(filter(None, (*self.opens, *self.closes, self.middle, self.id_mark)))

    @property
    def starts(self) -> str:
        """No output begins with a call without a mark."""
        return ""

    def read(self, mark: str, unread: Unread, calls: Calls) -> Reading[None]:
        """Read the calls behind an opening mark."""
        if mark != self.open:
            yield from unread.space()
            mark = yield from unread.literal(self.open)
        while mark:
            if not (yield from self._call(unread, calls)):
                return
            unread.keep("")
            yield from unread.space()
            mark = yield from unread.literal(self.open)
        if self.section[1] and (yield from unread.literal(self.section[1])):
            unread.kept()
        yield broken(unread)

    def lark(self, write: GrammarText, *, is_parallel: bool) -> tuple[str, str]:
        """The opening mark, and an expression for calls behind it."""
        calls = []
        number = write.rule("/[0-9]{1,6}/") if self.is_numbered else ""
        call_id = f"({write.mark(self.id_mark)} /[a-zA-Z0-9]{{9}}/)?" if self.id_mark else ""
        middle, close = (write.mark(text) if text else "" for text in (self.middle, self.close))
        line = literal(self.line)
        for name, schema in write.tools.items():
            head = literal(f"functions.{name}:") if self.is_numbered else literal(name)
            parts = (head, number, call_id, line, middle, line, write.json(schema), line, close)
            calls.append(" ".join(filter(None, parts)))
        call = write.one_of(calls)
        again = f"SPACE {write.mark(self.open)}"
        if not self.section[0]:
            return self.open, call
        several = many(call, again, is_parallel=is_parallel)
        return self.section[0], f"{again} {several} SPACE {write.mark(self.section[1])}"

    def _call(self, unread: Unread, calls: Calls) -> Reading[bool]:
        head, found = yield from unread.collect(Marks([self.middle, *self.opens, *self.closes]), limit=LONGEST_HEAD)
        name, call_id = self._name(head)
        if found != self.middle or not name:
            yield broken(unread)
            return False
        unread.kept()
        yield calls.start(name, call_id)
        yield from unread.space()
        stops = Marks([*self.opens, *self.closes])
        has_arguments = (yield from unread.next()) == "{"
        is_whole = has_arguments and (yield from unread.json(calls.arguments, stops=stops))
        if not is_whole:
            found_text: list[str] = []
            yield from unread.copy(stops, found_text.append, takes_mark=False)
            text = "".join(found_text) or ("" if has_arguments else "{}")
            if text:
                yield calls.arguments(text)
        unread.keep("")
        yield from unread.space()
        if self.close and (yield from unread.literal(self.close)):
            unread.kept()
        yield Content(unread.kept())
        return True

    def _name(self, head: str) -> tuple[str, str]:
        name, _, call_id = head.partition(self.id_mark) if self.id_mark else (head, "", "")
        name, call_id = name.strip(), call_id.strip()
        if self.is_numbered:
            found = _NUMBERED.fullmatch(name)
            return (found["name"], name) if found else ("", "")
        return ("", "") if any(map(str.isspace, name)) or not _ID.fullmatch(call_id) else (name, call_id)
