"""Rows whose draft tokens ranks make, planned before it is known how many are accepted: the same tokens as without."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raycache.decider.batch import Batch
from raycache.llm import LLM
from raycache.types import RequestOutput
from raycache.wire.results import RowResult
from tests.selection import mostly_long
from tests.unit.test_draft_models import (
    GREEDY,
    NUM_TOKENS,
    PROMPTS,
    SAMPLED,
    SOME,
    TWO,
    Pair,
    complete,
    open_llm,
    pairs,
)

__all__ = ["pairs"]  # a fixture


def watch(llm: LLM, pair: Pair | None = None) -> Counter[str]:
    """Count rows in decode of some kinds, and assert that ranks draft what the pair's twin does."""
    counted = Counter[str]()
    scheduler = llm.engine._scheduler
    take = scheduler.complete

    def watched(batch: Batch, results: list[RowResult], *rest: Any) -> list[RequestOutput]:
        going = [run.request for run in batch.runs]
        outputs = take(batch, results, *rest)
        for request, row, result in zip(going, batch.rows, results, strict=True):
            counted["decode"] += row.output_position > 0
            counted["fed"] += row.is_fed
            counted["fed with drafts"] += row.is_fed and row.num_drafts > 0
            if pair is not None and result.next_drafts and request.run is not None:
                known = np.frombuffer(bytes(request.tokens), np.int32).tolist()
                assert result.next_drafts == pair.drafted(known, len(result.next_drafts))
        return outputs

    scheduler.complete = watched  # type: ignore[method-assign]
    return counted


@pytest.mark.parametrize("name", mostly_long(SOME, but=["small", *TWO]))
def test_tokens_are_those_without_drafts_and_drafts_those_of_a_slow_twin(pairs: dict[str, Pair], name: str) -> None:
    pair = pairs[name]
    with open_llm(pair.target) as plain:
        texts = complete(plain, PROMPTS)
    with pair.open(overlap="on") as llm:
        counted = watch(llm, pair)
        for _ in range(2):
            assert complete(llm, PROMPTS) == texts
        stats = llm.stats()
        assert stats.cached_tokens > 0
        assert 0.2 < sum(stats.accepted.values()) / sum(stats.drafted.values()) < 0.9
        # The first row in decode follows a prompt whose end was planned before it was known to be the end.
        assert counted["fed"] == counted["decode"]
        assert counted["fed with drafts"] > 0.7 * counted["decode"]


@pytest.mark.parametrize("page_size", [4, pytest.param(16, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", mostly_long(SOME, but=TWO))
def test_samples_stops_and_preemptions_are_those_without_drafts(
    pairs: dict[str, Pair], name: str, page_size: int
) -> None:
    pair, sizes = pairs[name], {"page_size": page_size, "num_pages": 1024 // page_size}
    with open_llm(pair.target, **sizes) as plain:
        greedy, sampled = complete(plain, PROMPTS), complete(plain, PROMPTS, SAMPLED)
        # Ends within a row: at a token that first comes at some place of the output.
        outputs = [text[-NUM_TOKENS:] for text in greedy]
        last = [next(token for token in output[7:] if output.index(token) >= 7) for output in outputs]
        wishes = [replace(GREEDY, stop_token_ids=(token,), max_tokens=30 + i) for i, token in enumerate(last)]
        wishes += [replace(SAMPLED, max_tokens=count) for count in (1, 2, 3, 5, 17)]
        asked = [*PROMPTS, *[PROMPTS[0]] * 5]
        ended = [list(found.token_ids) for found in plain.generate(asked, wishes)]
    for pages in (sizes["num_pages"], 170 // page_size):
        with pair.open(overlap="on", **{**sizes, "num_pages": pages}) as llm:
            counted = watch(llm)
            assert complete(llm, PROMPTS, SAMPLED) == sampled
            assert complete(llm, PROMPTS) == greedy
            assert [list(found.token_ids) for found in llm.generate(asked, wishes)] == ended
            llm.check()
            assert counted["fed with drafts"] > 0
    assert llm.stats().preemptions > 0


def test_logprobs_and_penalties_are_those_of_steps_planned_one_by_one(pairs: dict[str, Pair]) -> None:
    wishes = [replace(GREEDY, logprobs=2), replace(SAMPLED, presence_penalty=0.7), replace(SAMPLED, logprobs=0)]
    found = []
    for overlap in ("off", "on"):
        with pairs["small"].open(overlap=overlap) as llm:
            found.append(llm.generate(PROMPTS, wishes))
            llm.check()
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.logprobs is None) == (other.logprobs is None)
        for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert mine.token_id == theirs.token_id and [i for i, _ in mine.top] == [i for i, _ in theirs.top]
            assert abs(mine.logprob - theirs.logprob) < 1e-3
