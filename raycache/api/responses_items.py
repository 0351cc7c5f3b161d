"""Input items of /v1/responses as the messages of a chat.

    system or developer message              system    those at the beginning become one
    user message                             user
    reasoning, assistant message, calls      assistant neighbours become one: they are one turn of the model
    output of a call                         tool

Ids of items are left out: they differ from request to request and would end every shared prefix.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raycache.errors import RequestError

_SEALED = "raycache:"  # begins our encrypted_content; that of other servers cannot be read
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def encode_reasoning(text: str) -> str:
    """Reasoning as the `encrypted_content` of an item. It is not secret: clients may show reasoning anyway."""
    return _SEALED + base64.b64encode(text.encode("utf-8")).decode("ascii")


def decode_reasoning(sealed: object) -> str:
    """Reasoning from an `encrypted_content`, or "" if it is not from `encode_reasoning`."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode("utf-8")
    except ValueError:
        return ""


def flat_name(namespace: str, name: str) -> str:
    """The name under which the model sees a function of a namespace; "" is no namespace."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def messages_of(items: str | Sequence[Mapping[str, Any]], *, instructions: str = "") -> list[dict[str, Any]]:
    """The conversation.

    Args:
        items: field `input`.
        instructions: a system message before it.
    Raises:
        RequestError: an item is malformed or of a type that is not served; names it.
    """
    messages = [_Message("system", [instructions])] if instructions else []
    if isinstance(items, str):
        messages.append(_Message("user", [items]))
    else:
        for index, item in enumerate(items):
            _add(messages, item, f"input[{index}]")
    return [message.shown() for message in messages]


@dataclass
class _Message:
    """A message of the chat, while items are added to it.

    Attributes:
        content, reasoning: one text per item.
        call_id: of the call whose result it is, or "".
    """

    role: str
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_id: str = ""

    def shown(self) -> dict[str, Any]:
        """The message as chats have it."""
        between = "\n\n" if self.role == "system" else "\n"
        reasoning = "\n".join(filter(None, self.reasoning))
        return {
            "role": self.role,
            **({"tool_call_id": self.call_id} if self.call_id else {}),
            **({"reasoning_content": reasoning} if reasoning else {}),
            "content": between.join(filter(None, self.content)),
            **({"tool_calls": self.calls} if self.calls else {}),
        }


def _add(messages: list[_Message], item: Mapping[str, Any], where: str) -> None:
    match item:
        case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
            name = flat_name(_optional_text(item, "namespace", where), name)
            _turn(messages).calls.append(_call(call_id, name, arguments))
        case {"type": "custom_tool_call", "call_id": str(call_id), "name": str(name), "input": str(text)}:
            name = flat_name(_optional_text(item, "namespace", where), name)
            arguments = json.dumps({"input": text}, ensure_ascii=False)
            _turn(messages).calls.append(_call(call_id, name, arguments))
        case {"type": "function_call_output" | "custom_tool_call_output", "call_id": str(call_id), "output": output}:
            messages.append(_Message("tool", [_text(output, f"{where}.output")], call_id=call_id))
        case {"type": "reasoning"}:
            _turn(messages).reasoning.append(_reasoning(item, where))
        case {"role": str(role), "content": content} if item.get("type") in (None, "message"):
            _add_message(messages, role, _text(content, f"{where}.content"), where)
        case {"type": "item_reference"}:
            raise RequestError(f"{where} refers to an item, but none are stored; send it whole", field=where)
        case {"type": str(kind)} if kind not in _FORMS:
            raise RequestError(f"{where} is of type {kind[:64]!r}, which is not supported", field=where)
        case _:
            found = item.get("type")
            form = _FORMS.get(found if isinstance(found, str) else "", _FORMS["message"])
            raise RequestError(f"{where} must be of the form {form}", field=where)


_FORMS = {
    "message": '{"role": "...", "content": "..."}',
    "function_call": '{"type": "function_call", "call_id": "...", "name": "...", "arguments": "..."}',
    "function_call_output": '{"type": "function_call_output", "call_id": "...", "output": "..."}',
    "custom_tool_call": '{"type": "custom_tool_call", "call_id": "...", "name": "...", "input": "..."}',
    "custom_tool_call_output": '{"type": "custom_tool_call_output", "call_id": "...", "output": "..."}',
}


def _add_message(messages: list[_Message], role: str, text: str, where: str) -> None:
    if role not in _ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}, got {role[:64]!r}", field=f"{where}.role")
    role = _ROLES[role]
    if role == "assistant":
        _turn(messages).content.append(text)
    elif role == "system" and len(messages) == 1 and messages[0].role == "system":
        messages[0].content.append(text)  # many templates take one system message only
    else:
        messages.append(_Message(role, [text]))


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": _object(arguments)}}


def _object(arguments: str) -> str:
    """Arguments as templates take them. Those of a call that was cut off are no JSON object, and are put into one."""
    try:
        is_object = isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    return arguments if is_object else json.dumps({"arguments": arguments}, ensure_ascii=False)


def _turn(messages: list[_Message]) -> _Message:
    """The message of the model's turn that the items before are in, or a new one."""
    if not messages or messages[-1].role != "assistant":
        messages.append(_Message("assistant"))
    return messages[-1]


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """The reasoning itself. A summary is not, and that of another server may be encrypted: then there is none."""
    if sealed := decode_reasoning(item.get("encrypted_content")):
        return sealed
    return _text(item.get("content") or "", f"{where}.content")


def _text(content: object, where: str) -> str:
    """Text of a string or of a list of parts."""
    match content:
        case str(text):
            return text
        case list(parts):
            return "\n".join(_text_of(part, f"{where}[{index}]") for index, part in enumerate(parts))
    raise RequestError(f"{where} must be a string or a list of text parts", field=where)


def _text_of(part: object, where: str) -> str:
    match part:
        case {"type": "input_text" | "output_text" | "reasoning_text" | "text", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": "input_image" | "input_file" | "input_audio" as kind}:
            raise RequestError(f"{where} is of type {kind!r}; only text is supported", field=where)
    raise RequestError(f'{where} must be of the form {{"type": "input_text", "text": "..."}}', field=where)


def _optional_text(item: Mapping[str, Any], field: str, where: str) -> str:
    value = item.get(field) or ""
    if not isinstance(value, str):
        raise RequestError(f"{where}.{field} must be a string", field=f"{where}.{field}")
    return value
