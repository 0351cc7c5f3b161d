"""Fields of other servers at the value that asks for nothing, and at others."""

from __future__ import annotations

from typing import Any

import pytest

from raycache.api.neutral import NEUTRAL
from raycache.api.schema import ChatBody, CompletionBody, GenerationBody, parse_body
from raycache.errors import RequestError

_CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
_COMPLETION = {"model": "m", "prompt": "x"}
_BODIES: list[tuple[type[GenerationBody], dict[str, Any]]] = [(ChatBody, _CHAT), (CompletionBody, _COMPLETION)]


@pytest.mark.parametrize(("kind", "body"), _BODIES)
def test_a_neutral_value_changes_nothing(kind: type[GenerationBody], body: dict[str, Any]) -> None:
    for name, values in NEUTRAL.items():
        for value in (*values, None):
            assert parse_body(kind, {**body, name: value}).check() is None
            if name not in kind.model_fields:
                assert parse_body(kind, {**body, name: value}) == parse_body(kind, body)


@pytest.mark.parametrize(("kind", "body"), _BODIES)
def test_any_other_value_is_refused_by_name(kind: type[GenerationBody], body: dict[str, Any]) -> None:
    for name in NEUTRAL:
        if name in kind.model_fields:
            continue
        with pytest.raises(RequestError) as error:
            parse_body(kind, {**body, name: {"other": 3}})
        assert error.value.field == name
        assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("fields", [{"typical_p": True}, {"use_beam_search": 0}, {"length_penalty": True}])
def test_a_number_is_no_truth_value(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="not supported"):
        parse_body(CompletionBody, {**_COMPLETION, **fields})


def test_what_published_clients_send_is_taken() -> None:
    beam = {"use_beam_search": False, "length_penalty": 1, "min_tokens": 0, "truncate_prompt_tokens": None}
    parse_body(CompletionBody, {**_COMPLETION, **beam, "top_k": -1, "add_special_tokens": True})
    parse_body(ChatBody, {**_CHAT, **beam, "verbosity": "low", "request_id": "r", "add_special_tokens": False})
    for options in ({"continuous_usage_stats": True}, {"continuous_usage_stats": None, "other": None}):
        parse_body(ChatBody, {**_CHAT, "stream": True, "stream_options": options})
