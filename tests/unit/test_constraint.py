"""Grammars of structured output against re and jsonschema: random texts that they allow are valid."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from raycache.api import constraint
from raycache.api.formats.families import FAMILIES
from raycache.api.tokenizer import Tokenizer
from raycache.errors import RequestError
from raycache.vocabulary.grammar_check import problem
from raycache.vocabulary.grammar_tokens import grammar_tokens
from tests.oracle import tiny_kimi, tiny_sentencepiece, tiny_tokenizers
from tests.unit.test_tekken import written as tekken

TOKENIZERS: dict[str, Callable[[Path], object]] = {
    "byte level": tiny_tokenizers.byte_level,
    "byte fallback": tiny_tokenizers.byte_fallback,
    "sentencepiece": tiny_sentencepiece.write,
    "tiktoken": tiny_kimi.write,
    "tekken": tekken,
}
MORE_LOGITS = 5


@pytest.fixture(scope="module", params=TOKENIZERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZERS[request.param](folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def table(tokenizer: Tokenizer) -> LLTokenizer:
    return table_of(tokenizer)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte level, with marks that are tokens and not called special."""
    folder = tiny_tokenizers.byte_level(tmp_path_factory.mktemp("plain"))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(
        [
            tokenizers.AddedToken(text, special=False)
            for text in ("</seed:think>", "[/THINK]", "<tool_call>", "</tool_call>")
        ]
    )
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def table_of(tokenizer: Tokenizer) -> LLTokenizer:
    assert tokenizer.eos_id is not None
    size = tokenizer.vocab_size + MORE_LOGITS
    return grammar_tokens(tokenizer.vocabulary, num_logits=size, eos_token_ids=[tokenizer.eos_id])


def matcher(grammar: str, table: LLTokenizer) -> LLMatcher:
    made = LLMatcher(table, grammar, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def allowed(state: LLMatcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(state.compute_bitmask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def accepts(grammar: str, table: LLTokenizer, text: str) -> bool:
    state = matcher(grammar, table)
    ids = table.tokenize_str(text)
    return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


def walk(grammar: str, tokenizer: Tokenizer, table: LLTokenizer, *, seed: int, most: int = 400) -> str | None:
    """A random text that the grammar allows, as the tokenizer decodes it; None if it got too long."""
    state, dice, ids = matcher(grammar, table), random.Random(seed), list[int]()
    closers = {i for i in range(tokenizer.vocab_size) if tokenizer.pieces[i].strip() in (b'"', b"}", b"]", b'"}')}
    for _ in range(most):
        choices = allowed(state)
        assert choices and not state.is_error(), state.get_error()
        if tokenizer.eos_id in choices and (len(choices) == 1 or dice.random() < 0.3):
            return b"".join(map(tokenizer.pieces.__getitem__, ids)).decode()
        likely = [i for i in choices if i in closers]
        token = dice.choice(likely if likely and dice.random() < 0.5 else choices)
        ids.append(token)
        assert state.consume_token(token)
    return None


# --- JSON -------------------------------------------------------------------------------------------------------------

TEXT = {"type": "string", "maxLength": 6}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "required": ["a"], "additionalProperties": False},
    {
        "type": "array",
        "items": {"type": "integer", "minimum": -3, "exclusiveMaximum": 20},
        "minItems": 1,
        "maxItems": 4,
    },
    {"anyOf": [{"type": "null"}, {"type": "number", "multipleOf": 5}, {"enum": ["x", 2, None, True]}]},
    {"type": "string", "pattern": "^[a-f]{2,4}(-[0-9]+)?$", "maxLength": 9},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"oneOf": [{"type": "boolean"}, {"type": "string", "minLength": 1, "maxLength": 2}]},
    {
        "$defs": {"node": {"type": "object", "properties": {"v": {"const": 7}, "next": {"$ref": "#/$defs/node"}}}},
        "$ref": "#/$defs/node",
    },
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "string", "format": "int64", "maxLength": 3}}, "required": ["b"]},
        ]
    },
    {"type": "array", "prefixItems": [TEXT, {"type": "boolean"}], "items": False, "uniqueItems": False},
    {"type": "object", "patternProperties": {"^k[0-9]$": TEXT}, "additionalProperties": False, "minProperties": 1},
    {"type": ["string", "null"], "maxLength": 3, "title": "x", "description": "start", "x-guidance": {"lenient": True}},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
@pytest.mark.parametrize("is_compact", [False, True])
def test_random_texts_of_a_schema_are_valid(plain: Tokenizer, schema: dict[str, Any], is_compact: bool) -> None:
    table = table_of(plain)
    grammar = constraint.json_schema(schema, is_compact=is_compact)
    texts = [walk(grammar, plain, table, seed=seed) for seed in range(12)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= 3
    for text in ended:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
        assert not re.search(r"\s{26}", text)
        assert not is_compact or json.dumps(json.loads(text), separators=(",", ":")).count(" ") == text.count(" ")


def test_a_text_is_followed_as_the_tokenizer_writes_it(tokenizer: Tokenizer, table: LLTokenizer) -> None:
    """With every kind of vocabulary: where a grammar forces a text, its mask holds what the tokenizer takes."""
    schema = {"type": "object", "properties": {"the quick": {"type": "string"}}, "required": ["the quick"]}
    text = '{"the quick": "brown fox"}'
    inner = tokenizer.encode("\x02" + text, add_special_tokens=False)[len(table.tokenize_str("\x02")) :]
    ids = inner if tokenizer.decode(inner) == text else table.tokenize_str(text)
    state = matcher(constraint.json_schema(schema), table)
    for token in ids:
        assert token in allowed(state)
        assert state.consume_token(token)
    assert allowed(state) == [tokenizer.eos_id]


def test_tokens_of_the_table_are_those_of_the_tokenizer(tokenizer: Tokenizer, table: LLTokenizer) -> None:
    assert table.vocab_size >= tokenizer.vocab_size + MORE_LOGITS
    assert table.eos_tokens == [tokenizer.eos_id]
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.pieces[token]
        if piece and piece != b"\xff" and not tokenizer.is_special(token):
            assert table.decode_bytes([token]) == piece
            assert not table.is_special_token(token)


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"not": {}}, "at # has the keyword 'not'"),
        (
            {"properties": {"a": {"items": {"uniqueItems": True}}}},
            "at #/properties/a/items has the keyword 'uniqueItems'",
        ),
        ({"anyOf": [{}, {"if": {}, "then": {}}]}, "at #/anyOf/1 has the keyword 'if'"),
        ({"$defs": {"x": {"contains": {}}}}, "at #/$defs/x has the keyword 'contains'"),
        (
            {"additionalProperties": {"dependentRequired": {}}},
            "at #/additionalProperties has the keyword 'dependentReq",
        ),
        ({"prefixItems": [{"propertyNames": {}}]}, "at #/prefixItems/0 has the keyword 'propertyNames'"),
        ({"items": [{"$ref": "https://example.com/x"}]}, "at #/items/0 has a '$ref' to 'https://example.com/x'"),
        ({"properties": {"u": {"format": "iri"}}}, "at #/properties/u has the 'format' 'iri'"),
        ({"properties": {"u": 5}}, "at #/properties/u must be a schema, got int"),
        ({"enum": list(range(10_001))}, "has 10001 entries"),
        ({"pattern": "a" * 10_001}, "has 10001 entries or characters in 'pattern'"),
        ({"properties": {str(i): {} for i in range(501)}}, "has 501 optional properties; at most 500"),
        (
            {"allOf": [{"properties": {f"{j}{i}": {} for i in range(200)}} for j in "abc"]},
            "has 600 optional properties",
        ),
        ({"required": [str(i) for i in range(2001)]}, "has 2001 entries or characters in 'required'"),
        ({"anyOf": [{"anyOf": [{}] * 150}] * 150}, "has more than 20000 subschemas"),
        ({"description": "a" * (1 << 20)}, "bytes; at most"),
        (False, "allows nothing"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema: Any, what: str) -> None:
    with pytest.raises(RequestError, match=re.escape(what)) as error:
        constraint.json_schema(schema, field="tools[0].function.parameters")
    assert error.value.field == "tools[0].function.parameters"
    assert error.value.message.startswith("tools[0].function.parameters: ")


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


def test_a_schema_may_be_as_deep_as_it_can_be_compiled(plain: Tokenizer) -> None:
    matcher(constraint.json_schema(nested(60)), table_of(plain))
    with pytest.raises(RequestError, match="nested more than 60 levels deep"):
        constraint.json_schema(nested(61))
    with pytest.raises(RequestError, match="not JSON or too deep"):
        constraint.json_schema(nested(100_000))


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"[a-c]{2}|x/y", ["ab", "x/y", "abc", "x", ""]),
        (r"^\d{3}-\w+$", ["123-ab_1", "12-a", "123-"]),
        (r"a\/b[/\n]", ["a/b/", "a/b\n", "a/b"]),
        ("a\nb", ["a\nb", "a", "ab"]),
        (r"(?i)yes|no", ["YES", "no", "maybe"]),
        (r"\"[^\"]*\"", ['"x"', '""', '"']),
        (r"a.c", ["abc", "a\nc", "aéc"]),
    ],
)
def test_a_pattern_allows_what_re_matches_as_a_whole(plain: Tokenizer, pattern: str, texts: list[str]) -> None:
    table, grammar = table_of(plain), constraint.regex(pattern)
    assert [accepts(grammar, table, text) for text in texts] == [
        re.fullmatch(pattern, text) is not None for text in texts
    ]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\xff"), min_size=1), min_size=1, max_size=5))
def test_every_choice_is_allowed_and_its_halves_are_not(plain_table: LLTokenizer, options: list[str]) -> None:
    grammar = constraint.choice(options)
    for text in options:
        assert accepts(grammar, plain_table, text)
        assert text[:-1] in options or not accepts(grammar, plain_table, text[:-1])
        assert text + "x" in options or not accepts(grammar, plain_table, text + "x")


@pytest.fixture(scope="module")
def plain_table(plain: Tokenizer) -> LLTokenizer:
    return table_of(plain)


def test_grammars_in_lark_and_ebnf(plain_table: LLTokenizer) -> None:
    for text in ('start: "a" b\nb: /[0-9]+/', 'root ::= "a" b\nb ::= [0-9]+'):
        grammar = constraint.lark(text)
        assert [accepts(grammar, plain_table, each) for each in ("a12", "a", "b1")] == [True, False, False]
    with pytest.raises(RequestError, match="not a grammar in EBNF"):
        constraint.lark('root ::= "a" )')


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: constraint.regex(""), "must not be empty"),
        (lambda: constraint.regex("a" * 10_001), "has 10001 characters"),
        (lambda: constraint.lark(" \n"), "must not be empty"),
        (lambda: constraint.lark("start: " + '"a"' * (1 << 20)), "bytes; at most 65536"),
        (lambda: constraint.choice([]), "must have 1 to 10000 texts, got 0"),
        (lambda: constraint.choice(["a", ""]), "must not contain an empty text"),
    ],
)
def test_values_without_sense_are_refused(call: Callable[[], str], what: str) -> None:
    with pytest.raises(RequestError, match=what) as error:
        call()
    assert str(error.value.field).startswith("structured_outputs.")


# --- around the answer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["</think>", "<|im_start|>", "</seed:think>", "[/THINK]"])
@pytest.mark.parametrize(
    "answer",
    [
        constraint.choice(["yes", "start"]),
        'start: A again? // start\nA: /start/ | "yes"\nagain: "+" start',
        constraint.json_schema({"properties": {"start": {"enum": ["yes"]}}, "required": ["start"]}),
    ],
)
def test_reasoning_is_free_and_the_answer_behind_it_is_not(plain: Tokenizer, mark: str, answer: str) -> None:
    table = table_of(plain)
    grammar = constraint.after_reasoning(answer, mark, tokenizer=plain)
    good = '{"start": "yes"}' if "%json" in answer else "start"
    for thought in ("", "the fox? yes", "</thin"):
        for gap in ("", "\n\n"):
            for text in (good, "no"):
                ids = plain.encode(f"{thought}{mark}{gap}{text}", add_special_tokens=False)
                state = matcher(grammar, table)
                is_right = state.try_consume_tokens(ids) == len(ids) and state.is_accepting()
                assert is_right == (text == good), (thought, gap, text)
    state = matcher(grammar, table)
    assert plain.eos_id not in allowed(state)


@pytest.mark.parametrize("mark", ["<|im_start|>", "</seed:think>", "[/THINK]"])
def test_a_budget_ends_the_reasoning(plain: Tokenizer, mark: str) -> None:
    table = table_of(plain)
    for budget in (0, 1, 3):
        state = matcher(constraint.after_reasoning('start: "a"', mark, tokenizer=plain, budget=budget), table)
        for _ in range(budget):
            assert len(allowed(state)) > 100
            assert state.consume_token(plain.encode("a", add_special_tokens=False)[0])
        assert allowed(state) == [plain.token_id(mark)]
    with pytest.raises(RequestError, match="as a single token") as error:
        constraint.after_reasoning('start: "a"', "</think>", tokenizer=plain, budget=3)
    assert error.value.field == "thinking_token_budget"


def test_marks_are_tokens_where_the_tokenizer_has_them(plain: Tokenizer) -> None:
    table = table_of(plain)
    grammar = f'start: {constraint.mark("<|im_start|>", plain)} {constraint.mark("<tool>", plain)} "a"\n'
    ids = plain.encode("<|im_start|><tool>a", add_special_tokens=False)
    assert matcher(grammar, table).try_consume_tokens(ids) == len(ids)
    assert matcher(grammar, table).try_consume_tokens(plain.encode("<", add_special_tokens=False)) == 0


@pytest.mark.parametrize("is_required", [False, True])
def test_calls_may_begin_with_tokens_that_are_not_called_special(plain: Tokenizer, is_required: bool) -> None:
    """As in Qwen's tokenizers."""
    (hermes,) = (family.format for family in FAMILIES if family.format.name == "hermes")
    tools = {"now": {"type": "object", "properties": {}, "additionalProperties": False}}
    words = constraint.TokenizerWords(plain, field="tools")
    grammar = hermes.grammar(tools, words=words, prompt_tail="", is_required=is_required)
    for arguments, is_right in (("{}", True), ("{1}", False)):
        text = f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>'
        ids = plain.encode(text, add_special_tokens=False)
        assert plain.token_id("<tool_call>") in ids
        state = matcher(grammar, table_of(plain))
        assert (state.try_consume_tokens(ids) == len(ids) and state.is_accepting()) == is_right


def test_an_answer_may_begin_with_the_blank_of_a_first_token(tokenizer: Tokenizer, table: LLTokenizer) -> None:
    grammar = constraint.at_start(constraint.choice(["the dog"]), tokenizer)
    assert accepts(grammar, table, "the dog")
    assert accepts(grammar, table, " the dog") == bool(tokenizer.pieces.strip_start)


# --- the check --------------------------------------------------------------------------------------------------------


def test_members_of_one_of_must_exclude_each_other(plain_table: LLTokenizer) -> None:
    kinds = [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"]
    assert problem(constraint.json_schema({"oneOf": kinds}), plain_table) == ""
    assert "use anyOf" in problem(constraint.json_schema({"oneOf": [{"type": "number"}, {"minimum": 3}]}), plain_table)


_CPU_S = 10.0  # each takes at most 0.2 s; a busy machine doubles CPU time, too

HOSTILE = [
    constraint.regex("((a{1,1000}){1,1000}){1,1000}b"),
    constraint.regex("(.*a){50}"),
    constraint.regex("(a|b)*a(a|b){30}"),
    constraint.json_schema({"properties": {f"property {i}": {"type": "string"} for i in range(500)}}),
    constraint.json_schema({"anyOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(500)]}),
    constraint.json_schema({"enum": [f"value {i}" for i in range(10_000)]}),
    constraint.json_schema(
        {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(20)} | {"$defs": {}}}
    ),
]


@pytest.mark.parametrize("grammar", HOSTILE, ids=lambda text: text[:40])
def test_hostile_grammars_take_little_time(plain_table: LLTokenizer, grammar: str) -> None:
    begin = time.process_time()
    problem(grammar, plain_table)
    assert time.process_time() - begin < _CPU_S
