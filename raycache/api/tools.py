"""Tools of a chat request: what the model may call, and whether it must.

tools        [{"type": "function", "function": {"name": ..., "description": ..., "parameters": {JSON schema}}}]
tool_choice  "none" | "auto" | "required" | {"type": "function", "function": {"name": ...}}
             | {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required", "tools": [...]}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError

from raycache.errors import RequestError

MAX_TOOLS = 512
_MAX_NAME_CHARS = 256
_FUNCTION = '{"type": "function", "function": {"name": "..."}}'


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments, an object's.
        is_strict: arguments must follow the schema.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model calls tools.

    Attributes:
        tools: those that it may call; empty if it may call none.
        is_required: it must call one at least.
        is_parallel: it may call several at once.
    """

    tools: tuple[Tool, ...] = ()
    is_required: bool = False
    is_parallel: bool = True


def check_tools(value: object) -> list[dict[str, Any]]:
    """Validator of the field `tools`.

    Raises:
        PydanticCustomError: one is not a function with a name; names which.
    """
    if not isinstance(value, list):
        raise PydanticCustomError("tools", "must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise PydanticCustomError(
            "tools", "must have at most {limit} tools, got {count}", {"limit": MAX_TOOLS, "count": len(value)}
        )
    seen: set[str] = set()
    for index, tool in enumerate(value):
        match tool:
            case {"type": "function", "function": {"name": str(name), **function}} if 0 < len(name) <= _MAX_NAME_CHARS:
                if name in seen:
                    raise PydanticCustomError("tools", "must have different names, got {name} twice", {"name": name})
                seen.add(name)
                if not isinstance(function.get("parameters") or {}, dict):
                    raise PydanticCustomError(
                        "tools", "must have JSON schemas as parameters, [{index}] has none", {"index": index}
                    )
            case {"type": str(kind)} if kind != "function":
                raise PydanticCustomError(
                    "tools",
                    "must be of type 'function', [{index}] is of type '{kind}'",
                    {"index": index, "kind": kind[:40]},
                )
            case _:
                raise PydanticCustomError(
                    "tools", "must be of the form {form}, [{index}] is not", {"form": _FUNCTION, "index": index}
                )
    return value


def tool_choice(
    tools: Sequence[Mapping[str, Any]], wanted: object, *, is_parallel: bool, field: str = "tool_choice"
) -> ToolChoice:
    """What `tool_choice` means for these tools. Without tools there is nothing to choose from, whatever it is.

    Args:
        tools: checked by `check_tools`.
        wanted: value of the field.
        is_parallel: several calls may be made at once.
        field: name of the field, for errors.
    Raises:
        RequestError: it is none of the forms, or names a tool that is not there.
    """
    known = {tool["function"]["name"]: _tool(tool["function"]) for tool in tools}
    match wanted:
        case "none":
            return ToolChoice()
        case "auto" | "required":
            return ToolChoice(tuple(known.values()), wanted == "required" and bool(known), is_parallel)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice(_named([name], known, field), True, is_parallel=False)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)}}:
            names = [_allowed_name(one, field) for one in allowed]
            return ToolChoice(_named(names, known, field), mode == "required" and bool(names), is_parallel)
    raise RequestError(f"{field} must be 'none', 'auto', 'required' or {_FUNCTION}", field=field)


def _tool(function: Mapping[str, Any]) -> Tool:
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(function["name"], parameters, function.get("strict") is True)


def _named(names: Sequence[str], known: Mapping[str, Tool], field: str) -> tuple[Tool, ...]:
    for name in names:
        if name not in known:
            have = ", ".join(map(repr, known)) or "none"
            raise RequestError(f"{field} names the tool {name[:64]!r}; tools has {have[:400]}", field=field)
    return tuple(known[name] for name in names)


def _allowed_name(value: object, field: str) -> str:
    match value:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    raise RequestError(f"{field}.allowed_tools.tools must be of the form {_FUNCTION}", field=field)
