"""Outputs of gpt-oss: messages with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>CONTENT<|return|>

The recipient stands before the channel or behind it. <|call|> and <|return|> end outputs, so they are often not seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from raycache.api.formats.calls import LONGEST_HEAD, Calls, broken
from raycache.api.formats.grammar import GrammarText, literal
from raycache.api.formats.parser import StreamParser
from raycache.api.formats.parts import Content, Reasoning
from raycache.api.formats.unread import Marks, Reading

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
TEXTS = (START, CHANNEL, MESSAGE, END, "<|call|>", "<|return|>", "<|constrain|>")

_ENDS = (END, "<|call|>", "<|return|>")
_BODY = Marks([*_ENDS, START, CHANNEL])
_HEAD = Marks([MESSAGE, *_ENDS])
_FORM = re.compile(
    r"""
    (<\|start\|>assistant)?
    \s* (to= (?P<first> [^\s<]+))?
    \s* (<\|channel\|> \s* (?P<channel> \w+))?
    \s* (to= (?P<second> [^\s<]+))?
    \s* (<\|constrain\|>)? \s* \w*
    \s* <\|message\|>
    """,
    re.VERBOSE,
)


class HarmonyParser(StreamParser):
    """Parser of one output.

    Args:
        calls: numbers them.
        finds_calls: messages to tools are calls; otherwise they are content.
    """

    def __init__(self, calls: Calls, *, finds_calls: bool) -> None:
        super().__init__()
        self._calls, self._finds_calls = calls, finds_calls

    def _read(self) -> Reading[None]:
        self._unread.keep("")
        # The prompt ends with <|start|>assistant, so an output begins inside of a head.
        yield from self._unread.space()
        if (yield from self._unread.literal(CHANNEL, "to=")):
            yield from self._message()
        else:
            yield broken(self._unread)
        while mark := (yield from self._unread.copy(_BODY, Content)):
            if mark in (START, CHANNEL):
                self._unread.keep(mark)
                yield from self._message()

    def _message(self) -> Reading[None]:
        """One message, from its head on."""
        yield from self._unread.collect(_HEAD, limit=LONGEST_HEAD)
        head = self._unread.kept()
        form = _FORM.fullmatch(head)
        if form is None:
            yield Content(head)
            return
        if recipient := form["first"] or form["second"]:
            yield from self._call(recipient.removeprefix("functions."), head)
            return
        self.is_reasoning = form["channel"] == "analysis"
        ended = yield from self._unread.copy(_BODY, Reasoning if self.is_reasoning else Content, takes_mark=False)
        self.is_reasoning = self.is_reasoning and not ended
        yield from self._unread.literal(*_ENDS)

    def _call(self, name: str, head: str) -> Reading[None]:
        if not self._finds_calls:
            yield Content(head)
            yield from self._unread.copy(_BODY, Content, takes_mark=False)
            return
        yield self._calls.start(name)
        yield from self._unread.space()
        if (yield from self._unread.next()) == "" or (yield from self._unread.literal(*_ENDS)):
            yield self._calls.arguments("{}")
            return
        yield from self._unread.copy(_BODY, self._calls.arguments, takes_mark=False)
        yield from self._unread.literal(*_ENDS)


def final_message(mark: Callable[[str], str]) -> str:
    """What stands before the content of an answer: analysis as the model likes, and the head of the final message.

    Args:
        mark: expression for a mark.
    """
    start, channel, message, end = map(mark, (START, CHANNEL, MESSAGE, END))
    analysis = f'{channel} "analysis" {message} /(?s:.*)/ {end} {start} "assistant"'
    return f'({analysis})? {channel} "final" {message}'


def grammar(write: GrammarText, *, is_required: bool) -> str:
    """A grammar for outputs with valid calls: analysis as the model likes, then a call, or also a final message."""
    start, channel, message, end = map(write.mark, (START, CHANNEL, MESSAGE, END))
    calls = []
    for name, schema in write.tools.items():
        head = literal(f"commentary to=functions.{name} ")
        calls.append(f'{channel} {head} {write.mark("<|constrain|>")} "json" {message} {write.json(schema)}')
    kinds = write.rule('"analysis" | "commentary"')
    earlier = f'({channel} {kinds} {message} TEXT {end} {start} "assistant")*'
    last = write.one_of(calls if is_required else [*calls, f'{channel} "final" {message} TEXT'])
    write.rule(f"{earlier} {last}", name="start")
    return str(write)
