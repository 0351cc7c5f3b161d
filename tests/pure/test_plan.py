"""Plans on the wire, and answers of any number of cp ranks, against reading them one position at a time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from raycache.memory.moves import Moves, Unit
from raycache.types import SamplingParams, TokenLogprob
from raycache.wire.plan import Admit, Row, StepPlan, is_emitted, local_positions
from raycache.wire.results import RowResult, read_results, result_lens, result_width

token_ids = st.integers(0, 2**31 - 1)
page_ids = st.dictionaries(
    st.sampled_from(["full", "window"]),
    st.lists(st.integers(-1, 2**31 - 1), max_size=5).flatmap(lambda ids: st.sampled_from([ids, array("q", ids)])),
    max_size=2,
)
optional_counts = st.none() | st.integers(0, 20)


def packed(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0.001, 1),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=3),
    stop=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=2).map(tuple),
    stop_token_ids=st.lists(token_ids, max_size=3).map(tuple),
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    ignore_eos=st.booleans(),
    logprobs=optional_counts,
    prompt_logprobs=optional_counts,
)
some_tokens = st.lists(token_ids, min_size=1, max_size=30).map(packed)
rows = st.builds(
    Row,
    slot=st.integers(0, 1000),
    start=st.integers(0, 2**40),
    tokens=some_tokens,
    new_pages=page_ids,
    output_position=st.integers(-1, 10**6),
    targets=st.just(b"") | some_tokens,
)
admits = st.builds(
    Admit,
    slot=st.integers(0, 1000),
    pages=page_ids,
    sampling=samplings,
    seed=st.integers(-(2**63), 2**63 - 1),
    prompt=st.just(b"") | some_tokens,
    output=st.just(b"") | some_tokens,
)
plans = st.builds(
    StepPlan,
    step=st.integers(1, 2**40),
    rows=st.lists(rows, max_size=4),
    admits=st.lists(admits, max_size=3),
    num_top=optional_counts,
    is_last=st.booleans(),
)


@given(plans)
def test_a_plan_arrives_as_it_was_sent(plan: StepPlan) -> None:
    assert with_lists(StepPlan.unpack(plan.pack())) == with_lists(plan)


def with_lists(plan: StepPlan) -> StepPlan:
    """The plan with lists of page ids, of whatever type they are."""
    admits = [replace(each, pages={space: list(ids) for space, ids in each.pages.items()}) for each in plan.admits]
    rows = [replace(each, new_pages={space: list(ids) for space, ids in each.new_pages.items()}) for each in plan.rows]
    return replace(plan, admits=admits, rows=rows)


moved = st.builds(
    Unit,
    st.sampled_from(["full", "window", "state"]),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**64 - 1),
)


@given(st.lists(moved, max_size=12), st.lists(moved, max_size=12))
def test_moves_arrive_as_they_were_sent_one_batch_per_space(first: list[Unit], second: list[Unit]) -> None:
    saves, loads = [Moves.of(7, first), Moves.of(8, second)], [Moves.of(3, second)]
    plan = StepPlan.unpack(StepPlan(1, saves=saves, loads=loads, is_saved_first=True).pack())
    for moves, number, units in zip((*plan.saves, *plan.loads), (7, 8, 3), (first, second, second), strict=True):
        assert moves.number == number
        spaces = dict.fromkeys(unit.space for unit in units)
        assert moves.units == [unit for space in spaces for unit in units if unit.space == space]
        assert list(moves.by_space()) == list(spaces)


def test_growing_tokens_are_sent_as_they_are_now() -> None:
    tokens = bytearray(packed([1, 2]))
    plan = StepPlan(1, [Row(0, 0, tokens)])
    sent = plan.pack()
    tokens += packed([3])
    assert StepPlan.unpack(sent).rows[0].num_tokens == 2


@pytest.mark.parametrize("is_last", [True, False])
def test_a_heartbeat_is_an_empty_plan_with_an_empty_answer(is_last: bool) -> None:
    beat = StepPlan.unpack(StepPlan(7, is_last=is_last).pack())
    assert (beat.step, list(beat.rows), list(beat.admits), beat.is_last) == (7, [], [], is_last)
    for cp in (1, 2, 4):
        assert result_lens(beat, cp_size=cp) == [0] * cp
        assert list(read_results(beat, [np.empty((0, result_width(beat)), np.int64)] * cp)) == []


# --- answers ----------------------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> StepPlan:
    """Plans as the scheduler makes them: scored positions end before the sampled one, drafts are behind it."""
    made = []
    for slot in range(draw(st.integers(0, 6))):
        count = draw(st.just(1) | st.integers(1, 40))
        is_sampled = draw(st.booleans())
        num_targets = draw(st.sampled_from([0, count - is_sampled]))
        num_drafts = draw(st.integers(0, min(count - 1, 7))) if is_sampled and not num_targets else 0
        made.append(
            Row(
                slot=slot,
                start=draw(st.integers(0, 100)),
                tokens=packed(range(count)),
                output_position=draw(st.integers(0, 9)) if is_sampled else -1,
                targets=packed(range(1000, 1000 + num_targets)),
                num_drafts=num_drafts,
            )
        )
    wants_logprobs = any(row.num_targets for row in made) or draw(st.booleans())
    return StepPlan(1, made, num_top=draw(st.integers(0, 3)) if wants_logprobs else None)


def line_of(plan: StepPlan, row: int, position: int) -> tuple[int, TokenLogprob | None]:
    """What a made-up model finds at a position: a token, its log-probability and alternatives."""
    place = 1000 * row + position
    if plan.num_top is None:
        return place, None
    top = tuple((place + i, -place / 7 - i) for i in range(plan.num_top))
    return place, TokenLogprob(place, -place / 3, top)


def answer_of(plan: StepPlan, *, cp_rank: int, cp_size: int) -> NDArray[np.int64]:
    """The answer of a cp rank, written number by number as `result_width` lays it out."""
    lines: list[list[int]] = []
    for i, positions in enumerate(local_positions(plan, cp_rank=cp_rank, cp_size=cp_size)):
        for position in positions[is_emitted(plan.rows[i], positions)].tolist():
            token, entry = line_of(plan, i, position)
            line = [token]
            if entry is not None:
                floats = [entry.logprob, *(value for _, value in entry.top)]
                bits = np.array(floats, np.float64).view(np.int64).tolist()
                line += [bits[0], *(token_id for token_id, _ in entry.top), *bits[1:]]
            lines.append(line)
    return np.array(lines, np.int64).reshape(len(lines), result_width(plan))


def results_of(plan: StepPlan) -> list[RowResult]:
    """What all answers together must say: per row every target in order, and the token after the last one."""
    results = []
    for i, row in enumerate(plan.rows):
        scores = [entry for at in range(row.num_targets) if (entry := line_of(plan, i, at)[1]) is not None]
        result = RowResult(scores=scores)
        if row.output_position >= 0:
            for at in range(row.first_sampled, row.num_tokens):
                token, entry = line_of(plan, i, at)
                result.tokens.append(token)
                result.logprobs += [] if entry is None else [entry]
        results.append(result)
    return results


@given(batches(), st.sampled_from([1, 2, 3, 4, 8]))
def test_answers_of_any_number_of_ranks_join_to_the_same_results(plan: StepPlan, cp: int) -> None:
    answers = [answer_of(plan, cp_rank=rank, cp_size=cp) for rank in range(cp)]
    counts = result_lens(plan, cp_size=cp)
    assert counts == [len(answer) for answer in answers]
    assert sum(counts) == sum(row.num_targets + (row.output_position >= 0) * (1 + row.num_drafts) for row in plan.rows)
    assert list(read_results(plan, answers)) == results_of(plan)


@given(batches(), st.sampled_from([1, 2, 3, 4, 8]))
def test_every_new_token_is_computed_by_one_cp_rank(plan: StepPlan, cp: int) -> None:
    parts = [local_positions(plan, cp_rank=rank, cp_size=cp) for rank in range(cp)]
    for i, row in enumerate(plan.rows):
        assert sorted(np.concatenate([part[i] for part in parts]).tolist()) == list(range(row.num_tokens))


def test_log_probabilities_keep_their_bits() -> None:
    plan = StepPlan(1, [Row(0, 0, packed([5]), output_position=0)], num_top=2)
    exact = [-1e-300, float("-inf"), -0.1]
    bits = np.array(exact).view(np.int64).tolist()
    (result,) = read_results(plan, [np.array([[9, bits[0], 3, 4, bits[1], bits[2]]], np.int64)])
    assert result.logprobs == [TokenLogprob(9, exact[0], ((3, exact[1]), (4, exact[2])))]
