"""Grammars for structured output, as texts in llguidance's dialect of Lark.

    client asks for              text for SamplingParams.grammar
    a JSON object                start: %json {"type": "object"}
    "yes" or "no"                start: "yes" | "no"
    either, after thinking       start: thinking answer ...

The functions are pure and refuse by name what cannot be done. A `GrammarChecker` then compiles a text with the model's
tokens, before its request waits in a queue.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

from raycache.api.formats.grammar import GrammarText, literal
from raycache.api.json_schemas import MAX_LITERAL_CHARS, checked_schema
from raycache.api.tokenizer import Tokenizer
from raycache.errors import RequestError

MAX_GRAMMAR_BYTES = 1 << 20
MAX_LARK_BYTES = 1 << 16
MAX_RULES = 1_000  # the compiler recurses, and at some 3,000 its stack overflows
MAX_RULES_AND_GROUPS = 2_000  # groups are levels, too
MAX_PATTERN_CHARS = 10_000
MAX_CHOICES = 10_000

_ONE_LINE = {"whitespace_flexible": False}
_SPACED = {"whitespace_pattern": r"(\n {0,24})?", "key_separator": ": ?", "item_separator": ", ?"}
"""A blank after colons and commas, and line breaks with an indentation. Bounded: a model may otherwise write blanks
until max_tokens."""

_INNER = "constrained_answer"
_INNER_NAMES = re.compile(_INNER + "_*")
_IS_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:)", re.MULTILINE)
_EMBEDDED = re.compile(r"%json\s*\{")
_LARK_WORDS = re.compile(
    r"""
    (?P<kept> "(?:\\.|[^"\\\n])*"i? | //[^\n]* | \#[^\n]* | /(?:\\.|[^/\\\n])+/[imslux]* )
    | (?<![\w@-]) (?P<start> start ) (?![\w-])
    """,
    re.VERBOSE,
)


def json_object() -> str:
    """Any JSON object."""
    return _start(json_rule({"type": "object"}))


def json_schema(schema: Mapping[str, Any] | bool, *, field: str = "response_format", is_compact: bool = False) -> str:
    """JSON texts that are valid under a schema.

    Args:
        field: of the request body, for messages.
        is_compact: without any white space between tokens; by default a little is allowed.
    Raises:
        RequestError: the schema is too large, or has a keyword that cannot be enforced; names its path.
    """
    return _start(json_rule(schema, field=field, is_compact=is_compact))


def json_rule(schema: Mapping[str, Any] | bool, *, field: str = "response_format", is_compact: bool = False) -> str:
    """The same as an expression for the right side of a rule, to be written into a larger grammar."""
    cleaned = checked_schema(schema, field=field)
    options = _ONE_LINE if is_compact else _SPACED
    return "%json " + json.dumps({**cleaned, "x-guidance": options}, ensure_ascii=False)


class TokenizerWords:
    """How a model's vocabulary stands in a grammar, see `formats.grammar.Words`.

    Args:
        field: of the request body that has the schemas, for messages.
    """

    def __init__(self, tokenizer: Tokenizer, *, field: str) -> None:
        self._tokenizer, self._field = tokenizer, field

    def token(self, text: str) -> str:
        """Expression for a token of its own, or "" if the text is none."""
        token_id = self._tokenizer.token_id(text)
        return "" if token_id is None else f"<[{token_id}]>"

    def json(self, schema: Mapping[str, Any]) -> str:
        """Expression for JSON texts that are valid under a schema."""
        return json_rule(schema, field=self._field)


def mark(text: str, tokenizer: Tokenizer) -> str:
    """A mark such as <tool_call> as an expression: its tokens, where the tokenizer has some, and the text between.

    Free text has none of these tokens, whether the tokenizer calls them special or not.
    """
    return GrammarText({}, TokenizerWords(tokenizer, field="")).mark(text)


def regex(pattern: str, *, field: str = "structured_outputs.regex") -> str:
    """Texts that match a regular expression as a whole.

    Raises:
        RequestError: it is empty or too long.
    """
    if not pattern:
        raise RequestError(f"{field} must not be empty", field=field)
    if len(pattern) > MAX_PATTERN_CHARS:
        raise RequestError(
            f"{field} has {len(pattern)} characters; at most {MAX_PATTERN_CHARS} are accepted", field=field
        )
    return f"start: TEXT\nTEXT: /{_escaped(pattern)}/\n"


def lark(text: str, *, field: str = "structured_outputs.grammar") -> str:
    """Texts of a grammar that the client wrote, in Lark's notation or in EBNF as llama.cpp reads it (`root ::= ...`).

    Raises:
        RequestError: it is empty, too long, EBNF that cannot be converted, or has a JSON schema that cannot be
            enforced.
    """
    if not text.strip():
        raise RequestError(f"{field} must not be empty", field=field)
    check_size(text, field, limit=MAX_LARK_BYTES)
    if (num_rules := sum(":" in line for line in text.splitlines())) > MAX_RULES:
        raise RequestError(f"{field} has {num_rules} rules; at most {MAX_RULES} are accepted", field=field)
    if (size := num_rules + text.count("(") + text.count("[")) > MAX_RULES_AND_GROUPS:
        raise RequestError(
            f"{field} has {size} rules and groups; at most {MAX_RULES_AND_GROUPS} are accepted", field=field
        )
    for found in _EMBEDDED.finditer(text):
        _check_embedded(text[found.end() - 1 :], field)
    if "::=" not in text or _IS_LARK.search(text):
        return text
    try:
        converted: str = gbnf_to_lark(text)
    except Exception as error:  # it raises whatever its parser runs into
        raise RequestError(f"{field} is not a grammar in EBNF: {error}", field=field) from error
    return converted


def choice(options: Sequence[str], *, field: str = "structured_outputs.choice") -> str:
    """One of several texts.

    Raises:
        RequestError: there are none or too many, or one is empty or too long.
    """
    if not options or len(options) > MAX_CHOICES:
        raise RequestError(f"{field} must have 1 to {MAX_CHOICES} texts, got {len(options)}", field=field)
    if not all(options):
        raise RequestError(f"{field} must not contain an empty text", field=field)
    if (longest := max(map(len, options))) > MAX_LITERAL_CHARS:
        raise RequestError(
            f"{field} has a text of {longest} characters; at most {MAX_LITERAL_CHARS} are accepted", field=field
        )
    return _start(" | ".join(map(literal, dict.fromkeys(options))))


def free_text(marks: frozenset[int]) -> str:
    """Any text, with these special tokens in it."""
    return _start("(TEXT" + "".join(f" | <[{token_id}]>" for token_id in sorted(marks)) + ")*") + "TEXT: /(?s:.+)/\n"


def after_reasoning(
    grammar: str, close_mark: str, *, tokenizer: Tokenizer, open_mark: str = "", budget: int | None = None
) -> str:
    """Free text up to the mark that closes the reasoning, then what the grammar allows.

    Args:
        close_mark: such as "</think>".
        open_mark: of a model that begins the reasoning itself; it may leave the reasoning out. "": the prompt ends
            inside of the reasoning.
        budget: most tokens of reasoning, after which only the mark is allowed; None: as many as the model likes.
    Raises:
        RequestError: there is a budget, and the mark is not one token of this model.
    """
    close = mark(close_mark, tokenizer)
    if budget is not None and not close.startswith("<["):
        raise RequestError(
            f"a reasoning budget needs a model that has {close_mark!r} as a single token; leave the budget out",
            field="thinking_token_budget",
        )
    if close.startswith("<["):
        limit = "" if budget is None else f"[max_tokens={max(budget, 1)}]"
        opening = "" if budget == 0 else "reasoning_text "
        rules = f"{opening}{close}\n" + (f"reasoning_text{limit}: /(?s:.*)/\n" if opening else "")
    else:
        rules = f"reasoning_text\nreasoning_text[suffix={literal(close_mark)}]: /(?s:.*)/\n"
    head, _, rest = rules.partition("\n")
    head = f"{head} /[ \\n]{{0,4}}/"
    if open_mark:
        head = f"({mark(open_mark, tokenizer)} {head})?"
    name, inner = _inner(grammar)
    return f"start: {head} {name}\n{rest}{inner}"


def either(first: str, second: str) -> str:
    """What one of two grammars allows. The names of their rules must differ, but for `start`."""
    name, inner = _inner(first)
    other, outer = _inner(second, taken=inner)
    return f"start: {name} | {other}\n{inner}{outer}"


def framed(grammar: str, before: str, behind: str) -> str:
    """What a grammar allows, between two expressions."""
    name, inner = _inner(grammar)
    return f"start: {before} {name} {behind}\n{inner}"


def at_start(grammar: str, tokenizer: Tokenizer) -> str:
    """Let an output begin with a blank, where it belongs to the first token of a text as it does in SentencePiece."""
    return framed(grammar, '" "?', "") if tokenizer.pieces.strip_start else grammar


def check_size(text: str, field: str, *, limit: int = MAX_GRAMMAR_BYTES) -> None:
    """Refuse a grammar that is too large.

    Raises:
        RequestError: it has more than `limit` bytes.
    """
    size = len(text.encode(errors="replace"))
    if size > limit:
        raise RequestError(f"{field} has {size} bytes; at most {limit} are accepted", field=field)


def _start(expression: str) -> str:
    return f"start: {expression}\n"


def _inner(grammar: str, *, taken: str = "") -> tuple[str, str]:
    """The grammar with a name for its rule `start` that neither it nor `taken` has, and that name."""
    found = _INNER_NAMES.findall(grammar) + _INNER_NAMES.findall(taken)
    name = max(found, key=len) + "_" if found else _INNER
    return name, _LARK_WORDS.sub(lambda found: found["kept"] or name, grammar)


def _escaped(pattern: str) -> str:
    """A regular expression as it stands between slashes."""
    found = re.sub(r"\\.|/", lambda each: r"\/" if each[0] == "/" else each[0], pattern, flags=re.DOTALL)
    return found.replace("\n", r"\n").replace("\r", r"\r")


def _check_embedded(text: str, field: str) -> None:
    """Check the JSON schema with which a text begins; one that is not JSON is left to the compiler."""
    try:
        schema, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return
    checked_schema(schema, field=field)
