"""Kimi-K3's message encoding, written down from its published description. Shares nothing with the template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"


def encode(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    is_thinking: bool = True,
    effort: str = "max",
) -> str:
    """Text of a prompt.

    Raises:
        ValueError: the messages have no encoding.
    """
    parts = []
    if tools:
        schemas = json.dumps(tools, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        parts.append(_message({"role": "system", "type": "tool-declare"}, _TOOLS.format(schemas)))
    if is_thinking:
        parts.append(_message({"role": "system", "type": "thinking-effort"}, _EFFORT.format(effort)))
    waiting = list(messages)
    calls: list[Any] = []
    num_results = 0
    while waiting:
        message = waiting.pop(0)
        named = {"name": message["name"]} if message.get("name") else {}
        match message["role"]:
            case "user" | "system" as role:
                parts.append(_message({"role": role, **named}, message["content"]))
            case "assistant":
                calls, num_results = message.get("tool_calls", []), 0
                parts.append(_message({"role": "assistant", **named}, _answer(message, is_thinking=is_thinking)))
            case "tool":
                run = [message]
                while waiting and waiting[0]["role"] == "tool":
                    run.append(waiting.pop(0))
                for index, (name, content) in enumerate(_ordered(run, calls, num_results), start=num_results + 1):
                    parts.append(_message({"role": "tool", "tool": name, "index": str(index)}, content))
                num_results += len(run)
    parts.append(_open("message", {"role": "assistant"}) + _open("think" if is_thinking else "response", {}))
    return "".join(parts)


def _ordered(run: list[Any], calls: list[Any], num_before: int) -> list[tuple[str, str]]:
    names = {call["id"]: call["function"]["name"] for call in reversed(calls)}
    places = {call["id"]: place for place, call in reversed([*enumerate(calls)])}
    if all(message["tool_call_id"] in names for message in run):
        run = sorted(run, key=lambda message: places[message["tool_call_id"]])
        return [(names[message["tool_call_id"]], message["content"]) for message in run]
    found = []
    for place, message in enumerate(run, start=num_before):
        name = message.get("name") or (calls[place]["function"]["name"] if place < len(calls) else None)
        if name is None:
            raise ValueError("no name")
        found.append((name, message["content"]))
    return found


def _answer(message: Mapping[str, Any], *, is_thinking: bool) -> str:
    thoughts = message.get("reasoning_content") or ""
    parts = [_element("think", {}, thoughts if thoughts.strip() else "")] if is_thinking else []
    parts.append(_element("response", {}, message["content"]))
    calls = []
    for index, call in enumerate(message.get("tool_calls", []), start=1):
        arguments = json.loads(call["function"]["arguments"])
        values = [
            _element("argument", {"key": key, "type": _type(value)}, _value(value)) for key, value in arguments.items()
        ]
        calls.append(_element("call", {"tool": call["function"]["name"], "index": str(index)}, "".join(values)))
    return "".join([*parts, _element("tools", {}, "".join(calls)) if calls else ""])


def _type(value: object) -> str:
    names = {bool: "boolean", type(None): "null", int: "number", float: "number", str: "string", dict: "object"}
    return names.get(type(value), "array")


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _message(attributes: Mapping[str, str], body: str) -> str:
    return _element("message", attributes, body) + "<|end_of_msg|>"


def _element(name: str, attributes: Mapping[str, str], body: str) -> str:
    return f"{_open(name, attributes)}{body}<|close|>{name}<|sep|>"


def _open(name: str, attributes: Mapping[str, str]) -> str:
    texts = [f' {key}="{text.replace("&", "&amp;").replace(chr(34), "&quot;")}"' for key, text in attributes.items()]
    return f"<|open|>{name}{''.join(texts)}<|sep|>"
