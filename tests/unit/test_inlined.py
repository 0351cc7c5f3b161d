"""Requests travel with actor calls, whatever their length."""

from __future__ import annotations

import os
import pickle
from array import array

import pytest

from actors.inlined import inlined, joined
from raycache.types import GenerateRequest, SamplingParams

_INLINE_BYTES = 100 * 1024
"""Ray's default of max_direct_call_object_size."""


@pytest.mark.parametrize("num_tokens", [1, 10, 65_536, 1_000_000])
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_request_arrives_as_it_was_sent_in_parts_that_travel_inline(num_tokens: int, page_size: int) -> None:
    prompt = array("i", range(num_tokens))
    sampling = SamplingParams(stop=("a", "ß"), logit_bias={5: 1.5}, seed=3)
    sent = GenerateRequest("one", prompt, sampling, output=(1, 2), page_chain=os.urandom(num_tokens // page_size * 32))
    rest, parts = inlined(sent)
    assert joined(rest, parts) == sent
    assert max(len(pickle.dumps(each, protocol=5)) for each in (rest, *parts)) < _INLINE_BYTES - 1024
    assert bool(parts) == (num_tokens > 10)


def test_ids_that_are_not_checked_yet_are_sent_as_they_are() -> None:
    sent = GenerateRequest("one", [2**40] * 50_000)
    assert inlined(sent) == (sent, [])
