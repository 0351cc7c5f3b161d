"""Answers of /v1/messages: what the official client makes of the events, against the whole message."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from raycache.api.formats.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallStart
from raycache.api.messages_form import MessagesForm, error_body
from raycache.api.output_text import OutputText, TextDelta
from raycache.api.prepare import Choice, Generation
from raycache.api.problem import Problem
from raycache.api.schema import ChatBody, parse_body
from raycache.api.tokenizer import Tokenizer
from raycache.types import FinishReason, GenerateRequest, RequestOutput, SamplingParams
from tests.oracle import tiny_tokenizers

ALL: list[Part] = [
    Reasoning("I must look."),
    Content("\n\n"),
    Content("Let me look.\n"),
    ToolCallStart(0, "toolu_0", "weather"),
    ToolCallArguments(0, '{"city": "Zürich", '),
    ToolCallArguments(0, '"tags": ["a", {"b": null}]}'),
    Content("\n"),
    ToolCallStart(1, "toolu_1", "now"),
    Content("Done."),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


def generation(
    tokenizer: Tokenizer, *, prompt_len: int = 100, cached: int = 0, reason: FinishReason = FinishReason.STOP
) -> Generation:
    """One that has ended, after five tokens."""
    sampling = SamplingParams()
    text = OutputText(tokenizer, prompt=[5] * prompt_len, sampling=sampling)
    text.push(RequestOutput("r", (5, 5, 5, 5, 5), cached_tokens=cached, finish_reason=reason))
    request = GenerateRequest("chatcmpl-abc-0", [5] * prompt_len, sampling)
    body = parse_body(ChatBody, {"model": "tiny", "messages": []})
    return Generation("chatcmpl-abc", "tiny", (Choice(0, True, request, text),), body)


def form(found: Generation, *, kept_page_size: int = 16) -> MessagesForm:
    return MessagesForm(found, kept_page_size=kept_page_size)


def streamed(found: Generation, deltas: Sequence[TextDelta]) -> list[dict[str, Any]]:
    writer = form(found)
    chunks = [chunk for delta in deltas for chunk in writer.chunks(found.choices[0], delta, is_first=False)]
    return [*writer.opening(), *chunks, *writer.closing()]


def accumulated(events: Sequence[dict[str, Any]]) -> Any:
    """What the official client builds."""
    adapter: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
    snapshot, buffers = None, {}
    for event in events:
        snapshot = accumulate_event(event=adapter.validate_python(event), current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    return {name: value for name, value in snapshot.to_dict().items() if name != "stop_details"}


def test_the_events_in_their_order(tokenizer: Tokenizer) -> None:
    found = generation(tokenizer, cached=32)
    found.choices[0].text.num_calls = 2
    events = streamed(found, [TextDelta(parts=tuple(ALL))])
    usage = {
        "input_tokens": 4,
        "cache_creation_input_tokens": 64,
        "cache_read_input_tokens": 32,
        "output_tokens": 5,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    start = {"id": "msg_abc", "type": "message", "role": "assistant", "model": "tiny", "content": []}
    signature = events[3]["delta"]["signature"]
    assert signature

    def begin(index: int, block: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_start", "index": index, "content_block": block}

    def delta(index: int, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}

    def stop(index: int) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": index}

    assert events == [
        {"type": "message_start", "message": start | {"stop_reason": None, "stop_sequence": None, "usage": usage}},
        begin(0, {"type": "thinking", "thinking": "", "signature": ""}),
        delta(0, "thinking_delta", thinking="I must look."),
        delta(0, "signature_delta", signature=signature),
        stop(0),
        begin(1, {"type": "text", "text": ""}),
        delta(1, "text_delta", text="\n\nLet me look.\n"),
        stop(1),
        begin(2, {"type": "tool_use", "id": "toolu_0", "name": "weather", "input": {}}),
        delta(2, "input_json_delta", partial_json='{"city": "Zürich", "tags": ["a", {"b": null}]}'),
        stop(2),
        begin(3, {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}),
        stop(3),
        begin(4, {"type": "text", "text": ""}),
        delta(4, "text_delta", text="Done."),
        stop(4),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize("seed", range(30))
def test_the_client_builds_the_whole_message_from_any_pieces(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    parts = [piece for part in ALL[: rng.randint(0, len(ALL))] for piece in _cut(part, rng)]
    deltas, rest = [], parts
    while rest:
        count = rng.randint(1, 4)
        deltas.append(TextDelta(parts=tuple(rest[:count])))
        rest = rest[count:]
    found = generation(tokenizer)
    found.choices[0].text.num_calls = sum(isinstance(part, ToolCallStart) for part in parts)
    whole = form(found).whole([deltas])
    Message.model_validate(whole)
    assert accumulated(streamed(found, deltas)) == whole


def _cut(part: Part, rng: random.Random) -> list[Part]:
    if isinstance(part, ToolCallStart):
        return [part]
    pieces: list[Part] = []
    text = part.text
    while text:
        size = rng.randint(1, len(text))
        piece, text = text[:size], text[size:]
        pieces.append(
            ToolCallArguments(part.index, piece) if isinstance(part, ToolCallArguments) else type(part)(piece)
        )
    return pieces


def test_arguments_that_max_tokens_has_cut_are_given_as_far_as_they_go(tokenizer: Tokenizer) -> None:
    found = generation(tokenizer, reason=FinishReason.LENGTH)
    parts = (ToolCallStart(0, "toolu_0", "weather"), ToolCallArguments(0, '{"city": "Zürich", "days": [1, 2'))
    whole = form(found).whole([[TextDelta(parts=parts)]])
    assert whole["content"][0]["input"] == {"city": "Zürich", "days": [1, 2]}
    assert whole["stop_reason"] == "max_tokens"
    assert accumulated(streamed(found, [TextDelta(parts=parts)])) == whole


@pytest.mark.parametrize(
    ("prompt_len", "cached", "kept_page_size", "expected"),
    [
        (100, 0, 16, (4, 96, 0)),
        (100, 96, 16, (4, 0, 96)),
        (96, 80, 16, (0, 16, 80)),
        (10, 0, 16, (10, 0, 0)),
        (100, 0, 0, (100, 0, 0)),
    ],
)
def test_prompt_tokens_are_read_or_kept_or_neither(
    tokenizer: Tokenizer, prompt_len: int, cached: int, kept_page_size: int, expected: tuple[int, int, int]
) -> None:
    found = generation(tokenizer, prompt_len=prompt_len, cached=cached)
    usage = form(found, kept_page_size=kept_page_size).whole([[]])["usage"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert tuple(usage[name] for name in names) == expected
    assert sum(expected) == prompt_len


def test_an_answer_without_content_is_an_empty_message(tokenizer: Tokenizer) -> None:
    found = generation(tokenizer)
    whole = form(found).whole([[TextDelta(parts=(Content(" \n"),))]])
    assert (whole["content"], whole["stop_reason"]) == ([], "end_turn")
    assert [event["type"] for event in streamed(found, [])] == ["message_start", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (408, "timeout_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_the_types_of_this_api(status: int, kind: str) -> None:
    found = json.loads(json.dumps(error_body(Problem(status, "why"), request_id="req_1")))
    assert found == {"type": "error", "error": {"type": kind, "message": "why"}, "request_id": "req_1"}
