"""Arguments that a model writes one by one, as the text of one JSON object."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

_ESCAPE = re.compile(r"""\\(?P<known>[\n\\'"abfnrtvxNuU0-7])?""")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int, float),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
}


class ArgumentsText:
    """Builds the text from names and values."""

    def __init__(self) -> None:
        self._is_empty = True

    def key(self, name: str) -> str:
        """What stands before the next value."""
        before, self._is_empty = "{" if self._is_empty else ", ", False
        return f"{before}{quoted(name)}: "

    def end(self) -> str:
        """What stands behind the last value."""
        return "{}" if self._is_empty else "}"


_MAX_REFERENCES = 64
"""Definitions that a property's types are looked for in."""


def quoted(text: str) -> str:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False)


def well_formed(text: str) -> str:
    """The text with pairs of surrogates as one character, and U+FFFD for half of a pair."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def escaped(text: str) -> str:
    """A piece of a JSON string."""
    return quoted(text)[1:-1]


def types_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """JSON types that a property of an object's schema may have; empty if the schema does not say.

    Args:
        schema: of the object.
        name: of the property.
    """
    match schema:
        case {"properties": {**properties}} if name in properties:
            return _types(properties[name], schema, {})
    return frozenset()


def schema_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """JSON types of a whole schema's values; empty if it does not say."""
    return _types(schema, schema, {})


def _types(schema: object, root: Mapping[str, Any], known: dict[str, frozenset[str]]) -> frozenset[str]:
    """Types of a part of a schema; `known` are those of definitions, so that each is looked at once."""
    match schema:
        case {"$ref": str(path)}:
            if path not in known:
                known[path] = frozenset()  # while it is looked at: it may refer to itself
                known[path] = _types(_target(path, root), root, known) if len(known) <= _MAX_REFERENCES else frozenset()
            return known[path]
        case {"type": str(name)}:
            return frozenset({name})
        case {"type": [*names]}:
            return frozenset(name for name in names if isinstance(name, str))
        case {"enum": [*values]} if values:
            return frozenset(_type_name(value) for value in values)
        case {"const": value}:
            return frozenset({_type_name(value)})
        case {"anyOf": [*choices]} | {"oneOf": [*choices]} if choices:
            found = [_types(choice, root, known) for choice in choices]
            return frozenset().union(*found) if all(found) else frozenset()
    return frozenset()


def _target(path: str, root: Mapping[str, Any]) -> object:
    target: object = root
    for key in path.removeprefix("#/").split("/"):
        target = target.get(key) if isinstance(target, Mapping) else None
    return target


def _type_name(value: object) -> str:
    if isinstance(value, float):
        return "number"
    return next((name for name, kinds in _TYPES.items() if type(value) in kinds), "string")


def json_value(text: str, types: frozenset[str]) -> str:
    """JSON text of a value that was written without quotes.

    What fits none of the types is a string, as is everything that may be nothing else.

    Args:
        text: as the model wrote it.
        types: that it may have; empty for any.
    """
    bare = text.strip()
    if types == {"string"}:
        return quoted(text)
    if bare in ("True", "False", "None") and (not types or types & {"boolean", "null"}):
        bare = {"True": "true", "False": "false", "None": "null"}[bare]
    elif bare[:1] in ("{", "["):
        bare = python_json(bare)
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return quoted(text)
    if isinstance(value, str) and not types:
        return quoted(text)
    allowed = tuple(kind for name in types or _TYPES for kind in _TYPES.get(name, ()))
    return bare if type(value) in allowed else quoted(text)


def python_json(text: str) -> str:
    """JSON text of a value written as JSON or as a Python literal; what is neither is a string."""
    bare = text.strip()
    if is_json(bare):
        return bare
    try:
        value = ast.literal_eval(_ESCAPE.sub(_known_escape, bare))
        return well_formed(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return quoted(bare)


def is_json(text: str) -> bool:
    """Whether a text is a JSON value, without NaN and the like."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _known_escape(found: re.Match[str]) -> str:
    """Python warns of a backslash that begins no escape, and keeps it."""
    return found[0] if found["known"] else "\\\\"


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
