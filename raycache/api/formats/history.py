"""Earlier turns, in the form that a model's chat template shows.

Templates disagree about what a conversation may contain: some leave a role out without a word, some refuse what others
show. Which does what is found out once, by rendering small conversations.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raycache.api.formats.calls import IdStyle
from raycache.api.formats.probe import QUESTION, Adapt, Message, Template, rendered, with_calls

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names that clients and templates give the reasoning of an earlier turn."""

_DIGITS = string.digits + string.ascii_letters


@dataclass(frozen=True)
class History:
    """How earlier turns are brought into the form that a template shows.

    Attributes:
        ids: of calls.
        writes_arguments: arguments of calls are JSON text; otherwise objects.
        reasoning_key: under which the template reads the reasoning.
        shows_developer: the role "developer" is shown.
        shows_late_system: a system message behind others is shown in its place.
        joins_users: user messages behind each other become one.
        splits_calls: of several calls at once each becomes a turn with its result.
        moves_content: content beside reasoning and a call becomes a part of the reasoning.
    """

    ids: IdStyle = IdStyle.OPENAI
    writes_arguments: bool = False
    reasoning_key: str = "reasoning_content"
    shows_developer: bool = True
    shows_late_system: bool = True
    joins_users: bool = False
    splits_calls: bool = False
    moves_content: bool = False

    def adapted(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template shows them. Those given are not changed."""
        found = [self._with_reasoning(message) for message in messages]
        if not self.shows_developer:
            found = [{**message, "role": "system"} if message["role"] == "developer" else message for message in found]
        if not self.shows_late_system:
            found = _without_late_system(found)
        if self.joins_users:
            found = _joined_users(found)
        if self.ids is not IdStyle.OPENAI:
            found = _with_ids(found, self.ids)
        if self.splits_calls:
            found = _split_calls(found)
        return [_with_arguments_as_text(message) for message in found] if self.writes_arguments else found

    def notes(self) -> list[str]:
        """What is changed, for people."""
        notes = {
            "developer messages become system messages": not self.shows_developer,
            "system messages behind others become text of the user": not self.shows_late_system,
            "user messages in a row become one": self.joins_users,
            "parallel calls become turns of their own": self.splits_calls,
        }
        return [note for note, is_so in notes.items() if is_so]

    def _with_reasoning(self, message: Message) -> Message:
        if message["role"] != "assistant":
            return message
        text = next((message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)), "")
        if not text:
            return message
        found = {key: value for key, value in message.items() if key not in REASONING_KEYS}
        if self.moves_content and found.get("tool_calls") and found.get("content"):
            text, found["content"] = f"{text}\n\n{found['content']}", ""
        return {**found, self.reasoning_key: text}


def find_history(template: Template, *, ids: IdStyle) -> History:
    """Find out what a template shows.

    Args:
        ids: form of the calls' ids of the model's format.
    """
    mark = "MARIGOLD"

    def shows(messages: Sequence[Mapping[str, Any]], adapt: Adapt = list) -> bool:
        return mark in rendered(template, messages, adapt=adapt)

    if not shows([{"role": "user", "content": mark}]):
        return History(ids=ids)
    found = History(
        ids=ids,
        writes_arguments=_writes_arguments(template),
        shows_developer=shows([{"role": "developer", "content": mark}, QUESTION]),
        shows_late_system=_shows_late_system(template),
        joins_users=not shows([QUESTION, {"role": "user", "content": mark}]),
    )
    one, two = with_calls(mark), with_calls("Berne", mark)
    found = replace(found, splits_calls=shows(one, found.adapted) and not shows(two, found.adapted))
    for key in REASONING_KEYS:
        named = replace(found, reasoning_key=key)
        question, answer, *results = with_calls("Berne")
        if shows([question, {**answer, key: mark}, *results], named.adapted):
            is_shown = shows([question, {**answer, key: mark, "content": "So."}, *results], named.adapted)
            return replace(named, moves_content=not is_shown)
    return found


def _writes_arguments(template: Template) -> bool:
    """Whether arguments are shown as text only. An object that is shown as Python writes it is not shown."""
    messages = with_calls("MARIGOLD")
    shown = rendered(template, messages)
    if "MARIGOLD" in shown and "'MARIGOLD'" not in shown:
        return False
    return "MARIGOLD" in rendered(template, messages, adapt=History(writes_arguments=True).adapted)


def _shows_late_system(template: Template) -> bool:
    """Whether a system message is shown behind the user's message, where it stands."""
    turns = [QUESTION, {"role": "assistant", "content": "There."}, {"role": "user", "content": "TULIPS"}]
    shown = rendered(template, [*turns, {"role": "system", "content": "MARIGOLD"}])
    return 0 <= shown.find("TULIPS") < shown.find("MARIGOLD")


def _without_late_system(messages: Sequence[Message]) -> list[Message]:
    """System messages at the start as one; later ones as text of the user."""
    found = _Joined()
    for message in messages:
        if message["role"] != "system" or not found.last_role:
            found.add(message)
        elif found.last_role == "system":
            found.extend(message["content"])
        elif found.last_role == "user":
            found.extend(f"System message: {message['content']}")
        else:
            found.add({"role": "user", "content": f"System message: {message['content']}"})
    return found.messages()


def _joined_users(messages: Sequence[Message]) -> list[Message]:
    found = _Joined()
    for message in messages:
        if message["role"] == found.last_role == "user":
            found.extend(message["content"])
        else:
            found.add(message)
    return found.messages()


class _Joined:
    """Messages, some of which get more text. Joined at the end: there may be very many."""

    def __init__(self) -> None:
        self._found: list[tuple[Message, list[str]]] = []

    @property
    def last_role(self) -> str:
        """Role of the last message, or "" before the first."""
        return str(self._found[-1][0]["role"]) if self._found else ""

    def add(self, message: Message) -> None:
        """A message of its own."""
        self._found.append((message, []))

    def extend(self, text: str) -> None:
        """More text of the last message."""
        self._found[-1][1].append(text)

    def messages(self) -> list[Message]:
        """All of them."""
        return [
            {**message, "content": "\n\n".join([message["content"], *more])} if more else message
            for message, more in self._found
        ]


def _with_ids(messages: Sequence[Message], ids: IdStyle) -> list[Message]:
    """Calls and results with ids of a family's form. A result belongs to the last call with its id."""
    known: dict[str, str] = {}
    count = 0
    found = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            old = str(call.get("id") or f"call{count}")
            known[old] = _own_id(ids, old, call["function"]["name"], count)
            calls.append({**call, "id": known[old]})
            count += 1
        new = {**message, "tool_calls": calls} if calls else message
        if message["role"] == "tool":
            old = str(message.get("tool_call_id") or "")
            new = {**message, "tool_call_id": known.get(old) or _own_id(ids, old, str(message.get("name")), count)}
        found.append(new)
    return found


def _own_id(ids: IdStyle, old: str, name: str, number: int) -> str:
    if ids is IdStyle.KIMI:
        return f"functions.{name}:{number}"
    if ids.accepts(old):
        return old
    digits, value = "", int.from_bytes(hashlib.sha256(old.encode("utf-8", errors="replace")).digest())
    for _ in range(9):
        value, digit = divmod(value, len(_DIGITS))
        digits += _DIGITS[digit]
    return digits


def _split_calls(messages: Sequence[Message]) -> list[Message]:
    """A turn with several calls as several turns, each before its own result."""
    found: list[Message] = []
    waiting: dict[object, Message] = {}  # turns whose results have not come yet, by the ids of their calls
    for message in messages:
        calls = message.get("tool_calls") or ()
        if message["role"] == "tool" and waiting:
            answered = message.get("tool_call_id")
            found += [waiting.pop(answered if answered in waiting else next(iter(waiting))), message]
            continue
        found += waiting.values()
        waiting = {}
        if len(calls) < 2:
            found.append(message)
            continue
        bare = {key: value for key, value in message.items() if key not in REASONING_KEYS}
        for number, call in enumerate(calls):
            turn = {**bare, "content": ""} if number else message
            name = call.get("id")
            waiting[number if name is None or name in waiting else name] = {**turn, "tool_calls": [call]}
    return [*found, *waiting.values()]


def _with_arguments_as_text(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [
        {**call, "function": {**call["function"], "arguments": _text(call["function"]["arguments"])}} for call in calls
    ]
    return {**message, "tool_calls": written}


def _text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
