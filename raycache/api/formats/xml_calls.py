"""Calls with a mark around every argument, whose values have no quotes: their types come from the tool's schema."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from raycache.api.formats.arguments import ArgumentsText, escaped, json_value, schema_types, types_of
from raycache.api.formats.calls import LONGEST_HEAD, Calls, broken
from raycache.api.formats.grammar import GrammarText, is_text, literal, many, properties, texts_of, without_texts
from raycache.api.formats.unread import Marks, Reading, Unread

_TYPES = ("array", "boolean", "null", "number", "object")
_QUOTED_HEAD = re.compile(r'(?P<name>[^"]*)("\s+\w+="\w*)?')


@dataclass(frozen=True)
class XmlCalls:
    """Texts around calls and arguments.

    Attributes:
        call: texts before the name, behind it, and behind the arguments. Without the second the name ends at a line
            end or at a mark.
        parameter: texts before an argument's name, behind it, and behind the value.
        section: texts around calls, or two empty ones.
        value: text before the value, if it is not `parameter[1]` itself.
        pad: white space around calls and their parts, as templates write it.
        value_pad: white space around values, as templates write it.
        quote: ends the name of a call and of an argument; attributes follow.
        types: attribute that says whether the value is a string: 'string' with true and false, or 'type' with a type.
    """

    call: tuple[str, str, str]
    parameter: tuple[str, str, str]
    section: tuple[str, str] = ("", "")
    value: str = ""
    pad: str = "\n"
    value_pad: str = ""
    quote: str = ""
    types: str = ""

    @property
    def opens(self) -> tuple[str, ...]:
        """Texts with which calls begin."""
        return tuple(filter(None, (self.section[0], self.call[0])))

    @property
    def closes(self) -> tuple[str, ...]:
        """Texts that end calls."""
        return tuple(filter(None, (self.section[1], self.call[2])))

    @property
    def texts(self) -> tuple[str, ...]:
        """All marks."""
        return tuple(filter(None, (*self.section, *self.call, *self.parameter, self.value)))

    @property
    def starts(self) -> str:
        """No output begins with a call without a mark."""
        return ""

    def read(self, mark: str, unread: Unread, calls: Calls) -> Reading[None]:
        """Read the calls behind an opening mark."""
        if mark != self.call[0]:
            yield from unread.space()
            mark = yield from unread.literal(self.call[0])
        while mark:
            name = yield from self._head(unread)
            if not name:
                yield broken(unread)
                return
            unread.kept()
            yield calls.start(name)
            if not (yield from _Arguments(self, unread, calls, name).read()):
                yield broken(unread)
                return
            unread.keep("")
            yield from unread.space()
            mark = yield from unread.literal(self.call[0])
        if self.section[1] and (yield from unread.literal(self.section[1])):
            unread.kept()
        yield broken(unread)

    def lark(self, write: GrammarText, *, is_parallel: bool) -> tuple[str, str]:
        """The opening mark, and an expression for calls behind it."""
        before, behind, end = self.call
        calls = []
        for name, schema in write.tools.items():
            head = write.mark(name + behind)
            if self.types == "type":
                head = f'{literal(name)} "\\" index=\\"" /[0-9]{{1,3}}/ {write.mark(behind)}'
            calls.append(f"{head} {self._lark_arguments(schema, write)} SPACE {write.mark(end)}")
        call = write.one_of(calls)
        if not self.section[0]:
            return before, call
        again = f"SPACE {write.mark(before)}"
        several = many(call, again, is_parallel=is_parallel)
        return self.section[0], f"{again} {several} SPACE {write.mark(self.section[1])}"

    def _lark_arguments(self, schema: Mapping[str, Any], write: GrammarText) -> str:
        found = properties(schema)
        if found is None:
            return f"({self._lark_argument('', {}, write)})*"
        written = []
        for name, one, is_required in found:
            argument = self._lark_argument(name, one, write)
            written.append(argument if is_required else f"({argument})?")
        return write.rule(" ".join(written)) if written else ""

    def _lark_argument(self, name: str, schema: Mapping[str, Any], write: GrammarText) -> str:
        """An expression for one argument, of any name if that is ""."""
        before, behind, close = self.parameter
        head = f"{write.mark(before)} " + (literal(name) or '/[^<>"\n]{1,128}/')
        pad = literal(self.value_pad)
        types, texts = schema_types(schema), texts_of(schema)
        forms = []
        if is_text(schema):
            listed = [write.mark(text + self.value_pad + close) for text in texts]
            value = write.one_of(listed) if listed else write.until(self.value_pad + close)
            forms.append((self._attribute("string"), value))
        rest = without_texts(schema) if texts else schema
        # A text can be anything: without a list, and where no attribute tells it from other values, it is all of them.
        if rest is not None and types != {"string"} and (texts or self.types or not is_text(schema)):
            for attribute, one in self._typed(rest, types - {"string"} or _TYPES):
                forms.append((attribute, f"{write.json(one)} {write.mark(self.value_pad + close)}"))
        written = []
        for attribute, value in forms:
            between = write.mark(attribute + behind)
            if self.value:
                between += f" SPACE {write.mark(self.value)}"
            written.append(" ".join(filter(None, ("SPACE", head, between, pad, value))))
        return write.one_of(written)

    def _typed(self, schema: Mapping[str, Any], types: Collection[str]) -> list[tuple[str, Mapping[str, Any]]]:
        """Attributes that values under a schema may have, and the schema of those with it."""
        by_attribute: dict[str, list[str]] = {}
        for name in sorted(set(types) - ({"integer"} if "number" in types else set())):
            by_attribute.setdefault(self._attribute(name), []).append(name)
        if len(by_attribute) == 1:
            return [(attribute, schema) for attribute in by_attribute]
        return [(attribute, {**schema, "type": names}) for attribute, names in by_attribute.items()]

    def _attribute(self, type_name: str) -> str:
        """Attribute of a value of a JSON type."""
        match self.types:
            case "string":
                return '" string="' + ("true" if type_name == "string" else "false")
            case "type":
                return '" type="' + ("number" if type_name == "integer" else type_name)
        return ""

    def _head(self, unread: Unread) -> Reading[str]:
        """Name of the tool, or ""."""
        if self.call[1]:
            ends = Marks([self.call[1], *self.opens, *self.closes])
            head, mark = yield from unread.collect(ends, limit=LONGEST_HEAD)
            is_ended = mark == self.call[1]
        else:
            ends = Marks(["\n", self.parameter[0], *self.closes])
            head, mark = yield from unread.collect(ends, limit=LONGEST_HEAD, takes_mark=False)
            is_ended = bool(mark)
        name = self.name_of(head).strip()
        return name if is_ended and not any(character.isspace() or character in "<{" for character in name) else ""

    def name_of(self, head: str) -> str:
        """The name in what stands between two marks; "" if there is more than a name and one attribute."""
        if not self.quote:
            return head
        found = _QUOTED_HEAD.fullmatch(head)
        return found["name"] if found else ""

    def types_in(self, head: str) -> frozenset[str]:
        """Types of a value that the attributes beside its name give; empty if there are none."""
        if not self.types:
            return frozenset()
        _, _, rest = head.partition(f"{self.types}={self.quote}")
        value = rest.partition(self.quote)[0]
        match value:
            case "true":
                return frozenset({"string"})
            case "false":
                return frozenset({"null", "boolean", "number", "object", "array"})
        return frozenset({value}) if value else frozenset()


class _Arguments:
    """The arguments of one call while they are read."""

    def __init__(self, syntax: XmlCalls, unread: Unread, calls: Calls, name: str) -> None:
        self._syntax, self._unread, self._calls = syntax, unread, calls
        self._schema = calls.tools.get(name, {})
        self._text = ArgumentsText()

    def read(self) -> Reading[bool]:
        """Read them up to the end of the call; returns whether that was found."""
        open_key, _, close_value = self._syntax.parameter
        closes = self._syntax.closes
        yield from self._unread.space()
        if (yield from self._unread.next()) == "{":
            return (yield from self._read_json())
        while True:
            self._unread.keep("")
            yield from self._unread.space()
            match (yield from self._unread.literal(open_key, close_value, *closes)):
                case mark if mark == open_key:
                    if not (yield from self._argument()):
                        return False
                case mark if mark in closes:
                    yield self._calls.arguments(self._text.end())
                    return True
                case mark if mark == close_value:
                    pass  # models write it twice
                case _:
                    return False

    def _read_json(self) -> Reading[bool]:
        is_whole = yield from self._unread.json(self._calls.arguments)
        self._unread.keep("")
        yield from self._unread.space()
        return is_whole and bool((yield from self._unread.literal(self._syntax.call[2])))

    def _argument(self) -> Reading[bool]:
        syntax, unread = self._syntax, self._unread
        _, end_key, close = syntax.parameter
        head, mark = yield from unread.collect(Marks([end_key, *syntax.opens, *syntax.closes]), limit=LONGEST_HEAD)
        if syntax.value and mark == end_key:
            yield from unread.space()
            mark = end_key if (yield from unread.literal(syntax.value)) else ""
        name = syntax.name_of(head)
        if mark != end_key or not name:
            return False
        unread.kept()
        yield self._calls.arguments(self._text.key(name))
        if syntax.value_pad:
            yield from unread.literal(syntax.value_pad)
        types = syntax.types_in(head) or types_of(self._schema, name)
        ends = Marks([close, syntax.value_pad + close])
        if types == {"string"}:
            yield self._calls.arguments('"')
            mark = yield from unread.copy(ends, lambda text: self._calls.arguments(escaped(text)))
            if mark:
                yield self._calls.arguments('"')
            return bool(mark)
        found: list[str] = []
        mark = yield from unread.copy(ends, found.append)
        text = "".join(found)
        # An incomplete value stays as it is, so that the arguments do not look whole.
        if text or mark:
            yield self._calls.arguments(json_value(text, types) if mark else text)
        return bool(mark)
