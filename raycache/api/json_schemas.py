"""JSON Schemas that structured output can enforce: checked, bounded, and without what has no effect."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from raycache.errors import RequestError

MAX_SCHEMA_BYTES = 1 << 20
MAX_DEPTH = 60
MAX_LEVELS = 800  # with references followed: the compiler recurses, and at some 1,500 its stack overflows
MAX_SCHEMAS = 20_000
MAX_OPTIONAL = 500
MAX_REQUIRED = 2_000
MAX_VALUES = 10_000
MAX_PATTERN_CHARS = 10_000
MAX_MERGED_PATTERNS = 12
MAX_COMBINED = 20_000
MAX_LITERAL_CHARS = 10_000
MAX_LITERAL_PARTS = 5_000
MAX_MULTIPLES = 10_000

_UNSUPPORTED = frozenset(
    (
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "propertyNames",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicRef",
        "$recursiveRef",
    )
)
_FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
_OTHER_FORMATS = frozenset(
    (
        "idn-email",
        "idn-hostname",
        "uri-reference",
        "iri",
        "iri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    )
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_SCHEMAS = ("additionalProperties", "additionalItems", "items")
_TYPES = (*((key, Mapping, "an object") for key in _MAPS), ("enum", list, "a list"))
_NO_EFFECT_BESIDE_REF = frozenset(
    ("$ref", "$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "default", "examples")
)
_NEUTRAL: Mapping[str, object] = {"uniqueItems": False, "minContains": 0}


class CheckedSchema(dict[str, Any]):
    """A schema that `checked_schema` has returned."""


def checked_schema(schema: Mapping[str, Any] | bool, *, field: str) -> CheckedSchema:
    """Check a schema and leave out what has no effect: unknown formats, and keywords at their neutral value.

    One that has been checked is returned as it is.

    Args:
        field: of the request body, for messages.
    Raises:
        RequestError: it is too large or too deep, or has a keyword that cannot be enforced; names its path.
    """
    if isinstance(schema, CheckedSchema):
        return schema
    if isinstance(schema, bool):
        if not schema:
            raise RequestError(f"{field}: the schema false allows nothing", field=field)
        return CheckedSchema()
    if not isinstance(schema, Mapping):
        raise RequestError(f"{field}: a schema must be an object, got {type(schema).__name__}", field=field)
    try:
        size = len(json.dumps(schema, ensure_ascii=False))
    except (RecursionError, ValueError, TypeError) as error:
        raise RequestError(f"{field}: the schema is not JSON or too deep: {error}", field=field) from error
    if size > MAX_SCHEMA_BYTES:
        raise RequestError(f"{field}: the schema has {size} bytes; at most {MAX_SCHEMA_BYTES} fit", field=field)
    walk = _Walk(schema, field)
    cleaned = walk.clean(schema, "#", 0)
    walk.check_merged()
    walk.check_levels()
    return CheckedSchema(cleaned)


@dataclass
class _Walk:
    """One pass over a schema."""

    root: Mapping[str, Any]
    field: str
    num_schemas: int = 0
    num_literal_parts: int = 0
    num_combined: int = 0
    multiples: set[int] = dataclasses.field(default_factory=set)
    merging: dict[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)  # path -> schema that merges others
    merged: dict[int, tuple[frozenset[str], int]] = dataclasses.field(default_factory=dict)  # by id, see _merged

    def clean(self, schema: Mapping[str, Any], path: str, depth: int) -> dict[str, Any]:
        self.num_schemas += 1
        if depth > MAX_DEPTH:
            self._refuse(path, f"is nested more than {MAX_DEPTH} levels deep")
        if self.num_schemas > MAX_SCHEMAS:
            self._refuse("#", f"has more than {MAX_SCHEMAS} subschemas")
        if depth and "$id" in schema:
            self._refuse(path, "has an '$id'; only the whole schema may have one")
        self._check_types(schema, path)
        self._check_bounds(schema, path)
        self._check_literals(schema, path)
        if "allOf" in schema or ("$ref" in schema and not _NO_EFFECT_BESIDE_REF.issuperset(schema)):
            self.merging[path] = schema
        cleaned = {key: value for key, value in schema.items() if not self._has_no_effect(key, value, path)}
        for key in _MAPS:
            if isinstance(members := cleaned.get(key), Mapping):
                cleaned[key] = {
                    name: self._member(each, f"{path}/{key}/{name}", depth) for name, each in members.items()
                }
        for key in _LISTS:
            if isinstance(members := cleaned.get(key), list):
                cleaned[key] = [self._member(each, f"{path}/{key}/{i}", depth) for i, each in enumerate(members)]
        for key in _SCHEMAS:
            if isinstance(member := cleaned.get(key), Mapping):
                cleaned[key] = self._member(member, f"{path}/{key}", depth)
        return cleaned

    def check_merged(self) -> None:
        """Bound the patterns that one string must match together: their automata multiply."""
        for path, schema in self.merging.items():
            if (count := self._num_patterns(schema, path)) > MAX_MERGED_PATTERNS:
                self._refuse(
                    path, f"combines {count} patterns by allOf or $ref; at most {MAX_MERGED_PATTERNS} are accepted"
                )

    def check_levels(self) -> None:
        """Bound how deep references lead. All schemas from which a circle can be reached count as a level each."""
        parts: dict[int, list[Mapping[str, Any]]] = {}
        parents: dict[int, list[int]] = {}
        pending = [self.root]
        while pending:
            each = pending.pop()
            if id(each) not in parts:
                parts[id(each)] = self._subschemas(each)
                for part in parts[id(each)]:
                    parents.setdefault(id(part), []).append(id(each))
                pending += parts[id(each)]
        num_open = {key: len(members) for key, members in parts.items()}
        levels = dict.fromkeys(parts, 1)
        done = [key for key, count in num_open.items() if not count]
        for key in done:
            for parent in parents.get(key, ()):
                levels[parent] = max(levels[parent], levels[key] + 1)
                num_open[parent] -= 1
                if not num_open[parent]:
                    done.append(parent)
        if max((levels[key] for key in done), default=0) + len(parts) - len(done) > MAX_LEVELS:
            self._refuse("#", f"is more than {MAX_LEVELS} levels deep with its references")

    def _num_patterns(self, schema: Mapping[str, Any], path: str) -> int:
        """The most patterns that one string in a value may have to match."""
        most, seen, pending = 0, set[frozenset[int]](), [[schema]]
        while pending:
            together = self._together(pending.pop())
            key = frozenset(map(id, together))
            if key in seen:
                continue
            seen.add(key)
            most = max(most, sum(isinstance(each.get("pattern"), str) for each in together))
            # What is inside of a single schema is looked at where that combines others.
            parts = [places for places in _parts(together) if sum(map(len, places)) > 1]
            self.num_combined += len(together) + sum(len(group) for places in parts for group in places)
            if self.num_combined > MAX_COMBINED:
                self._refuse(path, f"combines more than {MAX_COMBINED} subschemas by allOf or $ref")
            pending += [[*own, *shared] for own, shared in parts]
        return most

    def _together(self, schemas: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The schemas of one value, with those that they combine. Alternatives count as if all of them held."""
        found: dict[int, Mapping[str, Any]] = {}
        pending: list[Any] = list(schemas)
        while pending:
            each = pending.pop()
            if isinstance(each, Mapping) and id(each) not in found:
                found[id(each)] = each
                pending.append(self._target(each.get("$ref")))
                for key in ("allOf", "anyOf", "oneOf"):
                    if isinstance(members := each.get(key), list):
                        pending += members
        return list(found.values())

    def _subschemas(self, schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Schemas inside of one, and the one to which it refers."""
        found: list[Any] = [self._target(schema.get("$ref")), *(schema.get(key) for key in _SCHEMAS)]
        for key in _MAPS:
            if isinstance(members := schema.get(key), Mapping):
                found += members.values()
        for key in _LISTS:
            if isinstance(members := schema.get(key), list):
                found += members
        return [each for each in found if isinstance(each, Mapping)]

    def _check_types(self, schema: Mapping[str, Any], path: str) -> None:
        for key, kind, what in _TYPES:
            if key in schema and not isinstance(schema[key], kind):
                self._refuse(path, f"must have {what} as {key!r}, got {type(schema[key]).__name__}")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            self._refuse(path, "must have a list of strings as 'required'")

    def _check_literals(self, schema: Mapping[str, Any], path: str) -> None:
        values = schema.get("enum")
        for value in [*(values if isinstance(values, list) else ()), schema.get("const")]:
            if isinstance(value, str) and len(value) > MAX_LITERAL_CHARS:
                self._refuse(path, f"has a value of {len(value)} characters; at most {MAX_LITERAL_CHARS} are accepted")
            if isinstance(value, Mapping | list):
                self.num_literal_parts += json.dumps(value).count(",") + 1
                if self.num_literal_parts > MAX_LITERAL_PARTS:
                    self._refuse(path, f"has objects and arrays as values with more than {MAX_LITERAL_PARTS} parts")
        multiple = schema.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool) and abs(multiple) < math.inf:
            self.multiples.add(_digits(multiple))
            if sum(self.multiples) > MAX_MULTIPLES:
                self._refuse(
                    path,
                    f"has the 'multipleOf' {multiple}; those of a schema may add up to {MAX_MULTIPLES}, without "
                    "decimal points",
                )

    def _member(self, schema: Any, path: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            self._refuse(path, f"must be a schema, got {type(schema).__name__}")
        return self.clean(schema, path, depth + 1)

    def _has_no_effect(self, key: str, value: Any, path: str) -> bool:
        if key == "x-guidance" or (key in _NEUTRAL and value == _NEUTRAL[key]):
            return True
        if key in _UNSUPPORTED:
            self._refuse(path, f"has the keyword {key!r}, which structured output cannot enforce")
        if key == "$ref" and not (isinstance(value, str) and (value == "#" or value.startswith("#/"))):
            self._refuse(path, f"has a '$ref' to {str(value)[:80]!r}; only references inside the schema are followed")
        if key != "format":
            return False
        if isinstance(value, str) and value in _OTHER_FORMATS:
            self._refuse(path, f"has the 'format' {value!r}; supported are {', '.join(sorted(_FORMATS))}")
        return not isinstance(value, str) or value not in _FORMATS

    def _check_bounds(self, schema: Mapping[str, Any], path: str) -> None:
        optional, _ = self._merged(schema, path)
        for key, count, limit in (
            ("required", _length(schema.get("required")), MAX_REQUIRED),
            ("properties", len(optional), MAX_OPTIONAL),
            ("enum", _length(schema.get("enum")), MAX_VALUES),
            ("anyOf", _length(schema.get("anyOf")), MAX_VALUES),
            ("pattern", _length(schema.get("pattern")), MAX_PATTERN_CHARS),
        ):
            if count > limit:
                what = "optional properties" if key == "properties" else f"entries or characters in {key!r}"
                self._refuse(path, f"has {count} {what}; at most {limit} are accepted")

    def _merged(self, schema: Mapping[str, Any], path: str, depth: int = 0) -> tuple[frozenset[str], int]:
        """Optional properties of one object, with those that allOf and $ref merge into it; and the levels of merging.

        A schema that merges itself has no end of levels.
        """
        if id(schema) in self.merged:
            return self.merged[id(schema)]
        required, properties, parts = (schema.get(key) for key in ("required", "properties", "allOf"))
        names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        optional = frozenset(properties if isinstance(properties, Mapping) else ()) - names
        members = [*(parts if isinstance(parts, list) else ()), self._target(schema.get("$ref"))]
        levels = 0
        for each in members:
            if isinstance(each, Mapping):
                if depth >= MAX_DEPTH:
                    self._refuse(path, f"merges others by allOf or $ref more than {MAX_DEPTH} levels deep")
                found, below = self._merged(each, path, depth + 1)
                optional, levels = optional | found, max(levels, below + 1)
        if levels > MAX_DEPTH:
            self._refuse(path, f"merges others by allOf or $ref more than {MAX_DEPTH} levels deep")
        self.merged[id(schema)] = optional, levels
        return optional, levels

    def _target(self, ref: Any) -> Any:
        found: Any = self.root
        for part in unquote(ref[2:]).split("/") if isinstance(ref, str) and ref.startswith("#/") else ():
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and len(name) < 8:
                found = found[int(name)] if int(name) < len(found) else None
            else:
                found = found.get(name) if isinstance(found, Mapping) else None
        return found if isinstance(ref, str) else None

    def _refuse(self, path: str, what: str) -> None:
        raise RequestError(f"{self.field}: the schema at {path[:300]} {what}", field=self.field)


_Schemas = list[Mapping[str, Any]]


def _parts(together: Sequence[Mapping[str, Any]]) -> list[tuple[_Schemas, _Schemas]]:
    """For each property and item of a value, what its schemas say of it alone and of all properties or items."""
    own: dict[tuple[str, str | int], _Schemas] = {("properties", ""): [], ("items", ""): []}
    shared: dict[str, _Schemas] = {"properties": [], "items": []}
    for each in together:
        patterns, items = _members(each.get("patternProperties")), each.get("items")
        shared["properties"] += [schema for _, schema in [*patterns, *_members([each.get("additionalProperties")])]]
        shared["items"] += [schema for _, schema in _members([items, each.get("additionalItems")])]
        for name, schema in _members(each.get("properties")):
            own.setdefault(("properties", name), []).append(schema)
        for number, schema in [
            *_members(each.get("prefixItems")),
            *(_members(items) if isinstance(items, list) else ()),
        ]:
            own.setdefault(("items", number), []).append(schema)
    return [(schemas, shared[kind]) for (kind, _), schemas in own.items()]


def _members(found: Any) -> list[tuple[Any, Mapping[str, Any]]]:
    """The schemas in an object or a list, with their names or numbers."""
    members = found.items() if isinstance(found, Mapping) else enumerate(found if isinstance(found, list) else ())
    return [(name, schema) for name, schema in members if isinstance(schema, Mapping)]


def _digits(number: int | float) -> int:
    """A number without its decimal point: 12 of 0.12."""
    exact = Decimal(repr(abs(number))).normalize()
    return int(exact.scaleb(-min(int(exact.as_tuple().exponent), 0)))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | str) else 0
