"""DeepSeek-V3.2's message encoding, written down from its published description. Shares nothing with the template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_D = "｜DSML｜"
_HOW = [
    "## Tools",
    "",
    "You have access to a set of tools you can use to answer the user's question.",
    f'You can invoke functions by writing a "<{_D}function_calls>" block like the following as part of your reply to '
    "the user:",
    f"<{_D}function_calls>",
    f'<{_D}invoke name="$FUNCTION_NAME">',
    f'<{_D}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{_D}parameter>',
    "...",
    f"</{_D}invoke>",
    f'<{_D}invoke name="$FUNCTION_NAME2">',
    "...",
    f"</{_D}invoke>",
    f"</{_D}function_calls>",
    "",
    "String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects "
    'should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for '
    "other types (numbers, booleans, arrays, objects).",
    "",
    "If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking "
    "block. Here is an example:",
    "",
    f"<{_D}function_calls>",
    "...",
    f"</{_D}function_calls>",
    "",
    "<function_results>",
    "...",
    "</function_results>",
    "",
    "<think>...thinking about results</think>",
    "",
    "Here are the functions available in JSONSchema format:",
    "<functions>",
]


def encode(
    messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), is_thinking: bool = False
) -> str:
    """Text of a prompt.

    Raises:
        ValueError: the messages have no encoding.
    """
    asked = [place for place, message in enumerate(messages) if message["role"] == "user"]
    last = asked[-1] if asked else -1
    parts = ["<｜begin▁of▁sentence｜>"]
    if tools and messages[0]["role"] != "system":
        parts.append(_tools(tools))
    waiting: list[str] = []
    for place, message in enumerate(messages):
        opening = "<think>" if is_thinking and place >= last else "</think>"
        match message["role"]:
            case "system":
                parts.append(message["content"])
                if tools and place == 0:
                    parts.append(_tools(tools))
            case "user":
                parts.append(f"<｜User｜>{message['content']}<｜Assistant｜>{opening}")
                waiting = []
            case "assistant":
                calls = message.get("tool_calls", [])
                if is_thinking and place > last:
                    if not calls and not message.get("reasoning_content"):
                        raise ValueError("no thoughts")
                    parts.append(message.get("reasoning_content", "") + "</think>")
                parts.append(message["content"])
                if calls:
                    lines = [f"<{_D}function_calls>", *map(_call, calls), f"</{_D}function_calls>"]
                    parts.append("\n\n" + "\n".join(lines))
                parts.append("<｜end▁of▁sentence｜>")
                waiting = ["first", *["more"] * (len(calls) - 1)] if calls else []
            case "tool":
                if not waiting:
                    raise ValueError("no call")
                parts.append("\n\n<function_results>" if waiting.pop(0) == "first" else "")
                parts.append(f"\n<result>{message['content']}</result>")
                if not waiting:
                    parts.append(f"\n</function_results>\n\n{opening}")
    return "".join(parts)


def _tools(tools: Sequence[Mapping[str, Any]]) -> str:
    schemas = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    return "\n\n" + "\n".join([*_HOW, *schemas, "</functions>", ""])


def _call(call: Mapping[str, Any]) -> str:
    lines = [f'<{_D}invoke name="{call["function"]["name"]}">']
    values = json.loads(call["function"]["arguments"])
    for name, value in values.items():
        is_text = isinstance(value, str)
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        lines.append(f'<{_D}parameter name="{name}" string="{str(is_text).lower()}">{text}</{_D}parameter>')
    return "\n".join([*lines, *([] if values else [""]), f"</{_D}invoke>"])
