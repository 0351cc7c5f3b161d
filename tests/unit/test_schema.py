"""Request bodies: what is taken, and that each refusal names the field and the limit."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raycache.api import schema
from raycache.api.schema import ChatBody, CompletionBody, parse_body, parse_json
from raycache.errors import RequestError


def completion(**fields: Any) -> CompletionBody:
    return parse_body(CompletionBody, {"model": "m", "prompt": "x", **fields})


def chat(**fields: Any) -> ChatBody:
    return parse_body(ChatBody, {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})


def refused(error: pytest.ExceptionInfo[RequestError]) -> tuple[str | None, str]:
    return error.value.field, str(error.value)


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_is_texts_or_token_ids(sent: Any, taken: Any) -> None:
    assert completion(prompt=sent).prompt == taken


@pytest.mark.parametrize("sent", [[], [[]], [[1], []], [1, True], [1, "a"], [[1.0]], {"a": 1}, 5, [["a"]], [None]])
def test_other_prompts_are_refused(sent: Any) -> None:
    with pytest.raises(RequestError, match="^prompt must") as error:
        completion(prompt=sent)
    assert error.value.field == "prompt"


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"temperature": "0.5"}, "temperature", "valid number"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"max_tokens": 1.0}, "max_tokens", "valid integer"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"max_tokens": -1}, "max_tokens", "0"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"stream": 1}, "stream", "valid boolean"),
        ({"n": 0}, "n", "1"),
        ({"n": 129}, "n", "128"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"stop": ["a"] * 17}, "stop", "16"),
        ({"stop": [1]}, "stop", "string"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids[0]", "valid integer"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "valid number"),
        ({"best_of": 2}, "best_of", "n=1"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "not supported"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"nonsense": 1}, "nonsense", "no effect"),
        ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
        ({"min_length": 1}, "min_length", "no effect"),
        ({"timeout_s": 0}, "timeout_s", "greater than 0"),
        ({"seed": 2**63}, "seed", str(2**63 - 1)),
        ({"model": 1}, "model", "valid string"),
    ],
)
def test_a_wrong_field_is_named_with_its_limit(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RequestError) as error:
        completion(**fields)
    named, text = refused(error)
    assert named == field
    assert field in text
    assert words in text


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"functions": []}, "functions"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_chat_fields_that_cannot_be_served_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as error:
        chat(**fields)
    assert error.value.field == field


_MANY = 100_000


@pytest.mark.parametrize(
    ("fields", "field", "most_errors"),
    [
        ({"messages": [1] * _MANY}, "messages[0]", 1),
        ({"tools": [1] * _MANY}, "tools", 1),
        ({"modalities": ["audio"] * _MANY}, "modalities[0]", 1),
        ({"stop": [1] * _MANY}, "stop", 1),
        ({"stop_token_ids": ["a"] * _MANY}, "stop_token_ids", 1),
        ({"stop_token_ids": ["a"] * 1024}, "stop_token_ids[0]", 1),
        ({"logit_bias": {str(key): "x" for key in range(_MANY)}}, "logit_bias", 1),
        ({"logit_bias": {str(key): "x" for key in range(1024)}}, "logit_bias.0", 1024),
        ({"stream": True, "stream_options": {str(key): 1 for key in range(_MANY)}}, "stream_options", 1),
        ({f"x{key}": 1 for key in range(_MANY)}, "x0", 1),
    ],
)
def test_a_body_that_is_wrong_in_very_many_places_has_few_errors(
    fields: dict[str, Any], field: str, most_errors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    first_error = schema._first_error

    def counted(error: ValidationError, kind: type[schema.StrictBody]) -> RequestError:
        counts.append(error.error_count())
        return first_error(error, kind)

    monkeypatch.setattr(schema, "_first_error", counted)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as refusal:
            chat(**fields)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refusal.value.field == field
    assert len(counts) == 1 and 1 <= counts[0] <= most_errors
    assert peak < 32 * 2**20  # mappings of so many names take most of it


def test_null_is_absent_and_harmless_fields_are_taken() -> None:
    body = chat(
        temperature=None, stop=None, max_tokens=None, user="u", store=False, metadata={}, parallel_tool_calls=True
    )
    assert body.temperature == 1.0
    assert body.stop == []


def test_missing_fields_are_named() -> None:
    with pytest.raises(RequestError, match="prompt is required"):
        parse_body(CompletionBody, {"model": "m"})
    with pytest.raises(RequestError, match="model is required"):
        parse_body(ChatBody, {"messages": []})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b'{"a": NaN}', "not finite"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a": "\\uD800"}', "surrogate"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_bodies_that_are_not_json_objects_are_refused(body: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_json(body)


@given(st.binary(max_size=60))
def test_any_bytes_are_taken_or_refused(body: bytes) -> None:
    try:
        parse_json(body)
    except RequestError as error:
        assert error.message


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=5,
)


@given(name=st.sampled_from([*CompletionBody.model_fields, *ChatBody.model_fields]), value=_JSON)
def test_any_value_of_any_field_is_taken_or_refused(name: str, value: Any) -> None:
    for kind, base in ((CompletionBody, {"prompt": "x"}), (ChatBody, {"messages": [{"role": "user", "content": "x"}]})):
        try:
            parse_body(kind, {"model": "m", **base, name: value})
        except RequestError as error:
            assert error.message
            assert error.field


def test_escaped_text_outside_the_basic_plane_is_taken() -> None:
    assert parse_json(json.dumps({"a": "🎉"}).encode()) == {"a": "🎉"}
