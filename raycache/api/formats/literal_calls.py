"""Calls with arguments as literals of a notation that is not JSON: Python's, as in now(zone="UTC"), or Gemma's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raycache.api.formats.arguments import ArgumentsText, is_json, python_json, quoted, schema_types
from raycache.api.formats.calls import LONGEST_HEAD, Calls, broken
from raycache.api.formats.grammar import GrammarText, literal, many, properties, separated, texts_of
from raycache.api.formats.unread import Marks, Reading, Unread

_QUOTE = '<|"|>'
_BARE_NAME = re.compile(r"(?P<before>[{,]\s*)(?P<name>[^\s{}\[\],:]+)(?P<after>\s*:)")


@dataclass(frozen=True)
class PythonCalls:
    """A list of calls, as Python writes them: [get_weather(city="Zürich"), now()].

    Attributes:
        open: text before the list; "" if an output that begins with a list is calls.
        close: text behind it, or "".
        also_opens: other texts before it.
    """

    open: str = ""
    close: str = ""
    also_opens: tuple[str, ...] = ()

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

    @property
    def starts(self) -> str:
        """The character with which an output of calls begins that has no mark."""
        return "" if self.open else "["

    def read(self, mark: str, unread: Unread, calls: Calls) -> Reading[None]:
        """Read the calls behind an opening mark."""
        yield from unread.space()
        has_bracket = bool((yield from unread.literal("[")))
        while True:
            yield from unread.space()
            head, found = yield from unread.collect(Marks(["(", "\n", *self.closes]), limit=LONGEST_HEAD)
            name = head.strip()
            is_name = name.replace(".", "_").replace("-", "_").isidentifier()
            if found != "(" or not is_name or not (self.open or name in calls.tools):
                yield broken(unread)
                return
            unread.kept()
            yield calls.start(name)
            if not (yield from self._arguments(unread, calls)):
                return
            unread.keep("")
            yield from unread.space()
            if not (yield from unread.literal(",", ";")):
                break
        if has_bracket and (yield from unread.literal("]")):
            unread.keep("")
            yield from unread.space()
        if self.close and (yield from unread.literal(self.close)):
            unread.kept()
        yield broken(unread)

    def lark(self, write: GrammarText, *, is_parallel: bool) -> tuple[str, str]:
        """The opening mark, and an expression for a list of calls behind it."""
        calls = []
        for name, schema in write.tools.items():
            found = properties(schema)
            parts = [(f"{literal(key + '=')} {_python_rule(one, write)}", needed) for key, one, needed in found or []]
            inner = separated(parts, write, separator=", ") if found is not None else _python_any(write)
            calls.append(f'{literal(name + "(")} {inner} ")"')
        written = many(write.one_of(calls), '", "', is_parallel=is_parallel)
        close = f" {write.mark(self.close)}" if self.close and self.open else ""
        return self.open, f'"[" {written} "]"{close}'

    def _arguments(self, unread: Unread, calls: Calls) -> Reading[bool]:
        text = ArgumentsText()
        while True:
            unread.keep("")
            yield from unread.space()
            if (yield from unread.literal(")")):
                yield calls.arguments(text.end())
                unread.kept()
                return True
            if (yield from unread.literal(",")):
                continue
            head, found = yield from unread.collect(Marks(["=", "(", ")", "\n"]), limit=LONGEST_HEAD)
            if found != "=" or not head.strip():
                yield broken(unread)
                return False
            yield calls.arguments(text.key(head.strip()))
            value, is_whole = yield from _value(unread, ends=",)", quotes=("'", '"'), has_escapes=True)
            unread.kept()
            if value.strip():
                yield calls.arguments(python_json(value) if is_whole else value)
            if not is_whole:
                return False


@dataclass(frozen=True)
class GemmaCalls:
    """Calls as Gemma 4 writes them: call:get_weather{city:<|"|>Zürich<|"|>,days:3}, without quotes around names."""

    open: str = "<|tool_call>"
    close: str = "<tool_call|>"

    @property
    def opens(self) -> tuple[str, ...]:
        """The text with which a call begins."""
        return (self.open,)

    @property
    def closes(self) -> tuple[str, ...]:
        """The text that ends it."""
        return (self.close,)

    @property
    def texts(self) -> tuple[str, ...]:
        """All marks."""
        return (self.open, self.close, _QUOTE)

    @property
    def starts(self) -> str:
        """No output begins with a call without a mark."""
        return ""

    def read(self, mark: str, unread: Unread, calls: Calls) -> Reading[None]:
        """Read the call behind an opening mark."""
        yield from unread.space()
        begun = yield from unread.literal("call:")
        head, found = yield from unread.collect(Marks(["{", "\n", self.open, self.close]), limit=LONGEST_HEAD)
        name = head.strip()
        if not begun or found != "{" or not name or any(map(str.isspace, name)):
            yield broken(unread)
            return
        unread.kept()
        yield calls.start(name)
        text = ArgumentsText()
        while not (yield from unread.literal("}")):
            unread.keep("")
            yield from unread.space()
            if (yield from unread.literal(",")):
                continue
            head, found = yield from unread.collect(Marks([":", "}", self.open, self.close]), limit=LONGEST_HEAD)
            if found == "}" and not head.strip():
                break
            if found != ":":
                yield broken(unread)
                return
            yield calls.arguments(text.key(head.strip().replace(_QUOTE, "")))
            value, is_whole = yield from _value(unread, ends=",}", quotes=(_QUOTE,), has_escapes=False)
            unread.kept()
            if value.strip():
                yield calls.arguments(_gemma_json(value) if is_whole else value)
            if not is_whole:
                return
        yield calls.arguments(text.end())
        unread.keep("")
        yield from unread.space()
        if (yield from unread.literal(self.close)):
            unread.kept()
        yield broken(unread)

    def lark(self, write: GrammarText, *, is_parallel: bool) -> tuple[str, str]:
        """The opening mark, and an expression for one call behind it."""
        value = write.rule(_gemma_value(write), name="gemma_value")
        calls = []
        for name, schema in write.tools.items():
            found = properties(schema)
            parts = [(f"{literal(key + ':')} {_gemma_rule(one, write)}", needed) for key, one, needed in found or []]
            inner = separated(parts, write, separator=",") if found is not None else _gemma_object(value)
            calls.append(f'{literal(f"call:{name}{{")} {inner} "}}"')
        return self.open, f"{write.one_of(calls)} {write.mark(self.close)}"


def _python_any(write: GrammarText) -> str:
    one = f'/[a-zA-Z_][a-zA-Z_0-9]{{0,63}}/ "=" {write.json({})}'
    return f"({many(one, literal(', '), is_parallel=True)})?"


def _python_rule(schema: Mapping[str, Any], write: GrammarText) -> str:
    types = schema_types(schema)
    return '("True" | "False")' if types == {"boolean"} else write.json(schema)


def _gemma_rule(schema: Mapping[str, Any], write: GrammarText) -> str:
    """A value under a schema: its type is held, and what is inside of lists and objects is any value."""
    quote = write.mark(_QUOTE)
    match schema_types(schema):
        case types if types == {"string"}:
            texts = texts_of(schema)
            return (
                f"{quote} {write.one_of(list(map(literal, texts)))} {quote}"
                if texts
                else write.rule(f"{quote} {write.until(_QUOTE)}")
            )
        case types if types and types <= {"integer", "number", "boolean", "null"}:
            return write.json(schema)
        case types if types == {"object"}:
            return f'"{{" {_gemma_object("gemma_value")} "}}"'
        case types if types == {"array"}:
            return '"[" (gemma_value ("," gemma_value)*)? "]"'
    return "gemma_value"


def _gemma_value(write: GrammarText) -> str:
    text = f"{write.mark(_QUOTE)} {write.until(_QUOTE)}"
    objects = f'"{{" {_gemma_object("gemma_value")} "}}"'
    plain = write.json({"type": ["number", "boolean", "null"]})
    return f'{text} | {objects} | "[" (gemma_value ("," gemma_value)*)? "]" | {plain}'


def _gemma_object(value: str) -> str:
    return f'(/[^\\s{{}}\\[\\],:<]{{1,128}}/ ":" {value} ("," /[^\\s{{}}\\[\\],:<]{{1,128}}/ ":" {value})*)?'


def _value(unread: Unread, *, ends: str, quotes: tuple[str, ...], has_escapes: bool) -> Reading[tuple[str, bool]]:
    """One value up to one of `ends`, which stays unread, and whether there was one."""
    found: list[str] = []
    outside = Marks(["(", "[", "{", ")", "]", "}", *ends, *quotes])
    depth = 0
    while True:
        mark = yield from unread.copy(outside, found.append, takes_mark=False)
        if not mark or (depth == 0 and mark in ends):
            return "".join(found), bool(mark)
        found.append((yield from unread.literal(mark)))
        if mark in quotes:
            inside = Marks([mark, "\\"] if has_escapes else [mark])
            while (inner := (yield from unread.copy(inside, found.append))) == "\\":
                escaped = yield from unread.next()
                found.append(inner + (yield from unread.literal(escaped)))
            found.append(inner)
            if not inner:
                return "".join(found), False
        elif mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1


def _gemma_json(text: str) -> str:
    """JSON text of a value in Gemma's notation; what is none is a string."""
    pieces = text.split(_QUOTE)
    for index, piece in enumerate(pieces):
        pieces[index] = quoted(piece) if index % 2 else _BARE_NAME.sub(_named, piece)
    joined = "".join(pieces).strip()
    return joined if is_json(joined) else quoted(text.strip().replace(_QUOTE, ""))


def _named(found: re.Match[str]) -> str:
    return found["before"] + quoted(found["name"]) + found["after"]
