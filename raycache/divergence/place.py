r"""Where in a request a character of its rendered prompt comes from.

A chat template puts the contents of messages and tools into its own text. They are found again by searching for them
in their order, so no template has to be known:

    <|im_start|>system\nYou are ...<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
                       [message 0   ]                              [1 ]                  the rest is the template's
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_HEADER = re.compile(r"\s*[#>*-]*\s*\**([A-Za-z][A-Za-z0-9_]*(?:[ -][A-Za-z0-9_]+){0,4})\**\s*[:=]\s")
_MOST_KEY_CHARS = 60
_MOST_NAME_CHARS = 64
_MOST_PATH_CHARS = 200
_LAST_MESSAGES = 4
_MOST_GAP = 8192
"""Most characters that a template writes between two messages."""
_MOST_IN_VAIN = 32 * 2**20
"""Characters that are searched for contents that are not shown, so that no conversation takes long."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the client sent, as far as it is looked for.

    Attributes:
        messages, tools: of the OpenAI API; no messages: a plain prompt.
        text: of the whole prompt; "": only its tokens are known.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    text: str = ""

    def size(self, index: int) -> int:
        """Characters of a message."""
        return sum(map(len, _pieces(self.messages[index])))

    def last_sizes(self) -> dict[int, int]:
        """Characters of the last messages, by their index: enough to see whether they are sent again unchanged."""
        count = len(self.messages)
        return {index: self.size(index) for index in range(max(0, count - _LAST_MESSAGES), count)}

    @property
    def tool_names(self) -> tuple[str, ...]:
        """In their order."""
        functions = (tool.get("function", tool) for tool in self.tools)
        names = (function.get("name") for function in functions if isinstance(function, Mapping))
        return tuple(name for name in names if isinstance(name, str))


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a request.

    Attributes:
        message: index of the message, or that of the one that comes next if the text is the template's; None: none.
        role: of that message.
        tool: name of the tool, or "".
        path: of the JSON value in the tool, such as "function.parameters.properties.city", or "".
        line: number of the line in the message or prompt, from 1; 0: the text is the template's.
        key: what a line like a header begins with, such as "Date", or "".
    """

    message: int | None = None
    role: str = ""
    tool: str = ""
    path: str = ""
    line: int = 0
    key: str = ""

    @property
    def is_of_template(self) -> bool:
        """Whether the text is the template's own."""
        return not self.line and not self.tool

    def __str__(self) -> str:
        if self.tool:
            return f"tool {self.tool}" + (f", {self.path}" if self.path else "")
        if self.is_of_template:
            return "the chat template" if self.message is None else f"the chat template before message {self.message}"
        where = "the prompt" if self.message is None else f"message {self.message} ({self.role})"
        if self.message == 0 and self.role == "system":
            where = "the system message"
        return f"line {self.line} of {where}" + (f", {self.key}" if self.key else "")

    @property
    def label(self) -> str:
        """For sums: like the text, but the same for all messages behind the first two."""
        if self.message is None or self.tool or (self.line and self.message < 2):
            return str(self)
        if self.is_of_template:
            return "the chat template"
        return f"a later message ({self.role})" + (f", {self.key}" if self.key else "")

    def facts(self) -> dict[str, Any]:
        """The parts that are set, for JSON."""
        found = {"message": self.message, "role": self.role, "tool": self.tool, "path": self.path}
        found |= {"line": self.line, "key": self.key}
        return {name: value for name, value in found.items() if value not in (None, "", 0) or name == "message"}


def place_of(offset: int, text: str, asked: Asked) -> Place:
    """Find the place of the character at `offset` of a rendered prompt."""
    if not asked.messages:
        return _in_text(Place(), offset, text, begin=0)
    tools = _tool_spans(text, asked.tools, until=offset)
    slack = _MOST_GAP + (tools_end(text, asked.tools) if asked.tools else 0)  # they stand before any of the messages
    position, in_vain = 0, 0
    for index, message in enumerate(asked.messages):
        role = str(message.get("role", ""))[:_MOST_NAME_CHARS]
        for piece in _pieces(message):
            end = position + slack + len(piece)
            begin = text.find(piece, position, end)
            if begin < 0:  # not shown, or in other words
                slack += len(piece)
                in_vain += end - position
                if in_vain > _MOST_IN_VAIN:
                    return _in_text(Place(), offset, text, begin=0)
                continue
            if offset < begin:
                return _in_tool(offset, text, tools) or Place(index, role)
            position = begin + len(piece)
            if offset <= position:
                return _in_text(Place(index, role), offset, text, begin=begin)
    return _in_tool(offset, text, tools) or Place(len(asked.messages))


def _pieces(message: Mapping[str, Any]) -> Iterator[str]:
    """Texts of a message that a template may show, in the usual order."""
    yield from _texts(message.get("reasoning_content") or message.get("reasoning"))
    yield from _texts(message.get("content"))
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            yield from _texts(function.get("name"))
            yield from _texts(function.get("arguments"))


def _texts(content: object) -> Iterator[str]:
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        found = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(found, str) and (stripped := found.strip()):
            yield stripped  # templates often strip contents


def _in_text(place: Place, offset: int, text: str, *, begin: int) -> Place:
    line_begin = max(begin, text.rfind("\n", begin, offset) + 1)
    key = key_of(text[line_begin : line_begin + _MOST_KEY_CHARS])
    return Place(place.message, place.role, line=text.count("\n", begin, offset) + 1, key=key)


def key_of(line: str) -> str:
    """What a line such as "Date: Monday" begins with, or ""."""
    found = _HEADER.match(line)
    return found[1] if found else ""


def _tool_spans(text: str, tools: Sequence[Mapping[str, Any]], *, until: int) -> list[tuple[int, int, str]]:
    """Beginning, end and name of each tool's text that begins before `until`."""
    spans: list[tuple[int, int, str]] = []
    position = 0
    for tool in tools:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            continue
        if (at := _name_at(text, name, position)) < 0:
            break  # the template does not show tools
        begin = _opening(text, position, at)
        if begin > until:
            break
        position = begin + max(_json_len(text, begin), at + len(name) - begin)
        spans.append((begin, position, name))
    return spans


def tools_end(text: str, tools: Sequence[Mapping[str, Any]]) -> int:
    """The character at which the last tool ends."""
    return max((end for _, end, _ in _tool_spans(text, tools, until=len(text))), default=0)


def _name_at(text: str, name: str, position: int) -> int:
    quoted = text.find(json.dumps(name, ensure_ascii=False), position)
    return text.find(name, position) if quoted < 0 else quoted


def _opening(text: str, position: int, at: int) -> int:
    """Where the JSON object around a tool's name begins: of nested ones, the outermost on the same line."""
    begin = max(position, text.rfind("\n", position, at) + 1)
    brace = text.find("{", begin, at)
    return at if brace < 0 else brace


def _json_len(text: str, begin: int) -> int:
    try:
        return json.JSONDecoder().raw_decode(text, begin)[1] - begin
    except (ValueError, RecursionError):
        return 0


def _in_tool(offset: int, text: str, spans: Sequence[tuple[int, int, str]]) -> Place | None:
    for begin, end, name in spans:
        if begin <= offset <= end:
            return Place(tool=name[:_MOST_NAME_CHARS], path=json_path(text[begin:offset])[:_MOST_PATH_CHARS])
    return None


def json_path(text: str) -> str:
    """The path of the value at the end of the beginning of a JSON text, such as "parameters.required[1]"."""
    path: list[str | int] = []
    for found in _JSON_TOKEN.finditer(text):
        match found[0][0]:
            case "{":
                path.append("")
            case "[":
                path.append(0)
            case "}" | "]":
                del path[-1:]
            case ",":
                path[-1:] = [step + 1 if isinstance(step, int) else "" for step in path[-1:]]
            case _ if found["key"] is not None and path:
                path[-1] = found["key"]
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path if step != "").lstrip(".")


_JSON_TOKEN = re.compile(r'"(?P<key>(?:[^"\\]|\\.)*)"\s*:|"(?:[^"\\]|\\.)*"|[{}\[\],]')
