"""Grammars that would keep a server busy: each is refused, or compiled and followed, in little CPU time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from llguidance import LLTokenizer

from raycache.api import constraint
from raycache.api.tokenizer import Tokenizer
from raycache.errors import RequestError
from raycache.vocabulary.grammar_check import problem
from raycache.vocabulary.grammar_tokens import plain_table, token_pieces
from tests.oracle import tiny_tokenizers

_CPU_S = 5.0  # what it guards against takes from seven seconds to for ever; a busy machine doubles CPU time, too


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))
    assert tokenizer.eos_id is not None
    size = tokenizer.vocab_size
    return plain_table(
        token_pieces(tokenizer.vocabulary, num_logits=size),
        special_ids=tokenizer.vocabulary.special_ids,
        eos_token_ids=[tokenizer.eos_id],
    )


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _refs(kind: str, count: int, **leaf: Any) -> dict[str, Any]:
    """Each definition refers to the next one twice."""
    chain = {f"d{i}": {kind: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(count)}
    return {"$defs": {**chain, f"d{count}": leaf}, "$ref": "#/$defs/d0"}


def _chain(count: int) -> dict[str, Any]:
    return {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)} | {f"d{count}": {}}


def _rules(count: int, opening: str, closing: str) -> str:
    chain = "".join(f'a{i}: {opening}a{i + 1} | "x"{closing}\n' for i in range(count))
    return f'start: a0\n{chain}a{count}: "y"'


def _array(depth: int) -> list[Any]:
    return [_array(depth - 1)] if depth else []


_PATTERNS = [{"type": "string", "pattern": f".*{chr(97 + i)}.{{{i}}}b.*"} for i in range(20)]
_SCHEMAS: dict[str, Any] = {
    "references that double": _refs("anyOf", 40, type="integer"),
    "objects that double": {
        "$defs": {f"d{i}": _object(a={"$ref": f"#/$defs/d{i + 1}"}, b={"$ref": f"#/$defs/d{i + 1}"}) for i in range(40)}
        | {"d40": {}},
        "$ref": "#/$defs/d0",
    },
    "alternatives that multiply": {
        "allOf": [{"anyOf": [_object(**{f"p{i}_{j}": {}}) for j in range(12)]} for i in range(12)]
    },
    "merged patterns": {"allOf": _PATTERNS},
    "patterns merged by references": {
        "$defs": {
            f"d{i}": {**pattern, **({"$ref": f"#/$defs/d{i + 1}"} if i < 19 else {})}
            for i, pattern in enumerate(_PATTERNS)
        },
        "$ref": "#/$defs/d0",
    },
    "merged properties": {"allOf": [_object(a=pattern) for pattern in _PATTERNS]},
    "merged additional properties": {"allOf": [{"additionalProperties": pattern} for pattern in _PATTERNS]},
    "merged items": {"allOf": [{"type": "array", "items": pattern} for pattern in _PATTERNS]},
    "merged first items": {"allOf": [{"prefixItems": [{}, pattern]} for pattern in _PATTERNS]},
    "properties of many schemas": {
        "allOf": [
            {"properties": {f"p{i}_{j}": {} for j in range(10)}, "additionalProperties": {"type": "string"}}
            for i in range(1_000)
        ]
    },
    "properties that multiply": {
        "$defs": {
            f"d{i}": {"allOf": [_object(**{f"p{j}": {"$ref": f"#/$defs/d{j}"} for j in range(12)})] * 2}
            for i in range(12)
        },
        "$ref": "#/$defs/d0",
    },
    "multiples": _object(**{f"p{i}": {"type": "integer", "multipleOf": 9_973 - i} for i in range(200)}),
    "a large multiple": {"type": "integer", "multipleOf": 10_007},
    "multiples that are none": _object(a={"multipleOf": True}, b={"multipleOf": 1e999}, c={"multipleOf": "x"}),
    "a fraction's multiple": {"type": "number", "multipleOf": 1.00007},
    "objects as values": {"enum": [{"a": i, "b": [i] * 5} for i in range(9_000)]},
    "an array as a value": {"const": list(range(60_000))},
    "a long value": {"const": "x" * 500_000},
    "5,000 optional properties": _object(**{f"p{i}": {"type": "string"} for i in range(5_000)}),
    "optional properties, nested": _object(**{f"o{i}": _object(**{key: {} for key in "abcdefgh"}) for i in range(499)}),
    "its own definition": {"$ref": "#"},
    "its own part": {"allOf": [{"$ref": "#"}]},
    "large bounds": {"type": "array", "minItems": 10**9, "items": {"type": "string", "minLength": 10**9}},
    "integers of 1,000 digits": {"type": "integer", "minimum": 10**1000},
    "a chain of references": {"$defs": _chain(2000), "$ref": "#/$defs/d0"},
    "a chain of references from its end": {"$defs": dict(reversed(_chain(2000).items())), "$ref": "#/$defs/d0"},
    "a chain of properties": {
        "$defs": {f"d{i}": _object(a={"$ref": f"#/$defs/d{i + 1}"}) for i in range(2000)} | {"d2000": {}},
        "allOf": [{"$ref": "#/$defs/d0"}],
    },
    "a chain of properties, quoted": {
        "$defs": {f"d{i}": _object(a={"$ref": f"#/%24defs/d{i + 1}"}) for i in range(2000)} | {"d2000": {}},
        "$ref": "#/$defs/d0",
    },
    "a chain in a list": {
        "anyOf": [_object(a={"$ref": f"#/anyOf/{i + 1}"}) for i in range(2000)] + [{}],
    },
    "a circle of properties": {
        "$defs": {f"d{i}": _object(a={"$ref": f"#/$defs/d{(i + 1) % 2000}"}) for i in range(2000)},
        "$ref": "#/$defs/d0",
    },
    "a deep value": {"allOf": [{"type": "array"}], "const": _array(700)},
    "references to many properties": {
        "anyOf": [{"$ref": "#/$defs/x"} for _ in range(2_000)],
        "$defs": {"x": {**_object(**{f"p{i}": {} for i in range(2_400)}), "required": [f"p{i}" for i in range(2_000)]}},
    },
    "references to many members": _object(**{f"p{i}": {"$ref": "#/$defs/x"} for i in range(400)})
    | {"$defs": {"x": {"allOf": [_object(a={}) for _ in range(5_000)]}}},
}
_TEXTS: dict[str, Callable[[], str]] = {
    "counted repetitions": lambda: constraint.regex("((a{1,1000}){1,1000}){1,1000}b"),
    "many stars": lambda: constraint.regex("(.*a){50}"),
    "far behind": lambda: constraint.regex("(a|b)*a(a|b){3000}"),
    "many options": lambda: constraint.regex("a?" * 2000 + "a" * 2000),
    "a rule that is itself": lambda: constraint.lark("start: start"),
    "rules in a circle": lambda: constraint.lark("start: a\na: b\nb: a"),
    "ambiguous rules": lambda: constraint.lark('start: start start start | "a" | ""'),
    "deep parentheses": lambda: constraint.lark("start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "alternatives": lambda: constraint.lark("start: " + " | ".join(f'"{i}x"' for i in range(80_000))),
    "alternatives in EBNF": lambda: constraint.lark("root ::= " + " | ".join(f'"{i}x"' for i in range(80_000))),
    "an embedded schema": lambda: constraint.lark(
        'start: %json {"type":"object","properties":{' + ",".join(f'"p{i}":{{}}' for i in range(3000)) + "}}"
    ),
    "a chain of rules": lambda: constraint.lark(
        "start: a0\n" + "".join(f'a{i}: a{i + 1} | "x"\n' for i in range(3_500)) + 'a3500: "y"'
    ),
    "a chain of rules of EBNF": lambda: constraint.lark(
        "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(3_500)) + 'a3500 ::= "y"'
    ),
    "new lines before EBNF": lambda: constraint.lark("\n \t" * 20_000 + 'root ::= "a"'),
    "new lines in a text of EBNF": lambda: constraint.lark('root ::= "' + "\n" * 60_000 + '"'),
    "a long rule's name": lambda: constraint.framed(f'start: "constrained_answer{"_" * 100_000}"', "", ""),
    "a long choice": lambda: constraint.choice(["x" * 500_000]),
}


@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(partial(constraint.json_schema, schema), id=name) for name, schema in _SCHEMAS.items()),
        *(pytest.param(make, id=name) for name, make in _TEXTS.items()),
    ],
)
def test_hostile_grammars_take_little_time(table: LLTokenizer, make: Callable[[], str]) -> None:
    begin_s = time.process_time()
    try:
        assert len(problem(make(), table)) < 1500
    except RequestError as error:
        assert len(str(error)) < 1500
    assert time.process_time() - begin_s < _CPU_S


@pytest.mark.parametrize(
    "make",
    [
        lambda: constraint.choice([f"{i}abc" for i in range(10_000)]),
        lambda: constraint.json_schema(_object(**{f"p{i}": {"type": "string"} for i in range(500)})),
        lambda: constraint.json_schema({"enum": [f"value {i}" for i in range(2_000)]}),
        lambda: constraint.json_schema({"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "z$"}]}),
        lambda: constraint.json_schema({"type": "number", "multipleOf": 0.01}),
        lambda: constraint.lark(_rules(990, "(", ")")),
        lambda: constraint.lark(_rules(990, "[", "]")),
        lambda: constraint.lark(_rules(660, "((", "))")),
        lambda: constraint.json_schema({"allOf": [_object(**{f"p{i}": {"pattern": "^a"} for i in range(50)})]}),
        lambda: constraint.json_schema({"allOf": [_object(**{f"p{i}": {"pattern": "^a"}}) for i in range(50)]}),
        lambda: constraint.json_schema(_object(**{f"p{i}": {"anyOf": [{"$ref": "#"}, {}]} for i in range(200)})),
    ],
)
def test_what_is_within_the_limits_is_accepted(table: LLTokenizer, make: Callable[[], str]) -> None:
    assert problem(make(), table) == ""


@pytest.mark.parametrize("text", ["start: start", "start: a\na: b\nb: a"])
def test_a_grammar_that_allows_nothing_is_refused_before_it_runs(table: LLTokenizer, text: str) -> None:
    assert problem(constraint.lark(text), table)


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"properties": {"a": {}}, "required": True}, "# must have a list of strings as 'required'"),
        ({"properties": {"a": {"required": [1]}}}, "#/properties/a must have a list of strings as 'required'"),
        ({"enum": 5}, "# must have a list as 'enum', got int"),
        ({"properties": 5}, "# must have an object as 'properties', got int"),
        ({"patternProperties": []}, "# must have an object as 'patternProperties', got list"),
        ({"$defs": None}, "# must have an object as '$defs', got NoneType"),
        ({"$defs": _chain(61), "$ref": "#/$defs/d0"}, "# merges others by allOf or $ref more than 60 levels deep"),
        ({"$defs": {"a": {"$id": "http://a.b/c", "$ref": "#/$defs/d"}}}, "#/$defs/a has an '$id'"),
        ({"properties": {"a": {"$ref": "#name"}}}, "#/properties/a has a '$ref' to '#name'"),
        ({"allOf": [{"$ref": "#"}]}, "# merges others by allOf or $ref more than 60 levels deep"),
        ({"allOf": _PATTERNS[:13]}, "# combines 13 patterns by allOf or $ref; at most 12 are accepted"),
        ({"allOf": [_object(a=_object(b=pattern)) for pattern in _PATTERNS]}, "# combines 20 patterns"),
        ({"allOf": [{"additionalProperties": pattern} for pattern in _PATTERNS]}, "# combines 20 patterns"),
        ({"allOf": [{"patternProperties": {"a": pattern}} for pattern in _PATTERNS]}, "# combines 20 patterns"),
        ({"allOf": [{"items": pattern} for pattern in _PATTERNS]}, "# combines 20 patterns"),
        ({"allOf": [{"prefixItems": [{}, pattern]} for pattern in _PATTERNS]}, "# combines 20 patterns"),
        ({"properties": {"x": {"allOf": [{"anyOf": [each]} for each in _PATTERNS]}}}, "#/properties/x combines 20"),
    ],
)
def test_keywords_of_a_wrong_type_and_endless_references_are_refused_by_name(schema: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestError, match=re.escape(f"tools: the schema at {what}")):
        constraint.json_schema(schema, field="tools")


@pytest.mark.parametrize("value", [[], {}, 5, None])
def test_a_format_that_is_no_text_has_no_effect(value: Any) -> None:
    assert constraint.json_schema({"type": "string", "format": value}) == constraint.json_schema({"type": "string"})


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ("a", "b", "constrained_answer | constrained_answer_"),
        ("constrained_answer", "b", "constrained_answer_ | constrained_answer__"),
        ("a", "constrained_answer___ constrained_answer", "constrained_answer | constrained_answer____"),
        ("constrained_answer__ constrained_answer", "b", "constrained_answer___ | constrained_answer____"),
    ],
)
def test_the_name_of_an_inner_rule_is_in_no_text(first: str, second: str, names: str) -> None:
    assert constraint.either(f'start: "{first}"\n', f'start: "{second}"\n').startswith(f"start: {names}\n")


@pytest.mark.parametrize("before", ["", "\n\n", " \n\t\n  ", "// a comment\n\n"])
@pytest.mark.parametrize("head", ['start : "a"', '%llguidance {}\nstart: "a"'])
def test_lark_that_looks_like_ebnf_stays_as_it_is(before: str, head: str) -> None:
    text = f'{before}{head}\n// root ::= "a"'
    assert constraint.lark(text) == text
