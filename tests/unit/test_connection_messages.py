"""Messages between front ends and engines: they come as they were sent, and nothing else does."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import msgpack
import numpy as np
import pytest

from actors.answers import ActorLostError
from actors.messages import pack, unpack
from raycache.errors import PromptTooLongError, QueueFullError, RankLostError, RayCacheError, RequestError
from raycache.types import CacheAction, FinishReason, GenerateRequest, Miss, RequestOutput, SamplingParams, TokenLogprob

_TOP = ((5, -0.5), (7, -1.25))

SENT = [
    "cancel-me",
    [],
    [("", "a line of the log"), ("a", RequestOutput("a"))],
    GenerateRequest("a", array("i", [1, 2, 2**31 - 1])),
    GenerateRequest(
        "b",
        (1, 2, 3),
        SamplingParams(
            temperature=0.5,
            seed=2**62,
            logit_bias={3: -100.0, 5: 1.5},
            stop=("x", "\ud800"),
            stop_token_ids=(4,),
            max_tokens=7,
            logprobs=0,
            grammar="root ::= 'a'",
        ),
        priority=-3,
        timeout_s=1.5,
        cache_salt="tenant",
        output=[9, 8],
        page_chain=bytes(range(64)),
    ),
    RequestOutput(
        "c",
        (1, 2),
        logprobs=(TokenLogprob(1, -0.25, _TOP), TokenLogprob(2, -math.inf)),
        prompt_logprobs=(None, TokenLogprob(3, -0.125, _TOP[:1])),
        finish_reason=FinishReason.STOP,
        cached_tokens=16,
        cached_by_tier={"host": 16},
        miss=Miss.STATE_MISSING,
        queued_s=0.1,
    ),
    RequestOutput("e", (7,), None, None, None, 16, "state", {"host": 16}, Miss.STATE_MISSING, 0.1, 2, 5, 3),
    RequestOutput("f", (7,), cached_by_tier=MappingProxyType({"host": 16})),
    RequestOutput("d", finish_reason=FinishReason.ERROR, error="out of memory", prompt_logprobs=(None,), logprobs=()),
]


@pytest.mark.parametrize("sent", SENT, ids=lambda sent: type(sent).__name__)
def test_messages_come_as_they_were_sent(sent: Any) -> None:
    found = unpack(pack(sent))
    assert found == sent and type(found) is type(sent)
    if isinstance(sent, GenerateRequest):
        assert type(found.prompt) is type(sent.prompt) and type(found.output) is type(sent.output)
    if isinstance(sent, RequestOutput):
        assert found.finish_reason is sent.finish_reason and found.miss is sent.miss


@pytest.mark.parametrize(
    "error",
    [
        RequestError("no such thing", field="prompt"),
        PromptTooLongError("too long", field="prompt", num_tokens=9, limit=8),
        QueueFullError(7, retry_after_s=3.0),
        RankLostError(3, "tp 1", 17, "it died"),
        ActorLostError("the engine actor died"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_their_class_text_and_attributes(error: RayCacheError) -> None:
    (_, found), number = unpack(pack([("a", error), 1]))
    assert type(found) is type(error) and str(found) == str(error) and vars(found) == vars(error) and number == 1


def test_an_error_of_another_class_comes_as_its_base() -> None:
    class SpecialError(RequestError):
        """Somewhere else."""

    error = SpecialError("special", field="n")
    error.where = object()  # type: ignore[attr-defined]
    found = unpack(pack(error))
    assert type(found) is RequestError and str(found) == "special" and "object" in found.where


def test_numbers_and_mappings_of_other_kinds_become_plain() -> None:
    sent = [np.int32(3), np.float32(0.5), MappingProxyType({1: "a"}), True, None]
    assert unpack(pack(sent)) == [3, 0.5, {1: "a"}, True, None]


@pytest.mark.parametrize("make", [object, lambda: CacheAction.CLEAR, lambda: {1, 2}, lambda: print, lambda: 1j])
def test_nothing_else_can_be_sent(make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError):
        pack([make()])


@pytest.mark.parametrize(
    "packed", [b"", b"\xc1", msgpack.packb(msgpack.ExtType(77, b"\x90")), pack([1])[:-1], pack(1) + b"x"]
)
def test_what_is_no_message_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError):  # msgpack's own errors derive from it
        unpack(packed)


def test_fields_of_an_increment_are_sent_each_in_its_place() -> None:
    """By the names of the fields: a new one must not be lost."""
    values = {field.name: f"value of {field.name}" for field in fields(RequestOutput)}
    values |= {"token_ids": (1,), "miss": Miss.TIMEOUT, "cached_by_tier": {"host": 1}}
    values |= dict.fromkeys(("logprobs", "prompt_logprobs", "finish_reason", "error"))
    sent: Any = RequestOutput(**values)
    assert unpack(pack(sent)) == sent


def test_the_logprobs_of_a_long_prompt_travel_as_columns() -> None:
    scores = (None, *(TokenLogprob(at, -0.5, _TOP) for at in range(20_000)))
    packed = pack(RequestOutput("a", prompt_logprobs=scores))
    assert unpack(packed).prompt_logprobs == scores
    assert len(packed) < 60 * len(scores)
